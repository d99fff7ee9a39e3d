"""The part of each KV block's tokens that a rank keeps under decode context parallelism: see `context_parallel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from emberline.protocol.block_hash import BLOCK_TOKENS

if TYPE_CHECKING:
    from torch import Tensor


class TokenShare(NamedTuple):
    """The part of each block's tokens that a rank keeps."""

    rank: int = 0
    size: int = 1  # ranks; divides BLOCK_TOKENS

    @property
    def tokens(self) -> int:
        """Return how many tokens of a block the rank keeps."""
        return BLOCK_TOKENS // self.size

    @property
    def span(self) -> tuple[int, int]:
        """Return the places in a block of the first token that the rank keeps, and after the last."""
        return self.rank * self.tokens, (self.rank + 1) * self.tokens

    def kept(self, n: Tensor) -> Tensor:
        """Return how many of the first n tokens of a sequence the rank keeps."""
        return n // BLOCK_TOKENS * self.tokens + (n % BLOCK_TOKENS - self.span[0]).clamp(0, self.tokens)

    def keeps(self, positions: Tensor) -> Tensor:
        return positions % BLOCK_TOKENS // self.tokens == self.rank


WHOLE_BLOCKS = TokenShare()
