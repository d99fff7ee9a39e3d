# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Expanded MLA of prefill chunks: keys and values of every head, from cached latents, for an attention library.

From some tens of new tokens on this takes fewer operations than absorbed attention, and libraries are faster at it. The
chunk attends to itself under a causal mask, then to its context in segments as large as the workspace holds expanded;
the results are merged by their log-sum-exp. Under decode context parallelism a segment is gathered from all ranks.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import LatentAttention
from emberline.kernels.gpu.gathered_kv import merge_by_lse
from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two
from emberline.kernels.gpu.long_attention import LongAttention
from emberline.kernels.gpu.mla.shares import LatentShares, gathered_elements

MIN_TOKENS = 64  # new tokens of a chunk
MAX_EXPANDED_BYTES = 512 << 20  # of keys and values
MAX_EXPANDED_TOKENS = 1 << 16


def expanded_tokens(heads: int, q_dim: int, v_dim: int, item: int) -> int:
    """Return the tokens of a segment: as many as MAX_EXPANDED_BYTES hold."""
    return min(MAX_EXPANDED_TOKENS, MAX_EXPANDED_BYTES // (heads * (q_dim + v_dim) * item) // 16 * 16)


def expanded_elements(heads: int, q_dim: int, v_dim: int, latent: int, item: int, rope: int = 0, ranks: int = 1) -> int:
    """Memory of a segment: latents, expanded keys and expanded values; of several ranks also what they gather."""
    tokens = expanded_tokens(heads, q_dim, v_dim, item)
    gathered = gathered_elements(tokens, latent + rope, ranks) if ranks > 1 else 0
    return tokens * (latent + heads * (q_dim + v_dim)) + gathered


@triton.jit(do_not_specialize=["first", "tokens"])
def _gather_latents(
    pool, table, out, keys, first, tokens, block_stride, HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, HEADS_TILE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """TILE tokens: their latents to `out`, and their rotated keys to the end of every head's key in `keys`.

    BLOCK < 16: `pool` is what `LatentShares.gather_rows` gives, and `block_stride` the rows of a rank.
    """
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = t < tokens
    token = first + t
    if BLOCK == 16:
        block = tl.load(table + token // 16, mask=exists, other=0).to(tl.int64)
        rows = pool + block * block_stride + (token % 16) * (LATENT + ROPE)
    else:
        nth = token // 16 - first // 16
        at = token % 16 // BLOCK * block_stride.to(tl.int64) + nth * BLOCK + token % BLOCK
        rows = pool + at * (LATENT + ROPE)
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
    attn: LatentAttention, pool: Tensor, table: Tensor, first: int, tokens: int, memory: Tensor,
    shares: LatentShares | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """k [tokens, heads, nope + rope] and v [tokens, heads, v_dim] of cached tokens first .. first + tokens - 1.

    pool: as in `latent_attention`; table: int32 [blocks] of their row; memory: `expanded_elements`.
    shares: the pool has a rank's.
    """
    heads, block, stride = attn.heads, 16, pool.stride(0)
    if shares is not None:
        size = gathered_elements(tokens, pool.shape[-1], shares.own.size)
        pool = shares.gather_rows(pool, table, first, tokens, memory[-size:])
        block, stride = shares.own.tokens, pool.shape[1]
    latents, k, v = _expanded_views(attn, tokens, memory)
    _gather_latents[(cdiv(tokens, 16),)](
        pool, table, latents, k, first, tokens, stride, HEADS=heads, NOPE=attn.nope_dim, LATENT=attn.kv_lora,
        BLOCK=block, LATENT_PAD=next_power_of_two(attn.kv_lora), ROPE=attn.rope_dim,
        ROPE_PAD=next_power_of_two(attn.rope_dim),
        HEADS_TILE=min(8, next_power_of_two(heads)), TILE=16, **launch_options(False, num_warps=4),
    )  # fmt: skip
    shared = latents.expand(heads, *latents.shape)
    torch.bmm(shared, attn.k_up.transpose(1, 2), out=k[..., : attn.nope_dim].transpose(0, 1))
    torch.bmm(shared, attn.v_up.transpose(1, 2), out=v.transpose(0, 1))
    return k, v


def _expanded_views(attn: LatentAttention, tokens: int, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The start of the memory as latents [tokens, latent], keys and values by head."""
    heads, q_dim = attn.heads, attn.nope_dim + attn.rope_dim
    sizes = [tokens * attn.kv_lora, tokens * heads * q_dim, tokens * heads * attn.v_dim]
    latents, k, v = torch.split(memory[: sum(sizes)], sizes)
    return latents.view(tokens, attn.kv_lora), k.view(tokens, heads, q_dim), v.view(tokens, heads, attn.v_dim)


def attend_expanded(
    q: Tensor, attn: LatentAttention, library: LongAttention, pool: Tensor, table: Tensor, context: int, memory: Tensor,
    out: Tensor, shares: LatentShares | None = None,
) -> None:  # fmt: skip
    """Attention of one chunk. q: [n, heads, nope + rope], rotated; out: [n, heads, v_dim], contiguous.

    context: length with the chunk included, all of it cached.
    """
    capacity = _capacity(attn, memory, shares)
    first = context - len(q)
    for begin in range(0, len(q), capacity):  # one turn, but for very many heads
        queries, merged = q[begin : begin + capacity], out[begin : begin + capacity]
        n, before = len(queries), first + begin
        _, lse = library.forward(
            queries, *expand_latents(attn, pool, table, before, n, memory, shares), attn.scale, True, merged
        )
        for start in range(0, before, capacity):
            k, v = expand_latents(attn, pool, table, start, min(capacity, before - start), memory, shares)
            other, other_lse = library.forward(queries, k, v, attn.scale, False)
            merge_by_lse(merged, lse, other.contiguous(), other_lse)
            del other


def _capacity(attn: LatentAttention, memory: Tensor, shares: LatentShares | None) -> int:
    """Tokens of a segment."""
    per_token = attn.kv_lora + attn.heads * (attn.nope_dim + attn.rope_dim + attn.v_dim)
    if shares is None:
        return memory.numel() // per_token
    width, ranks = attn.kv_lora + attn.rope_dim, shares.own.size
    per_token += -(-width * (1 + ranks) // ranks)
    return (memory.numel() - gathered_elements(0, width, ranks)) // per_token // 16 * 16


def warm_up_expanded(queries: Tensor, attn: LatentAttention, library: LongAttention, memory: Tensor) -> Iterator[bool]:
    """Run the lengths to which a library that plans rounds chunks and segments, one per iteration.

    queries: [tokens, heads, nope + rope] of the longest chunk; memory: as in `attend_expanded`. Their values are read.
    """
    capacity = memory.numel() // (attn.kv_lora + attn.heads * (attn.nope_dim + attn.rope_dim + attn.v_dim))
    lengths = [MIN_TOKENS << i for i in range(24) if MIN_TOKENS << i <= capacity]
    chunks = [n for n in lengths if n <= len(queries)]
    cases = [(n, n, True) for n in chunks] + [(n, m, False) for n in chunks for m in lengths]
    for n, m, causal in cases if library.has_plans else cases[:1]:
        k, v = _expanded_views(attn, m, memory)[1:]
        library.forward(queries[:n], k, v, attn.scale, causal)
        yield True
