# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Paged attention of decode rows with several tokens, as steps that verify drafts have: split-KV, one launch.

As `decode_attention`, with the tokens of a row folded into its group of query heads: a program reads one split of one
row's cache for one KV head, all query heads that share it, and all the row's tokens, however many these are. The new
tokens are taken from the QKV projection: the row's last split rotates them, writes them to the cache, and attends to
them causally.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.decode_inputs import MAX_ROW_TOKENS
from emberline.kernels.gpu.decode_attention import LOG2_E, attend_range, attend_tile
from emberline.kernels.gpu.launch import launch_options, next_power_of_two, pdl_launch_early, pdl_wait
from emberline.kernels.gpu.rope import norm_and_rotate, query_key_ops, scale_queries, temperature_args
from emberline.kernels.gpu.split_kv import (
    DecodeSplits,
    first_visible,
    locality,
    max_decode_splits,
    merge_splits,
    normalized,
    split_floats,
)

MAX_QUERIES = 128  # tokens times query heads of a KV head


@dataclass(frozen=True, slots=True)
class VerifyTile:
    tokens: int  # of the cache
    stages: int
    warps: int


def verify_tile(queries: int, head_dim: int) -> VerifyTile:
    """A warp has 16 queries, the least that tensor cores multiply: more warps would multiply them twice, and still pay
    where there are few, since they load the cache. Of many stages half load the block table ahead of it."""
    if head_dim > 128:
        return VerifyTile(32, 2, 8)
    return VerifyTile(32, 6, max(4, queries // 16))


def verify_queries(group: int) -> int:
    """Rows of a program's tile of queries: of as many tokens as a row may have. Smaller ones for rows that have fewer
    would hardly be faster, since a program waits for the cache."""
    return max(16, next_power_of_two(MAX_ROW_TOKENS * group))


def verifies(group: int) -> bool:
    """True if the kernel computes rows with `group` query heads for a KV head."""
    return verify_queries(group) <= MAX_QUERIES


def verify_partial_floats(rows: int, kv_heads: int, group: int, head_dim: int) -> int:
    """Workspace for partial results."""
    queries = verify_queries(group)
    size = split_floats(queries, next_power_of_two(head_dim))
    return max_decode_splits(rows, kv_heads, queries) * kv_heads * size


@triton.jit(do_not_specialize=["local_size"])
def _verify_attention(
    qkv, out, cosine, sine, q_weight, k_weight, pool, tables, query_starts, splits, partial, counters, sinks, scale,
    eps, temperature, interval, local_size, block_stride, table_stride,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, NEW: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, OPS: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, LOCAL: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, index = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    entry = splits + index * 8
    row = tl.load(entry)
    if row >= 0:
        split, n_splits = tl.load(entry + 1), tl.load(entry + 2)
        begin, end, context = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
        d = tl.arange(0, PAD)
        m = tl.arange(0, QUERIES)
        i, g = m // GROUP, m % GROUP
        start = tl.load(query_starts + row)
        n_tokens = tl.load(query_starts + row + 1) - start
        first_token = start.to(tl.int64)
        width = (GROUP + 2) * kv_heads * DIM
        query_mask = i < n_tokens
        token = first_token + tl.where(query_mask, i, 0)
        dim_mask = (d < DIM)[None, :]
        rotary = (token * (DIM // 2))[:, None]
        q = norm_and_rotate(
            qkv + (token * width + (head * GROUP + g) * DIM)[:, None], q_weight, cosine + rotary, sine + rotary,
            query_mask[:, None], d, eps, DIM, OPS,
        )  # fmt: skip
        position = context - 1 + i
        q = scale_queries(q, position[:, None], temperature, interval, OPS)
        visible = first_visible(position, local_size, LOCAL)
        table = tables + row.to(tl.int64) * table_stride
        keys = pool + head * (16 * DIM)
        values = keys + kv_heads * (16 * DIM)

        row_max, denom, acc = attend_range(
            q, table, keys, values, begin, end, visible, d, scale, block_stride, QUERIES, DIM, PAD, TILE, STAGES,
            ALIGNED, LOCAL,
        )  # fmt: skip

        if split == n_splits - 1:  # the new tokens
            j = tl.arange(0, NEW)
            new_mask = j < n_tokens
            new_token = first_token + tl.where(new_mask, j, 0)
            new_rotary = (new_token * (DIM // 2))[:, None]
            k_ptrs = qkv + (new_token * width + (GROUP * kv_heads + head) * DIM)[:, None]
            k_new = norm_and_rotate(
                k_ptrs, k_weight, cosine + new_rotary, sine + new_rotary, new_mask[:, None], d, eps, DIM, OPS
            )
            v_new = tl.load(k_ptrs + kv_heads * DIM + d[None, :], mask=new_mask[:, None] & dim_mask, other=0.0)
            new_position = context - 1 + j
            new_block = tl.load(table + new_position // 16, mask=new_mask, other=0).to(tl.int64)
            new_slots = (new_block * block_stride + (new_position % 16) * DIM)[:, None] + d[None, :]
            tl.store(keys + new_slots, k_new.to(pool.dtype.element_ty), mask=new_mask[:, None] & dim_mask)
            tl.store(values + new_slots, v_new.to(pool.dtype.element_ty), mask=new_mask[:, None] & dim_mask)
            causal = (j[None, :] <= i[:, None]) & new_mask[None, :]
            if LOCAL:
                causal = causal & (new_position[None, :] >= visible[:, None])
            row_max, denom, acc = attend_tile(q, k_new, v_new, causal, row_max, denom, acc, scale)

        out_ptrs = out + (token * GROUP * kv_heads * DIM + (head * GROUP + g) * DIM)[:, None] + d[None, :]
        out_mask = query_mask[:, None] & dim_mask
        if n_splits == 1:
            result = normalized(acc, row_max, denom, sinks, head * GROUP + g, query_mask, SINKS)
            tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=out_mask)
        else:
            first = (index - split) * kv_heads + head
            row_counters = counters + (row * kv_heads + head - first)  # one counter for each row and KV head
            merge_splits(
                acc, row_max, denom, out_ptrs, out_mask, partial, row_counters, first, split, n_splits, kv_heads, sinks,
                head * GROUP + g, QUERIES, PAD, SINKS,
            )  # fmt: skip


def verify_attention(
    qkv: Tensor, out: Tensor, attn: GroupedQueryAttention, rotary: tuple[Tensor, Tensor], pool: Tensor, tables: Tensor,
    query_starts: Tensor, splits: DecodeSplits, partial: Tensor, counters: Tensor, pdl: bool = False,
    tile: VerifyTile | None = None,
) -> None:  # fmt: skip
    """Attention of rows of up to MAX_ROW_TOKENS each; out: [tokens, heads * dim].

    Writes k and v of the new tokens to the cache. splits: planned with query_starts and `verify_queries`. partial: of
    `verify_partial_floats`. counters: int32 zeros, reset to zero.
    """
    group = attn.heads // attn.kv_heads
    queries, norm = verify_queries(group), attn.q_norm is not None
    local, size = locality(attn.window, attn.chunk)
    tile = tile or verify_tile(queries, attn.head_dim)
    pad = next_power_of_two(attn.head_dim)
    _verify_attention[(attn.kv_heads, splits.n)](
        qkv, out, *rotary, attn.q_norm if norm else qkv, attn.k_norm if norm else qkv, pool, tables, query_starts,
        splits.table, partial, counters, qkv if attn.sinks is None else attn.sinks, attn.scale * LOG2_E, attn.eps,
        *temperature_args(attn), size, pool.stride(0), tables.stride(0),
        GROUP=group, QUERIES=queries, NEW=MAX_ROW_TOKENS, DIM=attn.head_dim, PAD=pad, TILE=tile.tokens,
        OPS=query_key_ops(attn), STAGES=tile.stages, LOCAL=local, SINKS=attn.sinks is not None, PDL=int(pdl),
        ALIGNED=attn.window is None and (attn.chunk or 0) % 16 == 0, **launch_options(pdl, num_warps=tile.warps),
    )  # fmt: skip
