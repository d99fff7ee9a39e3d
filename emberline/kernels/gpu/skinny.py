# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A few tokens times a matrix on the tensor cores, at the speed at which the weights can be read.

The matrix stands on the side where an instruction takes 64 rows, the tokens on the side where it takes as few as 8.
Columns may be split over programs; whichever of a tile's programs ends last adds the parts, always in the same order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.activation import activated
from emberline.kernels.gpu.launch import (
    await_inputs,
    cdiv,
    fetch_to_l2,
    options,
    power_of_two,
    release_late,
    release_next,
)


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
    x, weight, bias, norm, out, partial, counters, m, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr,
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
    squares = tl.zeros([TOKENS], tl.float32)
    for start in tl.range(begin, end, COLS, num_stages=STAGES):
        if EVEN:
            w = tl.load(at + start, eviction_policy="evict_first")
            v = tl.load(source + start, mask=there[:, None], other=0.0)
        else:
            inside = (start + col < k)[None, :]
            w = tl.load(at + start, mask=inside, other=0.0)
            v = tl.load(source + start, mask=there[:, None] & inside, other=0.0)
        if NORM:
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            v = (wide * tl.load(norm + start + col, mask=start + col < k, other=0.0)[None, :]).to(x.dtype.element_ty)
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
        PARTS: tl.constexpr = 2 if GATE else 1
        place = tl.arange(0, ROWS)[:, None] * TOKENS + t[None, :]
        mine = partial + (tile * SPLITS).to(tl.int64) * (PARTS * ROWS + 1) * TOKENS
        part = mine + split * (PARTS * ROWS + 1) * TOKENS
        tl.store(part + place, acc)
        if GATE:
            tl.store(part + ROWS * TOKENS + place, acc2)
        if NORM:
            tl.store(part + PARTS * ROWS * TOKENS + t, squares)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counters + tile, 0)
            acc = tl.zeros([ROWS, TOKENS], tl.float32)
            acc2 = tl.zeros([ROWS, TOKENS], tl.float32)
            squares = tl.zeros([TOKENS], tl.float32)
            for s in tl.static_range(SPLITS):
                other = mine + s * (PARTS * ROWS + 1) * TOKENS
                acc += tl.load(other + place, cache_modifier=".cg")
                if GATE:
                    acc2 += tl.load(other + ROWS * TOKENS + place, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(other + PARTS * ROWS * TOKENS + t, cache_modifier=".cg")
    if last:
        if NORM:
            scale = tl.rsqrt(squares / k + eps)[None, :]
            acc *= scale
            acc2 *= scale
        if BIAS:
            acc += tl.load(bias + row, mask=ok, other=0.0).to(tl.float32)[:, None]
        if GATE:
            acc = activated(acc, GATE == 2) * acc2
        to = out + t.to(tl.int64)[None, :] * n + row[:, None]
        mask = ok[:, None] & there[None, :]
        if ADD:
            acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


def partial_floats(n: int, m: int, tile: SkinnyTile, gated: bool) -> int:
    """Scratch for the split columns of a matrix with n output columns."""
    tokens = max(16, power_of_two(m))
    return 0 if tile.splits == 1 else cdiv(n, tile.rows) * tile.splits * ((1 + gated) * tile.rows + 1) * tokens


def skinny(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: SkinnyTile,
    partial: Tensor,
    counters: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: int = 0,
    add: bool = False,
    pdl: int = 0,
) -> None:
    """x: [m, k]; weight: [n, k], or [2n, k] with a gate; out: [m, n]. counters: int32 zeros, and zeros afterwards."""
    (m, n), k = out.shape, weight.shape[1]
    even = k % (tile.cols * tile.splits) == 0
    fetch = tile.fetch if pdl and even and tile.fetch <= k // tile.splits * weight.element_size() else 0
    _skinny[(cdiv(n, tile.rows), tile.splits)](
        x, weight, weight if bias is None else bias, weight if norm is None else norm, out, partial, counters,
        m, n, k, eps, NORM=norm is not None, BIAS=bias is not None, GATE=gate, ADD=add, SPLITS=tile.splits,
        ROWS=tile.rows, COLS=tile.cols, TOKENS=max(16, power_of_two(m)), EVEN=even, STAGES=tile.stages,
        FETCH=fetch, PDL=int(pdl), **options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip
