"""Log-probabilities of tokens that are known: of a prompt's tokens, by the logits before each of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.kernels.sampling import host_floats, log_softmax, most_likely


@dataclass(slots=True)
class ScoredTokens:
    """Tokens of a step after which the next token is known, and room on the host for their scores.

    `gpu.prompt_logprobs` scores on a GPU.
    """

    tokens: NDArray[np.int64]  # [scored], indices into the step's tokens
    next_ids: NDArray[np.int64]  # [scored]
    at_once: int  # of these, whose logits exist at the same time
    logprobs: NDArray[np.float32]  # [scored]
    ranks: NDArray[np.int32]  # [scored]; 1: no token is more likely
    top_ids: NDArray[np.int32]  # [scored, k]
    top_logprobs: NDArray[np.float32]  # [scored, k]

    @classmethod
    def of(cls, tokens: NDArray[np.int64], next_ids: NDArray[np.int64], n_top: int, at_once: int) -> "ScoredTokens":
        """Tokens whose scores are not known yet, with the n_top most likely alternatives of each."""
        n = len(tokens)
        found = np.empty(n, np.float32), np.empty(n, np.int32)
        return cls(tokens, next_ids, at_once, *found, np.empty((n, n_top), np.int32), np.empty((n, n_top), np.float32))

    def pieces(self) -> list[slice]:
        """Parts whose logits are computed one after the other."""
        return [slice(at, at + self.at_once) for at in range(0, len(self.tokens), self.at_once)]

    def take(self, piece: slice, logits: Any) -> None:
        """Score a part by its logits, [tokens, vocab]: an array, or a tensor of torch."""
        values = host_floats(logits)
        logprobs, next_ids = log_softmax(values), self.next_ids[piece, None]
        self.logprobs[piece] = np.take_along_axis(logprobs, next_ids, axis=1)[:, 0]
        self.ranks[piece] = 1 + (values > np.take_along_axis(values, next_ids, axis=1)).sum(1)
        if n_top := self.top_ids.shape[1]:
            self.top_ids[piece] = ids = most_likely(values, n_top)
            self.top_logprobs[piece] = np.take_along_axis(logprobs, ids, axis=1)
