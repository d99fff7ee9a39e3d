# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Absorbed MLA for Hopper, its pipeline written out in Gluon: one warp loads latents by TMA, two warp groups compute.

It takes the place of `attention._latent_attention` for latents of 512 and rotated keys of 64 dimensions in BF16. Triton
gives every warp group all scores of a tile, in instructions of 16 keys, which keeps the tensor cores waiting; here the
two groups divide the keys of the scores, then the dimensions of the output. Queries, two tiles of 64 latents and their
weights fill an SM's shared memory.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from emberline.kernels.gpu.launch import cdiv

LATENT, ROPE = 512, 64
KEYS, QUERIES, WARPS = 64, 64, 8  # of a program: keys at a time, queries, warps that compute
_SHARED = gl.NVMMASharedLayout(128, 16, 2)
# Names of Triton 3.6, and of later versions:
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _load(
    q, kv, table, first_query, key_begin, n_tiles, last_block, rows_per_block, q_latent, q_rope, latents, keys, ready,
    free,
):  # fmt: skip
    """The loading warp: queries, then 64 keys at a time as the buffers become free, in blocks of 16 tokens.

    Blocks behind the last one read it again, and are masked.
    """
    mbarrier.expect(ready.index(2), 64 * 576 * 2)
    for p in gl.static_range(8):
        _copy(q, [first_query, p * 64], ready.index(2), q_latent.slice(p * 64, 64, dim=1))
    _copy(q, [first_query, 512], ready.index(2), q_rope)
    for i in range(n_tiles):
        buffer, phase = i % 2, i // 2 % 2
        mbarrier.wait(free.index(buffer), phase ^ 1)
        mbarrier.expect(ready.index(buffer), 64 * 576 * 2)
        for j in gl.static_range(4):
            row = gl.load(table + gl.minimum(key_begin // 16 + i * 4 + j, last_block)) * rows_per_block
            to = latents.index(buffer).slice(j * 16, 16, dim=0)
            for p in gl.static_range(8):
                _copy(kv, [row, p * 64], ready.index(buffer), to.slice(p * 64, 64, dim=1))
            _copy(kv, [row, 512], ready.index(buffer), keys.index(buffer).slice(j * 16, 16, dim=0))


@gluon.jit
def _attend(
    out, partial, stats, scale, start, n, context, query_tile, split, n_splits, first_partial, key_begin, key_end,
    n_tiles, q_latent, q_rope, latents, keys, weights_memory, ready, free, HEADS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """The two warp groups that compute."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    m = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores_layout))
    position = context - n + query_tile * TOKENS + m // HEADS
    t = gl.arange(0, 64, gl.SliceLayout(0, scores_layout))
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
    denom = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, scores_layout))
    zeros = gl.full([64, 64], 0.0, gl.float32, scores_layout)
    acc = gl.full([64, 512], 0.0, gl.float32, out_layout)
    mbarrier.wait(ready.index(2), 0)
    for i in range(n_tiles):
        buffer, phase = i % 2, i // 2 % 2
        mbarrier.wait(ready.index(buffer), phase)
        scores = warpgroup_mma(q_latent, latents.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_rope, keys.index(buffer).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
        key = key_begin + i * 64 + t
        visible = (key < key_end)[None, :]
        if TOKENS > 1:
            visible = visible & (key[None, :] <= position[:, None])
        scores = gl.where(visible, scores, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(scores, 1))
        safe_max = new_max
        if TOKENS > 1:
            safe_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        weights = gl.exp2(scores - safe_max[:, None])
        rescale = gl.exp2(row_max - safe_max)
        denom = denom * rescale + gl.sum(weights, 1)
        row_max = new_max
        weights_memory.store(weights.to(gl.bfloat16))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(weights_memory, latents.index(buffer), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _barrier()  # both warp groups have read the buffer
        mbarrier.arrive(free.index(buffer), count=1)
    d = gl.arange(0, 512, gl.SliceLayout(0, out_layout))
    mo = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, out_layout))
    if n_splits == 1:
        safe_denom = gl.where(denom == 0.0, 1.0, denom)
        result = acc / gl.convert_layout(safe_denom, gl.SliceLayout(1, out_layout))[:, None]
        exists = (mo < TOKENS * HEADS) & (query_tile * TOKENS + mo // HEADS < n)
        rows = ((start + query_tile * TOKENS) * HEADS + mo).to(gl.int64) * 512
        gl.store(out + rows[:, None] + d[None, :], result.to(gl.bfloat16), mask=exists[:, None])
    else:
        first = (first_partial + split).to(gl.int64) * (gl.num_programs(0) * 64)
        gl.store(partial + ((first + mo) * 512)[:, None] + d[None, :], acc)
        gl.store(stats + (first + m) * 2, row_max)
        gl.store(stats + (first + m) * 2 + 1, denom)


@gluon.jit(do_not_specialize=["table_stride", "rows_per_block", "query_starts", "context_lens"])
def _latent_attention_hopper(
    q, kv, out, tables, items, query_starts, context_lens, partial, stats, scale, rows_per_block, table_stride,
    HEADS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    entry = items + gl.program_id(1) * 8
    row = gl.load(entry)
    if row >= 0:
        query_tile, split, n_splits = gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        tiles_per_split, first_partial = gl.load(entry + 4), gl.load(entry + 5)
        start = gl.load(query_starts + row)
        n = gl.load(query_starts + row + 1) - start
        context = gl.load(context_lens + row)
        end = context - n + gl.minimum(query_tile * TOKENS + TOKENS, n)
        key_begin = split * tiles_per_split * 64
        key_end = gl.minimum(key_begin + tiles_per_split * 64, end)
        table = tables + row.to(gl.int64) * table_stride
        last_block = (gl.maximum(key_end, 1) - 1) // 16
        first_query = (start + query_tile * TOKENS) * HEADS + gl.program_id(0) * 64
        n_tiles = gl.cdiv(gl.maximum(key_end - key_begin, 0), 64)
        q_latent = gl.allocate_shared_memory(gl.bfloat16, [64, 512], SHARED)
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
        latents = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED)
        keys = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
        weights_memory = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
        ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(3):
            mbarrier.init(ready.index(i), count=1)
        for i in gl.static_range(2):
            mbarrier.init(free.index(i), count=1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_attend, (out, partial, stats, scale, start, n, context, query_tile, split, n_splits, first_partial,
                           key_begin, key_end, n_tiles, q_latent, q_rope, latents, keys, weights_memory, ready, free,
                           HEADS, TOKENS)),
                (_load, (q, kv, table, first_query, key_begin, n_tiles, last_block, rows_per_block, q_latent, q_rope,
                         latents, keys, ready, free)),
            ],
            [1], [24],
        )  # fmt: skip


def latent_attention_hopper(
    q: Tensor, out: Tensor, scale: float, pool: Tensor, tables: Tensor, query_starts: Tensor, context_lens: Tensor,
    items: Tensor, tile_tokens: int, partial: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    """items: of `LatentSplits`, for tiles of KEYS keys; scale: base 2; other tensors as in `latent_attention`.

    Reads whole blocks, also the tokens of the last one that are not written yet: they must be finite.
    """
    tokens, heads, width = q.shape
    rows_per_block = pool.stride(0) // width
    rows = pool.as_strided(((pool.shape[0] - 1) * rows_per_block + 16, width), (width, 1))
    kv = TensorDescriptor(rows, list(rows.shape), [width, 1], [16, 64], _SHARED)
    queries = TensorDescriptor(q, [tokens * heads, width], [width, 1], [64, 64], _SHARED)
    _latent_attention_hopper[(cdiv(tile_tokens * heads, QUERIES), len(items))](
        queries, kv, out, tables, items, query_starts, context_lens, partial, stats, scale, rows_per_block,
        tables.stride(0), HEADS=heads, TOKENS=tile_tokens, num_warps=WARPS,
    )  # fmt: skip
