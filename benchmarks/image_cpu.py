"""A reply about an image on a CPU, against transformers: `python -m benchmarks.image_cpu [--tiles N]`.

A model of SmolVLM-256M's shape has random weights, and its tiles 512 x 512 pixels. Both compute in FP32, in one process
and in turn; every second round begins with the other one. The table shows medians of the time to the first token and of
the whole reply, and the ratio of transformers' to ours. Every round has new pixels. Needs transformers.
"""

import argparse
import json
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.report import markdown
from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.images.tower_loading import open_images
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.models.registry import load_model
from emberline.protocol.images import PromptImage
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.vision_config import read_tower_config

IMAGE_TOKEN, SIDE, ROWS = 49190, 512, 64
TEXT = {
    "model_type": "llama", "vocab_size": 49280, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": SIDE, "patch_size": 16,
}  # fmt: skip


def save_model(folder: Path) -> Any:
    """Save a model of SmolVLM-256M's shape with random weights, and return it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "smolvlm", text_config=TEXT, vision_config=VISION, scale_factor=4, image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    model.save_pretrained(folder)
    processor = {"max_image_size": {"longest_edge": SIDE}, "size": {"longest_edge": 4 * SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


class Engine:
    """Our engine on the CPU, in this process."""

    def __init__(self, folder: Path, threads: int) -> None:
        model = load_model(open_checkpoint(folder), "cpu", threads=threads)
        args = Namespace(
            model=folder, rank=0, random_weights=None, deterministic=False, threads=threads, max_running=4,
            token_budget=512,
        )  # fmt: skip
        config = read_tower_config(folder)
        images = None if config is None else open_images(config, args, model, "cpu")
        assert images is not None, "the model takes images"
        limits, n_blocks = Limits(4096, TEXT["vocab_size"], (), 4, 512), [300] * len(model.kv_groups)
        scheduler = build_scheduler(KVCache(model.kv_groups, n_blocks, chunk=512), limits, "m", images=images.feature)
        self.loop = StepLoop(scheduler, TorchRunner(model, n_blocks, limits, images=images.rows))

    def reply(self, ids: list[int], tiles: int, pixels: bytes, name: str, n_tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and to the last."""
        image = PromptImage(
            name.encode().ljust(16), ids.index(IMAGE_TOKEN), len(ids) - 8, ((SIDE, SIDE),) * tiles, pixels
        )
        sampling = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True)
        began, first = time.perf_counter(), 0.0
        self.loop.submit(EngineRequest(id=name, prompt_ids=pack(ids), sampling=sampling, images=(image,)), 0.0)
        while self.loop.busy:
            if any(delta.token_ids for delta in self.loop.step(0.0)) and not first:
                first = time.perf_counter() - began
        return first, time.perf_counter() - began


def reply_of_transformers(model: Any, ids: list[int], tiles: int, pixels: bytes, n_tokens: int) -> float:
    """Seconds to the last of n_tokens."""
    began = time.perf_counter()
    raw = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(1, tiles, SIDE, SIDE, 3)
    values, mask = (raw.permute(0, 1, 4, 2, 3) / 255 - 0.5) / 0.5, torch.ones(1, len(ids), dtype=torch.long)
    with torch.inference_mode():
        model.generate(
            input_ids=torch.tensor([ids]), pixel_values=values, attention_mask=mask,
            max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False,
        )  # fmt: skip
    return time.perf_counter() - began


def main() -> None:
    """Measure both in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=1, help="of the image; SmolVLM's processor makes 17")
    parser.add_argument("--tokens", type=int, default=16, help="of the reply")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    ids = [*range(40, 60), *[IMAGE_TOKEN] * (ROWS * asked.tiles), *range(100, 108)]
    figures: dict[str, list[float]] = {"ours_first": [], "ours": [], "transformers_first": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        engine = Engine(Path(folder), asked.threads)
        for number in range(asked.rounds + 1):
            generator = torch.Generator().manual_seed(number)
            shape = (3 * SIDE * SIDE * asked.tiles,)
            pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).numpy().tobytes()
            theirs = list[float]()
            for peer in (False, True) if number % 2 else (True, False):
                if peer:
                    theirs = [reply_of_transformers(model, ids, asked.tiles, pixels, n) for n in (1, asked.tokens)]
                else:
                    first, whole = engine.reply(ids, asked.tiles, pixels, f"r{number}", asked.tokens)
            if number:  # the first round warms up
                for name, value in zip(figures, (first, whole, *theirs)):
                    figures[name].append(value)
    medians = {name: median(values) for name, values in figures.items()}
    ratios = {
        "first": median(b / a for a, b in zip(figures["ours_first"], figures["transformers_first"])),
        "whole": median(b / a for a, b in zip(figures["ours"], figures["transformers"])),
    }
    rows = [
        [what, f"{medians[ours]:.2f}", f"{medians[theirs]:.2f}", f"{ratios[ratio]:.2f}"]
        for what, ours, theirs, ratio in (
            ("first token", "ours_first", "transformers_first", "first"),
            ("whole reply", "ours", "transformers", "whole"),
        )
    ]
    print(markdown(["", "ours, s", "transformers, s", "ratio"], rows))
    print(json.dumps({"tiles": asked.tiles, "tokens": asked.tokens, "medians_s": medians, "ratios": ratios}))


if __name__ == "__main__":
    main()
