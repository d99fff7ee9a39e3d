"""Prompt tokens that a step scores on a GPU: copied to the device, and their scores back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.engine.core.plan import RowScores
from emberline.engine.runners.prompt_scores import AT_ONCE, ScoredRow, row_scores, scored_tokens
from emberline.kernels.gpu.prompt_logprobs import DeviceScoredTokens


class DeviceStepScores:
    """Scores of one step: the tokens on the device, then the scores on the host."""

    def __init__(self, rows: Sequence[ScoredRow], device: torch.device, at_once: int) -> None:
        """at_once: scored tokens for whose logits there is memory at the same time."""
        self._rows = rows
        tokens, next_ids, n_top = scored_tokens(rows)
        places, targets = (torch.from_numpy(ids).to(device) for ids in (tokens, next_ids))
        self.tokens = DeviceScoredTokens.of(places, targets, n_top, min(at_once, AT_ONCE))
        self._columns: list[Tensor] = []

    def fetch(self) -> None:
        """Queue the copies to the host after the forward pass."""
        found = self.tokens
        for column in (found.logprobs, found.ranks, found.top_ids, found.top_logprobs):
            to = torch.empty(column.shape, dtype=column.dtype, pin_memory=column.device.type == "cuda")
            self._columns.append(to.copy_(column, non_blocking=True))

    def read(self) -> list[RowScores]:
        """The scores of each row, once the copies are done."""
        logprobs, ranks, top_ids, top_logprobs = (column.numpy() for column in self._columns)
        return row_scores(self._rows, logprobs, ranks, top_ids, top_logprobs)
