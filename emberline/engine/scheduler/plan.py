"""One step as plain data: what the scheduler decides and a runner carries out, on one device or on many ranks.

A runner keeps a row of state per slot. A plan says who takes a slot, then only what is new: tokens and blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from emberline.protocol.frames import Vocabulary
from emberline.protocol.request import EngineRequest


@dataclass(slots=True)
class Admission:
    """A sequence takes a slot, and with it everything that stays the same from step to step."""

    slot: int
    request: EngineRequest
    seed: int  # u64
    output_ids: bytes  # u32 LE; what it had produced before a preemption
    blocks: list[list[int]]  # per group: the table it starts with, from the prefix cache


class Row(msgspec.Struct, gc=False):
    """New tokens of one sequence: they are the last of its context, and their KV goes into its blocks.

    Hundreds are made in a step, so they are made in C and cost the garbage collector nothing.
    """

    number: int  # of the sequence; unique in this engine's life, where a slot and a request's id are not
    slot: int
    start: int  # position of the first new token
    token_ids: bytes  # u32 LE; empty when it follows
    blocks: list[list[int]] | None  # per group: appended to the slot's table; None: nothing is
    passed: list[int]  # per group: so many leading table entries hold nothing any more
    samples: bool  # draw the token that follows
    banned: tuple[int, ...] = ()  # ids not to be drawn
    admission: int = 0  # serial number of the admission that gave it the slot
    follows: bool = False  # its one new token is what the slot drew last, which only the device may know yet

    @property
    def end(self) -> int:
        return self.start + 1 if self.follows else self.start + len(self.token_ids) // 4


@dataclass(slots=True)
class StepPlan:
    admissions: list[Admission] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    n_tokens: int = 0
    n_preempted: int = 0  # running sequences that lost their blocks to these rows


@dataclass(slots=True)
class Masks:
    """Which tokens may be drawn, for the sampling rows that a grammar binds."""

    rows: list[int]  # their places among the plan's rows that sample
    bits: NDArray[np.uint32]  # [rows, words]; bit i % 32 of word i // 32: token i is allowed


class Guide(Protocol):
    """What binds one sequence to its grammar. It has accepted exactly the tokens of the reply so far."""

    @property
    def n_words(self) -> int:
        """Of a row that `fill` fills."""

    @property
    def digest(self) -> str:
        """Names the grammar in the log."""

    @property
    def complete(self) -> bool:
        """The reply may end here."""

    @property
    def finished(self) -> bool:
        """The reply can only end here."""

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """Which tokens may follow, the ends of a reply left out."""

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, n: int) -> None:
        """Take back the last n accepted tokens."""

    def fits(self, room: int) -> bool:
        """Whether so many tokens more can end the reply validly."""

    def closing(self) -> list[int]:
        """The tokens that do so, once `fits` has said so."""


class PendingGuide(Protocol):
    """A grammar that is being compiled."""

    @property
    def ready(self) -> bool: ...

    def guide(self) -> Guide:
        """Once ready; raises the EmberlineError why there is none."""


class Guides(Protocol):
    def request(self, encoded: bytes) -> PendingGuide: ...

    def learn(self, vocabulary: Vocabulary) -> None: ...


class DeviceLost(Exception):
    """The device reported an error that it does not recover from: only a new process can."""


class Sampled(Protocol):
    """The token drawn for a row that samples. A negative id: the model produced invalid numbers."""

    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float | None: ...

    @property
    def top(self) -> list[tuple[int, float]]: ...


class Handle(Protocol):
    """A step whose forward pass is under way."""

    def sample(self, masks: Masks | None = None) -> None:
        """Once, after the launch: draw the tokens. Masks are made while the forward pass runs."""

    def result(self) -> Sequence[Sampled]:
        """Waits; one entry per row that samples, in the plan's order. Raises what the step raised."""


class Runner(Protocol):
    def launch(self, plan: StepPlan) -> Handle: ...
