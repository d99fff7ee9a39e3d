# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment"
"""Few tokens times a matrix of 4 or 8 bits, multiplied as it lies: one token in registers, more on tensor cores."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.gemm import epilogue, reduce_split_k
from emberline.kernels.gpu.launch import (
    SM_COUNT,
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_launch_late,
    pdl_wait,
)

GROUP = 32
_PACKED_ROWS = 1024  # packed at a time, so that loading needs little beside the result


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    codes: Tensor  # int32 [n, k * bits / 32]
    affine: Tensor  # int32 [k / GROUP, n]: float16 scale in the low half, float16 offset in the high one
    bits: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.affine.shape[1], self.affine.shape[0] * GROUP


def pack_quantized(parts: list[Any], bias: Tensor | None, device: str, dtype: torch.dtype) -> QuantizedMatrix:
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
            codes[done : done + len(rows)] = _pack_words(rows, bits)
            done += len(rows)
    return QuantizedMatrix(codes, affine, bits, bias)


_HALVES = ("scale", "offset")


def _pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [n, k], a code each, to int32 [n, k * bits / 32]."""
    each = 32 // bits
    by_word = codes.view(len(codes), -1, each, GROUP // each).transpose(2, 3)  # [n, groups, words, codes of a word]
    if bits == 4:
        by_word = by_word[..., 0::2] | by_word[..., 1::2] << 4
    return by_word.contiguous().view(torch.int32).flatten(1)


def dequantize_reference(matrix: QuantizedMatrix) -> Tensor:
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
def biased_codes(word, of_256, of_16, BITS: tl.constexpr):
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
def dequantize_words(word, affine, of_256, of_16, BITS: tl.constexpr):
    """The weights of each word, float32, in the order of its codes."""
    scale, offset = scale_offset(affine)
    even, odd = offset - 256.0 * scale, offset - 16.0 * scale
    q = biased_codes(word, of_256, of_16, BITS)
    if BITS == 8:
        return (q[0] * scale + even, q[1] * scale + even, q[2] * scale + even, q[3] * scale + even)
    else:
        return (
            q[0] * scale + even, q[1] * scale + odd, q[2] * scale + even, q[3] * scale + odd,
            q[4] * scale + even, q[5] * scale + odd, q[6] * scale + even, q[7] * scale + odd,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "of_256", "of_16"])
def _dequantize(
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
    w = dequantize_words(word, tl.load(affine + group * n + row, mask=ok, other=0), of_256, of_16, BITS)
    to = out + tl.program_id(0).to(tl.int64) * k + group * 32 + place % SPAN
    for i in tl.static_range(EACH):
        tl.store(to + i * SPAN, (w[i] * factor).to(out.dtype.element_ty), mask=ok)


def quantized_embedding(matrix: QuantizedMatrix, ids: Tensor, factor: float, out: Tensor) -> None:
    """Rows of the matrix times a factor: out [tokens, k]."""
    _launch_dequantize(matrix, ids, 0, factor, out)


def dequantize_rows(matrix: QuantizedMatrix, first: int, out: Tensor) -> None:
    """Rows first .. of the matrix, as many as out has: out [rows, k]."""
    _launch_dequantize(matrix, None, first, 1.0, out)


def _launch_dequantize(matrix: QuantizedMatrix, ids: Tensor | None, first: int, factor: float, out: Tensor) -> None:
    rows, k = out.shape
    if rows:
        _dequantize[(rows, cdiv(matrix.codes.shape[1], 512))](
            matrix.codes, matrix.affine, matrix.codes if ids is None else ids, out, first, matrix.shape[0], k, factor,
            BITS_OF_256, BITS_OF_16, BITS=matrix.bits, IDS=ids is not None, WORDS=512,
        )  # fmt: skip


MAX_GEMV_WORDS = 8192  # of a row, that one program holds against its token


@dataclass(frozen=True, slots=True)
class QuantizedGemvTile:
    rows: int  # of the matrix, at a time
    warps: int
    per_sm: int  # programs on a multiprocessor


@triton.jit
def _load_token(x, norm, word, inside, k, eps, NORM: tl.constexpr, EACH: tl.constexpr):
    """The token as the words want it: for each code of a word its column's number, normed."""
    SPAN: tl.constexpr = 32 // EACH
    col = word // SPAN * 32 + word % SPAN
    v = ()
    for i in tl.static_range(EACH):
        v = v + (tl.load(x + col + i * SPAN, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005  # Triton's tuples
    if NORM:
        squares = v[0] * v[0]
        for i in tl.static_range(1, EACH):
            squares += v[i] * v[i]
        factor = tl.rsqrt(tl.sum(squares) / k + eps)
        normed = ()
        for i in tl.static_range(EACH):
            weight = tl.load(norm + col + i * SPAN, mask=inside, other=0.0)
            normed = normed + (v[i] * factor * weight,)  # noqa: RUF005
        v = normed
    return v


@triton.jit
def _sum_of_four_words(p, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Sums of four words, the 16 bytes that a thread reads: they share a scale."""
    return tl.sum(tl.reshape(p, [ROWS, WORDS // 4, 4]), 2)


@triton.jit
def _dot_rows(words, affine, v, high, sums, of_256, of_16, BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Rows times the token: [ROWS]. high: what the codes' standing too high adds up to; sums: of the token."""
    q = biased_codes(words, of_256, of_16, BITS)
    p = q[0] * v[0][None, :] - high[None, :]
    for i in tl.static_range(1, 32 // BITS):
        p += q[i] * v[i][None, :]
    scale, offset = scale_offset(affine)
    return tl.sum(_sum_of_four_words(p, ROWS, WORDS) * scale + sums * offset, 1)


@triton.jit(do_not_specialize=["of_256", "of_16"])
def _quantized_gemv(
    x, codes, affine, bias, norm, out, n, groups, of_256, of_16, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 32 // BITS
    pdl_launch_early(PDL)
    word, four = tl.arange(0, WORDS), tl.arange(0, WORDS // 4)
    width, k = groups * (32 // EACH), groups * 32
    inside, real = word < width, four < width // 4
    group = four // (8 // EACH)
    stride = tl.num_programs(0) * ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = codes + row.to(tl.int64)[:, None] * width + word[None, :]
    at2 = affine + (group * (n * (2 if GATE else 1)))[None, :] + row[:, None]
    ok = (row < n)[:, None]
    w = tl.load(at, mask=ok & inside[None, :], other=0, eviction_policy="evict_first")
    s = tl.load(at2, mask=ok & real[None, :], other=0)
    if GATE:
        up = n.to(tl.int64) * width
        w2 = tl.load(at + up, mask=ok & inside[None, :], other=0, eviction_policy="evict_first")
        s2 = tl.load(at2 + n, mask=ok & real[None, :], other=0)
    pdl_wait(PDL)
    v = _load_token(x, norm, word, inside, k, eps, NORM, EACH)
    high, total = v[0] * 256.0, v[0]
    for i in tl.static_range(1, EACH):
        high += v[i] * (16.0 if BITS == 4 and i % 2 == 1 else 256.0)
        total += v[i]
    sums = _sum_of_four_words(total[None, :], 1, WORDS)
    for start in range(tl.program_id(0) * ROWS, n, stride):
        row = start + tl.arange(0, ROWS)
        next_ok = (row + stride < n)[:, None]
        at += stride.to(tl.int64) * width
        at2 += stride
        here, here_s = w, s
        w = tl.load(at, mask=next_ok & inside[None, :], other=0, eviction_policy="evict_first")
        s = tl.load(at2, mask=next_ok & real[None, :], other=0)
        other = 0.0
        if GATE:
            here2, here_s2 = w2, s2
            w2 = tl.load(at + up, mask=next_ok & inside[None, :], other=0, eviction_policy="evict_first")
            s2 = tl.load(at2 + n, mask=next_ok & real[None, :], other=0)
            other = _dot_rows(here2, here_s2, v, high, sums, of_256, of_16, BITS, ROWS, WORDS)
        result = _dot_rows(here, here_s, v, high, sums, of_256, of_16, BITS, ROWS, WORDS)
        epilogue(result, other, bias + row, out + row, row < n, row < n, BIAS, GATE, ADD)
    pdl_launch_late(PDL)


def quantized_gemv(
    x: Tensor,
    matrix: QuantizedMatrix,
    out: Tensor,
    tile: QuantizedGemvTile,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: int = 0,
    add: bool = False,
    pdl: int = 0,
) -> None:
    """x: [1, k], out: [1, n]; as `gemv.whole_rows`."""
    n, k = out.shape[1], x.shape[1]
    _quantized_gemv[(min(cdiv(n, tile.rows), tile.per_sm * SM_COUNT),)](
        x, matrix.codes, matrix.affine, x if matrix.bias is None else matrix.bias, x if norm is None else norm, out,
        n, k // 32, BITS_OF_256, BITS_OF_16, eps,
        NORM=norm is not None, BIAS=matrix.bias is not None, GATE=gate, ADD=add, BITS=matrix.bits, ROWS=tile.rows,
        WORDS=max(4, next_power_of_two(matrix.codes.shape[1])), PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizedGemmTile:
    rows: int
    words: int  # of a row, per step of the loop
    splits: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["m"])
def _quantized_skinny_gemm(
    x, codes, affine, bias, out, partial, counters, m, n, groups,
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 32 // BITS
    SPAN: tl.constexpr = 32 // EACH
    pdl_launch_early(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    word, t = tl.arange(0, WORDS), tl.arange(0, TOKENS)
    width, k = groups * SPAN, groups * 32
    each = tl.cdiv(tl.cdiv(width, WORDS), SPLITS) * WORDS
    begin, end = split * each, tl.minimum(split * each + each, width)
    safe = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    near = row
    if not EVEN:
        near = tl.minimum(row, n - 1)
    pdl_wait(PDL)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc2 = tl.zeros([ROWS, TOKENS], tl.float32)
    kind = x.dtype.element_ty
    for start in tl.range(begin, end, WORDS, num_stages=STAGES):
        place = start + word
        inside = (place < end)[None, :]
        scales = affine + (place // SPAN * (n * (2 if GATE else 1)))[None, :]
        source = x + t[:, None] * k + (place // SPAN * 32 + place % SPAN)[None, :]
        w = tl.load(codes + safe * width + place[None, :], mask=inside, other=0)
        s = tl.load(scales + near[:, None], mask=inside, other=0)
        wide = dequantize_words(
            w, s, 0x43800000, 0x41800000, BITS
        )  # constants here: else the compiler moves weights through memory
        if GATE:
            up = safe + n
            w2 = tl.load(codes + up * width + place[None, :], mask=inside, other=0)
            s2 = tl.load(scales + near[:, None] + n, mask=inside, other=0)
            wide2 = dequantize_words(w2, s2, 0x43800000, 0x41800000, BITS)
        for i in tl.static_range(EACH):
            v = tl.trans(tl.load(source + i * SPAN, mask=(t < m)[:, None] & inside, other=0.0))
            acc = tl.dot(wide[i].to(kind), v, acc)
            if GATE:
                acc2 = tl.dot(wide2[i].to(kind), v, acc2)
    pdl_launch_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc2, last = reduce_split_k(acc, acc2, partial, counters, tile, split, GATE, SPLITS, ROWS, TOKENS)
    if last:
        ok = (row < n)[:, None] & (t < m)[None, :]
        to = out + t.to(tl.int64)[None, :] * n + row[:, None]
        epilogue(acc, acc2, bias + row[:, None], to, (row < n)[:, None], ok, BIAS, GATE, ADD)


def quantized_skinny_gemm(
    x: Tensor,
    matrix: QuantizedMatrix,
    out: Tensor,
    tile: QuantizedGemmTile,
    partial: Tensor,
    counters: Tensor,
    *,
    gate: int = 0,
    add: bool = False,
    pdl: int = 0,
) -> None:
    """x: [m, k], out: [m, n]; m at most 64. As `skinny.skinny`, with the weights dequantised on the way."""
    (m, n), k = out.shape, x.shape[1]
    _quantized_skinny_gemm[(cdiv(n, tile.rows), tile.splits)](
        x, matrix.codes, matrix.affine, x if matrix.bias is None else matrix.bias, out, partial, counters,
        m, n, k // 32, BIAS=matrix.bias is not None, GATE=gate, ADD=add,
        SPLITS=tile.splits, BITS=matrix.bits, ROWS=tile.rows, WORDS=tile.words, TOKENS=max(16, next_power_of_two(m)),
        EVEN=n % tile.rows == 0, STAGES=tile.stages, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip
