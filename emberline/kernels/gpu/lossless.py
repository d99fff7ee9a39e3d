# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""BF16 weights in 12 bits each, bit for bit: layout, its plain PyTorch reference, and decoding of rows.

Nearly all exponents of a row lie within 16 neighbors. So a weight keeps its sign, its 7 bits of mantissa and the 4 low
bits of its exponent's distance from the row's first exponent. The few weights outside, the escapes, are stored beside
(column and value), and a row with many of them is stored raw.

A tile of 256 columns of a row is 64 half-words in each of three planes. Half-word h of plane A holds the low bytes
(last bit of the exponent code, mantissa) of columns h and 64 + h, of plane B those of columns 128 + h, 192 + h. Plane
N holds what the four high bytes have beside: sign and three bits of the exponent code, those of A's columns in bits
7 and 2..0 of a byte, those of B's in bits 3 and 6..4. So three bytes make a register of two bfloat16 in about one
instruction a weight, and none moves bits between lanes. Rows whose length is no multiple of 256 have tiles of 64
columns, 16 half-words. The decoded exponent is 112 + code: the power of two that is missing is the row's scale, and
multiplying a sum by it is exact.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import INTERPRETED, cdiv, launch_options, next_power_of_two

TILES = (256, 64)  # columns whose bits are interleaved: the first that divides a row's length, or the last
PLANES = 3
DECODED_EXPONENT = 112  # of code 0, before the row's scale
ROW_PIECE = 1 << 15
RAW_SHARE = 64  # a row is stored raw if more than one of so many weights is an escape
_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True)
class LosslessMatrix:
    codes: Tensor  # int16 [n, PLANES, tiles * halves]
    scale: Tensor  # float32 [n]: the power of two that a decoded row is multiplied by; -1 - i for raw row i
    starts: Tensor  # int32 [n + 1]: the first escape of each row
    places: Tensor  # int32 [room]: row modulo 2^15 in the high half, column in the low one; sorted by row
    values: Tensor  # bfloat16 [room]
    raw: Tensor  # bfloat16 [room, k]
    k: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.k

    @property
    def halves(self) -> int:
        """Half-words of a tile in each plane."""
        return tile_columns(self.k) // 4

    def rows(self, first: int, end: int) -> "LosslessMatrix":
        """Rows first .. end - 1, a view. first: a multiple of ROW_PIECE, for escapes name their rows modulo it."""
        assert first % ROW_PIECE == 0
        bias = None if self.bias is None else self.bias[first:end]
        return replace(
            self,
            codes=self.codes[first:end],
            scale=self.scale[first:end],
            starts=self.starts[first : end + 1],
            bias=bias,
        )

    def dense(self) -> Tensor:
        """bfloat16 [n, k]: the plain PyTorch reference, equal in every bit to the matrix that was packed."""
        n, halves = self.codes.shape[0], self.halves
        a, b, high = self.codes.view(n, PLANES, self.codes.shape[2] // halves, halves).to(torch.int32).unbind(1)
        low = torch.stack([a, a >> 8, b, b >> 8], dim=2) & 255  # [n, tiles, 4, halves]
        first = torch.stack([high & 255, (high >> 8) & 255], dim=2)
        sign = torch.cat([first >> 7, (first >> 3) & 1], dim=2)
        upper = torch.cat([first & 7, (first >> 4) & 7], dim=2)
        is_raw = self.scale < 0
        scale = self.scale.masked_fill(is_raw, 1.0)
        base = (torch.log2(scale).to(torch.int32) + DECODED_EXPONENT).view(n, 1, 1, 1)
        bits = (sign << 15) | ((upper << 8) + low + (base << 7))
        weight = bits.to(torch.int16).view(torch.bfloat16).flatten(1)[:, : self.k].contiguous()
        rows = torch.repeat_interleave(torch.arange(n, device=weight.device), self.starts.diff().long())
        own = slice(int(self.starts[0]), int(self.starts[-1]))
        _copy_bits(weight, (rows, (self.places[own] & 0xFFFF).long()), self.values[own])
        _copy_bits(weight, (torch.nonzero(is_raw)[:, 0],), self.raw[(-1 - self.scale[is_raw]).long()])
        return weight


def tile_columns(k: int) -> int:
    """Columns of a tile of rows of k columns."""
    return next((columns for columns in TILES if k % columns == 0), TILES[-1])


def plane_halves(k: int) -> int:
    """Half-words of a plane of a row of k columns."""
    return cdiv(k, tile_columns(k)) * tile_columns(k) // 4


def _copy_bits(target: Tensor, where: tuple[Tensor, ...], values: Tensor) -> None:
    target.view(torch.int16)[where] = values.view(torch.int16)


# --- device functions -------------------------------------------------------------------------------------------------


@triton.jit
def half_word_values(low, high, SECOND: tl.constexpr):
    """Two slices of decoded weights, bfloat16 like the half-words: those of plane A, or with SECOND of plane B.

    low: half-words of that plane; high: of plane N. In the interpreter, which has no inline PTX, values are float32.
    """
    if _INTERPRETED:
        SIGN: tl.constexpr = 3 if SECOND else 7
        CODE: tl.constexpr = 4 if SECOND else 0
        wide_low, wide_high = low.to(tl.int32), high.to(tl.int32)
        first = (((wide_high >> SIGN) & 1) << 15) | 0x3800 | (((wide_high >> CODE) & 7) << 8) | (wide_low & 255)
        wide_low, wide_high = wide_low >> 8, wide_high >> 8
        other = (((wide_high >> SIGN) & 1) << 15) | 0x3800 | (((wide_high >> CODE) & 7) << 8) | (wide_low & 255)
        return (first << 16).to(tl.float32, bitcast=True), (other << 16).to(tl.float32, bitcast=True)
    elif SECOND:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u, c; mov.b32 c, 0x38383838; shr.b32 t, $3, 4; lop3.b32 t, t, 0x07070707, c, 0xEA;"
            " shl.b32 u, $3, 4; lop3.b32 t, u, 0x80808080, t, 0xEA;"
            " prmt.b32 $0, $2, t, 0x6240; prmt.b32 $1, $2, t, 0x7351; }",
            "=r,=r,r,r",
            [low, high],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, c; mov.b32 c, 0x38383838; lop3.b32 t, $3, 0x87878787, c, 0xEA;"
            " prmt.b32 $0, $2, t, 0x6240; prmt.b32 $1, $2, t, 0x7351; }",
            "=r,=r,r,r",
            [low, high],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def raw_rows(row_scale):
    """Numbers of raw rows by the scales of rows; of other rows below 0."""
    return tl.where(row_scale < 0, -row_scale, 0.0).to(tl.int32) - 1


# --- decoding rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodingTile:
    rows: int
    halves: int  # half-words of each plane, a quarter of the columns; whole tiles
    warps: int


@triton.jit
def _half_word_bits(low, high, base, SECOND: tl.constexpr):
    """Decode two slices as `half_word_values` does, with the row's own exponents.

    base: int16, the first exponent of a row's window in the place of a bfloat16's exponent.
    """
    if SECOND:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; shr.b32 t, $3, 4; and.b32 t, t, 0x07070707;"
            " shl.b32 u, $3, 4; lop3.b32 t, u, 0x80808080, t, 0xEA;"
            " prmt.b32 u, $2, t, 0x6240; add.u32 $0, u, $4; prmt.b32 u, $2, t, 0x7351; add.u32 $1, u, $4; }",
            "=r,=r,r,r,r",
            [low, high, base],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; and.b32 t, $3, 0x87878787;"
            " prmt.b32 u, $2, t, 0x6240; add.u32 $0, u, $4; prmt.b32 u, $2, t, 0x7351; add.u32 $1, u, $4; }",
            "=r,=r,r,r,r",
            [low, high, base],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit(do_not_specialize=["first", "rows"])
def _decode_rows(
    codes, scale, starts, places, values, raw, ids, out, first, rows, n, k, width, factor,
    FACTOR: tl.constexpr, IDS: tl.constexpr, TILE_HALVES: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """HALVES half-words of ROWS rows. Escapes are stored over them."""
    kind: tl.constexpr = out.dtype.element_ty
    begin = tl.program_id(1) * ROWS
    out_row = begin + tl.arange(0, ROWS)
    half = tl.program_id(0) * HALVES + tl.arange(0, HALVES)
    row, from_row = tl.minimum(first + out_row, n - 1), first + begin
    if IDS:
        row, from_row = tl.load(ids + out_row, mask=out_row < rows, other=0), tl.load(ids + begin)
    at, stop = tl.load(starts + from_row), tl.load(starts + tl.minimum(from_row + tl.minimum(ROWS, rows - begin), n))
    row_scale = tl.load(scale + row)[:, None]
    code_ptrs = codes + row.to(tl.int64)[:, None] * (3 * width) + half[None, :]
    half_mask = (half < width)[None, :]
    a = tl.load(code_ptrs, mask=half_mask, other=0, eviction_policy="evict_first")
    b = tl.load(code_ptrs + width, mask=half_mask, other=0, eviction_policy="evict_first")
    high = tl.load(code_ptrs + 2 * width, mask=half_mask, other=0, eviction_policy="evict_first")
    slot = tl.arange(0, SLOTS)
    place = tl.load(places + at + slot, mask=at + slot < stop, other=0)
    escape = tl.load(values + at + slot, mask=at + slot < stop, other=0.0)
    mask = (out_row < rows)[:, None]
    out_ptrs = out + out_row.to(tl.int64)[:, None] * k
    if _INTERPRETED or FACTOR or kind != tl.bfloat16:
        w0, w1 = half_word_values(a, high, False)
        w2, w3 = half_word_values(b, high, True)
    else:
        base = (((row_scale.to(tl.int32, bitcast=True) >> 23) - 15) << 7).to(tl.int16)
        base = tl.broadcast_to(base, [ROWS, HALVES])
        w0, w1 = _half_word_bits(a, high, base, False)
        w2, w3 = _half_word_bits(b, high, base, True)
    for i in tl.static_range(4):
        w = w0 if i == 0 else w1 if i == 1 else w2 if i == 2 else w3
        if _INTERPRETED or FACTOR or kind != tl.bfloat16:
            w = (w.to(tl.float32) * row_scale).to(kind)
        if FACTOR:
            w = (w.to(tl.float32) * factor).to(kind)
        col = half // TILE_HALVES * (4 * TILE_HALVES) + i * TILE_HALVES + half % TILE_HALVES
        tl.store(out_ptrs + col[None, :], w, mask=mask & (col < k)[None, :])
    if tl.min(row_scale) < 0:
        raw_ptrs = raw + raw_rows(row_scale).to(tl.int64) * k
        for i in tl.static_range(4):
            col = half // TILE_HALVES * (4 * TILE_HALVES) + i * TILE_HALVES + half % TILE_HALVES
            is_raw = mask & (row_scale < 0) & (col < k)[None, :]
            value = tl.load(raw_ptrs + col[None, :], mask=is_raw, other=0.0).to(kind)
            if FACTOR:
                value = (value.to(tl.float32) * factor).to(kind)
            tl.store(out_ptrs + col[None, :], value, mask=is_raw)
    tl.debug_barrier()  # all threads have stored before the escapes are
    while at < stop:
        to_row, to_col = ((place >> 16) - from_row) & 0x7FFF, place & 0xFFFF
        is_here = (at + slot < stop) & (to_col // (4 * HALVES) == tl.program_id(0)) & (to_row < ROWS)
        value = escape.to(kind)
        if FACTOR:
            value = (value.to(tl.float32) * factor).to(kind)
        tl.store(out + (begin + to_row).to(tl.int64) * k + to_col, value, mask=is_here)
        at += SLOTS
        place = tl.load(places + at + slot, mask=at + slot < stop, other=0)
        escape = tl.load(values + at + slot, mask=at + slot < stop, other=0.0)


def decoding_tile(n_rows: int) -> DecodingTile:
    return DecodingTile(min(16, next_power_of_two(n_rows)), 128, 4)


def decode_rows(
    matrix: LosslessMatrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0,
    tile: DecodingTile | None = None,
) -> None:  # fmt: skip
    """out [rows, k] = `factor` times the rows `ids` of the matrix, or the rows from `first` on."""
    rows, k = out.shape
    if rows:
        tile = tile or decoding_tile(1 if ids is not None else rows)
        width = matrix.codes.shape[2]
        _decode_rows[(cdiv(width, tile.halves), cdiv(rows, tile.rows))](
            matrix.codes, matrix.scale, matrix.starts, matrix.places, matrix.values, matrix.raw,
            matrix.starts if ids is None else ids, out, first, rows, matrix.shape[0], k, width, factor,
            FACTOR=factor != 1.0, IDS=ids is not None, TILE_HALVES=matrix.halves, ROWS=tile.rows, HALVES=tile.halves,
            SLOTS=64, **launch_options(False, num_warps=tile.warps),
        )  # fmt: skip
