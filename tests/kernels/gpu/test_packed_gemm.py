"""Products with INT4 and MXFP4 weights against the dequantized matrix, for few and many tokens."""

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu.dequantize import pack_nibbles, pack_scales
from emberline.kernels.gpu.packed_gemm import (
    PackedGemmTile,
    PackedMatrix,
    dequantize_packed_rows,
    packed_gemm,
    packed_gemm_floats,
)
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, everyday, noise
from tests.kernels.gpu.test_matmul import WITHOUT_NORM, expected

FORMATS = [("int4", 32), ("int4", 128), ("mxfp4", 32)]


def packed(n: int, k: int, kind: str, group: int, bias: torch.Tensor | None = None) -> PackedMatrix:
    generator = torch.Generator().manual_seed(n + k)
    raw = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    if kind == "mxfp4":
        scale = torch.randint(118, 125, (n, k // group), dtype=torch.uint8, generator=generator)
    else:
        scale = (torch.rand(n, k // group, generator=generator) / 16).bfloat16()
    codes, words = pack_nibbles(raw, kind), pack_scales(scale, kind, group)
    return PackedMatrix(codes.to(DEVICE), words.to(DEVICE), kind, group, k, bias)


SWEEP = [
    (kind, group, m, n, k, splits, *case)
    for kind, group in FORMATS
    for m, n, k, splits in ((1, 40, 256, 1), (19, 24, 384, 3), (70, 40, 128, 1), (5, 24, 96, 1))
    for case in WITHOUT_NORM
    if k % group == 0
]
KEEP = [
    ("int4", 32, 19, 24, 384, 3, *WITHOUT_NORM[1]),
    ("int4", 128, 70, 40, 128, 1, *WITHOUT_NORM[3]),
    ("mxfp4", 32, 5, 24, 96, 1, *WITHOUT_NORM[0]),
]


@pytest.mark.parametrize(("kind", "group", "m", "n", "k", "splits", "bias", "gate", "add"), everyday(SWEEP, KEEP))
def test_packed_gemm(
    kind: str, group: int, m: int, n: int, k: int, splits: int, bias: bool, gate: int, add: bool
) -> None:
    more = noise(n, seed=5) if bias else None
    matrix = packed(n * (2 if gate else 1), k, kind, group, more)
    x, out = noise(m, k, seed=1), noise(m, n, seed=3)
    want = expected(x, matrix.dense(), out, None, more, gate, add)
    tile = PackedGemmTile(16, 16, splits, 2, 4)
    partial = torch.full((packed_gemm_floats(n, m, tile, bool(gate)),), torch.nan, device=DEVICE)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    packed_gemm(x, matrix, out, tile, partial, counters, gate=gate, add=add)
    assert error(out, want) < LIMIT
    assert not counters.any()


@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_rows_are_dequantized(kind: str, group: int) -> None:
    matrix = packed(45, 256, kind, group)
    out = torch.full((35, 256), torch.nan, dtype=DTYPE, device=DEVICE)
    dequantize_packed_rows(matrix, out, first=10, factor=2.0)
    assert error(out, matrix.dense()[10:] * 2) < LIMIT
    ids = torch.tensor([3, 44, 3], dtype=torch.int32, device=DEVICE)
    dequantize_packed_rows(matrix, out[:3], ids=ids)
    assert error(out[:3], matrix.dense()[ids.long()]) < LIMIT
