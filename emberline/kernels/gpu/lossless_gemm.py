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
from triton.tools.tensor_descriptor import TensorDescriptor

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
from emberline.kernels.gpu.lossless import RAW_SHARE, TILES, LosslessMatrix, half_word_values, raw_rows

MAX_GEMV_COLS = 16384  # that one program can hold in registers
MAX_TOKENS = 256  # above, decoding the matrix for cuBLAS takes less time
ESCAPE_SHARE = 3000  # trained matrices have fewer escapes than one weight of so many
MAX_GATED = 64  # of gate and up in one product, whose accumulators are twice as many
_INTERPRETED = tl.constexpr(INTERPRETED)


# --- escapes and raw rows ---------------------------------------------------------------------------------------------


@triton.jit
def smallest(row_scale):
    """The value that an escape decodes to: 2^(112 - 127) times the row's scale."""
    return row_scale * 0.000030517578125


# --- one token --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LosslessGemvTile:
    warps: int
    per_sm: int  # programs per SM
    registers: int | None = None  # at most, of a thread


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
def _slice_pair(
    x, norm, SLICE: tl.constexpr, k, WORDS: tl.constexpr, TILE_HALVES: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The token's values at even and odd columns of one slice of every tile, float32 [WORDS] each, and the norm's
    weights there, or 1. The token is read in words of two columns, in the layout of the matrix's planes."""
    TILE_WORDS: tl.constexpr = TILE_HALVES // 2
    word = tl.arange(0, WORDS)
    pair = word // TILE_WORDS * (4 * TILE_WORDS) + SLICE * TILE_WORDS + word % TILE_WORDS
    mask = pair * 2 < k
    if x.dtype.element_ty == tl.bfloat16:
        both = tl.load(x.to(tl.pointer_type(tl.int32)) + pair, mask=mask, other=0)
        even, odd = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    else:
        even = tl.load(x + pair * 2, mask=mask, other=0.0).to(tl.float32)
        odd = tl.load(x + pair * 2 + 1, mask=mask, other=0.0).to(tl.float32)
    even_norm, odd_norm = 1.0, 1.0
    if NORM:
        weights = tl.load(norm.to(tl.pointer_type(tl.int64)) + pair, mask=mask, other=0)
        even_norm = weights.to(tl.int32).to(tl.float32, bitcast=True)
        odd_norm = (weights >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd, even_norm, odd_norm


@triton.jit
def _load_planes(codes, row, limit, width, WORDS: tl.constexpr):
    """A row's codes, three planes of int32 [WORDS]; rows from `limit` on are not read."""
    word = tl.arange(0, WORDS)
    mask = (word < width) & (row + word * 0 < limit)
    ptrs = codes + tl.cast(row, tl.int64) * (3 * width) + word
    a = tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_first")
    b = tl.load(ptrs + width, mask=mask, other=0, eviction_policy="evict_first")
    return a, b, tl.load(ptrs + 2 * width, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _load_escape(places, values, begin, stop, SLOTS: tl.constexpr):
    """Each thread's escape of a row: columns and values, [SLOTS]; no escape is at column -1."""
    at = begin + tl.arange(0, SLOTS)
    place = tl.load(places + at, mask=at < stop, other=-1)
    return tl.where(at < stop, place & 0xFFFF, -1), tl.load(values + at, mask=at < stop, other=0.0)


@triton.jit
def _dot_row(
    planes, scale, column, value, x, x_ptrs, norm, inverse_rms,
    NORM: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """A row times the token: one sum for each thread, [THREADS]. x: `_slice_pair` of the four slices, normed."""
    w0, w1, w2, w3 = _word_values(planes[0], planes[2], False)
    sums = w0 * x[0]
    sums += w1 * x[1]
    sums += w2 * x[2]
    sums += w3 * x[3]
    w0, w1, w2, w3 = _word_values(planes[1], planes[2], True)
    sums += w0 * x[4]
    sums += w1 * x[5]
    sums += w2 * x[6]
    sums += w3 * x[7]
    escape_x = tl.load(x_ptrs + column, mask=column >= 0, other=0.0).to(tl.float32)
    if NORM:
        escape_x *= tl.load(norm + column, mask=column >= 0, other=0.0) * inverse_rms
    if WORDS > 4 * THREADS:
        sums = tl.sum(tl.reshape(sums, [WORDS // (4 * THREADS), 4 * THREADS]), 0)
    sums = tl.sum(tl.reshape(sums, [THREADS, min(4, WORDS // THREADS)]), 1)
    return (sums - 0.000030517578125 * escape_x) * scale + value.to(tl.float32) * escape_x


@triton.jit
def _dot_raw(raw, scale, x, norm, inverse_rms, k, NORM: tl.constexpr, COLS: tl.constexpr):
    """A raw row times the token."""
    total = tl.zeros([COLS], tl.float32)
    ptrs = raw + raw_rows(scale).to(tl.int64) * k
    for start in range(0, k, COLS):
        col = start + tl.arange(0, COLS)
        value = tl.load(x + col, mask=col < k, other=0.0).to(tl.float32)
        if NORM:
            value *= tl.load(norm + col, mask=col < k, other=0.0) * inverse_rms
        total += tl.load(ptrs + col, mask=col < k, other=0.0).to(tl.float32) * value
    return tl.sum(total, 0)


@triton.jit
def _lossless_gemv(
    x, codes, scale, starts, places, values, raw, bias, norm, out, n, k, width, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    TILE_HALVES: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent programs that take two rows of the matrix at a time, with a gate row r of it and row n + r.

    The token is read and normed once. Codes, scales and escapes are loaded one iteration ahead, the escapes' places
    two. codes: int32, `width` words of a plane.
    """
    pdl_launch_early(PDL)
    OWN: tl.constexpr = 1 if GATE else 2
    beside = n if GATE else 1  # from the first row of a pair to the second
    stride = tl.num_programs(0) * OWN
    limit = n * 2 if GATE else n
    row = tl.program_id(0) * OWN
    a0, b0, high0 = _load_planes(codes, row, n, width, WORDS)
    a1, b1, high1 = _load_planes(codes, row + beside, limit, width, WORDS)
    begin0, stop0 = tl.load(starts + row), tl.load(starts + row + 1)
    second = tl.minimum(row + beside, limit - 1)
    begin1, stop1 = tl.load(starts + second), tl.load(starts + second + 1)
    scale0, scale1 = tl.load(scale + row), tl.load(scale + second)
    following = tl.minimum(row + stride, n - 1)
    second = tl.minimum(following + beside, limit - 1)
    next_begin0, next_stop0 = tl.load(starts + following), tl.load(starts + following + 1)
    next_begin1, next_stop1 = tl.load(starts + second), tl.load(starts + second + 1)
    pdl_wait(PDL)
    x0, x1, n0, n1 = _slice_pair(x, norm, 0, k, WORDS, TILE_HALVES, NORM)
    x2, x3, n2, n3 = _slice_pair(x, norm, 1, k, WORDS, TILE_HALVES, NORM)
    x4, x5, n4, n5 = _slice_pair(x, norm, 2, k, WORDS, TILE_HALVES, NORM)
    x6, x7, n6, n7 = _slice_pair(x, norm, 3, k, WORDS, TILE_HALVES, NORM)
    column0, value0 = _load_escape(places, values, begin0, stop0, THREADS)
    column1, value1 = _load_escape(places, values, begin1, stop1, THREADS)
    rms = 1.0
    if NORM:
        squares = x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7
        rms = tl.rsqrt(tl.sum(squares) / k + eps)
        x0, x1, x2, x3 = x0 * (n0 * rms), x1 * (n1 * rms), x2 * (n2 * rms), x3 * (n3 * rms)
        x4, x5, x6, x7 = x4 * (n4 * rms), x5 * (n5 * rms), x6 * (n6 * rms), x7 * (n7 * rms)
    token = (x0, x1, x2, x3, x4, x5, x6, x7)
    for row in range(tl.program_id(0) * OWN, n, stride):
        planes0, planes1, s0, s1 = (a0, b0, high0), (a1, b1, high1), scale0, scale1
        c0, c1, v0, v1 = column0, column1, value0, value1
        following = row + stride
        a0, b0, high0 = _load_planes(codes, following, n, width, WORDS)
        a1, b1, high1 = _load_planes(codes, following + beside, limit, width, WORDS)
        column0, value0 = _load_escape(places, values, next_begin0, next_stop0, THREADS)
        column1, value1 = _load_escape(places, values, next_begin1, next_stop1, THREADS)
        safe = tl.minimum(following, n - 1)
        scale0, scale1 = tl.load(scale + safe), tl.load(scale + tl.minimum(safe + beside, limit - 1))
        safe = tl.minimum(following + stride, n - 1)
        next_begin0, next_stop0 = tl.load(starts + safe), tl.load(starts + safe + 1)
        safe = tl.minimum(safe + beside, limit - 1)
        next_begin1, next_stop1 = tl.load(starts + safe), tl.load(starts + safe + 1)
        sums0 = _dot_row(planes0, s0, c0, v0, token, x, norm, rms, NORM, WORDS, THREADS)
        sums1 = _dot_row(planes1, s1, c1, v1, token, x, norm, rms, NORM, WORDS, THREADS)
        result, pair = tl.sum(tl.join(sums0, sums1), 0), tl.arange(0, 2)
        if s0 < 0:
            result = tl.where(pair == 0, _dot_raw(raw, s0, x, norm, rms, k, NORM, 4 * THREADS), result)
        if s1 < 0:
            result = tl.where(pair == 1, _dot_raw(raw, s1, x, norm, rms, k, NORM, 4 * THREADS), result)
        if GATE:
            at = row + tl.arange(0, 1)
            gate, up = tl.split(result)
            epilogue(gate, up, bias + at, out + at, at < n, at < n, BIAS, GATE, ADD)
        else:
            at = row + pair
            epilogue(result, 0.0, bias + at, out + at, at < n, at < n, BIAS, GATE, ADD)
    pdl_launch_late(PDL)


def lossless_gemv(
    x: Tensor, matrix: LosslessMatrix, out: Tensor, tile: LosslessGemvTile, *, norm: Tensor | None = None,
    eps: float = 0.0, gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [1, k] with k even, at most MAX_GEMV_COLS; norm: float32 [k]; out: [1, n]; with a gate, n is half the
    matrix's rows."""
    n, k = out.shape[1], x.shape[1]
    width, threads = matrix.codes.shape[2] // 2, 32 * tile.warps
    assert k // RAW_SHARE <= threads  # the escapes of a row
    _lossless_gemv[(min(cdiv(n, 1 if gate else 2), tile.per_sm * sm_count()),)](
        x, matrix.codes.view(torch.int32), *_stored_apart(matrix), x if matrix.bias is None else matrix.bias,
        x if norm is None else norm, out, n, k, width, eps, NORM=norm is not None, BIAS=matrix.bias is not None,
        GATE=gate, ADD=add, TILE_HALVES=matrix.halves, WORDS=max(threads, next_power_of_two(width)), THREADS=threads,
        PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps, maxnreg=tile.registers),
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
    tma: bool = True


@triton.jit
def load_escapes(places, values, starts, first, end, split, SPLITS: tl.constexpr, SLOTS: tl.constexpr):
    """The split's first SLOTS escapes of rows first .. end - 1, where it looks for the next ones, and their end."""
    at, stop = tl.load(starts + first) + split * SLOTS, tl.load(starts + end)
    slot = at + tl.arange(0, SLOTS)
    place = tl.load(places + slot, mask=slot < stop, other=0)
    return place, tl.load(values + slot, mask=slot < stop, other=0.0), at, stop


@triton.jit
def add_escapes(acc, place, value, mask, x_tile, row_scale, row):
    """acc [ROWS, TOKENS] plus the true values of some escapes, less what they decode to, times x_tile, their tokens."""
    kind: tl.constexpr = x_tile.dtype
    own = ((row & 0x7FFF)[:, None] == ((place >> 16) & 0x7FFF)[None, :]) & mask[None, :]
    acc = tl.dot(tl.where(own, value[None, :], 0.0).to(kind), x_tile, acc)
    return tl.dot(tl.where(own, -smallest(row_scale)[:, None], 0.0).to(kind), x_tile, acc)


@triton.jit
def tile_escapes(
    acc, escapes, x, t_stride, col_stride, row_scale, places, values, row, t, m, SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, TOKENS] plus what the escapes of its rows add: those that were loaded, and every SPLITS'th SLOTS
    of them that follow."""
    place, value, at, stop = escapes
    while at < stop:
        slot = at + tl.arange(0, SLOTS)
        mask = slot < stop
        col = place & 0xFFFF
        x_ptrs = x + t.to(tl.int64)[None, :] * t_stride + col[:, None] * col_stride
        x_tile = tl.load(x_ptrs, mask=mask[:, None] & (t < m)[None, :], other=0.0)
        acc = add_escapes(acc, place, value, mask, x_tile, row_scale, row)
        at += SPLITS * SLOTS
        slot = at + tl.arange(0, SLOTS)
        place = tl.load(places + slot, mask=slot < stop, other=0)
        value = tl.load(values + slot, mask=slot < stop, other=0.0)
    return acc


@triton.jit
def tile_raw(acc, x, x_stride, raw, raw_row, t, m, k, begin, end, COLS: tl.constexpr):
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
                x + t.to(tl.int64)[:, None] * x_stride + col[None, :], mask=(t < m)[:, None] & col_mask, other=0.0
            )
            own = tl.dot(w.to(kind), tl.trans(x_tile), own)
    return tl.where(is_raw, own, acc)


@triton.jit(do_not_specialize=["m"])
def _lossless_gemm(
    x, codes, x_map, code_map, scale, starts, places, values, raw, bias, out, partial, counters, m, n, k, width,
    token_tiles, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    TILE_HALVES: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TMA: x and codes are read through x_map and code_map, by the copy engine, where k fills all tiles. SLOTS: escapes
    of a tile that are multiplied at a time. width: half-words of a plane, H of them per iteration.
    """
    pdl_launch_early(PDL)
    output_tile, split = tl.program_id(0), tl.program_id(1)
    first = output_tile // token_tiles * ROWS
    row = first + tl.arange(0, ROWS)
    first_token = output_tile % token_tiles * TOKENS
    t = first_token + tl.arange(0, TOKENS)
    half = tl.arange(0, H)
    steps = tl.cdiv(width, H)
    per_split = tl.cdiv(steps, SPLITS)
    begin, end = tl.minimum(split * per_split, steps), tl.minimum(split * per_split + per_split, steps)
    safe_row = tl.minimum(row, n - 1)
    ptrs = codes + safe_row.to(tl.int64)[:, None] * (3 * width) + half[None, :]
    up_ptrs = ptrs + n.to(tl.int64) * (3 * width)
    row_end = tl.minimum(first + ROWS, n)
    row_scale = tl.load(scale + safe_row)
    escapes = load_escapes(places, values, starts, first, row_end, split, SPLITS, SLOTS)
    if GATE:
        up_scale = tl.load(scale + n + safe_row)
        up_escapes = load_escapes(places, values, starts, n + first, n + row_end, split, SPLITS, SLOTS)
    pdl_wait(PDL)
    x_ptrs = x + t.to(tl.int64)[:, None] * k + (half // TILE_HALVES * (4 * TILE_HALVES) + half % TILE_HALVES)[None, :]
    token_mask = (t < m)[:, None]
    kind: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        half_mask = (step * H + half < width)[None, :]
        if TMA:
            a = code_map.load([first, step * H])
            b = code_map.load([first, width + step * H])
            high = code_map.load([first, 2 * width + step * H])
        else:
            a = tl.load(ptrs + step * H, mask=half_mask, other=0)
            b = tl.load(ptrs + width + step * H, mask=half_mask, other=0)
            high = tl.load(ptrs + 2 * width + step * H, mask=half_mask, other=0)
        if GATE:
            if TMA:
                up_a = code_map.load([n + first, step * H])
                up_b = code_map.load([n + first, width + step * H])
                up_high = code_map.load([n + first, 2 * width + step * H])
            else:
                up_a = tl.load(up_ptrs + step * H, mask=half_mask, other=0)
                up_b = tl.load(up_ptrs + width + step * H, mask=half_mask, other=0)
                up_high = tl.load(up_ptrs + 2 * width + step * H, mask=half_mask, other=0)
        w0, w1 = half_word_values(a, high, False)
        w2, w3 = half_word_values(b, high, True)
        if GATE:
            v0, v1 = half_word_values(up_a, up_high, False)
            v2, v3 = half_word_values(up_b, up_high, True)
        col = step * H // TILE_HALVES * (4 * TILE_HALVES) + step * H % TILE_HALVES  # of the first half-word
        for i in tl.static_range(4):
            if TMA:
                x_slice = x_map.load([first_token, col + i * TILE_HALVES]).T
            else:
                inside = col + half // TILE_HALVES * (4 * TILE_HALVES) + i * TILE_HALVES + half % TILE_HALVES < k
                x_slice = tl.trans(
                    tl.load(x_ptrs + (col + i * TILE_HALVES), mask=token_mask & inside[None, :], other=0.0)
                )
            w = w0 if i == 0 else w1 if i == 1 else w2 if i == 2 else w3
            acc = tl.dot(w.to(kind), x_slice, acc)
            if GATE:
                v = v0 if i == 0 else v1 if i == 1 else v2 if i == 2 else v3
                acc_up = tl.dot(v.to(kind), x_slice, acc_up)
    acc *= row_scale[:, None]
    acc = tile_escapes(acc, escapes, x, k, 1, row_scale, places, values, row, t, m, SPLITS, SLOTS)
    acc = tile_raw(acc, x, k, raw, raw_rows(row_scale), t, m, k, begin * H * 4, end * H * 4, 64)
    if GATE:
        acc_up *= up_scale[:, None]
        acc_up = tile_escapes(acc_up, up_escapes, x, k, 1, up_scale, places, values, n + row, t, m, SPLITS, SLOTS)
        acc_up = tile_raw(acc_up, x, k, raw, raw_rows(up_scale), t, m, k, begin * H * 4, end * H * 4, 64)
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
    slots = min(64, max(16, next_power_of_two(tile.rows * k // (ESCAPE_SHARE * tile.splits))))
    tma = tile.tma and not INTERPRETED and 4 * matrix.halves == TILES[0] and tile.halves <= matrix.halves
    tma = tma and x.stride(0) % 8 == 0
    x_map = code_map = x
    if tma:
        x_map = TensorDescriptor(x, [m, k], [x.stride(0), 1], [tile.tokens, tile.halves])
        lines = matrix.codes.view(len(matrix.codes), -1)
        code_map = TensorDescriptor(lines, list(lines.shape), [lines.shape[1], 1], [tile.rows, tile.halves])
    _lossless_gemm[(cdiv(n, tile.rows) * token_tiles, tile.splits)](
        x, matrix.codes, x_map, code_map, *_stored_apart(matrix), x if matrix.bias is None else matrix.bias, out,
        partial, counters, m, n, k, matrix.codes.shape[2], token_tiles, BIAS=matrix.bias is not None, GATE=gate,
        ADD=add, SPLITS=tile.splits, ROWS=tile.rows, TILE_HALVES=matrix.halves, H=tile.halves,
        TOKENS=tile.tokens, SLOTS=slots, TMA=tma, STAGES=tile.stages, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


# --- tile configs -----------------------------------------------------------------------------------------------------


def lossless_gemv_tile(k: int) -> LosslessGemvTile:
    """The tile config for rows of k columns; one warp for each 2,048 of them has registers for a row's escapes."""
    if INTERPRETED:
        return LosslessGemvTile(1, 1) if k < 32 * RAW_SHARE else LosslessGemvTile(16, 1)
    return LosslessGemvTile(8, 2, 128) if k > 8192 else LosslessGemvTile(4, 4)


def lossless_gemm_tile(m: int, n: int, k: int, gated: bool) -> LosslessGemmTile | None:
    """The tile config for m tokens and n output columns; None: decode and use cuBLAS, for many tokens."""
    if m > MAX_TOKENS or (gated and m > MAX_GATED and not INTERPRETED):
        return None
    tokens = min(256, max(8, next_power_of_two(m)))
    if INTERPRETED:
        return LosslessGemmTile(64, 64, max(16, tokens), 1, 2, 4)
    if tokens > 64:
        return LosslessGemmTile(128, 32, 128, 1, 3, 8)
    tiles, splits, enough = cdiv(n, 64), 1, sm_count() * 2 if tokens <= 16 else sm_count() * 4 // 3
    while not gated and splits < 4 and tiles * splits < enough and k >= 1024 * splits:
        splits *= 2
    return LosslessGemmTile(64, 64, tokens, splits, 3 if tokens <= 16 and not gated else 2, 4)
