"""One weight of a checkpoint: its block format on disk, and its conversion to numbers.

Every quantized format is read as `w = scale * code + offset` over small groups, exactly: a code has at most 8 bits and
a scale at most 18, so the product fits float32's mantissa and only the final sum rounds, as in the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from emberline.weights.model_config import BadCheckpoint, ModelConfig

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Shape = tuple[int, ...]

GROUP = 32  # weights that share a scale and an offset in the affine form
_CHUNK_WEIGHTS = 1 << 24  # float32 numbers held at once while a quantized weight is converted to another dtype
LOADED_BYTES = (16 << 20) - (8 << 10)  # of a file that are read or handed over at once: what a loader's buffer holds

# --- block formats ----------------------------------------------------------------------------------------------------


class AffineBlocks(NamedTuple):
    """Blocks in affine form: codes [n, block], scale and offset [n, block / group]."""

    codes: Bytes
    scale: Floats
    offset: Floats


class BlockFormat(NamedTuple):
    block: int  # weights in a block
    block_bytes: int
    unpack: Callable[[Bytes], AffineBlocks] | None = None  # None for the float formats
    bits: int = 0  # of a code, rounded up to 4 or 8; 0 for the float formats
    group: int = 0  # weights that share a scale
    has_scale_tensor: bool = False  # its codes are part of a `quantized_weight.QuantizedWeight`

    @property
    def is_quantized(self) -> bool:
        return self.unpack is not None or self.has_scale_tensor


def _half(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)  # [n, 1]


def _nibbles(packed: Bytes) -> Bytes:
    """[..., k] bytes -> [..., 2k] codes: all low halves, then all high halves."""
    k = packed.shape[-1]
    codes = np.empty((*packed.shape[:-1], 2 * k), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., :k])
    np.right_shift(packed, 4, out=codes[..., k:])
    return codes


def _fifth_bits(packed: Bytes) -> Bytes:
    """[n, 4] bytes of bits, lowest first -> [n, 32] of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> AffineBlocks:
    d = _half(blocks, 0)
    return AffineBlocks(_nibbles(blocks[:, 2:]), d, d * -8)


def _q4_1(blocks: Bytes) -> AffineBlocks:
    return AffineBlocks(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> AffineBlocks:
    d = _half(blocks, 0)
    return AffineBlocks(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), d, d * -16)


def _q5_1(blocks: Bytes) -> AffineBlocks:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return AffineBlocks(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> AffineBlocks:
    d = _half(blocks, 0)
    return AffineBlocks(blocks[:, 2:] ^ np.uint8(128), d, d * -128)  # flipping the top bit: two's complement + 128


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """The 12 bytes of 6-bit scales and minima that Q4_K and Q5_K share, times their half-precision factors."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scale, _half(blocks, 2) * -minimum.astype(np.float32)


def _q4_k(blocks: Bytes) -> AffineBlocks:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return AffineBlocks(codes.reshape(-1, 256), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> AffineBlocks:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    for group in range(8):  # bit g of the 32 high bytes belongs to group g
        codes[:, group] |= (blocks[:, 16:48] >> group & 1) << 4
    return AffineBlocks(codes.reshape(-1, 256), *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> AffineBlocks:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))  # [n, 2, 128]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]  # [n, 2, 4, 32]
    codes = low | ((high & np.uint8(3)) << np.uint8(4)).reshape(low.shape)
    scale = _half(blocks, 208) * blocks[:, 192:208].copy().view(np.int8)
    return AffineBlocks(codes.reshape(-1, 256), scale, scale * -32)


FORMATS: dict[str, BlockFormat] = {
    "f32": BlockFormat(1, 4),
    "f16": BlockFormat(1, 2),
    "bf16": BlockFormat(1, 2),
    "fp8": BlockFormat(1, 1, has_scale_tensor=True),  # e4m3
    "int4": BlockFormat(2, 1, has_scale_tensor=True),
    "mxfp4": BlockFormat(2, 1, has_scale_tensor=True),
    "u8": BlockFormat(1, 1),
    "i64": BlockFormat(1, 8),
    "q4_0": BlockFormat(32, 18, _q4_0, 4, 32),
    "q4_1": BlockFormat(32, 20, _q4_1, 4, 32),
    "q5_0": BlockFormat(32, 22, _q5_0, 8, 32),
    "q5_1": BlockFormat(32, 24, _q5_1, 8, 32),
    "q8_0": BlockFormat(32, 34, _q8_0, 8, 32),
    "q4_k": BlockFormat(256, 144, _q4_k, 4, 32),
    "q5_k": BlockFormat(256, 176, _q5_k, 8, 32),
    "q6_k": BlockFormat(256, 210, _q6_k, 8, 16),
}


def _e4m3() -> Floats:
    """The value of every FP8 code: sign, 4 bits of exponent, 3 of mantissa, no infinities, one NaN of each sign."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3()


def dequantize(kind: str, rows: Bytes) -> Floats:
    """Rows of bytes in format `kind` as float32 [rows, cols]."""
    fmt = FORMATS[kind]
    if fmt.unpack is not None:
        codes, scale, offset = fmt.unpack(rows.reshape(-1, fmt.block_bytes))
        out = codes.reshape(*scale.shape, -1).astype(np.float32)  # [n, groups, group]
        out *= scale[..., None]
        out += offset[..., None]
        return out.reshape(len(rows), -1)
    rows = np.ascontiguousarray(rows)
    if kind == "fp8":
        return _E4M3[rows]
    if kind == "bf16":
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return rows.view("<f4" if kind == "f32" else "<f2").astype(np.float32)


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Affine:
    """`w = scale * code + offset`, with scale and offset shared by GROUP neighbors of a row."""

    codes: Bytes  # [rows, cols]; 0..15 when bits == 4, else 0..255
    scale: Floats  # [rows, cols / GROUP]
    offset: Floats  # [rows, cols / GROUP]
    bits: int  # 4 or 8

    def dense(self) -> Floats:
        grouped = self.codes.reshape(*self.scale.shape, GROUP)
        return (grouped * self.scale[..., None] + self.offset[..., None]).reshape(self.codes.shape)


# Codes, scales and offsets of the blocks of a kind and a shape.
Unpack = Callable[[str, Bytes, Shape], tuple[Bytes, Any, Any]]


class FileLocation(NamedTuple):
    """Where a weight's bytes begin on disk."""

    path: Path
    offset: int


class TensorFiller(Protocol):
    """See `loader.WeightLoader`."""

    def fill(self, weight: "Weight", target: "torch.Tensor") -> None: ...
    def read(self, weight: "Weight", consume: "Callable[[torch.Tensor], None]") -> None: ...
    def then(self, action: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Weight:
    name: str
    shape: Shape  # (rows, cols) or (n,)
    kind: str  # a key of FORMATS
    # [rows, row_bytes], a view of the mapped file; a vector is n rows of one number. Of a compressed tensor
    # `lossless_tensor.LosslessRows`, which decodes the rows that are read.
    raw: Bytes
    order: NDArray[np.intp] | None = None  # row i of the weight is row order[i] of the file
    transposed: bool = False  # the file has it as [cols, rows]: `raw` is [cols, bytes]; of the float formats only
    shift: float = 0.0  # added to every number (Hugging Face's Gemma stores norms minus one)
    location: FileLocation | None = None  # of `raw`, for a loader that reads the file itself
    loader: "TensorFiller | None" = None  # reads the weight later; None: `into` reads at once

    def _rows(self, start: int = 0, stop: int | None = None) -> Bytes:
        if self.transposed:
            item = np.ascontiguousarray(self.raw).view(f"u{FORMATS[self.kind].block_bytes}")  # [cols, rows of the file]
            columns = item[:, start:stop] if self.order is None else item[:, self.order[start:stop]]
            return np.ascontiguousarray(columns.T).view(np.uint8)
        return np.asarray(self.raw[start:stop] if self.order is None else self.raw[self.order[start:stop]])

    @property
    def stored(self) -> "tuple[Weight, ...]":
        """The tensors of the file that hold it: one, or codes and scales."""
        return (self,)

    @property
    def nbytes(self) -> int:
        """In the checkpoint's format, decoded if it is compressed."""
        return sum(part.raw.nbytes for part in self.stored)

    @property
    def stored_bytes(self) -> int:
        """On disk."""
        return sum(getattr(part.raw, "stored_bytes", part.raw.nbytes) for part in self.stored)

    def sample(self, start: int, n: int) -> bytes:
        """Bytes of the file's rows, in order, from offset `start`."""
        row_bytes = max(1, self.raw[:1].nbytes)
        first = start // row_bytes
        rows = np.asarray(self.raw[first : -(-(start + n) // row_bytes)]).reshape(-1)
        return rows[start - first * row_bytes :][:n].tobytes()

    def slice(self, axis: int, start: int, stop: int) -> "Weight":
        """Rows (axis 0) or columns (axis 1) start .. stop - 1, as a weight that reads no others."""
        shape = tuple(stop - start if n == axis else size for n, size in enumerate(self.shape))
        if axis == 0 and self.order is not None:
            return replace(self, shape=shape, order=self.order[start:stop])
        if axis == (1 if self.transposed else 0):  # rows of the file
            first = self.location and FileLocation(
                self.location.path, self.location.offset + start * self.raw[:1].nbytes
            )
            return replace(self, shape=shape, raw=self.raw[start:stop], location=first)
        fmt = FORMATS[self.kind]
        if start % fmt.block or stop % fmt.block:
            raise BadCheckpoint(
                f"columns {start} to {stop} of tensor {self.name!r}: {self.kind} has blocks of {fmt.block}"
            )
        first_byte, last_byte = (column // fmt.block * fmt.block_bytes for column in (start, stop))
        return replace(self, shape=shape, raw=self.raw[:, first_byte:last_byte], location=None)

    def dense(self) -> Floats:
        """The numbers as float32."""
        out = dequantize(self.kind, self._rows()).reshape(self.shape)
        return out + np.float32(self.shift) if self.shift else out

    def affine(self, unpack: Unpack | None = None) -> Affine | None:
        """The group-32 affine form, or None for float formats and vectors.

        Exact, except for Q6_K, whose groups of 16 are requantized to 8 bits. A backend's `unpack` makes the same of the
        blocks, faster than numpy, with scales and offsets in half precision.
        """
        fmt = FORMATS[self.kind]
        if fmt.unpack is None or len(self.shape) != 2:
            return None
        if unpack is not None:
            bits = fmt.bits if fmt.group == GROUP else 8
            return Affine(*unpack(self.kind, np.ascontiguousarray(self._rows()), self.shape), bits)
        if fmt.group != GROUP:
            return requantize(self.dense())
        rows, cols = self.shape
        codes, scale, offset = fmt.unpack(self._rows().reshape(-1, fmt.block_bytes))
        groups = (rows, cols // GROUP)
        return Affine(codes.reshape(rows, cols), scale.reshape(groups), offset.reshape(groups), fmt.bits)

    def into(self, target: "torch.Tensor") -> None:
        """Copy the numbers into `target`, converted to its dtype; with a loader, by the time that it finishes."""
        if self.loader is not None:
            self.loader.fill(self, target)
        else:
            target.copy_(self.tensor(target.dtype, "cpu"))

    def read_rows(self, consume: "Callable[[torch.Tensor, int], None]") -> None:
        """Call `consume` with some rows of a BF16 matrix on the host and the number of the first, until all are read:
        at once, or by the time that the loader finishes, on its threads."""
        import torch

        whole_blocks = None if self.transposed else getattr(self.raw, "rows_within", None)  # of a compressed tensor
        step = max(1, LOADED_BYTES // max(1, 2 * self.shape[1])) if whole_blocks is None else whole_blocks(LOADED_BYTES)
        for start in range(0, self.shape[0], step):
            rows = self.slice(0, start, min(start + step, self.shape[0]))
            if self.loader is not None:
                self.loader.read(rows, partial(_hand_over, consume, start))
            else:
                consume(rows.tensor(torch.bfloat16, "cpu"), start)

    def when_read(self, then: Callable[[], None]) -> None:
        """Call `then` once what was requested by `into` is there: at once, or when the loader finishes."""
        if self.loader is not None:
            self.loader.then(then)
        else:
            then()

    def tensor(self, dtype: "torch.dtype", device: "torch.device | str" = "cpu") -> "torch.Tensor":
        """The numbers as a torch tensor; half precision is not converted through float32."""
        import torch

        same = {
            "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn,
            "u8": torch.uint8,
        }.get(self.kind)  # fmt: skip
        if same is not None and not self.shift:
            # Torch wants writable memory of its own: compressed rows were decoded into such memory.
            rows = self._rows()
            plain = np.array(rows, order="C") if isinstance(self.raw, np.ndarray) else np.ascontiguousarray(rows)
            return torch.from_numpy(plain).view(same).view(self.shape).to(device=device, dtype=dtype)
        out = torch.empty(self.shape, dtype=dtype, device=device)
        step = max(1, _CHUNK_WEIGHTS // max(1, int(np.prod(self.shape[1:]))))
        for start in range(0, self.shape[0], step):
            part = dequantize(self.kind, self._rows(start, start + step)).reshape(-1, *self.shape[1:])
            out[start : start + step] = torch.from_numpy(part + np.float32(self.shift))
        return out


def _hand_over(consume: "Callable[[torch.Tensor, int], None]", first: int, rows: "torch.Tensor") -> None:
    consume(rows, first)


def requantize(dense: Floats) -> Affine:
    """Float32 [rows, cols] to 8 bits, each group of GROUP spanning its own minimum to maximum."""
    rows, cols = dense.shape
    grouped = dense.reshape(rows, cols // GROUP, GROUP)
    low = grouped.min(axis=2)
    scale = (grouped.max(axis=2) - low) / np.float32(255)
    step = np.where(scale == 0, np.float32(1), scale)
    with np.errstate(invalid="ignore"):  # a NaN in the file shows in the model's output; it needs no warning here
        codes = np.rint((grouped - low[..., None]) / step[..., None]).astype(np.uint8)
    return Affine(codes.reshape(rows, cols), scale, low, 8)


class CheckpointFiles(NamedTuple):
    """Result of a format's reader: the configuration, the weights by canonical name, and how to unmap the files."""

    config: ModelConfig
    weights: dict[str, Weight]
    close: Callable[[], None]
    fingerprint: str | None = None  # None: as `checkpoint` finds it
    tower: Mapping[str, Weight] = MappingProxyType({})  # of a vision tower, by their names there: for the fingerprint
