"""Admission control for jobs: how many may run on which worker now, so that requests with a waiting client come first.

A job is claimed from the durable queue only against a grant, and then goes straight to the worker that the grant names.
While requests run on a worker, jobs get a share of its sequences: half, or as much as requests leave of its device's
time if that is more, and less when steps or first tokens become slow. Without requests they get all of them. A minimum
is always granted: the engine itself keeps waiting requests from starving.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from emberline.balancer.fleet import Fleet
from emberline.balancer.worker import Worker

SHARE = 0.5  # of a worker's sequences, at least, while it serves requests too
QUIET_S = 5.0  # without a request, after which jobs may use the whole worker
MAX_STEP_S = 0.05  # step time above which jobs are cut back: a request may have to wait for the end of a step
FLOOR = 1 / 16  # of a worker's sequences, granted in any case; one at least
AHEAD = 1 / 8  # granted beyond a worker's sequences when it has no requests: it must not idle while jobs are claimed
KV_FULL = 0.9  # of the KV blocks: more jobs would only evict each other
_ADJUST_S = 0.2  # between two adjustments of the cap
_DECREASE, _INCREASE = 0.8, 0.02  # multiplicative and additive, per adjustment
_SMOOTHING = 0.2
_MIN_SAMPLES = 5
_STALE_S = 300.0  # TTFT samples that are older say nothing about now


@dataclass(slots=True, eq=False)
class SmoothedMean:
    """An exponentially smoothed mean, and its age."""

    value: float = 0.0
    n: int = 0
    at_s: float = 0.0

    def add(self, value: float, now_s: float) -> None:
        self.n += 1
        self.at_s = now_s
        self.value += max(_SMOOTHING, 1 / self.n) * (value - self.value)

    def is_known(self, now_s: float) -> bool:
        return self.n >= _MIN_SAMPLES and now_s - self.at_s < _STALE_S


class JobQuota:
    """Cap on the jobs that one worker runs. The cap adapts to the latency of the worker's requests."""

    def __init__(self, worker: Worker, share: float, now_s: float) -> None:
        self.worker = worker
        self.granted = 0  # sequences
        self.emptying = False  # no more grants, until a job that must run alone has run
        self.exclusive = False  # that job runs
        self.step_s = SmoothedMean()
        self._share = share
        self._cap = 1.0  # of the worker's sequences
        self._last_request_s = now_s - QUIET_S  # when a request last ran there
        self._ttft_s = {True: SmoothedMean(), False: SmoothedMean()}  # of requests, with and without jobs on the worker
        self._adjusted_s, self._adjusted_steps = now_s, 0

    @property
    def max_running(self) -> int:
        return self.worker.capacity.max_running

    def free(self, now_s: float) -> int:
        """Sequences that may be granted now."""
        self._adjust(now_s)
        if not self.worker.is_ready(now_s) or self.emptying:
            return 0
        floor = max(1, int(self.max_running * FLOOR))
        return max(0, max(self._limit(now_s) - self._n_foreign_jobs(), floor) - self.granted)

    def observe_ttft(self, ttft_s: float, mixed: bool, now_s: float) -> None:
        self._ttft_s[mixed].add(ttft_s, now_s)

    def _limit(self, now_s: float) -> int:
        load = self.worker.load
        if load.waiting > load.waiting_batch:
            return 0
        if load.kv_total_blocks and load.kv_used_blocks > KV_FULL * load.kv_total_blocks:
            return self.granted
        if now_s - self._last_request_s >= QUIET_S:
            return self.max_running + max(1, int(self.max_running * AHEAD))
        return min(int(self.max_running * min(self._cap, self._jobs_share())), self.max_running - self._n_requests())

    def _jobs_share(self) -> float:
        """Share of the worker's sequences that jobs may have beside requests.

        A step with a request in it counts as the requests' time, however many jobs it computes as well: one stream
        alone may fill the time and leave most of every step. So busy time takes nothing away, and idle time adds.
        """
        load = self.worker.load
        if load.utilisation is None:
            return self._share
        return max(self._share, 1.0 - (load.utilisation - load.jobs_utilisation))

    def _n_requests(self) -> int:
        """Sequences that are no jobs, of all cores. Where a worker does not report jobs, only ours are known."""
        load, in_flight = self.worker.load, self.worker.in_flight
        n_jobs = max(load.running_batch + load.waiting_batch, in_flight.batch_active)
        return max(in_flight.sync_active, load.running + load.waiting - n_jobs)

    def _n_foreign_jobs(self) -> int:
        """Sequences of jobs that other cores run there: they take part of what jobs may have."""
        load = self.worker.load
        return max(0, load.running_batch + load.waiting_batch - self.worker.in_flight.batch_active)

    def _adjust(self, now_s: float) -> None:
        """Measure the step time, and move the cap."""
        if self._n_requests() > 0:
            self._last_request_s = now_s
        elapsed_s, steps = now_s - self._adjusted_s, self.worker.load.steps
        if elapsed_s < _ADJUST_S:
            return
        n_steps = steps - self._adjusted_steps
        self._adjusted_s, self._adjusted_steps = now_s, steps
        if n_steps <= 0 or elapsed_s > 5 * _ADJUST_S:
            return  # the worker was idle, or has restarted
        self.step_s.add(elapsed_s / n_steps, now_s)
        if now_s - self._last_request_s >= QUIET_S:
            return  # no request to protect: keep the cap for the next one
        if self.granted and self._is_slow(now_s):
            self._cap = max(min(self._cap, self._jobs_share()) * _DECREASE, FLOOR)
        else:
            self._cap = min(self._cap + _INCREASE, 1.0)

    def _is_slow(self, now_s: float) -> bool:
        mixed, alone = self._ttft_s[True], self._ttft_s[False]
        # Half a step on average: the unlucky wait twice as long.
        is_late = mixed.is_known(now_s) and alone.is_known(now_s) and mixed.value > alone.value + MAX_STEP_S / 2
        return is_late or self.step_s.value > MAX_STEP_S


class Grant:
    """Room for one job on a worker. Released once."""

    __slots__ = ("_n", "_on_return", "_quota", "exclusive")

    def __init__(self, quota: JobQuota, on_return: Callable[[], None], exclusive: bool = False) -> None:
        self._quota = quota
        self._n = 1
        self._on_return = on_return
        self.exclusive = quota.exclusive = exclusive
        quota.granted += 1

    @property
    def engine(self) -> str:
        return self._quota.worker.name

    def resize(self, n: int) -> None:
        """The job needs `n` sequences."""
        self._quota.granted += n - self._n
        self._n = n

    def release(self) -> None:
        self._quota.granted -= self._n
        assert self._quota.granted >= 0
        self._n = 0
        if self.exclusive:
            self._quota.emptying = self._quota.exclusive = self.exclusive = False
        self._on_return()


class Grants:
    def __init__(self, fleet: Fleet, share: float = SHARE, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._share = share
        self._clock = clock
        self._quotas: dict[str, JobQuota] = {}  # by worker
        self._queued_since_s: dict[str, float] = {}  # by model
        self._room = asyncio.Event()

    def issue(self, model: str, most: int) -> list[Grant]:
        """Up to `most` grants, those on one worker together."""
        now_s = self._clock()
        grants: list[Grant] = []
        for quota in sorted(self._of(model), key=lambda quota: quota.granted / quota.max_running):
            n = min(quota.free(now_s), most - len(grants))
            grants += [Grant(quota, self.notify_room) for _ in range(n)]
        return grants

    def issue_exclusive(self, model: str) -> Grant | None:
        """A worker without other jobs. None: not yet, one is being emptied; ask again."""
        now_s = self._clock()
        quotas = [quota for quota in self._of(model) if quota.worker.is_ready(now_s)]
        if not quotas:
            return None
        quota = min(quotas, key=lambda quota: (not quota.emptying, quota.granted))
        quota.emptying = True
        return Grant(quota, self.notify_room, exclusive=True) if not quota.granted else None

    def cancel_exclusive(self, model: str) -> None:
        """No job is waiting to run alone any more."""
        for quota in self._of(model):
            quota.emptying = quota.exclusive
        self.notify_room()

    def observe_ttft(self, worker: str, ttft_s: float, mixed: bool) -> None:
        """The TTFT of a request on this worker; `mixed`: jobs ran there when the request was dispatched."""
        served_by = self._fleet.workers.get(worker)
        if served_by is not None and (quota := self._quota(served_by)) is not None:
            quota.observe_ttft(ttft_s, mixed, self._clock())

    def queued(self, oldest_s: Mapping[str, float]) -> None:
        """Record the age in seconds of the oldest queued job of each model. Models without queued jobs are left out."""
        now_s = self._clock()
        self._queued_since_s = {model: now_s - waited_s for model, waited_s in oldest_s.items()}

    def oldest_job_s(self, model: str) -> float | None:
        """None: no job of the model is queued."""
        since_s = self._queued_since_s.get(model)
        return None if since_s is None else max(0.0, self._clock() - since_s)

    def granted_on(self, worker: str) -> int:
        """Sequences of jobs that were granted room there, whether or not they run yet."""
        quota = self._quotas.get(worker)
        return 0 if quota is None else quota.granted

    def forget(self, worker: str) -> None:
        """Remove the quota of a worker that has left for good."""
        self._quotas.pop(worker, None)

    def notify_room(self) -> None:
        """There may be room where there was none."""
        self._room.set()

    async def wait_for_room(self) -> None:
        await self._room.wait()
        self._room.clear()

    def _of(self, model: str) -> list[JobQuota]:
        quotas = map(self._quota, self._fleet.workers_of(model))
        return [quota for quota in quotas if quota is not None]

    def _quota(self, worker: Worker) -> JobQuota | None:
        """The quota of a worker. Returns None if jobs are never granted room there."""
        if worker.endpoint.role == "prefill" or worker.endpoint.account:
            return None
        quota = self._quotas.get(worker.name)
        if quota is None or quota.worker is not worker:
            quota = self._quotas[worker.name] = JobQuota(worker, self._share, self._clock())
        return quota
