"""Products with FP8 weights, scaled per row or per block, and the quantization of their activations."""

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu import fp8_gemm as gemm_module
from emberline.kernels.gpu.elementwise import gated_activation_reference
from emberline.kernels.gpu.fp8_gemm import (
    FP8GemmTile,
    FP8GemvTile,
    FP8Matrix,
    FP8Rows,
    dequantize_fp8_rows,
    fp8_gemm,
    fp8_gemm_floats,
    fp8_gemv,
)
from emberline.kernels.gpu.fp8_quantize import gated_quantize, quantize_rows, scale_shape
from emberline.kernels.reference import rms_norm
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, everyday, noise
from tests.kernels.gpu.test_matmul import CASES, WITHOUT_NORM, expected


def fp8(n: int, k: int, row_block: int, bias: torch.Tensor | None = None, quantize_input: bool = True) -> FP8Matrix:
    generator = torch.Generator().manual_seed(n + k)
    weight = (torch.randn(n, k, generator=generator) * 40).to(torch.float8_e4m3fn)
    shape = (-(-n // row_block), -(-k // 128)) if row_block else (n,)
    scale = torch.rand(shape, generator=generator) / 100 + 1e-3
    return FP8Matrix(weight.to(DEVICE), scale.to(DEVICE), row_block, quantize_input, bias)


def rows_of(m: int, k: int, blocked: bool) -> FP8Rows:
    return FP8Rows(
        torch.empty(m, k, dtype=torch.float8_e4m3fn, device=DEVICE),
        torch.full(scale_shape(m, k, blocked), torch.nan, device=DEVICE),
    )


GEMV_SWEEP = [(row_block, n, k, *case) for row_block in (0, 1, 16) for n, k in ((24, 256), (10, 160)) for case in CASES]
GEMV_KEEP = [(0, 24, 256, *CASES[1]), (16, 10, 160, *CASES[0]), (1, 24, 256, *CASES[3])]


@pytest.mark.parametrize(("row_block", "n", "k", "norm", "bias", "gate", "add"), everyday(GEMV_SWEEP, GEMV_KEEP))
def test_gemv(row_block: int, n: int, k: int, norm: bool, bias: bool, gate: int, add: bool) -> None:
    more = noise(n, seed=5) if bias else None
    matrix = fp8(n * (2 if gate else 1), k, row_block, more)
    x, out, weight = noise(1, k, seed=1), noise(1, n, seed=3), noise(k, seed=4).float() + 1 if norm else None
    exact = expected(x, matrix.dense(), out, weight, more, gate, add)
    want = expected(in_halves(x, weight, 1e-5), matrix.dense(), out, None, more, gate, add)
    fp8_gemv(x, matrix, out, FP8GemvTile(2, 4, 1), norm=weight, eps=1e-5, gate=gate, add=add)
    assert error(out, want) < LIMIT
    assert error(out, exact) < max(LIMIT, 1e-3)


def in_halves(x: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    """A token as the GEMV multiplies it: normed, in float16 whose largest is 16."""
    x = x.float()
    values = x if norm is None else x * norm
    largest = values.abs().max()
    halves = (values * (16 / largest)).half().double() * (largest / 16)
    return halves if norm is None else halves * torch.rsqrt(x.square().mean() + eps)


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_gemv_of_largest_codes(factor: float) -> None:
    """Sums of float16 do not overflow, however large the token, and however many of its values are the largest."""
    matrix = FP8Matrix(torch.full((8, 512), 448.0, device=DEVICE).to(torch.float8_e4m3fn), torch.ones(8, device=DEVICE))
    x, out = torch.full((1, 512), factor, dtype=DTYPE, device=DEVICE), torch.empty(1, 8, dtype=DTYPE, device=DEVICE)
    fp8_gemv(x, matrix, out, FP8GemvTile(2, 4, 1))
    assert error(out, x.double() @ matrix.dense().double().T) < LIMIT


def test_gemv_of_zeros() -> None:
    matrix, out = fp8(8, 256, 0), torch.full((1, 8), torch.nan, dtype=DTYPE, device=DEVICE)
    fp8_gemv(torch.zeros(1, 256, dtype=DTYPE, device=DEVICE), matrix, out, FP8GemvTile(2, 4, 1))
    assert not out.any()


GEMM_SWEEP = [
    (quantized, row_block, m, n, k, splits, *case)
    for quantized in (True, False)
    for row_block in (0, 16)
    for m, n, k, splits in ((2, 40, 256, 1), (19, 24, 384, 3), (20, 24, 160, 1))
    for case in WITHOUT_NORM
]
GEMM_KEEP = [
    (True, 0, 19, 24, 384, 3, *WITHOUT_NORM[1]),
    (True, 16, 20, 24, 160, 1, *WITHOUT_NORM[3]),
    (False, 16, 19, 24, 384, 3, *WITHOUT_NORM[1]),
    (False, 0, 2, 40, 256, 1, *WITHOUT_NORM[0]),
]


@pytest.mark.parametrize(
    ("quantized", "row_block", "m", "n", "k", "splits", "bias", "gate", "add"), everyday(GEMM_SWEEP, GEMM_KEEP)
)
def test_gemm(
    quantized: bool, row_block: int, m: int, n: int, k: int, splits: int, bias: bool, gate: int, add: bool
) -> None:
    more = noise(n, seed=5) if bias else None
    matrix = fp8(n * (2 if gate else 1), k, row_block, more)
    plain, out = noise(m, k, seed=1), noise(m, n, seed=3)
    x: torch.Tensor | FP8Rows = plain
    if quantized:
        x = rows_of(m, k, bool(row_block))
        quantize_rows(plain, x)
        plain = x.dense()
    want = expected(plain, matrix.dense(), out, None, more, gate, add)
    tile = FP8GemmTile(16, 128, 16, splits, 2, 4)
    partial = torch.full((fp8_gemm_floats(n, m, tile, bool(gate)),), torch.nan, device=DEVICE)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    fp8_gemm(x, matrix, out, tile, partial, counters, gate=gate, add=add)
    assert error(out, want) < LIMIT * 10  # the tensor cores' sums of FP8 products are not float32
    assert not counters.any()


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_rows_are_quantized(blocked: bool, norm: bool) -> None:
    x, weight = noise(3, 320, seed=1), noise(320, seed=4).float() + 1 if norm else None
    out = rows_of(3, 320, blocked)
    quantize_rows(x, out, weight, 1e-5)
    want = x.float() if weight is None else rms_norm(x.float(), weight, 1e-5)
    assert error(out.dense(), want) < 0.04  # three bits of mantissa
    largest = [part.abs().amax(1) / 448 for part in (want.split(128, 1) if blocked else (want,))]
    assert torch.allclose(out.scale.view(-1, 3), torch.stack(largest), rtol=1e-2)


@pytest.mark.parametrize("blocked", [False, True])
def test_gated_activation_is_quantized(blocked: bool) -> None:
    gate_up, out = noise(3, 2 * 200, seed=1), rows_of(3, 200, blocked)
    gated_quantize(gate_up, "silu", out)
    assert error(out.dense(), gated_activation_reference(gate_up.float(), "silu")) < 0.04


@pytest.mark.parametrize("row_block", [0, 16])
def test_rows_are_dequantized(row_block: int) -> None:
    matrix = fp8(40, 160, row_block)
    out = torch.full((25, 160), torch.nan, dtype=DTYPE, device=DEVICE)
    dequantize_fp8_rows(matrix, out, first=15, factor=2.0)
    assert error(out, matrix.dense()[15:] * 2) < LIMIT
    ids = torch.tensor([3, 39, 3], dtype=torch.int32, device=DEVICE)
    dequantize_fp8_rows(matrix, out[:3], ids=ids)
    assert error(out[:3], matrix.dense()[ids.long()]) < LIMIT


# µs on an H200 by tile (rows, columns, tokens, splits): what the choice must come close to. m, n, k: of Llama 8B.
MEASURED = {
    (48, 6144, 4096): {(64, 256, 64, 2): 17.6, (128, 128, 64, 2): 13.1, (64, 256, 64, 1): 14.2, (64, 128, 64, 2): 14.8},
    (48, 4096, 4096): {(64, 256, 64, 2): 10.4, (64, 128, 64, 4): 11.0, (128, 128, 64, 4): 11.2},
    (48, 4096, 14336): {(64, 256, 64, 2): 23.9, (128, 128, 64, 4): 23.2, (64, 128, 64, 4): 23.5},
    (128, 6144, 4096): {(128, 128, 128, 4): 27.7, (64, 128, 64, 1): 12.8, (64, 256, 128, 1): 13.3},
    (128, 4096, 4096): {(128, 128, 128, 4): 19.0, (64, 256, 64, 1): 9.5, (64, 128, 64, 2): 10.9},
    (128, 4096, 14336): {(128, 128, 128, 4): 33.4, (64, 256, 64, 1): 24.5, (64, 128, 64, 2): 24.5},
    (256, 6144, 4096): {(128, 128, 128, 2): 32.3, (128, 128, 128, 1): 15.5, (64, 128, 128, 1): 16.0},
    (256, 4096, 4096): {(128, 128, 128, 2): 19.9, (64, 128, 64, 1): 12.4, (64, 256, 128, 1): 12.6},
    (256, 4096, 14336): {(128, 128, 128, 2): 42.4, (128, 128, 64, 2): 32.8, (64, 128, 128, 2): 34.8},
}


def test_the_chosen_tile_is_close_to_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_module, "sm_count", lambda: 132)
    for shape, times in MEASURED.items():
        tile = gemm_module._fastest_tile(*shape)
        assert times[tile.rows, tile.cols, tile.tokens, tile.splits] <= 1.1 * min(times.values()), shape
