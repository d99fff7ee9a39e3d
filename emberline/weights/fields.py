"""Typed reading of a model's description, wherever it was written: GGUF metadata or config.json."""

import math
from collections.abc import Mapping

import numpy as np

from emberline.weights.errors import BadCheckpoint

MAX_WHOLE = 1 << 31  # no size in a model's description is beyond this
_REQUIRED = object()


class Fields:
    """A mapping whose values are checked as they are read; None counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def under(self, prefix: str) -> "Fields":
        """The keys that begin with `prefix`, without it."""
        inner = {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}
        return Fields(inner, f"{self.where} under {prefix!r}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: object = _REQUIRED) -> object:
        value = self.values.get(key)
        if value is None and default is _REQUIRED:
            raise BadCheckpoint(f"{self.where} lacks {key!r}")
        return default if value is None else value

    def wrong(self, key: str, wanted: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.where}: {key!r} is {str(self.values.get(key))[:60]!r}, not {wanted}")

    def whole(self, key: str, default: object = _REQUIRED, *, least: int = 1, most: int = MAX_WHOLE) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.ndim == 1 and len(value) and (value == value[0]).all():
            value = value[0].item()  # GGUF allows one number per layer; the same everywhere is one number
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def optional_id(self, key: str) -> int | None:
        return self.whole(key, least=0) if self.has(key) else None

    def positive(self, key: str, default: object = _REQUIRED) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above zero")
        return float(value)

    def text(self, key: str, default: object = _REQUIRED) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value
