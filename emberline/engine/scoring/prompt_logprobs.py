"""Log-probabilities of prompt tokens, and requests that compute a prompt and sample nothing (`max_tokens` 0)."""

from collections.abc import Sequence as Many

import numpy as np

from emberline.engine.core.feature import Feature
from emberline.engine.core.plan import RowScores, StepPlan
from emberline.engine.core.sequence import ALL_REUSABLE, Flag, Sequence
from emberline.protocol.errors import BadInput, Internal, Unsupported
from emberline.protocol.events import PromptLogprobs
from emberline.protocol.request import EngineRequest


class PromptScoring(Feature):
    """Marks the rows of a plan that compute positions whose log-probability is wanted, and tells clients the results.

    The KV of a position is no substitute for its logits. `Sequence.n_reusable` counts the leading positions that are
    scored: a sequence takes no more than these from a cache, also after a preemption.
    """

    def __init__(self, refusal: str | None = None) -> None:
        """refusal: why this worker scores no prompts; None: it does."""
        self._refusal = refusal
        self._scoring: set[int] = set()  # numbers of sequences of whose prompt some positions are not scored yet

    def check(self, request: EngineRequest) -> None:
        """Refuse to score a prompt whose KV another engine computes, or any where the worker's layout rules it out."""
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and self._refusal is not None:
            raise Unsupported(self._refusal, param="prompt_logprobs")
        if request.awaits and (sampling.prompt_logprobs is not None or sampling.max_tokens == 0):
            raise BadInput("a prompt that is scored, or only computed, is computed by one engine", param="awaits")

    def enter(self, seq: Sequence, now_s: float) -> None:
        """Let a sequence compute what must not come from a cache."""
        sampling = seq.request.sampling
        if seq.request.push is not None:
            return
        if sampling.max_tokens == 0:
            seq.set_flag(Flag.PREFILL_ONLY, True)
        if sampling.prompt_logprobs is not None and seq.n_prompt > 1:
            self._scoring.add(seq.number)
            seq.n_reusable = 0
        else:
            self._scored_all(seq)

    def planned(self, plan: StepPlan) -> None:
        """Say after which tokens of a plan the next one is scored; no prompt token follows the last."""
        if not self._scoring:
            return
        for row in plan.others:
            if row.number in self._scoring and (seq := self.core.sequence_of(row)) is not None:
                row.n_scored = max(0, min(row.end, seq.n_prompt - 1) - row.start)
                plan.n_scored += row.n_scored

    def scored(self, plan: StepPlan, scores: Many[RowScores]) -> None:
        """Tell clients the log-probabilities that they were not told before a preemption."""
        rows = [row for row in plan.others if row.n_scored]
        for row, found in zip(rows, scores, strict=True):
            seq = self.core.sequence_of(row)
            if seq is None or seq.number not in self._scoring:
                continue
            if np.isnan(found.logprobs).any():
                self.core.fail(seq, Internal("the model produced invalid numbers"))
                continue
            end, known = row.start + row.n_scored, seq.n_reusable - row.start
            if known < row.n_scored:
                self.core.tell_prompt(seq, _packed(found.after(known)))
                seq.n_reusable = end
            if seq.n_reusable == seq.n_prompt - 1:
                self._scoring.discard(seq.number)
                self._scored_all(seq)

    def computed(self, seq: Sequence, n_tokens: int) -> None:
        """End a sequence that samples nothing once its prompt is computed."""
        if seq.request.push is None and n_tokens == seq.n_tokens:
            self.core.end(seq, "length")

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._scoring.discard(seq.number)

    def _scored_all(self, seq: Sequence) -> None:
        """Let a sequence reuse what it finds; one that samples nothing ends with the step of its last token."""
        seq.n_reusable = ALL_REUSABLE if seq.samples else seq.n_prompt - 1


def _packed(scores: RowScores) -> PromptLogprobs:
    logprobs, ranks, top_ids, top_logprobs = scores
    return PromptLogprobs(
        logprobs.astype("<f4").tobytes(),
        ranks.astype("<u4").tobytes(),
        top_ids.astype("<u4").tobytes(),
        top_logprobs.astype("<f4").tobytes(),
    )
