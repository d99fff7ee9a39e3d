# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A few tokens times a matrix on the tensor cores, at the speed at which the weights can be read.

The matrix stands on the side where an instruction takes 64 rows, the tokens on the side where it takes as few as 8.
Columns may be split over programs; whichever of a tile's programs ends last adds the parts, always in the same order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.elementwise import activation_fn
from emberline.kernels.gpu.launch import (
    SM_COUNT,
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_launch_late,
    pdl_wait,
    prefetch_l2,
)


@triton.jit
def epilogue(value, other, bias, to, bias_ok, ok, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr):
    """value + bias, as the gate of `other` or added to what is there, to the pointers `to`.

    GATE: 0 none, 1 SiLU, 2 GELU.
    """
    if BIAS:
        value += tl.load(bias, mask=bias_ok, other=0.0).to(tl.float32)
    if GATE:
        value = activation_fn(value, GATE == 2) * other
    if ADD:
        value += tl.load(to, mask=ok, other=0.0).to(tl.float32)
    tl.store(to, value.to(to.dtype.element_ty), mask=ok)


@triton.jit
def reduce_split_k(
    acc, acc2, partial, counters, tile, split,
    GATE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Leaves this program's part for the one of its tile that ends last; that one gets the sum, in a fixed order.

    acc, acc2 (the latter with a gate): [ROWS, TOKENS]. counters: zeros, and zeros again afterwards.
    """
    PARTS: tl.constexpr = 2 if GATE else 1
    place = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    mine = partial + (tile * SPLITS).to(tl.int64) * (PARTS * ROWS * TOKENS)
    part = mine + split * (PARTS * ROWS * TOKENS)
    tl.store(part + place, acc)
    if GATE:
        tl.store(part + ROWS * TOKENS + place, acc2)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counters + tile, 0)
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        acc2 = tl.zeros([ROWS, TOKENS], tl.float32)
        for s in tl.static_range(SPLITS):
            other = mine + s * (PARTS * ROWS * TOKENS)
            acc += tl.load(other + place, cache_modifier=".cg")
            if GATE:
                acc2 += tl.load(other + ROWS * TOKENS + place, cache_modifier=".cg")
    return acc, acc2, last


def split_k_floats(tiles: int, splits: int, rows: int, tokens: int, gated: bool) -> int:
    """What `join` needs for its parts."""
    return 0 if splits == 1 else tiles * splits * (1 + gated) * rows * tokens


@dataclass(frozen=True, slots=True)
class SkinnyGemmTile:
    rows: int  # of the matrix
    cols: int
    splits: int
    stages: int
    warps: int
    fetch: int = 0  # bytes of each row, a power of two, asked into the L2 cache before the input is there


@triton.jit(do_not_specialize=["m"])
def _skinny_gemm(
    x, weight, bias, out, partial, counters, m, n, k,
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
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
        prefetch_l2(weight + safe * k + begin, FETCH)
        if GATE:
            prefetch_l2(weight + safe * k + n.to(tl.int64) * k + begin, FETCH)
    pdl_wait(PDL)
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
    pdl_launch_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc2, last = reduce_split_k(acc, acc2, partial, counters, tile, split, GATE, SPLITS, ROWS, TOKENS)
    if last:
        to = out + t.to(tl.int64)[None, :] * n + row[:, None]
        epilogue(acc, acc2, bias + row[:, None], to, ok[:, None], ok[:, None] & there[None, :], BIAS, GATE, ADD)


def skinny_gemm_floats(n: int, m: int, tile: SkinnyGemmTile, gated: bool) -> int:
    """Scratch for the split columns of a matrix with n output columns."""
    return split_k_floats(cdiv(n, tile.rows), tile.splits, tile.rows, max(16, next_power_of_two(m)), gated)


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: SkinnyGemmTile,
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
    _skinny_gemm[(cdiv(n, tile.rows), tile.splits)](
        x, weight, weight if bias is None else bias, out, partial, counters, m, n, k,
        BIAS=bias is not None, GATE=gate, ADD=add, SPLITS=tile.splits, ROWS=tile.rows, COLS=tile.cols,
        TOKENS=max(16, next_power_of_two(m)), EVEN=even, STAGES=tile.stages, FETCH=fetch, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _batch_invariant_matmul(
    x, weight, bias, out, m, n, k, stride, BIAS: tl.constexpr, ADD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    pdl_wait(PDL)
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


def batch_invariant_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool, pdl: bool = False
) -> None:
    """x: [m, k], weight: [n, k], out: [m, n], the columns of a row contiguous."""
    (m, n), k = out.shape, x.shape[1]
    _batch_invariant_matmul[(cdiv(n, 128), cdiv(m, 64))](
        x, weight, weight if bias is None else bias, out, m, n, k, out.stride(0), BIAS=bias is not None, ADD=add,
        TOKENS=64, ROWS=128, COLS=64, PDL=int(pdl), **launch_options(pdl, num_warps=4, num_stages=4),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GemvTile:
    rows: int  # of the matrix, per program; of gate and of up each, where there is a gate
    cols: int  # per step of the loop
    warps: int
    fetch: int = 0  # bytes of each row, a power of two, asked into the L2 cache before the input is there


@triton.jit
def _gemv(
    x, weight, bias, norm, out, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With a gate (`epilogue.put`), rows n .. 2n - 1 of the matrix are what it multiplies."""
    pdl_launch_early(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    ok = row < n
    at = weight + row.to(tl.int64)[:, None] * k + col[None, :]
    mask = ok[:, None] if EVEN else ok[:, None] & (col < k)[None, :]
    w = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    second = at + n.to(tl.int64) * k
    if GATE:
        w2 = tl.load(second, mask=mask, other=0.0, eviction_policy="evict_first")
    if FETCH > 0:
        ahead = weight + tl.minimum(row, n - 1).to(tl.int64) * k + COLS
        prefetch_l2(ahead, FETCH)
        if GATE:
            prefetch_l2(ahead + n.to(tl.int64) * k, FETCH)
    pdl_wait(PDL)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    acc2 = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([COLS], tl.float32)
    for start in range(0, k, COLS):
        here = w
        ahead_mask = ok[:, None] & (start + COLS + col < k)[None, :]
        w = tl.load(at + start + COLS, mask=ahead_mask, other=0.0, eviction_policy="evict_first")
        if GATE:
            here2 = w2
            w2 = tl.load(second + start + COLS, mask=ahead_mask, other=0.0, eviction_policy="evict_first")
        inside = start + col < k
        v = tl.load(x + start + col, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += v * v
            v *= tl.load(norm + start + col, mask=inside, other=0.0)
        acc += here.to(tl.float32) * v[None, :]
        if GATE:
            acc2 += here2.to(tl.float32) * v[None, :]
    pdl_launch_late(PDL)
    result, other = tl.sum(acc, 1), tl.sum(acc2, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / k + eps)
        result *= scale
        other *= scale
    epilogue(result, other, bias + row, out + row, ok, ok, BIAS, GATE, ADD)


def gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: GemvTile,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: int = 0,
    add: bool = False,
    pdl: int = 0,
) -> None:
    """x: [1, k]; weight: [n, k], or [2n, k] with a gate; out: [1, n], any float type."""
    n, k = out.shape[1], weight.shape[1]
    fetch = tile.fetch if pdl and tile.cols * 2 + tile.fetch <= k * weight.element_size() else 0
    _gemv[(cdiv(n, tile.rows),)](
        x, weight, weight if bias is None else bias, weight if norm is None else norm, out, n, k, eps,
        NORM=norm is not None, BIAS=bias is not None, GATE=gate, ADD=add, ROWS=tile.rows, COLS=tile.cols,
        EVEN=k % tile.cols == 0, FETCH=fetch, PDL=int(pdl), **launch_options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PersistentGemvTile:
    """Whole rows at a time, by programs that stay: the token is read and normed once, and stays in registers."""

    rows: int
    warps: int
    per_sm: int  # programs on a multiprocessor
    fetch: bool = False  # ask all of the matrix into the L2 cache before the input is there


@triton.jit
def _persistent_gemv(
    x, weight, bias, norm, out, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    stride = tl.num_programs(0) * ROWS
    col = tl.arange(0, WIDTH)
    inside = col < k
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = weight + row.to(tl.int64)[:, None] * k + col[None, :]
    second = at + n.to(tl.int64) * k
    mask = (row < n)[:, None] & inside[None, :]
    w = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATE:
        w2 = tl.load(second, mask=mask, other=0.0, eviction_policy="evict_first")
    if FETCH > 0:
        for start in range(tl.program_id(0) * ROWS, n, stride):
            ahead = tl.minimum(start + tl.arange(0, ROWS), n - 1).to(tl.int64)
            prefetch_l2(weight + ahead * k, FETCH)
    pdl_wait(PDL)
    v = tl.load(x + col, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        v *= tl.rsqrt(tl.sum(v * v) / k + eps)
        v *= tl.load(norm + col, mask=inside, other=0.0)
    for start in range(tl.program_id(0) * ROWS, n, stride):
        row = start + tl.arange(0, ROWS)
        ok = row < n
        here = w
        next_mask = (row + stride < n)[:, None] & inside[None, :]
        at += stride.to(tl.int64) * k
        w = tl.load(at, mask=next_mask, other=0.0, eviction_policy="evict_first")
        if GATE:
            here2 = w2
            second += stride.to(tl.int64) * k
            w2 = tl.load(second, mask=next_mask, other=0.0, eviction_policy="evict_first")
        result = tl.sum(here.to(tl.float32) * v[None, :], 1)
        other = 0.0
        if GATE:
            other = tl.sum(here2.to(tl.float32) * v[None, :], 1)
        epilogue(result, other, bias + row, out + row, ok, ok, BIAS, GATE, ADD)
    pdl_launch_late(PDL)


def persistent_gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: PersistentGemvTile,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: int = 0,
    add: bool = False,
    pdl: int = 0,
) -> None:
    """As `gemv`, for rows that fit in registers."""
    n, k = out.shape[1], weight.shape[1]
    programs = min(cdiv(n, tile.rows), tile.per_sm * SM_COUNT)
    row_bytes = k * weight.element_size()
    fetch = row_bytes if tile.fetch and pdl and row_bytes == next_power_of_two(row_bytes) else 0
    _persistent_gemv[(programs,)](
        x, weight, weight if bias is None else bias, weight if norm is None else norm, out, n, k, eps,
        NORM=norm is not None, BIAS=bias is not None, GATE=gate, ADD=add, ROWS=tile.rows, WIDTH=next_power_of_two(k),
        FETCH=fetch, PDL=int(pdl), **launch_options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip
