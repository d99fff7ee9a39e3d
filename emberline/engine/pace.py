"""How many prompt tokens a step may take so that running streams keep their pace, learned from the steps that ran."""

from dataclasses import dataclass

TARGET_S = 0.0145  # of a step that streams wait for: their p99 stays below 20 ms, and a chunk is still efficient
FIRST_CHUNK = 512  # tokens, before anything was measured
LEAST_CHUNK = 64
TILE = 128  # matrix products compute whole tiles of tokens
_GAIN = 0.3  # how fast what was learned of decodes gives way to what is measured
_MEMORY = 0.9  # of chunks: the weight of a measurement after each later one


@dataclass(slots=True)
class Work:
    """What a step computes, as far as its time depends on it."""

    n_decodes: int = 0
    n_tokens: int = 0  # of prompts
    reach: int = 0  # their sum of context lengths

    def add(self, n_tokens: int, context: int) -> None:
        """A chunk of n_tokens that ends at `context`."""
        self.n_tokens += n_tokens
        self.reach += n_tokens * (context - n_tokens // 2)


class Pace:
    """Seconds of a step = those of its decodes + token_s * tokens + reach_s * reach.

    Both coefficients are least squares over the chunks that ran, older ones counting less. `reach_ratio` is what a
    token of context costs beside a token through all matrices, by their operations: the first guess.
    """

    def __init__(self, reach_ratio: float, target_s: float = TARGET_S) -> None:
        self._target_s = target_s
        self._decode_s = 0.0
        self._ratio = reach_ratio
        self._token_s = target_s / FIRST_CHUNK
        self._reach_s = self._token_s * reach_ratio
        self._uncertain = (1.0, 0.0, 1.0)  # the symmetric matrix of recursive least squares
        self._measured = False

    def observe(self, work: Work, seconds: float) -> None:
        if not work.n_tokens:
            self._decode_s += _GAIN * (seconds - self._decode_s) if self._decode_s else seconds
            return
        spent_s = max(seconds - (self._decode_s if work.n_decodes else 0.0), 0.1 * seconds)
        if not self._measured:
            self._token_s = spent_s / (work.n_tokens + self._ratio * work.reach)
            self._reach_s = self._token_s * self._ratio
            self._measured = True
        self._correct(work, spent_s)

    def _correct(self, work: Work, spent_s: float) -> None:
        tokens, reach = work.n_tokens / FIRST_CHUNK, work.reach * self._ratio / FIRST_CHUNK
        a, b, c = self._uncertain
        u, v = a * tokens + b * reach, b * tokens + c * reach
        weight = 1 / (_MEMORY + tokens * u + reach * v)
        error = (spent_s - self._token_s * work.n_tokens - self._reach_s * work.reach) / FIRST_CHUNK
        least = 0.02 * spent_s / (work.n_tokens + self._ratio * work.reach)  # neither comes for nothing
        self._token_s = max(self._token_s + u * weight * error, least)
        self._reach_s = max(self._reach_s + v * weight * error * self._ratio, least * self._ratio)
        grown = ((a - u * u * weight) / _MEMORY, (b - u * v * weight) / _MEMORY, (c - v * v * weight) / _MEMORY)
        if max(grown[0], grown[2]) < 100:  # what is never excited would grow without end
            self._uncertain = grown

    def seconds(self, work: Work) -> float:
        """What a step will take."""
        decode_s = self._decode_s if work.n_decodes else 0.0
        return decode_s + self._token_s * work.n_tokens + self._reach_s * work.reach

    def within(self, limit_s: float, work: Work, context: int, most: int) -> int:
        """Tokens of a prompt, up to `most`, with which the step lasts no longer than that; a first chunk has a few."""
        left_s = limit_s - self.seconds(work)
        n = int(left_s / (self._token_s + self._reach_s * context)) if left_s > 0 else 0
        return min(most, max(n, LEAST_CHUNK if work.n_tokens == 0 else 0))

    def chunk(self, work: Work, context: int, most: int) -> int:
        """Tokens of a prompt that may join the work, up to `most`; they begin at `context`."""
        if not work.n_decodes:
            return most
        left_s = self._target_s - self.seconds(work)
        n = int(left_s / (self._token_s + self._reach_s * context)) if left_s > 0 else 0
        if work.n_tokens == 0:
            n = max(n, LEAST_CHUNK)  # prompts come forward whatever the streams cost
        if n >= most:
            return most
        whole = (work.n_decodes + work.n_tokens + n) // TILE * TILE - work.n_decodes - work.n_tokens
        return whole if whole >= LEAST_CHUNK else n
