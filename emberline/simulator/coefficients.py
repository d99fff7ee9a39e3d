"""Step time and KV capacity of a simulated worker, fitted from runs of the real engine; prefill token budgets."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import msgspec

from emberline.engine.core.latency_target import DECODE_SHARE, TARGET_S
from emberline.protocol.errors import BadInput

FOLDER = "fitted"  # JSON files next to this module


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step = step + row·sequences + context·their context + token·prompt tokens + pair·Σ tokens×context.

    A prompt token attends to all before it, so a whole prompt is quadratic. Weights are read once per step, whether it
    decodes, prefills or does both.
    """

    name: str
    source: str  # which run it was fitted from
    step_s: float
    row_s: float  # per decoding sequence
    context_s: float  # per token of its context
    token_s: float  # per prompt token
    pair_s: float  # per prompt token × token before it
    tile: int = 1  # prompt tokens are rounded up to multiples of it
    request_s: float = 0.0  # from the client to the engine's queue and back
    kv_tokens: int  # capacity of a worker
    kv_bytes: int  # of one token
    max_running: int = 256
    token_budget: int = 8192  # per step without decoding sequences
    context_len: int = 262_144
    paced: bool = True  # whether this engine limits prefill chunks by time while sequences decode

    def decode_s(self, n_decoding: int, context: int) -> float:
        """A step without prefill."""
        return self.step_s + self.row_s * n_decoding + self.context_s * context

    def chunk_s(self, n_tokens: int, start: int) -> float:
        """Seconds that a prefill chunk after the prompt's first `start` tokens adds to a step."""
        tiled = -(-n_tokens // self.tile) * self.tile
        return self.token_s * tiled + self.pair_s * n_tokens * (start + n_tokens / 2)

    def batch_s(self, n_decoding: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        """A step with these prefill chunks: tokens, and the prompt's tokens before them."""
        return self.decode_s(n_decoding, context) + sum(self.chunk_s(n, start) for n, start in chunks)

    def prefill_s(self, n_tokens: int, start: int = 0) -> float:
        """Prefill of a prompt alone on an idle worker."""
        total_s, end = 0.0, start + n_tokens
        while start < end:
            n = min(self.token_budget, end - start)
            total_s += self.step_s + self.chunk_s(n, start)
            start += n
        return total_s

    def tokens_within(self, limit_s: float, start: int, most: int) -> int:
        """Tokens of a chunk that takes about `limit_s`: whole tiles, at least one."""
        linear = self.token_s + self.pair_s * start
        square = self.pair_s / 2
        n = limit_s / linear if square * limit_s < 1e-6 * linear**2 else _positive_root(square, linear, limit_s)
        return min(most, max(1, int(n) // self.tile) * self.tile)


def _positive_root(square: float, linear: float, value: float) -> float:
    return float(((linear * linear + 4 * square * value) ** 0.5 - linear) / (2 * square))


def names() -> list[str]:
    return sorted(item.name.removesuffix(".json") for item in files(__package__).joinpath(FOLDER).iterdir())


def load(name: str) -> Coefficients:
    """Coefficients by the name of a packaged fit, or from a JSON file."""
    known = files(__package__).joinpath(FOLDER, f"{name}.json")
    path = Path(name)
    if not known.is_file() and not path.is_file():
        raise BadInput(
            f"there are no coefficients {name!r}: give a file, or one of {', '.join(names())}", param="engine"
        )
    data = known.read_bytes() if known.is_file() else path.read_bytes()
    try:
        return msgspec.json.decode(data, type=Coefficients)
    except msgspec.DecodeError as error:
        raise BadInput(f"{name} does not hold coefficients: {error}", param="engine") from None


class StepBudget:
    """The prefill tokens and seconds that are left in one step."""

    def __init__(self, model: Coefficients, tokens: int, seconds: float) -> None:
        self._model = model
        self._tokens, self._seconds = tokens, seconds
        self._first = True
        self.left = tokens > 0

    def take(self, start: int, most: int) -> int:
        """Tokens for a prompt whose first `start` are computed. The first prompt always gets some."""
        n = min(most, self._tokens)
        if self._seconds < float("inf") and n:
            fits = self._model.tokens_within(max(self._seconds, 0.0), start, n)
            n = min(n, fits) if self._first or self._model.chunk_s(fits, start) <= self._seconds else 0
            self._seconds -= self._model.chunk_s(n, start) if n else 0.0
        self._tokens -= n
        self._first = False
        self.left = self._tokens > 0 and self._seconds > 0 and n == most
        return n


class PrefillPolicy(Protocol):
    """How much prefill a step may contain besides decoding."""

    def budget(self, model: Coefficients, n_decoding: int, context: int) -> StepBudget: ...


@dataclass(frozen=True, slots=True)
class FixedTokenBudget:
    """A fixed number of tokens per step, decoding sequences included."""

    tokens: int = 2048

    def budget(self, model: Coefficients, n_decoding: int, context: int) -> StepBudget:
        return StepBudget(model, self.tokens - n_decoding, float("inf"))


@dataclass(frozen=True, slots=True)
class LatencyTargetBudget:
    """Prefill up to the inter-token latency target while sequences decode, as the engine's LatencyTarget does."""

    target_s: float = TARGET_S
    share: float = DECODE_SHARE

    def budget(self, model: Coefficients, n_decoding: int, context: int) -> StepBudget:
        if not n_decoding:
            return StepBudget(model, model.token_budget, float("inf"))
        decode_s = model.decode_s(n_decoding, context)
        return StepBudget(model, model.token_budget - n_decoding, max(self.target_s, self.share * decode_s) - decode_s)
