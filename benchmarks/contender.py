"""A server under comparison: how it is started, and which build it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THREADS = 2


@dataclass(frozen=True, slots=True)
class Contender:
    """A server with OpenAI's chat completions on loopback."""

    name: str
    build: str  # version and compile target
    model: str  # the model's name in requests
    command: Callable[[int, int], list[str]]  # from port and number of concurrent streams
    env: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 120.0  # startup timeout
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body  # adapts a request body to this server


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs of a peer's setup."""

    gguf: Path
    cache: Path  # environments, builds and converted weights; kept between runs
    say: Callable[[str], None]
