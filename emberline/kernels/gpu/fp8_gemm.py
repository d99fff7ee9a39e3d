# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment"
"""Products with FP8 (e4m3) weights, scaled per row or per block of 128 columns: GEMV, and GEMM for any token count.

One token is multiplied in float16, scaled by its largest value. For more the activations are FP8 too, scaled per token
or per token and 128 columns (`fp8_quantize.py`), and go to the tensor cores like the weights, without a conversion;
where a checkpoint quantizes weights only, they stay as they are and the weights are decoded in registers. A scale per
row or token multiplies the sum in the end; those of blocks multiply the sum of each block.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.dequantize import fp8_values
from emberline.kernels.gpu.gemm import epilogue, reduce_split_k, split_k_floats
from emberline.kernels.gpu.launch import (
    INTERPRETED,
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_launch_late,
    pdl_wait,
    sm_count,
)

BLOCK = 128  # columns of a block that shares a scale
MAX_GEMV_COLS = 16384  # that one program can hold in registers
MAX_TOKENS = 512  # above, the library, whose results need a kernel of their own for gates and residuals
MAX_BLOCK_TOKENS = 64  # the same where scales are of blocks: the accumulators' scaling costs too much above
LARGEST_HALF = tl.constexpr(16.0)  # of a token in float16: eight products with 448, the largest code, are finite
_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True)
class FP8Matrix:
    weight: Tensor  # float8_e4m3fn [n, k]
    scale: Tensor  # float32 [n], or of blocks [n / row_block, ceil(k / BLOCK)]
    row_block: int = 0  # rows that share a block's scale; 0: one scale per row
    quantize_input: bool = True  # False: the checkpoint quantizes weights only
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dense(self) -> Tensor:
        """float32 [n, k]."""
        n, k = self.shape
        if not self.row_block:
            return self.weight.float() * self.scale[:, None]
        per_row = self.scale.repeat_interleave(self.row_block, 0)[:n]
        return self.weight.float() * per_row.repeat_interleave(BLOCK, 1)[:, :k]


@dataclass(frozen=True, slots=True)
class FP8Rows:
    """Quantized activations."""

    values: Tensor  # float8_e4m3fn [m, k]
    scale: Tensor  # float32 [m], or [ceil(k / BLOCK), m] of blocks

    def __len__(self) -> int:
        return len(self.values)

    def dense(self) -> Tensor:
        if self.scale.dim() == 1:
            return self.values.float() * self.scale[:, None]
        return self.values.float() * self.scale.T.repeat_interleave(BLOCK, 1)[:, : self.values.shape[1]]


# --- one token --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FP8GemvTile:
    rows: int  # of the matrix, per iteration
    warps: int
    per_sm: int  # programs per SM


@triton.jit
def _half_pair(low, high):
    """Two float32 values as float16, in one int32 word."""
    if _INTERPRETED:
        first, second = (each.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) for each in (low, high))
        return first | second << 16
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _dot_word(word, low, high):
    """Dot product of one word of codes, for the interpreter."""
    dot = fp8_values(word & 0xFF) * (low & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    dot += fp8_values((word >> 8) & 0xFF) * ((low >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    dot += fp8_values((word >> 16) & 0xFF) * (high & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return dot + fp8_values((word >> 24) & 0xFF) * ((high >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _dot_four(w, x):
    """Four words of FP8 values times eight words of float16 pairs, float32. Eight products each are added in float16,
    in one register with those beside: half as many instructions as the conversion to float32 alone."""
    if _INTERPRETED:
        return sum(_dot_word(w[i], x[2 * i], x[2 * i + 1]) for i in range(4))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; .reg .b32 t, s; .reg .f32 y, z;"
            " mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 t, l; mul.rn.f16x2 s, t, $5;"
            " cvt.rn.f16x2.e4m3x2 t, h; fma.rn.f16x2 s, t, $6, s;"
            " mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 t, l; fma.rn.f16x2 s, t, $7, s;"
            " cvt.rn.f16x2.e4m3x2 t, h; fma.rn.f16x2 s, t, $8, s;"
            " mov.b32 {l, h}, $3; cvt.rn.f16x2.e4m3x2 t, l; fma.rn.f16x2 s, t, $9, s;"
            " cvt.rn.f16x2.e4m3x2 t, h; fma.rn.f16x2 s, t, $10, s;"
            " mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 t, l; fma.rn.f16x2 s, t, $11, s;"
            " cvt.rn.f16x2.e4m3x2 t, h; fma.rn.f16x2 s, t, $12, s;"
            " mov.b32 {l, h}, s; cvt.f32.f16 y, l; cvt.f32.f16 z, h; add.f32 $0, y, z; }",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w[0], w[1], w[2], w[3], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _split_fours(x, ROWS: tl.constexpr, N: tl.constexpr):
    """[ROWS, 4 N] as four of [ROWS, N]: every fourth element, from the first, second, third and fourth on."""
    even, odd = tl.split(tl.reshape(x, [ROWS, N, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _split_eights(x, N: tl.constexpr):
    """[8 N] as eight of [1, N]."""
    even, odd = tl.split(tl.reshape(x, [1, N, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _dot_rows(words, x, scale, blocks, ROW_BLOCK: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Rows times the token: [ROWS]. A block's scale multiplies the sum of four words, which a thread holds."""
    sums = _dot_four(_split_fours(words, ROWS, WORDS // 4), x)
    if ROW_BLOCK == 0:
        return tl.sum(sums, 1) * tl.load(scale)
    else:
        block = tl.arange(0, WORDS // 4) // 8
        scales = tl.load(scale[:, None] + block[None, :], mask=(block < blocks)[None, :], other=0.0)
        return tl.sum(sums * scales, 1)


@triton.jit
def _fp8_gemv(
    x, weight, scale, bias, norm, out, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, ROW_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent programs that take whole rows, as `gemm._persistent_gemv`. weight: int32 words of four columns."""
    pdl_launch_early(PDL)
    stride = tl.num_programs(0) * ROWS
    word = tl.arange(0, WORDS)
    width, blocks = k // 4, tl.cdiv(k, 128)
    word_mask = word < width
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w_ptrs = weight + row.to(tl.int64)[:, None] * width + word[None, :]
    up_ptrs = w_ptrs + n.to(tl.int64) * width
    mask = (row < n)[:, None] & word_mask[None, :]
    w = tl.load(w_ptrs, mask=mask, other=0, eviction_policy="evict_first")
    if GATE:
        w_up = tl.load(up_ptrs, mask=mask, other=0, eviction_policy="evict_first")
    pdl_wait(PDL)
    col = tl.arange(0, WORDS * 4)
    values = tl.load(x + col, mask=col < k, other=0.0).to(tl.float32)
    inverse_rms = 1.0
    if NORM:
        inverse_rms = tl.rsqrt(tl.sum(values * values) / k + eps)
        values *= tl.load(norm + col, mask=col < k, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(values), 0), 1e-30)
    even, odd = tl.split(tl.reshape(values * (LARGEST_HALF / largest), [WORDS * 2, 2]))
    packed = _split_eights(_half_pair(even, odd), WORDS // 4)
    unit = largest / LARGEST_HALF * inverse_rms
    for start in range(tl.program_id(0) * ROWS, n, stride):
        row = start + tl.arange(0, ROWS)
        safe_row = tl.minimum(row, n - 1)
        current = w
        next_mask = (row + stride < n)[:, None] & word_mask[None, :]
        w_ptrs += stride.to(tl.int64) * width
        w = tl.load(w_ptrs, mask=next_mask, other=0, eviction_policy="evict_first")
        scale_ptrs, up_scale_ptrs = scale + safe_row, scale + safe_row + n
        if ROW_BLOCK > 0:
            scale_ptrs = scale + safe_row // ROW_BLOCK * blocks
            up_scale_ptrs = scale + (safe_row + n) // ROW_BLOCK * blocks
        up = 0.0
        if GATE:
            current_up = w_up
            up_ptrs += stride.to(tl.int64) * width
            w_up = tl.load(up_ptrs, mask=next_mask, other=0, eviction_policy="evict_first")
            up = _dot_rows(current_up, packed, up_scale_ptrs, blocks, ROW_BLOCK, ROWS, WORDS) * unit
        result = _dot_rows(current, packed, scale_ptrs, blocks, ROW_BLOCK, ROWS, WORDS) * unit
        epilogue(result, up, bias + row, out + row, row < n, row < n, BIAS, GATE, ADD)
    pdl_launch_late(PDL)


def fp8_gemv(
    x: Tensor, matrix: FP8Matrix, out: Tensor, tile: FP8GemvTile, *, norm: Tensor | None = None, eps: float = 0.0,
    gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [1, k], at most MAX_GEMV_COLS; out: [1, n]; with a gate, n is half the matrix's rows."""
    n, k = out.shape[1], x.shape[1]
    _fp8_gemv[(min(cdiv(n, tile.rows), tile.per_sm * sm_count()),)](
        x, matrix.weight.view(torch.int32), matrix.scale, x if matrix.bias is None else matrix.bias,
        x if norm is None else norm, out, n, k, eps, NORM=norm is not None, BIAS=matrix.bias is not None, GATE=gate,
        ADD=add, ROW_BLOCK=matrix.row_block, ROWS=tile.rows, WORDS=max(4, next_power_of_two(k // 4)), PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip


# --- several tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FP8GemmTile:
    rows: int  # of the matrix
    cols: int  # BLOCK where scales are of blocks
    tokens: int
    splits: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["m"])
def _fp8_gemm(
    x, x_scale, weight, scale, bias, out, partial, counters, m, n, k, token_tiles,
    FP8_INPUT: tl.constexpr, ROW_BLOCK: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    output_tile, split = tl.program_id(0), tl.program_id(1)
    row = output_tile // token_tiles * ROWS + tl.arange(0, ROWS)
    t = output_tile % token_tiles * TOKENS + tl.arange(0, TOKENS)
    col = tl.arange(0, COLS)
    cols_per_split = tl.cdiv(tl.cdiv(k, COLS), SPLITS) * COLS
    begin, end = split * cols_per_split, tl.minimum(split * cols_per_split + cols_per_split, k)
    safe_row, safe_t = tl.minimum(row, n - 1), tl.minimum(t, m - 1)
    w_ptrs = weight + safe_row.to(tl.int64)[:, None] * k + col[None, :]
    up_ptrs = w_ptrs + n.to(tl.int64) * k
    pdl_wait(PDL)
    x_ptrs = x + safe_t.to(tl.int64)[:, None] * k + col[None, :]
    token_mask = (t < m)[:, None]  # or all programs would read the last token many times, from one place in L2
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    blocks = tl.cdiv(k, 128)
    for start in tl.range(begin, end, COLS, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_ptrs + start)
            x_tile = tl.load(x_ptrs + start, mask=token_mask, other=0.0)
        else:
            col_mask = (start + col < k)[None, :]
            w = tl.load(w_ptrs + start, mask=col_mask, other=0.0)
            x_tile = tl.load(x_ptrs + start, mask=token_mask & col_mask, other=0.0)
        if GATE:
            if EVEN:
                w_up = tl.load(up_ptrs + start)
            else:
                w_up = tl.load(up_ptrs + start, mask=col_mask, other=0.0)
        if not FP8_INPUT:
            w = fp8_values(w).to(x.dtype.element_ty)
            if GATE:
                w_up = fp8_values(w_up).to(x.dtype.element_ty)
        if ROW_BLOCK == 0:
            acc = tl.dot(w, tl.trans(x_tile), acc)
            if GATE:
                acc_up = tl.dot(w_up, tl.trans(x_tile), acc_up)
        else:
            block = start // 128
            by_token = 1.0
            if FP8_INPUT:
                by_token = tl.load(x_scale + block * m + safe_t)[None, :]
            by_row = tl.load(scale + safe_row // ROW_BLOCK * blocks + block)[:, None]
            acc += tl.dot(w, tl.trans(x_tile)) * (by_row * by_token)
            if GATE:
                by_row = tl.load(scale + (safe_row + n) // ROW_BLOCK * blocks + block)[:, None]
                acc_up += tl.dot(w_up, tl.trans(x_tile)) * (by_row * by_token)
    pdl_launch_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc_up, last = reduce_split_k(
            acc, acc_up, partial, counters, output_tile, split, GATE, SPLITS, ROWS, TOKENS
        )
    if last:
        if ROW_BLOCK == 0:
            by_token = 1.0
            if FP8_INPUT:
                by_token = tl.load(x_scale + safe_t)[None, :]
            acc *= tl.load(scale + safe_row)[:, None] * by_token
            if GATE:
                acc_up *= tl.load(scale + safe_row + n)[:, None] * by_token
        mask = (row < n)[:, None] & (t < m)[None, :]
        out_ptrs = out + t.to(tl.int64)[None, :] * n + row[:, None]
        epilogue(acc, acc_up, bias + row[:, None], out_ptrs, (row < n)[:, None], mask, BIAS, GATE, ADD)


def fp8_gemm_floats(n: int, m: int, tile: FP8GemmTile, gated: bool) -> int:
    """Split-K workspace of `fp8_gemm` for m tokens and n output columns."""
    tiles = cdiv(n, tile.rows) * cdiv(m, tile.tokens)
    return split_k_floats(tiles, tile.splits, tile.rows, tile.tokens, gated)


def fp8_gemm(
    x: Tensor | FP8Rows, matrix: FP8Matrix, out: Tensor, tile: FP8GemmTile, partial: Tensor, counters: Tensor, *,
    gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [m, k], quantized or not; out: [m, n]; with a gate, n is half the matrix's rows. counters: zeros, reset."""
    (m, n), k = out.shape, matrix.shape[1]
    assert not matrix.row_block or tile.cols == BLOCK
    values, x_scale = (x.values, x.scale) if isinstance(x, FP8Rows) else (x, x)
    weight = matrix.weight if isinstance(x, FP8Rows) else matrix.weight.view(torch.uint8)
    token_tiles = cdiv(m, tile.tokens)
    _fp8_gemm[(cdiv(n, tile.rows) * token_tiles, tile.splits)](
        values, x_scale, weight, matrix.scale, out if matrix.bias is None else matrix.bias, out, partial, counters,
        m, n, k, token_tiles, FP8_INPUT=isinstance(x, FP8Rows), ROW_BLOCK=matrix.row_block,
        BIAS=matrix.bias is not None, GATE=gate, ADD=add, SPLITS=tile.splits, ROWS=tile.rows, COLS=tile.cols,
        TOKENS=tile.tokens, EVEN=k % (tile.cols * tile.splits) == 0, STAGES=tile.stages, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


# --- tile configs -----------------------------------------------------------------------------------------------------


def fp8_gemv_tile(n: int, k: int, gated: bool) -> FP8GemvTile:
    if INTERPRETED:
        return FP8GemvTile(32, 1, 1)
    if k > 8192:
        return FP8GemvTile(4, 4, 2)
    if gated:
        return FP8GemvTile(1, 2, 6)
    return FP8GemvTile(4, 4, 5) if n >= 32 * sm_count() else FP8GemvTile(8, 4, 2)


@cache
def fp8_gemm_tile(m: int, n: int, k: int, gated: bool, blocks: bool) -> FP8GemmTile | None:
    """The tile config for m tokens and n output columns; None: the library, for many tokens."""
    tokens = min(128, max(16, next_power_of_two(m)))
    if INTERPRETED:
        return None if m > MAX_TOKENS else FP8GemmTile(64, BLOCK, tokens, 1, 2, 4)
    if m > (MAX_BLOCK_TOKENS if blocks else MAX_TOKENS):
        return None
    large = gated or n >= 64 * 8 * sm_count()
    if not large and not blocks and 32 < m <= 256:
        return _fastest_tile(m, n, k)
    if tokens == 128:  # split-K of such tiles costs more than it saves
        return FP8GemmTile(128, 128, tokens, 1, 4, 8)
    if large:
        rows, cols, stages, warps = (128, 128, 4, 4) if not blocks else (64, 128, 5, 4)
    else:
        rows, cols, stages, warps = (64, 256, 4, 4) if not blocks else (64, 128, 5, 4)
    tiles, splits = cdiv(n, rows) * cdiv(m, tokens), 1
    while tiles * splits * 4 < 3 * sm_count() and k >= 2048 * splits and not gated:
        splits *= 2
    return FP8GemmTile(rows, cols, tokens, splits, stages, warps)


_SHARED_BYTES = 227 << 10  # of an SM
_L2_BYTES_S, _L2_HALF = 220e9, 165 << 10  # what an SM reads with everything in flight; in flight, half of that
_DRAM_BYTES_S, _DRAM_HALF = 38e9, 30 << 10  # the same of weights, which come from memory: an SM's share of it
_PARTIAL_S = 0.25e-9  # of each partial sum that is stored and added


def _fastest_tile(m: int, n: int, k: int) -> FP8GemmTile:
    """By estimate. Constants of an H200, fitted to 34 measured tiles of three shapes: 10 % off in the median.

    K is split only where there are too few tiles for all SMs.
    """
    tiles = [
        FP8GemmTile(rows, cols, tokens, splits, stages, 8 if rows * tokens > 8192 else 4)
        for rows, cols, tokens, stages in (
            (64, 256, 64, 4), (64, 128, 64, 5), (128, 128, 64, 4), (64, 256, 128, 3), (128, 128, 128, 4),
        )
        for splits in (1, 2, 4)
        if tokens < 2 * m
        and (splits == 1 or (k >= 1024 * splits and cdiv(n, rows) * cdiv(m, tokens) <= sm_count()))
        and (splits == 1 or rows * tokens <= 8192)
    ]  # fmt: skip
    return min(tiles, key=lambda tile: _tile_seconds(tile, m, n, k))


def _tile_seconds(tile: FP8GemmTile, m: int, n: int, k: int) -> float:
    """The busiest SM reads weights and tokens through L2, all of them together the weights from memory; either is
    slowed down by too few bytes in flight. More programs than one run on an SM where their stages fit."""
    programs, stage = cdiv(n, tile.rows) * cdiv(m, tile.tokens) * tile.splits, tile.cols * (tile.rows + tile.tokens)
    in_turn = cdiv(programs, sm_count())
    at_once = min(in_turn, max(1, min(2, _SHARED_BYTES // (tile.stages * stage))))
    ahead = (tile.stages - 1) * tile.cols
    in_flight = at_once * ahead * (tile.rows + tile.tokens)
    weights_in_flight = min(at_once, programs / sm_count()) * ahead * tile.rows
    l2_s = in_turn * (tile.rows + tile.tokens) * k / tile.splits / _rate(_L2_BYTES_S, in_flight, _L2_HALF)
    dram_s = n * k / sm_count() / _rate(_DRAM_BYTES_S, weights_in_flight, _DRAM_HALF)
    merge_s = _PARTIAL_S * tile.splits * tile.rows * tile.tokens if tile.splits > 1 else 0.0
    return max(l2_s, dram_s) + merge_s


def _rate(most: float, in_flight: float, half: int) -> float:
    return most * in_flight / (in_flight + half)


def scaled_mm(x: FP8Rows, matrix: FP8Matrix, out: Tensor) -> None:
    """The library's product of quantized activations and weights, for many tokens; out: bfloat16 [m, n], no bias."""
    if matrix.row_block:  # FP8 blocks of 128 x 128
        torch._scaled_mm(x.values, matrix.weight.T, x.scale.T, matrix.scale.T, out_dtype=out.dtype, out=out)
    else:
        torch._scaled_mm(
            x.values, matrix.weight.T, x.scale[:, None], matrix.scale[None], out_dtype=out.dtype, use_fast_accum=True,
            out=out,
        )  # fmt: skip


def library_multiplies(x: FP8Rows, matrix: FP8Matrix, out: Tensor) -> bool:
    """True if `scaled_mm` takes these shapes."""
    n, k = matrix.shape
    aligned = n % 16 == 0 and k % 16 == 0 and out.dtype == torch.bfloat16
    return aligned and (not matrix.row_block or (matrix.row_block == BLOCK and len(x) % 4 == 0 and k % BLOCK == 0))


@triton.jit(do_not_specialize=["first", "rows"])
def _dequantize_fp8(
    weight, scale, ids, out, first, rows, k, factor, ROW_BLOCK: tl.constexpr, IDS: tl.constexpr, COLS: tl.constexpr
):
    row = first + tl.program_id(0)
    if IDS:
        row = tl.load(ids + tl.program_id(0))
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = col < k
    value = fp8_values(tl.load(weight + row.to(tl.int64) * k + col, mask=mask, other=0)).to(tl.float32)
    if ROW_BLOCK == 0:
        value *= tl.load(scale + row) * factor
    else:
        value *= tl.load(scale + row // ROW_BLOCK * tl.cdiv(k, 128) + col // 128, mask=mask, other=0.0) * factor
    tl.store(out + tl.program_id(0).to(tl.int64) * k + col, value.to(out.dtype.element_ty), mask=mask)


def dequantize_fp8_rows(
    matrix: FP8Matrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
) -> None:
    """out [rows, k] = `factor` times the rows `ids` of the matrix, or the rows from `first` on."""
    rows, k = out.shape
    if rows:
        _dequantize_fp8[(rows, cdiv(k, 2048))](
            matrix.weight.view(torch.uint8), matrix.scale, matrix.scale if ids is None else ids, out, first, rows, k,
            factor, ROW_BLOCK=matrix.row_block, IDS=ids is not None, COLS=2048,
        )  # fmt: skip
