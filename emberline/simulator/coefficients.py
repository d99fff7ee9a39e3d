"""How long a modelled worker's step takes, and what fits into its memory: fitted from runs of the real engine."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import msgspec

from emberline.engine.scheduler.prefill_budget import SHARE, TARGET_S
from emberline.protocol.errors import BadInput

FOLDER = "fitted"  # JSON files beside this module


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step = step + row·streams + context·their context + token·prompt tokens + pair·Σ tokens×context.

    A prompt's token looks back at all before it, so a whole prompt is quadratic. Weights are read once a step, whether
    it decodes, prefills or does both.
    """

    name: str
    source: str  # which run it was fitted from
    step_s: float
    row_s: float  # a stream that decodes
    context_s: float  # a token of such a stream's context
    token_s: float  # a prompt's token
    pair_s: float  # a prompt's token × a token before it
    tile: int = 1  # prompt tokens are rounded up to whole ones
    request_s: float = 0.0  # from the client to the engine's queue and back, beside all steps
    kv_tokens: int  # that a worker's memory holds
    kv_bytes: int  # of one token
    max_running: int = 256
    token_budget: int = 8192  # of a step that nobody waits for
    context_len: int = 262_144
    paced: bool = True  # whether this engine limits prompts' chunks by time while streams run

    def decode_s(self, n_streams: int, context: int) -> float:
        """A step of streams alone."""
        return self.step_s + self.row_s * n_streams + self.context_s * context

    def chunk_s(self, n_tokens: int, start: int) -> float:
        """What a chunk adds to a step; the prompt's tokens before it are `start`."""
        tiled = -(-n_tokens // self.tile) * self.tile
        return self.token_s * tiled + self.pair_s * n_tokens * (start + n_tokens / 2)

    def prefill_s(self, n_tokens: int, start: int = 0) -> float:
        """A prompt alone on an idle worker, to its first token."""
        total_s, end = 0.0, start + n_tokens
        while start < end:
            n = min(self.token_budget, end - start)
            total_s += self.step_s + self.chunk_s(n, start)
            start += n
        return total_s

    def fitting(self, limit_s: float, start: int, most: int) -> int:
        """The tokens of a chunk that lasts about `limit_s`: whole tiles, one at least."""
        linear = self.token_s + self.pair_s * start
        square = self.pair_s / 2
        n = limit_s / linear if square * limit_s < 1e-6 * linear**2 else _root(square, linear, limit_s)
        return min(most, max(1, int(n) // self.tile) * self.tile)


def _root(square: float, linear: float, value: float) -> float:
    return float(((linear * linear + 4 * square * value) ** 0.5 - linear) / (2 * square))


def names() -> list[str]:
    return sorted(item.name.removesuffix(".json") for item in files(__package__).joinpath(FOLDER).iterdir())


def load(name: str) -> Coefficients:
    """Of a name that comes with the package, or of a JSON file."""
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
