# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Expanded MLA of prefill chunks: keys and values of every head, from cached latents, for an attention library.

From some tens of new tokens on this takes fewer operations than absorbed attention, and libraries are faster at it. The
chunk attends to itself under a causal mask, then to its context in segments as large as the workspace holds expanded;
the results are merged by their log-sum-exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import LatentAttention
from emberline.kernels.gpu.gathered_kv import merge_by_lse
from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two
from emberline.kernels.gpu.long_attention import LongAttention

MIN_TOKENS = 64  # new tokens of a chunk
MAX_EXPANDED_BYTES = 512 << 20  # of keys and values
MAX_EXPANDED_TOKENS = 1 << 16


def expanded_tokens(heads: int, q_dim: int, v_dim: int, item: int) -> int:
    """Of a segment: as many as MAX_EXPANDED_BYTES hold."""
    return min(MAX_EXPANDED_TOKENS, MAX_EXPANDED_BYTES // (heads * (q_dim + v_dim) * item) // 16 * 16)


def expanded_elements(heads: int, q_dim: int, v_dim: int, latent: int, item: int) -> int:
    """Memory of a segment: latents, expanded keys and expanded values."""
    return expanded_tokens(heads, q_dim, v_dim, item) * (latent + heads * (q_dim + v_dim))


@triton.jit(do_not_specialize=["first", "tokens"])
def _gather_latents(
    pool, table, out, keys, first, tokens, block_stride, HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, HEADS_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE tokens: their latents to `out`, and their rotated keys to the end of every head's key in `keys`."""
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = t < tokens
    token = first + t
    block = tl.load(table + token // 16, mask=exists, other=0).to(tl.int64)
    rows = pool + block * block_stride + (token % 16) * (LATENT + ROPE)
    d, r = tl.arange(0, LATENT_PAD), tl.arange(0, ROPE_PAD)
    mask = exists[:, None] & (d < LATENT)[None, :]
    wide = t.to(tl.int64)
    tl.store(
        out + (wide * LATENT)[:, None] + d[None, :],
        tl.load(rows[:, None] + d[None, :], mask=mask, other=0.0),
        mask=mask,
    )
    mask = exists[:, None] & (r < ROPE)[None, :]
    key = tl.load(rows[:, None] + LATENT + r[None, :], mask=mask, other=0.0)
    for begin in range(0, HEADS, HEADS_TILE):
        h = begin + tl.arange(0, HEADS_TILE)
        targets = keys + ((wide * HEADS)[:, None] + h[None, :]) * (NOPE + ROPE) + NOPE
        head_mask = mask[:, None, :] & (h < HEADS)[None, :, None]
        tl.store(
            targets[:, :, None] + r[None, None, :],
            key[:, None, :].broadcast_to(TILE, HEADS_TILE, ROPE_PAD),
            mask=head_mask,
        )


def expand_latents(
    attn: LatentAttention, pool: Tensor, table: Tensor, first: int, tokens: int, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """k [tokens, heads, nope + rope] and v [tokens, heads, v_dim] of cached tokens first .. first + tokens - 1.

    pool: as in `latent_attention`; table: int32 [blocks] of their row; memory: `expanded_elements`.
    """
    heads, q_dim = attn.heads, attn.nope_dim + attn.rope_dim
    sizes = [tokens * attn.kv_lora, tokens * heads * q_dim, tokens * heads * attn.v_dim]
    flat = torch.split(memory[: sum(sizes)], sizes)
    latents, k = flat[0].view(tokens, attn.kv_lora), flat[1].view(tokens, heads, q_dim)
    v = flat[2].view(tokens, heads, attn.v_dim)
    _gather_latents[(cdiv(tokens, 16),)](
        pool, table, latents, k, first, tokens, pool.stride(0), HEADS=heads, NOPE=attn.nope_dim, LATENT=attn.kv_lora,
        LATENT_PAD=next_power_of_two(attn.kv_lora), ROPE=attn.rope_dim, ROPE_PAD=next_power_of_two(attn.rope_dim),
        HEADS_TILE=min(8, next_power_of_two(heads)), TILE=16, **launch_options(False, num_warps=4),
    )  # fmt: skip
    shared = latents.expand(heads, *latents.shape)
    torch.bmm(shared, attn.k_up.transpose(1, 2), out=k[..., : attn.nope_dim].transpose(0, 1))
    torch.bmm(shared, attn.v_up.transpose(1, 2), out=v.transpose(0, 1))
    return k, v


def attend_expanded(
    q: Tensor, attn: LatentAttention, library: LongAttention, pool: Tensor, table: Tensor, context: int, memory: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Attention of one chunk. q: [n, heads, nope + rope], rotated; out: [n, heads, v_dim], contiguous.

    context: length with the chunk included, all of it cached.
    """
    per_token = attn.kv_lora + attn.heads * (attn.nope_dim + attn.rope_dim + attn.v_dim)
    capacity = memory.numel() // per_token
    first = context - len(q)
    for begin in range(0, len(q), capacity):  # one turn, but for very many heads
        queries, merged = q[begin : begin + capacity], out[begin : begin + capacity]
        n, before = len(queries), first + begin
        _, lse = library.forward(
            queries, *expand_latents(attn, pool, table, before, n, memory), attn.scale, True, merged
        )
        for start in range(0, before, capacity):
            k, v = expand_latents(attn, pool, table, start, min(capacity, before - start), memory)
            other, other_lse = library.forward(queries, k, v, attn.scale, False)
            merge_by_lse(merged, lse, other.contiguous(), other_lse)
            del other
