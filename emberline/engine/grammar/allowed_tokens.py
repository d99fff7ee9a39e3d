"""Requests that allow some tokens only: the mask of a sequence is the same for each of its draws."""

import numpy as np
from numpy.typing import NDArray

from emberline.engine.core.feature import Feature
from emberline.engine.core.plan import Masks, StepPlan
from emberline.engine.core.sequence import Sequence
from emberline.protocol.errors import Unsupported
from emberline.protocol.request import EngineRequest


class AllowedTokens(Feature):
    """Owns the masks of sequences whose request has `allowed_ids`."""

    def __init__(self, vocab_size: int) -> None:
        self._n_words = -(-vocab_size // 32)
        self._masks: dict[int, NDArray[np.uint32]] = {}  # by sequence number

    def check(self, request: EngineRequest) -> None:
        """Refuse a grammar beside the tokens that are allowed: a draw has one mask."""
        if request.sampling.allowed_ids and request.grammar:
            message = "`allowed_token_ids` does not work together with structured output or forced tool calls"
            raise Unsupported(message, param="allowed_token_ids")

    def enter(self, seq: Sequence, now_s: float) -> None:
        """Make the mask of a sequence that has one."""
        if allowed := seq.request.sampling.allowed_ids:
            bits = np.zeros(32 * self._n_words, np.uint8)
            bits[list(allowed)] = 1
            self._masks[seq.number] = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def planned(self, plan: StepPlan) -> None:
        """Say whether some row samples under a mask."""
        if masks := self._masks:
            plan.masked |= any(row.samples and row.number in masks for row in plan.others)

    def masks(self, plan: StepPlan) -> Masks | None:
        """Masks of all draws of the rows that have one. Returns None if there are none."""
        known = self._masks
        if not known:
            return None
        places, bits = list[int](), list[NDArray[np.uint32]]()
        for row, place in zip(plan.others, plan.first_draws()[0]):
            if row.samples and (mask := known.get(row.number)) is not None:
                places += range(place, place + row.n_draws)
                bits += [mask] * row.n_draws
        return Masks(places, np.stack(bits)) if places else None

    def leave(self, seq: Sequence) -> None:
        """Forget the mask of a sequence that has ended."""
        self._masks.pop(seq.number, None)
