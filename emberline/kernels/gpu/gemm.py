# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Dense matrix products for few tokens: GEMV for one, skinny GEMM for up to about 64, and a batch-invariant matmul.

GEMV fuses the RMS norm before it: the sum of squares accumulates in the same loop as the product. Skinny GEMM runs on
tensor cores with the weights as the instruction's M side (64 rows) and the tokens as its N side (as few as 8). Its K
dimension may be split over programs (split-K); the last program of a tile to finish adds the partial sums, always in
the same order. All of them share an epilogue: bias, gated activation, residual.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.elementwise import activation_fn
from emberline.kernels.gpu.launch import (
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_launch_late,
    pdl_wait,
    prefetch_l2,
    sm_count,
)


@triton.jit
def epilogue(
    value, up, bias_ptrs, out_ptrs, bias_mask, mask, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr
):
    """out = value + bias; with GATE activation(value + bias) * up; with ADD added to the old values of out.

    GATE: 0 none, 1 SiLU, 2 GELU.
    """
    if BIAS:
        value += tl.load(bias_ptrs, mask=bias_mask, other=0.0).to(tl.float32)
    if GATE:
        value = activation_fn(value, GATE == 2) * up
    if ADD:
        value += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, value.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def reduce_split_k(
    acc, acc_up, partial, counters, tile, split,
    GATE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store this program's partial sums; the last program of the tile to finish gets the total, added in a fixed order.

    acc, acc_up (the latter with a gate): [ROWS, TOKENS]. counters: zero before the launch, and zero again after it.
    """
    N_ACC: tl.constexpr = 2 if GATE else 1
    offsets = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tile_partials = partial + (tile * SPLITS).to(tl.int64) * (N_ACC * ROWS * TOKENS)
    own_partial = tile_partials + split * (N_ACC * ROWS * TOKENS)
    tl.store(own_partial + offsets, acc)
    if GATE:
        tl.store(own_partial + ROWS * TOKENS + offsets, acc_up)
    tl.debug_barrier()  # all threads have stored before the counter is incremented
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counters + tile, 0)
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
        for s in tl.static_range(SPLITS):
            split_partial = tile_partials + s * (N_ACC * ROWS * TOKENS)
            acc += tl.load(split_partial + offsets, cache_modifier=".cg")
            if GATE:
                acc_up += tl.load(split_partial + ROWS * TOKENS + offsets, cache_modifier=".cg")
    return acc, acc_up, last


def split_k_floats(tiles: int, splits: int, rows: int, tokens: int, gated: bool) -> int:
    """Workspace of `reduce_split_k`."""
    return 0 if splits == 1 else tiles * splits * (1 + gated) * rows * tokens


@dataclass(frozen=True, slots=True)
class SkinnyGemmTile:
    rows: int  # of the matrix
    cols: int
    splits: int
    stages: int
    warps: int
    fetch: int = 0  # bytes of each row, a power of two, prefetched into L2 before the input is ready


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
    row_mask, token_mask = row < n, t < m
    cols_per_split = tl.cdiv(tl.cdiv(k, COLS), SPLITS) * COLS
    begin, end = split * cols_per_split, tl.minimum(split * cols_per_split + cols_per_split, k)
    safe_row = tl.minimum(row, n - 1).to(tl.int64)  # a tile past the end reads the last row again
    w_ptrs = weight + safe_row[:, None] * k + col[None, :]
    up_ptrs = w_ptrs + n.to(tl.int64) * k
    if FETCH > 0:
        prefetch_l2(weight + safe_row * k + begin, FETCH)
        if GATE:
            prefetch_l2(weight + safe_row * k + n.to(tl.int64) * k + begin, FETCH)
    pdl_wait(PDL)
    x_ptrs = x + t[:, None] * k + col[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(begin, end, COLS, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_ptrs + start, eviction_policy="evict_first")
            x_tile = tl.load(x_ptrs + start, mask=token_mask[:, None], other=0.0)
        else:
            col_mask = (start + col < k)[None, :]
            w = tl.load(w_ptrs + start, mask=col_mask, other=0.0)
            x_tile = tl.load(x_ptrs + start, mask=token_mask[:, None] & col_mask, other=0.0)
        acc = tl.dot(w, tl.trans(x_tile), acc)
        if GATE:
            if EVEN:
                w_up = tl.load(up_ptrs + start, eviction_policy="evict_first")
            else:
                w_up = tl.load(up_ptrs + start, mask=col_mask, other=0.0)
            acc_up = tl.dot(w_up, tl.trans(x_tile), acc_up)
    pdl_launch_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc_up, last = reduce_split_k(acc, acc_up, partial, counters, tile, split, GATE, SPLITS, ROWS, TOKENS)
    if last:
        out_ptrs = out + t.to(tl.int64)[None, :] * n + row[:, None]
        epilogue(
            acc,
            acc_up,
            bias + row[:, None],
            out_ptrs,
            row_mask[:, None],
            row_mask[:, None] & token_mask[None, :],
            BIAS,
            GATE,
            ADD,
        )


def skinny_gemm_floats(n: int, m: int, tile: SkinnyGemmTile, gated: bool) -> int:
    """Split-K workspace of `skinny_gemm` for m tokens and n output columns."""
    return split_k_floats(cdiv(n, tile.rows), tile.splits, tile.rows, max(16, next_power_of_two(m)), gated)


def skinny_gemm(
    x: Tensor, weight: Tensor, out: Tensor, tile: SkinnyGemmTile, partial: Tensor, counters: Tensor, *,
    bias: Tensor | None = None, gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [m, k]; weight: [n, k], or [2n, k] with a gate; out: [m, n]. counters: int32 zeros, reset to zero."""
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
    x, weight, bias, out, m, n, k, out_stride, BIAS: tl.constexpr, ADD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    pdl_wait(PDL)
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, k, COLS):
        col_mask = (start + col < k)[None, :]
        a = tl.load(x + t.to(tl.int64)[:, None] * k + start + col[None, :], mask=(t < m)[:, None] & col_mask, other=0.0)
        b = tl.load(
            weight + row.to(tl.int64)[:, None] * k + start + col[None, :], mask=(row < n)[:, None] & col_mask, other=0.0
        )
        acc = tl.dot(a, tl.trans(b), acc)
    if BIAS:
        acc += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out + t.to(tl.int64)[:, None] * out_stride + row[None, :]
    mask = (t < m)[:, None] & (row < n)[None, :]
    if ADD:
        acc += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=mask)


def batch_invariant_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool, pdl: bool = False
) -> None:  # fmt: skip
    """One tile shape and K order for any m, so a token's result does not depend on the batch.

    x: [m, k], weight: [n, k], out: [m, n] with any stride between rows.
    """
    (m, n), k = out.shape, x.shape[1]
    _batch_invariant_matmul[(cdiv(n, 128), cdiv(m, 64))](
        x, weight, weight if bias is None else bias, out, m, n, k, out.stride(0), BIAS=bias is not None, ADD=add,
        TOKENS=64, ROWS=128, COLS=64, PDL=int(pdl), **launch_options(pdl, num_warps=4, num_stages=4),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GemvTile:
    rows: int  # of the matrix, per program; with a gate, of gate and up each
    cols: int  # per iteration
    warps: int
    fetch: int = 0  # bytes of each row, a power of two, prefetched into L2 before the input is ready


@triton.jit
def _gemv(
    x, weight, bias, norm, out, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With a gate, rows n .. 2n - 1 of the matrix are the up projection."""
    pdl_launch_early(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    row_mask = row < n
    w_ptrs = weight + row.to(tl.int64)[:, None] * k + col[None, :]
    mask = row_mask[:, None] if EVEN else row_mask[:, None] & (col < k)[None, :]
    w = tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    up_ptrs = w_ptrs + n.to(tl.int64) * k
    if GATE:
        w_up = tl.load(up_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    if FETCH > 0:
        prefetch_ptrs = weight + tl.minimum(row, n - 1).to(tl.int64) * k + COLS
        prefetch_l2(prefetch_ptrs, FETCH)
        if GATE:
            prefetch_l2(prefetch_ptrs + n.to(tl.int64) * k, FETCH)
    pdl_wait(PDL)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    acc_up = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([COLS], tl.float32)
    for start in range(0, k, COLS):
        current = w
        next_mask = row_mask[:, None] & (start + COLS + col < k)[None, :]
        w = tl.load(w_ptrs + start + COLS, mask=next_mask, other=0.0, eviction_policy="evict_first")
        if GATE:
            current_up = w_up
            w_up = tl.load(up_ptrs + start + COLS, mask=next_mask, other=0.0, eviction_policy="evict_first")
        col_mask = start + col < k
        x_tile = tl.load(x + start + col, mask=col_mask, other=0.0).to(tl.float32)
        if NORM:
            squares += x_tile * x_tile
            x_tile *= tl.load(norm + start + col, mask=col_mask, other=0.0)
        acc += current.to(tl.float32) * x_tile[None, :]
        if GATE:
            acc_up += current_up.to(tl.float32) * x_tile[None, :]
    pdl_launch_late(PDL)
    result, up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / k + eps)
        result *= scale
        up *= scale
    epilogue(result, up, bias + row, out + row, row_mask, row_mask, BIAS, GATE, ADD)


def gemv(
    x: Tensor, weight: Tensor, out: Tensor, tile: GemvTile, *, bias: Tensor | None = None,
    norm: Tensor | None = None, eps: float = 0.0, gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [1, k]; weight: [n, k], or [2n, k] with a gate; out: [1, n], any float dtype."""
    n, k = out.shape[1], weight.shape[1]
    fetch = tile.fetch if pdl and tile.cols * 2 + tile.fetch <= k * weight.element_size() else 0
    _gemv[(cdiv(n, tile.rows),)](
        x, weight, weight if bias is None else bias, weight if norm is None else norm, out, n, k, eps,
        NORM=norm is not None, BIAS=bias is not None, GATE=gate, ADD=add, ROWS=tile.rows, COLS=tile.cols,
        EVEN=k % tile.cols == 0, FETCH=fetch, PDL=int(pdl), **launch_options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PersistentGemvTile:
    """Persistent programs that take whole rows: the token is read and normed once and stays in registers."""

    rows: int
    warps: int
    per_sm: int  # programs per SM
    fetch: bool = False  # prefetch the whole matrix into L2 before the input is ready


@triton.jit
def _persistent_gemv(
    x, weight, bias, norm, out, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    stride = tl.num_programs(0) * ROWS
    col = tl.arange(0, WIDTH)
    col_mask = col < k
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w_ptrs = weight + row.to(tl.int64)[:, None] * k + col[None, :]
    up_ptrs = w_ptrs + n.to(tl.int64) * k
    mask = (row < n)[:, None] & col_mask[None, :]
    w = tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATE:
        w_up = tl.load(up_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    if FETCH > 0:
        for start in range(tl.program_id(0) * ROWS, n, stride):
            prefetch_row = tl.minimum(start + tl.arange(0, ROWS), n - 1).to(tl.int64)
            prefetch_l2(weight + prefetch_row * k, FETCH)
    pdl_wait(PDL)
    x_row = tl.load(x + col, mask=col_mask, other=0.0).to(tl.float32)
    if NORM:
        x_row *= tl.rsqrt(tl.sum(x_row * x_row) / k + eps)
        x_row *= tl.load(norm + col, mask=col_mask, other=0.0)
    for start in range(tl.program_id(0) * ROWS, n, stride):
        row = start + tl.arange(0, ROWS)
        row_mask = row < n
        current = w
        next_mask = (row + stride < n)[:, None] & col_mask[None, :]
        w_ptrs += stride.to(tl.int64) * k
        w = tl.load(w_ptrs, mask=next_mask, other=0.0, eviction_policy="evict_first")
        if GATE:
            current_up = w_up
            up_ptrs += stride.to(tl.int64) * k
            w_up = tl.load(up_ptrs, mask=next_mask, other=0.0, eviction_policy="evict_first")
        result = tl.sum(current.to(tl.float32) * x_row[None, :], 1)
        up = 0.0
        if GATE:
            up = tl.sum(current_up.to(tl.float32) * x_row[None, :], 1)
        epilogue(result, up, bias + row, out + row, row_mask, row_mask, BIAS, GATE, ADD)
    pdl_launch_late(PDL)


def persistent_gemv(
    x: Tensor, weight: Tensor, out: Tensor, tile: PersistentGemvTile, *, bias: Tensor | None = None,
    norm: Tensor | None = None, eps: float = 0.0, gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """Like `gemv`, for rows that fit in registers."""
    n, k = out.shape[1], weight.shape[1]
    programs = min(cdiv(n, tile.rows), tile.per_sm * sm_count())
    row_bytes = k * weight.element_size()
    fetch = row_bytes if tile.fetch and pdl and row_bytes == next_power_of_two(row_bytes) else 0
    _persistent_gemv[(programs,)](
        x, weight, weight if bias is None else bias, weight if norm is None else norm, out, n, k, eps,
        NORM=norm is not None, BIAS=bias is not None, GATE=gate, ADD=add, ROWS=tile.rows, WIDTH=next_power_of_two(k),
        FETCH=fetch, PDL=int(pdl), **launch_options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip
