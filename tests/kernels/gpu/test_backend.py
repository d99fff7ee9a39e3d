"""The Triton backend under a whole model, against the plain one: every kind of step and of model."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu import prefill_attention
from emberline.kernels.gpu import split_kv as split_keys
from emberline.kernels.gpu import triton_backend as backend
from emberline.kernels.gpu.quantized_gemm import dequantize_reference, pack_quantized
from emberline.kernels.gpu.triton_backend import TritonBackend
from emberline.kernels.gpu.workspace import PrefillChunk, StepShape, Workspace, WorkspaceSizes, _layout
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder, LayerTensorNames, StepInputs
from emberline.models.gemma import GEMMA3
from emberline.models.llama import LLAMA
from emberline.models.qwen import QWEN2
from emberline.weights.model_config import ModelConfig
from emberline.weights.tensors import Affine
from tests.kernels.gpu.made import DEVICE, DTYPE, error
from tests.models.steps import step

LIMIT = 1e-4 if DEVICE == "cpu" else 3e-2
CONFIG = ModelConfig(
    architecture="llama", vocab_size=64, hidden_size=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, mlp_size=64,
    context_len=512, norm_eps=1e-6, rope_theta=10000.0,
)  # fmt: skip


class Weight:
    def __init__(self, name: str, shape: tuple[int, ...], bits: int) -> None:
        self.name, self.shape, self.bits = name, shape, bits

    @property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(sum(map(ord, self.name)))

    def affine(self) -> Affine | None:
        if not self.bits or len(self.shape) != 2:
            return None
        groups = (self.shape[0], self.shape[1] // 32)
        scale = self._rng.uniform(0.01, 0.02, groups).astype(np.float16).astype(np.float32)
        codes = self._rng.integers(0, 2**self.bits, self.shape, dtype=np.uint8)
        scale /= 1 << (self.bits - 4)
        return Affine(codes, scale, (-scale * 2 ** (self.bits - 1)).astype(np.float16).astype(np.float32), self.bits)

    def dense(self) -> np.ndarray:
        affine = self.affine()
        if affine is not None:
            return affine.dense().astype(np.float32)
        numbers = self._rng.normal(size=self.shape) * 0.1
        return (numbers + (1 if len(self.shape) == 1 and "bias" not in self.name else 0)).astype(np.float32)

    def tensor(self, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.from_numpy(self.dense()).to(device=device, dtype=dtype)


class Source:
    def __init__(self, config: ModelConfig, bits: int = 0) -> None:
        self.config, self.bits = config, bits

    def has(self, name: str) -> bool:
        return False

    def weight(self, name: str) -> Weight:
        c, (part, kind) = self.config, name.split(".")[-2:]
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        shapes = {
            "token_embd": (c.vocab_size, c.hidden_size),
            "attn_q": (q, c.hidden_size),
            "attn_k": (kv, c.hidden_size),
            "attn_v": (kv, c.hidden_size),
            "attn_output": (c.hidden_size, q),
            "ffn_gate": (c.mlp_size, c.hidden_size),
            "ffn_up": (c.mlp_size, c.hidden_size),
            "ffn_down": (c.hidden_size, c.mlp_size),
            "attn_q_norm": (c.head_dim,),
            "attn_k_norm": (c.head_dim,),
        }
        shape: tuple[int, ...] = shapes.get(part, (c.hidden_size,))
        return Weight(name, shape[:1] if kind == "bias" else shape, self.bits)


def triton_model(config: ModelConfig, table: LayerTensorNames, bits: int = 0, deterministic: bool = False) -> Decoder:
    backend = TritonBackend(DEVICE, deterministic=deterministic)
    model = Decoder(Source(config, bits), backend, table)
    item = torch.empty(0, dtype=DTYPE).element_size()
    backend.reserve(WorkspaceSizes.of(config, 80, 8, 80, item=item, quantised=bool(bits)))
    return model


def plain_model(config: ModelConfig, table: LayerTensorNames, bits: int = 0) -> Decoder:
    return Decoder(Source(config, bits), TorchBackend(DEVICE, DTYPE), table)


def pools(model: Decoder, n: int) -> list[torch.Tensor]:
    made = []
    for g in model.kv_groups:
        pool = torch.zeros(n, len(g.layers), 2, g.kv_heads, 16, g.head_dim, dtype=DTYPE, device=DEVICE)
        pool[0] = torch.nan  # the null block: nobody may look at it
        made.append(pool)
    return made


TABLES = (torch.randperm(24, generator=torch.Generator().manual_seed(1)) + 1).view(4, 6)
PROMPTS = [list(range(5, 5 + n)) for n in (17, 1, 7, 3)]


def to_device(s: StepInputs, shape: StepShape | None = None) -> StepInputs:
    for name in ("token_ids", "positions", "query_starts", "context_lens", "sample_tokens"):
        setattr(s, name, getattr(s, name).to(DEVICE))
    s.block_tables = [t.to(DEVICE) for t in s.block_tables]
    s.shape = shape
    return s


def run(model: Decoder, shaped: bool = False) -> list[torch.Tensor]:
    """Two prompts; then one decodes while two more prompts come; then all decode."""
    kv, groups = pools(model, 25), len(model.kv_groups)
    out = []
    first = step([(PROMPTS[0], 0), (PROMPTS[2][:4], 0)], TABLES[[0, 2]], groups)
    out.append(model.forward(to_device(first), kv).clone())
    mixed = step([([7], 17), (PROMPTS[1], 0), (PROMPTS[2][4:], 4), (PROMPTS[3], 0)], TABLES, groups)
    shape = StepShape(2, 3, chunks=[PrefillChunk(2, 2, 3, 7), PrefillChunk(3, 5, 3, 3)]) if shaped else None
    out.append(model.forward(to_device(mixed, shape), kv).clone())
    decodes = step([([3], 18), ([4], 1), ([5], 7), ([6], 3)], TABLES, groups)
    out.append(model.forward(to_device(decodes, StepShape(4) if shaped else None), kv).clone())
    alone = step([([9], 19)], TABLES[:1], groups)
    out.append(model.forward(to_device(alone), kv).clone())
    return out


LIKE_GEMMA = dict(
    windows=(None, 10), activation="gelu_tanh", embedding_scale=8.0, post_norms=True, local_rope_theta=100.0
)
MODELS = {
    "llama": (CONFIG, LLAMA),
    "qwen2": (CONFIG, QWEN2),
    "gemma": (ModelConfig(**{**{f: getattr(CONFIG, f) for f in CONFIG.__struct_fields__}, **LIKE_GEMMA}), GEMMA3),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same(name: str) -> None:
    config, table = MODELS[name]
    for got, want in zip(run(triton_model(config, table), shaped=True), run(plain_model(config, table)), strict=True):
        assert error(got, want) < LIMIT


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights(bits: int) -> None:
    for got, want in zip(run(triton_model(CONFIG, LLAMA, bits)), run(plain_model(CONFIG, LLAMA, bits)), strict=True):
        assert error(got, want) < LIMIT


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_keeps_every_weight(bits: int) -> None:
    parts = [Weight(name, (8, 96), bits).affine() for name in ("a", "b")]
    packed = pack_quantized(parts, None, DEVICE)
    want = np.concatenate([part.dense() for part in parts])
    torch.testing.assert_close(dequantize_reference(packed).cpu(), torch.from_numpy(want).float(), rtol=1e-6, atol=1e-6)


def test_deterministic_results_do_not_depend_on_company_or_chunks() -> None:
    model = triton_model(CONFIG, LLAMA, deterministic=True)
    together = run(model)
    for got, want in zip(together, run(plain_model(CONFIG, LLAMA)), strict=True):
        assert error(got, want) < LIMIT
    kv, ids = pools(model, 25), PROMPTS[2]
    alone = []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        s = step([(ids[start:stop], start)], TABLES[2:3], 1)
        alone.append(model.forward(to_device(s), kv).clone())
    assert torch.equal(torch.cat(alone)[4:], together[1][2:5])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_chunks_with_split_keys(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card with many multiprocessors, in tiles so small that a few tokens are several pieces."""
    config, table = MODELS[name]
    monkeypatch.setattr(split_keys, "SM_COUNT", 132)
    monkeypatch.setattr(split_keys, "MAX_WORK_ITEMS", 6 * 132)
    monkeypatch.setattr(split_keys, "MIN_SPLIT_TILES", 1)
    monkeypatch.setattr(prefill_attention, "prefill_tile", lambda dim: prefill_attention.PrefillTile(32, 16, 2, 4))
    chunks, split = backend.chunks, []

    def watched(*args: Any, items: split_keys.PrefillSplits | None, **more: Any) -> None:
        if items is not None:
            items.scratch.partials.fill_(torch.nan)
        chunks(*args, items=items, **more)
        split.append(items is not None and not items.scratch.partials.isnan().all())
        assert items is None or not items.scratch.counters.any()

    monkeypatch.setattr(backend, "chunks", watched)
    got = run(triton_model(config, table, deterministic=deterministic))
    assert any(split) != deterministic
    for mine, want in zip(got, run(plain_model(config, table)), strict=True):
        assert error(mine, want) < LIMIT


def test_a_prefix_shared_by_decodes() -> None:
    config = CONFIG
    model, plain = triton_model(config, LLAMA), plain_model(config, LLAMA)
    tables = TABLES.clone()
    tables[1:3, :1] = tables[0, :1]
    ids = list(range(5, 24))
    prefill = [(ids, 0), (ids[16:], 16), (ids[16:18], 16), (ids[:3], 0)]
    decodes = [([3], 19), ([4], 19), ([5], 18), ([6], 3)]
    out = []
    for m in (model, plain):
        kv = pools(m, 25)
        for row in range(4):
            m.forward(to_device(step(prefill[row : row + 1], tables[row : row + 1], 1)), kv)
        shape = None
        if m is model:
            shared = torch.tensor([2, 16], dtype=torch.int32, device=DEVICE)
            shares = torch.tensor([16, 16, 16, 0], dtype=torch.int32, device=DEVICE)
            shape = StepShape(4, shared=shared, shares=shares)
        out.append(m.forward(to_device(step(decodes, tables, 1), shape), kv).clone())
    assert error(out[0], out[1]) < LIMIT


def test_the_workspace_is_as_large_as_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_keys, "MAX_WORK_ITEMS", 6 * 132)
    llama8b = WorkspaceSizes(4096, 32, 8, 128, 14336, 128256, 1, max_tokens=8192, max_rows=256, max_samples=256)
    assert Workspace.bytes(llama8b) < 0.75 * 2**30
    places = {name: start + size for name, (start, size) in _layout(llama8b).items()}
    assert places["parts"] <= max(places["own"], places["gathered"], places["activated"])  # it takes nothing more
    small = WorkspaceSizes.of(CONFIG, 16, 4, 4)
    space = Workspace(small, DEVICE, DTYPE)
    assert space._memory.numel() == Workspace.bytes(small)
    assert not space.counters.any()
    assert not space.row_counters.any()
    assert not space.chunk_scratch.counters.any()
