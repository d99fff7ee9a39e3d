# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""BF16 weights in 12 bits each, bit for bit: layout, packing, its plain PyTorch reference, and decoding of rows.

Nearly all exponents of a row lie within 16 neighbors. So a weight keeps its sign, its 7 bits of mantissa and the 4 low
bits of its exponent's distance from the row's first exponent. The few weights outside, the escapes, are stored beside
(column and value), and a row with many of them is stored raw.

A tile of 64 columns of a row is 16 half-words in each of three planes. Half-word h of plane A holds the low bytes
(last bit of the exponent code, mantissa) of columns h and 16 + h, of plane B those of columns 32 + h and 48 + h. Plane
N holds what the four high bytes have beside: sign and three bits of the exponent code, those of A's columns in bits
7 and 2..0 of a byte, those of B's in bits 3 and 6..4. So three bytes make a register of two bfloat16 in about one
instruction a weight, and none moves bits between lanes. The decoded exponent is 112 + code: the power of two that is
missing is the row's scale, and multiplying a sum by it is exact.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import INTERPRETED, cdiv, next_power_of_two

TILE = 64  # columns whose bits are interleaved
HALVES = TILE // 4  # half-words of a tile in each plane
PLANES = 3
WINDOW = 16  # neighboring exponents that a code tells apart
DECODED_EXPONENT = 112  # of code 0, before the row's scale
MAX_COLUMNS = 1 << 16  # that an escape can name
RAW_SHARE = 64  # a row is stored raw if more than one of so many weights is an escape
_FIRST, _LAST = 1, 255 - WINDOW  # of a row's window: no denormals, infinities or NaN in it
_PACKED_WEIGHTS = 1 << 23  # packed at a time: bounds the temporary memory
_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True)
class LosslessMatrix:
    codes: Tensor  # int16 [n, PLANES, tiles * HALVES]
    scale: Tensor  # float32 [n]: the power of two that a decoded row is multiplied by
    starts: Tensor  # int32 [n + 1]: the first escape of each row
    places: Tensor  # int32 [escapes]: row modulo 2^15 in the high half, column in the low one; sorted by row
    values: Tensor  # bfloat16 [escapes]
    k: int
    raw_index: Tensor | None = None  # int32 [n]: place of a row in `raw`, or -1; None: no row is raw
    raw: Tensor | None = None  # bfloat16 [raw rows, k]
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.k

    def dense(self) -> Tensor:
        """bfloat16 [n, k]: the plain PyTorch reference, equal in every bit to the matrix that was packed."""
        n, tiles = self.codes.shape[0], self.codes.shape[2] // HALVES
        a, b, high = self.codes.view(n, PLANES, tiles, HALVES).to(torch.int32).unbind(1)
        low = torch.stack([a, a >> 8, b, b >> 8], dim=2) & 255  # [n, tiles, 4, HALVES]
        even, odd = high & 255, (high >> 8) & 255
        first = torch.stack([even, odd], dim=2)
        sign = torch.cat([first >> 7, (first >> 3) & 1], dim=2)
        upper = torch.cat([first & 7, (first >> 4) & 7], dim=2)
        base = (torch.log2(self.scale).to(torch.int32) + DECODED_EXPONENT).view(n, 1, 1, 1)
        bits = (sign << 15) | ((upper << 8) + low + (base << 7))
        weight = bits.to(torch.int16).view(torch.bfloat16).view(n, -1)[:, : self.k].contiguous()
        rows = torch.repeat_interleave(torch.arange(n, device=weight.device), self.starts.diff().long())
        _copy_bits(weight, (rows, (self.places & 0xFFFF).long()), self.values)
        if self.raw is not None and self.raw_index is not None:
            raw_rows = torch.nonzero(self.raw_index >= 0)[:, 0]
            _copy_bits(weight, (raw_rows,), self.raw[self.raw_index[raw_rows].long()])
        return weight


def _copy_bits(target: Tensor, where: tuple[Tensor, ...], values: Tensor) -> None:
    target.view(torch.int16)[where] = values.view(torch.int16)


# --- packing ----------------------------------------------------------------------------------------------------------


class LosslessPacker:
    """Packs a matrix some rows at a time, into memory of its final size but for escapes and raw rows."""

    def __init__(self, n: int, k: int, device: torch.device | str) -> None:
        if k > MAX_COLUMNS:
            raise ValueError(f"a row of {k} columns is longer than {MAX_COLUMNS}")
        self._k = k
        self._codes = torch.empty(n, PLANES, cdiv(k, TILE) * HALVES, dtype=torch.int16, device=device)
        self._scale = torch.empty(n, dtype=torch.float32, device=device)
        self._counts = torch.zeros(n + 1, dtype=torch.int32, device=device)
        self._raw_index = torch.full((n,), -1, dtype=torch.int32, device=device)
        self._places: dict[int, Tensor] = {}  # by first row, as are the next two
        self._values: dict[int, Tensor] = {}
        self._raw: dict[int, Tensor] = {}

    def pack(self, weight: Tensor, first: int) -> None:
        """Pack rows `first` and on from bfloat16 [rows, k]. Parts of a matrix may come in any order."""
        step = max(1, _PACKED_WEIGHTS // max(1, self._k))
        for start in range(0, len(weight), step):
            self._pack(weight[start : start + step], first + start)

    def _pack(self, weight: Tensor, first: int) -> None:
        rows = slice(first, first + len(weight))
        bits = weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
        exponent = (bits >> 7) & 255
        base = _best_windows(exponent)
        code = exponent - base[:, None]
        escaped = (code < 0) | (code >= WINDOW)
        n_escaped = escaped.sum(1)
        is_raw = n_escaped > self._k // RAW_SHARE
        zeroed = escaped | is_raw[:, None]
        low = (((code & 1) << 7) | (bits & 127)).masked_fill(zeroed, 0)
        high = (((bits >> 15) << 3) | ((code >> 1) & 7)).masked_fill(zeroed, 0)
        self._codes[rows] = _interleave(low, high)
        self._scale[rows] = torch.exp2((base - DECODED_EXPONENT).float())
        escaped &= ~is_raw[:, None]
        self._counts[rows.start + 1 : rows.stop + 1] = escaped.sum(1)
        at = torch.nonzero(escaped)
        self._places[first] = (((at[:, 0] + first) & 0x7FFF) << 16 | at[:, 1]).to(torch.int32)
        self._values[first] = weight[escaped]
        self._raw_index[rows] = torch.where(is_raw, 0, -1).to(torch.int32)
        self._raw[first] = weight[is_raw]

    def finish(self, bias: Tensor | None = None) -> LosslessMatrix:
        order = sorted(self._places)
        places, values, raw = (
            torch.cat([parts[first] for first in order]) for parts in (self._places, self._values, self._raw)
        )
        index: Tensor | None = None
        if len(raw):
            is_raw = self._raw_index >= 0
            index = torch.where(is_raw, is_raw.cumsum(0) - 1, -1).to(torch.int32)
        starts = self._counts.cumsum(0).to(torch.int32)
        return LosslessMatrix(
            self._codes, self._scale, starts, places, values, self._k, index, raw if len(raw) else None, bias
        )


def pack_lossless(weight: Tensor, bias: Tensor | None = None) -> LosslessMatrix:
    """Pack a bfloat16 matrix [n, k]."""
    packer = LosslessPacker(weight.shape[0], weight.shape[1], weight.device)
    packer.pack(weight, 0)
    return packer.finish(bias)


def _best_windows(exponent: Tensor) -> Tensor:
    """The first exponent of the window that holds most of each row's, int32 [rows]."""
    counts = torch.zeros(len(exponent), 256, dtype=torch.int32, device=exponent.device)
    counts.scatter_add_(1, exponent.long(), torch.ones_like(exponent))
    before = torch.nn.functional.pad(counts.cumsum(1, dtype=torch.int32), (1, 0))
    held = before[:, _FIRST + WINDOW : _LAST + WINDOW + 1] - before[:, _FIRST : _LAST + 1]
    return held.argmax(1).to(torch.int32) + _FIRST


def _interleave(low: Tensor, high: Tensor) -> Tensor:
    """Low bytes and the 4 bits beside, int32 [rows, k] each, to the planes, int16 [rows, PLANES, tiles * HALVES]."""
    missing = -low.shape[1] % TILE
    low, high = (torch.nn.functional.pad(each, (0, missing)).unflatten(1, (-1, 4, HALVES)) for each in (low, high))
    upper = ((high & 8) << 4) | (high & 7)  # in the place of A's columns
    lower = (high & 8) | ((high & 7) << 4)  # in that of B's
    a, b = low[:, :, 0] | low[:, :, 1] << 8, low[:, :, 2] | low[:, :, 3] << 8
    n = upper[:, :, 0] | upper[:, :, 1] << 8 | lower[:, :, 2] | lower[:, :, 3] << 8
    return torch.stack([a, b, n], dim=1).to(torch.int16).flatten(2)


def lossless_bytes(n: int, k: int, escapes: int = 0) -> int:
    """Bytes of a packed matrix without raw rows."""
    return n * PLANES * cdiv(k, TILE) * HALVES * 2 + 8 * n + 4 + 6 * escapes


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


# --- decoding rows ----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first", "rows"])
def _decode_rows(
    codes, scale, starts, places, values, raw_index, raw, ids, out, first, rows, n, k, width, factor,
    FACTOR: tl.constexpr, RAW: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """64 half-words of ROWS rows, four tiles. Escapes are stored over them."""
    begin = tl.program_id(1) * ROWS
    out_row = begin + tl.arange(0, ROWS)
    half = tl.program_id(0) * 64 + tl.arange(0, 64)
    kind = out.dtype.element_ty
    row = tl.minimum(first + out_row, n - 1)
    if IDS:
        row = tl.load(ids + out_row, mask=out_row < rows, other=0)
    code_ptrs = codes + row.to(tl.int64)[:, None] * (3 * width) + half[None, :]
    half_mask = (half < width)[None, :]
    a = tl.load(code_ptrs, mask=half_mask, other=0)
    b = tl.load(code_ptrs + width, mask=half_mask, other=0)
    high = tl.load(code_ptrs + 2 * width, mask=half_mask, other=0)
    w0, w1 = half_word_values(a, high, False)
    w2, w3 = half_word_values(b, high, True)
    row_scale = tl.load(scale + row)[:, None]
    raw_row = row
    if RAW:
        raw_row = tl.load(raw_index + row)
    for i in tl.static_range(4):
        w = w0 if i == 0 else w1 if i == 1 else w2 if i == 2 else w3
        col = half // 16 * 64 + i * 16 + half % 16
        mask = (out_row < rows)[:, None] & (col < k)[None, :]
        value = (w.to(tl.float32) * row_scale).to(kind)
        if RAW:
            raw_ptrs = raw + raw_row.to(tl.int64)[:, None] * k + col[None, :]
            is_raw = (raw_row >= 0)[:, None]
            value = tl.where(is_raw, tl.load(raw_ptrs, mask=mask & is_raw, other=0.0).to(kind), value)
        if FACTOR:
            value = (value.to(tl.float32) * factor).to(kind)
        tl.store(out + out_row.to(tl.int64)[:, None] * k + col[None, :], value, mask=mask)
    tl.debug_barrier()  # all threads have stored before the escapes are
    from_row = first + begin
    if IDS:
        from_row = tl.load(ids + begin)
    slot = tl.arange(0, SLOTS)
    stop = tl.load(starts + tl.minimum(from_row + tl.minimum(ROWS, rows - begin), n))
    for at in range(tl.load(starts + from_row), stop, SLOTS):
        place = tl.load(places + at + slot, mask=at + slot < stop, other=0)
        to_row, to_col = ((place >> 16) - from_row) & 0x7FFF, place & 0xFFFF
        is_here = (at + slot < stop) & (to_col // 256 == tl.program_id(0))
        escape = tl.load(values + at + slot, mask=is_here, other=0.0).to(kind)
        if FACTOR:
            escape = (escape.to(tl.float32) * factor).to(kind)
        tl.store(out + (begin + to_row).to(tl.int64) * k + to_col, escape, mask=is_here)


def decode_rows(
    matrix: LosslessMatrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
) -> None:
    """out [rows, k] = `factor` times the rows `ids` of the matrix, or the rows from `first` on."""
    rows, k = out.shape
    if rows:
        block = 1 if ids is not None else min(32, next_power_of_two(rows))
        width = matrix.codes.shape[2]
        _decode_rows[(cdiv(width, 64), cdiv(rows, block))](
            matrix.codes, matrix.scale, matrix.starts, matrix.places, matrix.values,
            matrix.starts if matrix.raw_index is None else matrix.raw_index,
            matrix.values if matrix.raw is None else matrix.raw, matrix.starts if ids is None else ids, out, first,
            rows, matrix.shape[0], k, width, factor, FACTOR=factor != 1.0, RAW=matrix.raw is not None, IDS=ids is not None,
            ROWS=block, SLOTS=64,
        )  # fmt: skip
