# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Weights of 4 or 8 bits in groups of 32, `w = scale * code + offset`: how they lie, and how they become floats.

Codes lie in words of 32 bits, a group in neighbouring words; code i of a group's word j is its column
i * (words of a group) + j. So a thread that reads 16 bytes of a row meets one group (or half of one), and code i of
neighbouring words meets neighbouring columns. A group's scale and offset are the two halves of one more word; those
lie apart, the rows of one group beside each other: programs take several rows, and each group of columns once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import cdiv

GROUP = 32
_PACKED_ROWS = 1024  # packed at a time, so that loading needs little beside the result


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    codes: Tensor  # int32 [n, k * bits / 32]
    affine: Tensor  # int32 [k / GROUP, n]: float16 scale in the low half, float16 offset in the high one
    bits: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.affine.shape[1], self.affine.shape[0] * GROUP


def pack(parts: list[Any], bias: Tensor | None, device: str, dtype: torch.dtype) -> QuantisedMatrix:
    """Affine parts (`emberline.weights.tensors.Affine`) below each other; 4 bits only where all have 4."""
    bits, k = max(part.bits for part in parts), parts[0].codes.shape[1]
    n = sum(len(part.codes) for part in parts)
    codes = torch.empty(n, k * bits // 32, dtype=torch.int32, device=device)
    halves = [np.concatenate([getattr(part, name) for part in parts]).astype(np.float16) for name in _HALVES]
    affine = torch.from_numpy(np.stack(halves, axis=-1).view(np.int32)[..., 0]).to(device).T.contiguous()
    done = 0
    for part in parts:
        for start in range(0, len(part.codes), _PACKED_ROWS):
            rows = torch.from_numpy(part.codes[start : start + _PACKED_ROWS]).to(device)
            codes[done : done + len(rows)] = _words(rows, bits)
            done += len(rows)
    return QuantisedMatrix(codes, affine, bits, bias)


_HALVES = ("scale", "offset")


def _words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [n, k], a code each, to int32 [n, k * bits / 32]."""
    each = 32 // bits
    by_word = codes.view(len(codes), -1, each, GROUP // each).transpose(2, 3)  # [n, groups, words, codes of a word]
    if bits == 4:
        by_word = by_word[..., 0::2] | by_word[..., 1::2] << 4
    return by_word.contiguous().view(torch.int32).flatten(1)


def dequantise_reference(matrix: QuantisedMatrix) -> Tensor:
    """float32 [n, k]."""
    n, _ = matrix.shape
    each = 32 // matrix.bits
    shifts = torch.arange(each, dtype=torch.int32, device=matrix.codes.device) * matrix.bits
    by_word = (matrix.codes.view(n, -1, GROUP // each)[..., None] >> shifts) & (2**matrix.bits - 1)
    grouped = by_word.transpose(2, 3).flatten(2).float()  # [n, groups, GROUP]
    scale, offset = matrix.affine.T.contiguous().view(torch.float16).view(n, -1, 2).float().unbind(-1)
    dense: Tensor = grouped * scale[..., None] + offset[..., None]
    return dense.flatten(1)


BITS_OF_256, BITS_OF_16 = 0x43800000, 0x41800000  # as float32


@triton.jit
def raised(word, of_256, of_16, BITS: tl.constexpr):
    """The codes of each word as floats that stand too high, by 256 in even places and, of 4 bits, by 16 in odd ones.

    A code's bits are put straight into a mantissa: no conversion, and two codes of 4 bits share a shift. The floats'
    other bits are run-time numbers, since the instruction that masks and sets bits takes only one constant.
    """
    a, b, c, d = word << 15, word << 7, word >> 1, word >> 9
    if BITS == 8:
        return (
            ((a & 0x7F8000) | of_256).to(tl.float32, bitcast=True),
            ((b & 0x7F8000) | of_256).to(tl.float32, bitcast=True),
            ((c & 0x7F8000) | of_256).to(tl.float32, bitcast=True),
            ((d & 0x7F8000) | of_256).to(tl.float32, bitcast=True),
        )
    else:
        return (
            ((a & 0x78000) | of_256).to(tl.float32, bitcast=True),
            ((a & 0x780000) | of_16).to(tl.float32, bitcast=True),
            ((b & 0x78000) | of_256).to(tl.float32, bitcast=True),
            ((b & 0x780000) | of_16).to(tl.float32, bitcast=True),
            ((c & 0x78000) | of_256).to(tl.float32, bitcast=True),
            ((c & 0x780000) | of_16).to(tl.float32, bitcast=True),
            ((d & 0x78000) | of_256).to(tl.float32, bitcast=True),
            ((d & 0x780000) | of_16).to(tl.float32, bitcast=True),
        )


@triton.jit
def scale_offset(affine):
    scale = (affine & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    offset = (affine >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, offset


@triton.jit
def weights(word, affine, of_256, of_16, BITS: tl.constexpr):
    """The weights of each word, float32, in the order of its codes."""
    scale, offset = scale_offset(affine)
    even, odd = offset - 256.0 * scale, offset - 16.0 * scale
    q = raised(word, of_256, of_16, BITS)
    if BITS == 8:
        return (q[0] * scale + even, q[1] * scale + even, q[2] * scale + even, q[3] * scale + even)
    else:
        return (
            q[0] * scale + even, q[1] * scale + odd, q[2] * scale + even, q[3] * scale + odd,
            q[4] * scale + even, q[5] * scale + odd, q[6] * scale + even, q[7] * scale + odd,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "of_256", "of_16"])
def _dequantise(
    codes, affine, ids, out, first, n, k, factor, of_256, of_16,
    BITS: tl.constexpr, IDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 32 // BITS
    SPAN: tl.constexpr = 32 // EACH
    row = first + tl.program_id(0)
    if IDS:
        row = tl.load(ids + tl.program_id(0))
    wide = row.to(tl.int64)
    place = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    ok = place < k // EACH
    group = place // SPAN
    word = tl.load(codes + wide * (k // EACH) + place, mask=ok, other=0)
    w = weights(word, tl.load(affine + group * n + row, mask=ok, other=0), of_256, of_16, BITS)
    to = out + tl.program_id(0).to(tl.int64) * k + group * 32 + place % SPAN
    for i in tl.static_range(EACH):
        tl.store(to + i * SPAN, (w[i] * factor).to(out.dtype.element_ty), mask=ok)


def quantised_rows(matrix: QuantisedMatrix, ids: Tensor, factor: float, out: Tensor) -> None:
    """Rows of the matrix times a factor: out [tokens, k]."""
    _unpack(matrix, ids, 0, factor, out)


def dequantise(matrix: QuantisedMatrix, first: int, out: Tensor) -> None:
    """Rows first .. of the matrix, as many as out has: out [rows, k]."""
    _unpack(matrix, None, first, 1.0, out)


def _unpack(matrix: QuantisedMatrix, ids: Tensor | None, first: int, factor: float, out: Tensor) -> None:
    rows, k = out.shape
    if rows:
        _dequantise[(rows, cdiv(matrix.codes.shape[1], 512))](
            matrix.codes, matrix.affine, matrix.codes if ids is None else ids, out, first, matrix.shape[0], k, factor,
            BITS_OF_256, BITS_OF_16, BITS=matrix.bits, IDS=ids is not None, WORDS=512,
        )  # fmt: skip
