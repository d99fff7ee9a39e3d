"""Whole models on the Triton backend against the reference backend: every kind of step and of model."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu import prefill_attention, split_kv
from emberline.kernels.gpu.backend import triton_backend
from emberline.kernels.gpu.backend import workspace as workspace_module
from emberline.kernels.gpu.backend.triton_backend import TritonBackend
from emberline.kernels.gpu.backend.workspace import (
    AttentionShape,
    PrefillChunk,
    StepShape,
    Workspace,
    WorkspaceSizes,
    _layout,
)
from emberline.kernels.gpu.mla import prefill as mla_prefill
from emberline.kernels.gpu.prefill_attention import PrefillTile
from emberline.kernels.gpu.quantized_gemm import dequantize_reference, pack_quantized
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Architecture, Decoder, StepInputs
from emberline.models.deepseek import deepseek
from emberline.models.gemma import gemma3
from emberline.models.gpt_oss import gpt_oss
from emberline.models.llama import llama
from emberline.models.llama4 import llama4
from emberline.models.qwen import qwen2, qwen3
from emberline.weights.model_config import LatentConfig, ModelConfig, MoEConfig, QueryTemperature
from tests.kernels.gpu.batches import DEVICE, DTYPE, error, everyday
from tests.kernels.gpu.test_fa3_attention import plain_attention
from tests.models.random_checkpoint import RandomCheckpoint, RandomWeight
from tests.models.step_inputs import step

LIMIT = 1e-4 if DEVICE == "cpu" else 3e-2
CONFIG = ModelConfig(
    architecture="llama", vocab_size=64, hidden_size=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, mlp_size=64,
    context_len=512, norm_eps=1e-6, rope_theta=10000.0, tie_embeddings=True,
)  # fmt: skip
GEMMA = msgspec.structs.replace(
    CONFIG, windows=(None, 10), activation="gelu_tanh", embedding_scale=8.0, post_norms=True, local_rope_theta=100.0
)
EXPERTS = MoEConfig(
    layers=(1,), experts=8, top_k=2, width=16, shared_width=32, scoring="sigmoid", scale=1.5, correction_bias=True,
    n_groups=4, top_groups=2,
)  # fmt: skip
DEEPSEEK = msgspec.structs.replace(
    CONFIG, n_kv_heads=4, head_dim=24, moe=EXPERTS,
    latent=LatentConfig(q_lora=16, kv_lora=32, nope=16, rope=8, v_dim=16),
)  # fmt: skip
DIRECT = msgspec.structs.replace(DEEPSEEK, latent=LatentConfig(q_lora=None, kv_lora=32, nope=16, rope=8, v_dim=16))
QWEN3_MOE = msgspec.structs.replace(
    CONFIG, qk_norm=True, moe=MoEConfig(layers=(0, 1), experts=4, top_k=2, width=16, biases=True)
)
LLAMA4 = msgspec.structs.replace(
    CONFIG, chunks=(16, None), nope_layers=(1,), qk_l2_norm=True, query_temperature=QueryTemperature(0.5, 4),
    moe=MoEConfig(layers=(1,), experts=4, top_k=1, width=16, shared_width=16, scoring="sigmoid", weight_on_input=True),
)  # fmt: skip
GPT_OSS = msgspec.structs.replace(
    CONFIG, windows=(10, None), sinks=True, qkv_bias=True, output_bias=True,
    moe=MoEConfig(layers=(0, 1), experts=4, top_k=2, width=16, biases=True, activation="swiglu_clamped"),
)  # fmt: skip
MODELS = {
    "llama": (CONFIG, llama),
    "qwen2": (CONFIG, qwen2),
    "gemma": (GEMMA, gemma3),
    "deepseek": (DEEPSEEK, deepseek),
    "deepseek with direct queries": (DIRECT, deepseek),
    "qwen3 with experts": (QWEN3_MOE, qwen3),
    "llama4": (LLAMA4, llama4),
    "gpt-oss": (GPT_OSS, gpt_oss),
}


def triton_model(
    config: ModelConfig, architecture: Architecture, bits: int = 0, deterministic: bool = False
) -> Decoder:
    backend = TritonBackend(DEVICE, deterministic=deterministic)
    model = Decoder(RandomCheckpoint(config, bits=bits), backend, architecture)
    backend.reserve(WorkspaceSizes.of(model, 80, 8, 80, item=DTYPE.itemsize, quantized=bool(bits)))
    return model


def reference_model(config: ModelConfig, architecture: Architecture, bits: int = 0) -> Decoder:
    return Decoder(RandomCheckpoint(config, bits=bits), TorchBackend(DEVICE, DTYPE), architecture)


def pools(model: Decoder, n: int) -> list[torch.Tensor]:
    zeros = [torch.zeros(n, *g.block_shape, dtype=DTYPE, device=DEVICE) for g in model.kv_groups]
    for pool in zeros:
        pool[0] = torch.nan  # the null block must never be read
    return zeros


TABLES = (torch.randperm(24, generator=torch.Generator().manual_seed(1)) + 1).view(4, 6)
PROMPTS = [list(range(5, 5 + n)) for n in (17, 1, 7, 3)]


def to_device(s: StepInputs, shape: StepShape | None = None) -> StepInputs:
    for name in ("token_ids", "positions", "query_starts", "context_lens", "sample_tokens"):
        setattr(s, name, getattr(s, name).to(DEVICE))
    s.block_tables = [t.to(DEVICE) for t in s.block_tables]
    s.shape = shape
    return s


def run(model: Decoder, shaped: bool = False, n_steps: int = 4) -> list[torch.Tensor]:
    """Two prompts; then one decodes while two more prompts arrive; then all decode; then one alone."""
    kv, groups = pools(model, 25), len(model.kv_groups)
    first = step([(PROMPTS[0], 0), (PROMPTS[2][:4], 0)], TABLES[[0, 2]], groups)
    mixed = step([([7], 17), (PROMPTS[1], 0), (PROMPTS[2][4:], 4), (PROMPTS[3], 0)], TABLES, groups)
    mixed_shape = StepShape(2, 3, chunks=[PrefillChunk(2, 2, 3, 7), PrefillChunk(3, 5, 3, 3)]) if shaped else None
    decodes = step([([3], 18), ([4], 1), ([5], 7), ([6], 3)], TABLES, groups)
    alone = step([([9], 19)], TABLES[:1], groups)
    steps = [(first, None), (mixed, mixed_shape), (decodes, StepShape(4) if shaped else None), (alone, None)]
    return [model.forward(to_device(inputs, shape), kv).clone() for inputs, shape in steps[:n_steps]]


def assert_close(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for got, want in zip(results, expected, strict=True):
        assert error(got, want) < LIMIT


# Gemma has windows, post norms, QK norms and GELU; DeepSeek has latent attention and experts. The other tests here run
# Llama, and test_matmul.py covers biases.
@pytest.mark.parametrize("name", everyday(MODELS, ["gemma", "deepseek"]))
def test_a_model_computes_the_same(name: str) -> None:
    assert_close(run(triton_model(*MODELS[name]), shaped=True), run(reference_model(*MODELS[name])))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights(bits: int) -> None:
    assert_close(run(triton_model(CONFIG, llama, bits)), run(reference_model(CONFIG, llama, bits)))


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_keeps_every_weight(bits: int) -> None:
    parts = [RandomWeight(name, (8, 96), bits=bits).affine() for name in ("a", "b")]
    want = np.concatenate([part.dense() for part in parts])
    got = dequantize_reference(pack_quantized(parts, None, DEVICE)).cpu()
    torch.testing.assert_close(got, torch.from_numpy(want).float(), rtol=1e-6, atol=1e-6)


def test_deterministic_mode_does_not_depend_on_batch_or_chunks() -> None:
    config = msgspec.structs.replace(CONFIG, n_layers=1)
    model = triton_model(config, llama, deterministic=True)
    together = run(model, n_steps=3)
    assert_close(together, run(reference_model(config, llama), n_steps=3))
    kv, ids = pools(model, 25), PROMPTS[2]
    alone = []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        s = step([(ids[start:stop], start)], TABLES[2:3], 1)
        alone.append(model.forward(to_device(s), kv).clone())
    assert torch.equal(torch.cat(alone)[4:], together[1][2:5])


@pytest.mark.parametrize("name", everyday(["deepseek", "deepseek with direct queries"], ["deepseek"]))
def test_chunks_attend_to_expanded_latents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(args[0]))
        return plain_attention(*args)

    config, architecture = MODELS[name]
    config = msgspec.structs.replace(config, n_layers=1, moe=None)  # the subject is attention to prompts
    model = triton_model(config, architecture)
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(mla_prefill, "MIN_TOKENS", 4)  # a chunk of three tokens attends absorbed
    monkeypatch.setattr(
        model._backend, "_long", SimpleNamespace(has_plans=False, forward=forward, supports_expanded=lambda *dims: True)
    )
    assert_close(run(model, shaped=True, n_steps=2), run(reference_model(config, architecture), n_steps=2))
    assert {17, 4} <= set(calls)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_attend_to_latents_in_parts(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of more tokens than attend at once, and neighbors that attend together."""
    monkeypatch.setattr(workspace_module, "ABSORBED_TOKENS", 8)
    model = triton_model(*MODELS["deepseek"], deterministic=deterministic)
    assert model.kernels._workspace.sizes.absorbed_tokens == 8
    assert_close(run(model), run(reference_model(*MODELS["deepseek"])))


SPLIT_SWEEP = [(name, deterministic) for deterministic in (False, True) for name in ("llama", "gemma")]


@pytest.mark.parametrize(("name", "deterministic"), everyday(SPLIT_SWEEP, [("gemma", False)]))
def test_split_kv_prefill(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with many SMs, in tiles so small that a few tokens are several splits."""
    monkeypatch.setattr(split_kv, "sm_count", lambda: 24)
    monkeypatch.setattr(split_kv, "work_item_room", lambda: 6 * 24)
    monkeypatch.setattr(split_kv, "MIN_SPLIT_TILES", 1)
    monkeypatch.setattr(prefill_attention, "prefill_tile", lambda dim: PrefillTile(32, 16, 2, 4))
    kernel, is_split = prefill_attention.prefill_attention, []

    def watched(*args: Any, splits: split_kv.PrefillSplits | None, **more: Any) -> None:
        if splits is not None:
            splits.scratch.partials.fill_(torch.nan)
        kernel(*args, splits=splits, **more)
        is_split.append(splits is not None and not splits.scratch.partials.isnan().all())
        assert splits is None or not splits.scratch.counters.any()

    monkeypatch.setattr(triton_backend, "prefill_attention", watched)
    got = run(triton_model(*MODELS[name], deterministic=deterministic), n_steps=2)
    assert any(is_split) != deterministic
    assert_close(got, run(reference_model(*MODELS[name]), n_steps=2))


def test_cascade_attention_of_a_shared_prefix() -> None:
    tables = TABLES.clone()
    tables[1:3, :1] = tables[0, :1]
    ids = list(range(5, 24))
    prefill = [(ids, 0), (ids[16:], 16), (ids[16:18], 16), (ids[:3], 0)]
    decodes = [([3], 19), ([4], 19), ([5], 18), ([6], 3)]
    shared = torch.tensor([2, 16], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([16, 16, 16, 0], dtype=torch.int32, device=DEVICE)
    out = []
    config = msgspec.structs.replace(CONFIG, n_layers=1)
    for model in (triton_model(config, llama), reference_model(config, llama)):
        kv = pools(model, 25)
        for row in range(4):
            model.forward(to_device(step(prefill[row : row + 1], tables[row : row + 1], 1)), kv)
        shape = StepShape(4, shared_prefix=shared, prefix_lens=lens) if model.backend == "triton" else None
        out.append(model.forward(to_device(step(decodes, tables, 1), shape), kv).clone())
    assert error(out[0], out[1]) < LIMIT


def test_workspace_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "work_item_room", lambda: 6 * 132)
    llama8b = WorkspaceSizes(4096, 128256, (AttentionShape(32, 8, 128),), 14336, 8192, max_rows=256, max_samples=256)
    assert Workspace.bytes(llama8b) < 0.75 * 2**30
    ends = {name: start + size for name, (start, size) in _layout(llama8b).items()}
    assert ends["prefill_partials"] <= max(ends["gathered_kv"], ends["activated"])  # adds nothing
    small = WorkspaceSizes.of(reference_model(CONFIG, llama), 16, 4, 4)
    workspace = Workspace(small, DEVICE, DTYPE)
    assert workspace._memory.numel() == Workspace.bytes(small)
    assert not workspace.counters.any()
    assert not workspace.row_counters.any()
    assert not workspace.prefill_scratch.counters.any()
