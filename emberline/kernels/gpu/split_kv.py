# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A chunk's tiles of queries, each by several programs: every one walks a piece of the keys.

Tiles come in waves of one for each multiprocessor, and a wave that is not full costs as much as one that is. An item is
a piece of the keys of one tile; the device lists them once a step, for all layers, since it alone knows lengths. The
host bounds their number, and the room for their results. Whichever program of a tile ends last merges its pieces,
always in the same order.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import SM_COUNT, cdiv

MAX_SPLIT_TOKENS = 1024  # of a step: larger ones have waves enough, and other uses for the room
MAX_SPLITS = 8  # of a tile; a power of two
MAX_WORK_ITEMS = 6 * SM_COUNT  # times KV heads: whose results there is room for
MIN_SPLIT_TILES = 4  # of a piece: tiles of keys, 512 of them with 128 dimensions
WORK_ITEM_COST = 4.0  # steps that could be done in the time that an item takes to start, to store and to merge
WORK_ITEM_FIELDS = (
    8  # row, tile of the row, piece, pieces of the tile, steps of a piece; the rest is padding to one sector
)


class SplitScratch(NamedTuple):
    parts: Tensor  # float32: by item and KV head the weighted values [queries, dim], peaks (base 2) and sums
    counters: Tensor  # int32 zeros, and zeros again afterwards; one for each item and KV head


@dataclass(frozen=True, slots=True)
class PrefillSplits:
    table: Tensor  # int32 [n, FIELDS]; row -1: nothing to do
    scratch: SplitScratch


def split_floats(queries: int, pad: int) -> int:
    return queries * (pad + 2)


def max_work_items(tokens: int, n_rows: int, per_tile: int, kv_heads: int) -> int:
    """Of each KV head, at most, for so many new tokens in so many rows; 0: too many, they are not listed."""
    tiles = cdiv(tokens, per_tile)
    bound, room = tiles + n_rows - 1, MAX_WORK_ITEMS // kv_heads
    return 0 if tokens > MAX_SPLIT_TOKENS or bound > room else max(bound, min(MAX_SPLITS * tiles, room))


@triton.jit
def _row_tiles(
    start, query_starts, context_lens, first_row, n_rows, span,
    TOKENS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows: which there are, tiles of TOKENS new tokens, and steps of TILE keys that a tile takes at most."""
    r = start + tl.arange(0, ROWS)
    ok = r < n_rows
    a = tl.load(query_starts + first_row + r, mask=ok, other=0)
    b = tl.load(query_starts + first_row + r + 1, mask=ok, other=0)
    context = tl.load(context_lens + first_row + r, mask=ok, other=0)
    return ok, tl.cdiv(b - a, TOKENS), tl.maximum(tl.cdiv(tl.minimum(context, span), TILE), 1)


@triton.jit
def _choose_split_tiles(
    query_starts, context_lens, first_row, n_rows, span, kv_heads, room, splits, TOKENS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, SMS: tl.constexpr, PIECES: tl.constexpr, LEAST: tl.constexpr,
    COST: tl.constexpr,
):  # fmt: skip
    """Of a piece. splits: pieces of the longest tile, 0: as many as make it short."""
    longest = 0
    for start in range(0, n_rows, ROWS):
        _, tiles, steps = _row_tiles(start, query_starts, context_lens, first_row, n_rows, span, TOKENS, TILE, ROWS)
        longest = tl.maximum(longest, tl.max(tl.where(tiles > 0, steps, 0)))
    s = 1 + tl.arange(0, PIECES)
    each = tl.maximum(tl.cdiv(longest, s), 1)
    items = tl.zeros([PIECES], tl.int32)
    long = tl.zeros([PIECES], tl.int32)  # items that take more than half as long as the longest
    for start in range(0, n_rows, ROWS):
        _, tiles, steps = _row_tiles(start, query_starts, context_lens, first_row, n_rows, span, TOKENS, TILE, ROWS)
        items += tl.sum(tiles[:, None] * tl.cdiv(steps[:, None], each[None, :]), 0)
        long += tl.sum(tiles[:, None] * ((steps[:, None] + each[None, :] // 2) // each[None, :]), 0)
    cost = tl.cdiv(long * kv_heads, SMS) * (each + COST)
    allowed = (items <= room) & ((s == 1) | (each >= LEAST)) & ((splits == 0) | (s == splits))
    cost = tl.where(allowed, cost, tl.where(s == 1, 1e30, float("inf")))
    return tl.sum(tl.where(s == tl.argmin(cost, 0) + 1, each, 0))


@triton.jit(do_not_specialize=["first_row", "n_rows", "n_items", "room", "splits", "window"])
def _plan_work_items(
    table, query_starts, context_lens, first_row, n_rows, n_items, kv_heads, room, splits, window,
    WINDOWED: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SMS: tl.constexpr,
    PIECES: tl.constexpr, LEAST: tl.constexpr, COST: tl.constexpr, MINE: tl.constexpr,
):  # fmt: skip
    span = window + TOKENS + TILE if WINDOWED else 2**31 - 1 - TILE
    each = _choose_split_tiles(
        query_starts, context_lens, first_row, n_rows, span, kv_heads, room, splits, TOKENS, TILE, ROWS, SMS, PIECES,
        LEAST, COST,
    )  # fmt: skip
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    row = tl.zeros([MINE], tl.int32)
    before = tl.zeros([MINE], tl.int32)  # items of the rows before mine
    carry = 0
    for start in range(0, n_rows, ROWS):
        ok, tiles, steps = _row_tiles(start, query_starts, context_lens, first_row, n_rows, span, TOKENS, TILE, ROWS)
        items = tiles * tl.cdiv(steps, each)
        ends = carry + tl.cumsum(items, 0)
        passed = (ends[None, :] <= mine[:, None]) & ok[None, :]
        row += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        carry += tl.sum(items)
    exists = mine < carry
    context = tl.load(context_lens + first_row + tl.where(exists, row, 0))
    pieces = tl.cdiv(tl.maximum(tl.cdiv(tl.minimum(context, span), TILE), 1), each)
    at = table + mine * 8
    stored = mine < n_items
    tl.store(at, tl.where(exists, first_row + row, -1), mask=stored)
    tl.store(at + 1, (mine - before) // pieces, mask=stored)
    tl.store(at + 2, (mine - before) % pieces, mask=stored)
    tl.store(at + 3, pieces, mask=stored)
    tl.store(at + 4, tl.zeros_like(pieces) + each, mask=stored)


def plan_work_items(
    query_starts: Tensor,
    context_lens: Tensor,
    first_row: int,
    n: int,
    kv_heads: int,
    per_tile: int,
    keys: int,
    window: int | None,
    out: Tensor,
    scratch: SplitScratch,
    part: int,
    splits: int = 0,
) -> PrefillSplits:
    """The items of rows from `first_row`, n of them (`n_items`), for tiles of `per_tile` tokens and steps of `keys`."""
    table = out[: n * WORK_ITEM_FIELDS].view(n, WORK_ITEM_FIELDS)
    room = min(n, scratch.parts.numel() // part // kv_heads, scratch.counters.numel() // kv_heads)
    _plan_work_items[(cdiv(n, 32),)](
        table, query_starts, context_lens, first_row, query_starts.shape[0] - 1 - first_row, n, kv_heads, room, splits,
        window or 0, WINDOWED=window is not None, TOKENS=per_tile, TILE=keys, ROWS=64, SMS=SM_COUNT, PIECES=MAX_SPLITS,
        LEAST=MIN_SPLIT_TILES, COST=WORK_ITEM_COST, MINE=32,
    )  # fmt: skip
    return PrefillSplits(table, scratch)


@triton.jit
def store_output(to, acc, total, mine):
    tl.store(to, (acc / total[:, None]).to(to.dtype.element_ty), mask=mine)


@triton.jit
def merge_splits(
    acc, peak, total, to, mine, parts, counters, first, split, n, stride, QUERIES: tl.constexpr, PAD: tl.constexpr
):
    """Leaves this piece for the program of its tile that ends last; that one puts the whole where it belongs.

    Piece s of the tile has its place at first + s * stride.
    """
    m, d = tl.arange(0, QUERIES), tl.arange(0, PAD)
    place = m[:, None] * PAD + d[None, :]
    SIZE: tl.constexpr = QUERIES * (PAD + 2)
    part = parts + (first + split * stride).to(tl.int64) * SIZE
    tl.store(part + place, acc)
    tl.store(part + QUERIES * PAD + m, peak)
    tl.store(part + QUERIES * (PAD + 1) + m, total)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    if tl.atomic_add(counters + first, 1, sem="acq_rel") == n - 1:
        tl.store(counters + first, 0)
        highest = tl.full([QUERIES], float("-inf"), tl.float32)
        sums = tl.zeros([QUERIES], tl.float32)
        merged = tl.zeros([QUERIES, PAD], tl.float32)
        for s in range(n):
            other = parts + (first + s * stride).to(tl.int64) * SIZE
            high = tl.load(other + QUERIES * PAD + m, cache_modifier=".cg")
            higher = tl.maximum(highest, high)
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # a query may see nothing of a piece
            shrink, weight = tl.exp2(highest - safe), tl.exp2(high - safe)
            sums = sums * shrink + weight * tl.load(other + QUERIES * (PAD + 1) + m, cache_modifier=".cg")
            merged = merged * shrink[:, None] + weight[:, None] * tl.load(other + place, cache_modifier=".cg")
            highest = higher
        store_output(to, merged, sums, mine)


DECODE_SPLIT_FIELDS = 8  # row, split, n_splits, first token, end, context; the rest is padding to one sector
TARGET_PROGRAMS = 6 * SM_COUNT  # pieces times KV heads, when there is enough to read
MIN_DECODE_SPLIT = 64  # tokens


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    table: Tensor  # int32 [n, PIECE_FIELDS]; row -1: nothing to do

    @property
    def n(self) -> int:
        return self.table.shape[0]


def max_decode_splits(rows: int, kv_heads: int) -> int:
    """A bound: every row's last piece, and as many full ones as the target allows."""
    return rows + cdiv(TARGET_PROGRAMS, kv_heads) if rows else 0


@triton.jit
def _lengths(context_lens, shares, rows, r, window, SHARED: tl.constexpr, WINDOWED: tl.constexpr):
    """Contexts, and the cached tokens each row must read: from `first` up to its newest token."""
    ok = r < rows
    context = tl.load(context_lens + r, mask=ok, other=0)
    first = tl.zeros_like(context)
    if WINDOWED:
        first = tl.maximum(context - window, 0)
    if SHARED:
        first = tl.load(shares + r, mask=ok, other=0)
    return context, first, tl.maximum(context - 1 - first, 0)


@triton.jit(do_not_specialize=["rows", "n_pieces"])
def _plan_decode_splits(
    context_lens, shares, pieces, rows, n_pieces, kv_heads, window, target,
    SHARED: tl.constexpr, WINDOWED: tl.constexpr, MIN: tl.constexpr, ROWS: tl.constexpr, MINE: tl.constexpr,
):  # fmt: skip
    total = 0
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        _, _, n = _lengths(context_lens, shares, rows, r, window, SHARED, WINDOWED)
        total += tl.sum(n)
    length = tl.maximum(tl.cdiv(total * kv_heads, target), MIN)
    length = tl.cdiv(length, MIN) * MIN
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    row = tl.zeros([MINE], tl.int32)
    before = tl.zeros([MINE], tl.int32)  # pieces of the rows before mine
    carry = 0
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        context, _, n = _lengths(context_lens, shares, rows, r, window, SHARED, WINDOWED)
        splits = tl.where(context > 0, tl.maximum(tl.cdiv(n, length), 1), 0)
        ends = carry + tl.cumsum(splits, 0)
        passed = (ends[None, :] <= mine[:, None]) & (r < rows)[None, :]
        row += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        carry += tl.sum(splits)
    exists = mine < carry
    ok = exists & (mine < n_pieces)
    context, first, n = _lengths(context_lens, shares, rows, tl.where(exists, row, 0), window, SHARED, WINDOWED)
    splits = tl.maximum(tl.cdiv(n, length), 1)
    split = mine - before
    each = tl.cdiv(tl.cdiv(n, splits), MIN) * MIN  # even pieces, in whole tiles
    begin = tl.minimum(first + split * each, first + n)
    end = tl.minimum(begin + each, first + n)
    at = pieces + mine * 8
    stored = mine < n_pieces
    tl.store(at, tl.where(ok, row, -1), mask=stored)
    tl.store(at + 1, split, mask=ok)
    tl.store(at + 2, splits, mask=ok)
    tl.store(at + 3, begin, mask=ok)
    tl.store(at + 4, end, mask=ok)
    tl.store(at + 5, context, mask=ok)


def plan_decode_splits(
    context_lens: Tensor, rows: int, kv_heads: int, window: int | None, shares: Tensor | None, out: Tensor
) -> DecodeSplits:
    """Pieces of the first `rows` rows. A row's last piece ends before its newest token, which is not yet cached."""
    n = max_decode_splits(rows, kv_heads)
    table = out[: n * DECODE_SPLIT_FIELDS].view(n, DECODE_SPLIT_FIELDS)
    if rows:
        _plan_decode_splits[(cdiv(n, 32),)](
            context_lens, context_lens if shares is None else shares, table, rows, n, kv_heads, window or 0,
            TARGET_PROGRAMS, SHARED=shares is not None, WINDOWED=window is not None, MIN=MIN_DECODE_SPLIT, ROWS=256,
            MINE=32,
        )  # fmt: skip
    return DecodeSplits(table)
