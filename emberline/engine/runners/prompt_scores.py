"""Prompt tokens that a step scores: from the rows of a plan to arrays, and back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


def scored_tokens(rows: Sequence[ScoredRow]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """The rows' scored tokens, as indices into the step's, the tokens after them, and the most alternatives wanted."""
    tokens = np.concatenate([np.arange(first, first + row.n_scored) for row, first, _ in rows])
    next_ids = np.concatenate([prompt.ids[row.start + 1 :][: row.n_scored] for row, _, prompt in rows])
    return tokens.astype(np.int64), next_ids.astype(np.int64), max(prompt.n_top for _, _, prompt in rows)


def row_scores(
    rows: Sequence[ScoredRow],
    logprobs: NDArray[np.float32],
    ranks: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logprobs: NDArray[np.float32],
) -> list[RowScores]:
    """Divide the scores of all scored tokens among the rows."""
    found, at = list[RowScores](), 0
    for row, _, prompt in rows:
        part, k = slice(at, at + row.n_scored), prompt.n_top
        at += row.n_scored
        found.append(RowScores(logprobs[part], ranks[part], top_ids[part, :k], top_logprobs[part, :k]))
    return found


class StepScores:
    """Scores of one step on the host."""

    def __init__(self, rows: Sequence[ScoredRow]) -> None:
        self._rows = rows
        self.tokens = ScoredTokens.of(*scored_tokens(rows), AT_ONCE)

    def read(self) -> list[RowScores]:
        """The scores of each row, after the forward pass."""
        found = self.tokens
        return row_scores(self._rows, found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
