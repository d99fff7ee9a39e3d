"""Images in the GPU engine on a CUDA device: replies of small random models, against transformers on the CPU."""

import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.images.tower_loading import open_images
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.models.registry import load_model
from emberline.protocol.token_ids import unpack
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.vision_config import read_tower_config
from tests.engine.images.small_engine import Prompt
from tests.lazy_modules import skip_without
from tests.models.vision.small_vision_models import MODELS, save_vision_model

skip_without("transformers")
pytestmark = pytest.mark.gpu

# Sizes that the GPU kernels have.
WIDE = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
LATENT = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 128,
}  # fmt: skip
TEXT = {
    "gemma3": {"query_pre_attn_scalar": 64},
    "qwen3_vl": {"rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10]}},
    "kimi_k25": LATENT,
}
WIDE_TOWER = {"hidden_size": 144, "intermediate_size": 256}  # heads of 36 or, of two, of 72 dimensions
N_BLOCKS = 200


@pytest.fixture(scope="module")
def folders() -> dict[str, tuple[Path, Any]]:
    """The models that were saved so far, by family."""
    return {}


@pytest.fixture
def model(family: str, folders: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    if family not in folders:
        folder, sizes = tmp_path_factory.mktemp(family), MODELS[family]
        vision: dict[str, Any] = sizes["vision_config"] | WIDE_TOWER
        vision["num_heads" if family == "qwen3_vl" else "num_attention_heads"] = 2
        if family == "qwen3_vl":
            vision["out_hidden_size"] = 256
        if family == "mistral3":
            vision["head_dim"] = 72
        changes = {
            "text_config": sizes["text_config"] | WIDE | TEXT.get(family, {}),
            "vision_config": vision,
            "projection_hidden_size": 144,
        }
        changes = {key: value for key, value in changes.items() if key in sizes}
        folders[family] = folder, save_vision_model(folder, family, std=0.06 if family == "gemma3" else 0.15, **changes)
        if family == "qwen3_vl":
            (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 64, "max_pixels": 1 << 14}))
    return folders[family]


class Engine:
    """The engine of a folder's model on a CUDA device."""

    def __init__(
        self, folder: Path, *, deterministic: bool = False, token_budget: int = 256, graphs: bool = False
    ) -> None:
        """graphs: capture all steps before the first request."""
        from emberline.engine.runners.gpu.engine import GpuEngine
        from emberline.engine.runners.gpu.preparation import StepPreparation

        config, decoder = read_tower_config(folder), load_model(open_checkpoint(folder), "cuda", deterministic)
        assert config is not None
        args = Namespace(
            model=folder, rank=0, random_weights=None, deterministic=deterministic, threads=0, max_running=4,
            token_budget=token_budget,
        )  # fmt: skip
        images = open_images(config, args, decoder, "cuda")
        assert images is not None
        limits = Limits(1024, 512, (), args.max_running, token_budget)
        engine = GpuEngine.open(decoder, limits, "cuda", 256 << 20, images=images.rows)
        sizes = [N_BLOCKS] * len(decoder.kv_groups)
        runner = engine.runner(sizes, limits, graphs=graphs)
        if graphs:
            preparation = StepPreparation(decoder, runner, limits)
            preparation.begin()
            preparation.finish()
        cache = KVCache(decoder.kv_groups, sizes, chunk=token_budget)
        scheduler = build_scheduler(cache, limits, "small", prefill=engine.prefill, images=images.feature)
        self.loop = StepLoop(scheduler, runner, engine.steps_in_flight)

    def replies(self, *prompts: Prompt, n: int = 12) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probabilities of the replies to prompts that arrive together."""
        found: dict[str, tuple[list[int], list[float]]] = {str(number): ([], []) for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            self.loop.submit(prompt.request(str(number), n), 0.0)
        while self.loop.busy:
            for delta in self.loop.step(0.0):
                assert delta.error is None, delta.error
                found[delta.id][0].extend(unpack(delta.token_ids))
                found[delta.id][1].extend(entry.logprob for entry in delta.logprobs or ())
        assert all(len(ids) == n for ids, _ in found.values())
        return list(found.values())


def check(reference: Any, prompt: Prompt, ids: list[int], logprobs: list[float]) -> None:
    """Given the same tokens before it, each token is transformers' best, or nearly so: bfloat16 rounds. Its
    probability is transformers', and not that after other images."""
    other = Prompt(prompt.folder, prompt.family, [], seed=0)
    other.ids = prompt.ids
    noise = random.Random(7)
    for image in prompt.images:
        other.add_pixels(image.tiles, noise.randbytes(len(image.pixels)))
    after, tokens = slice(len(prompt.ids) - 1, None), torch.tensor(ids)[:, None]
    logits, swapped = (each.logits(reference, prompt.ids + ids[:-1])[after] for each in (prompt, other))
    allowed = logits.clone()
    allowed[:, prompt.token_id] = -torch.inf
    behind = allowed.max(1).values - allowed.gather(1, tokens)[:, 0]
    assert (behind < 0.1 * logits.std()).all(), f"{behind.max()} of {logits.std()}"
    want, wrong = (each.log_softmax(-1).gather(1, tokens)[:, 0] for each in (logits, swapped))
    error, sight = (torch.tensor(logprobs) - want).abs().mean().item(), (wrong - want).abs().mean().item()
    assert error < 0.4 * sight, f"{error} from transformers, where other images make {sight}"
    print(f"{prompt.family}: error {error:.4f}, other images {sight:.4f}, best {(behind == 0).float().mean():.2f}")


@pytest.mark.parametrize("family", MODELS)
def test_replies_are_those_of_transformers(model: tuple[Path, Any], family: str) -> None:
    """Three prompts at once, of one, two and three images; and again, when the images and their KV are cached."""
    folder, reference = model
    prompts = [Prompt(folder, family, images, seed) for seed, images in enumerate(([0], [1, 2], [0, 1, 2]))]
    engine = Engine(folder)
    for _ in range(2):
        for prompt, reply in zip(prompts, engine.replies(*prompts), strict=True):
            check(reference, prompt, *reply)
    n_tiles = sum(len(image.tiles) for prompt in prompts for image in prompt.images)
    assert (engine.loop.load.image_tiles_encoded, engine.loop.load.image_tiles_reused) == (n_tiles, n_tiles)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_replies_with_captured_steps(model: tuple[Path, Any], family: str) -> None:
    """Replies under CUDA graphs, whose steps know M-RoPE by what is added to the positions of a slot."""
    folder, reference = model
    prompts = [Prompt(folder, family, images, seed) for seed, images in enumerate(([0], [1, 2], [0, 1, 2], []))]
    engine = Engine(folder, graphs=True)
    for prompt, reply in zip(prompts[:3], engine.replies(*prompts)[:3], strict=True):
        check(reference, prompt, *reply)


@pytest.mark.parametrize("family", MODELS)
def test_deterministic_replies_are_the_same_bits_whatever_the_batch_and_the_chunks(
    model: tuple[Path, Any], family: str
) -> None:
    """Chunks, and a cached prefix, end inside an image, unless the model sees it as a whole."""
    folder, reference = model
    prompts = [Prompt(folder, family, images, seed) for seed, images in enumerate(([0, 1], [1, 2], [0, 1, 2]))]
    engine = Engine(folder, deterministic=True)
    together = engine.replies(*prompts)
    check(reference, prompts[0], *together[0])
    engine = Engine(folder, deterministic=True, token_budget=24)
    assert [engine.replies(prompt)[0] for prompt in prompts] == together
    assert engine.replies(*prompts) == together
    n_encoded, inside = engine.loop.load.image_tiles_encoded, prompts[0].images[1]  # of at least 16 tokens
    cut = (inside.start // 16 + 1) * 16
    assert inside.start < cut < inside.end
    engine = Engine(folder, deterministic=True, token_budget=24)
    begun = Prompt(folder, family, [0, 1], seed=0, tail=0)
    begun.ids = [*prompts[0].ids[: inside.end], 1]
    engine.replies(begun, n=1)
    assert [engine.replies(prompt)[0] for prompt in prompts] == together
    assert engine.loop.load.cached_tokens >= cut
    assert engine.loop.load.image_tiles_encoded == n_encoded
