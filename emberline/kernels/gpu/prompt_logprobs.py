"""Log-probabilities of prompt tokens on a GPU: `kernels.prompt_logprobs` in tensors of the device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class DeviceScoredTokens:
    """Tokens of a step after which the next token is known, and room on the device for their scores."""

    tokens: Tensor  # int64 [scored], indices into the step's tokens
    next_ids: Tensor  # int64 [scored]
    at_once: int  # of these, whose logits exist at the same time
    logprobs: Tensor  # float32 [scored]
    ranks: Tensor  # int32 [scored]; 1: no token is more likely
    top_ids: Tensor  # int32 [scored, k]
    top_logprobs: Tensor  # float32 [scored, k]

    @classmethod
    def of(cls, tokens: Tensor, next_ids: Tensor, n_top: int, at_once: int) -> "DeviceScoredTokens":
        """Tokens whose results are not known yet, with the n_top most likely alternatives of each."""
        n, device = len(tokens), tokens.device
        found = torch.empty(n, dtype=torch.float32, device=device), torch.empty(n, dtype=torch.int32, device=device)
        top_ids = torch.empty(n, n_top, dtype=torch.int32, device=device)
        top_logprobs = torch.empty(n, n_top, dtype=torch.float32, device=device)
        return cls(tokens, next_ids, at_once, *found, top_ids, top_logprobs)

    def pieces(self) -> list[slice]:
        """Parts whose logits are computed one after the other."""
        return [slice(at, at + self.at_once) for at in range(0, len(self.tokens), self.at_once)]

    def take(self, piece: slice, logits: Tensor) -> None:
        """Take in the logits of a part, float32 [tokens, vocab]."""
        chosen = logits.gather(1, self.next_ids[piece, None])
        total = logits.logsumexp(1, keepdim=True)
        self.logprobs[piece] = (chosen - total)[:, 0]
        self.ranks[piece] = 1 + (logits > chosen).sum(1, dtype=torch.int32)
        if n_top := self.top_ids.shape[1]:
            values, ids = logits.topk(n_top, dim=1)
            self.top_ids[piece], self.top_logprobs[piece] = ids.int(), values - total
