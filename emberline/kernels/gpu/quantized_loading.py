"""Matrices of quantized checkpoints on the device: the file's bytes are read there as they are, and repacked there.

Bytes are read into the memory of the final layout, which is never smaller, and repacked in place once they are all
there: loading needs no second copy of the weights.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberline.kernels.gpu.dequantize import HALVES, TILE, pack_nibbles, pack_scales, scale_words_per_tile
from emberline.kernels.gpu.fp8_gemm import BLOCK, FP8Matrix
from emberline.kernels.gpu.launch import cdiv
from emberline.kernels.gpu.packed_gemm import PackedMatrix

_ROWS = 1024  # repacked at a time: bounds the temporary memory


def load_quantized(weights: list[Any], bias: Tensor | None, device: str) -> PackedMatrix | FP8Matrix | None:
    """`weights.quantized_weight.QuantizedWeight` parts stacked by rows; None where they are not all of one format."""
    kinds = {(weight.kind, weight.group) for weight in weights}
    if len(kinds) != 1:
        return None
    ((kind, group),) = kinds
    if kind == "fp8":
        return _load_fp8(weights, bias, device)
    if kind in ("int4", "mxfp4"):
        return _load_packed(weights, bias, kind, group, device)
    return None


def _load_packed(weights: list[Any], bias: Tensor | None, kind: str, group: int, device: str) -> PackedMatrix:
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


def _load_fp8(weights: list[Any], bias: Tensor | None, device: str) -> FP8Matrix:
    rows, k = [weight.shape[0] for weight in weights], weights[0].shape[1]
    codes = torch.empty(sum(rows), k, dtype=torch.uint8, device=device)
    for weight, target in zip(weights, torch.split(codes, rows), strict=True):
        weight.codes.into(target)
    scale, row_block = fp8_scales(weights)
    quantize_input = all(weight.quantize_input for weight in weights)
    scale_tensor = torch.from_numpy(scale).to(device)
    return FP8Matrix(codes.view(torch.float8_e4m3fn), scale_tensor, row_block, quantize_input, bias)


def fp8_scales(weights: list[Any]) -> tuple[Any, int]:
    """The scales of stacked weights, float32 [n] or of blocks, and how many rows share a block's: see FP8Matrix."""
    parts = [weight.fp8_scale() for weight in weights]
    if len({block for _, block in parts}) == 1 and (
        parts[0][1] != BLOCK or all(weight.shape[0] % BLOCK == 0 for weight in weights[:-1])
    ):
        return np.ascontiguousarray(np.concatenate([scale for scale, _ in parts])), parts[0][1]
    # Blocks that a part's end divides: one scale for every row.
    each = [
        scale.repeat(block, axis=0)[: weight.shape[0]] for (scale, block), weight in zip(parts, weights, strict=True)
    ]
    return np.ascontiguousarray(np.concatenate(each)), 1
