"""INT4 and MXFP4 matrices: the file's bytes are read as they are and repacked in place, without a second copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.gpu.dequantize import HALVES, TILE, pack_nibbles, pack_scales, scale_words_per_tile
from emberline.kernels.gpu.formats.matrix_format import Fusion, Launcher, MatrixFormat
from emberline.kernels.gpu.launch import cdiv
from emberline.kernels.gpu.packed_gemm import (
    PackedMatrix,
    dequantize_packed_rows,
    packed_gemm,
    packed_gemm_floats,
    packed_gemm_tile,
)

_ROWS = 1024  # repacked at a time: bounds the temporary memory


class Packed(MatrixFormat):
    matrix = PackedMatrix

    def load(self, weights: Sequence[Any], bias: Tensor | None, dtype: torch.dtype, device: str) -> PackedMatrix | None:
        kinds = {(weight.kind, getattr(weight, "group", 0)) for weight in weights}
        kind, group = next(iter(kinds))
        return _load(weights, bias, kind, group, device) if len(kinds) == 1 and kind in ("int4", "mxfp4") else None

    def write_rows(
        self, matrix: PackedMatrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
    ) -> None:
        dequantize_packed_rows(matrix, out, ids=ids, first=first, factor=factor)

    def multiply(
        self, on: Launcher, x: Tensor, matrix: PackedMatrix, out: Tensor, fusion: Fusion, after_attention: bool = False
    ) -> None:
        (m, n), workspace, gated = out.shape, on.workspace, bool(fusion.gate)
        tile = packed_gemm_tile(m, n, matrix.k, gated)
        if tile is None or packed_gemm_floats(n, m, tile, gated) > workspace.matmul.numel():
            self.unfused(on, x, matrix, out, fusion)
            return
        packed_gemm(
            on.normed(x, fusion), matrix, out, tile, workspace.matmul, workspace.counters, gate=fusion.gate,
            add=fusion.add, pdl=2 * on.pdl,
        )  # fmt: skip


def _load(weights: Sequence[Any], bias: Tensor | None, kind: str, group: int, device: str) -> PackedMatrix:
    rows, k = [weight.shape[0] for weight in weights], weights[0].shape[1]
    n, tiles = sum(rows), cdiv(k, TILE)
    codes = torch.empty(n, tiles * HALVES, dtype=torch.int16, device=device)
    scale = torch.empty(tiles * scale_words_per_tile(kind, group), n, dtype=torch.int32, device=device)
    raw = _first_bytes(codes, n, k // 2)
    scale_dtype = torch.uint8 if kind == "mxfp4" else torch.bfloat16
    raw_scale = _first_bytes(scale, n, k // group * scale_dtype.itemsize).view(scale_dtype)
    parts = zip(weights, torch.split(raw, rows), torch.split(raw_scale, rows), strict=True)
    for weight, codes_part, scale_part in parts:
        weight.codes.into(codes_part)
        weight.row_scale.into(scale_part)

    def repack() -> None:
        for start in reversed(range(0, n, _ROWS)):  # from the end: a row is not packed over one yet to be
            part = slice(start, start + _ROWS)
            codes[part] = pack_nibbles(raw[part].clone(), kind)
        scale.copy_(pack_scales(raw_scale.clone(), kind, group))

    weights[0].when_read(repack)
    return PackedMatrix(codes, scale, kind, group, k, bias)


def _first_bytes(memory: Tensor, rows: int, row_bytes: int) -> Tensor:
    return memory.view(-1).view(torch.uint8)[: rows * row_bytes].view(rows, row_bytes)
