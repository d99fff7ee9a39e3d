# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A chunk's tiles of queries, each by several programs: every one walks a piece of the keys.

Tiles come in waves of one for each multiprocessor, and a wave that is not full costs as much as one that is. So each
multiprocessor has one program, which takes item after item: a piece of the keys of one tile for one KV head. The device
cuts, for it alone knows lengths. Whichever program of a tile ends last merges its pieces, always in the same order.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import SM_COUNT

MAX_TOKENS = 1024  # of a step: larger ones have waves enough, and other uses for the room
MAX_PIECES = 8  # of a tile; a power of two
MAX_ITEMS = 6 * SM_COUNT  # whose results there is room for
MIN_STEPS = 4  # of a piece: tiles of keys, 512 of them with 128 dimensions
ITEM_COST = 1.0  # steps that could be done in the time that an item takes to start, to store and to merge


class Scratch(NamedTuple):
    parts: Tensor  # float32: by item the weighted values [queries, dim], peaks (base 2) and sums
    counters: Tensor  # int32 zeros, and zeros again afterwards; one for each item


def part_floats(queries: int, pad: int) -> int:
    return queries * (pad + 2)


@triton.jit
def _rows(
    start, query_starts, context_lens, first_row, n_rows, limit, span,
    TOKENS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows: which there are, tiles of TOKENS new tokens, and steps of TILE keys that a tile takes at most."""
    r = start + tl.arange(0, ROWS)
    ok = r < n_rows
    a = tl.load(query_starts + first_row + r, mask=ok, other=0)
    b = tl.load(query_starts + first_row + r + 1, mask=ok, other=0)
    context = tl.load(context_lens + first_row + r, mask=ok, other=0)
    tiles = tl.where(b - a > limit, 0, tl.cdiv(b - a, TOKENS))
    return ok, tiles, tl.maximum(tl.cdiv(tl.minimum(context, span), TILE), 1)


@triton.jit
def cut(
    query_starts, context_lens, first_row, n_rows, limit, span, kv_heads, room, splits, TOKENS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, SMS: tl.constexpr, PIECES: tl.constexpr, LEAST: tl.constexpr,
    COST: tl.constexpr,
):  # fmt: skip
    """Steps of a piece, and items in all. splits: pieces of the longest tile, 0: as many as make it short."""
    longest = 0
    for start in range(0, n_rows, ROWS):
        _, tiles, steps = _rows(
            start, query_starts, context_lens, first_row, n_rows, limit, span, TOKENS, TILE, ROWS
        )
        longest = tl.maximum(longest, tl.max(tl.where(tiles > 0, steps, 0)))
    s = 1 + tl.arange(0, PIECES)
    each = tl.maximum(tl.cdiv(longest, s), LEAST)
    items = tl.zeros([PIECES], tl.int32)
    long = tl.zeros([PIECES], tl.int32)  # items that take more than half as long as the longest
    for start in range(0, n_rows, ROWS):
        _, tiles, steps = _rows(
            start, query_starts, context_lens, first_row, n_rows, limit, span, TOKENS, TILE, ROWS
        )
        items += tl.sum(tiles[:, None] * tl.cdiv(steps[:, None], each[None, :]), 0)
        long += tl.sum(tiles[:, None] * ((steps[:, None] + each[None, :] // 2) // each[None, :]), 0)
    items *= kv_heads
    cost = tl.cdiv(long * kv_heads, SMS) * (each + COST)
    allowed = (items <= room) & ((splits == 0) | (s == splits))
    best = tl.argmin(tl.where(allowed | (s == 1), tl.where(allowed, cost, 1e30), float("inf")), 0)
    chosen = s == best + 1
    return tl.sum(tl.where(chosen, each, 0)), tl.sum(tl.where(chosen, items, 0))


@triton.jit
def find_item(
    item, query_starts, context_lens, first_row, n_rows, limit, span, kv_heads, each,
    TOKENS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row, tile of the row, KV head, piece, and pieces of the tile. An item's neighbours are the other heads."""
    row = first_row
    before = 0
    carry = 0
    for start in range(0, n_rows, ROWS):
        ok, tiles, steps = _rows(
            start, query_starts, context_lens, first_row, n_rows, limit, span, TOKENS, TILE, ROWS
        )
        items = tiles * tl.cdiv(steps, each) * kv_heads
        ends = carry + tl.cumsum(items, 0)
        passed = (ends <= item) & ok
        row += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        carry += tl.sum(items)
    context = tl.load(context_lens + row)
    pieces = tl.cdiv(tl.maximum(tl.cdiv(tl.minimum(context, span), TILE), 1), each)
    place = (item - before) // kv_heads
    return row, place // pieces, (item - before) % kv_heads, place % pieces, pieces


@triton.jit
def put(to, acc, total, mine):
    tl.store(to, (acc / total[:, None]).to(to.dtype.element_ty), mask=mine)


@triton.jit
def join(acc, peak, total, to, mine, parts, counters, first, split, n, stride, QUERIES: tl.constexpr, PAD: tl.constexpr):
    """Leaves this piece for the program of its tile that ends last; that one puts the whole where it belongs.

    Piece s of the tile is item first + s * stride.
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
