"""The step loop: plans a step, launches it and absorbs the result of the one before."""

import logging
from collections import deque
from collections.abc import Callable

from emberline.engine.core.plan import DeviceLost, Handle, Runner, StepPlan
from emberline.engine.core.rank import Rank
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_times import StepTimes
from emberline.kv.kv_events import KVEventFeed
from emberline.protocol.errors import Internal
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import EngineLoad
from emberline.protocol.request import EngineRequest

AWAITED_SHARE = 8  # of one row in so many with drafts: else more is lost by their rest than by a device that waits

_log = logging.getLogger(__name__)


class StepLoop:
    """A scheduler and a rank. Its owner calls `step` while it is busy.

    With two steps in flight the next one is planned and queued while the device computes the previous one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        steps_in_flight: int = 1,
        idle_task: Callable[[], bool] | None = None,
        publish: Callable[[StepPlan], None] | None = None,
    ) -> None:
        """idle_task: something to do while there is no work; returns False when all is done.
        publish: sends plans to the other ranks.
        """
        self.scheduler = scheduler
        self.abort, self.abort_all, self.called_tools = scheduler.abort, scheduler.abort_all, scheduler.called_tools
        self.purge, self.set_vocabulary = scheduler.purge, scheduler.set_vocabulary
        self.executors = {each.name: each.executor for each in scheduler.features if each.executor is not None}
        self.rank = Rank(runner, self.executors, publish)
        self._last_absorbed = 0  # number of a step
        self._steps_in_flight = steps_in_flight
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()
        self._idle_task = idle_task
        self._times = StepTimes()
        # What heartbeats say, read by their thread while a step runs:
        self.computed_tokens = 0
        self.in_step = False
        self.preparing = False
        self.n_prepared = 0  # parts that idle tasks have prepared
        self.step_s = 0.0  # predicted, of the last launched step; 0: unknown
        self._stuck_at = -1  # scheduler.n_submitted when a step found nothing to compute

    @property
    def runner(self) -> Runner:
        """The runner of this rank."""
        return self.rank.runner

    def kv_events(self) -> KVEventFeed:
        """KV events of the device pool and of the features."""
        sources = [source for feature in self.scheduler.features for source in feature.sources]
        return KVEventFeed(self.scheduler.cache, sources)

    @property
    def n_in_flight(self) -> int:
        """Number of steps that were launched and whose results were not absorbed yet."""
        return len(self._in_flight)

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""
        scheduler = self.scheduler
        return scheduler.busy or bool(self._in_flight) or scheduler.has_notices or bool(scheduler.orders)

    @property
    def blocked(self) -> bool:
        """True if the loop is busy, but a step would do nothing before a thread leaves a notice."""
        if self._in_flight or self.scheduler.has_notices or self.scheduler.orders:
            return False
        return self.scheduler.blocked or self._stuck_at == self.scheduler.n_submitted

    @property
    def wake_s(self) -> float:
        """Time at which a blocked loop is to make a step even if nothing happens."""
        return self.scheduler.wake_s if self.scheduler.blocked else 0.0

    @property
    def report_s(self) -> float:
        """Time at which a load report is due though no step was made; inf if nothing has changed."""
        return self.scheduler.report_s

    @property
    def has_idle_task(self) -> bool:
        """True if something can be prepared while there is no work."""
        return self._idle_task is not None

    def run_idle_task(self) -> None:
        """Prepare a part of what later requests may need."""
        self.preparing = True
        if self._idle_task is not None and not self._idle_task():
            self._idle_task = None
            _log.info("nothing is left to prepare")
        self.preparing = False
        self.n_prepared += 1

    @property
    def load(self) -> EngineLoad:
        """The load report of this engine."""
        load = self.scheduler.load()
        times = self._times
        load.prefill_rate = times.tokens_per_s
        load.utilisation, load.jobs_utilisation = times.device.shares()
        load.busy_s, load.step_cost = round(times.device.busy_s, 3), times.fit.cost
        load.computed_tokens = self.computed_tokens
        return load

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Accept a request, or raise an EmberlineError that says why not."""
        self.scheduler.submit(request, now_s)

    def step(self, now_s: float) -> list[TokenDelta]:
        """Plan and launch a step, and absorb the oldest one in flight. Returns what clients are to be told."""
        deltas: list[TokenDelta] = []
        awaited = bool(self._in_flight) and _is_awaited(self._in_flight[-1][0])
        if awaited:
            while self._in_flight:
                deltas += self._absorb_oldest()
        self.scheduler.cache.fence.set_oldest_in_flight(self._in_flight[0][0].number if self._in_flight else None)
        deltas += self.scheduler.advance(now_s, device_waits=awaited)
        plan = self.scheduler.plan()
        if plan.n_rows:
            deltas += self._launch(plan)
        if len(self._in_flight) == self._steps_in_flight or (self._in_flight and not plan.n_rows):
            deltas += self._absorb_oldest()
        self.scheduler.catch_up()
        orders = self.scheduler.orders
        if orders and (orders.urgent or not self._in_flight):  # else the next plan takes them
            self._run_orders()
        self.in_step = bool(self._in_flight)
        goes_on = plan.n_rows or self._in_flight or self.scheduler.has_work
        self._stuck_at = -1 if goes_on else self.scheduler.n_submitted
        return deltas

    def close(self) -> None:
        """Let every rank execute the orders that still wait for a plan, and end the features: what was saved is
        written. What steps in flight sample is lost."""
        try:
            self.scheduler.catch_up()
            self._run_orders()
        finally:
            for feature in self.scheduler.features:
                feature.close()

    def _run_orders(self) -> None:
        """Execute the orders that wait for a plan, in a plan without rows."""
        if self.scheduler.orders:
            self.rank.run(StepPlan(after=self._last_absorbed, orders=self.scheduler.orders.take()))

    def _launch(self, plan: StepPlan) -> list[TokenDelta]:
        deltas: list[TokenDelta] = []
        self._times.launched(plan, self.scheduler.runs_jobs_alone)
        # Until every common step is prepared, any may have to be compiled first.
        self.step_s = 0.0 if self.has_idle_task else self._times.predicted_s(plan)
        self.in_step = True
        plan.after, plan.orders = self._last_absorbed, self.scheduler.orders.take()
        handle = self.rank.run(plan)
        assert handle is not None, "the plan has rows"
        masks = None
        if plan.masked:
            # What a grammar allows depends on the tokens of previous steps, where these sequences have any in flight.
            while self._in_flight and plan.follows:
                deltas += self._absorb_oldest()
            masks = self.scheduler.masks(plan)
        handle.sample(masks)
        self.scheduler.launched(plan)
        self._in_flight.append((plan, handle))
        return deltas

    def _absorb_oldest(self) -> list[TokenDelta]:
        plan, handle = self._in_flight.popleft()
        try:
            sampled = handle.result()
            self._last_absorbed = plan.number
            took_s = self._times.done(plan)
            self.scheduler.set_prefill_rate(self._times.tokens_per_s)
            self.computed_tokens += plan.n_tokens
        except DeviceLost:
            raise  # only a new process can go on
        except Exception:
            self._times.forget(plan)
            _log.exception("a step failed and is retried", extra={"rows": plan.n_rows, "tokens": plan.n_tokens})
            return self.scheduler.retry(plan, Internal("the engine could not compute this request"))
        if plan.depth:
            self.scheduler.take_drafts(plan, sampled, handle.drafts())
        if plan.n_scored:
            self.scheduler.take_scores(plan, handle.scores())
        deltas = self.scheduler.absorb(plan, sampled)
        self.scheduler.measured(plan, took_s)
        return deltas


def _is_awaited(plan: StepPlan) -> bool:
    """True if the next step is planned only after this one was absorbed, because many rows have drafts.

    A row with drafts has no next row before that. If such rows are few, the next step is computed without them.
    """
    return plan.n_awaited * AWAITED_SHARE >= plan.n_rows if plan.n_awaited else False
