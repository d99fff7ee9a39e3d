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

MAX_TOKENS = 1024  # of a step: larger ones have waves enough, and other uses for the room
MAX_PIECES = 8  # of a tile; a power of two
MAX_ITEMS = 6 * SM_COUNT  # times KV heads: whose results there is room for
MIN_STEPS = 4  # of a piece: tiles of keys, 512 of them with 128 dimensions
ITEM_COST = 4.0  # steps that could be done in the time that an item takes to start, to store and to merge
FIELDS = 8  # row, tile of the row, piece, pieces of the tile, steps of a piece; the rest is padding to one sector


class Scratch(NamedTuple):
    parts: Tensor  # float32: by item and KV head the weighted values [queries, dim], peaks (base 2) and sums
    counters: Tensor  # int32 zeros, and zeros again afterwards; one for each item and KV head


@dataclass(frozen=True, slots=True)
class Items:
    table: Tensor  # int32 [n, FIELDS]; row -1: nothing to do
    scratch: Scratch


def part_floats(queries: int, pad: int) -> int:
    return queries * (pad + 2)


def n_items(tokens: int, n_rows: int, per_tile: int, kv_heads: int) -> int:
    """Of each KV head, at most, for so many new tokens in so many rows; 0: too many, they are not listed."""
    tiles = cdiv(tokens, per_tile)
    bound, room = tiles + n_rows - 1, MAX_ITEMS // kv_heads
    return 0 if tokens > MAX_TOKENS or bound > room else max(bound, min(MAX_PIECES * tiles, room))


@triton.jit
def _rows(
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
def _steps(
    query_starts, context_lens, first_row, n_rows, span, kv_heads, room, splits, TOKENS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, SMS: tl.constexpr, PIECES: tl.constexpr, LEAST: tl.constexpr,
    COST: tl.constexpr,
):  # fmt: skip
    """Of a piece. splits: pieces of the longest tile, 0: as many as make it short."""
    longest = 0
    for start in range(0, n_rows, ROWS):
        _, tiles, steps = _rows(start, query_starts, context_lens, first_row, n_rows, span, TOKENS, TILE, ROWS)
        longest = tl.maximum(longest, tl.max(tl.where(tiles > 0, steps, 0)))
    s = 1 + tl.arange(0, PIECES)
    each = tl.maximum(tl.cdiv(longest, s), 1)
    items = tl.zeros([PIECES], tl.int32)
    long = tl.zeros([PIECES], tl.int32)  # items that take more than half as long as the longest
    for start in range(0, n_rows, ROWS):
        _, tiles, steps = _rows(start, query_starts, context_lens, first_row, n_rows, span, TOKENS, TILE, ROWS)
        items += tl.sum(tiles[:, None] * tl.cdiv(steps[:, None], each[None, :]), 0)
        long += tl.sum(tiles[:, None] * ((steps[:, None] + each[None, :] // 2) // each[None, :]), 0)
    cost = tl.cdiv(long * kv_heads, SMS) * (each + COST)
    allowed = (items <= room) & ((s == 1) | (each >= LEAST)) & ((splits == 0) | (s == splits))
    cost = tl.where(allowed, cost, tl.where(s == 1, 1e30, float("inf")))
    return tl.sum(tl.where(s == tl.argmin(cost, 0) + 1, each, 0))


@triton.jit(do_not_specialize=["first_row", "n_rows", "n_items", "room", "splits", "window"])
def _list(
    table, query_starts, context_lens, first_row, n_rows, n_items, kv_heads, room, splits, window,
    WINDOWED: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SMS: tl.constexpr,
    PIECES: tl.constexpr, LEAST: tl.constexpr, COST: tl.constexpr, MINE: tl.constexpr,
):  # fmt: skip
    span = window + TOKENS + TILE if WINDOWED else 2**31 - 1 - TILE
    each = _steps(
        query_starts, context_lens, first_row, n_rows, span, kv_heads, room, splits, TOKENS, TILE, ROWS, SMS, PIECES,
        LEAST, COST,
    )  # fmt: skip
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    row = tl.zeros([MINE], tl.int32)
    before = tl.zeros([MINE], tl.int32)  # items of the rows before mine
    carry = 0
    for start in range(0, n_rows, ROWS):
        ok, tiles, steps = _rows(start, query_starts, context_lens, first_row, n_rows, span, TOKENS, TILE, ROWS)
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


def listed(
    query_starts: Tensor,
    context_lens: Tensor,
    first_row: int,
    n: int,
    kv_heads: int,
    per_tile: int,
    keys: int,
    window: int | None,
    out: Tensor,
    scratch: Scratch,
    part: int,
    splits: int = 0,
) -> Items:
    """The items of rows from `first_row`, n of them (`n_items`), for tiles of `per_tile` tokens and steps of `keys`."""
    table = out[: n * FIELDS].view(n, FIELDS)
    room = min(n, scratch.parts.numel() // part // kv_heads, scratch.counters.numel() // kv_heads)
    _list[(cdiv(n, 32),)](
        table, query_starts, context_lens, first_row, query_starts.shape[0] - 1 - first_row, n, kv_heads, room, splits,
        window or 0, WINDOWED=window is not None, TOKENS=per_tile, TILE=keys, ROWS=64, SMS=SM_COUNT, PIECES=MAX_PIECES,
        LEAST=MIN_STEPS, COST=ITEM_COST, MINE=32,
    )  # fmt: skip
    return Items(table, scratch)


@triton.jit
def put(to, acc, total, mine):
    tl.store(to, (acc / total[:, None]).to(to.dtype.element_ty), mask=mine)


@triton.jit
def join(
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
        put(to, merged, sums, mine)
