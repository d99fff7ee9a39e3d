"""One matrix per expert in any of the formats that the grouped GEMM multiplies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels.gpu.dequantize import dequantize_reference, scale_words_per_tile

FORMATS = ("dense", "int4", "mxfp4", "fp8", "fp8_blocks")
PACKED = ("int4", "mxfp4")
FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """Matrices [n, k] of `experts` experts; gate and up are stacked."""

    kind: str  # of FORMATS
    k: int
    # dense: [experts, n, k]; int4, mxfp4: codes, int16 [experts, n, halves], as `dequantize.pack_nibbles` makes them;
    # fp8: e4m3 in uint8 [experts, n, k]
    weight: Tensor
    # int4, mxfp4: int32 [experts, words, n], of `dequantize.pack_scales`; fp8: float32 [experts, n]; fp8_blocks:
    # float32 [experts, ceil(n / 128), ceil(k / 128)]
    scale: Tensor | None = None
    group: int = 0  # int4, mxfp4: columns that share a scale
    bias: Tensor | None = None  # [experts, n]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.weight.shape[0], self.weight.shape[1], self.k

    @property
    def words_per_tile(self) -> int:
        return scale_words_per_tile(self.kind, self.group) if self.kind in PACKED else 0

    def dense(self) -> Tensor:
        """float32 [experts, n, k]: the reference of what the kernels multiply."""
        if self.kind == "dense":
            return self.weight.float()
        assert self.scale is not None
        if self.kind in PACKED:
            return dequantize_reference(self.weight, self.scale, self.kind, self.group, self.k)
        values, (_, n, k) = self.weight.view(torch.float8_e4m3fn).float(), self.shape
        if self.kind == "fp8":
            return values * self.scale[..., None]
        blocks = self.scale.repeat_interleave(FP8_BLOCK, 1).repeat_interleave(FP8_BLOCK, 2)
        return values * blocks[:, :n, :k]
