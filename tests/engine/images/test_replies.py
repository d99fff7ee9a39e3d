"""Replies about images are those of transformers, whatever the family, the runner and the schedule."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from emberline.engine.images.places import ImagePlaces
from emberline.engine.images.row_cache import RowCache
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.runners.gpu.runner import GpuRunner
from emberline.models.draft_model import DraftModel
from emberline.models.registry import load_model
from emberline.models.vision.loading import load_tower
from emberline.protocol.errors import BadInput
from emberline.protocol.token_ids import unpack
from emberline.weights.checkpoint import open_checkpoint
from tests.engine.images.small_engine import Prompt, SmallEngine, processor_of
from tests.engine.runners.gpu.test_draft_model_chain import Drafting
from tests.models.vision.small_vision_models import MODELS, TEXT, save_vision_model

SLOW = pytest.mark.slow
FAMILIES = ["idefics3", *(pytest.param(family, marks=SLOW) for family in ("smolvlm", "mistral3", "kimi_k25"))]
DEMANDING = ["gemma3", "qwen3_vl"]  # attention both ways inside an image; M-RoPE and deepstack
SHORT_CHUNKS = 24  # tokens of a step, fewer than the prompts have


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The models that were saved so far, by family."""
    return {}


@pytest.fixture
def model(family: str, folders: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    if family not in folders:
        folder = tmp_path_factory.mktemp(family)
        folders[family] = folder, save_vision_model(folder, family)
    return folders[family]


@pytest.mark.parametrize("family", [*FAMILIES, *DEMANDING])
def test_replies_equal_transformers(model: tuple[Path, Any], family: str) -> None:
    """Three prompts at once, of one, two and three images."""
    folder, reference = model
    prompts = [Prompt(folder, family, images, seed) for seed, images in enumerate(([0], [1, 2], [0, 1, 2]))]
    expected = [prompt.expected(reference) for prompt in prompts]
    for runner in (TorchRunner, GpuRunner):
        engine = SmallEngine(folder, runner)
        assert engine.replies(*(prompt.request(f"r{n}") for n, prompt in enumerate(prompts))) == expected
        for found, prompt in zip(engine.logprobs.values(), prompts, strict=True):
            assert found == pytest.approx(prompt.logprobs, abs=1e-4)  # 1e-3 if images were not seen both ways


@pytest.mark.parametrize("runner", [TorchRunner, GpuRunner])
@pytest.mark.parametrize("family", ["idefics3"])
def test_an_engine_lets_go_of_the_pixels(model: tuple[Path, Any], family: str, runner: type[Any]) -> None:
    prompt, engine = Prompt(model[0], family, [0], seed=3), SmallEngine(model[0], runner)
    pixels = prompt.images[0].pixels
    before = sys.getrefcount(pixels)
    request = prompt.request("r")
    engine.replies(request)
    del request
    prompt.images.clear()
    assert sys.getrefcount(pixels) == before - 1


@pytest.mark.parametrize("runner", [TorchRunner, GpuRunner])
@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "gemma3"])
def test_chunks_and_cached_prefixes_that_end_inside_an_image(
    model: tuple[Path, Any], family: str, runner: type[Any]
) -> None:
    folder, _ = model
    prompt = Prompt(folder, family, [0, 2], seed=5)
    inside = prompt.images[1]
    (expected,) = SmallEngine(folder, runner, token_budget=128).replies(prompt.request("whole"))
    engine = SmallEngine(folder, runner, token_budget=SHORT_CHUNKS)
    assert engine.replies(prompt.request("chunks")) == [expected]
    n_encoded = engine.load.image_tiles_encoded
    # A turn whose blocks are cached up to a place inside the second image, which is computed from there on.
    cut = (inside.start // 16 + 1) * 16
    assert inside.start < cut < inside.end
    engine = SmallEngine(folder, runner, token_budget=SHORT_CHUNKS)
    other = Prompt(folder, family, [0, 2], seed=5, tail=0)
    other.ids = [*prompt.ids[: inside.end], 1]
    engine.replies(other.request("other", 1))
    assert engine.replies(prompt.request("hit")) == [expected]
    assert engine.load.cached_tokens >= cut
    assert engine.load.image_tiles_encoded == n_encoded == 2


@pytest.mark.parametrize("family", ["idefics3"])
def test_other_pixels_have_other_blocks_and_replies(model: tuple[Path, Any], family: str) -> None:
    folder, reference = model
    engine = SmallEngine(folder)
    first, second = (Prompt(folder, family, [1], seed) for seed in (1, 2))
    assert first.ids == second.ids
    replies = [engine.replies(prompt.request(f"r{n}"))[0] for n, prompt in enumerate((first, second, first, second))]
    assert replies == 2 * [first.expected(reference), second.expected(reference)]
    assert replies[0] != replies[1]
    load = engine.load
    assert (load.image_tiles_encoded, load.image_tiles_reused) == (6, 6)
    assert load.cached_tokens >= 2 * 16 * (len(first.ids) // 16 - 1) - 32


@pytest.mark.parametrize("family", ["idefics3"])
def test_a_returning_conversation_encodes_nothing(model: tuple[Path, Any], family: str) -> None:
    folder, reference = model
    engine, prompt = SmallEngine(folder), Prompt(folder, family, [1], seed=3)
    (reply,) = engine.replies(prompt.request("turn-1"))
    prompt.ids += [*reply, 4, 5, 6, 7]
    assert engine.replies(prompt.request("turn-2")) == [prompt.expected(reference)]
    assert (engine.load.image_tiles_encoded, engine.load.image_tiles_reused) == (3, 3)
    engine.loop.purge(None, b"")  # the KV is forgotten, the rows are not
    assert engine.replies(prompt.request("turn-3")) == [prompt.expected(reference)]
    assert (engine.load.image_tiles_encoded, engine.load.image_tiles_reused) == (3, 6)


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_images_are_encoded_in_pieces_beside_a_reply(model: tuple[Path, Any], family: str) -> None:
    """Each step has one block of the tower, and the sequence that decodes has a token in each."""
    folder, reference = model
    engine = SmallEngine(folder, GpuRunner, pieces=True)
    first, second, same = Prompt(folder, family, [0], seed=1), Prompt(folder, family, [1, 2], seed=2), []
    engine.loop.submit(first.request("first", 14), 0.0)
    found: dict[str, list[int]] = {"first": [], "second": [], "third": []}
    n_before = 0  # tokens of the first reply before any of the others
    while engine.loop.busy:
        for delta in engine.loop.step(0.0):
            found[delta.id] += unpack(delta.token_ids)
        if len(found["first"]) == 2 and not same:
            same = [first, second]
            engine.loop.submit(second.request("second"), 0.0)
            engine.loop.submit(first.request("third"), 0.0)  # its image is cached
        if not found["second"]:
            n_before = len(found["first"])
    assert found["first"] == first.expected(reference, 14)
    assert (found["second"], found["third"]) == (second.expected(reference), first.expected(reference))
    assert n_before >= 2 + 2 * 4  # two tiles of four blocks
    assert (engine.load.image_tiles_encoded, engine.load.image_tiles_reused) == (3, 1)


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_what_was_begun_is_finished_when_nothing_decodes(model: tuple[Path, Any], family: str) -> None:
    folder, reference = model
    engine = SmallEngine(folder, GpuRunner, pieces=True)
    first, second = Prompt(folder, family, [0], seed=1), Prompt(folder, family, [2], seed=2)
    engine.loop.submit(first.request("first", 3), 0.0)
    engine.loop.step(0.0)
    engine.loop.submit(second.request("second"), 0.0)
    found: list[int] = []
    while engine.loop.busy:
        found += [id for delta in engine.loop.step(0.0) if delta.id == "second" for id in unpack(delta.token_ids)]
    assert found == second.expected(reference)
    assert engine.load.image_tiles_encoded == 2


class FailingPieces:
    """A tower that cannot encode a tile beside other sequences, as where a GPU has no memory for it."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)

    def pieces(self, tile: torch.Tensor) -> Iterator[float]:
        yield 1.0
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_a_tile_whose_pieces_fail_is_encoded_by_the_step_that_takes_it(model: tuple[Path, Any], family: str) -> None:
    """The steps beside it go on."""
    folder, _ = model
    tower, processor = load_tower(folder, device="cpu", dtype=torch.float32), processor_of(folder)
    assert tower is not None
    prompt = Prompt(folder, family, [0], seed=1).request("a")
    (rows,) = ImagePlaces(prompt, processor).between(0, len(unpack(prompt.prompt_ids)))[1]
    cache, plain = (
        RowCache(each, processor.n_rows, 1 << 20, typical=(32, 32)) for each in (FailingPieces(tower), tower)
    )
    assert cache.begin(rows)
    for _ in range(2):
        cache.advance(0.0)
    assert not cache.begin(rows)
    assert torch.equal(cache.take([rows]), plain.take([rows]))


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_a_draft_model_reads_token_ids_alone(model: tuple[Path, Any], family: str, tmp_path: Path) -> None:
    """The draft model has neither M-RoPE nor layers that rows of images are added behind."""
    folder, reference = model
    save_vision_model(tmp_path, "idefics3")
    decoder = load_model(open_checkpoint(tmp_path), "cpu", threads=1)
    draft, speculation = DraftModel(decoder, "0123456789abcdef", 2, TEXT["vocab_size"]), Drafting(4)
    engine = SmallEngine(folder, GpuRunner, head=draft, speculation=speculation)
    prompt = Prompt(folder, family, [0, 2], seed=5)
    assert engine.replies(prompt.request("a")) == [prompt.expected(reference)]
    assert speculation.n_drafted


@pytest.mark.parametrize("family", ["idefics3"])
def test_images_that_do_not_fit_their_prompt_are_refused(model: tuple[Path, Any], family: str) -> None:
    folder, _ = model
    engine, prompt = SmallEngine(folder), Prompt(folder, family, [0])
    (image,) = prompt.images
    for wrong, why in (
        ({"start": image.start + 1}, "makes 16 rows, and the prompt has 15"),
        ({"end": len(prompt.ids)}, "not where a prompt can have it"),
        ({"pixels": image.pixels[1:]}, "bytes of pixels"),
    ):
        values = {name: getattr(image, name) for name in image.__struct_fields__} | wrong
        prompt.images = [type(image)(**values)]
        with pytest.raises(BadInput, match=why):
            engine.loop.submit(prompt.request("wrong"), 0.0)
    assert not engine.loop.busy


@pytest.mark.slow
@pytest.mark.parametrize("family", ["idefics3", "gemma3", "qwen3_vl"])
def test_the_c_kernels_reply_alike(tmp_path: Path, family: str) -> None:
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    changes: dict[str, Any] = {"text_config": TEXT | shape}
    if family == "qwen3_vl":
        changes["text_config"] |= {"num_hidden_layers": 4, "rope_scaling": {"mrope_section": [4, 2, 2]}}
        changes["vision_config"] = MODELS[family]["vision_config"] | {"out_hidden_size": 64}
    reference = save_vision_model(tmp_path, family, **changes)
    engine = SmallEngine(tmp_path, token_budget=SHORT_CHUNKS)
    assert engine.backend == "native"
    prompt = Prompt(tmp_path, family, [0, 2], seed=7)
    assert engine.replies(prompt.request("native")) == [prompt.expected(reference)]
