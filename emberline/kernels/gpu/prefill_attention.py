# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Attention of chunks: several new tokens of a sequence against its cache, themselves included.

A tile holds the query heads that share a KV head for a run of tokens, so that short chunks fill it too. Every query
walks the keys from the front in the same tiles, alone or in company, in whatever chunks: the result is the same. Only
where there is room for partial results may `split_keys` cut the walk into pieces, as it suits the launch.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import Attention
from emberline.kernels.gpu import split_kv as split_keys
from emberline.kernels.gpu.decode_attention import LOG2_E
from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two, pdl_launch_early, pdl_wait
from emberline.kernels.gpu.split_kv import PrefillSplits, merge_splits, store_output


@dataclass(frozen=True, slots=True)
class PrefillTile:
    queries: int  # of one KV head: tokens times the query heads that share it
    tokens: int  # of the cache
    stages: int
    warps: int


def prefill_tile(head_dim: int) -> PrefillTile:
    return PrefillTile(128, 128, 3, 8) if head_dim <= 128 else PrefillTile(64, 64, 2, 8)  # what shared memory holds


def _tile_queries(tile: PrefillTile, group: int) -> int:
    return max(tile.queries, next_power_of_two(group))


def prefill_scratch_floats(heads: int, kv_heads: int, head_dim: int) -> int:
    """For the parts of any step."""
    queries = _tile_queries(prefill_tile(head_dim), heads // kv_heads)
    return split_keys.MAX_WORK_ITEMS * split_keys.split_floats(queries, next_power_of_two(head_dim))


def plan_prefill_splits(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    query_starts: Tensor,
    context_lens: Tensor,
    tokens: int,
    first_row: int,
    out: Tensor,
    scratch: split_keys.SplitScratch,
    tile: PrefillTile | None = None,
    splits: int = 0,
) -> PrefillSplits | None:
    """For `chunks`, once a step: keys split as it suits the launch. None: they are not, the step is large.

    splits: pieces of the longest tile, where it is long enough; 0: by measure. The order of sums depends on it.
    """
    group, tile = heads // kv_heads, tile or prefill_tile(head_dim)
    queries = _tile_queries(tile, group)
    n = split_keys.max_work_items(tokens, query_starts.shape[0] - 1 - first_row, queries // group, kv_heads)
    if not n:
        return None
    part = split_keys.split_floats(queries, next_power_of_two(head_dim))
    return split_keys.plan_work_items(
        query_starts, context_lens, first_row, n, kv_heads, queries // group, tile.tokens, window, out, scratch, part,
        splits,
    )  # fmt: skip


@triton.jit
def find_tile(index, query_starts, first_row, n_rows, limit, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Of tiles of TOKENS new tokens, row after row: the row of tile `index`, tiles before that row, tiles in all.

    Rows of more than `limit` tokens have none.
    """
    row = first_row
    before = 0
    carry = 0
    for start in range(0, n_rows, ROWS):
        r = start + tl.arange(0, ROWS)
        ok = r < n_rows
        a = tl.load(query_starts + first_row + r, mask=ok, other=0)
        b = tl.load(query_starts + first_row + r + 1, mask=ok, other=0)
        tiles = tl.where(b - a > limit, 0, tl.cdiv(b - a, TOKENS))
        ends = carry + tl.cumsum(tiles, 0)
        passed = (ends <= index) & ok
        row += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        carry += tl.sum(tiles)
    return row, before, carry


@triton.jit
def _softmax_step(q, k, v, visible, peak, total, out, scale, MASKED: tl.constexpr):
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    safe = higher
    if MASKED:
        safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(peak - safe)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
    return higher, total, out


@triton.jit
def _attend_query_tile(
    q, out, pool, tables, query_starts, context_lens, row, tile, head, kv_heads, scale, window, block_stride,
    table_stride, parts, counters, split, n_pieces, each, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of a row's queries for one KV head; SPLIT: against a piece of its keys, of `each` steps."""
    TOKENS: tl.constexpr = QUERIES // GROUP
    start = tl.load(query_starts + row)
    n = tl.load(query_starts + row + 1) - start
    context = tl.load(context_lens + row)
    first = tile * TOKENS
    m, d, t = tl.arange(0, QUERIES), tl.arange(0, PAD), tl.arange(0, TILE)
    token = first + m // GROUP
    at = ((start + token).to(tl.int64) * kv_heads + head) * (GROUP * DIM) + (m % GROUP) * DIM
    lowest = context - n + first  # position of the tile's first query
    position = (context - n + token)[:, None]
    end = tl.minimum(lowest + TOKENS, context)
    table = tables + row.to(tl.int64) * table_stride
    keys = pool + head * (16 * DIM)
    values = keys + kv_heads * (16 * DIM)
    begin = 0
    full = (lowest + 1) // TILE * TILE  # tiles before this are seen whole
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // TILE * TILE
        full = begin
    low, high = begin, end
    if SPLIT:
        low = begin + split * each * TILE
        high = tl.minimum(low + each * TILE, end)
        full = low if WINDOWED else tl.minimum(tl.maximum(full, low), high)
    mine = ((m < TOKENS * GROUP) & (token < n))[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + at[:, None] + d[None, :], mask=mine, other=0.0)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, PAD], tl.float32)
    inside = tl.arange(0, 16)[None, :, None] * DIM + d[None, None, :]
    for at_token in tl.range(low, full, TILE, num_stages=STAGES):  # block by block: each is looked up once
        block = tl.load(table + at_token // 16 + tl.arange(0, TILE // 16)).to(tl.int64)
        place = (block * block_stride)[:, None, None] + inside
        if DIM == PAD:
            k = tl.load(keys + place)
            v = tl.load(values + place)
        else:
            k = tl.load(keys + place, mask=(d < DIM)[None, None, :], other=0.0)
            v = tl.load(values + place, mask=(d < DIM)[None, None, :], other=0.0)
        k, v = tl.reshape(k, [TILE, PAD]), tl.reshape(v, [TILE, PAD])
        peak, total, acc = _softmax_step(queries, k, v, True, peak, total, acc, scale, False)
    for at_token in tl.range(full, high, TILE, num_stages=STAGES):
        key = at_token + t
        ok = key < end
        if WINDOWED:
            ok &= key > lowest - window  # what fell out of the window has no block any more
        block = tl.load(table + key // 16, mask=ok, other=0).to(tl.int64)
        place = (block * block_stride + (key % 16) * DIM)[:, None] + d[None, :]
        there = ok[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + place, mask=there, other=0.0)
        v = tl.load(values + place, mask=there, other=0.0)
        visible = key[None, :] <= position
        if WINDOWED:
            visible &= key[None, :] > position - window
        peak, total, acc = _softmax_step(queries, k, v, visible, peak, total, acc, scale, True)
    to = out + at[:, None] + d[None, :]
    if SPLIT:
        if n_pieces == 1:
            store_output(to, acc, total, mine)
        else:
            place = (tl.program_id(0) - split) * kv_heads + head
            merge_splits(acc, peak, total, to, mine, parts, counters, place, split, n_pieces, kv_heads, QUERIES, PAD)
    else:
        store_output(to, acc, total, mine)


@triton.jit(do_not_specialize=["first_row", "n_rows", "limit", "window"])
def _prefill_attention(
    q, out, pool, tables, query_starts, context_lens, first_row, n_rows, limit, scale, window, block_stride,
    table_stride, items, parts, counters, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = QUERIES // GROUP
    head, kv_heads = tl.program_id(1), tl.num_programs(1)
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    if SPLIT:
        entry = items + tl.program_id(0) * 8
        row = tl.load(entry)
        tile, split, n_pieces, each = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
        exists = row >= 0
    else:
        index = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
        row, before, n_tiles = find_tile(index, query_starts, first_row, n_rows, limit, TOKENS, ROWS)
        tile, split, n_pieces, each = index - before, 0, 1, 0
        exists = index < n_tiles
    if exists:
        _attend_query_tile(
            q, out, pool, tables, query_starts, context_lens, row, tile, head, kv_heads, scale, window, block_stride,
            table_stride, parts, counters, split, n_pieces, each, GROUP, DIM, PAD, QUERIES, TILE, WINDOWED, STAGES,
            SPLIT,
        )  # fmt: skip


def prefill_attention(
    q: Tensor,
    out: Tensor,
    at: Attention,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    tokens: int,
    first_row: int = 0,
    limit: int = 2**31 - 1,
    items: PrefillSplits | None = None,
    pdl: bool = False,
    tile: PrefillTile | None = None,
) -> None:
    """Rows from `first_row`, together at most `tokens` new tokens. q, out: [all tokens, heads * dim]; q is rotated.

    k and v of the new tokens are in the pool's blocks already. Rows of no tokens are allowed, and those of more than
    `limit` are left out. items: of these rows, from `split`.
    """
    n_rows = query_starts.shape[0] - 1 - first_row
    if not tokens or not n_rows:
        return
    group, tile = at.heads // at.kv_heads, tile or prefill_tile(at.head_dim)
    queries = _tile_queries(tile, group)
    n_programs = cdiv(tokens, queries // group) + n_rows - 1 if items is None else len(items.table)
    table, parts, counters = (q, q, q) if items is None else (items.table, *items.scratch)
    _prefill_attention[(n_programs, at.kv_heads)](
        q, out, pool, tables, query_starts, context_lens, first_row, n_rows, limit, at.scale * LOG2_E,
        at.window or 0, pool.stride(0), tables.stride(0), table, parts, counters, GROUP=group, DIM=at.head_dim,
        PAD=next_power_of_two(at.head_dim), QUERIES=queries, TILE=tile.tokens, WINDOWED=at.window is not None, ROWS=64,
        STAGES=tile.stages, SPLIT=items is not None, PDL=int(pdl),
        **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip
