# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment"
"""Products with losslessly compressed BF16 weights, decoded in registers: GEMV for one token, GEMM for up to 256.

Sums are of the decoded weights, whose power of two is missing, in float32: each row's sum is multiplied by the row's
scale in the end, which is exact. An escape's bits decode to the smallest value of its row's window. So for each escape
its true value less that one is added, times its activation: in GEMV row by row, in GEMM by one more product for every
16 escapes of a tile's rows. Layout and decoding: `lossless.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from emberline.kernels.gpu.lossless import LosslessMatrix, half_word_values, raw_rows

MAX_GEMV_COLS = 16384  # that one program can hold in registers
MAX_TOKENS = 256  # above, decoding the matrix for cuBLAS takes less time
MAX_GATED = 64  # of gate and up in one product, whose accumulators are twice as many
_INTERPRETED = tl.constexpr(INTERPRETED)


# --- escapes and raw rows ---------------------------------------------------------------------------------------------


@triton.jit
def _smallest(row_scale):
    """The value that an escape decodes to: 2^(112 - 127) times the row's scale."""
    return row_scale * 0.000030517578125


@triton.jit
def _row_escapes(
    x, norm, inverse_rms, scale, starts, places, values, first, n,
    NORM: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sums [ROWS] of what the escapes of rows first .. first + ROWS - 1 add."""
    slot = tl.arange(0, SLOTS)
    each = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    begin, stop = tl.load(starts + tl.minimum(first, n)), tl.load(starts + tl.minimum(first + ROWS, n))
    for at in range(begin, stop, SLOTS):
        mask = at + slot < stop
        place = tl.load(places + at + slot, mask=mask, other=0)
        value = tl.load(values + at + slot, mask=mask, other=0.0).to(tl.float32)
        col, index = place & 0xFFFF, ((place >> 16) - first) & 0x7FFF
        factor = tl.load(x + col, mask=mask, other=0.0).to(tl.float32) * inverse_rms
        if NORM:
            factor *= tl.load(norm + col, mask=mask, other=0.0)
        value = (value - _smallest(tl.load(scale + first + index, mask=mask, other=0.0))) * factor
        total += tl.sum(tl.where(index[None, :] == each[:, None], value[None, :], 0.0), 1)
    return total


# --- one token --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LosslessGemvTile:
    rows: int  # of the matrix, per iteration
    warps: int
    per_sm: int  # programs per SM


@triton.jit
def _word_values(low, high, SECOND: tl.constexpr):
    """The four weights of each word of plane A, or with SECOND of plane B, as float32: columns 2j, 2j + 1 of one slice,
    then of the next one."""
    if _INTERPRETED:
        SIGN: tl.constexpr = 3 if SECOND else 7
        CODE: tl.constexpr = 4 if SECOND else 0
        bits = ()
        for i in tl.static_range(4):
            AT: tl.constexpr = [0, 16, 8, 24][i]
            other, mine = high >> AT, (low >> AT) & 255
            bits = bits + (((((other >> SIGN) & 1) << 15) | 0x3800 | (((other >> CODE) & 7) << 8) | mine) << 16,)  # noqa: RUF005
        return (
            bits[0].to(tl.float32, bitcast=True), bits[1].to(tl.float32, bitcast=True),
            bits[2].to(tl.float32, bitcast=True), bits[3].to(tl.float32, bitcast=True),
        )  # fmt: skip
    elif SECOND:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u, c; mov.b32 c, 0x38383838; shr.b32 t, $5, 4; lop3.b32 t, t, 0x07070707, c, 0xEA;"
            " shl.b32 u, $5, 4; lop3.b32 t, u, 0x80808080, t, 0xEA;"
            " prmt.b32 u, $4, t, 0x6240; shl.b32 $0, u, 16; and.b32 $1, u, 0xFFFF0000;"
            " prmt.b32 u, $4, t, 0x7351; shl.b32 $2, u, 16; and.b32 $3, u, 0xFFFF0000; }",
            "=r,=r,=r,=r,r,r",
            [low, high],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u, c; mov.b32 c, 0x38383838; lop3.b32 t, $5, 0x87878787, c, 0xEA;"
            " prmt.b32 u, $4, t, 0x6240; shl.b32 $0, u, 16; and.b32 $1, u, 0xFFFF0000;"
            " prmt.b32 u, $4, t, 0x7351; shl.b32 $2, u, 16; and.b32 $3, u, 0xFFFF0000; }",
            "=r,=r,=r,=r,r,r",
            [low, high],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _slice_pair(x, norm, SLICE: tl.constexpr, k, WORDS: tl.constexpr, NORM: tl.constexpr):
    """The token's values at even and odd columns of one slice of every tile: [1, WORDS] each, not yet scaled by
    the RMS; and their squares' sum."""
    at = tl.arange(0, 2 * WORDS)
    col = at // 16 * 64 + SLICE * 16 + at % 16
    value = tl.load(x + col, mask=col < k, other=0.0).to(tl.float32)
    squares = 0.0
    if NORM:
        squares = tl.sum(value * value)
        value *= tl.load(norm + col, mask=col < k, other=0.0)
    even, odd = tl.split(tl.reshape(value, [1, WORDS, 2]))
    return even, odd, squares


@triton.jit
def _dot_words(a, b, high, x):
    """Rows times the token, by words: [ROWS, WORDS] planes to [ROWS]."""
    w0, w1, w2, w3 = _word_values(a, high, False)
    sums = w0 * x[0]
    sums += w1 * x[1]
    sums += w2 * x[2]
    sums += w3 * x[3]
    w0, w1, w2, w3 = _word_values(b, high, True)
    sums += w0 * x[4]
    sums += w1 * x[5]
    sums += w2 * x[6]
    sums += w3 * x[7]
    return tl.sum(sums, 1)


@triton.jit
def _dot_raw(raw, raw_row, x, k, WORDS: tl.constexpr):
    """Raw rows times the token; rows below 0 are not read."""
    word = tl.arange(0, WORDS)
    total = tl.zeros([raw_row.shape[0], WORDS], tl.float32)
    for i in tl.static_range(8):
        col = word // 8 * 64 + i // 2 * 16 + word % 8 * 2 + i % 2
        mask = (raw_row >= 0)[:, None] & (col < k)[None, :]
        total += tl.load(raw + raw_row.to(tl.int64)[:, None] * k + col[None, :], mask=mask, other=0.0) * x[i]
    return tl.sum(total, 1)


@triton.jit
def _lossless_gemv(
    x, codes, scale, starts, places, values, raw, bias, norm, out, n, k, width, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent programs that take whole rows, as `gemm._persistent_gemv`. codes: int32, `width` words of a plane."""
    pdl_launch_early(PDL)
    stride = tl.num_programs(0) * ROWS
    all_rows = n * 2 if GATE else n
    word = tl.arange(0, WORDS)
    word_mask = (word < width)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ptrs = codes + row.to(tl.int64)[:, None] * (3 * width) + word[None, :]
    up_offset = n.to(tl.int64) * (3 * width)
    mask = (row < n)[:, None] & word_mask
    a = tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_first")
    b = tl.load(ptrs + width, mask=mask, other=0, eviction_policy="evict_first")
    high = tl.load(ptrs + 2 * width, mask=mask, other=0, eviction_policy="evict_first")
    if GATE:
        up_a = tl.load(ptrs + up_offset, mask=mask, other=0, eviction_policy="evict_first")
        up_b = tl.load(ptrs + up_offset + width, mask=mask, other=0, eviction_policy="evict_first")
        up_high = tl.load(ptrs + up_offset + 2 * width, mask=mask, other=0, eviction_policy="evict_first")
    pdl_wait(PDL)
    x0, x1, s0 = _slice_pair(x, norm, 0, k, WORDS, NORM)
    x2, x3, s1 = _slice_pair(x, norm, 1, k, WORDS, NORM)
    x4, x5, s2 = _slice_pair(x, norm, 2, k, WORDS, NORM)
    x6, x7, s3 = _slice_pair(x, norm, 3, k, WORDS, NORM)
    rms = 1.0
    if NORM:
        rms = tl.rsqrt((s0 + s1 + s2 + s3) / k + eps)
    values_of_x = (x0 * rms, x1 * rms, x2 * rms, x3 * rms, x4 * rms, x5 * rms, x6 * rms, x7 * rms)
    for start in range(tl.program_id(0) * ROWS, n, stride):
        row = start + tl.arange(0, ROWS)
        row_mask = row < n
        current_a, current_b, current_high = a, b, high
        next_mask = (row + stride < n)[:, None] & word_mask
        ptrs += stride.to(tl.int64) * (3 * width)
        a = tl.load(ptrs, mask=next_mask, other=0, eviction_policy="evict_first")
        b = tl.load(ptrs + width, mask=next_mask, other=0, eviction_policy="evict_first")
        high = tl.load(ptrs + 2 * width, mask=next_mask, other=0, eviction_policy="evict_first")
        up = 0.0
        if GATE:
            current_up_a, current_up_b, current_up_high = up_a, up_b, up_high
            up_a = tl.load(ptrs + up_offset, mask=next_mask, other=0, eviction_policy="evict_first")
            up_b = tl.load(ptrs + up_offset + width, mask=next_mask, other=0, eviction_policy="evict_first")
            up_high = tl.load(ptrs + up_offset + 2 * width, mask=next_mask, other=0, eviction_policy="evict_first")
            up = _dot_words(current_up_a, current_up_b, current_up_high, values_of_x)
            up_scale = tl.load(scale + n + row, mask=row_mask, other=0.0)
            up *= up_scale
            up += _row_escapes(x, norm, rms, scale, starts, places, values, n + start, all_rows, NORM, ROWS, SLOTS)
            if tl.min(up_scale, 0) < 0:
                up = tl.where(up_scale < 0, _dot_raw(raw, raw_rows(up_scale), values_of_x, k, WORDS), up)
        result = _dot_words(current_a, current_b, current_high, values_of_x)
        row_scale = tl.load(scale + row, mask=row_mask, other=0.0)
        result *= row_scale
        result += _row_escapes(x, norm, rms, scale, starts, places, values, start, all_rows, NORM, ROWS, SLOTS)
        if tl.min(row_scale, 0) < 0:
            result = tl.where(row_scale < 0, _dot_raw(raw, raw_rows(row_scale), values_of_x, k, WORDS), result)
        epilogue(result, up, bias + row, out + row, row_mask, row_mask, BIAS, GATE, ADD)
    pdl_launch_late(PDL)


def lossless_gemv(
    x: Tensor, matrix: LosslessMatrix, out: Tensor, tile: LosslessGemvTile, *, norm: Tensor | None = None,
    eps: float = 0.0, gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [1, k], at most MAX_GEMV_COLS; out: [1, n]; with a gate, n is half the matrix's rows."""
    n, k = out.shape[1], x.shape[1]
    width = matrix.codes.shape[2] // 2
    _lossless_gemv[(min(cdiv(n, tile.rows), tile.per_sm * sm_count()),)](
        x, matrix.codes.view(torch.int32), *_stored_apart(matrix), x if matrix.bias is None else matrix.bias,
        x if norm is None else norm, out, n, k, width, eps, NORM=norm is not None, BIAS=matrix.bias is not None,
        GATE=gate, ADD=add, ROWS=tile.rows,
        WORDS=next_power_of_two(width), SLOTS=16, PDL=int(pdl), **launch_options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip


def _stored_apart(matrix: LosslessMatrix) -> tuple[Tensor, ...]:
    """Arguments of every kernel: scales, escapes and raw rows."""
    return matrix.scale, matrix.starts, matrix.places, matrix.values, matrix.raw


# --- several tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LosslessGemmTile:
    rows: int  # of the matrix
    halves: int  # half-words of each plane per iteration, a quarter of the columns
    tokens: int
    splits: int
    stages: int
    warps: int


@triton.jit
def _tile_escapes(
    acc, x, scale, starts, places, values, row, row_begin, row_end, t, m, k, split, SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, TOKENS] plus what the escapes of rows row_begin .. row_end - 1 add, every SPLITS'th 16 of them."""
    slot = tl.arange(0, SLOTS)
    kind = x.dtype.element_ty
    begin, stop = tl.load(starts + row_begin), tl.load(starts + row_end)
    for at in range(begin + split * SLOTS, stop, SPLITS * SLOTS):
        mask = at + slot < stop
        place = tl.load(places + at + slot, mask=mask, other=0)
        value = tl.load(values + at + slot, mask=mask, other=0.0).to(kind)
        col, index = place & 0xFFFF, ((place >> 16) - row_begin) & 0x7FFF
        decoded = _smallest(tl.load(scale + row_begin + index, mask=mask, other=0.0)).to(kind)
        x_tile = tl.load(
            x + t.to(tl.int64)[None, :] * k + col[:, None], mask=mask[:, None] & (t < m)[None, :], other=0.0
        )
        own = (row[:, None] == (row_begin + index)[None, :]) & mask[None, :]
        acc = tl.dot(tl.where(own, value[None, :], 0.0).to(kind), x_tile, acc)
        acc = tl.dot(tl.where(own, -decoded[None, :], 0.0).to(kind), x_tile, acc)
    return acc


@triton.jit
def _tile_raw(acc, x, raw, raw_row, t, m, k, begin, end, COLS: tl.constexpr):
    """acc with the rows that are stored raw in place of what was added for them: columns begin .. end - 1."""
    kind = x.dtype.element_ty
    is_raw = (raw_row >= 0)[:, None]
    own = tl.zeros_like(acc)
    if tl.max(raw_row, 0) >= 0:
        for start in range(begin, end, COLS):
            col = start + tl.arange(0, COLS)
            col_mask = (col < k)[None, :]
            w = tl.load(raw + raw_row.to(tl.int64)[:, None] * k + col[None, :], mask=is_raw & col_mask, other=0.0)
            x_tile = tl.load(
                x + t.to(tl.int64)[:, None] * k + col[None, :], mask=(t < m)[:, None] & col_mask, other=0.0
            )
            own = tl.dot(w.to(kind), tl.trans(x_tile), own)
    return tl.where(is_raw, own, acc)


@triton.jit(do_not_specialize=["m"])
def _lossless_gemm(
    x, codes, scale, starts, places, values, raw, bias, out, partial, counters, m, n, k, width, token_tiles,
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    H: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """width: half-words of a plane; H of them are read per iteration."""
    pdl_launch_early(PDL)
    output_tile, split = tl.program_id(0), tl.program_id(1)
    first = output_tile // token_tiles * ROWS
    row = first + tl.arange(0, ROWS)
    t = output_tile % token_tiles * TOKENS + tl.arange(0, TOKENS)
    half = tl.arange(0, H)
    steps = tl.cdiv(width, H)
    per_split = tl.cdiv(steps, SPLITS)
    begin, end = tl.minimum(split * per_split, steps), tl.minimum(split * per_split + per_split, steps)
    safe_row = tl.minimum(row, n - 1)
    ptrs = codes + safe_row.to(tl.int64)[:, None] * (3 * width) + half[None, :]
    up_ptrs = ptrs + n.to(tl.int64) * (3 * width)
    pdl_wait(PDL)
    x_ptrs = x + t.to(tl.int64)[:, None] * k + (half // 16 * 64 + half % 16)[None, :]
    token_mask = (t < m)[:, None]
    kind: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        if EVEN:
            a = tl.load(ptrs + step * H, eviction_policy="evict_first")
            b = tl.load(ptrs + width + step * H, eviction_policy="evict_first")
            high = tl.load(ptrs + 2 * width + step * H, eviction_policy="evict_first")
        else:
            half_mask = (step * H + half < width)[None, :]
            a = tl.load(ptrs + step * H, mask=half_mask, other=0)
            b = tl.load(ptrs + width + step * H, mask=half_mask, other=0)
            high = tl.load(ptrs + 2 * width + step * H, mask=half_mask, other=0)
        if GATE:
            if EVEN:
                up_a = tl.load(up_ptrs + step * H, eviction_policy="evict_first")
                up_b = tl.load(up_ptrs + width + step * H, eviction_policy="evict_first")
                up_high = tl.load(up_ptrs + 2 * width + step * H, eviction_policy="evict_first")
            else:
                up_a = tl.load(up_ptrs + step * H, mask=half_mask, other=0)
                up_b = tl.load(up_ptrs + width + step * H, mask=half_mask, other=0)
                up_high = tl.load(up_ptrs + 2 * width + step * H, mask=half_mask, other=0)
        w0, w1 = half_word_values(a, high, False)
        w2, w3 = half_word_values(b, high, True)
        if GATE:
            v0, v1 = half_word_values(up_a, up_high, False)
            v2, v3 = half_word_values(up_b, up_high, True)
        for i in tl.static_range(4):
            mask = token_mask
            if not EVEN:
                mask = token_mask & (step * (4 * H) + half // 16 * 64 + i * 16 + half % 16 < k)[None, :]
            x_slice = tl.trans(tl.load(x_ptrs + (step * (4 * H) + i * 16), mask=mask, other=0.0))
            w = w0 if i == 0 else w1 if i == 1 else w2 if i == 2 else w3
            acc = tl.dot(w.to(kind), x_slice, acc)
            if GATE:
                v = v0 if i == 0 else v1 if i == 1 else v2 if i == 2 else v3
                acc_up = tl.dot(v.to(kind), x_slice, acc_up)
    row_scale = tl.load(scale + safe_row)
    acc *= row_scale[:, None]
    row_end = tl.minimum(first + ROWS, n)
    acc = _tile_escapes(acc, x, scale, starts, places, values, row, first, row_end, t, m, k, split, SPLITS, 16)
    acc = _tile_raw(acc, x, raw, raw_rows(row_scale), t, m, k, begin * H * 4, end * H * 4, 64)
    if GATE:
        up_scale = tl.load(scale + n + safe_row)
        acc_up *= up_scale[:, None]
        acc_up = _tile_escapes(
            acc_up, x, scale, starts, places, values, n + row, n + first, n + row_end, t, m, k, split, SPLITS, 16
        )
        acc_up = _tile_raw(acc_up, x, raw, raw_rows(up_scale), t, m, k, begin * H * 4, end * H * 4, 64)
    pdl_launch_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc_up, last = reduce_split_k(
            acc, acc_up, partial, counters, output_tile, split, GATE, SPLITS, ROWS, TOKENS
        )
    if last:
        mask = (row < n)[:, None] & (t < m)[None, :]
        out_ptrs = out + t.to(tl.int64)[None, :] * n + row[:, None]
        epilogue(acc, acc_up, bias + row[:, None], out_ptrs, (row < n)[:, None], mask, BIAS, GATE, ADD)


def lossless_gemm_floats(n: int, m: int, tile: LosslessGemmTile, gated: bool) -> int:
    """Split-K workspace of `lossless_gemm` for m tokens and n output columns."""
    tiles = cdiv(n, tile.rows) * cdiv(m, tile.tokens)
    return split_k_floats(tiles, tile.splits, tile.rows, tile.tokens, gated)


def lossless_gemm(
    x: Tensor, matrix: LosslessMatrix, out: Tensor, tile: LosslessGemmTile, partial: Tensor, counters: Tensor, *,
    gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [m, k], out: [m, n]; with a gate, n is half the matrix's rows. counters: int32 zeros, reset to zero."""
    (m, n), k = out.shape, x.shape[1]
    token_tiles = cdiv(m, tile.tokens)
    _lossless_gemm[(cdiv(n, tile.rows) * token_tiles, tile.splits)](
        x, matrix.codes, *_stored_apart(matrix), x if matrix.bias is None else matrix.bias, out, partial, counters,
        m, n, k, matrix.codes.shape[2], token_tiles, BIAS=matrix.bias is not None, GATE=gate, ADD=add,
        SPLITS=tile.splits, ROWS=tile.rows, H=tile.halves,
        TOKENS=tile.tokens, EVEN=k % (4 * tile.halves) == 0, STAGES=tile.stages, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


# --- tile configs -----------------------------------------------------------------------------------------------------


def lossless_gemv_tile(n: int, k: int, gated: bool) -> LosslessGemvTile:
    if INTERPRETED:
        return LosslessGemvTile(32, 1, 1)
    if k > 8192:
        return LosslessGemvTile(2, 16, 1)
    return LosslessGemvTile(1 if gated else 2, 4, 4)


def lossless_gemm_tile(m: int, n: int, k: int, gated: bool) -> LosslessGemmTile | None:
    """The tile config for m tokens and n output columns; None: decode and use cuBLAS, for many tokens."""
    if m > MAX_TOKENS or (gated and m > MAX_GATED and not INTERPRETED):
        return None
    tokens = min(256, max(8, next_power_of_two(m)))
    if INTERPRETED:
        return LosslessGemmTile(64, 64, max(16, tokens), 1, 2, 4)
    if tokens > 64:
        return LosslessGemmTile(128, 32, tokens, 1, 2, 8)
    splits = 1
    while not gated and cdiv(n, 64) * splits < sm_count() and k >= 1024 * splits:
        splits *= 2
    return LosslessGemmTile(64, 64, tokens, splits, 4 if tokens < 64 else 3, 4)
