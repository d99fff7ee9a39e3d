"""The C kernels against plain PyTorch, over shapes that hit every tail: tokens, panels, windows, head dimensions."""

import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from emberline.kernels.backend import MLP, GroupedQueryAttention, Rope
from emberline.kernels.cpu.native_backend import NativeBackend, set_threads
from emberline.kernels.native_library import library_path
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import ImageInputs, StepInputs
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.weights.tensors import Affine

ACTIVATION_ERROR = 1.5e-2  # relative: 8-bit activations in groups of 32, on noise (the worst case)
TOKENS = [0, 1, 2, 3, 5, 8, 9, 17]


@dataclass
class FakeWeight:
    """A random weight: float, or 4- or 8-bit affine."""

    numbers: np.ndarray
    codes: Affine | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def dense(self) -> np.ndarray:
        return self.numbers

    def affine(self, unpack: object = None) -> Affine | None:
        return self.codes

    def tensor(self, dtype: torch.dtype, device: str) -> Tensor:
        return torch.from_numpy(self.numbers.copy()).to(dtype)


def weight(rng: np.random.Generator, rows: int, cols: int, bits: int) -> FakeWeight:
    if bits == 32:
        return FakeWeight(rng.normal(size=(rows, cols)).astype(np.float32))
    groups = (rows, cols // 32)
    scale = rng.uniform(0.01, 0.02, groups).astype(np.float16).astype(np.float32)
    middle = 8 if bits == 4 else 128
    offset = (-middle * scale + rng.normal(size=groups) * 0.01).astype(np.float16).astype(np.float32)
    affine = Affine(rng.integers(0, 2**bits, (rows, cols), dtype=np.uint8), scale, offset, bits)
    return FakeWeight(affine.dense().astype(np.float32), affine)


def vector(rng: np.random.Generator, n: int) -> FakeWeight:
    return FakeWeight(rng.uniform(0.5, 1.5, n).astype(np.float32))


def error(got: Tensor, want: Tensor) -> float:
    assert torch.isfinite(got).all()
    return ((got - want).norm() / want.norm().clamp(min=1e-9)).item()


def runs_avx512bw() -> bool:
    return "avx512bw" in Path("/proc/cpuinfo").read_text().split()


# Other processors of the same family, as far as their code runs here: each takes another path through the sources.
TARGETS = {
    "x86_64": [None, *["-march=skylake-avx512"] * runs_avx512bw(), "-march=haswell", "-march=x86-64"],
    "aarch64": [None, "-march=armv8-a"],
}.get(platform.machine(), [None])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="processors of another family")
@pytest.mark.parametrize("target", ["-mavx512f", "-march=skylake-avx512", "-march=cascadelake"])
def test_sources_compile_for_other_processors(target: str) -> None:
    """With vectors of 64 bytes, and none, some or all of the instructions for bytes in them."""
    assert library_path(target).is_file()


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: target or "this-processor")
def native(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(threads=2, target=request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    torch.manual_seed(11)  # else activations depend on the tests before
    return np.random.default_rng(11)


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (40, 96), (49, 576), (960, 576), (576, 1536)])
def test_linear(native, rng, bits: int, rows: int, cols: int) -> None:
    source, bias, norm = weight(rng, rows, cols, bits), vector(rng, rows), vector(rng, cols)
    for tokens in TOKENS:
        x = torch.from_numpy(rng.normal(size=(tokens, cols)).astype(np.float32))
        got, want = (
            b.norm_linear(x.clone(), b.load_matrix([source], [bias]), b.load_vector(norm), 1e-5)
            for b in (native, TorchBackend())
        )
        assert got.shape == want.shape
        assert error(got, want) < (1e-5 if bits == 32 else ACTIVATION_ERROR)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_not_rounded(native, rng, bits: int) -> None:
    """With activations that 8 bits represent exactly, the result is exact: no weight is rounded."""
    source = weight(rng, 64, 128, bits)
    x = torch.from_numpy(rng.integers(-127, 128, (7, 128)).astype(np.float32))
    x[:, ::32] = 127.0  # every group's scale is one
    residual = torch.zeros(7, 64)
    native.linear_add(x, native.load_matrix([source]), residual, None, 0.0)
    want = x.double() @ torch.from_numpy(source.numbers).double().T
    assert ((residual - want).abs().max() / want.abs().max()).item() < 1e-5


def test_4_and_8_bit_parts_stack(native, rng) -> None:
    parts = [weight(rng, 32, 64, 4), weight(rng, 16, 64, 8)]
    x, norm = torch.randn(3, 64), vector(rng, 64)
    got, want = (b.norm_linear(x, b.load_matrix(parts), b.load_vector(norm), 1e-6) for b in (native, TorchBackend()))
    assert error(got, want) < ACTIVATION_ERROR


def test_a_token_does_not_depend_on_the_batch(native, rng) -> None:
    matrix, norm = native.load_matrix([weight(rng, 96, 576, 4)]), native.load_vector(vector(rng, 576))
    x = torch.randn(23, 576)
    together = native.norm_linear(x, matrix, norm, 1e-5)
    for t in range(23):
        assert torch.equal(native.norm_linear(x[t : t + 1].contiguous(), matrix, norm, 1e-5)[0], together[t])


def test_the_number_of_threads_changes_between_steps_and_no_result_with_it(rng) -> None:
    """Workers share cores by need: threads come and go, those that are not used wait without taking tasks."""
    native = NativeBackend(threads=3)
    matrix, norm = native.load_matrix([weight(rng, 960, 576, 4)]), native.load_vector(vector(rng, 576))
    x = torch.randn(23, 576)
    want = native.norm_linear(x, matrix, norm, 1e-5)
    for n in (1, 2, 4, 1, 3, 2, 1, 4) * 25:
        set_threads(n)
        assert torch.equal(native.norm_linear(x, matrix, norm, 1e-5), want)
    set_threads(2)


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("post", [False, True])
def test_mlp(native, rng, bits: int, activation: str, post: bool) -> None:
    gate, up, down = weight(rng, 96, 64, bits), weight(rng, 96, 64, bits), weight(rng, 64, 96, bits)
    norm, post_norm = vector(rng, 64), vector(rng, 64)
    for tokens in TOKENS:
        x, outs = torch.randn(tokens, 64), []
        for b in (native, TorchBackend()):
            mlp = MLP(
                norm=b.load_vector(norm),
                gate_up=b.load_matrix([gate, up], gated=True),
                down=b.load_matrix([down]),
                post_norm=b.load_vector(post_norm) if post else None,
                eps=1e-6,
                activation=activation,
            )
            residual = x.clone()
            b.mlp(mlp, residual)
            outs.append(residual - x)
        assert error(*outs) < (2e-5 if bits == 32 else 2 * ACTIVATION_ERROR)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_embedding(native, rng, bits: int) -> None:
    source = weight(rng, 50, 64, bits)
    ids = torch.tensor([0, 49, 17, 17], dtype=torch.int32)
    got = native.embed(native.load_matrix([source]), ids, 2.0)
    torch.testing.assert_close(got, torch.from_numpy(source.numbers)[ids.long()] * 2.0, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (16, 1, 80), (2, 1, 256)])
def test_attention(native, rng, window: int | None, heads: int, kv_heads: int, head_dim: int, ahead: bool) -> None:
    """Three sequences in a pool of two layers: a prefill, a chunk after a cached part, a decode. ahead: every eighth
    token and those after it see up to the seventh after it, as those of an image do."""
    group = KVGroup("g", (0, 1), kv_heads, head_dim, "float16", window)
    norms = [vector(rng, head_dim) for _ in range(2)]
    rope = Rope(torch.from_numpy((100.0 ** -np.linspace(0, 1, head_dim // 2)).astype(np.float32)), 1.1)
    cached, new = [0, 37, 50], [33, 21, 1]
    tables = torch.randperm(18).view(3, 6).to(torch.int32)
    width = (heads + 2 * kv_heads) * head_dim

    def run(backend: NativeBackend | TorchBackend, keys: str) -> Tensor:
        torch.manual_seed(3)
        shape = (18, 2, 2, kv_heads, BLOCK_TOKENS, head_dim)
        pool = torch.full(shape, torch.nan, dtype=torch.float16)  # failed requests may leave NaN behind
        attention = GroupedQueryAttention(
            norm=torch.ones(1),
            qkv=None,
            output=None,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=0.2,
            eps=1e-6,
            kv_group=0,
            layer_index=1,
            window=window,
            q_norm=backend.load_vector(norms[0]),
            k_norm=backend.load_vector(norms[1]),
        )
        out = torch.empty(0)
        for past, lengths in ([0, 0, 0], cached), (cached, new):
            live = [r for r in range(3) if lengths[r]]
            starts = np.cumsum([0, *(lengths[r] for r in live)])
            positions = np.concatenate([np.arange(past[r], past[r] + lengths[r]) for r in live])
            contexts = [past[r] + lengths[r] for r in live]
            step = StepInputs(
                token_ids=torch.zeros(len(positions), dtype=torch.int32),
                positions=torch.tensor(positions, dtype=torch.int32),
                query_starts=torch.tensor(starts, dtype=torch.int32),
                context_lens=torch.tensor(contexts, dtype=torch.int32),
                block_tables=[tables[live].contiguous()],
                sample_tokens=torch.zeros(0, dtype=torch.int64),
            )
            if ahead:
                ends = np.repeat(contexts, np.diff(starts))
                seen = torch.from_numpy(np.minimum(positions | 7, ends - 1).astype(np.int32))
                step.images = ImageInputs(step.sample_tokens, torch.zeros(0, 1), seen)
            context = backend.begin_step(step, [pool], (group,), [rope])
            out = backend.attention(torch.randn(len(positions), width), attention, context)
        return out

    assert error(run(native, "channel"), run(TorchBackend(), "token")) < 2e-3
