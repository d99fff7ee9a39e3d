# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Packing of BF16 matrices in the layout of `lossless.py`, some rows at a time, into memory that is allocated at once.

A kernel packs weights on a GPU: it finds each row's window of exponents, writes the codes, and takes places for escapes
and raw rows as they come, so that the host waits for nothing. Once all rows are packed, these are put in the order of
rows. Elsewhere plain PyTorch packs.
"""

from dataclasses import replace
from functools import cache
from threading import Lock
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import launch_options
from emberline.kernels.gpu.lossless import DECODED_EXPONENT, PLANES, RAW_SHARE, LosslessMatrix, plane_halves

MAX_COLUMNS = 1 << 16  # that an escape can name
PACKING_BYTES = 64 << 20  # of a GPU: a piece, and where each row's escapes are until all rows are packed
WINDOW = 16  # neighboring exponents that a code tells apart
_FIRST, _LAST = 1, 255 - WINDOW  # of a row's window: no denormals, infinities or NaN in it
_PIECE_WEIGHTS = 1 << 23
_packing = Lock()  # held by the thread that starts to pack a piece


class Room(NamedTuple):
    """How many escapes and raw rows a matrix has memory for."""

    escapes: int
    raw_rows: int

    @classmethod
    def of(cls, n: int, k: int) -> "Room":
        """Several times what trained weights need; half a percent of the matrix."""
        return cls(n * k // 1024 + 1024, n // 1024 + 8)


class StoredApart(NamedTuple):
    """Where the escapes of rows, and raw rows, were stored in the order in which they came. All int32."""

    counts: Tensor  # [rows]: escapes
    slots: Tensor  # [rows]: of a row's first escape, or of a raw row
    used: Tensor  # [2]: escapes and raw rows so far; those that there is no memory for are counted, too

    @classmethod
    def empty(cls, n: int, device: torch.device | str) -> "StoredApart":
        counts, slots, used = (torch.zeros(size, dtype=torch.int32, device=device) for size in (n, n, 2))
        return cls(counts, slots, used)


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
        self.apart = StoredApart.empty(n, device)
        on_gpu = self.matrix.codes.device.type == "cuda"
        self._allocated = torch.cuda.current_stream().record_event() if on_gpu else None

    def pack(self, weight: Tensor, first: int) -> None:
        """Pack rows `first` and on from bfloat16 [rows, k], which may be on the host. Parts of a matrix may come in any
        order, on any thread. On a GPU the work is only started: the caller's stream waits for it."""
        step, device = max(1, _PIECE_WEIGHTS // max(1, self.matrix.k)), self.matrix.codes.device
        stream, pack = _packing_stream(device), pack_rows_reference if device.type == "cpu" else pack_rows
        caller = None if stream is None else torch.cuda.current_stream(device)
        written = None if caller is None else caller.record_event()  # the weight
        with _packing, torch.cuda.stream(stream):
            for event in (self._allocated, written):
                if stream is not None and event is not None:
                    stream.wait_event(event)
            for start in range(0, len(weight), step):  # one piece after the other has memory
                some = weight[start : start + step]
                pack(some.to(device, non_blocking=True).contiguous(), first + start, self.matrix, self.apart)
            packed = None if stream is None else stream.record_event()
        if caller is not None and packed is not None:
            caller.wait_event(packed)

    def finish(self) -> LosslessMatrix:
        """Put escapes and raw rows in order. Raises ValueError where there are more than there is room for."""
        stream = _packing_stream(self.matrix.codes.device)
        with _packing, torch.cuda.stream(stream):
            self._finish()
            if stream is not None:
                stream.synchronize()
        return self.matrix

    def _finish(self) -> None:
        matrix, (counts, slots, used) = self.matrix, self.apart
        n_escapes, n_raw = used.tolist()
        room = Room(len(matrix.places), len(matrix.raw))
        if n_escapes > room.escapes or n_raw > room.raw_rows:
            raise ValueError(
                f"a matrix of {matrix.shape} has {n_escapes:,} escapes and {n_raw:,} raw rows, more than the"
                f" {room.escapes:,} and {room.raw_rows:,} there is memory for: it does not compress"
            )
        ends = counts.cumsum(0, dtype=torch.int32)
        if n_escapes:
            slot = (slots - ends + counts).repeat_interleave(counts, output_size=n_escapes)
            slot += torch.arange(n_escapes, dtype=torch.int32, device=slot.device)
            for each in (matrix.places, matrix.values):
                each[:n_escapes] = each[slot]
        if n_raw:
            is_raw = matrix.scale < 0
            matrix.raw[:n_raw] = matrix.raw[slots[is_raw]]
            matrix.scale.copy_(torch.where(is_raw, -is_raw.cumsum(0).float(), matrix.scale))
        matrix.starts[1:] = ends


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


# --- rows of a piece --------------------------------------------------------------------------------------------------


def pack_rows_reference(weight: Tensor, first: int, matrix: LosslessMatrix, apart: StoredApart) -> None:
    """Pack rows `first` and on, and store their escapes and raw rows as they come."""
    rows = slice(first, first + len(weight))
    bits = weight.view(torch.int16).to(torch.int32) & 0xFFFF
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
    counts = escaped.sum(1, dtype=torch.int32)
    at = torch.nonzero(escaped)
    places = (((at[:, 0] + first) & 0x7FFF) << 16 | at[:, 1]).to(torch.int32)
    n_escapes, n_raw = apart.used.tolist()
    apart.counts[rows] = counts
    apart.slots[rows] = torch.where(is_raw, n_raw + is_raw.cumsum(0) - 1, n_escapes + counts.cumsum(0) - counts).int()
    for room, found in ((matrix.places, places), (matrix.values, weight[escaped])):
        room[n_escapes : n_escapes + len(found)] = found[: max(0, len(room) - n_escapes)]
    found = weight[is_raw]
    matrix.raw[n_raw : n_raw + len(found)] = found[: max(0, len(matrix.raw) - n_raw)]
    apart.used.add_(torch.stack([counts.sum(), is_raw.sum()]))


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


@triton.jit(do_not_specialize=["first_row", "room", "raw_room"])  # or it would be compiled for many of them
def _pack_rows(
    weight, codes, scale, counts, slots, used, places, values, raw, first_row, k, width, room, raw_room,
    FIRST: tl.constexpr, LAST: tl.constexpr, WINDOW: tl.constexpr, ZERO: tl.constexpr, RAW_SHARE: tl.constexpr,
    TILE_HALVES: tl.constexpr, HALVES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A row: its window, which holds most of its exponents, its codes and its escapes. weight, values, raw: int16.

    A row that is stored raw has the scale -1, no escapes and codes of zero. room, raw_room: escapes and raw rows that
    there is memory for.
    """
    row = tl.program_id(0)
    row_ptr = weight + row.to(tl.int64) * k
    bins = tl.zeros([256], tl.int32)
    for start in range(0, k, COLS):
        col = start + tl.arange(0, COLS)
        bits = tl.load(row_ptr + col, mask=col < k, other=0).to(tl.int32)  # 0: an exponent that no window holds
        bins += tl.histogram((bits >> 7) & 255, 256)
    up_to, base = tl.cumsum(bins, 0), tl.arange(0, 256)
    held = tl.gather(up_to, tl.minimum(base + WINDOW - 1, 255), 0) - tl.gather(up_to, tl.maximum(base - 1, 0), 0)
    held = tl.where((base >= FIRST) & (base <= LAST), held, -1)
    most, first = tl.max(held, 0, return_indices=True)
    n_escapes = k - most
    is_raw = n_escapes > k // RAW_SHARE
    tl.store(scale + row, tl.where(is_raw, -1.0, ((first - ZERO + 127) << 23).to(tl.float32, bitcast=True)))
    tl.store(counts + row, tl.where(is_raw, 0, n_escapes))
    for start in range(0, width, HALVES):
        half = start + tl.arange(0, HALVES)
        a, b, high = tl.zeros([HALVES], tl.int32), tl.zeros([HALVES], tl.int32), tl.zeros([HALVES], tl.int32)
        for i in tl.static_range(4):
            col = half // TILE_HALVES * (4 * TILE_HALVES) + i * TILE_HALVES + half % TILE_HALVES
            mask = (col < k) & (half < width)
            bits = tl.load(row_ptr + col, mask=mask, other=0).to(tl.int32)
            code = ((bits >> 7) & 255) - first
            stored = mask & (code >= 0) & (code < WINDOW) & (is_raw == 0)
            low = tl.where(stored, ((code & 1) << 7) | (bits & 127), 0)
            sign, upper = tl.where(stored, (bits >> 15) & 1, 0), tl.where(stored, code >> 1, 0)
            if i < 2:
                a |= low << (8 * i)
                high |= ((sign << 7) | upper) << (8 * i)
            else:
                b |= low << (8 * (i - 2))
                high |= ((sign << 3) | (upper << 4)) << (8 * (i - 2))
        to = codes + row.to(tl.int64) * (3 * width) + half
        tl.store(to, a.to(tl.int16), mask=half < width)
        tl.store(to + width, b.to(tl.int16), mask=half < width)
        tl.store(to + 2 * width, high.to(tl.int16), mask=half < width)
    if is_raw:
        slot = tl.atomic_add(used + 1, 1)
        tl.store(slots + row, slot)
        to, n_stored = raw + slot.to(tl.int64) * k, tl.where(slot < raw_room, k, 0)
        for start in range(0, k, COLS):
            col = start + tl.arange(0, COLS)
            tl.store(to + col, tl.load(row_ptr + col, mask=col < k, other=0), mask=col < n_stored)
    elif n_escapes > 0:
        at = tl.atomic_add(used, n_escapes)
        tl.store(slots + row, at)
        end, start, name = at + n_escapes, 0, ((row + first_row) & 0x7FFF) << 16
        while at < end:
            col = start + tl.arange(0, COLS)
            bits = tl.load(row_ptr + col, mask=col < k, other=0)
            code = ((bits.to(tl.int32) >> 7) & 255) - first
            escaped = (col < k) & ((code < 0) | (code >= WINDOW))
            to = at + tl.cumsum(escaped.to(tl.int32), 0) - 1
            tl.store(places + to, name | col, mask=escaped & (to < room))
            tl.store(values + to, bits, mask=escaped & (to < room))
            at += tl.sum(escaped.to(tl.int32), 0)
            start += COLS


def pack_rows(weight: Tensor, first: int, matrix: LosslessMatrix, apart: StoredApart) -> None:
    """`pack_rows_reference` by a kernel."""
    n, k = weight.shape
    rows = slice(first, first + n)
    _pack_rows[(n,)](
        weight.view(torch.int16), matrix.codes[rows], matrix.scale[rows], apart.counts[rows], apart.slots[rows],
        apart.used, matrix.places, matrix.values.view(torch.int16), matrix.raw.view(torch.int16), first, k,
        matrix.codes.shape[2], len(matrix.places), len(matrix.raw), FIRST=_FIRST, LAST=_LAST, WINDOW=WINDOW,
        ZERO=DECODED_EXPONENT, RAW_SHARE=RAW_SHARE, TILE_HALVES=matrix.halves, HALVES=512, COLS=2048,
        **launch_options(False, num_warps=4),
    )  # fmt: skip


# --- memory -----------------------------------------------------------------------------------------------------------


def lossless_bytes(n: int, k: int) -> int:
    """Bytes of a packed matrix with the usual room."""
    room = Room.of(n, k)
    return n * PLANES * plane_halves(k) * 2 + 8 * n + 4 + 6 * room.escapes + 2 * k * room.raw_rows
