"""Chunked prefill: how many prompt tokens a step computes besides one token for each decoding sequence.

The scheduler asks a `PrefillPolicy`, chosen once at start. `BatchTimeLimit` bounds batch-class prompts in time (CPU);
`latency_target.LatencyTarget` also keeps the inter-token latency of decoding sequences (GPU).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from emberline.engine.core.limits import WorkLimits
from emberline.engine.core.plan import Row
from emberline.engine.core.sequence import Sequence
from emberline.protocol.request import MAX_DRAFT_TOKENS, Priority

MAX_DRAFTS = MAX_DRAFT_TOKENS  # of a row: its tokens then span no more than two blocks, and take one new one at most
MIN_CHUNK = 16  # tokens that a chunk under a time limit has at least
NO_TARGET = 4.0  # slack from which on a chunk ignores the latency target
_GAIN = 0.2  # of a new measurement


@dataclass(slots=True)
class StepWork:
    """Work of a step, as far as the step's duration depends on it."""

    n_decodes: int = 0
    n_tokens: int = 0  # prompt tokens
    attended: int = 0  # sum of the context lengths that the prompt tokens attend to
    start: int = 0  # context length at which the first chunk begins
    n_drafts: int = 0  # of the decoding sequences

    @classmethod
    def of(cls, n_decodes: int, chunks: Iterable[Row], n_drafts: int = 0) -> "StepWork":
        work = cls(n_decodes, n_drafts=n_drafts)
        for row in chunks:
            work.add(row.end - row.start, row.end)
        return work

    def add(self, n_tokens: int, end: int) -> None:
        """A chunk of n_tokens whose last token has the position end - 1."""
        if not self.n_tokens:
            self.start = end - n_tokens
        self.n_tokens += n_tokens
        self.attended += n_tokens * (end - n_tokens // 2)

    @property
    def n_decoded(self) -> int:
        """Tokens of the decoding sequences: one of each, and their drafts."""
        return self.n_decodes + self.n_drafts

    @property
    def context(self) -> int:
        return self.attended // max(1, self.n_tokens)


class StepLimit(NamedTuple):
    n_tokens: int
    n_prompts: float = inf  # prompts of which the step computes a chunk


class PrefillPolicy:
    """By itself it limits a step by its token budget alone."""

    def step_limit(self, n_decodes: int, budget: int, untargeted: Callable[[float], int]) -> StepLimit:
        """`untargeted` counts the tokens of at most so many prompts that no latency target applies to."""
        return StepLimit(budget)

    def chunk(self, work: StepWork, context: int, most: int, slack: float = 1.0, limit_s: float = inf) -> int:
        """Tokens, up to `most`, that the step's work may gain from a prompt of which `context` are computed.

        slack: multiple of the latency target that the step may take; from NO_TARGET on there is no target.
        limit_s: what the prompt tokens of the step may take.
        """
        return most

    def n_decodes(self, limit_s: float) -> float:
        """Sequences that lengthen a step by `limit_s`."""
        return inf

    def most_drafts(self, n_rows: int) -> int:
        """Return the largest number of draft tokens, over all rows, of a step that decodes `n_rows` sequences."""
        return n_rows * MAX_DRAFTS

    @property
    def drafts_beside_prompts(self) -> bool:
        """True if a step that computes prompts also verifies drafts."""
        return True

    def align(self, work: StepWork, start: int, n: int) -> int:
        """Return how many of the next n tokens to take from a prompt that has more than n left."""
        return n

    def observe(self, work: StepWork, seconds: float) -> None:
        """The runner reports how long a step took."""


class DecodeTimes:
    """Durations of steps without prompts: a line over the number of sequences that they decode."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # sequences and seconds, by power of two of the sequences

    def add(self, n: int, seconds: float) -> None:
        mean_n, mean_s = self._means.get(n.bit_length(), (n, seconds))
        seconds = min(seconds, 2 * mean_s)  # of an outlier
        self._means[n.bit_length()] = mean_n + _GAIN * (n - mean_n), mean_s + _GAIN * (seconds - mean_s)

    @property
    def sequence_s(self) -> float:
        """By which one more sequence lengthens a step; 0 while that is unknown."""
        if len(self._means) < 2:
            return 0.0
        (n_few, few_s), (n_many, many_s) = self._means[min(self._means)], self._means[max(self._means)]
        return max(0.0, (many_s - few_s) / (n_many - n_few))

    def of(self, n: int) -> float:
        if not n or not self._means:
            return 0.0
        mean_n, mean_s = self._means[min(self._means, key=lambda bits: abs(bits - n.bit_length()))]
        return max(0.0, mean_s + (n - mean_n) * self.sequence_s)


class BatchTimeLimit(PrefillPolicy):
    """Learns the time of a prompt token, by context length, and keeps chunks with a time limit to it; and the time of a
    sequence that decodes.

    min_chunk: tokens that are computed in any case, however slow the device: fewer are no faster there.
    """

    def __init__(self, min_chunk: int = MIN_CHUNK) -> None:
        self._min_chunk = min_chunk
        self._token_s: dict[int, float] = {}  # by power of two of the context
        self._decodes = DecodeTimes()

    def chunk(self, work: StepWork, context: int, most: int, slack: float = 1.0, limit_s: float = inf) -> int:
        if limit_s == inf:
            return most
        nearest = min(self._token_s, key=lambda octave: abs(octave - _octave(context)), default=None)
        n = self._min_chunk if nearest is None else max(self._min_chunk, int(limit_s / self._token_s[nearest]))
        return max(0, min(most, n - work.n_tokens))

    def n_decodes(self, limit_s: float) -> float:
        return limit_s / self._decodes.sequence_s if self._decodes.sequence_s else inf

    def observe(self, work: StepWork, seconds: float) -> None:
        if not work.n_tokens:
            self._decodes.add(work.n_decoded, seconds)
        elif work.n_tokens >= self._min_chunk // 2:
            prefill_s = max(seconds / 4, seconds - self._decodes.of(work.n_decoded))
            smooth(self._token_s, _octave(work.context), prefill_s / work.n_tokens)


def smooth(averages: dict[int, float], key: int, measured: float) -> None:
    """Exponential moving average; an outlier counts twice the average at most: a kernel may have been compiled."""
    before = averages.get(key, measured)
    averages[key] = before + 0.5 * (min(measured, 2 * before) - before)


def _octave(context: int) -> int:
    return (context >> 10).bit_length()


@dataclass(slots=True)
class DecodingSequences:
    """The sequences that sample a token in every step. The latency target protects them from later prompts."""

    n: int = 0  # those without a row in this step included: they wait for it all the same
    first_step: float = inf  # at which the first of them got its first token; batch class does not count
    best_class: Priority = Priority.DEFAULT

    def add(self, seq: Sequence) -> None:
        """To be called in rank order: best class first."""
        self.n += 1
        if seq.first_token_step < self.first_step and seq.effective_class != Priority.BATCH:
            if self.first_step == inf:
                self.best_class = seq.effective_class
            self.first_step = seq.first_token_step

    def came_after(self, seq: Sequence, step: int) -> bool:
        """True if `seq` was here by `step`, or before any of them had a token, and did not wait for its class."""
        return min(seq.arrival_step, step) < self.first_step and seq.effective_class <= self.best_class


class PrefillBurst:
    """Prompts that arrive together, though not all before the first of them has its first token.

    Over HTTP a burst of prompts takes longer to arrive than its first prompts take to compute, and admission control
    holds the last of them back. The burst lasts while steps compute prompts almost without a gap.
    """

    def __init__(self, limits: WorkLimits) -> None:
        self.first_step = 0
        self._last_step = -inf
        self._limits = limits

    def prompts(self, step: int) -> None:
        """The step has prompts to compute."""
        limits = self._limits
        if step - self._last_step > limits.burst_gap or step - self.first_step >= limits.burst_steps:
            self.first_step = step
        self._last_step = step
