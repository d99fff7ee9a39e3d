"""The step loop: plan, launch, absorb the previous result."""

import logging
from collections import deque
from collections.abc import Callable

from emberline.engine.scheduler.plan import DeviceLost, Handle, Runner, StepPlan
from emberline.engine.scheduler.prefill_budget import PrefillRate
from emberline.engine.scheduler.scheduler import Scheduler
from emberline.kv.events import EventLog, snapshot, watched_group
from emberline.kv.transfer.manager import TransferManager
from emberline.protocol.errors import EmberlineError, Internal
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import EngineLoad, KVEvents, Vocabulary
from emberline.protocol.request import EngineRequest

_log = logging.getLogger(__name__)


class StepLoop:
    """A scheduler and a runner. Whoever owns it calls `step` while it is busy.

    With two steps in flight the next one is planned and queued while the device is busy with the one before.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        steps_in_flight: int = 1,
        chore: Callable[[], bool] | None = None,
        hub: TransferManager | None = None,
    ) -> None:
        self.hub = hub  # of the transfers to and from other engines
        self._rate = PrefillRate()
        self._stuck_at = -1  # requests that had come when a step found nothing that it could compute
        self._chore = chore  # something to do while there is no work; False: it is all done
        self._steps_in_flight = steps_in_flight
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()
        self._events: EventLog | None = None  # once somebody watches the cache

    @property
    def busy(self) -> bool:
        return self._scheduler.busy or bool(self._in_flight) or (self.hub is not None and self.hub.has_notices)

    @property
    def held_up(self) -> bool:
        """Busy, but a step would compute nothing before a grammar is compiled, or KV has come or gone."""
        if self.hub is not None and self.hub.has_notices:
            return False
        return not self._in_flight and (self._scheduler.held_up or self._stuck_at == self._scheduler.n_arrived)

    @property
    def next_s(self) -> float:
        """While held up: when a step is due even if nobody brings news."""
        return self._scheduler.next_s if self._scheduler.held_up else 0.0

    @property
    def has_chores(self) -> bool:
        return self._chore is not None

    def do_chore(self) -> None:
        """What can be done ahead of requests, a little of it."""
        if self._chore is not None and not self._chore():
            self._chore = None

    @property
    def load(self) -> EngineLoad:
        load = self._scheduler.load()
        load.prefill_rate = self._rate.tokens_per_s
        return load

    def submit(self, request: EngineRequest, now_s: float) -> None:
        self._scheduler.submit(request, now_s)

    def abort(self, request_id: str) -> TokenDelta | None:
        return self._scheduler.abort(request_id)

    def abort_all(self, error: EmberlineError) -> list[TokenDelta]:
        return self._scheduler.abort_all(error)

    def learn(self, vocabulary: Vocabulary) -> None:
        """What tokens stand for, which grammars need to know."""
        self._scheduler.learn(vocabulary)

    def watch_cache(self) -> list[KVEvents]:
        """What the cache holds; from now on `cache_events` tells what changes."""
        cache = self._scheduler.cache
        group = watched_group(group.layout for group in cache.groups)
        if self._events is None:
            self._events = EventLog(group)
            cache.listen(self._events)
        return snapshot(next(each.index for each in cache.groups if each.layout is group))

    def cache_events(self) -> list[KVEvents]:
        """What changed since the last call."""
        return [] if self._events is None else self._events.take()

    def unwatch_cache(self) -> None:
        if self._events is not None:
            self._scheduler.cache.unlisten(self._events)
            self._events = None

    def step(self, now_s: float) -> list[TokenDelta]:
        deltas = self._scheduler.expire(now_s) + self._scheduler.hear(now_s) + self._scheduler.settle()
        plan = self._scheduler.plan()
        if plan.rows:
            self._rate.launched(plan)
            handle = self._runner.launch(plan)
            guided = self._scheduler.guides(plan)
            if guided:  # what they allow now depends on what steps before drew
                while self._in_flight:
                    deltas += self._absorb(*self._in_flight.popleft())
            handle.sample(self._scheduler.masks(plan) if guided else None)
            self._scheduler.launched(plan)
            self._in_flight.append((plan, handle))
        if len(self._in_flight) == self._steps_in_flight or (self._in_flight and not plan.rows):
            deltas += self._absorb(*self._in_flight.popleft())
        self._stuck_at = -1 if plan.rows or self._in_flight else self._scheduler.n_arrived
        return deltas

    def _absorb(self, plan: StepPlan, handle: Handle) -> list[TokenDelta]:
        try:
            sampled = handle.result()
            self._rate.done(plan)
        except DeviceLost:
            raise  # nothing can be computed here any more
        except Exception:
            _log.exception("a step failed", extra={"rows": len(plan.rows), "tokens": plan.n_tokens})
            return self._scheduler.fail(plan, Internal("the engine could not compute this request"))
        return self._scheduler.absorb(plan, sampled)
