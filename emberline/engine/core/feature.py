"""Features of the engine beside the core: each is one object whose methods the scheduler calls at fixed moments.

A moment comes once per step or once per event of one sequence, never once per row. The scheduler finds out at start
which feature implements which moment: one that no feature implements costs nothing. A feature keeps its own state, by
the number of the sequence, until `leave`. Threads never call features: they leave notices for `advance`.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any, Protocol

from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Masks, Sampled, StepPlan
from emberline.engine.core.sequence import Sequence
from emberline.kv.cache import KVCache
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import FinishReason
from emberline.protocol.frames import Vocabulary
from emberline.protocol.request import EngineRequest

Draws = list[tuple[Sequence, list[Sampled]]]  # sequences, and the draws of each that count


class Core(Protocol):
    """What a feature may ask of the scheduler."""

    cache: KVCache
    limits: Limits

    def append(self, seq: Sequence, entries: Many[Sampled], finish: FinishReason | None) -> None:
        """Add tokens to the output of a sequence, and end it if `finish` says why."""

    def fail(self, seq: Sequence, error: EmberlineError) -> None:
        """End a sequence with an error."""

    def preempt(self, seq: Sequence) -> None:
        """Take the slot of a running sequence, which waits again; ignore what steps in flight sample for it."""


class Feature:
    """Base class: every moment, none implemented."""

    core: Core

    def attach(self, core: Core) -> None:
        """Keep the scheduler, which calls this once, at start."""
        self.core = core

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take in what tokens stand for."""

    def check(self, request: EngineRequest) -> None:
        """Raise an EmberlineError to refuse a new request. If no feature does, `enter` follows at once."""

    def enter(self, seq: Sequence, now_s: float) -> None:
        """Take note of a new sequence, and hold it if it cannot be admitted yet."""

    def advance(self, now_s: float) -> None:
        """Before a plan: handle notices and timeouts."""

    def planned(self, plan: StepPlan) -> None:
        """Complete a plan whose rows are known."""

    def masks(self, plan: StepPlan) -> Masks | None:
        """After the launch of a plan that is `masked`: say which tokens may be sampled."""

    def absorb(self, draws: Draws) -> None:
        """Take in a step's draws for guided sequences, whose output the feature decides."""

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended, and give back what is held for it."""

    def wake_s(self) -> float:
        """Time at which a step is due even if nothing can be computed and no notice comes; inf if never."""
        raise NotImplementedError


class Moments:
    """For each moment, the bound methods of the features that implement it."""

    def __init__(self, features: Iterable[Feature]) -> None:
        known = tuple(features)

        def found(name: str) -> tuple[Any, ...]:
            has = (each for each in known if getattr(type(each), name) is not getattr(Feature, name))
            return tuple(getattr(each, name) for each in has)

        self.learn: tuple[Callable[[Vocabulary], None], ...] = found("learn")
        self.check: tuple[Callable[[EngineRequest], None], ...] = found("check")
        self.enter: tuple[Callable[[Sequence, float], None], ...] = found("enter")
        self.advance: tuple[Callable[[float], None], ...] = found("advance")
        self.planned: tuple[Callable[[StepPlan], None], ...] = found("planned")
        self.masks: tuple[Callable[[StepPlan], Masks | None], ...] = found("masks")
        self.absorb: tuple[Callable[[Draws], None], ...] = found("absorb")
        self.leave: tuple[Callable[[Sequence], None], ...] = found("leave")
        self.wake_s: tuple[Callable[[], float], ...] = found("wake_s")
