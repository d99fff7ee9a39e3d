# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Paged attention of decode rows, with split-KV, and cascade attention over a prefix that rows share.

One launch computes QK norm, RoPE, KV write, attention and the merge of splits. A program reads one split of one row's
cache for one KV head and all query heads that share it. The newest token is taken from the QKV projection, not from the
cache: the row's last split rotates it, writes it and attends to it. Where a row has several splits or a shared prefix,
the last program to finish merges the partial results, always in the same order.

Cascade attention reads a shared prefix once for all rows, whose queries are stacked in one tile, and leaves partial
results that the launch above merges with each row's own part. Rows without the prefix are computed too, as they are in
the same tiles, and not merged.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two, pdl_launch_early, pdl_wait, sm_count
from emberline.kernels.gpu.rope import norm_and_rotate, query_key_ops, scale_queries, temperature_args
from emberline.kernels.gpu.split_kv import DecodeSplits, merge_partials, normalized

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeTile:
    tokens: int
    stages: int
    warps: int
    merge_width: int  # splits merged at once


def decode_tile(rows: int, head_dim: int) -> DecodeTile:
    """Few rows are latency-bound: larger tiles, more loads in flight. Many rows want many small programs."""
    if head_dim > 128:  # does not fit one warp's registers
        return DecodeTile(32, 4, 4, 4)
    if rows <= 4:
        return DecodeTile(64, 3, 2, 8)
    return DecodeTile(16, 6, 1, 8 if rows <= 16 else 4)


@triton.jit
def attend_tile(q, k, v, mask, row_max, denom, out, scale):
    """Online softmax over one tile: updates each query's maximum (base 2), denominator and unnormalized output."""
    scores = tl.dot(q, tl.trans(k)) * scale
    scores = tl.where(mask, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    rescale = tl.exp2(row_max - safe_max)
    denom = denom * rescale + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None])
    return new_max, denom, out


@triton.jit
def attend_range(
    q, table, keys, values, begin, end, visible, d, scale, block_stride,
    QUERIES: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr, LOCAL: tl.constexpr = 0,
):  # fmt: skip
    """Attention over tokens begin .. end - 1: each query's maximum (base 2), denominator and unnormalized output.

    ALIGNED: `begin` is the start of a block, so that a tile of 16 tokens is one block. LOCAL: of these tokens each
    query sees those from `visible` on.
    """
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    denom = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, PAD], tl.float32)
    t = tl.arange(0, TILE)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        token = start + t
        mask = token < end
        if ALIGNED and TILE == 16:
            offsets = tl.load(table + start // 16).to(tl.int64) * block_stride + (t * DIM)[:, None] + d[None, :]
        else:
            block = tl.load(table + token // 16, mask=mask, other=0).to(tl.int64)
            offsets = (block * block_stride + (token % 16) * DIM)[:, None] + d[None, :]
        load_mask = mask[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + offsets, mask=load_mask, other=0.0)
        v = tl.load(values + offsets, mask=load_mask, other=0.0)
        seen = mask[None, :]
        if LOCAL:
            seen = seen & (token[None, :] >= visible[:, None])
        row_max, denom, out = attend_tile(q, k, v, seen, row_max, denom, out, scale)
    return row_max, denom, out


@triton.jit(do_not_specialize=["n_rows", "n_prefix_splits"])
def _decode_attention(
    qkv, out, cosine, sine, q_weight, k_weight, pool, tables, splits, partial, stats, counters, prefix_partial,
    prefix_stats, prefix_lens, sinks, n_rows, scale, eps, temperature, interval, block_stride, table_stride,
    n_prefix_splits,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, OPS: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr, MERGE_WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
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
        g = tl.arange(0, QUERIES)
        wide_row = row.to(tl.int64)
        base = qkv + wide_row * (GROUP + 2) * kv_heads * DIM
        cos, sin = cosine + wide_row * (DIM // 2), sine + wide_row * (DIM // 2)
        head_mask = (g < GROUP)[:, None]
        q = norm_and_rotate(base + (head * GROUP + g)[:, None] * DIM, q_weight, cos, sin, head_mask, d, eps, DIM, OPS)
        q = scale_queries(q, context - 1, temperature, interval, OPS)
        one = tl.arange(0, 1)[:, None]
        dim_mask = (d < DIM)[None, :]
        k_new = norm_and_rotate(
            base + ((GROUP * kv_heads + head) + one) * DIM, k_weight, cos, sin, one < 1, d, eps, DIM, OPS
        )
        v_new = tl.load(base + (GROUP * kv_heads + kv_heads + head + one) * DIM + d[None, :], mask=dim_mask, other=0.0)
        table = tables + wide_row * table_stride
        keys = pool + head * (16 * DIM)
        values = keys + kv_heads * (16 * DIM)

        row_max, denom, acc = attend_range(
            q, table, keys, values, begin, end, 0, d, scale, block_stride, QUERIES, DIM, PAD, TILE, STAGES, ALIGNED
        )

        if split == n_splits - 1:  # the newest token
            new_slot = tl.load(table + (context - 1) // 16).to(tl.int64) * block_stride + ((context - 1) % 16) * DIM
            tl.store(keys + new_slot + d[None, :] + one, k_new.to(pool.dtype.element_ty), mask=dim_mask)
            tl.store(values + new_slot + d[None, :] + one, v_new.to(pool.dtype.element_ty), mask=dim_mask)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
            new_max = tl.maximum(row_max, score)
            rescale, weight = tl.exp2(row_max - new_max), tl.exp2(score - new_max)
            denom = denom * rescale + weight
            acc = acc * rescale[:, None] + weight[:, None] * v_new.to(tl.float32)
            row_max = new_max

        first_head = wide_row * GROUP * kv_heads + head * GROUP
        n_prefix = 0
        if SHARED:
            n_prefix = tl.where(tl.load(prefix_lens + row) > 0, n_prefix_splits, 0)
        if n_splits + n_prefix == 1:
            out_ptrs = out + (first_head + g)[:, None] * DIM + d[None, :]
            result = normalized(acc, row_max, denom, sinks, head * GROUP + g, g < GROUP, SINKS)
            tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=head_mask & (d < DIM)[None, :])
        else:
            offsets = (index * kv_heads + head).to(tl.int64) * GROUP + g
            tl.store(partial + offsets[:, None] * DIM + d[None, :], acc, mask=head_mask & (d < DIM)[None, :])
            tl.store(stats + offsets * 2, row_max, mask=g < GROUP)
            tl.store(stats + offsets * 2 + 1, denom, mask=g < GROUP)
            tl.debug_barrier()  # all threads have stored before the counter is incremented
            finished = tl.atomic_add(counters + row * kv_heads + head, 1, sem="acq_rel")
            if finished == n_splits - 1:
                tl.store(counters + row * kv_heads + head, 0)
                s = tl.arange(0, GROUP_PAD)
                merged_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
                merged_denom = tl.zeros([GROUP_PAD], tl.float32)
                merged = tl.zeros([GROUP_PAD, PAD], tl.float32)
                merged_max, merged_denom, merged = merge_partials(
                    partial, stats, index - split, 1, n_splits, head, s, d,
                    merged_max, merged_denom, merged, DIM, GROUP, MERGE_WIDTH,
                )  # fmt: skip
                if SHARED:
                    merged_max, merged_denom, merged = merge_partials(
                        prefix_partial, prefix_stats, row, n_rows, n_prefix, head, s, d,
                        merged_max, merged_denom, merged, DIM, GROUP, MERGE_WIDTH,
                    )  # fmt: skip
                merged_ptrs = out + (first_head + s)[:, None] * DIM + d[None, :]
                merged_mask = (s < GROUP)[:, None] & (d < DIM)[None, :]
                result = normalized(merged, merged_max, merged_denom, sinks, head * GROUP + s, s < GROUP, SINKS)
                tl.store(merged_ptrs, result.to(out.dtype.element_ty), mask=merged_mask)


def decode_attention(
    qkv: Tensor, out: Tensor, attn: GroupedQueryAttention, rotary: tuple[Tensor, Tensor], pool: Tensor, tables: Tensor,
    splits: DecodeSplits, partial: Tensor, stats: Tensor, counters: Tensor, rows: int,
    prefix: tuple[Tensor, Tensor, Tensor, int] | None = None, pdl: bool = False, release: bool = False,
    tile: DecodeTile | None = None,
) -> None:  # fmt: skip
    """Attention of rows 0 .. rows - 1, row r having token r of qkv; out: [tokens, heads * dim].

    Writes k and v of the new tokens to the cache. release: allow the next kernel to start at once, to load its weights
    while this one waits for the cache. stats: float32 [splits, heads, 2], softmax maximum and denominator. counters:
    int32 zeros, reset to zero. prefix: partial results, stats, each row's prefix length and the number of splits, from
    `shared_prefix_attention`.
    """
    if not rows:
        return
    norm, group = attn.q_norm is not None, attn.heads // attn.kv_heads
    tile = tile or decode_tile(rows, attn.head_dim)
    prefix_partial, prefix_stats, prefix_lens, n_prefix_splits = prefix or (partial, stats, counters, 0)
    _decode_attention[(attn.kv_heads, splits.n)](
        qkv, out, *rotary, attn.q_norm if norm else qkv, attn.k_norm if norm else qkv, pool, tables, splits.table,
        partial, stats, counters, prefix_partial, prefix_stats, prefix_lens, qkv if attn.sinks is None else attn.sinks,
        rows, attn.scale * LOG2_E, attn.eps, *temperature_args(attn), pool.stride(0), tables.stride(0), n_prefix_splits,
        GROUP=group, GROUP_PAD=next_power_of_two(group), QUERIES=max(16, next_power_of_two(group)), DIM=attn.head_dim,
        PAD=next_power_of_two(attn.head_dim), TILE=tile.tokens, OPS=query_key_ops(attn), SHARED=prefix is not None,
        STAGES=tile.stages, MERGE_WIDTH=tile.merge_width, ALIGNED=attn.window is None and (attn.chunk or 0) % 16 == 0,
        SINKS=attn.sinks is not None, PDL=int(pdl or release),
        **launch_options(pdl, num_warps=tile.warps),
    )  # fmt: skip


# --- cascade attention ------------------------------------------------------------------------------------------------


def n_prefix_splits(rows: int, heads: int, kv_heads: int) -> int:
    """Return the number of splits of the prefix: about two programs per SM, at most 16."""
    tiles = cdiv(rows * (heads // kv_heads), _prefix_tile_queries(rows * (heads // kv_heads)))
    return max(1, min(16, 2 * sm_count() // (tiles * kv_heads)))


def _prefix_tile_queries(n: int) -> int:
    return 64 if n > 16 else 16


@triton.jit(do_not_specialize=["n_rows"])
def _shared_prefix_attention(
    qkv, partial, stats, cosine, sine, q_weight, positions, pool, tables, shared, n_rows, scale, eps, temperature,
    interval, block_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    OPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(2)
    kv_heads, n_splits = tl.num_programs(0), tl.num_programs(2)
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    prefix_len = tl.load(shared + 1)
    if prefix_len > 0:
        split_len = tl.cdiv(tl.cdiv(prefix_len, n_splits), TILE) * TILE
        begin, end = split * split_len, tl.minimum(split * split_len + split_len, prefix_len)
        d = tl.arange(0, PAD)
        m = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        row = (m // GROUP).to(tl.int64)
        query_mask = (row < n_rows)[:, None]
        row_width = ((GROUP + 2) * kv_heads * DIM).to(tl.int64)
        head_ptrs = qkv + (row * row_width + (head * GROUP + m % GROUP) * DIM)[:, None]
        rotary = (tl.minimum(row, n_rows - 1) * (DIM // 2))[:, None]
        q = norm_and_rotate(head_ptrs, q_weight, cosine + rotary, sine + rotary, query_mask, d, eps, DIM, OPS)
        position = tl.load(positions + row, mask=row < n_rows, other=0)[:, None]
        q = scale_queries(q, position, temperature, interval, OPS)
        mask = query_mask & (d < DIM)[None, :]
        table = tables + tl.load(shared).to(tl.int64) * table_stride
        keys = pool + head * (16 * DIM)
        values = keys + kv_heads * (16 * DIM)
        row_max, denom, acc = attend_range(
            q, table, keys, values, begin, end, 0, d, scale, block_stride, QUERIES, DIM, PAD, TILE, STAGES, True
        )
        out_index = ((split * n_rows + row) * kv_heads + head) * GROUP + m % GROUP
        tl.store(partial + out_index[:, None] * DIM + d[None, :], acc, mask=mask)
        tl.store(stats + out_index * 2, row_max, mask=row < n_rows)
        tl.store(stats + out_index * 2 + 1, denom, mask=row < n_rows)


def shared_prefix_attention(
    qkv: Tensor, attn: GroupedQueryAttention, rotary: tuple[Tensor, Tensor], pool: Tensor, tables: Tensor,
    shared: Tensor, positions: Tensor, partial: Tensor, stats: Tensor, rows: int, pdl: bool = False,
) -> int:  # fmt: skip
    """Attention of all rows over the shared prefix, as partial results; returns the number of splits.

    shared: int32 [2], a row whose block table begins with the prefix, and the prefix's length, a multiple of the block
    size. partial: float32 [splits, rows, heads, dim]; stats: [splits, rows, heads, 2], max and denominator.
    """
    group = attn.heads // attn.kv_heads
    queries, n_splits = _prefix_tile_queries(rows * group), n_prefix_splits(rows, attn.heads, attn.kv_heads)
    stages, warps = (3, 4) if attn.head_dim <= 128 else (2, 8)  # limited by shared memory and registers
    _shared_prefix_attention[(attn.kv_heads, cdiv(rows * group, queries), n_splits)](
        qkv, partial, stats, *rotary, attn.q_norm if attn.q_norm is not None else qkv, positions, pool, tables,
        shared, rows, attn.scale * LOG2_E, attn.eps, *temperature_args(attn), pool.stride(0), tables.stride(0),
        GROUP=group, DIM=attn.head_dim, PAD=next_power_of_two(attn.head_dim), QUERIES=queries, TILE=64,
        OPS=query_key_ops(attn), STAGES=stages, PDL=int(pdl), **launch_options(pdl, num_warps=warps),
    )  # fmt: skip
    return n_splits
