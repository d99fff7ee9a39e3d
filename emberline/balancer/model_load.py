"""Load of one model as one core sees it, for the planner: queued work, arrivals, and what each worker measures.

The planner reads it every few seconds, in time proportional to the workers and to a bounded number of waiting requests.
Routing itself only counts.
"""

import math
from collections import deque
from collections.abc import Callable

from emberline.balancer import step_capacity
from emberline.balancer.balancer import Balancer
from emberline.balancer.ledger import InFlightRequest
from emberline.balancer.worker import Worker
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import EngineLoad
from emberline.protocol.scaling import STEP_S, ArrivalPoint, ModelLoad, WorkerView

ITL_S = 0.1  # that a decode step may take: the rate of output tokens is of as many sequences as keep to it
CONTEXT_TOKENS = 1024  # of a sequence, where none runs
N_POINTS = 30  # of the history: five minutes
MIN_BUSY_S = 5.0  # in which a device must have computed before its rates are told
MAX_MATCHED = 256  # waiting requests whose prompts are looked up in the prefix index; the others are taken to be alike


class BusyRates:
    """Tokens per second in which a worker's device computes, over the last minutes.

    A replica delivers at least that when it computes all the time: the time of a step grows by less than its work. So
    these rates correct a cost model that takes a worker for slower than it is.
    """

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int, int]] = deque(maxlen=N_POINTS)  # one for each interval of arrivals

    def add(self, load: EngineLoad) -> None:
        """Take in the totals of a load report. Totals that have fallen are those of a restarted engine."""
        now = load.busy_s, load.prompt_tokens, load.output_tokens
        if self._totals and now < self._totals[-1]:
            self._totals.clear()
        self._totals.append(now)

    def rates(self, load: EngineLoad) -> tuple[float, float]:
        """Prompt tokens and output tokens per busy second; 0 each before the device has computed for long enough."""
        busy_s, prompt_tokens, output_tokens = self._totals[0] if self._totals else (load.busy_s, 0, 0)
        spent_s = load.busy_s - busy_s
        if spent_s < MIN_BUSY_S:
            return 0.0, 0.0
        n_prompt, n_output = load.prompt_tokens - prompt_tokens, load.output_tokens - output_tokens
        return max(0, n_prompt) / spent_s, max(0, n_output) / spent_s


class ModelLoadMeter:
    """Measures the load of one model. Owns the history of its arrivals."""

    def __init__(self, model: str, balancer: Balancer, now_us: Callable[[], int]) -> None:
        """`now_us`: the store's clock."""
        self._model, self._balancer, self._now_us = model, balancer, now_us
        self._points: deque[ArrivalPoint] = deque(maxlen=N_POINTS)
        self._before: tuple[int, int] | None = None  # requests and uncached tokens, of all that ever came
        self._outputs: dict[str, int] = {}  # totals of workers
        self._busy: dict[str, BusyRates] = {}
        self._busy_s = -math.inf  # when something last ran or waited, of the balancer's clock

    def read(self, now_s: float) -> ModelLoad:
        """`now_s`: of the balancer's clock."""
        workers = self._balancer.fleet.workers_of(self._model)
        waiting = self._balancer.waiting_of(self._model)
        waiting_tokens = self._waiting_tokens(waiting)
        self._count(workers, len(waiting), waiting_tokens)
        pool = self._balancer.fleet.pool_of(self._model)
        routed_s = -math.inf if pool is None else pool.routed_s
        if waiting or any(each.in_flight.total for each in workers):
            self._busy_s = now_s
        pending = sum(max(0, each.in_flight.prefill_tokens - each.reports.done_tokens) for each in workers)
        return ModelLoad(
            model=self._model,
            queued_tokens=waiting_tokens + pending,
            held_requests=sum(not record.waits_for for record in waiting),
            idle_s=min(now_s - max(routed_s, self._busy_s), 1e9),
            workers=tuple(view(each, self._busy.setdefault(each.name, BusyRates())) for each in workers),
            arrivals=tuple(self._points),
        )

    def _waiting_tokens(self, waiting: list[InFlightRequest]) -> int:
        """Uncached, as far as the fleet's index knows."""
        if not waiting:
            return 0
        some = waiting[:MAX_MATCHED]
        cached = sum(self._balancer.cached_tokens(record.request) for record in some)
        n_some = sum(max(1, record.request.input_tokens) for record in some)  # as routing counts them
        n_all = sum(max(1, record.request.input_tokens) for record in waiting)
        return int(n_all * (1 - cached / n_some)) if n_some else 0

    def _count(self, workers: list[Worker], n_waiting: int, waiting_tokens: int) -> None:
        """Add what has come since the last time to the open interval: what was routed, and by what the queue grew."""
        pool = self._balancer.fleet.pool_of(self._model)
        n_routed, routed_tokens = (0, 0) if pool is None else (pool.n_routed, pool.routed_tokens)
        came = n_routed + n_waiting, routed_tokens + waiting_tokens
        before = self._before or came
        self._before = max(came[0], before[0]), max(came[1], before[1])
        output_tokens = self._new_output(workers)
        kv_tokens = sum(each.load.kv_used_blocks * BLOCK_TOKENS for each in workers if each.connected)
        number = self._now_us() // (STEP_S * 1_000_000)
        if not self._points or self._points[-1].number < number:
            self._points.append(ArrivalPoint(number))
            self._busy = {each.name: self._busy.get(each.name) or BusyRates() for each in workers}
            for each in workers:
                self._busy[each.name].add(each.load)
        point = self._points[-1]
        self._points[-1] = ArrivalPoint(
            point.number,
            point.requests + self._before[0] - before[0],
            point.uncached_tokens + self._before[1] - before[1],
            point.output_tokens + output_tokens,
            max(point.kv_tokens, kv_tokens),
        )

    def _new_output(self, workers: list[Worker]) -> int:
        """Estimate this core's share of the tokens that the workers have generated since the last call."""
        new = 0.0
        totals: dict[str, int] = {}
        for worker in workers:
            total, load = worker.load.output_tokens, worker.load
            since = total - self._outputs.get(worker.name, total)
            active = load.running + load.waiting
            share = min(1.0, worker.in_flight.active / active) if active else 1.0
            new += max(0, since) * share  # less than before: it was restarted
            totals[worker.name] = total
        self._outputs = totals
        return int(new)


def view(worker: Worker, busy: BusyRates) -> WorkerView:
    load, capacity = worker.load, worker.capacity
    running = load.running + load.waiting if worker.connected else 0
    prefill_rate = load.prefill_rate
    if not prefill_rate and worker.prefill_speed.n:
        prefill_rate = 1 / (worker.prefill_speed.scale * worker.cost.token_s)
    busy_prefill_rate, busy_decode_rate = busy.rates(load)
    decodes = worker.endpoint.role != "prefill"
    return WorkerView(
        name=worker.name,
        role=worker.endpoint.role,
        connected=worker.connected,
        draining=worker.draining,
        in_flight=worker.in_flight.total,
        running=running,
        kv_used_tokens=load.kv_used_blocks * BLOCK_TOKENS if worker.connected else 0,
        kv_tokens=capacity.kv_tokens,
        prefill_rate=round(max(prefill_rate, busy_prefill_rate), 3),
        decode_rate=round(max(decode_rate(worker), busy_decode_rate), 3) if decodes else 0.0,
        utilisation=load.utilisation,
        drain_s=round(worker.mean_request_s, 3) if running else 0.0,
    )


def decode_rate(worker: Worker) -> float:
    """Output tokens per second with as many sequences as `ITL_S` and the worker allow; 0: no step was measured.

    The worker's own measurement of its steps counts, if it has one; else the cost model, scaled to its steps.
    """
    load, cost, scale = worker.load, worker.cost, worker.decode_speed.scale
    context = load.kv_used_blocks * BLOCK_TOKENS / load.running if load.running else CONTEXT_TOKENS
    if load.step_cost is not None:
        return step_capacity.decode_rate(load.step_cost, ITL_S, context, worker.capacity.max_running)
    if not worker.decode_speed.n:
        return 0.0
    room = (ITL_S / scale - cost.step_s) / (cost.stream_s + cost.context_s * context)
    streams = max(1, min(worker.capacity.max_running, int(room)))
    return streams / (cost.decode_step_s(streams, int(streams * context)) * scale)
