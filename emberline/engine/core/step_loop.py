"""The step loop: plans a step, launches it and absorbs the result of the one before."""

import logging
import time
from collections import deque
from collections.abc import Callable

from emberline.engine.core.plan import DeviceLost, Handle, Runner, StepPlan
from emberline.engine.core.rank import Rank
from emberline.engine.core.scheduler import Scheduler
from emberline.kv.cache import KVEventFeed
from emberline.protocol.errors import Internal
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import EngineLoad
from emberline.protocol.request import EngineRequest

MIN_RATED_TOKENS = 64  # of prompts in a step: fewer say nothing about the prefill rate
AWAITED_SHARE = 8  # of one row in so many with drafts: else more is lost by their rest than by a device that waits
MAX_HOST_S = 0.01  # between two steps; more means that there was nothing to do
_RATE_GAIN = 0.2

_log = logging.getLogger(__name__)


class StepTimes:
    """Durations of steps as moving averages: the prefill rate, which is part of the load report, and small steps."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # of prompts; 0: not known yet
        self._small_s = 0.0  # duration of a step that computes few prompt tokens, or none; 0: not known yet
        self._launched_s: dict[int, float] = {}  # by the number of a plan in flight
        self._done_s = 0.0

    def launched(self, plan: StepPlan) -> None:
        """Note that a plan is launched now."""
        self._launched_s[plan.number] = time.perf_counter()

    def forget(self, plan: StepPlan) -> None:
        """Leave out a plan that has failed."""
        self._launched_s.pop(plan.number, None)

    def done(self, plan: StepPlan) -> float:
        """Measure a plan whose result has come. The device begins a plan when the previous one is done.

        Returns the seconds since then, including those that the device waited for the host, if they are few.
        """
        now_s = time.perf_counter()
        launched_s, done_s = self._launched_s.pop(plan.number, now_s), self._done_s
        began_s = max(launched_s, done_s)
        self._done_s = now_s
        took_s = now_s - began_s
        if took_s <= 0:
            return 0.0
        n_tokens = 0
        if plan.n_tokens - plan.n_drafts > plan.n_rows:  # it does not only decode
            n_tokens = sum(row.end - row.start for row in plan.others if row.end - row.start > 1)
        if n_tokens >= MIN_RATED_TOKENS:
            self.tokens_per_s = smoothed(self.tokens_per_s, n_tokens / took_s)
        else:
            self._small_s = smoothed(self._small_s, took_s)
        return now_s - max(done_s, launched_s - MAX_HOST_S)

    def predicted_s(self, plan: StepPlan) -> float:
        """Expected duration of a step that is about to be launched; 0 if nothing was measured yet.

        Until a prompt was measured, each of its tokens counts as much as a small step, which is too much.
        """
        n_prompt = plan.n_tokens - plan.n_drafts - plan.n_rows
        if not self.tokens_per_s:
            return self._small_s * (plan.n_tokens if n_prompt else 1)
        if not n_prompt and self._small_s:
            return self._small_s
        return self._small_s + plan.n_tokens / self.tokens_per_s


def smoothed(known: float, measured: float) -> float:
    """Moving average after one more measurement; `known` is 0 before the first."""
    return known + _RATE_GAIN * (measured - known) if known else measured


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
        if self.scheduler.has_notices or self._in_flight or self.scheduler.orders:
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
        self.preparing = False
        self.n_prepared += 1

    @property
    def load(self) -> EngineLoad:
        """The load report of this engine."""
        load = self.scheduler.load()
        load.prefill_rate = self._times.tokens_per_s
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
        self._times.launched(plan)
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
