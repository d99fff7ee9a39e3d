"""Prompt tokens that a step scores: from the rows of a plan to tensors, and back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.core.plan import Row, RowScores
from emberline.kernels.prompt_logprobs import ScoredTokens
from emberline.protocol.request import EngineRequest

AT_ONCE = 64  # scored tokens whose logits exist at the same time: 40 MB where a vocabulary has 150,000 tokens


class ScoredPrompt(NamedTuple):
    """The prompt of a sequence whose tokens are scored, and how many alternatives of each are wanted."""

    ids: NDArray[np.uint32]
    n_top: int

    @classmethod
    def of(cls, request: EngineRequest) -> "ScoredPrompt | None":
        """The prompt of a request. Returns None if it is not scored."""
        n_top = request.sampling.prompt_logprobs
        return None if n_top is None else cls(np.frombuffer(request.prompt_ids, "<u4"), n_top)


class ScoredRow(NamedTuple):
    """A row with `n_scored`: where its first token is among the step's, and its sequence's prompt."""

    row: Row
    first: int
    prompt: ScoredPrompt


class StepScores:
    """What one step scores: the tokens on the device, then the results on the host."""

    def __init__(self, rows: Sequence[ScoredRow], device: torch.device, at_once: int = AT_ONCE) -> None:
        """at_once: scored tokens for whose logits there is memory at the same time."""
        self._rows = rows
        tokens = np.concatenate([np.arange(first, first + row.n_scored) for row, first, _ in rows])
        next_ids = np.concatenate([prompt.ids[row.start + 1 :][: row.n_scored] for row, _, prompt in rows])
        n_top = max(prompt.n_top for _, _, prompt in rows)
        places = torch.from_numpy(tokens.astype(np.int64)).to(device)
        targets = torch.from_numpy(next_ids.astype(np.int64)).to(device)
        self.tokens = ScoredTokens.of(places, targets, n_top, min(at_once, AT_ONCE))
        self._columns: list[Tensor] = []

    def fetch(self) -> None:
        """Queue the copies to the host, behind the forward pass."""
        found = self.tokens
        for column in (found.logprobs, found.ranks, found.top_ids, found.top_logprobs):
            to = torch.empty(column.shape, dtype=column.dtype, pin_memory=column.device.type == "cuda")
            self._columns.append(to.copy_(column, non_blocking=True))

    def read(self) -> list[RowScores]:
        """The results of each row, once the copies are done."""
        logprobs, ranks, top_ids, top_logprobs = (column.numpy() for column in self._columns)
        found, at = list[RowScores](), 0
        for row, _, prompt in self._rows:
            part, k = slice(at, at + row.n_scored), prompt.n_top
            at += row.n_scored
            found.append(RowScores(logprobs[part], ranks[part], top_ids[part, :k], top_logprobs[part, :k]))
        return found
