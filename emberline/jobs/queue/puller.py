"""The puller: claims jobs as engines have room for them and runs the attempts of this process.

A job stays in the store until admission has granted it room on an engine, and then goes straight there. Any number of
pullers may work on one store. If one dies, its unfinished jobs are reclaimed and run again.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import secrets
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline.jobs.queue.attempt import AdmissionGrant, JobAttempt, Settle, StopReason
from emberline.jobs.queue.job import JobKey, Lease
from emberline.jobs.queue.queue import Queue
from emberline.jobs.queue.reader import QueueDepth
from emberline.protocol.errors import EmberlineError
from emberline.protocol.request import Principal
from emberline.service.work import TaskRunner

MAX_CLAIM = 256  # jobs at once
MAX_LABELS = 100  # models with metrics of their own
OTHER = "other"  # the label of all others
DRAIN_S = 5.0  # for running jobs to finish on close; the others return to the queue

log = logging.getLogger("emberline.jobs")


class PullerTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a puller, in seconds."""

    poll_s: float = 1.0  # for jobs without a notification
    capacity_poll_s: float = 0.25  # for capacity without a notification: an engine's load has changed
    heartbeat_s: float = 5.0  # or a quarter of a lease; also how soon an unnotified cancellation is noticed
    monitor_s: float = 5.0  # between two updates of the metrics, and looks for quarantined jobs
    restart_s: float = 1.0  # before a loop that failed is started again


DEFAULTS = PullerTimings()


class LeaseOwner:
    """The name under which a process holds leases, and a lock on a file as proof that it lives.

    The kernel releases the lock of a killed process. The next process on the same data folder notices it and reclaims
    the dead one's jobs without waiting for the leases to end.
    """

    def __init__(self, data_dir: Path) -> None:
        folder = data_dir / "pullers"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.name = f"{socket.gethostname()[:40]}-{secrets.token_hex(6)}"
        self._path = folder / self.name
        self._file: int | None = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def dead(self) -> list[str]:
        """Names of dead processes on this data folder; `forget` each once its jobs are reclaimed."""
        others = [path for path in self._path.parent.iterdir() if path != self._path]
        return [path.name for path in others if _is_unlocked(path)]

    def forget(self, name: str) -> None:
        (self._path.parent / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def _is_unlocked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


class QueueMetrics(Collector):
    """Counts the job events of this process; depth and age are those of the whole queue when last read.

    Clients name the models of jobs. Beyond `max_models` labels, models are counted together as `other`: of depths,
    the models with the fewest queued jobs.
    """

    def __init__(self, max_models: int = MAX_LABELS) -> None:
        self._max_models = max_models
        self._counts: Counter[tuple[str, str]] = Counter()
        self._counted: set[str] = set()  # models in `_counts`
        self._depths: Sequence[QueueDepth] = ()
        self._n_dead = 0
        self._now_us = 0

    def count(self, event: str, model: str, n: int = 1) -> None:
        """Count an event of `n` jobs."""
        if model not in self._counted and len(self._counted) >= self._max_models:
            model = OTHER
        self._counted.add(model)
        self._counts[event, model] += n

    @property
    def n_queued(self) -> int:
        return sum(depth.n_queued for depth in self._depths)

    @property
    def models(self) -> list[str]:
        """The models with queued jobs."""
        return list(dict.fromkeys(depth.model for depth in self._depths if depth.n_queued))

    def total(self, event: str) -> int:
        return sum(n for (name, _), n in self._counts.items() if name == event)

    def update(self, depths: Sequence[QueueDepth], n_dead: int, now_us: int) -> None:
        self._depths, self._n_dead, self._now_us = depths, n_dead, now_us

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily("emberline_queue_depth", "Queued jobs.", labels=["model"])
        leased = GaugeMetricFamily("emberline_queue_leased", "Leased (running) jobs.", labels=["model"])
        oldest = GaugeMetricFamily("emberline_queue_age_seconds", "Age of the next job.", labels=["model"])
        for model, depths in sorted(self._by_label().items()):
            queued.add_metric([model], sum(depth.n_queued for depth in depths))
            leased.add_metric([model], sum(depth.n_leased for depth in depths))
            since_us = min((depth.oldest_us for depth in depths if depth.oldest_us is not None), default=self._now_us)
            oldest.add_metric([model], max(0.0, (self._now_us - since_us) / 1e6))
        yield from (queued, leased, oldest)
        yield GaugeMetricFamily("emberline_queue_dead_letters", "Jobs in the dead-letter queue.", value=self._n_dead)
        events = CounterMetricFamily("emberline_queue_lines", "Job events in this process.", labels=["event", "model"])
        for (event, model), n in sorted(self._counts.items()):
            events.add_metric([event, model], n)
        yield events

    def _by_label(self) -> dict[str, list[QueueDepth]]:
        by_model: defaultdict[str, list[QueueDepth]] = defaultdict(list)
        for depth in self._depths:
            by_model[depth.model].append(depth)
        ranked = sorted(by_model, key=lambda model: -sum(depth.n_queued for depth in by_model[model]))
        labels: dict[str, list[QueueDepth]] = {model: by_model[model] for model in ranked[: self._max_models]}
        if rest := ranked[self._max_models :]:
            labels[OTHER] = [depth for model in rest for depth in by_model[model]]
        return labels


class BatchAdmission(Protocol):
    """Admission, as far as queued jobs are concerned."""

    def issue(self, model: str, most: int) -> Sequence[AdmissionGrant]: ...

    def queued(self, oldest_s: Mapping[str, float]) -> None:
        """Record the age in seconds of the oldest queued job of each model, so that these models can be loaded."""

    def issue_exclusive(self, model: str) -> AdmissionGrant | None:
        """A grant for an engine without other jobs; None: not yet, one is being drained."""

    def cancel_exclusive(self, model: str) -> None:
        """Stop draining an engine for an exclusive grant."""

    def notify_room(self) -> None:
        """Wake `wait_for_room`."""

    async def wait_for_room(self) -> None:
        """Return when there may be room where there was none."""


class Puller:
    """Owns the attempts of this process. `start` it, and `close` it before the service and the queue."""

    def __init__(
        self,
        queue: Queue,
        service: TaskRunner,
        admission: BatchAdmission,
        models: Callable[[], Collection[str]],
        principal: Callable[[str, str], Principal],
        owner: LeaseOwner,
        timings: PullerTimings = DEFAULTS,
        settle: Settle = lambda row, is_stored: None,
    ) -> None:
        self._timings = timings
        self.metrics = QueueMetrics()
        self._queue = queue
        self._service = service
        self._admission = admission
        self._models = models  # that can be served; workers may bring others at run time
        self._settle = settle
        self._principal = principal  # of an account and the id of the key it used
        self.owner = owner
        self._attempts: dict[JobKey, JobAttempt] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._empty: set[str] = set()  # models without claimable jobs, until the next notification
        self._notified = asyncio.Event()  # of jobs that may have become claimable
        self._draining: set[str] = set()  # models of which an engine is drained for a quarantined job
        self._heartbeat_now = asyncio.Event()
        self._heartbeats: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def start(self, stop: asyncio.Event | None = None) -> None:
        """Once `stop` is set no more jobs are claimed: the server drains, and running ones finish."""
        self._stop = stop or self._stop
        loops = [self._pull, self._listen_for_jobs, self._listen_for_stops, self._monitor]
        self._loops = [asyncio.create_task(self._forever(loop)) for loop in loops]
        self._heartbeats = asyncio.create_task(self._forever(self._send_heartbeats))

    async def close(self, drain_s: float = DRAIN_S) -> None:
        """Claim no more, let jobs finish for a moment, and return the others. The service must still run."""
        await _cancel(self._loops)
        if self._running:
            await asyncio.wait(self._running, timeout=drain_s)
        for attempt in self._attempts.values():
            attempt.stop(StopReason.LEAVING)
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._heartbeats is not None:
            await _cancel([self._heartbeats])
        try:
            await self._queue.deregister(self.owner.name)
            self.owner.close()
        except EmberlineError as error:  # its leases will end
            log.warning("jobs were not returned to the queue: %s", error.message)

    async def _forever(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the loop, and start it again after an error of the store, or a bug."""
        while True:
            try:
                await loop()
            except EmberlineError as error:
                log.warning("the puller has to wait: %s", error.message)
            except Exception:
                log.exception("the puller failed and is restarted")
            await asyncio.sleep(self._timings.restart_s * random.uniform(0.5, 1.5))

    # --- claiming ----------------------------------------------------------------------------------------------------

    async def _pull(self) -> None:
        for name in self.owner.dead():
            await self._queue.reclaim_from(name)
            self.owner.forget(name)
        while True:
            self._notified.clear()
            for model in self._models():
                if model not in self._empty and not self._stop.is_set():
                    await self._claim(model)
            # Every request that ends makes room: that matters only while jobs are known to wait for it.
            has_jobs = not self._empty.issuperset(self._models())
            waiting = self._admission.wait_for_room() if has_jobs else self._notified.wait()
            await _wait(waiting, self._timings.capacity_poll_s * random.uniform(0.5, 1.5))

    async def _claim(self, model: str) -> None:
        """Claim as many jobs as engines have room for."""
        grants = self._admission.issue(model, MAX_CLAIM)
        if not grants:
            return
        try:
            leases = await self._queue.claim(self.owner.name, model, len(grants))
        except BaseException:
            _release(grants)
            raise
        if len(leases) < len(grants):
            self._empty.add(model)
        self.metrics.count("claimed", model, len(leases))
        for lease, grant in zip(leases, grants, strict=False):
            self._start_attempt(lease, grant)
        _release(grants[len(leases) :])

    def _start_attempt(self, lease: Lease, grant: AdmissionGrant) -> asyncio.Task[None]:
        attempt = JobAttempt(self._queue, lease, grant, self.metrics.count, self._settle)
        if (earlier := self._attempts.get(lease.key)) is not None:  # its lease had ended, and we claimed the job again
            earlier.stop(StopReason.LOST)
        self._attempts[lease.key] = attempt
        task = asyncio.create_task(self._run(attempt))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _run(self, attempt: JobAttempt) -> None:
        lease = attempt.lease
        try:
            await attempt.run(self._service, self._principal(lease.account, lease.key_id))
        except EmberlineError as error:
            log.error("a job's outcome was not written: %s", error.message, extra={"request_id": lease.request_id})
        except Exception:
            log.exception("an attempt failed", extra={"request_id": lease.request_id})
        finally:
            if self._attempts.get(lease.key) is attempt:
                del self._attempts[lease.key]

    # --- notifications -----------------------------------------------------------------------------------------------

    async def _listen_for_jobs(self) -> None:
        async for _ in self._queue.listen("lines", self._timings.poll_s):
            self._empty.clear()
            self._notified.set()
            self._admission.notify_room()

    async def _listen_for_stops(self) -> None:
        """The channel also announces every job that ends, so check before sending a heartbeat."""
        async for batch_id in self._queue.listen("batches", self._timings.heartbeat_s):
            ours = any(batch_id in ("", key[0]) for key in self._attempts)
            if ours and await self._queue.has_stop_requests(self.owner.name):
                self._heartbeat_now.set()
                await asyncio.sleep(self._timings.capacity_poll_s)

    async def _send_heartbeats(self) -> None:
        """Renew the leases; abort jobs that are cancelled, expired or leased to another worker."""
        interval_s = min(self._timings.heartbeat_s, self._queue.limits.lease_s / 4)
        while True:
            await _wait(self._heartbeat_now.wait(), interval_s * random.uniform(0.75, 1.0))
            self._heartbeat_now.clear()
            attempts = dict(self._attempts)  # the reply does not concern those that start meanwhile
            if not attempts:
                continue
            leases = [attempt.lease for attempt in attempts.values()]
            reply = await self._queue.heartbeat(self.owner.name, leases)
            for keys, reason in ((reply.stopped, StopReason.CANCELLED), (reply.lost, StopReason.LOST)):
                for key in keys:
                    attempts[key].stop(reason)

    # --- quarantine --------------------------------------------------------------------------------------------------

    async def _monitor(self) -> None:
        """Update the metrics. Run quarantined jobs alone, one after another, taking turns with the others."""
        while True:
            depths = await self._queue.depths()
            now_us = self._queue.now_us()
            self.metrics.update(depths, await self._queue.count_dead_letters(), now_us)
            self._admission.queued(_oldest_s(depths, now_us))
            quarantined = {depth.model for depth in depths if depth.n_quarantined} & set(self._models())
            for model in self._draining - quarantined:
                self._draining.discard(model)
                self._admission.cancel_exclusive(model)
            others = {depth.model for depth in depths if depth.n_queued > depth.n_quarantined}
            again = [
                await self._run_quarantined(model, model in others) for model in quarantined if not self._stop.is_set()
            ]
            wait_s = self._timings.capacity_poll_s if any(again) else self._timings.monitor_s
            await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))

    async def _run_quarantined(self, model: str, others_wait: bool) -> bool:
        """Run one quarantined job alone on an engine. Returns True if the caller should try again soon."""
        grant = self._admission.issue_exclusive(model)
        if grant is None:
            self._draining.add(model)
            return True
        self._draining.discard(model)
        try:
            leases = await self._queue.claim(self.owner.name, model, 1, quarantined=True)
        except BaseException:
            grant.release()
            raise
        if not leases:  # claimed by another process, or in backoff
            grant.release()
            return False
        self.metrics.count("claimed", model)
        began_s = asyncio.get_running_loop().time()
        await asyncio.wait([self._start_attempt(leases[0], grant)])
        if others_wait:
            await asyncio.sleep(asyncio.get_running_loop().time() - began_s)  # as long as it had the engine alone
        return True


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Repeat until it works: a wait that ends at the same moment may swallow a cancellation."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)


async def _wait(waiting: Coroutine[Any, Any, Any], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):  # `wait_for` could swallow our own cancellation
            await waiting


def _oldest_s(depths: Sequence[QueueDepth], now_us: int) -> dict[str, float]:
    """Return the age in seconds of the next job of each model that has queued jobs."""
    oldest_s: dict[str, float] = {}
    for depth in depths:
        if depth.n_queued and depth.oldest_us is not None:
            waited_s = max(0, now_us - depth.oldest_us) / 1e6
            oldest_s[depth.model] = max(waited_s, oldest_s.get(depth.model, 0.0))
    return oldest_s


def _release(grants: Sequence[AdmissionGrant]) -> None:
    for grant in grants:
        grant.release()
