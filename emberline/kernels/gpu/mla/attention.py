# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Absorbed MLA over paged latents: attention of latent queries, each token's latent read once for all heads.

A head's query is its part without RoPE times `k_up`, and its rotated part; its keys are the cached rows, and its values
the latents in them. The result is a latent per head, which `v_up` turns into the head's output. The latents of the new
tokens are in the cache already (`projections.absorb_queries`).

A program takes a query tile and a split of its keys (`splits`); a second kernel merges the partial results of tiles
that were split, because one program per tile would take longer to merge them than all take to attend.

Under decode context parallelism (`kernels.context_parallel`, `shares`) the cache has the rank's tokens and the queries
are those of the group's heads. Keys are then numbered as the rank has them, and results have their log-sum-exp.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.decode_attention import LOG2_E
from emberline.kernels.gpu.launch import (
    INTERPRETED,
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_wait,
)
from emberline.kernels.gpu.mla.splits import MAX_SPLITS, LatentSplits
from emberline.kernels.token_share import WHOLE_BLOCKS, TokenShare

LSE_ROOM = 8  # columns of a result of several ranks for its log-sum-exp: rows stay aligned for wide stores


@dataclass(frozen=True, slots=True)
class LatentTile:
    queries: int  # heads, or tokens times heads, of a program
    keys: int
    stages: int
    warps: int
    programs_per_sm: int = 1
    hopper: bool = False  # computed by `hopper`, if the values are BF16


@cache
def _hopper() -> Any | None:
    """The module `hopper`, where it runs: other devices use the kernel below, as does a Triton without Gluon."""
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        from emberline.kernels.gpu.mla import hopper
    except ImportError:
        return None
    return hopper


def latent_tile(queries: int, latent: int, rope: int, shares: int = 1) -> LatentTile:
    """Return the tile of a step whose query tiles have `queries` queries. 64 outputs of 512 dimensions take half of an
    SM's registers.

    shares: of each block's tokens. `hopper` loads whole blocks, and gives no log-sum-exp.
    """
    hopper = _hopper() if shares == 1 else None
    if hopper is not None and (latent, rope) == (hopper.LATENT, hopper.ROPE):
        return LatentTile(hopper.QUERIES, hopper.KEYS, 2, hopper.WARPS, hopper=True)
    if queries <= 16:
        return LatentTile(16, 32, 5, 4, 2)
    return LatentTile(32, 64, 3, 8) if queries <= 32 else LatentTile(64, 64, 2, 8)


def tile_tokens(heads: int) -> int:
    """New tokens of a query tile in a step with chunks: as many as fill it."""
    return max(1, 64 // heads)


def partial_floats(queries: int, latent_dim: int) -> int:
    """Return the floats of one partial result: an unnormalized output, a maximum (base 2) and a denominator per
    query."""
    return queries * (latent_dim + 2)


@triton.jit
def _kept(n, first_token, BLOCK: tl.constexpr):
    """Return the number of a sequence's first n tokens that the rank has: of each block BLOCK, from `first_token`
    on."""
    if BLOCK == 16:
        return n
    else:
        return n // 16 * BLOCK + tl.minimum(tl.maximum(n % 16 - first_token, 0), BLOCK)


@triton.jit
def _result_row(token, head, tokens, HEADS: tl.constexpr, SHARES: tl.constexpr):
    """Return the row in [SHARES, tokens, HEADS // SHARES], where the heads of each rank lie together."""
    if SHARES == 1:
        return token.to(tl.int64) * HEADS + head
    else:
        OWN: tl.constexpr = HEADS // SHARES
        return (head // OWN * tokens + token).to(tl.int64) * OWN + head % OWN


# A part of a step's rows begins anywhere: kernels are not compiled again for pointers that are not aligned.
@triton.jit(do_not_specialize=["table_stride", "query_starts", "context_lens", "tokens", "first_token"])
def _latent_attention(
    q, out, lse, pool, tables, items, query_starts, context_lens, partial, stats, scale, block_stride, table_stride,
    tokens, first_token, SHARES: tl.constexpr, BLOCK: tl.constexpr, OUT_WIDTH: tl.constexpr, LSE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = LATENT + ROPE
    FULL: tl.constexpr = LATENT == LATENT_PAD and ROPE == ROPE_PAD
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    entry = items + tl.program_id(1) * 8
    row = tl.load(entry)
    if row >= 0:
        query_tile, split, n_splits = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        tiles_per_split, first_partial = tl.load(entry + 4), tl.load(entry + 5)
        start = tl.load(query_starts + row)
        n = tl.load(query_starts + row + 1) - start
        context = tl.load(context_lens + row)
        m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
        token = query_tile * TOKENS + m // HEADS
        query_mask = (m < TOKENS * HEADS) & (token < n)
        d, r, t = tl.arange(0, LATENT_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, TILE)
        out_rows = _result_row(start + token, m % HEADS, tokens, HEADS, SHARES)
        q_rows = q + (out_rows * WIDTH)[:, None]
        q_latent = tl.load(q_rows + d[None, :], mask=query_mask[:, None] & (d < LATENT)[None, :], other=0.0)
        q_rope = tl.load(q_rows + LATENT + r[None, :], mask=query_mask[:, None] & (r < ROPE)[None, :], other=0.0)
        position = context - n + token
        end = _kept(context - n + tl.minimum(query_tile * TOKENS + TOKENS, n), first_token, BLOCK)
        key_begin = split * tiles_per_split * TILE
        key_end = tl.minimum(key_begin + tiles_per_split * TILE, end)
        table = tables + row.to(tl.int64) * table_stride
        row_max = tl.full([QUERIES], float("-inf"), tl.float32)
        denom = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, LATENT_PAD], tl.float32)
        for key_start in tl.range(key_begin, key_end, TILE, num_stages=STAGES):
            # Keys past the end read the last one again: no mask on the loads, and nothing there that is not finite.
            key = tl.minimum(key_start + t, key_end - 1)
            block = tl.load(table + key // BLOCK).to(tl.int64)
            rows = pool + (block * block_stride + (key % BLOCK) * WIDTH)[:, None]
            if FULL:
                latents = tl.load(rows + d[None, :])
                keys = tl.load(rows + LATENT + r[None, :])
            else:
                latents = tl.load(rows + d[None, :], mask=(d < LATENT)[None, :], other=0.0)
                keys = tl.load(rows + LATENT + r[None, :], mask=(r < ROPE)[None, :], other=0.0)
            scores = tl.dot(q_latent, tl.trans(latents))
            scores = tl.dot(q_rope, tl.trans(keys), scores) * scale
            visible = (key_start + t < key_end)[None, :]
            if TOKENS > 1:
                visible = visible & ((key_start + t)[None, :] < _kept(position + 1, first_token, BLOCK)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            safe_max = new_max
            if TOKENS > 1:  # else every query sees a key of every tile
                safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - safe_max[:, None])
            rescale = tl.exp2(row_max - safe_max)
            denom = denom * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(latents.dtype), latents, acc * rescale[:, None])
            row_max = new_max
        if n_splits == 1:
            safe_denom = tl.where(denom == 0.0, 1.0, denom)
            out_ptrs = out + (out_rows * OUT_WIDTH)[:, None] + d[None, :]
            if SHARES > 1:
                total = tl.where(denom == 0.0, float("-inf"), row_max + tl.log2(safe_denom))
                tl.store(lse + out_rows * LSE_STRIDE, total, mask=query_mask)
            result = (acc / safe_denom[:, None]).to(out.dtype.element_ty)
            tl.store(out_ptrs, result, mask=query_mask[:, None] & (d < LATENT)[None, :])
        else:
            slots = (first_partial + split).to(tl.int64) * (tl.num_programs(0) * QUERIES) + m
            tl.store(partial + (slots * LATENT)[:, None] + d[None, :], acc, mask=(d < LATENT)[None, :])
            tl.store(stats + slots * 2, row_max)
            tl.store(stats + slots * 2 + 1, denom)


@triton.jit(do_not_specialize=["query_starts", "tokens"])
def _merge_partials(
    out, lse, items, query_starts, partial, stats, queries, tokens, SHARES: tl.constexpr, OUT_WIDTH: tl.constexpr,
    LSE_STRIDE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    QUERIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    item = tl.load(items + tl.program_id(0) * 8 + 6)
    if item >= 0:
        entry = items + item * 8
        row, query_tile = tl.load(entry), tl.load(entry + 1)
        n_splits, first = tl.load(entry + 3), tl.load(entry + 5).to(tl.int64)
        start, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
        m = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        token = start + query_tile * TOKENS + m // HEADS
        mask = (m < TOKENS * HEADS) & (token < end)
        d = tl.program_id(2) * LATENT_PAD + tl.arange(0, LATENT_PAD)
        all_splits = tl.arange(0, MAX_SPLITS)
        slots = ((first + all_splits) * queries)[:, None] + m[None, :]
        exists = (all_splits < n_splits)[:, None] & mask[None, :]
        maxima = tl.load(stats + slots * 2, mask=exists, other=float("-inf"))
        denominators = tl.load(stats + slots * 2 + 1, mask=exists, other=0.0)
        row_max = tl.max(maxima, 0)
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
        denom = tl.sum(tl.exp2(maxima - row_max[None, :]) * denominators, 0)
        merged = tl.zeros([QUERIES, LATENT_PAD], tl.float32)
        for begin in range(0, n_splits, SPLITS):
            s = begin + tl.arange(0, SPLITS)
            some = ((first + s) * queries)[:, None] + m[None, :]
            some_exist = (s < n_splits)[:, None] & mask[None, :]
            weights = tl.exp2(tl.load(stats + some * 2, mask=some_exist, other=float("-inf")) - row_max[None, :])
            parts = tl.load(
                partial + (some * LATENT)[:, :, None] + d[None, None, :],
                mask=some_exist[:, :, None] & (d < LATENT)[None, None, :], other=0.0,
            )  # fmt: skip
            merged += tl.sum(weights[:, :, None] * parts, 0)
        out_rows = _result_row(token, m % HEADS, tokens, HEADS, SHARES)
        if SHARES > 1:
            total = tl.where(denom == 0.0, float("-inf"), row_max + tl.log2(tl.where(denom == 0.0, 1.0, denom)))
            if tl.program_id(2) == 0:
                tl.store(lse + out_rows * LSE_STRIDE, total, mask=mask)
        denom = tl.where(denom == 0.0, 1.0, denom)
        out_ptrs = out + (out_rows * OUT_WIDTH)[:, None] + d[None, :]
        result = (merged / denom[:, None]).to(out.dtype.element_ty)
        tl.store(out_ptrs, result, mask=mask[:, None] & (d < LATENT)[None, :])


def latent_attention(
    q: Tensor, out: Tensor, scale: float, pool: Tensor, tables: Tensor, query_starts: Tensor, context_lens: Tensor,
    splits: LatentSplits, tile: LatentTile, scratch: Tensor, pdl: bool = False, share: TokenShare = WHOLE_BLOCKS,
) -> None:  # fmt: skip
    """q: [tokens, heads, latent + rope]; out: [tokens, heads, latent], not written for rows with a context of 0.

    pool: one layer's view of the KV pool, [blocks, 1, 1, BLOCK_TOKENS, latent + rope]. scratch: float32, room for the
    partial results that `splits` was planned with. share: of several ranks, both q and out have their heads:
    [ranks, tokens, heads of each, ...]; out has LSE_ROOM more columns, which begin with the log-sum-exp to base 2 as a
    float32, -inf for a token of which the rank has no keys.
    """
    if not len(splits.table):
        return
    lse_room = LSE_ROOM if share.size > 1 else 0
    heads, latent = share.size * q.shape[-2], out.shape[-1] - lse_room
    rope, tokens = q.shape[-1] - latent, q.shape[-3]
    lse, words = (out.view(torch.float32).flatten(), out.element_size()) if share.size > 1 else (out, 4)
    lse = lse[latent * words // 4 :]
    layout = {"SHARES": share.size, "OUT_WIDTH": out.shape[-1], "LSE_STRIDE": out.shape[-1] * words // 4}
    head_tiles = cdiv(splits.tile_tokens * heads, tile.queries)
    queries = head_tiles * tile.queries
    n_partials = scratch.numel() // partial_floats(queries, latent)
    partial, stats = scratch[: n_partials * queries * latent], scratch[n_partials * queries * latent :]
    pad = max(16, next_power_of_two(latent))
    rows = (tables, query_starts, context_lens)
    if tile.hopper and (hopper := _hopper()) is not None and q.dtype == torch.bfloat16:
        hopper.latent_attention_hopper(
            q, out, scale * LOG2_E, pool, *rows, splits.table, splits.tile_tokens, partial, stats
        )
    else:
        _latent_attention[(head_tiles, len(splits.table))](
            q, out, lse, pool, tables, splits.table, query_starts, context_lens, partial, stats, scale * LOG2_E,
            pool.stride(0), tables.stride(0), tokens, share.span[0], **layout, BLOCK=share.tokens, HEADS=heads,
            TOKENS=splits.tile_tokens, QUERIES=tile.queries,
            LATENT=latent, LATENT_PAD=pad, ROPE=rope, ROPE_PAD=max(16, next_power_of_two(rope)), TILE=tile.keys,
            STAGES=tile.stages, PDL=int(pdl), **launch_options(pdl, num_warps=tile.warps),
        )  # fmt: skip
    if not splits.n_split_tiles:
        return
    many = splits.n_split_tiles > 8  # few tiles have many splits, many tiles few
    merge_queries, merge_dims, merge_splits = (4, pad, 2) if many else (1, min(pad, 128), 32)
    _merge_partials[(splits.n_split_tiles, cdiv(splits.tile_tokens * heads, merge_queries), cdiv(latent, merge_dims))](
        out, lse, splits.table, query_starts, partial, stats, queries, tokens, **layout, HEADS=heads,
        TOKENS=splits.tile_tokens, LATENT=latent, LATENT_PAD=merge_dims, MAX_SPLITS=MAX_SPLITS,
        SPLITS=merge_splits, QUERIES=merge_queries, PDL=int(pdl),
        **launch_options(pdl, num_warps=4),
    )  # fmt: skip
