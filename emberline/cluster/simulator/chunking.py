"""How many prompt tokens a step takes while streams wait for it."""

from dataclasses import dataclass
from typing import Protocol

from emberline.cluster.simulator.coefficients import Coefficients
from emberline.engine.pace import SHARE, TARGET_S


class Budget:
    """What one step may still take."""

    def __init__(self, model: Coefficients, tokens: int, seconds: float) -> None:
        self._model = model
        self._tokens, self._seconds = tokens, seconds
        self._first = True
        self.left = tokens > 0

    def take(self, start: int, most: int) -> int:
        """Tokens of a prompt whose first `start` are there. The first to ask gets some, or prompts would never end."""
        n = min(most, self._tokens)
        if self._seconds < float("inf") and n:
            fits = self._model.fitting(max(self._seconds, 0.0), start, n)
            n = min(n, fits) if self._first or self._model.chunk_s(fits, start) <= self._seconds else 0
            self._seconds -= self._model.chunk_s(n, start) if n else 0.0
        self._tokens -= n
        self._first = False
        self.left = self._tokens > 0 and self._seconds > 0 and n == most
        return n


class Chunking(Protocol):
    def budget(self, model: Coefficients, n_streams: int, context: int) -> Budget: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """So many tokens a step, streams included: what engines do whose step has a budget of tokens."""

    tokens: int = 2048

    def budget(self, model: Coefficients, n_streams: int, context: int) -> Budget:
        return Budget(model, self.tokens - n_streams, float("inf"))


@dataclass(frozen=True, slots=True)
class Timed:
    """As many as make the step last a given time beside streams, as `engine/pace.py` learns to; all without any."""

    target_s: float = TARGET_S
    share: float = SHARE

    def budget(self, model: Coefficients, n_streams: int, context: int) -> Budget:
        if not n_streams:
            return Budget(model, model.token_budget, float("inf"))
        decode_s = model.decode_s(n_streams, context)
        return Budget(model, model.token_budget - n_streams, max(self.target_s, self.share * decode_s) - decode_s)
