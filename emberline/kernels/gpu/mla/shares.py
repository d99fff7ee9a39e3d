# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Decode context parallelism of MLA on a GPU: what ranks that divide the tokens of a block exchange in a layer.

Absorbed queries are gathered, so that a rank attends for the heads of the whole group to its own tokens; the results go
to the ranks of their heads with their log-sum-exp in the same rows, and are merged there. A chunk that attends expanded
gathers the latents of its context instead: up to some hundred thousand tokens they are fewer bytes than the queries
and results of a thousand new tokens, and every rank needs only its own heads' keys and values of them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.collectives import Collectives
from emberline.kernels.gpu.launch import launch_options, next_power_of_two
from emberline.kernels.gpu.mla.attention import LSE_ROOM
from emberline.kernels.token_share import TokenShare
from emberline.protocol.block_hash import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class LatentShares:
    """A rank's group."""

    group: Collectives

    @property
    def own(self) -> TokenShare:
        return TokenShare(self.group.rank, self.group.size)

    def contexts(self, context_lens: Tensor) -> Tensor:
        """Tokens of each row that the rank attends to; 1 at least, so that rows of which it has none get a result."""
        return torch.where(context_lens > 0, self.own.kept(context_lens).clamp(min=1), 0).int()

    def gather_rows(self, pool: Tensor, table: Tensor, first: int, tokens: int, memory: Tensor) -> Tensor:
        """Cached rows of the blocks that hold tokens first .. first + tokens - 1: [ranks, rows of a rank, width].

        pool: one layer's, [blocks, 1, 1, tokens of a rank, width]; memory: `gathered_elements`.
        """
        begin, end = first // BLOCK_TOKENS, -(-(first + tokens) // BLOCK_TOKENS)
        share, width = self.own, pool.shape[-1]
        rows = (end - begin) * share.tokens
        own = memory[: rows * width].view(end - begin, share.tokens, width)
        torch.index_select(pool[:, 0, 0], 0, table[begin:end], out=own)
        everyone = memory[rows * width : rows * width * (1 + share.size)].view(share.size, rows, width)
        return self.group.all_gather(own.view(rows, width), everyone)


def gathered_elements(tokens: int, width: int, ranks: int) -> int:
    """Memory of `gather_rows` for any `tokens` tokens in a row."""
    rows = (tokens // BLOCK_TOKENS + 2) * (BLOCK_TOKENS // ranks)
    return rows * width * (1 + ranks)


@triton.jit(do_not_specialize=["rows"])
def _merge_shares(parts, lse, out, rows, SHARES: tl.constexpr, WIDTH: tl.constexpr, LSE_STRIDE: tl.constexpr,
                  LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, RANKS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rank, d = tl.arange(0, RANKS), tl.arange(0, LATENT_PAD)
    at = rank * rows.to(tl.int64) + row
    sums = tl.load(lse + at * LSE_STRIDE, mask=rank < SHARES, other=float("-inf"))
    largest = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(largest == float("-inf"), 0.0, largest))
    weights = weights / tl.maximum(tl.sum(weights, 0), 1e-30)
    mask = (rank < SHARES)[:, None] & (d < LATENT)[None, :]
    values = tl.load(parts + (at * WIDTH)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * LATENT + d, tl.sum(values * weights[:, None], 0).to(out.dtype.element_ty), mask=d < LATENT)


def merge_shares(parts: Tensor, out: Tensor) -> None:
    """parts: [ranks, tokens, heads, latent + LSE_ROOM], from each rank as `latent_attention` wrote it; out: [tokens,
    heads, latent]."""
    ranks, tokens, heads, width = parts.shape
    latent, words = width - LSE_ROOM, parts.element_size()
    lse = parts.view(torch.float32).flatten()[latent * words // 4 :]
    if tokens:
        _merge_shares[(tokens * heads,)](
            parts, lse, out, tokens * heads, SHARES=ranks, WIDTH=width, LSE_STRIDE=width * words // 4, LATENT=latent,
            LATENT_PAD=next_power_of_two(latent), RANKS=next_power_of_two(ranks), **launch_options(False, num_warps=4),
        )  # fmt: skip
