"""Decode context parallelism (DCP): the ranks of a group divide the tokens of the latent (MLA) KV cache.

All heads read a token's one latent, so under tensor parallelism every rank would keep all of them. With DCP a rank
keeps some tokens of each block, and attends to those for the heads of the whole group:

    gather queries ── attend to own tokens ── exchange outputs and log-sum-exps by head ── merge

Rank r of n keeps tokens r * 16 / n up to (r + 1) * 16 / n of every block of 16. So all ranks have all blocks, under the
same numbers: one block table, prefix index and scheduler serve any n, and a block is n times smaller. Whole blocks in
turn (block j on rank j mod n) would keep 16 tokens together, which suits TMA loads, but would need a pool of blocks for
each rank, and short sequences, which have few blocks, would fill that of the first rank only.

On a rank, the tokens that it has of a sequence are numbered without gaps: with n per block, token i is row i % n of
block i / n.
"""

import torch
from torch import Tensor

from emberline.kernels.collectives import Collectives
from emberline.kernels.token_share import TokenShare
from emberline.protocol.block_hash import BLOCK_TOKENS


def merge_shares(outputs: Tensor, lse: Tensor) -> Tensor:
    """Attention over all tokens, from that over each rank's: outputs [ranks, ..., dim], lse [ranks, ...], natural.

    A rank that has none of the tokens gives -inf.
    """
    total = lse.logsumexp(0)
    weights = torch.where(lse.isneginf(), 0.0, (lse - total).exp())
    return (outputs * weights[..., None]).sum(0)


def kept_positions(share: TokenShare, n_blocks: int) -> Tensor:
    """Positions of the tokens that a rank keeps of `n_blocks` blocks, in order."""
    within = torch.arange(*share.span)
    return (torch.arange(n_blocks)[:, None] * BLOCK_TOKENS + within).flatten()


def attend_to_shares(
    dcp: Collectives, queries: Tensor, rows: Tensor, pool: Tensor, table: Tensor, positions: Tensor, scale: float,
    kv_lora: int,
) -> Tensor:  # fmt: skip
    """Latents [n, heads, kv_lora] for the absorbed queries [n, heads, width] of a row's new tokens, the reference.

    rows: what the new tokens leave in the cache, [n, width]; pool: [blocks, tokens, width]; table, positions: int64.
    """
    share = TokenShare(dcp.rank, dcp.size)
    own = share.keeps(positions)
    at = positions[own]
    pool[table[at // BLOCK_TOKENS], at % share.tokens] = rows[own].to(pool.dtype)
    n_blocks = int(positions[-1]) // BLOCK_TOKENS + 1
    cached = pool[table[:n_blocks]].flatten(0, 1).float()
    visible = kept_positions(share, n_blocks).to(positions.device) <= positions[:, None]  # [n, cached]
    scores = torch.einsum("rnhw,kw->rnhk", dcp.all_gather(queries.contiguous()).float(), cached) * scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = torch.where(lse.isneginf(), 0.0, (scores - lse).exp())
    parts = dcp.exchange(torch.cat([weights @ cached[:, :kv_lora], lse], -1))
    return merge_shares(parts[..., :-1], parts[..., -1]).to(queries.dtype)
