"""One matrix per expert in any of the formats that the grouped GEMM multiplies.

4-bit matrices are divided into blocks of ROW_BLOCK rows, and in a block every tile of 128 columns is one piece of
memory, row after row. So a program reads its rows from end to end. If they lay apart it would read 64 bytes of each at
a time, which an H200 does at 2.8 TB/s instead of 4.3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels.gpu.dequantize import HALVES, TILE, dequantize_reference, scale_words_per_tile
from emberline.kernels.gpu.launch import cdiv

FORMATS = ("dense", "int4", "mxfp4", "fp8", "fp8_blocks")
PACKED = ("int4", "mxfp4")
FP8_BLOCK = 128
ROW_BLOCK = 64


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """Matrices [n, k] of `experts` experts; gate and up are stacked."""

    kind: str  # of FORMATS
    k: int
    # dense: [experts, n, k]; fp8: e4m3 in uint8 [experts, n, k]; int4, mxfp4: codes in the half-words of
    # `dequantize.pack_nibbles`, int16 [experts, blocks, tiles, ROW_BLOCK, HALVES]
    weight: Tensor
    # fp8: float32 [experts, n]; fp8_blocks: float32 [experts, ceil(n / 128), ceil(k / 128)]; int4, mxfp4: the words of
    # `dequantize.pack_scales`, int32 [experts, blocks, words, ROW_BLOCK]
    scale: Tensor | None = None
    group: int = 0  # int4, mxfp4: columns that share a scale
    bias: Tensor | None = None  # [experts, n]
    rows: int = 0  # n of int4, mxfp4: the last block may be padded

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.weight.shape[0], self.rows or self.weight.shape[1], self.k

    @property
    def words_per_tile(self) -> int:
        return scale_words_per_tile(self.kind, self.group) if self.kind in PACKED else 0

    def dense(self) -> Tensor:
        """float32 [experts, n, k]: the reference of what the kernels multiply."""
        if self.kind == "dense":
            return self.weight.float()
        assert self.scale is not None
        if self.kind in PACKED:
            codes = self.weight.transpose(2, 3).flatten(1, 2).flatten(2)[:, : self.rows]
            words = self.scale.transpose(1, 2).flatten(2)[..., : self.rows]
            return dequantize_reference(codes, words, self.kind, self.group, self.k)
        values, (_, n, k) = self.weight.view(torch.float8_e4m3fn).float(), self.shape
        if self.kind == "fp8":
            return values * self.scale[..., None]
        blocks = self.scale.repeat_interleave(FP8_BLOCK, 1).repeat_interleave(FP8_BLOCK, 2)
        return values * blocks[:, :n, :k]


def empty_packed(kind: str, experts: int, n: int, k: int, group: int, bias: Tensor | None, device: str) -> ExpertMatrix:
    """Memory for INT4 or MXFP4 matrices."""
    blocks, tiles = cdiv(n, ROW_BLOCK), cdiv(k, TILE)
    codes = torch.empty(experts, blocks, tiles, ROW_BLOCK, HALVES, dtype=torch.int16, device=device)
    words = tiles * scale_words_per_tile(kind, group)
    scale = torch.empty(experts, blocks, words, ROW_BLOCK, dtype=torch.int32, device=device)
    return ExpertMatrix(kind, k, codes, scale, group, bias, n)


def divide_codes(codes: Tensor) -> Tensor:
    """Half-words [experts, n, halves] in blocks of rows: `weight` of a matrix."""
    missing = -codes.shape[1] % ROW_BLOCK
    if missing:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, missing))
    experts, n, halves = codes.shape
    return codes.view(experts, n // ROW_BLOCK, ROW_BLOCK, halves // HALVES, HALVES).transpose(2, 3).contiguous()


def divide_words(words: Tensor) -> Tensor:
    """Scale words [experts, words, n] in blocks of rows: `scale` of a matrix."""
    missing = -words.shape[2] % ROW_BLOCK
    if missing:
        words = torch.nn.functional.pad(words, (0, missing))
    return words.view(*words.shape[:2], -1, ROW_BLOCK).transpose(1, 2).contiguous()


def packed_experts(
    kind: str, k: int, codes: Tensor, words: Tensor, group: int, bias: Tensor | None = None
) -> ExpertMatrix:
    """Pack experts from codes [experts, n, halves] and scale words [experts, words, n]."""
    return ExpertMatrix(kind, k, divide_codes(codes), divide_words(words), group, bias, codes.shape[1])
