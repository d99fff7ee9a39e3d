"""A matrix of INT4, MXFP4 or FP8 codes with their scales: as numbers, or as the bytes that a GPU's kernels decode."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import GROUP, Affine, Bytes, Floats, Unpack, Weight, dequantize

if TYPE_CHECKING:
    import torch

BLOCK = 128  # rows and columns of FP8 blocks
_CHUNK_WEIGHTS = 1 << 24  # float32 numbers held at once while codes are converted


@dataclass(frozen=True, slots=True)
class QuantizedWeight(Weight):
    """`raw` holds the codes: of INT4 (value plus 8) and MXFP4 two a byte, the even column in the low half."""

    scale: Weight | None = None  # [rows, cols / group]; FP8 also [blocks, blocks], one per row or one for all
    group: int = 0  # columns that share a scale; 0: FP8 with a scale per row or per tensor
    quantize_input: bool = False  # FP8: the activations are quantized too

    @property
    def stored(self) -> tuple[Weight, ...]:
        assert self.scale is not None
        return self, self.scale

    @property
    def codes(self) -> Weight:
        """The bytes of the codes, [rows, bytes], as a weight of their own for a loader."""
        return Weight(
            f"{self.name} (codes)", (self.shape[0], self.raw.shape[1]), "u8", self.raw, self.order,
            location=self.location, loader=self.loader,
        )  # fmt: skip

    @property
    def row_scale(self) -> Weight:
        """The scales of each row of INT4 and MXFP4, [rows, groups], in the order of the rows."""
        assert self.scale is not None
        assert self.kind != "fp8"
        shape = (self.shape[0], self.scale.shape[1])
        return replace(self.scale, shape=shape, order=self.order, loader=self.loader)

    def fp8_scale(self) -> tuple[Floats, int]:
        """Scales [rows], and 0; or of blocks [n, ceil(cols / BLOCK)], and how many rows share each."""
        assert self.scale is not None
        numbers = self.scale.dense()
        if not self.group:
            each = np.broadcast_to(numbers.reshape(-1), len(self.raw))
            return (each if self.order is None else each[self.order]).astype(np.float32), 0
        if self.order is None:
            return numbers, BLOCK
        return numbers[self.order // BLOCK], 1

    def slice(self, axis: int, start: int, stop: int) -> "QuantizedWeight":
        """Slice the matrix as `Weight.slice` does. Columns are divided between groups only."""
        assert self.scale is not None
        scale, blocks = self.scale, self.kind == "fp8" and self.group
        if axis == 1:
            if self.group and (start % self.group or (stop % self.group and stop != self.shape[1])):
                raise BadCheckpoint(f"columns {start} to {stop} of {self.name!r} divide a group of {self.group}")
            if self.group:
                scale = scale.slice(1, start // self.group, -(-stop // self.group))
        elif self.order is None and blocks and (start % BLOCK or (stop % BLOCK and stop != self.shape[0])):
            order = np.arange(start, stop)  # blocks are divided: each row finds its own scale
            return replace(self, shape=(stop - start, self.shape[1]), order=order)
        elif self.order is None and len(scale.raw) > 1:
            unit = BLOCK if blocks else 1
            scale = scale.slice(0, start // unit, -(-stop // unit))
        part = Weight.slice(self, axis, start, stop)
        assert isinstance(part, QuantizedWeight)
        return replace(part, scale=scale)

    def _dense_rows(self, start: int, stop: int) -> Floats:
        rows = self._rows(start, stop)
        if self.kind == "fp8":
            return dequantize("fp8", rows) * self._fp8_scale_of(start, stop)
        codes = np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1)
        values = codes.astype(np.float32) - 8 if self.kind == "int4" else _MXFP4[codes]
        scale = _scale_numbers(self.row_scale, start, stop)
        grouped: Floats = values.reshape(*scale.shape, self.group) * scale[..., None]
        return grouped.reshape(len(rows), -1)

    def _fp8_scale_of(self, start: int, stop: int) -> Floats:
        scale, rows = self.fp8_scale()
        if not rows:
            return scale[start:stop, None]
        at = np.arange(start, min(stop, self.shape[0])) // rows
        return scale[at].repeat(BLOCK, axis=1)[:, : self.shape[1]]

    def dense(self) -> Floats:
        return self._dense_rows(0, self.shape[0])

    def affine(self, unpack: Unpack | None = None) -> Affine | None:
        """INT4 as codes and offsets, for kernels that know GGUF's formats; None for the others."""
        if self.kind != "int4" or self.shape[1] % GROUP:
            return None
        rows = self._rows()
        scale = _scale_numbers(self.row_scale, 0, self.shape[0]).repeat(self.group // GROUP, axis=1)
        return Affine(np.stack([rows & 15, rows >> 4], axis=-1).reshape(self.shape), scale, scale * -8, 4)

    def tensor(self, dtype: "torch.dtype", device: "torch.device | str" = "cpu") -> "torch.Tensor":
        import torch

        out = torch.empty(self.shape, dtype=dtype, device=device)
        step = max(1, _CHUNK_WEIGHTS // self.shape[1])
        for start in range(0, self.shape[0], step):
            out[start : start + step] = torch.from_numpy(self._dense_rows(start, start + step))
        return out


_MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _scale_numbers(scale: Weight, start: int, stop: int) -> Floats:
    rows: Bytes = scale._rows(start, stop)
    if scale.kind == "u8":  # exponents (e8m0)
        return np.exp2(rows.astype(np.float32) - 127)
    return dequantize(scale.kind, rows)
