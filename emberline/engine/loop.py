"""The step loop: plan, launch, absorb the previous result."""

import logging
from collections import deque

from emberline.engine.plan import DeviceLost, Handle, Runner, StepPlan
from emberline.engine.scheduler import Scheduler
from emberline.protocol.errors import EmberlineError, Internal
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import EngineLoad, Vocabulary
from emberline.protocol.request import EngineRequest

_log = logging.getLogger(__name__)


class StepLoop:
    """A scheduler and a runner. Whoever owns it calls `step` while it is busy.

    With two steps in flight the next one is planned and queued while the device is busy with the one before.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, steps_in_flight: int = 1) -> None:
        self._steps_in_flight = steps_in_flight
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()

    @property
    def busy(self) -> bool:
        return self._scheduler.busy or bool(self._in_flight)

    @property
    def held_up(self) -> bool:
        """Busy, but a step would compute nothing before a grammar is compiled."""
        return not self._in_flight and self._scheduler.held_up

    @property
    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def submit(self, request: EngineRequest, now_s: float) -> None:
        self._scheduler.submit(request, now_s)

    def abort(self, request_id: str) -> TokenDelta | None:
        return self._scheduler.abort(request_id)

    def abort_all(self, error: EmberlineError) -> list[TokenDelta]:
        return self._scheduler.abort_all(error)

    def learn(self, vocabulary: Vocabulary) -> None:
        """What tokens stand for, which grammars need to know."""
        self._scheduler.learn(vocabulary)

    def step(self, now_s: float) -> list[TokenDelta]:
        deltas = self._scheduler.expire(now_s) + self._scheduler.settle()
        plan = self._scheduler.plan()
        if plan.rows:
            handle = self._runner.launch(plan)
            if self._scheduler.guides(plan):  # what they allow now depends on what steps before drew
                while self._in_flight:
                    deltas += self._absorb(*self._in_flight.popleft())
            handle.sample(self._scheduler.masks(plan))
            self._in_flight.append((plan, handle))
        if len(self._in_flight) == self._steps_in_flight or (self._in_flight and not plan.rows):
            deltas += self._absorb(*self._in_flight.popleft())
        return deltas

    def _absorb(self, plan: StepPlan, handle: Handle) -> list[TokenDelta]:
        try:
            sampled = handle.result()
        except DeviceLost:
            raise  # nothing can be computed here any more
        except Exception:
            _log.exception("a step failed", extra={"rows": len(plan.rows), "tokens": plan.n_tokens})
            return self._scheduler.fail(plan, Internal("the engine could not compute this request"))
        return self._scheduler.absorb(plan, sampled)
