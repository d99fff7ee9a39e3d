"""Checkpoints of every mixture-of-experts architecture in the GPU engine, against transformers on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.kv.cache import KVCache
from emberline.models.registry import load_model
from emberline.weights.checkpoint import open_checkpoint
from tests.engine.fakes import request
from tests.engine.runners.gpu.test_large_models import run
from tests.lazy_modules import skip_without
from tests.models.small_moe_models import MODELS, save_small_model

skip_without("transformers")
pytestmark = pytest.mark.gpu

SIZES = {"vocab_size": 512, "hidden_size": 256, "num_attention_heads": 8, "max_position_embeddings": 2048}
LATENT = {
    "num_key_value_heads": 8, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "q_lora_rank": 128, "moe_intermediate_size": 128,
}  # fmt: skip
DENSE = {"head_dim": 64, "intermediate_size": 128}
N_BLOCKS = 300


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Given the same tokens before it, each is transformers' best in float32 or, by bfloat16's rounding, nearly so."""
    wide = LATENT if kind in ("deepseek_v3", "glm4_moe_lite") else DENSE
    theirs = save_small_model(tmp_path, kind, std=0.06, **SIZES, **wide)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in (5, 60, 300)]
    loop = engine_of(tmp_path)
    replies = run(loop, *(request(f"r{n}", ids, max_tokens=16, temperature=0.0) for n, ids in enumerate(prompts)))
    again = run(loop, *(request(f"a{n}", ids, max_tokens=16, temperature=0.0) for n, ids in enumerate(prompts)))
    same = total = 0
    for n, ids in enumerate(prompts):
        for reply in replies[f"r{n}"], again[f"a{n}"]:
            with torch.no_grad():
                logits = theirs(torch.tensor([ids + reply[:-1]])).logits[0, len(ids) - 1 :].float()
            behind = logits.max(1).values - logits.gather(1, torch.tensor(reply)[:, None])[:, 0]
            assert (behind < 0.5 * logits.std()).all(), f"{n}: {behind.max()} of {logits.std()}"
            same, total = same + (behind == 0).sum().item(), total + len(reply)
    assert same > 0.85 * total


def engine_of(folder: Path) -> Any:
    from emberline.engine.runners.gpu.engine import GpuEngine
    from emberline.engine.runners.gpu.preparation import StepPreparation

    model = load_model(open_checkpoint(folder), "cuda")
    limits = Limits(2048, 512, (2,), 8, 256)
    engine = GpuEngine.open(model, limits, "cuda", 256 << 20)
    sizes = [N_BLOCKS] * len(model.kv_groups)
    runner = engine.runner(sizes, limits)
    preparation = StepPreparation(model, runner, limits)
    preparation.begin()
    preparation.finish()
    cache = KVCache(model.kv_groups, sizes, chunk=limits.token_budget)
    return StepLoop(Scheduler(cache, limits, "gpu", prefill=engine.prefill), runner, 2)
