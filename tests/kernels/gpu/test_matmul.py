"""GEMV, skinny GEMM and cuBLAS paths against plain PyTorch, with norms, gates, residuals and biases fused or not."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.workspace import AttentionShape, Workspace, WorkspaceSizes
from emberline.kernels.gpu.elementwise import gated_activation_reference
from emberline.kernels.gpu.formats import gguf as dispatch
from emberline.kernels.gpu.formats.dense import DenseMatrix
from emberline.kernels.gpu.formats.gguf import quantized_gemv_tile
from emberline.kernels.gpu.formats.matrix_format import Fusion
from emberline.kernels.gpu.gemm import (
    GemvTile,
    PersistentGemvTile,
    SkinnyGemmTile,
    gemv,
    persistent_gemv,
    skinny_gemm,
    skinny_gemm_floats,
)
from emberline.kernels.gpu.quantized_gemm import (
    MAX_GEMV_WORDS,
    QuantizedGemmTile,
    QuantizedGemvTile,
    QuantizedMatrix,
    pack_quantized,
    quantized_gemv,
    quantized_skinny_gemm,
)
from emberline.kernels.reference import rms_norm
from emberline.weights.tensors import Affine
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, everyday, noise

GATES = ["", "silu", "gelu_tanh"]
CASES = [  # norm, bias, gate, add
    (True, True, 0, False),
    (True, False, 1, False),
    (False, False, 2, False),
    (False, False, 0, True),
]
WITHOUT_NORM = [case[1:] for case in CASES]


def expected(
    x: Tensor, w: Tensor, out: Tensor, norm: Tensor | None, bias: Tensor | None, gate: int, add: bool
) -> Tensor:
    x = x.double() if norm is None else rms_norm(x.float(), norm, 1e-5).double()
    y = x @ w.double().T
    if bias is not None:
        y = y + bias.double()
    if gate:
        y = gated_activation_reference(y, GATES[gate])
    return y + out.double() if add else y


@pytest.mark.parametrize(("norm", "bias", "gate", "add"), CASES)
@pytest.mark.parametrize(("n", "k"), [(24, 64), (10, 100)])
def test_gemv(n: int, k: int, norm: bool, bias: bool, gate: int, add: bool) -> None:
    x, w, out = noise(1, k, seed=1), noise(n * (2 if gate else 1), k, seed=2), noise(1, n, seed=3)
    weight = noise(k, seed=4).float() + 1 if norm else None
    more = noise(n, seed=5) if bias else None
    want = expected(x, w, out, weight, more, gate, add)
    gemv(x, w, out, GemvTile(4, 32, 4), bias=more, norm=weight, eps=1e-5, gate=gate, add=add)
    assert error(out, want) < LIMIT


@pytest.mark.parametrize(("bias", "gate", "add"), WITHOUT_NORM)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(2, 40, 96), (17, 32, 80)])
def test_skinny_gemm(m: int, n: int, k: int, splits: int, bias: bool, gate: int, add: bool) -> None:
    x, w, out = noise(m, k, seed=1), noise(n * (2 if gate else 1), k, seed=2), noise(m, n, seed=3)
    more = noise(n, seed=5) if bias else None
    want = expected(x, w, out, None, more, gate, add)
    tile = SkinnyGemmTile(16, 32, splits, 2, 4)
    partial = torch.full((skinny_gemm_floats(n, m, tile, bool(gate)),), torch.nan, device=DEVICE)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    skinny_gemm(x, w, out, tile, partial, counters, bias=more, gate=gate, add=add)
    assert error(out, want) < LIMIT
    assert not counters.any()


@pytest.mark.parametrize(("norm", "bias", "gate", "add"), CASES)
@pytest.mark.parametrize(("n", "k"), [(24, 64), (10, 100)])
def test_persistent_gemv(n: int, k: int, norm: bool, bias: bool, gate: int, add: bool) -> None:
    x, w, out = noise(1, k, seed=1), noise(n * (2 if gate else 1), k, seed=2), noise(1, n, seed=3)
    weight = noise(k, seed=4).float() + 1 if norm else None
    more = noise(n, seed=5) if bias else None
    want = expected(x, w, out, weight, more, gate, add)
    persistent_gemv(x, w, out, PersistentGemvTile(2, 4, 1), bias=more, norm=weight, eps=1e-5, gate=gate, add=add)
    assert error(out, want) < LIMIT


def quantized(n: int, k: int, bits: int, bias: Tensor | None) -> tuple[QuantizedMatrix, Tensor]:
    """A quantized matrix and its dequantized weights."""
    rng = np.random.default_rng(bits)
    scale = rng.uniform(0.5, 1, (n, k // 32)).astype(np.float16).astype(np.float32) / 2**bits
    offset = (-scale * rng.uniform(0, 2**bits, scale.shape)).astype(np.float16).astype(np.float32)
    affine = Affine(rng.integers(0, 2**bits, (n, k), dtype=np.uint8), scale, offset, bits)
    return pack_quantized([affine], bias, DEVICE), torch.from_numpy(affine.dense()).to(DEVICE)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("norm", "bias", "gate", "add"), CASES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 24, 96), (1, 9, 256), (3, 9, 96)])
def test_quantized_gemv(m: int, n: int, k: int, norm: bool, bias: bool, gate: int, add: bool, bits: int) -> None:
    more = noise(n, seed=5) if bias else None
    matrix, w = quantized(n * (2 if gate else 1), k, bits, more)
    x, out = noise(m, k + 32, seed=1)[:, :k], noise(m, n, seed=3)
    weight = noise(k, seed=4).float() + 1 if norm else None
    want = expected(x, w, out, weight, more, gate, add)
    quantized_gemv(x, matrix, out, QuantizedGemvTile(4, 1, 1), norm=weight, eps=1e-5, gate=gate, add=add)
    assert error(out, want) < LIMIT


@pytest.mark.parametrize("words", [4, 128, 1024, 2048, 2049, 4096, MAX_GEMV_WORDS])
def test_a_program_of_a_quantized_gemv_has_no_more_warps_than_a_gpu_allows(
    monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "sm_count", lambda: 132)
    for n in (1, 32, 256, 4096):
        for gated in (False, True):
            tile = quantized_gemv_tile(n, words, gated)
            assert tile.warps <= 32, (n, gated, tile)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("bias", "gate", "add"), WITHOUT_NORM)
@pytest.mark.parametrize(("m", "n", "k", "splits"), [(2, 40, 96, 1), (17, 24, 288, 3)])
def test_quantized_skinny_gemm(
    m: int, n: int, k: int, splits: int, bias: bool, gate: int, add: bool, bits: int
) -> None:
    more = noise(n, seed=5) if bias else None
    matrix, w = quantized(n * (2 if gate else 1), k, bits, more)
    x, out = noise(m, k, seed=1), noise(m, n, seed=3)
    want = expected(x, w, out, None, more, gate, add)
    partial = torch.full((100_000,), torch.nan, device=DEVICE)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    quantized_skinny_gemm(
        x, matrix, out, QuantizedGemmTile(16, 16, splits, 2, 1), partial, counters, gate=gate, add=add
    )
    assert error(out, want) < LIMIT
    assert not counters.any()


CUBLAS_SWEEP = [(bits, *case) for case in CASES for bits in (0, 4, 8)]
# Dense: bias, gate, residual; 4 bits: gate; 8 bits: bias.
CUBLAS_KEEP = [(0, *CASES[0]), (0, *CASES[2]), (0, *CASES[3]), (4, *CASES[1]), (8, *CASES[0])]


@pytest.mark.parametrize(("bits", "norm", "bias", "gate", "add"), everyday(CUBLAS_SWEEP, CUBLAS_KEEP))
def test_many_tokens_use_cublas(bits: int, norm: bool, bias: bool, gate: int, add: bool) -> None:
    m, n, k = 130, 24, 64
    sizes = WorkspaceSizes(64, 100, (AttentionShape(2, 1, 32),), 32, 130, 4, 4, DTYPE.itemsize, quantized=True)
    multiply = Matmul(Workspace(sizes, DEVICE, DTYPE), False, False)
    total = n * (2 if gate else 1)
    more = noise(n, seed=5) if bias else None
    matrix: DenseMatrix | QuantizedMatrix = DenseMatrix(noise(total, k, seed=2), more)
    w = noise(total, k, seed=2)
    if bits:
        matrix, w = quantized(total, k, bits, more)
    x, out = noise(m, k, seed=1), noise(m, n, seed=3)
    weight = noise(k, seed=4).float() + 1 if norm else None
    want = expected(x, w, out, weight, more, gate, add)
    multiply(x, matrix, out, Fusion(weight, 1e-5, gate, add))
    assert error(out, want) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 7, 16, 33, 64, 65, 128, 300])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (4096, 14336), (576, 576), (960, 576), (1536, 576)])
def test_every_tile_config(m: int, n: int, k: int) -> None:
    sizes = WorkspaceSizes(max(k, 512), 1000, (AttentionShape(8, 2, 64),), 14336, 512, 512, 512, DTYPE.itemsize)
    for pdl in (False, True):
        multiply = Matmul(Workspace(sizes, DEVICE, DTYPE), False, pdl)
        for norm, _, gate, add in CASES:
            x, w = noise(m, k, seed=1), noise(n * (2 if gate else 1), k, seed=2, scale=k**-0.5)
            out, weight = noise(m, n, seed=3), noise(k, seed=4).float() + 1 if norm else None
            want = expected(x, w, out, weight, None, gate, add)
            multiply(x, DenseMatrix(w), out, Fusion(weight, 1e-5, gate, add), after_attention=True)
            assert error(out, want) < LIMIT, (pdl, norm, gate, add)
