"""A few tokens times a matrix on the tensor cores, at the speed at which the weights can be read.

The matrix stands on the side where an instruction takes 64 rows, the tokens on the side where it takes as few as 8.
Columns may be split over programs; whichever of a tile's programs ends last adds the parts, always in the same order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu import epilogue
from emberline.kernels.gpu.epilogue import join, put
from emberline.kernels.gpu.launch import (
    await_inputs,
    cdiv,
    fetch_to_l2,
    options,
    power_of_two,
    release_late,
    release_next,
)

# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    rows: int  # of the matrix
    cols: int
    splits: int
    stages: int
    warps: int
    fetch: int = 0  # bytes of each row, a power of two, asked into the L2 cache before the input is there


@triton.jit(do_not_specialize=["m"])
def _skinny(
    x, weight, bias, out, partial, counters, m, n, k,
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    t = tl.arange(0, TOKENS)
    ok, there = row < n, t < m
    each = tl.cdiv(tl.cdiv(k, COLS), SPLITS) * COLS
    begin, end = split * each, tl.minimum(split * each + each, k)
    safe = tl.minimum(row, n - 1).to(tl.int64)  # a tile that hangs over reads the last row again
    at = weight + safe[:, None] * k + col[None, :]
    second = at + n.to(tl.int64) * k
    if FETCH > 0:
        fetch_to_l2(weight + safe * k + begin, FETCH)
        if GATE:
            fetch_to_l2(weight + safe * k + n.to(tl.int64) * k + begin, FETCH)
    await_inputs(PDL)
    source = x + t[:, None] * k + col[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc2 = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(begin, end, COLS, num_stages=STAGES):
        if EVEN:
            w = tl.load(at + start, eviction_policy="evict_first")
            v = tl.load(source + start, mask=there[:, None], other=0.0)
        else:
            inside = (start + col < k)[None, :]
            w = tl.load(at + start, mask=inside, other=0.0)
            v = tl.load(source + start, mask=there[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(v), acc)
        if GATE:
            if EVEN:
                w2 = tl.load(second + start, eviction_policy="evict_first")
            else:
                w2 = tl.load(second + start, mask=inside, other=0.0)
            acc2 = tl.dot(w2, tl.trans(v), acc2)
    release_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc2, last = join(acc, acc2, partial, counters, tile, split, GATE, SPLITS, ROWS, TOKENS)
    if last:
        to = out + t.to(tl.int64)[None, :] * n + row[:, None]
        put(acc, acc2, bias + row[:, None], to, ok[:, None], ok[:, None] & there[None, :], BIAS, GATE, ADD)


def partial_floats(n: int, m: int, tile: SkinnyTile, gated: bool) -> int:
    """Scratch for the split columns of a matrix with n output columns."""
    return epilogue.partial_floats(cdiv(n, tile.rows), tile.splits, tile.rows, max(16, power_of_two(m)), gated)


def skinny(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: SkinnyTile,
    partial: Tensor,
    counters: Tensor,
    *,
    bias: Tensor | None = None,
    gate: int = 0,
    add: bool = False,
    pdl: int = 0,
) -> None:
    """x: [m, k]; weight: [n, k], or [2n, k] with a gate; out: [m, n]. counters: int32 zeros, and zeros afterwards."""
    (m, n), k = out.shape, weight.shape[1]
    even = k % (tile.cols * tile.splits) == 0
    fetch = tile.fetch if pdl and even and tile.fetch <= k // tile.splits * weight.element_size() else 0
    _skinny[(cdiv(n, tile.rows), tile.splits)](
        x, weight, weight if bias is None else bias, out, partial, counters, m, n, k,
        BIAS=bias is not None, GATE=gate, ADD=add, SPLITS=tile.splits, ROWS=tile.rows, COLS=tile.cols,
        TOKENS=max(16, power_of_two(m)), EVEN=even, STAGES=tile.stages, FETCH=fetch, PDL=int(pdl),
        **options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"


@triton.jit(do_not_specialize=["m"])
def _fixed(
    x, weight, bias, out, m, n, k, stride, BIAS: tl.constexpr, ADD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    await_inputs(PDL)
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, k, COLS):
        inside = (start + col < k)[None, :]
        a = tl.load(x + t.to(tl.int64)[:, None] * k + start + col[None, :], mask=(t < m)[:, None] & inside, other=0.0)
        b = tl.load(
            weight + row.to(tl.int64)[:, None] * k + start + col[None, :], mask=(row < n)[:, None] & inside, other=0.0
        )
        acc = tl.dot(a, tl.trans(b), acc)
    if BIAS:
        acc += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    to = out + t.to(tl.int64)[:, None] * stride + row[None, :]
    ok = (t < m)[:, None] & (row < n)[None, :]
    if ADD:
        acc += tl.load(to, mask=ok, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=ok)


def fixed(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool, pdl: bool = False) -> None:
    """x: [m, k], weight: [n, k], out: [m, n], the columns of a row contiguous."""
    (m, n), k = out.shape, x.shape[1]
    _fixed[(cdiv(n, 128), cdiv(m, 64))](
        x, weight, weight if bias is None else bias, out, m, n, k, out.stride(0), BIAS=bias is not None, ADD=add,
        TOKENS=64, ROWS=128, COLS=64, PDL=int(pdl), **options(pdl, num_warps=4, num_stages=4),
    )  # fmt: skip
