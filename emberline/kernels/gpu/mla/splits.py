# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Split-KV planning of absorbed MLA: which program reads which latents, planned on the device once per step.

All heads share a token's latent, so a program takes as many queries as an SM's registers hold outputs for: a query tile
is one or a few tokens of one row times all heads. Tiles whose keys are divided over several programs leave partial
results; the number of splits minimizes the estimated time, which comes in waves of one program per SM. A step that only
decodes, one with chunks and one that verifies drafts are planned alike: rows may have any number of new tokens.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import INTERPRETED, cdiv, launch_options, sm_count

# A work item: row, query tile of the row, split, n_splits, key tiles per split, first partial result of the query tile.
# Field 6 of entry i belongs to no item: it is the first item of the i-th query tile that is split, or -1.
ITEM_FIELDS = 8  # padded to one memory sector
MAX_SPLITS = 8 if INTERPRETED else 256  # of a query tile; a power of two
ITEM_COST = 4.0  # of reading queries, storing and merging a partial result, in key tiles


@dataclass(frozen=True, slots=True)
class LatentSplits:
    """The work items of a step, and the memory of their partial results."""

    table: Tensor  # int32 [items, ITEM_FIELDS]; row -1: an unused entry
    tile_tokens: int  # new tokens of a query tile

    n_split_tiles: int  # at most


def partial_room() -> int:
    """Partial results of a step that the workspace holds."""
    return 2 * sm_count()


def max_query_tiles(tokens: int, rows: int, tile_tokens: int) -> int:
    """Upper bound for `tokens` new tokens in `rows` rows."""
    return min(tokens, cdiv(tokens, tile_tokens) + rows - 1)


def max_items(tokens: int, rows: int, tile_tokens: int) -> int:
    return max_query_tiles(tokens, rows, tile_tokens) + partial_room() if tokens else 0


@triton.jit
def _tiles(start, query_starts, context_lens, n_rows, TOKENS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """Return the query tiles of ROWS rows, none for padding, and the largest number of key tiles that each of them
    reads."""
    r = start + tl.arange(0, ROWS)
    mask = r < n_rows
    new = tl.load(query_starts + r + 1, mask=mask, other=0) - tl.load(query_starts + r, mask=mask, other=0)
    context = tl.load(context_lens + r, mask=mask, other=0)
    return tl.where(context > 0, tl.cdiv(new, TOKENS), 0), tl.maximum(tl.cdiv(context, KEYS), 1)


@triton.jit(do_not_specialize=["n_rows", "n_items", "max_partials", "query_starts", "context_lens"])
def _plan(
    table, query_starts, context_lens, n_rows, n_items, head_tiles, max_partials, slots, TOKENS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, ITEM_COST: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    most_keys = 1  # in tiles
    for start in range(0, n_rows, ROWS):
        query_tiles, key_tiles = _tiles(start, query_starts, context_lens, n_rows, TOKENS, KEYS, ROWS)
        most_keys = tl.maximum(most_keys, tl.max(tl.where(query_tiles > 0, key_tiles, 1)))
    candidates = tl.maximum(tl.cdiv(most_keys, 1 + tl.arange(0, MAX_SPLITS)), 1)  # key tiles per split
    partials = tl.zeros([MAX_SPLITS], tl.int32)
    long_items = tl.zeros([MAX_SPLITS], tl.int32)  # at least half as long as the longest
    for start in range(0, n_rows, ROWS):
        query_tiles, key_tiles = _tiles(start, query_starts, context_lens, n_rows, TOKENS, KEYS, ROWS)
        splits = tl.cdiv(key_tiles[:, None], candidates[None, :])
        partials += tl.sum(tl.where(splits > 1, query_tiles[:, None] * splits, 0), 0)
        half = (key_tiles[:, None] + candidates[None, :] // 2) // candidates[None, :]
        long_items += tl.sum(query_tiles[:, None] * half, 0)
    cost = tl.cdiv(tl.maximum(long_items, 1) * head_tiles, slots) * (candidates + ITEM_COST)
    cost = tl.where(partials <= max_partials, cost, float("inf"))  # without splits there are no partials
    per_split = tl.max(tl.where(tl.arange(0, MAX_SPLITS) == tl.argmin(cost, 0), candidates, 0))

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = tl.zeros([ITEMS], tl.int32)
    items_before = tl.zeros([ITEMS], tl.int32)  # of the rows before
    partials_before = tl.zeros([ITEMS], tl.int32)
    split_tiles_before = tl.zeros([ITEMS], tl.int32)
    n_before, n_partials, n_split_tiles = 0, 0, 0
    for start in range(0, n_rows, ROWS):
        query_tiles, key_tiles = _tiles(start, query_starts, context_lens, n_rows, TOKENS, KEYS, ROWS)
        splits = tl.cdiv(key_tiles, per_split)
        row_items = query_tiles * splits
        row_partials = tl.where(splits > 1, row_items, 0)
        ends = n_before + tl.cumsum(row_items, 0)
        partial_ends = n_partials + tl.cumsum(row_partials, 0)
        row_split_tiles = tl.where(splits > 1, query_tiles, 0)
        split_tile_ends = n_split_tiles + tl.cumsum(row_split_tiles, 0)
        is_past = (ends[None, :] <= item[:, None]) & (start + tl.arange(0, ROWS) < n_rows)[None, :]
        row += tl.sum(is_past.to(tl.int32), 1)
        items_before = tl.maximum(items_before, tl.max(tl.where(is_past, ends[None, :], 0), 1))
        partials_before = tl.maximum(partials_before, tl.max(tl.where(is_past, partial_ends[None, :], 0), 1))
        split_tiles_before = tl.maximum(split_tiles_before, tl.max(tl.where(is_past, split_tile_ends[None, :], 0), 1))
        n_before += tl.sum(row_items)
        n_partials += tl.sum(row_partials)
        n_split_tiles += tl.sum(row_split_tiles)
    exists = item < n_before
    context = tl.load(context_lens + tl.where(exists, row, 0), mask=exists, other=1)
    n_splits = tl.cdiv(tl.maximum(tl.cdiv(context, KEYS), 1), per_split)
    within = item - items_before
    split = within % n_splits
    entry = table + item * 8
    store_mask = item < n_items
    tl.store(entry, tl.where(exists, row, -1), mask=store_mask)
    tl.store(entry + 1, within // n_splits, mask=store_mask)
    tl.store(entry + 2, split, mask=store_mask)
    tl.store(entry + 3, n_splits, mask=store_mask)
    tl.store(entry + 4, tl.zeros_like(n_splits) + per_split, mask=store_mask)
    tl.store(entry + 5, partials_before + within - split, mask=store_mask)
    tl.store(entry + 6, tl.zeros_like(item) - 1, mask=store_mask & (item >= n_split_tiles))
    split_tile = split_tiles_before + within // n_splits
    tl.store(table + split_tile * 8 + 6, item, mask=exists & (split == 0) & (n_splits > 1))


def plan_latent_splits(
    query_starts: Tensor, context_lens: Tensor, tokens: int, head_tiles: int, tile_tokens: int, tile_keys: int,
    programs_per_sm: int, max_partials: int, out: Tensor,
) -> LatentSplits:  # fmt: skip
    """Work items of all rows, which have `tokens` new tokens; rows with a context of 0 have none.

    head_tiles: programs that share an item, each with its part of the queries. max_partials: room for partial results,
    each of all `head_tiles`. out: memory for the table.
    """
    n_rows = query_starts.shape[0] - 1
    max_partials = min(max_partials, partial_room())
    n = max_items(tokens, n_rows, tile_tokens)
    table = out[: n * ITEM_FIELDS].view(n, ITEM_FIELDS)
    if n:
        _plan[(cdiv(n, 32),)](
            table, query_starts, context_lens, n_rows, n, head_tiles, max_partials, programs_per_sm * sm_count(),
            TOKENS=tile_tokens, KEYS=tile_keys, ROWS=32, MAX_SPLITS=MAX_SPLITS,
            ITEM_COST=ITEM_COST, ITEMS=32, **launch_options(False, num_warps=8),
        )  # fmt: skip
    return LatentSplits(table, tile_tokens, min(max_query_tiles(tokens, n_rows, tile_tokens), max_partials // 2))
