"""Latent attention and experts in the GPU engine on a CUDA device, against the reference backend on the same device."""

import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.kv.cache import KVCache
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.deepseek import deepseek
from emberline.models.qwen import qwen3
from emberline.weights.model_config import LatentConfig, ModelConfig, MoEConfig
from tests.engine.fakes import request
from tests.engine.runners.cpu.test_torch_runner import tokens
from tests.models.random_checkpoint import RandomCheckpoint

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 4000, "hidden_size": 512, "n_layers": 3, "n_heads": 16, "mlp_size": 1024, "context_len": 4096,
    "norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
ROUTED = {"experts": 32, "width": 256, "shared_width": 256, "top_k": 4}
DEEPSEEK = ModelConfig(
    architecture="deepseek_v3", n_kv_heads=16, head_dim=192, **SIZES,
    latent=LatentConfig(q_lora=256, kv_lora=512, nope=128, rope=64, v_dim=128),
    moe=MoEConfig(layers=(1, 2), scoring="sigmoid", correction_bias=True, n_groups=4, top_groups=2, **ROUTED),
)  # fmt: skip
QWEN3_MOE = ModelConfig(
    architecture="qwen3_moe", n_kv_heads=4, head_dim=64, qk_norm=True, **SIZES,
    moe=MoEConfig(layers=(0, 1, 2), experts=32, width=256, top_k=4),
)  # fmt: skip
MODELS = {"deepseek": (DEEPSEEK, deepseek), "qwen3 with experts": (QWEN3_MOE, qwen3)}
SCALE = 0.05  # of the random weights


def engine_of(name, deterministic=False, graphs=True):
    from emberline.engine.runners.gpu.engine import GpuEngine
    from emberline.engine.runners.gpu.preparation import StepPreparation
    from emberline.kernels.gpu.backend.triton_backend import TritonBackend

    config, architecture = MODELS[name]
    backend = TritonBackend("cuda", deterministic=deterministic)
    model = Decoder(RandomCheckpoint(config, scale=SCALE), backend, architecture)
    limits = Limits(config.context_len, config.vocab_size, (0,), 16, 2048)
    engine = GpuEngine.open(model, limits, "cuda", 256 << 20)
    cache = KVCache(model.kv_groups, [1500], chunk=limits.token_budget)
    runner = engine.runner([1500], limits, graphs=graphs)
    if graphs:
        preparation = StepPreparation(model, runner, limits)
        preparation.begin()
        preparation.finish()
    return StepLoop(Scheduler(cache, limits, "gpu", prefill=engine.prefill), runner, 2), engine


def run(loop, *requests):
    for wanted in requests:
        loop.submit(wanted, 0.0)
    deltas = {wanted.id: [] for wanted in requests}
    while loop.busy:
        for delta in loop.step(0.0):
            deltas[delta.id].append(delta)
    return {id: tokens(each) for id, each in deltas.items()}


def prompts(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 4000, (n,), generator=generator).tolist() for n in lengths]


def reference_logits(name, ids):
    """Of every position, float32 [tokens, vocab]."""
    from emberline.kernels.reference import TorchBackend

    config, architecture = MODELS[name]
    model = Decoder(RandomCheckpoint(config, scale=SCALE), TorchBackend("cuda"), architecture)
    n = -(-len(ids) // 16)
    kv = [torch.zeros(n + 1, *g.block_shape, dtype=getattr(torch, g.dtype), device="cuda") for g in model.kv_groups]
    ints = {"dtype": torch.int32, "device": "cuda"}
    step = StepInputs(
        torch.tensor(ids, **ints),
        torch.arange(len(ids), **ints),
        torch.tensor([0, len(ids)], **ints),
        torch.tensor([len(ids)], **ints),
        [torch.arange(1, n + 1, **ints)[None] for _ in kv],
        torch.arange(len(ids), device="cuda"),
    )
    return model.forward(step, kv).cpu()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_reference_backend(name):
    """Given the same tokens before it, each is the reference's best or, by rounding, nearly so."""
    asked = prompts([3, 40, 700, 1500])
    loop, _ = engine_of(name)
    replies = run(loop, *(request(f"r{n}", ids, max_tokens=24, temperature=0.0) for n, ids in enumerate(asked)))
    same = total = 0
    for n, ids in enumerate(asked):
        reply = replies[f"r{n}"]
        assert len(reply) == 24
        logits = reference_logits(name, ids + reply[:-1])[len(ids) - 1 :]
        behind = logits.max(1).values - logits.gather(1, torch.tensor(reply)[:, None])[:, 0]
        assert (behind < 0.5 * logits.std()).all(), f"{n}: {behind.max()} of {logits.std()}"
        same, total = same + (behind == 0).sum().item(), total + len(reply)
    assert same > 0.9 * total


@pytest.mark.parametrize("name", MODELS)
def test_deterministic_tokens_in_any_batch_with_and_without_graphs(name):
    asked = [request(f"r{n}", ids, max_tokens=16, temperature=0.0) for n, ids in enumerate(prompts([3, 77, 400, 130]))]
    together = run(engine_of(name, deterministic=True)[0], *asked)
    assert run(engine_of(name, deterministic=True, graphs=False)[0], *asked) == together
    loop, _ = engine_of(name, deterministic=True)
    for wanted in asked:
        assert run(loop, wanted)[wanted.id] == together[wanted.id]


@pytest.mark.parametrize("name", MODELS)
def test_no_step_blocks_on_the_device(name):
    """Also steps too large for a CUDA graph, once their kernels are compiled."""
    loop, _ = engine_of(name)
    lengths = [3, 40, 700, 1500, 90, 30]
    run(loop, *(request(f"r{n}", ids, max_tokens=8) for n, ids in enumerate(prompts(lengths))))
    torch.cuda.set_sync_debug_mode("error")
    try:
        asked = [request(f"a{n}", [5, *ids], max_tokens=8) for n, ids in enumerate(prompts(lengths))]
        replies = run(loop, *asked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(reply) == 8 for reply in replies.values())


def test_memory_stays_within_the_budget():
    loop, engine = engine_of("deepseek")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(loop, *(request(f"r{n}", ids, max_tokens=8) for n, ids in enumerate(prompts([300, 1900, 40]))))
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < engine.memory.reserve // 4, "what a step needs beyond the workspace comes out of the reserve"
