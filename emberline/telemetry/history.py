"""The last hour as time series, in fixed memory, and the requests that ended last. Kept in the core.

One point covers `STEP_S` seconds. Requests, tokens and latencies are summed up in the open point; `close_point` closes
it and samples the ledger. `/api/status`, `emberline top` and the operator's pages read it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.balancer.worker import Snapshot
from emberline.telemetry.metrics import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S, Counts, Histogram

STEP_S = 10
N_POINTS = 360  # an hour
N_RECENT = 200  # ended requests


class Point(msgspec.Struct):
    """Counts are of the whole step, gauges at its end, latencies in milliseconds; None: nothing was measured."""

    time_s: int  # Unix time at which it was closed
    requests: int = 0  # ended
    failed: int = 0  # of them
    refused: int = 0  # not admitted
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p95_ms: float | None = None
    itl_p99_ms: float | None = None
    in_flight: int = 0  # requests on workers
    waiting: int = 0  # requests in the admission queue
    running: int = 0  # sequences in engines
    queued_jobs: int = 0
    kv_used: float = 0.0  # of the fullest worker, 0 to 1
    utilisation: float | None = None  # mean over the workers that report it, 0 to 1


FIELDS = Point.__struct_fields__


class WorkerRate(msgspec.Struct, frozen=True):
    """Tokens per second of one worker over the last step or two."""

    input_per_s: float = 0.0
    output_per_s: float = 0.0


class History:
    """`n_queued`: jobs in the durable queue, as last counted; set by whoever counts them."""

    def __init__(self, snapshot: Callable[[], Snapshot], clock: Callable[[], float] = time.time) -> None:
        self.started_s = clock()
        self.recent: deque[UsageRow] = deque(maxlen=N_RECENT)
        self.n_queued: Callable[[], int] = lambda: 0
        self._snapshot = snapshot
        self._clock = clock
        self._points: deque[Point] = deque(maxlen=N_POINTS)
        # By worker, at the last two steps: time, prompt tokens, output tokens, since its start.
        self._totals: deque[dict[str, tuple[float, int, int]]] = deque([{}, {}], maxlen=2)
        self._begin()

    def _begin(self) -> None:
        self._open = Point(0)
        self._ttft_s = Histogram(TTFT_BOUNDS_S)
        self._inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)

    def progressed(self, row: UsageRow, before: UsageRow | None) -> None:
        """A request has used what `row` says, and at the last report what `before` says: long replies count as they
        grow and not all at once when they end."""
        point = self._open
        point.input_tokens += row.input_tokens - (0 if before is None else before.input_tokens)
        point.cached_tokens += row.cached_tokens - (0 if before is None else before.cached_tokens)
        point.output_tokens += row.output_tokens - (0 if before is None else before.output_tokens)

    def ended(self, row: UsageRow, before: UsageRow | None, inter_token: Counts) -> None:
        self.progressed(row, before)
        self.recent.append(row)
        self._open.requests += 1
        self._open.failed += row.status == "failed"
        if inter_token.buckets:
            self._inter_token_s.add(inter_token)
        if row.first_token_us is not None:
            self._ttft_s.observe((row.first_token_us - row.created_us) / 1e6)

    def now_s(self) -> float:
        return self._clock()

    def refused(self, times: int) -> None:
        self._open.refused += times

    def close_point(self) -> None:
        snapshot, point, now_s = self._snapshot(), self._open, self._clock()
        point.time_s = int(now_s)
        point.ttft_p50_ms, point.ttft_p95_ms, point.ttft_p99_ms = _quantiles_ms(self._ttft_s)
        point.itl_p50_ms, point.itl_p95_ms, point.itl_p99_ms = _quantiles_ms(self._inter_token_s)
        point.in_flight = snapshot.dispatched
        point.waiting = sum(snapshot.waiting.values())
        loads = [worker.load for worker in snapshot.workers]
        point.running = sum(load.running for load in loads)
        used = (load.kv_used_blocks / load.kv_total_blocks for load in loads if load.kv_total_blocks)
        point.kv_used = round(max(used, default=0.0), 4)
        busy = [load.utilisation for load in loads if load.utilisation is not None]
        point.utilisation = round(sum(busy) / len(busy), 4) if busy else None
        point.queued_jobs = self.n_queued()
        self._points.append(point)
        totals = {w.name: (now_s, w.load.prompt_tokens, w.load.output_tokens) for w in snapshot.workers}
        self._totals.append(totals)
        self._begin()

    def series(self, since_s: int = 0) -> dict[str, list[float | None]]:
        """The closed points behind `since_s`, by field."""
        points = [point for point in self._points if point.time_s > since_s]
        return {name: [getattr(point, name) for point in points] for name in FIELDS}

    def rate(self, worker: str, prompt_tokens: int, output_tokens: int) -> WorkerRate:
        """Tokens per second of a worker whose totals are these now. Totals that decreased are of a restarted one."""
        then = self._totals[0].get(worker) or self._totals[1].get(worker)
        if then is None:
            return WorkerRate()
        seconds = max(1.0, self._clock() - then[0])
        n_input, n_output = max(0, prompt_tokens - then[1]), max(0, output_tokens - then[2])
        return WorkerRate(round(n_input / seconds, 1), round(n_output / seconds, 1))

    async def run(self) -> None:
        """Close a point every step, until cancelled."""
        while True:
            end_s = (self._clock() // STEP_S + 1) * STEP_S
            while (now_s := self._clock()) < end_s:  # a timer may fire a little early
                await asyncio.sleep(end_s - now_s)
            self.close_point()


def _quantiles_ms(histogram: Histogram) -> tuple[float | None, float | None, float | None]:
    return quantile_ms(histogram, 0.5), quantile_ms(histogram, 0.95), quantile_ms(histogram, 0.99)


def quantile_ms(histogram: Histogram, q: float) -> float | None:
    """Interpolated inside its bucket, as Prometheus does it; in the open-ended bucket, its lower bound."""
    buckets, bounds = histogram.counts.buckets, histogram.bounds
    rank = q * sum(buckets)
    if not rank:
        return None
    below = 0
    for bucket, n in enumerate(buckets[:-1]):
        if below + n >= rank:
            lower = bounds[bucket - 1] if bucket else 0.0
            return round(1000 * (lower + (bounds[bucket] - lower) * (rank - below) / n), 3)
        below += n
    return 1000 * bounds[-1]
