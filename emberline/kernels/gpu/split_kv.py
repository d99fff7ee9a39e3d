# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Split-KV planning: dividing the keys of a row or query tile over programs, once per step for all layers.

The device plans, from lengths that only it needs to know, so that a captured CUDA graph stays balanced on every replay;
the host bounds the number of splits and the workspace for their partial results. Decode splits each row's cached tokens
into even ranges. Prefill work items are (query tile, key range) pairs: tiles run in waves of one per SM, and a partial
wave costs as much as a full one, so keys are split to fill the waves. The last program of a row or tile to finish
merges the partial results, always in the same order.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import cdiv, sm_count

# A decode split: row, split, n_splits, first token, end, context. A work item: row, query tile of the row, split,
# n_splits, key tiles per split. Both are padded to one memory sector.
DECODE_SPLIT_FIELDS = WORK_ITEM_FIELDS = 8
MIN_DECODE_SPLIT = 64  # tokens
MAX_SPLIT_TOKENS = 1024  # new tokens of a step; larger steps fill the SMs, and use the workspace otherwise
MAX_SPLITS = 16  # of a query tile; a power of two
MIN_SPLIT_TILES = 4  # key tiles of a split: 512 keys at a head dimension of 128
WORK_ITEM_COST = 4.0  # of launching, storing and merging a work item, in key tiles

# Attention is over all earlier tokens, over a sliding window of them, or over those of the token's own chunk.
FULL, WINDOW, CHUNK = 0, 1, 2


def target_programs(queries: int = 0) -> int:
    """Decode splits times KV heads, where the contexts are long enough.

    queries: rows of a program's tile where rows of the step have several tokens, else 0. Of those one program per SM,
    whatever the batch: its partial results are many, and merging them costs more than a second one would save.
    """
    return sm_count() if queries else 6 * sm_count()


def work_item_room() -> int:
    """Work items times KV heads: how many partial results of prefill the workspace holds."""
    return 6 * sm_count()


def locality(window: int | None, chunk: int | None) -> tuple[int, int]:
    """FULL, WINDOW or CHUNK, and the size in tokens."""
    if chunk is not None:
        return CHUNK, chunk
    return (FULL, 0) if window is None else (WINDOW, window)


@triton.jit
def first_visible(position, size, LOCAL: tl.constexpr):
    """The first token that the one at `position` sees, as `locality` says."""
    first = position * 0
    if LOCAL == 1:
        first = tl.maximum(position - size + 1, 0)
    if LOCAL == 2:
        first = position // size * size
    return first


# --- prefill ----------------------------------------------------------------------------------------------------------


class SplitScratch(NamedTuple):
    partials: (
        Tensor  # float32, per work item and KV head: unnormalized output [queries, dim], max (base 2), denominator
    )
    counters: Tensor  # int32, per work item and KV head; zero between launches


@dataclass(frozen=True, slots=True)
class PrefillSplits:
    table: Tensor  # int32 [n, WORK_ITEM_FIELDS]; row -1: an unused entry
    scratch: SplitScratch


def split_floats(queries: int, pad: int) -> int:
    """Size of one partial result."""
    return queries * (pad + 2)


def max_work_items(tokens: int, n_rows: int, per_tile: int, kv_heads: int) -> int:
    """Upper bound per KV head for `tokens` new tokens in `n_rows` rows; 0: too many to split."""
    tiles = cdiv(tokens, per_tile)
    unsplit, limit = tiles + n_rows - 1, work_item_room() // kv_heads
    return 0 if tokens > MAX_SPLIT_TOKENS or unsplit > limit else max(unsplit, min(MAX_SPLITS * tiles, limit))


@triton.jit
def _row_tiles(
    start, query_starts, context_lens, first_row, n_rows, max_keys,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return, for ROWS rows, a mask of existing rows, query tiles of TOKENS new tokens, and their maximum of KEYS-key
    tiles."""
    r = start + tl.arange(0, ROWS)
    mask = r < n_rows
    query_start = tl.load(query_starts + first_row + r, mask=mask, other=0)
    query_end = tl.load(query_starts + first_row + r + 1, mask=mask, other=0)
    context = tl.load(context_lens + first_row + r, mask=mask, other=0)
    return mask, tl.cdiv(query_end - query_start, TOKENS), tl.maximum(tl.cdiv(tl.minimum(context, max_keys), KEYS), 1)


@triton.jit
def _choose_split_tiles(
    query_starts, context_lens, first_row, n_rows, max_keys, kv_heads, max_items, splits, TOKENS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, SMS: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    ITEM_COST: tl.constexpr,
):  # fmt: skip
    """Key tiles per split. splits: how often to split the longest query tile; 0: minimize the estimated time."""
    most_key_tiles = 0
    for start in range(0, n_rows, ROWS):
        _, query_tiles, key_tiles = _row_tiles(
            start, query_starts, context_lens, first_row, n_rows, max_keys, TOKENS, KEYS, ROWS
        )
        most_key_tiles = tl.maximum(most_key_tiles, tl.max(tl.where(query_tiles > 0, key_tiles, 0)))
    n_splits = 1 + tl.arange(0, MAX_SPLITS)
    tiles_per_split = tl.maximum(tl.cdiv(most_key_tiles, n_splits), 1)
    items = tl.zeros([MAX_SPLITS], tl.int32)
    long_items = tl.zeros([MAX_SPLITS], tl.int32)  # items at least half as long as the longest
    for start in range(0, n_rows, ROWS):
        _, query_tiles, key_tiles = _row_tiles(
            start, query_starts, context_lens, first_row, n_rows, max_keys, TOKENS, KEYS, ROWS
        )
        items += tl.sum(query_tiles[:, None] * tl.cdiv(key_tiles[:, None], tiles_per_split[None, :]), 0)
        long_items += tl.sum(
            query_tiles[:, None] * ((key_tiles[:, None] + tiles_per_split[None, :] // 2) // tiles_per_split[None, :]), 0
        )
    cost = tl.cdiv(long_items * kv_heads, SMS) * (tiles_per_split + ITEM_COST)
    allowed = (
        (items <= max_items)
        & ((n_splits == 1) | (tiles_per_split >= MIN_TILES))
        & ((splits == 0) | (n_splits == splits))
    )
    cost = tl.where(allowed, cost, tl.where(n_splits == 1, 1e30, float("inf")))
    return tl.sum(tl.where(n_splits == tl.argmin(cost, 0) + 1, tiles_per_split, 0))


@triton.jit(do_not_specialize=["first_row", "n_rows", "n_items", "max_items", "splits", "local_size"])
def _plan_work_items(
    table, query_starts, context_lens, first_row, n_rows, n_items, kv_heads, max_items, splits, local_size,
    LOCAL: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, SMS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, ITEM_COST: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    max_keys = local_size + TOKENS + KEYS if LOCAL else 2**31 - 1 - KEYS
    tiles_per_split = _choose_split_tiles(
        query_starts, context_lens, first_row, n_rows, max_keys, kv_heads, max_items, splits, TOKENS, KEYS, ROWS, SMS,
        MAX_SPLITS, MIN_TILES, ITEM_COST,
    )  # fmt: skip
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = tl.zeros([ITEMS], tl.int32)
    items_before = tl.zeros([ITEMS], tl.int32)  # of the rows before
    carry = 0
    for start in range(0, n_rows, ROWS):
        mask, query_tiles, key_tiles = _row_tiles(
            start, query_starts, context_lens, first_row, n_rows, max_keys, TOKENS, KEYS, ROWS
        )
        items = query_tiles * tl.cdiv(key_tiles, tiles_per_split)
        ends = carry + tl.cumsum(items, 0)
        is_past = (ends[None, :] <= item[:, None]) & mask[None, :]
        row += tl.sum(is_past.to(tl.int32), 1)
        items_before = tl.maximum(items_before, tl.max(tl.where(is_past, ends[None, :], 0), 1))
        carry += tl.sum(items)
    exists = item < carry
    context = tl.load(context_lens + first_row + tl.where(exists, row, 0))
    n_splits = tl.cdiv(tl.maximum(tl.cdiv(tl.minimum(context, max_keys), KEYS), 1), tiles_per_split)
    entry = table + item * 8
    store_mask = item < n_items
    tl.store(entry, tl.where(exists, first_row + row, -1), mask=store_mask)
    tl.store(entry + 1, (item - items_before) // n_splits, mask=store_mask)
    tl.store(entry + 2, (item - items_before) % n_splits, mask=store_mask)
    tl.store(entry + 3, n_splits, mask=store_mask)
    tl.store(entry + 4, tl.zeros_like(n_splits) + tiles_per_split, mask=store_mask)


def plan_work_items(
    query_starts: Tensor, context_lens: Tensor, first_row: int, n: int, kv_heads: int, tile_tokens: int, tile_keys: int,
    local: tuple[int, int], out: Tensor, scratch: SplitScratch, partial_floats: int, splits: int = 0,
) -> PrefillSplits:  # fmt: skip
    """`n` work items (`max_work_items`) of the rows from `first_row`, for tiles of `tile_tokens` by `tile_keys`.

    local: the attention's `locality`.
    """
    table = out[: n * WORK_ITEM_FIELDS].view(n, WORK_ITEM_FIELDS)
    limit = min(n, scratch.partials.numel() // partial_floats // kv_heads, scratch.counters.numel() // kv_heads)
    _plan_work_items[(cdiv(n, 32),)](
        table, query_starts, context_lens, first_row, query_starts.shape[0] - 1 - first_row, n, kv_heads, limit, splits,
        local[1], LOCAL=local[0], TOKENS=tile_tokens, KEYS=tile_keys, ROWS=64, SMS=sm_count(),
        MAX_SPLITS=MAX_SPLITS, MIN_TILES=MIN_SPLIT_TILES, ITEM_COST=WORK_ITEM_COST, ITEMS=32,
    )  # fmt: skip
    return PrefillSplits(table, scratch)


@triton.jit
def normalized(acc, row_max, denom, sinks, head, head_mask, SINKS: tl.constexpr):
    """The output of queries, from its unnormalized form, maximum (base 2) and denominator.

    SINKS: `sinks`, one logit of each head, is part of the denominator.
    """
    if SINKS:
        sink = tl.load(sinks + head, mask=head_mask, other=0.0) * 1.4426950408889634
        total_max = tl.maximum(row_max, sink)
        rescale = tl.exp2(row_max - total_max)
        out = acc * (rescale / (denom * rescale + tl.exp2(sink - total_max)))[:, None]
    else:
        out = acc / tl.where(denom == 0.0, 1.0, denom)[:, None]  # a padding row attends to nothing: zeros, not NaN
    return out


@triton.jit
def merge_splits(
    acc,
    row_max,
    denom,
    out_ptrs,
    mask,
    partials,
    counters,
    first,
    split,
    n_splits,
    stride,
    sinks,
    head,
    QUERIES: tl.constexpr,
    PAD: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Store this split's partial result; the last program of the tile to finish merges all and stores the output.

    The partial result of split s is at index first + s * stride.
    """
    m, d = tl.arange(0, QUERIES), tl.arange(0, PAD)
    offsets = m[:, None] * PAD + d[None, :]
    PARTIAL_FLOATS: tl.constexpr = QUERIES * (PAD + 2)
    own_partial = partials + (first + split * stride).to(tl.int64) * PARTIAL_FLOATS
    tl.store(own_partial + offsets, acc)
    tl.store(own_partial + QUERIES * PAD + m, row_max)
    tl.store(own_partial + QUERIES * (PAD + 1) + m, denom)
    tl.debug_barrier()  # all threads have stored before the counter is incremented
    if tl.atomic_add(counters + first, 1, sem="acq_rel") == n_splits - 1:
        tl.store(counters + first, 0)
        max_score = tl.full([QUERIES], float("-inf"), tl.float32)
        total_denom = tl.zeros([QUERIES], tl.float32)
        merged = tl.zeros([QUERIES, PAD], tl.float32)
        for s in range(n_splits):
            split_partial = partials + (first + s * stride).to(tl.int64) * PARTIAL_FLOATS
            split_max = tl.load(split_partial + QUERIES * PAD + m, cache_modifier=".cg")
            new_max = tl.maximum(max_score, split_max)
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a query may see no key of a split
            rescale, weight = tl.exp2(max_score - safe_max), tl.exp2(split_max - safe_max)
            total_denom = total_denom * rescale + weight * tl.load(
                split_partial + QUERIES * (PAD + 1) + m, cache_modifier=".cg"
            )
            merged = merged * rescale[:, None] + weight[:, None] * tl.load(
                split_partial + offsets, cache_modifier=".cg"
            )
            max_score = new_max
        result = normalized(merged, max_score, total_denom, sinks, head, head >= 0, SINKS)
        tl.store(out_ptrs, result.to(out_ptrs.dtype.element_ty), mask=mask)


# --- decode -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    table: Tensor  # int32 [n, DECODE_SPLIT_FIELDS]; row -1: an unused entry

    @property
    def n(self) -> int:
        return self.table.shape[0]


def max_decode_splits(rows: int, kv_heads: int, queries: int = 0) -> int:
    """Upper bound: the last split of every row, and as many full ones as the target allows."""
    return rows + cdiv(target_programs(queries), kv_heads) if rows else 0


@triton.jit
def merge_partials(
    partial, stats, first, split_stride, n_splits, head, g, d, row_max, denom, out,
    DIM: tl.constexpr, GROUP: tl.constexpr, MERGE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge n_splits partial results of the queries g, at first, first + split_stride, .., MERGE_WIDTH at a time.

    partial: [splits, KV heads, GROUP, DIM], unnormalized; stats: [splits, KV heads, GROUP, 2], maximum (base 2) and
    denominator.
    """
    s = tl.arange(0, MERGE_WIDTH)
    for start in range(0, n_splits, MERGE_WIDTH):
        split_mask = (start + s) < n_splits
        offsets = ((first + (start + s) * split_stride) * tl.num_programs(0) + head).to(tl.int64) * GROUP
        offsets = offsets[:, None] + g[None, :]  # [MERGE_WIDTH, heads]
        mask = split_mask[:, None] & (g < GROUP)[None, :]
        split_max = tl.load(stats + offsets * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        split_denom = tl.load(stats + offsets * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        split_out = tl.load(
            partial + offsets[:, :, None] * DIM + d[None, None, :],
            mask=mask[:, :, None] & (d < DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(split_max - safe_max[None, :])
        rescale = tl.exp2(row_max - safe_max)
        denom = denom * rescale + tl.sum(weight * split_denom, 0)
        out = out * rescale[:, None] + tl.sum(weight[:, :, None] * split_out, 0)
        row_max = new_max
    return row_max, denom, out


@triton.jit
def _lengths(
    context_lens, query_starts, prefix_lens, rows, row, local_size, DRAFTS: tl.constexpr, SHARED: tl.constexpr,
    LOCAL: tl.constexpr,
):  # fmt: skip
    """Context length without drafts, first token to read, and number of cached tokens to read, without the newest."""
    mask = row < rows
    context = tl.load(context_lens + row, mask=mask, other=0)
    if DRAFTS:
        n_new = tl.load(query_starts + row + 1, mask=mask, other=0) - tl.load(query_starts + row, mask=mask, other=0)
        context = tl.where(context > 0, context - n_new + 1, 0)
    first = first_visible(tl.maximum(context - 1, 0), local_size, LOCAL)
    if SHARED:
        first = tl.load(prefix_lens + row, mask=mask, other=0)
    return context, first, tl.maximum(context - 1 - first, 0)


@triton.jit(do_not_specialize=["rows", "max_splits", "merge_cost"])
def _plan_decode_splits(
    context_lens, query_starts, prefix_lens, table, rows, max_splits, kv_heads, local_size, target, merge_cost,
    DRAFTS: tl.constexpr, SHARED: tl.constexpr, LOCAL: tl.constexpr, MIN: tl.constexpr, ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    total, longest = 0, 0
    for start in range(0, rows, ROWS):
        other_row = start + tl.arange(0, ROWS)
        _, _, n_keys = _lengths(
            context_lens, query_starts, prefix_lens, rows, other_row, local_size, DRAFTS, SHARED, LOCAL
        )
        total += tl.sum(n_keys)
        longest = tl.maximum(longest, tl.max(n_keys))
    balanced = tl.sqrt(1.0 * longest * merge_cost).to(tl.int32)
    target_len = tl.maximum(tl.maximum(tl.cdiv(total * kv_heads, target), balanced), MIN)
    target_len = tl.cdiv(target_len, MIN) * MIN
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = tl.zeros([ITEMS], tl.int32)
    splits_before = tl.zeros([ITEMS], tl.int32)  # of the rows before
    carry = 0
    for start in range(0, rows, ROWS):
        other_row = start + tl.arange(0, ROWS)
        context, _, n_keys = _lengths(
            context_lens, query_starts, prefix_lens, rows, other_row, local_size, DRAFTS, SHARED, LOCAL
        )
        n_splits = tl.where(context > 0, tl.maximum(tl.cdiv(n_keys, target_len), 1), 0)
        ends = carry + tl.cumsum(n_splits, 0)
        is_past = (ends[None, :] <= item[:, None]) & (other_row < rows)[None, :]
        row += tl.sum(is_past.to(tl.int32), 1)
        splits_before = tl.maximum(splits_before, tl.max(tl.where(is_past, ends[None, :], 0), 1))
        carry += tl.sum(n_splits)
    exists = item < carry
    ok = exists & (item < max_splits)
    context, first, n_keys = _lengths(
        context_lens, query_starts, prefix_lens, rows, tl.where(exists, row, 0), local_size, DRAFTS, SHARED, LOCAL
    )
    n_splits = tl.maximum(tl.cdiv(n_keys, target_len), 1)
    split = item - splits_before
    split_len = tl.cdiv(tl.cdiv(n_keys, n_splits), MIN) * MIN  # even splits, in whole tiles
    begin = tl.minimum(first + split * split_len, first + n_keys)
    end = tl.minimum(begin + split_len, first + n_keys)
    entry = table + item * 8
    store_mask = item < max_splits
    tl.store(entry, tl.where(ok, row, -1), mask=store_mask)
    tl.store(entry + 1, split, mask=ok)
    tl.store(entry + 2, n_splits, mask=ok)
    tl.store(entry + 3, begin, mask=ok)
    tl.store(entry + 4, end, mask=ok)
    tl.store(entry + 5, context, mask=ok)


def plan_decode_splits(
    context_lens: Tensor, rows: int, kv_heads: int, local: tuple[int, int], prefix_lens: Tensor | None, out: Tensor,
    query_starts: Tensor | None = None, queries: int = 0,
) -> DecodeSplits:  # fmt: skip
    """Splits of the first `rows` rows. A row's last split ends before its new tokens, which are not yet cached.

    local: the attention's `locality`. prefix_lens: tokens of each row that cascade attention reads. out: memory for the
    table. query_starts: where rows may have several new tokens. queries: as in `target_programs`.

    One program merges a row's splits for a KV head, and reads `queries` results of each, which takes as long as to
    attend to queries / 2 tokens more. Splits of sqrt(length * queries / 2) tokens make the sum of both shortest.
    """
    n = max_decode_splits(rows, kv_heads, queries)
    table = out[: n * DECODE_SPLIT_FIELDS].view(n, DECODE_SPLIT_FIELDS)
    if rows:
        _plan_decode_splits[(cdiv(n, 32),)](
            context_lens, context_lens if query_starts is None else query_starts,
            context_lens if prefix_lens is None else prefix_lens, table, rows, n, kv_heads, local[1],
            target_programs(queries), queries // 2, DRAFTS=query_starts is not None, SHARED=prefix_lens is not None,
            LOCAL=local[0], MIN=MIN_DECODE_SPLIT, ROWS=256, ITEMS=32,
        )  # fmt: skip
    return DecodeSplits(table)
