# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment"
"""Few tokens times a matrix of 4 or 8 bits, multiplied as it lies: one token in registers, more on tensor cores."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.epilogue import join, put
from emberline.kernels.gpu.launch import (
    SM_COUNT,
    await_inputs,
    cdiv,
    options,
    power_of_two,
    release_late,
    release_next,
)
from emberline.kernels.gpu.quantized_weights import (
    BITS_OF_16,
    BITS_OF_256,
    QuantisedMatrix,
    raised,
    scale_offset,
    weights,
)

MAX_WORDS = 8192  # of a row, that one program holds against its token


@dataclass(frozen=True, slots=True)
class VectorTile:
    rows: int  # of the matrix, at a time
    warps: int
    per_sm: int  # programs on a multiprocessor


@triton.jit
def _token(x, norm, word, inside, k, eps, NORM: tl.constexpr, EACH: tl.constexpr):
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
def _fours(p, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Sums of four words, the 16 bytes that a thread reads: they share a scale."""
    return tl.sum(tl.reshape(p, [ROWS, WORDS // 4, 4]), 2)


@triton.jit
def _dots(words, affine, v, high, sums, of_256, of_16, BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Rows times the token: [ROWS]. high: what the codes' standing too high adds up to; sums: of the token."""
    q = raised(words, of_256, of_16, BITS)
    p = q[0] * v[0][None, :] - high[None, :]
    for i in tl.static_range(1, 32 // BITS):
        p += q[i] * v[i][None, :]
    scale, offset = scale_offset(affine)
    return tl.sum(_fours(p, ROWS, WORDS) * scale + sums * offset, 1)


@triton.jit(do_not_specialize=["of_256", "of_16"])
def _vector(
    x, codes, affine, bias, norm, out, n, groups, of_256, of_16, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 32 // BITS
    release_next(PDL)
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
    await_inputs(PDL)
    v = _token(x, norm, word, inside, k, eps, NORM, EACH)
    high, total = v[0] * 256.0, v[0]
    for i in tl.static_range(1, EACH):
        high += v[i] * (16.0 if BITS == 4 and i % 2 == 1 else 256.0)
        total += v[i]
    sums = _fours(total[None, :], 1, WORDS)
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
            other = _dots(here2, here_s2, v, high, sums, of_256, of_16, BITS, ROWS, WORDS)
        result = _dots(here, here_s, v, high, sums, of_256, of_16, BITS, ROWS, WORDS)
        put(result, other, bias + row, out + row, row < n, row < n, BIAS, GATE, ADD)
    release_late(PDL)


def vector(
    x: Tensor,
    matrix: QuantisedMatrix,
    out: Tensor,
    tile: VectorTile,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: int = 0,
    add: bool = False,
    pdl: int = 0,
) -> None:
    """x: [1, k], out: [1, n]; as `gemv.whole_rows`."""
    n, k = out.shape[1], x.shape[1]
    _vector[(min(cdiv(n, tile.rows), tile.per_sm * SM_COUNT),)](
        x, matrix.codes, matrix.affine, x if matrix.bias is None else matrix.bias, x if norm is None else norm, out,
        n, k // 32, BITS_OF_256, BITS_OF_16, eps,
        NORM=norm is not None, BIAS=matrix.bias is not None, GATE=gate, ADD=add, BITS=matrix.bits, ROWS=tile.rows,
        WORDS=max(4, power_of_two(matrix.codes.shape[1])), PDL=int(pdl), **options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantisedTile:
    rows: int
    words: int  # of a row, per step of the loop
    splits: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["m"])
def _multiply(
    x, codes, affine, bias, out, partial, counters, m, n, groups,
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 32 // BITS
    SPAN: tl.constexpr = 32 // EACH
    release_next(PDL)
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
    await_inputs(PDL)
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
        wide = weights(
            w, s, 0x43800000, 0x41800000, BITS
        )  # constants here: else the compiler moves weights through memory
        if GATE:
            up = safe + n
            w2 = tl.load(codes + up * width + place[None, :], mask=inside, other=0)
            s2 = tl.load(scales + near[:, None] + n, mask=inside, other=0)
            wide2 = weights(w2, s2, 0x43800000, 0x41800000, BITS)
        for i in tl.static_range(EACH):
            v = tl.trans(tl.load(source + i * SPAN, mask=(t < m)[:, None] & inside, other=0.0))
            acc = tl.dot(wide[i].to(kind), v, acc)
            if GATE:
                acc2 = tl.dot(wide2[i].to(kind), v, acc2)
    release_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc2, last = join(acc, acc2, partial, counters, tile, split, GATE, SPLITS, ROWS, TOKENS)
    if last:
        ok = (row < n)[:, None] & (t < m)[None, :]
        to = out + t.to(tl.int64)[None, :] * n + row[:, None]
        put(acc, acc2, bias + row[:, None], to, (row < n)[:, None], ok, BIAS, GATE, ADD)


def multiply(
    x: Tensor,
    matrix: QuantisedMatrix,
    out: Tensor,
    tile: QuantisedTile,
    partial: Tensor,
    counters: Tensor,
    *,
    gate: int = 0,
    add: bool = False,
    pdl: int = 0,
) -> None:
    """x: [m, k], out: [m, n]; m at most 64. As `skinny.skinny`, with the weights dequantised on the way."""
    (m, n), k = out.shape, x.shape[1]
    _multiply[(cdiv(n, tile.rows), tile.splits)](
        x, matrix.codes, matrix.affine, x if matrix.bias is None else matrix.bias, out, partial, counters,
        m, n, k // 32, BIAS=matrix.bias is not None, GATE=gate, ADD=add,
        SPLITS=tile.splits, BITS=matrix.bits, ROWS=tile.rows, WORDS=tile.words, TOKENS=max(16, power_of_two(m)),
        EVEN=n % tile.rows == 0, STAGES=tile.stages, PDL=int(pdl),
        **options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip
