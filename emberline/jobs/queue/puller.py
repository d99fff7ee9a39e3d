"""The name under which a process holds leases, and the proof on this machine that it lives: a lock on a file.

A process that was killed has let go of its lock. The next one that starts on the same data folder sees it and gives
the dead one's lines back at once, where others would wait for its leases to end.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline.jobs.queue.attempt import AdmissionGrant, GenerationService, JobAttempt, StopReason
from emberline.jobs.queue.job import JobKey, Lease
from emberline.jobs.queue.queue import Queue
from emberline.jobs.queue.reader import QueueDepth
from emberline.protocol.errors import EmberlineError
from emberline.protocol.request import Principal

FOLDER = "pullers"


class LeaseOwner:
    def __init__(self, data_dir: Path) -> None:
        folder = data_dir / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.name = f"{socket.gethostname()[:40]}-{secrets.token_hex(6)}"
        self._path = folder / self.name
        self._file: int | None = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def dead(self) -> list[str]:
        """Names that processes on this data folder had which are no more; `forget` each once it is dealt with."""
        others = [path for path in self._path.parent.iterdir() if path != self._path]
        return [path.name for path in others if _unlocked(path)]

    def forget(self, name: str) -> None:
        (self._path.parent / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def _unlocked(path: Path) -> bool:
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
    """Counts what this process did. Depth and age are those of the whole queue, when they were last looked at."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._depths: Sequence[QueueDepth] = ()
        self._dead = 0
        self._now_us = 0

    def count(self, what: str, model: str, n: int = 1) -> None:
        self._counts[what, model] += n

    def total(self, what: str) -> int:
        return sum(n for (name, _), n in self._counts.items() if name == what)

    def looked(self, depths: Sequence[QueueDepth], dead: int, now_us: int) -> None:
        self._depths, self._dead, self._now_us = depths, dead, now_us

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily("emberline_queue_depth", "Lines that wait.", labels=["model"])
        leased = GaugeMetricFamily("emberline_queue_leased", "Lines that run.", labels=["model"])
        oldest = GaugeMetricFamily("emberline_queue_age_seconds", "Age of the line that is next.", labels=["model"])
        for model in sorted({depth.model for depth in self._depths}):
            depths = [depth for depth in self._depths if depth.model == model]
            queued.add_metric([model], sum(depth.n_queued for depth in depths))
            leased.add_metric([model], sum(depth.n_leased for depth in depths))
            since_us = min((depth.oldest_us for depth in depths if depth.oldest_us is not None), default=self._now_us)
            oldest.add_metric([model], max(0.0, (self._now_us - since_us) / 1e6))
        yield from (queued, leased, oldest)
        dead = GaugeMetricFamily("emberline_queue_dead_letters", "Lines under which workers died too often.")
        dead.add_metric([], self._dead)
        yield dead
        lines = CounterMetricFamily("emberline_queue_lines", "What became of lines here.", labels=["event", "model"])
        for (what, model), n in sorted(self._counts.items()):
            lines.add_metric([what, model], n)
        yield lines


MOST = 256  # lines claimed at once
POLL_S = 1.0  # for lines that nobody told us of
ROOM_S = 0.25  # for room that nobody told us of: an engine's load has changed
BEAT_S = 5.0  # between signs of life, or a quarter of a lease; also how soon a cancellation is heard without a bell
LOOK_S = 5.0  # at what waits: figures, and lines that must run alone
LEAVE_S = 5.0  # for lines to finish once we shall stop; the rest is given back

log = logging.getLogger("emberline.jobs")


class BatchAdmission(Protocol):
    """Admission, as far as queued work is concerned."""

    def issue(self, model: str, most: int) -> Sequence[AdmissionGrant]: ...

    def issue_alone(self, model: str) -> AdmissionGrant | None:
        """An engine with no other line on it; None: not yet, one is being emptied."""

    def call_off(self, model: str) -> None:
        """No line is to run alone after all."""

    def stir(self) -> None: ...

    async def stirred(self) -> None:
        """Return when there may be room where there was none."""


class Puller:
    """Owns the attempts that run here. `start`, and `close` before the service and the queue."""

    def __init__(
        self,
        queue: Queue,
        service: GenerationService,
        grants: BatchAdmission,
        models: Sequence[str],
        principal: Callable[[str, str], Principal],
        owner: LeaseOwner,
    ) -> None:
        self.metrics = QueueMetrics()
        self._queue = queue
        self._service = service
        self._grants = grants
        self._models = models
        self._principal = principal  # of an account and the key it used
        self._owner = owner
        self._attempts: dict[JobKey, JobAttempt] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._dry: set[str] = set()  # models of which there was nothing left to claim, until something is heard
        self._emptying: set[str] = set()  # models of which an engine is being emptied, for a line alone
        self._beat_now = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    @property
    def n_running(self) -> int:
        return len(self._running)

    def start(self, stop: asyncio.Event | None = None) -> None:
        """Once `stop` is set no more is claimed: the server drains, and what runs may finish."""
        self._stop = stop or self._stop
        loops = [self._pull, self._listen, self._hear_cancels, self._look]
        self._loops = [asyncio.create_task(_forever(loop)) for loop in loops]
        self._beating = asyncio.create_task(_forever(self._beat))

    async def close(self, leave_s: float = LEAVE_S) -> None:
        """Claim no more; let lines finish for a moment; give back the rest. The service must still be there."""
        await _end(self._loops)
        if self._running:
            await asyncio.wait(self._running, timeout=leave_s)
        for attempt in self._attempts.values():
            attempt.stop(StopReason.LEAVING)
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._beating is not None:
            await _end([self._beating])
        try:
            await self._queue.deregister(self._owner.name)
            self._owner.close()
        except EmberlineError as error:  # its lock will be found open, its leases will end
            log.warning("lines were not given back: %s", error.message)

    # --- claiming ----------------------------------------------------------------------------------------------------

    async def _pull(self) -> None:
        await self._bury_dead()
        while True:
            for model in self._models:
                if model not in self._dry and not self._stop.is_set():
                    await self._fill(model)
            await _first(self._grants.stirred(), timeout_s=ROOM_S * random.uniform(0.5, 1.5))

    async def _bury_dead(self) -> None:
        """Give back at once what processes before us on this machine held."""
        for name in self._owner.dead():
            await self._queue.reclaim_from(name)
            self._owner.forget(name)

    async def _fill(self, model: str) -> None:
        """As many lines as engines have room for now."""
        grants = self._grants.issue(model, MOST)
        if not grants:
            return
        try:
            leases = await self._queue.claim(self._owner.name, model, len(grants))
        except BaseException:
            _give_back(grants)
            raise
        if len(leases) < len(grants):
            self._dry.add(model)
        self.metrics.count("claimed", model, len(leases))
        for lease, grant in zip(leases, grants, strict=False):
            self._begin(lease, grant)
        _give_back(grants[len(leases) :])

    def _begin(self, lease: Lease, grant: AdmissionGrant) -> asyncio.Task[None]:
        attempt = JobAttempt(self._queue, lease, grant, self.metrics.count)
        if (before := self._attempts.get(lease.key)) is not None:  # our lease had ended, and the line came to us again
            before.stop(StopReason.LOST)
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
            log.error("a line's end was not written: %s", error.message, extra={"request_id": lease.request_id})
        except Exception:
            log.exception("a line's attempt failed", extra={"request_id": lease.request_id})
        finally:
            if self._attempts.get(lease.key) is attempt:
                del self._attempts[lease.key]

    # --- being told --------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for _ in self._queue.wait_ready(POLL_S):
            self._dry.clear()
            self._grants.stir()

    async def _hear_cancels(self) -> None:
        """The bell rings for every line that ends, too: look before asking for more."""
        async for batch_id in self._queue.listen("batches", BEAT_S):
            ours = any(batch_id in ("", key[0]) for key in self._attempts)
            if ours and await self._queue.has_stop_requests(self._owner.name):
                self._beat_now.set()
                await asyncio.sleep(ROOM_S)

    async def _beat(self) -> None:
        """Keep the leases; stop what is cancelled, late or no longer ours."""
        beat_s = min(BEAT_S, self._queue.limits.lease_s / 4)
        while True:
            await _first(self._beat_now.wait(), timeout_s=beat_s * random.uniform(0.75, 1.0))
            self._beat_now.clear()
            asked = dict(self._attempts)  # what is told concerns these, not those that began meanwhile
            if not asked:
                continue
            told = await self._queue.heartbeat(self._owner.name, [attempt.lease for attempt in asked.values()])
            for keys, why in ((told.cancelled, StopReason.CANCELLED), (told.lost, StopReason.LOST)):
                for key in keys:
                    asked[key].stop(why)

    # --- now and then ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """At what waits. Lines under which workers died run alone, one after another, taking turns with the rest."""
        while True:
            depths = await self._queue.depths()
            self.metrics.looked(depths, await self._queue.count_dead_letters(), self._queue.now_us())
            suspects = {depth.model for depth in depths if depth.n_quarantined} & set(self._models)
            for model in self._emptying - suspects:
                self._emptying.discard(model)
                self._grants.call_off(model)
            others = {depth.model for depth in depths if depth.n_queued > depth.n_quarantined}
            soon = [await self._run_alone(model, model in others) for model in suspects if not self._stop.is_set()]
            await asyncio.sleep((ROOM_S if any(soon) else LOOK_S) * random.uniform(0.75, 1.25))

    async def _run_alone(self, model: str, others: bool) -> bool:
        """Whether to look again soon: an engine is being emptied, or there may be another one. `others`: wait too."""
        grant = self._grants.issue_alone(model)
        if grant is None:
            self._emptying.add(model)
            return True
        self._emptying.discard(model)
        try:
            leases = await self._queue.claim(self._owner.name, model, 1, alone=True)
        except BaseException:
            grant.give_back()
            raise
        if not leases:  # each is in another's hands, or not due yet
            grant.give_back()
            return False
        self.metrics.count("claimed", model)
        began_s = asyncio.get_running_loop().time()
        task = self._begin(leases[0], grant)
        await asyncio.wait([task])
        if others:
            await asyncio.sleep(asyncio.get_running_loop().time() - began_s)  # their turn
        return True


async def _forever(loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A store that is gone for a minute, or a bug, stops nothing for good."""
    while True:
        try:
            await loop()
        except EmberlineError as error:
            log.warning("the puller has to wait: %s", error.message)
        except Exception:
            log.exception("the puller stumbled")
        await asyncio.sleep(random.uniform(0.5, 1.5))


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until it works: a wait that ends this very moment can take one cancellation for its own."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)


async def _first(waiting: Coroutine[Any, Any, Any], timeout_s: float) -> None:
    """Wait for it, but not for longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):  # unlike wait_for, it never takes our own cancellation for nothing
            await waiting


def _give_back(grants: Sequence[AdmissionGrant]) -> None:
    for grant in grants:
        grant.give_back()
