# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""BF16 weights in 12 bits each, bit for bit: layout, packing, its plain PyTorch reference, and decoding of rows.

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
from functools import cache
from threading import Lock
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import INTERPRETED, cdiv, launch_options, next_power_of_two

TILES = (256, 64)  # columns whose bits are interleaved: the first that divides a row's length, or the last
PLANES = 3
WINDOW = 16  # neighboring exponents that a code tells apart
DECODED_EXPONENT = 112  # of code 0, before the row's scale
MAX_COLUMNS = 1 << 16  # that an escape can name
ROW_PIECE = 1 << 15
RAW_SHARE = 64  # a row is stored raw if more than one of so many weights is an escape
_FIRST, _LAST = 1, 255 - WINDOW  # of a row's window: no denormals, infinities or NaN in it
PACKING_BYTES = 192 << 20  # of temporary memory: what a piece takes, and what PyTorch's allocator keeps of it
_PACKED_WEIGHTS = 1 << 20  # of a piece, each with about 60 bytes of temporary memory
_packing = Lock()  # held for a piece by the thread that packs it
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


# --- packing ----------------------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """How many escapes and raw rows a matrix has memory for."""

    escapes: int
    raw_rows: int

    @classmethod
    def of(cls, n: int, k: int) -> "Room":
        """Several times what trained weights need; half a percent of the matrix."""
        return cls(n * k // 1024 + 1024, n // 1024 + 8)


class LosslessPacker:
    """Packs a matrix some rows at a time, into memory that is allocated at once.

    Kernels may run before all rows are packed, as steps are prepared while weights are read: until `finish` the matrix
    has no escapes, and no row names a raw row that does not exist.
    """

    def __init__(
        self, n: int, k: int, device: torch.device | str, room: Room | None = None, bias: Tensor | None = None
    ) -> None:
        if k > MAX_COLUMNS:
            raise ValueError(f"a row of {k} columns is longer than {MAX_COLUMNS}")
        room = room or Room.of(n, k)
        self.matrix = LosslessMatrix(
            torch.empty(n, PLANES, plane_halves(k), dtype=torch.int16, device=device),
            torch.ones(n, dtype=torch.float32, device=device),
            torch.zeros(n + 1, dtype=torch.int32, device=device),
            torch.zeros(room.escapes, dtype=torch.int32, device=device),
            torch.empty(room.escapes, dtype=torch.bfloat16, device=device),
            torch.empty(room.raw_rows, k, dtype=torch.bfloat16, device=device),
            k,
            bias,
        )
        self._counts = torch.zeros(n, dtype=torch.int32, device=device)  # escapes of each row
        self._escapes: dict[int, tuple[Tensor, Tensor]] = {}  # places and values, by first row
        self._raw: dict[int, Tensor] = {}

    def pack(self, weight: Tensor, first: int) -> None:
        """Pack rows `first` and on from bfloat16 [rows, k], which may be on the host. Parts of a matrix may come in any
        order, on any thread; threads take turns."""
        step, device = max(1, _PACKED_WEIGHTS // max(1, self.matrix.k)), self.matrix.codes.device
        stream = _packing_stream(device)
        for start in range(0, len(weight), step):
            with _packing, torch.cuda.stream(stream):
                self._pack(weight[start : start + step].to(device), first + start)
                if stream is not None:
                    stream.synchronize()

    def _pack(self, weight: Tensor, first: int) -> None:
        matrix, rows = self.matrix, slice(first, first + len(weight))
        bits = weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
        exponent = (bits >> 7) & 255
        base = _best_windows(exponent)
        code = exponent - base[:, None]
        escaped = (code < 0) | (code >= WINDOW)
        is_raw = escaped.sum(1) > matrix.k // RAW_SHARE
        zeroed = escaped | is_raw[:, None]
        low = (((code & 1) << 7) | (bits & 127)).masked_fill(zeroed, 0)
        high = (((bits >> 15) << 3) | ((code >> 1) & 7)).masked_fill(zeroed, 0)
        matrix.codes[rows] = _interleave(low, high, matrix.halves)
        matrix.scale[rows] = torch.exp2((base - DECODED_EXPONENT).float()).masked_fill(is_raw, -1.0)
        escaped &= ~is_raw[:, None]
        self._counts[rows] = escaped.sum(1, dtype=torch.int32)
        at = torch.nonzero(escaped)
        places = (((at[:, 0] + first) & 0x7FFF) << 16 | at[:, 1]).to(torch.int32)
        self._escapes[first] = places, weight[escaped]
        self._raw[first] = weight[is_raw]

    def finish(self) -> LosslessMatrix:
        """Store escapes and raw rows. Raises ValueError where there are more than there is room for."""
        matrix, order = self.matrix, sorted(self._raw)
        n_escapes = sum(len(places) for places, _ in self._escapes.values())
        n_raw = sum(map(len, self._raw.values()))
        room = Room(len(matrix.places), len(matrix.raw))
        if n_escapes > room.escapes or n_raw > room.raw_rows:
            raise ValueError(
                f"a matrix of {matrix.shape} has {n_escapes:,} escapes and {n_raw:,} raw rows, more than the"
                f" {room.escapes:,} and {room.raw_rows:,} there is memory for: it does not compress"
            )
        if n_escapes:
            torch.cat([self._escapes[first][0] for first in order], out=matrix.places[:n_escapes])
            torch.cat([self._escapes[first][1] for first in order], out=matrix.values[:n_escapes])
        if n_raw:
            torch.cat([self._raw[first] for first in order], out=matrix.raw[:n_raw])
            is_raw = matrix.scale < 0
            matrix.scale.copy_(torch.where(is_raw, -is_raw.cumsum(0).float(), matrix.scale))
        matrix.starts[1:] = self._counts.cumsum(0)
        self._escapes, self._raw = {}, {}
        return matrix


@cache
def _packing_stream(device: torch.device) -> torch.cuda.Stream | None:
    """One for all threads: PyTorch's allocator keeps the temporary memory of each stream apart. None: no GPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def pack_lossless(weight: Tensor, bias: Tensor | None = None) -> LosslessMatrix:
    """Pack a bfloat16 matrix [n, k]."""
    packer = LosslessPacker(weight.shape[0], weight.shape[1], weight.device, Room(weight.numel(), len(weight)), bias)
    packer.pack(weight, 0)
    matrix = packer.finish()
    n_escapes, n_raw = int(matrix.starts[-1]), int((matrix.scale < 0).sum())
    places, values = matrix.places[:n_escapes].clone(), matrix.values[:n_escapes].clone()
    return replace(matrix, places=places, values=values, raw=matrix.raw[:n_raw].clone())


def _best_windows(exponent: Tensor) -> Tensor:
    """The first exponent of the window that holds most of each row's, int32 [rows]."""
    counts = torch.zeros(len(exponent), 256, dtype=torch.int32, device=exponent.device)
    counts.scatter_add_(1, exponent.long(), torch.ones_like(exponent))
    before = torch.nn.functional.pad(counts.cumsum(1, dtype=torch.int32), (1, 0))
    held = before[:, _FIRST + WINDOW : _LAST + WINDOW + 1] - before[:, _FIRST : _LAST + 1]
    return held.argmax(1).to(torch.int32) + _FIRST


def _interleave(low: Tensor, high: Tensor, halves: int) -> Tensor:
    """Low bytes and the 4 bits beside, int32 [rows, k] each, to the planes, int16 [rows, PLANES, tiles * halves]."""
    missing = -low.shape[1] % (4 * halves)
    low, high = (torch.nn.functional.pad(each, (0, missing)).unflatten(1, (-1, 4, halves)) for each in (low, high))
    upper = ((high & 8) << 4) | (high & 7)  # in the place of A's columns
    lower = (high & 8) | ((high & 7) << 4)  # in that of B's
    a, b = low[:, :, 0] | low[:, :, 1] << 8, low[:, :, 2] | low[:, :, 3] << 8
    n = upper[:, :, 0] | upper[:, :, 1] << 8 | lower[:, :, 2] | lower[:, :, 3] << 8
    return torch.stack([a, b, n], dim=1).to(torch.int16).flatten(2)


def lossless_bytes(n: int, k: int) -> int:
    """Bytes of a packed matrix with the usual room."""
    room = Room.of(n, k)
    return n * PLANES * plane_halves(k) * 2 + 8 * n + 4 + 6 * room.escapes + 2 * k * room.raw_rows


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
