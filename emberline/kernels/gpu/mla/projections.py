# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The small products of absorbed MLA, one per head, and what is done to new tokens before attention.

`absorb_queries` is one launch: each head's query times `k_up`, RoPE of its other part, and for every token the norm of
its latent, RoPE of its key and the cache write. `rotate_and_cache` is the same without the product, in place, for
chunks that attend expanded. `project_values` is each head's latent times `v_up`.
"""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import LatentAttention
from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two, pdl_launch_early, pdl_wait
from emberline.kernels.token_share import WHOLE_BLOCKS, TokenShare


@triton.jit
def _rotated(head_ptrs, cosine, sine, mask, r, ROPE: tl.constexpr):
    """Rows at `head_ptrs` [rows, 1], rotated by the rows of the tables at `cosine`, `sine` [rows, 1]: float32."""
    HALF: tl.constexpr = ROPE // 2
    partner = tl.where(r < HALF, r + HALF, r - HALF)
    mask = mask & (r < ROPE)[None, :]
    x = tl.load(head_ptrs + r[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head_ptrs + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cosine + (r % HALF)[None, :], mask=mask, other=0.0)
    sin = tl.load(sine + (r % HALF)[None, :], mask=mask, other=0.0)
    return x * cos + y * tl.where((r < HALF)[None, :], -sin, sin)


@triton.jit
def _find_row(token, query_starts, n_rows, ROWS: tl.constexpr):
    """A token's row, found by counting the row starts at or before it."""
    row = -1
    for first in range(0, n_rows, ROWS):
        i = first + tl.arange(0, ROWS)
        starts = tl.load(query_starts + i, mask=i < n_rows, other=2147483647)
        row += tl.sum((starts <= token).to(tl.int32))
    return row


@triton.jit
def _cache_latent(
    kv, norm, cosine, sine, pool, table, positions, token, kv_stride, block_stride, eps, first_token,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm of one token's latent and RoPE of its key, written to the cache of the row with this block table.

    A rank may have BLOCK tokens of each block only, from `first_token` on.
    """
    d, r = tl.arange(0, LATENT_PAD), tl.arange(0, ROPE_PAD)
    source = kv + token.to(tl.int64) * kv_stride
    x = tl.load(source + d, mask=d < LATENT, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps)
    latent = x * inverse_rms * tl.load(norm + d, mask=d < LATENT, other=0.0)
    one = tl.arange(0, 1)[:, None]
    half = token.to(tl.int64) * (ROPE // 2)
    key = _rotated(source + LATENT + one, cosine + half + one, sine + half + one, one < 1, r, ROPE)
    position = tl.load(positions + token)
    within = position % 16
    latent_mask, key_mask = d < LATENT, (r < ROPE)[None, :]
    if BLOCK < 16:
        within -= first_token
        kept = (within >= 0) & (within < BLOCK)
        latent_mask, key_mask = d < tl.where(kept, LATENT, 0), (r < tl.where(kept, ROPE, 0))[None, :]
    slot = pool + tl.load(table + position // 16).to(tl.int64) * block_stride + within * (LATENT + ROPE)
    dtype = pool.dtype.element_ty
    tl.store(slot + d, latent.to(dtype), mask=latent_mask)
    tl.store(slot + LATENT + r[None, :] + one, key.to(dtype), mask=key_mask)


@triton.jit(
    do_not_specialize=["tokens", "n_rows", "table_stride", "query_starts", "context_lens", "positions", "first_token"]
)
def _absorb_queries(
    q, k_up, out, kv, norm, cosine, sine, pool, tables, query_starts, context_lens, positions, tokens, n_rows,
    q_stride, kv_stride, up_head_stride, up_stride, block_stride, table_stride, eps, first_token, HEADS: tl.constexpr,
    NOPE: tl.constexpr, NOPE_TILE: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    first = tl.program_id(1) * TOKENS
    if head < HEADS:
        token = first + tl.arange(0, TOKENS)
        mask = (token < tokens)[:, None]
        k, d = tl.arange(0, NOPE_TILE), tl.program_id(2) * DIMS + tl.arange(0, DIMS)
        up = k_up + head.to(tl.int64) * up_head_stride + d[None, :]
        source = q + token.to(tl.int64)[:, None] * q_stride + head * (NOPE + ROPE)
        acc = tl.zeros([TOKENS, DIMS], tl.float32)
        # The first tile of weights, which no kernel writes, is loaded while the previous kernel ends.
        weights = tl.load(up + (k * up_stride)[:, None], mask=(k < NOPE)[:, None] & (d < LATENT)[None, :], other=0.0)
        pdl_wait(PDL)
        pdl_launch_early(PDL)
        for begin in tl.static_range(0, NOPE, NOPE_TILE):
            x = tl.load(source + (begin + k)[None, :], mask=mask & (begin + k < NOPE)[None, :], other=0.0)
            acc = tl.dot(x, weights, acc)
            if begin + NOPE_TILE < NOPE:
                following = begin + NOPE_TILE + k
                weights = tl.load(
                    up + (following * up_stride)[:, None],
                    mask=(following < NOPE)[:, None] & (d < LATENT)[None, :], other=0.0,
                )  # fmt: skip
        target = out + (token.to(tl.int64) * HEADS + head)[:, None] * (LATENT + ROPE)
        dtype = out.dtype.element_ty
        tl.store(target + d[None, :], acc.to(dtype), mask=mask & (d < LATENT)[None, :])
        if tl.program_id(2) == 0:
            r = tl.arange(0, ROPE_PAD)
            half = token.to(tl.int64)[:, None] * (ROPE // 2)
            rotated = _rotated(source + NOPE, cosine + half, sine + half, mask, r, ROPE)
            tl.store(target + LATENT + r[None, :], rotated.to(dtype), mask=mask & (r < ROPE)[None, :])
    else:  # a program for each token of the tile
        pdl_wait(PDL)
        pdl_launch_early(PDL)
        within = (head - HEADS) * tl.num_programs(2) + tl.program_id(2)
        if (within < TOKENS) & (first + within < tokens):
            row = _find_row(first + within, query_starts, n_rows, ROWS)
            if tl.load(context_lens + row) > 0:  # else padding
                _cache_latent(
                    kv, norm, cosine, sine, pool, tables + row * table_stride.to(tl.int64), positions, first + within,
                    kv_stride, block_stride, eps, first_token, LATENT, LATENT_PAD, ROPE, ROPE_PAD, BLOCK,
                )  # fmt: skip


def absorb_queries(
    q: Tensor, kv: Tensor, out: Tensor, attn: LatentAttention, rotary: tuple[Tensor, Tensor], pool: Tensor,
    tables: Tensor, query_starts: Tensor, context_lens: Tensor, positions: Tensor, one_tile: bool = False,
    pdl: bool = False, share: TokenShare = WHOLE_BLOCKS,
) -> None:  # fmt: skip
    """Queries of all tokens of `q` [tokens, heads * (nope + rope)] to `out` [tokens, heads, latent + rope].

    kv: [tokens, latent + rope], not yet normed or rotated: written to the cache `pool`, [blocks, 1, 1, BLOCK_TOKENS,
    latent + rope]; rows with a context of 0 are padding. q and kv may be columns of a wider tensor.
    one_tile: the same for any number of tokens, so that no result depends on it. share: which tokens of a block the
    pool has.
    """
    tokens = len(q)
    if not tokens:
        return
    _check(attn, pool, share)
    tile = 16 if tokens <= 16 and not one_tile else 64
    pad = next_power_of_two(attn.kv_lora)
    dims = min(128, max(16, pad))
    dim_tiles = cdiv(attn.kv_lora, dims)
    grid = (attn.heads + cdiv(min(tile, tokens), dim_tiles), cdiv(tokens, tile), dim_tiles)
    _absorb_queries[grid](
        q, attn.k_up, out, kv, attn.kv_norm, *rotary, pool, tables, query_starts, context_lens, positions, tokens,
        query_starts.shape[0] - 1, q.stride(0), kv.stride(0), attn.k_up.stride(0), attn.k_up.stride(1), pool.stride(0),
        tables.stride(0), attn.eps, share.span[0], HEADS=attn.heads, NOPE=attn.nope_dim, BLOCK=share.tokens,
        NOPE_TILE=max(16, min(64, next_power_of_two(attn.nope_dim))), LATENT=attn.kv_lora, LATENT_PAD=pad,
        ROPE=attn.rope_dim, ROPE_PAD=max(16, next_power_of_two(attn.rope_dim)), TOKENS=tile, DIMS=dims, ROWS=128,
        PDL=int(pdl), **launch_options(pdl, num_warps=4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["positions", "first_token"])
def _rotate_and_cache(
    q, kv, norm, cosine, sine, pool, table, positions, q_stride, kv_stride, block_stride, eps, first_token,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    pdl_wait(PDL)
    token = tl.program_id(0)
    r, h = tl.arange(0, ROPE_PAD), tl.arange(0, HEADS_PAD)[:, None]
    half = token.to(tl.int64) * (ROPE // 2) + h * 0
    heads = q + token.to(tl.int64) * q_stride + h * (NOPE + ROPE) + NOPE
    rotated = _rotated(heads, cosine + half, sine + half, h < HEADS, r, ROPE)
    tl.debug_barrier()  # every thread has read before any writes
    tl.store(heads + r[None, :], rotated.to(q.dtype.element_ty), mask=(h < HEADS) & (r < ROPE)[None, :])
    _cache_latent(
        kv, norm, cosine, sine, pool, table, positions, token, kv_stride, block_stride, eps, first_token, LATENT,
        LATENT_PAD, ROPE, ROPE_PAD, BLOCK,
    )  # fmt: skip


def rotate_and_cache(
    q: Tensor, kv: Tensor, attn: LatentAttention, rotary: tuple[Tensor, Tensor], pool: Tensor, table: Tensor,
    positions: Tensor, pdl: bool = False, share: TokenShare = WHOLE_BLOCKS,
) -> None:  # fmt: skip
    """Tokens of one row, whose block table is `table`: RoPE of `q` in place, and their rows of the cache.

    Other tensors as in `absorb_queries`.
    """
    _check(attn, pool, share)
    _rotate_and_cache[(len(q),)](
        q, kv, attn.kv_norm, *rotary, pool, table, positions, q.stride(0), kv.stride(0), pool.stride(0), attn.eps,
        share.span[0], BLOCK=share.tokens, HEADS=attn.heads, HEADS_PAD=next_power_of_two(attn.heads),
        NOPE=attn.nope_dim, LATENT=attn.kv_lora,
        LATENT_PAD=next_power_of_two(attn.kv_lora), ROPE=attn.rope_dim, ROPE_PAD=next_power_of_two(attn.rope_dim),
        PDL=int(pdl), **launch_options(pdl, num_warps=4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _project_values(
    x, v_up, out, tokens, up_head_stride, up_stride, HEADS: tl.constexpr, LATENT: tl.constexpr, VALUES: tl.constexpr,
    TOKENS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    v, k = tl.program_id(2) * DIMS + tl.arange(0, DIMS), tl.arange(0, TILE)
    mask = (token < tokens)[:, None]
    up = v_up + head.to(tl.int64) * up_head_stride + (v * up_stride)[None, :]
    weights = tl.load(up + k[:, None], mask=(k < LATENT)[:, None] & (v < VALUES)[None, :], other=0.0)
    pdl_wait(PDL)
    pdl_launch_early(PDL)
    rows = x + (token.to(tl.int64) * HEADS + head)[:, None] * LATENT
    acc = tl.zeros([TOKENS, DIMS], tl.float32)
    for begin in tl.static_range(0, LATENT, TILE):
        latents = tl.load(rows + (begin + k)[None, :], mask=mask & (begin + k < LATENT)[None, :], other=0.0)
        acc = tl.dot(latents, weights, acc)
        if begin + TILE < LATENT:
            following = begin + TILE + k
            weights = tl.load(
                up + following[:, None], mask=(following < LATENT)[:, None] & (v < VALUES)[None, :], other=0.0
            )
    target = out + (token.to(tl.int64) * HEADS + head)[:, None] * VALUES + v[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask & (v < VALUES)[None, :])


def project_values(x: Tensor, v_up: Tensor, out: Tensor, one_tile: bool = False, pdl: bool = False) -> None:
    """x: [tokens, heads, latent], v_up: [heads, v_dim, latent] -> out: [tokens, heads * v_dim]."""
    tokens, heads, latent = x.shape
    if not tokens:
        return
    values = v_up.shape[1]
    tile, dims = (16, 32) if tokens <= 16 and not one_tile else (64, 64)
    dims = min(dims, max(16, next_power_of_two(values)))
    _project_values[(heads, cdiv(tokens, tile), cdiv(values, dims))](
        x, v_up, out, tokens, v_up.stride(0), v_up.stride(1), HEADS=heads, LATENT=latent, VALUES=values, TOKENS=tile,
        DIMS=dims, TILE=max(16, min(128, next_power_of_two(latent))), PDL=int(pdl),
        **launch_options(pdl, num_warps=4),
    )  # fmt: skip


def _check(attn: LatentAttention, pool: Tensor, share: TokenShare) -> None:
    width = attn.kv_lora + attn.rope_dim
    assert pool.stride()[3:] == (width, 1), "the rows of a block lie one after another"
    assert pool.shape[3] == share.tokens
    assert attn.k_up.stride(2) == attn.v_up.stride(2) == 1
