"""One row of the table: a server, how it is started, and which build of it this is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THREADS = 2


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that speaks OpenAI's chat completions on loopback."""

    name: str
    build: str  # version, and what its machine code was compiled for
    model: str  # what a request calls the model
    command: Callable[[int, int], list[str]]  # of a port and how many streams will run at once
    env: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 120.0  # longest start we wait for
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body  # a request's body in its own dialect


@dataclass(frozen=True, slots=True)
class Setup:
    """What a peer needs to be set up."""

    gguf: Path
    cache: Path  # environments, builds and converted weights; kept between runs
    say: Callable[[str], None]
