"""Engines over small random models with a vision tower, and what transformers answers to the same prompts."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.images.prompt_images import PromptImages
from emberline.engine.images.row_cache import RowCache
from emberline.engine.images.step_images import ImageRows
from emberline.engine.images.tower_loading import Images, open_images
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.runners.gpu.runner import GpuRunner
from emberline.engine.worker.build import build_scheduler
from emberline.kernels import draft_chain
from emberline.kv.cache import KVCache
from emberline.models.registry import load_model
from emberline.models.vision.loading import load_tower
from emberline.protocol.frames import EngineLoad
from emberline.protocol.images import ImageProcessor, PromptImage
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack, unpack
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.image_settings import read_image_processor
from emberline.weights.vision_config import read_tower_config
from tests.engine.runners.gpu.host_sampler import HostKernels, HostTable
from tests.models.vision.small_vision_models import TEXT

# Width and height of the tiles of three images.
TILES: dict[str, list[list[tuple[int, int]]]] = {
    "idefics3": [[(32, 32)], [(32, 32)] * 3, [(32, 32)]],
    "smolvlm": [[(32, 32)] * 2, [(32, 32)] * 5, [(32, 32)]],
    "gemma3": [[(32, 32)]] * 3,
    "mistral3": [[(48, 32)], [(16, 64)], [(8, 8)]],
    "qwen3_vl": [[(40, 24)], [(16, 64)], [(32, 32)]],
    "kimi_k25": [[(40, 24)], [(16, 64)], [(32, 32)]],
}
_BREAK = 89  # a token between the rows of an image, or between its tiles


def processor_of(folder: Path) -> ImageProcessor:
    processor = read_image_processor(folder)
    assert processor is not None
    return processor


class Prompt:
    """Text and images in turn."""

    def __init__(self, folder: Path, family: str, images: Sequence[int], seed: int = 0, tail: int = 9) -> None:
        """images: numbers in TILES. Two images of one number differ if their seeds do."""
        self.folder, self.family = folder, family
        self.token_id = processor_of(folder).image_token_id
        processor, generator = processor_of(folder), torch.Generator().manual_seed(seed)
        self.ids: list[int] = [(7 * i + 3) % 80 for i in range(11)]
        self.images: list[PromptImage] = []
        for n in images:
            tiles = tuple(TILES[family][n])
            pixels = torch.randint(0, 256, (3 * sum(w * h for w, h in tiles),), dtype=torch.uint8, generator=generator)
            start = len(self.ids)
            for tile in tiles:
                width, height = tile[0] // processor.cell, tile[1] // processor.cell
                if family == "mistral3":
                    self.ids += ([self.token_id] * width + [_BREAK]) * height
                else:
                    self.ids += [self.token_id] * (width * height) + [_BREAK] * (len(tiles) > 1)
            end = len(self.ids) - (self.ids[-1] == _BREAK)
            digest = bytes([n, seed] * 8)
            self.images.append(PromptImage(digest, start, end, tiles, pixels.numpy().tobytes()))
            self.ids += [(5 * i + 1) % 80 for i in range(3)]
        self.ids += [(11 * i + 2) % 80 for i in range(tail)]

    def add_pixels(self, tiles: tuple[tuple[int, int], ...], pixels: bytes) -> None:
        """Add an image whose tokens the ids have already, or will have."""
        self.images.append(PromptImage(b"", 0, 0, tiles, pixels))

    def request(self, name: str, n: int = 6, **more: Any) -> EngineRequest:
        """A request for a greedy reply of n tokens."""
        bias = {self.token_id: -100.0}  # transformers would want another image
        sampling = SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, logit_bias=bias, logprobs=0)
        return EngineRequest(id=name, prompt_ids=pack(self.ids), sampling=sampling, images=tuple(self.images), **more)

    def expected(self, model: Any, n: int = 6) -> list[int]:
        """The greedy reply of transformers, which computes everything again for every token. `logprobs` has its
        log-probabilities then."""
        ids, self.logprobs = list(self.ids), []
        for _ in range(n):
            logits = self.logits(model, ids)[-1]
            allowed = logits.clone()
            allowed[self.token_id] = -torch.inf
            ids.append(int(allowed.argmax()))
            self.logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
        return ids[len(self.ids) :]

    def logits(self, model: Any, ids: list[int]) -> torch.Tensor:  # float32 [tokens, vocab]
        """The logits of transformers after each of the tokens, which begin with the prompt's."""
        is_image = torch.tensor([[token_id == self.token_id for token_id in ids]]).long()
        more = {"qwen3_vl": {"mm_token_type_ids": is_image}, "gemma3": {"token_type_ids": is_image}}
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([ids]), **self._pixels(), **more.get(self.family, {}))
        return out.logits[0].float()  # type: ignore[no-any-return]

    def _pixels(self) -> dict[str, torch.Tensor]:
        """The images as transformers wants them."""
        processor, found = processor_of(self.folder), list[torch.Tensor]()
        mean, std = torch.tensor(processor.mean)[:, None, None], torch.tensor(processor.std)[:, None, None]
        for image in self.images:
            parts = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).split(
                [3 * w * h for w, h in image.tiles]
            )
            for (width, height), part in zip(image.tiles, parts):
                found.append((part.view(height, width, 3).permute(2, 0, 1) / 255 - mean) / std)
        if self.family in ("idefics3", "smolvlm"):
            return {"pixel_values": torch.stack(found)[None]}
        if self.family == "gemma3":
            return {"pixel_values": torch.stack(found)}
        sizes = torch.tensor([pixels.shape[1:] for pixels in found])
        if self.family == "mistral3":
            height, width = sizes.amax(0).tolist()
            padded = [
                torch.nn.functional.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in found
            ]
            return {"pixel_values": torch.stack(padded), "image_sizes": sizes, "vision_feature_layer": -1}  # type: ignore[dict-item]
        grids = torch.cat([torch.ones(len(found), 1, dtype=torch.int64), sizes // 4], 1)
        patches = torch.cat([_patches(each, self.family) for each in found])
        return {"pixel_values": patches, "image_grid_thw": grids}


def _patches(pixels: torch.Tensor, family: str) -> torch.Tensor:
    height, width = pixels.shape[1] // 4, pixels.shape[2] // 4
    if family == "qwen3_vl":
        squares = pixels.view(3, height // 2, 2, 4, width // 2, 2, 4).permute(1, 4, 2, 5, 0, 3, 6)
        return squares.reshape(-1, 3, 1, 4, 4).expand(-1, 3, 2, 4, 4).reshape(-1, 96)
    return pixels.view(3, height, 4, width, 4).permute(1, 3, 0, 2, 4).reshape(-1, 3, 4, 4)


class ChainKernels(HostKernels):
    """With those of a draft model."""

    begin_chain = staticmethod(draft_chain.begin_chain)

    def draw_drafts(self, logits: Any, table: Any, target_ids: Any, step: int, drafts: Any, to: Any) -> None:
        """Draw the next draft of each row."""
        draft_chain.draw_drafts(logits, table.rows.__getitem__, target_ids, TEXT["vocab_size"], step, drafts, to)


def in_pieces(images: Images, folder: Path) -> Images:
    """The same, encoding piece by piece beside sequences that decode."""
    tower, processor = load_tower(folder, device="cpu", dtype=torch.float32), images.processor
    assert tower is not None
    cache = RowCache(tower, processor.n_rows, 1 << 20, typical=(32, 32))
    return Images(processor, ImageRows(cache, processor, mrope=images.rows.mrope), PromptImages(processor, cache))


class SmallEngine:
    """A model of a folder with its tower, on one of the runners."""

    def __init__(
        self,
        folder: Path,
        runner: type[Any] = TorchRunner,
        token_budget: int = 64,
        n_blocks: int = 40,
        head: Any = None,
        speculation: Any = None,
        pieces: bool = False,
    ) -> None:
        """head: a draft model for a GpuRunner. pieces: a step beside others encodes one block of the tower."""
        model = load_model(open_checkpoint(folder), "cpu", threads=1)
        self.backend = model.backend
        args = Namespace(
            model=folder,
            rank=0,
            random_weights=None,
            deterministic=False,
            threads=1,
            max_running=4,
            token_budget=token_budget,
        )
        config = read_tower_config(folder)
        assert config is not None
        images = open_images(config, args, model, "cpu")
        assert images is not None
        if pieces:
            images = in_pieces(images, folder)
        limits = Limits(16 * (n_blocks - 1), TEXT["vocab_size"], (), args.max_running, token_budget)
        groups = (*model.kv_groups, *(() if head is None else head.kv_groups))
        sizes = [n_blocks] * len(groups)
        cache = KVCache(groups, sizes, chunk=token_budget)
        scheduler = build_scheduler(cache, limits, "small", speculation=speculation, images=images.feature)
        if runner is GpuRunner:
            made = GpuRunner(
                model, sizes, limits, "cpu", ChainKernels(), HostTable(), speculates=head is not None, head=head,
                images=images.rows,
            )  # fmt: skip
            self.loop = StepLoop(scheduler, made, steps_in_flight=2)
        else:
            self.loop = StepLoop(scheduler, TorchRunner(model, sizes, limits, images=images.rows))

    @property
    def load(self) -> EngineLoad:
        return self.loop.load

    def replies(self, *requests: EngineRequest) -> list[list[int]]:
        """Token ids of the replies to requests that arrive together."""
        found: dict[str, list[int]] = {each.id: [] for each in requests}
        self.logprobs: dict[str, list[float]] = {each.id: [] for each in requests}
        for each in requests:
            self.loop.submit(each, 0.0)
        for _ in range(500):
            if not self.loop.busy:
                return list(found.values())
            for delta in self.loop.step(0.0):
                assert delta.error is None, delta.error
                found[delta.id] += unpack(delta.token_ids)
                self.logprobs[delta.id] += [entry.logprob for entry in delta.logprobs or ()]
        raise AssertionError("it never ends")
