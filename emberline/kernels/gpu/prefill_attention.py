# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Paged attention of prefill chunks: several new tokens of a sequence against its cache, themselves included.

A query tile stacks the query heads that share a KV head over consecutive tokens, so that short chunks fill it too.
Every query visits the keys from position 0 in the same tiles, whatever the batch and the chunk boundaries, so its
result is always the same. Only with split-KV (`split_kv`), which balances small launches, does the order of sums vary.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.gpu import split_kv
from emberline.kernels.gpu.decode_attention import LOG2_E
from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two, pdl_launch_early, pdl_wait
from emberline.kernels.gpu.split_kv import PrefillSplits, first_visible, locality, merge_splits, normalized


@dataclass(frozen=True, slots=True)
class PrefillTile:
    queries: int  # of one KV head: tokens times the query heads that share it
    keys: int
    stages: int
    warps: int


def prefill_tile(head_dim: int) -> PrefillTile:
    return PrefillTile(128, 128, 3, 8) if head_dim <= 128 else PrefillTile(64, 64, 2, 8)  # shared memory


def _tile_queries(tile: PrefillTile, group: int) -> int:
    return max(tile.queries, next_power_of_two(group))


def prefill_scratch_floats(heads: int, kv_heads: int, head_dim: int) -> int:
    """Workspace for the partial results of any step."""
    queries = _tile_queries(prefill_tile(head_dim), heads // kv_heads)
    return split_kv.work_item_room() * split_kv.split_floats(queries, next_power_of_two(head_dim))


def plan_prefill_splits(
    heads: int, kv_heads: int, head_dim: int, local: tuple[int, int], query_starts: Tensor, context_lens: Tensor,
    tokens: int, first_row: int, out: Tensor, scratch: split_kv.SplitScratch, tile: PrefillTile | None = None,
    splits: int = 0,
) -> PrefillSplits | None:  # fmt: skip
    """Split-KV work items for `prefill_attention`, once per step; None for a large step, which needs no splitting.

    local: the attention's `locality`. splits: how often to split the longest query tile, if it is long enough; 0:
    minimize the estimated time.
    """
    group, tile = heads // kv_heads, tile or prefill_tile(head_dim)
    tile_queries = _tile_queries(tile, group)
    n = split_kv.max_work_items(tokens, query_starts.shape[0] - 1 - first_row, tile_queries // group, kv_heads)
    if not n:
        return None
    partial_floats = split_kv.split_floats(tile_queries, next_power_of_two(head_dim))
    return split_kv.plan_work_items(
        query_starts, context_lens, first_row, n, kv_heads, tile_queries // group, tile.keys, local, out, scratch,
        partial_floats, splits,
    )  # fmt: skip


@triton.jit
def find_tile(index, query_starts, first_row, n_rows, max_tokens, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Rows are divided into tiles of TOKENS new tokens: the row of tile `index`, tiles before that row, tiles in all.

    Rows with more than `max_tokens` tokens have no tiles.
    """
    row = first_row
    tiles_before = 0
    n_tiles = 0
    for start in range(0, n_rows, ROWS):
        r = start + tl.arange(0, ROWS)
        mask = r < n_rows
        query_start = tl.load(query_starts + first_row + r, mask=mask, other=0)
        query_end = tl.load(query_starts + first_row + r + 1, mask=mask, other=0)
        tiles = tl.where(query_end - query_start > max_tokens, 0, tl.cdiv(query_end - query_start, TOKENS))
        ends = n_tiles + tl.cumsum(tiles, 0)
        is_past = (ends <= index) & mask
        row += tl.sum(is_past.to(tl.int32))
        tiles_before = tl.maximum(tiles_before, tl.max(tl.where(is_past, ends, 0)))
        n_tiles += tl.sum(tiles)
    return row, tiles_before, n_tiles


@triton.jit
def _softmax_step(q, k, v, visible, row_max, denom, out, scale, MASKED: tl.constexpr):
    """Online softmax over one tile of keys: updates each query's maximum (base 2), denominator and output."""
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    safe_max = new_max
    if MASKED:
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - safe_max[:, None])
    rescale = tl.exp2(row_max - safe_max)
    denom = denom * rescale + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None])
    return new_max, denom, out


@triton.jit
def _attend_query_tile(
    q, out, pool, tables, query_starts, context_lens, row, tile, head, kv_heads, scale, local_size, sinks, last_visible,
    block_stride, table_stride, partials, counters, split, n_splits, tiles_per_split, GROUP: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, LOCAL: tl.constexpr,
    SINKS: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attention of one query tile for one KV head; with SPLIT over `tiles_per_split` tiles of its keys. With AHEAD
    queries see keys up to `last_visible`, which may be after them."""
    TOKENS: tl.constexpr = QUERIES // GROUP
    start = tl.load(query_starts + row)
    n = tl.load(query_starts + row + 1) - start
    context = tl.load(context_lens + row)
    first = tile * TOKENS
    m, d, t = tl.arange(0, QUERIES), tl.arange(0, PAD), tl.arange(0, TILE)
    token = first + m // GROUP
    q_offsets = ((start + token).to(tl.int64) * kv_heads + head) * (GROUP * DIM) + (m % GROUP) * DIM
    first_position = context - n + first  # position of the tile's first query
    position = (context - n + token)[:, None]
    end = tl.minimum(first_position + TOKENS, context)
    last = position
    if AHEAD:
        last = tl.load(last_visible + start + token, mask=token < n, other=0)[:, None]
        end = tl.minimum(tl.max(last) + 1, context)
    table = tables + row.to(tl.int64) * table_stride
    keys = pool + head * (16 * DIM)
    values = keys + kv_heads * (16 * DIM)
    begin = 0
    unmasked_end = (first_position + 1) // TILE * TILE  # key tiles before this are visible to all queries
    first_key = first_visible(first_position, local_size, LOCAL)  # blocks of keys before it may be freed
    if LOCAL:
        begin = first_key // TILE * TILE
        # A window hides other keys from each query, a chunk those before its start; queries may be of several chunks.
        if LOCAL == 2:
            one_chunk = (first_key == begin) & (first_key == first_visible(end - 1, local_size, LOCAL))
            unmasked_end = tl.where(one_chunk, tl.maximum(unmasked_end, begin), begin)
        else:
            unmasked_end = begin
    key_begin, key_end = begin, end
    if SPLIT:
        key_begin = begin + split * tiles_per_split * TILE
        key_end = tl.minimum(key_begin + tiles_per_split * TILE, end)
        unmasked_end = tl.minimum(tl.maximum(unmasked_end, key_begin), key_end)
    query_mask = ((m < TOKENS * GROUP) & (token < n))[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + q_offsets[:, None] + d[None, :], mask=query_mask, other=0.0)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    denom = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, PAD], tl.float32)
    block_offsets = tl.arange(0, 16)[None, :, None] * DIM + d[None, None, :]
    for key_start in tl.range(key_begin, unmasked_end, TILE, num_stages=STAGES):  # one table lookup per block
        block = tl.load(table + key_start // 16 + tl.arange(0, TILE // 16)).to(tl.int64)
        offsets = (block * block_stride)[:, None, None] + block_offsets
        if DIM == PAD:
            k = tl.load(keys + offsets)
            v = tl.load(values + offsets)
        else:
            k = tl.load(keys + offsets, mask=(d < DIM)[None, None, :], other=0.0)
            v = tl.load(values + offsets, mask=(d < DIM)[None, None, :], other=0.0)
        k, v = tl.reshape(k, [TILE, PAD]), tl.reshape(v, [TILE, PAD])
        row_max, denom, acc = _softmax_step(queries, k, v, True, row_max, denom, acc, scale, False)
    for key_start in tl.range(unmasked_end, key_end, TILE, num_stages=STAGES):
        key = key_start + t
        key_mask = key < end
        if LOCAL:
            key_mask &= key >= first_key
        block = tl.load(table + key // 16, mask=key_mask, other=0).to(tl.int64)
        offsets = (block * block_stride + (key % 16) * DIM)[:, None] + d[None, :]
        load_mask = key_mask[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + offsets, mask=load_mask, other=0.0)
        v = tl.load(values + offsets, mask=load_mask, other=0.0)
        visible = key[None, :] <= last
        if LOCAL:
            visible &= key[None, :] >= first_visible(position, local_size, LOCAL)
        row_max, denom, acc = _softmax_step(queries, k, v, visible, row_max, denom, acc, scale, True)
    out_ptrs = out + q_offsets[:, None] + d[None, :]
    query_head = head * GROUP + m % GROUP
    if n_splits == 1:
        result = normalized(acc, row_max, denom, sinks, query_head, m >= 0, SINKS)
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=query_mask)
    elif SPLIT:
        offsets = (tl.program_id(0) - split) * kv_heads + head
        merge_splits(
            acc, row_max, denom, out_ptrs, query_mask, partials, counters, offsets, split, n_splits, kv_heads, sinks,
            query_head, QUERIES, PAD, SINKS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "n_rows", "max_tokens", "local_size"])
def _prefill_attention(
    q, out, pool, tables, query_starts, context_lens, first_row, n_rows, max_tokens, scale, local_size, sinks,
    last_visible, block_stride, table_stride, work_items, partials, counters, GROUP: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, LOCAL: tl.constexpr, SINKS: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = QUERIES // GROUP
    head, kv_heads = tl.program_id(1), tl.num_programs(1)
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    if SPLIT:
        entry = work_items + tl.program_id(0) * 8
        row = tl.load(entry)
        tile, split, n_splits, tiles_per_split = (
            tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
        )  # fmt: skip
        exists = row >= 0
    else:
        index = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
        row, tiles_before, n_tiles = find_tile(index, query_starts, first_row, n_rows, max_tokens, TOKENS, ROWS)
        tile, split, n_splits, tiles_per_split = index - tiles_before, 0, 1, 0
        exists = index < n_tiles
    if exists:
        _attend_query_tile(
            q, out, pool, tables, query_starts, context_lens, row, tile, head, kv_heads, scale, local_size, sinks,
            last_visible, block_stride, table_stride, partials, counters, split, n_splits, tiles_per_split, GROUP, DIM,
            PAD, QUERIES, TILE, LOCAL, SINKS, AHEAD, STAGES, SPLIT,
        )  # fmt: skip


def prefill_attention(
    q: Tensor, out: Tensor, attn: GroupedQueryAttention, pool: Tensor, tables: Tensor, query_starts: Tensor,
    context_lens: Tensor, tokens: int, first_row: int = 0, max_tokens: int = 2**31 - 1,
    splits: PrefillSplits | None = None, pdl: bool = False, tile: PrefillTile | None = None,
    last_visible: Tensor | None = None,
) -> None:  # fmt: skip
    """Attention of the rows from `first_row` on, with at most `tokens` new tokens in all.

    q, out: [all tokens, heads * dim]; q is rotated, and k and v of the new tokens are in the cache already. Rows may be
    empty, and those with more than `max_tokens` tokens are skipped. splits: of these rows, from `plan_prefill_splits`.
    last_visible: int32 [all tokens], the position up to which each sees, at least its own; None: its own. Needs whole
    keys, without splits.
    """
    assert last_visible is None or splits is None
    n_rows = query_starts.shape[0] - 1 - first_row
    if not tokens or not n_rows:
        return
    group, tile = attn.heads // attn.kv_heads, tile or prefill_tile(attn.head_dim)
    tile_queries = _tile_queries(tile, group)
    n_programs = cdiv(tokens, tile_queries // group) + n_rows - 1 if splits is None else len(splits.table)
    table, partials, counters = (q, q, q) if splits is None else (splits.table, *splits.scratch)
    local, size = locality(attn.window, attn.chunk)
    _prefill_attention[(n_programs, attn.kv_heads)](
        q, out, pool, tables, query_starts, context_lens, first_row, n_rows, max_tokens, attn.scale * LOG2_E,
        size, q if attn.sinks is None else attn.sinks, q if last_visible is None else last_visible, pool.stride(0),
        tables.stride(0), table, partials, counters, GROUP=group, DIM=attn.head_dim,
        PAD=next_power_of_two(attn.head_dim), QUERIES=tile_queries, TILE=tile.keys, LOCAL=local,
        SINKS=attn.sinks is not None, AHEAD=last_visible is not None, ROWS=64, STAGES=tile.stages,
        SPLIT=splits is not None, PDL=int(pdl),
        **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip
