# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Attention of rows that add one token each: norm, rotation, KV write, attention and its merge in one launch.

A program reads one piece of one row's cache for one KV head and all query heads that share it. The newest token comes
from the projection's output, not from the cache: the row's last piece rotates, writes and merges it. Where a row has
several pieces, or a prefix read apart, whichever program ends last merges them, always in the same order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import Attention
from emberline.kernels.gpu.launch import SM_COUNT, cdiv, launch_options, next_power_of_two, pdl_launch_early, pdl_wait
from emberline.kernels.gpu.rope import norm_and_rotate
from emberline.kernels.gpu.split_kv import DecodeSplits

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeTile:
    tokens: int
    stages: int
    warps: int
    many: int  # pieces merged at once


def decode_tile(rows: int, head_dim: int) -> DecodeTile:
    """Few rows wait for latency: more in flight at once. Many want small programs, as many as fit."""
    if head_dim > 128:  # one warp's registers do not hold it
        return DecodeTile(32, 4, 4, 4)
    if rows <= 4:
        return DecodeTile(64, 3, 2, 8)
    return DecodeTile(16, 6, 1, 8 if rows <= 16 else 4)


@triton.jit
def attend_tile(q, k, v, ok, peak, total, out, scale):
    """One more tile of keys and values: the running maximum (base 2), sum and weighted values of each query."""
    scores = tl.dot(q, tl.trans(k)) * scale
    scores = tl.where(ok, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(peak - safe)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
    return higher, total, out


@triton.jit
def attend_range(
    q, table, keys, values, begin, end, d, scale, block_stride,
    QUERIES: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Tokens begin .. end - 1 of a row's blocks: each query's maximum (base 2), sum and weighted values.

    ALIGNED: `begin` is the beginning of a block, so that a tile of its size is one block.
    """
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, PAD], tl.float32)
    t = tl.arange(0, TILE)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        token = start + t
        ok = token < end
        if ALIGNED and TILE == 16:
            at = tl.load(table + start // 16).to(tl.int64) * block_stride + (t * DIM)[:, None] + d[None, :]
        else:
            block = tl.load(table + token // 16, mask=ok, other=0).to(tl.int64)
            at = (block * block_stride + (token % 16) * DIM)[:, None] + d[None, :]
        mask = ok[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + at, mask=mask, other=0.0)
        v = tl.load(values + at, mask=mask, other=0.0)
        peak, total, out = attend_tile(q, k, v, ok[None, :], peak, total, out, scale)
    return peak, total, out


@triton.jit
def _merge_partials(
    partial, peaks, first, stride, n, head, g, d, peak, total, out,
    DIM: tl.constexpr, GROUP: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Partial results first, first + stride, ..: n of them, MANY at a time, each [heads, DIM] with its peak and sum."""
    s = tl.arange(0, MANY)
    for start in range(0, n, MANY):
        ok = (start + s) < n
        at = ((first + (start + s) * stride) * tl.num_programs(0) + head).to(tl.int64) * GROUP
        at = at[:, None] + g[None, :]  # [MANY, heads]
        mask = ok[:, None] & (g < GROUP)[None, :]
        high = tl.load(peaks + at * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(peaks + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        more = tl.load(
            partial + at[:, :, None] * DIM + d[None, None, :],
            mask=mask[:, :, None] & (d < DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(high, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(high - safe[None, :])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(weight * sums, 0)
        out = out * shrink[:, None] + tl.sum(weight[:, :, None] * more, 0)
        peak = higher
    return peak, total, out


@triton.jit(do_not_specialize=["n_rows", "n_prefix"])
def _decode_attention(
    qkv, out, cosine, sine, q_weight, k_weight, pool, tables, pieces, partial, peaks, counters, prefix, prefix_peaks,
    shares, n_rows, scale, eps, block_stride, table_stride, n_prefix,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, NORM: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr, MANY: tl.constexpr,
    ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, item = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    entry = pieces + item * 8
    row = tl.load(entry)
    if row >= 0:
        split, n_splits = tl.load(entry + 1), tl.load(entry + 2)
        begin, end, context = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
        d = tl.arange(0, PAD)
        g = tl.arange(0, QUERIES)
        wide = row.to(tl.int64)
        base = qkv + wide * (GROUP + 2) * kv_heads * DIM
        cos, sin = cosine + wide * (DIM // 2), sine + wide * (DIM // 2)
        mine = (g < GROUP)[:, None]
        q = norm_and_rotate(base + (head * GROUP + g)[:, None] * DIM, q_weight, cos, sin, mine, d, eps, DIM, NORM)
        one = tl.arange(0, 1)[:, None]
        own = (d < DIM)[None, :]
        k_new = norm_and_rotate(
            base + ((GROUP * kv_heads + head) + one) * DIM, k_weight, cos, sin, one < 1, d, eps, DIM, NORM
        )
        v_new = tl.load(base + (GROUP * kv_heads + kv_heads + head + one) * DIM + d[None, :], mask=own, other=0.0)
        table = tables + wide * table_stride
        keys = pool + head * (16 * DIM)
        values = keys + kv_heads * (16 * DIM)

        peak, total, acc = attend_range(
            q, table, keys, values, begin, end, d, scale, block_stride, QUERIES, DIM, PAD, TILE, STAGES, ALIGNED
        )

        if split == n_splits - 1:  # the newest token
            place = tl.load(table + (context - 1) // 16).to(tl.int64) * block_stride + ((context - 1) % 16) * DIM
            tl.store(keys + place + d[None, :] + one, k_new.to(pool.dtype.element_ty), mask=own)
            tl.store(values + place + d[None, :] + one, v_new.to(pool.dtype.element_ty), mask=own)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
            higher = tl.maximum(peak, score)
            shrink, weight = tl.exp2(peak - higher), tl.exp2(score - higher)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + weight[:, None] * v_new.to(tl.float32)
            peak = higher

        heads = wide * GROUP * kv_heads + head * GROUP
        n_shared = 0
        if SHARED:
            n_shared = tl.where(tl.load(shares + row) > 0, n_prefix, 0)
        if n_splits + n_shared == 1:
            to = out + (heads + g)[:, None] * DIM + d[None, :]
            tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine & (d < DIM)[None, :])
        else:
            at = (item * kv_heads + head).to(tl.int64) * GROUP + g
            tl.store(partial + at[:, None] * DIM + d[None, :], acc, mask=mine & (d < DIM)[None, :])
            tl.store(peaks + at * 2, peak, mask=g < GROUP)
            tl.store(peaks + at * 2 + 1, total, mask=g < GROUP)
            tl.debug_barrier()  # every thread's part is written before one of them says so
            done = tl.atomic_add(counters + row * kv_heads + head, 1, sem="acq_rel")
            if done == n_splits - 1:
                tl.store(counters + row * kv_heads + head, 0)
                s = tl.arange(0, GROUP_PAD)
                high = tl.full([GROUP_PAD], float("-inf"), tl.float32)
                sums = tl.zeros([GROUP_PAD], tl.float32)
                merged = tl.zeros([GROUP_PAD, PAD], tl.float32)
                high, sums, merged = _merge_partials(
                    partial, peaks, item - split, 1, n_splits, head, s, d, high, sums, merged, DIM, GROUP, MANY
                )
                if SHARED:
                    high, sums, merged = _merge_partials(
                        prefix, prefix_peaks, row, n_rows, n_shared, head, s, d, high, sums, merged, DIM, GROUP, MANY
                    )
                target = out + (heads + s)[:, None] * DIM + d[None, :]
                wanted = (s < GROUP)[:, None] & (d < DIM)[None, :]
                tl.store(target, (merged / sums[:, None]).to(out.dtype.element_ty), mask=wanted)


def decode_attention(
    qkv: Tensor,
    out: Tensor,
    at: Attention,
    angles: tuple[Tensor, Tensor],
    pool: Tensor,
    tables: Tensor,
    pieces: DecodeSplits,
    partial: Tensor,
    peaks: Tensor,
    counters: Tensor,
    rows: int,
    prefix: tuple[Tensor, Tensor, Tensor, int] | None = None,
    pdl: bool = False,
    release: bool = False,
    tile: DecodeTile | None = None,
) -> None:
    """Rows 0 .. rows - 1, token r of qkv each; out: [tokens, heads * dim]. k and v go into the pool's blocks.

    release: the next kernel may start at once, to fetch its weights while this one waits for the cache.
    counters: int32 zeros, and zeros again afterwards. prefix: partial results, their peaks, the rows' shares and the
    number of parts, from `cascade.attend_prefix`.
    """
    if not rows:
        return
    norm, group = at.q_norm is not None, at.heads // at.kv_heads
    tile = tile or decode_tile(rows, at.head_dim)
    shared, shared_peaks, shares, parts = prefix or (partial, peaks, counters, 0)
    _decode_attention[(at.kv_heads, pieces.n)](
        qkv, out, *angles, at.q_norm if norm else qkv, at.k_norm if norm else qkv, pool, tables, pieces.table,
        partial, peaks, counters, shared, shared_peaks, shares, rows, at.scale * LOG2_E, at.eps,
        pool.stride(0), tables.stride(0), parts,
        GROUP=group, GROUP_PAD=next_power_of_two(group), QUERIES=max(16, next_power_of_two(group)), DIM=at.head_dim,
        PAD=next_power_of_two(at.head_dim), TILE=tile.tokens, NORM=norm, SHARED=prefix is not None, STAGES=tile.stages,
        MANY=tile.many, ALIGNED=at.window is None, PDL=int(pdl or release),
        **launch_options(pdl, num_warps=tile.warps),
    )  # fmt: skip


def n_prefix_splits(rows: int, heads: int, kv_heads: int) -> int:
    """Into how many parts the prefix is cut: about two programs for each multiprocessor, at most 16."""
    tiles = cdiv(rows * (heads // kv_heads), _prefix_tile_queries(rows * (heads // kv_heads)))
    return max(1, min(16, 2 * SM_COUNT // (tiles * kv_heads)))


def _prefix_tile_queries(n: int) -> int:
    return 64 if n > 16 else 16


@triton.jit(do_not_specialize=["n_rows"])
def _shared_prefix_attention(
    qkv, partial, peaks, cosine, sine, q_weight, pool, tables, shared, n_rows, scale, eps, block_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    NORM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(2)
    kv_heads, n_parts = tl.num_programs(0), tl.num_programs(2)
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    tokens = tl.load(shared + 1)
    if tokens > 0:
        each = tl.cdiv(tl.cdiv(tokens, n_parts), TILE) * TILE
        begin, end = part * each, tl.minimum(part * each + each, tokens)
        d = tl.arange(0, PAD)
        m = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        row = (m // GROUP).to(tl.int64)
        mine = (row < n_rows)[:, None]
        wide = ((GROUP + 2) * kv_heads * DIM).to(tl.int64)
        HALF: tl.constexpr = DIM // 2
        kind = qkv.dtype.element_ty
        source = qkv + (row * wide + (head * GROUP + m % GROUP) * DIM)[:, None]
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        ok = mine & (d < DIM)[None, :]
        x = tl.load(source + d[None, :], mask=ok, other=0.0).to(tl.float32)
        y = tl.load(source + partner[None, :], mask=ok, other=0.0).to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            x = (x * inverse * tl.load(q_weight + d, mask=d < DIM, other=0.0)[None, :]).to(kind).to(tl.float32)
            y = (y * inverse * tl.load(q_weight + partner, mask=d < DIM, other=0.0)[None, :]).to(kind).to(tl.float32)
        turn = (row * HALF)[:, None] + (d % HALF)[None, :]
        cos = tl.load(cosine + turn, mask=ok, other=0.0)
        sin = tl.load(sine + turn, mask=ok, other=0.0)
        q = (x * cos + y * tl.where((d < HALF)[None, :], -sin, sin)).to(kind)

        table = tables + tl.load(shared).to(tl.int64) * table_stride
        keys = pool + head * (16 * DIM)
        values = keys + kv_heads * (16 * DIM)
        peak, total, acc = attend_range(
            q, table, keys, values, begin, end, d, scale, block_stride, QUERIES, DIM, PAD, TILE, STAGES, True
        )
        to = ((part * n_rows + row) * kv_heads + head) * GROUP + m % GROUP
        tl.store(partial + to[:, None] * DIM + d[None, :], acc, mask=ok)
        tl.store(peaks + to * 2, peak, mask=row < n_rows)
        tl.store(peaks + to * 2 + 1, total, mask=row < n_rows)


def shared_prefix_attention(
    qkv: Tensor,
    at: Attention,
    angles: tuple[Tensor, Tensor],
    pool: Tensor,
    tables: Tensor,
    shared: Tensor,
    partial: Tensor,
    peaks: Tensor,
    rows: int,
    pdl: bool = False,
) -> int:
    """shared: int32 [2], a row whose table starts with the prefix and the prefix's tokens, a multiple of the block.

    partial: float32 [parts, rows, heads, dim], peaks: [parts, rows, heads, 2]. Returns the number of parts.
    """
    group = at.heads // at.kv_heads
    queries, parts = _prefix_tile_queries(rows * group), n_prefix_splits(rows, at.heads, at.kv_heads)
    stages, warps = (3, 4) if at.head_dim <= 128 else (2, 8)  # what shared memory and registers hold
    _shared_prefix_attention[(at.kv_heads, cdiv(rows * group, queries), parts)](
        qkv, partial, peaks, *angles, at.q_norm if at.q_norm is not None else qkv, pool, tables, shared, rows,
        at.scale * LOG2_E, at.eps, pool.stride(0), tables.stride(0),
        GROUP=group, DIM=at.head_dim, PAD=next_power_of_two(at.head_dim), QUERIES=queries, TILE=64,
        NORM=at.q_norm is not None, STAGES=stages, PDL=int(pdl), **launch_options(pdl, num_warps=warps),
    )  # fmt: skip
    return parts
