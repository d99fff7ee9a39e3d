# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""One token times a matrix, with the norm before and the gate or the residual behind folded in.

The sum of squares accumulates in the same loop as the product, and the scale is applied at the end. Weights are asked
for before the kernel waits for its input: at batch 1 what matters is that the memory never idles.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.epilogue import put
from emberline.kernels.gpu.launch import (
    SM_COUNT,
    await_inputs,
    cdiv,
    fetch_to_l2,
    options,
    power_of_two,
    release_late,
    release_next,
)


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
    release_next(PDL)
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
        fetch_to_l2(ahead, FETCH)
        if GATE:
            fetch_to_l2(ahead + n.to(tl.int64) * k, FETCH)
    await_inputs(PDL)
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
    release_late(PDL)
    result, other = tl.sum(acc, 1), tl.sum(acc2, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / k + eps)
        result *= scale
        other *= scale
    put(result, other, bias + row, out + row, ok, ok, BIAS, GATE, ADD)


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
        EVEN=k % tile.cols == 0, FETCH=fetch, PDL=int(pdl), **options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowsTile:
    """Whole rows at a time, by programs that stay: the token is read and normed once, and stays in registers."""

    rows: int
    warps: int
    per_sm: int  # programs on a multiprocessor
    fetch: bool = False  # ask all of the matrix into the L2 cache before the input is there


@triton.jit
def _whole_rows(
    x, weight, bias, norm, out, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
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
            fetch_to_l2(weight + ahead * k, FETCH)
    await_inputs(PDL)
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
        put(result, other, bias + row, out + row, ok, ok, BIAS, GATE, ADD)
    release_late(PDL)


def whole_rows(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: RowsTile,
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
    fetch = row_bytes if tile.fetch and pdl and row_bytes == power_of_two(row_bytes) else 0
    _whole_rows[(programs,)](
        x, weight, weight if bias is None else bias, weight if norm is None else norm, out, n, k, eps,
        NORM=norm is not None, BIAS=bias is not None, GATE=gate, ADD=add, ROWS=tile.rows, WIDTH=power_of_two(k),
        FETCH=fetch, PDL=int(pdl), **options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip
