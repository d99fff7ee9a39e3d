"""What time does to the queue: dead workers' lines come back, deadlines pass, half-done steps are finished, old goes.

Every process may sweep: each act is a transaction that changes nothing when another has done it.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec

from emberline.jobs.batches.batch import Batch, batch_from_row
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.batches.files import FileStore
from emberline.jobs.limits import INSERT_CHUNK, UPDATE_CHUNK, QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.batch_end import reject
from emberline.jobs.queue.completion import MINUTE_US, settle, stop
from emberline.jobs.queue.enqueue import release
from emberline.jobs.queue.job import JobOutcome, JobState
from emberline.protocol.errors import Conflict, ErrorInfo
from emberline.store import Database, Rows, Step, Value, Work

_DAY_MINUTES = 24 * 60
_RARELY_S = 600.0  # between two looks for what is old

log = logging.getLogger("emberline.queue")


class Sweeper:
    def __init__(self, store: Database, blobs: BlobStore, files: FileStore, limits: QueueLimits) -> None:
        self._store = store
        self._blobs = blobs
        self._files = files
        self._limits = limits
        self._next_tidy_us = 0

    async def run(self) -> None:
        """For ever. A step that fails is tried again in the next round."""
        while True:
            await asyncio.sleep(self._limits.sweep_s * random.uniform(0.5, 1.5))
            await self.sweep()

    async def sweep(self) -> None:
        steps: list[Callable[[], Awaitable[None]]] = [self.reclaim, self.expire, self.go_on]
        if self._store.now_us() >= self._next_tidy_us:
            self._next_tidy_us = self._store.now_us() + int(_RARELY_S * 1e6)
            steps += [self.tidy]
        for step in steps:
            try:
                await step()
            except Conflict as error:
                log.debug("another swept first: %s", error.message)
            except Exception as error:
                log.warning("sweeping the queue failed: %s", error)

    # --- dead workers ------------------------------------------------------------------------------------------------

    async def reclaim(self) -> None:
        """Lines whose worker is silent go back, or to the dead letters."""
        now_us = self._store.now_us()
        await self._cut_leases(now_us)
        for (owner,) in await self._store.read(sql.OWNERS_GONE, (now_us,)):
            await self._take_back(lambda owner=str(owner): _reclaim(owner, now_us, self._limits))  # type: ignore[misc]

    async def bury(self, owner: str) -> None:
        """Lines of a worker that is known to be dead go back, whatever sign of life was still under way."""
        now_us = self._store.now_us()
        await self._take_back(lambda: _bury(owner, now_us, self._limits))

    async def _take_back(self, some: Callable[[], Work[bool]]) -> None:
        """Until there are no more."""
        while await self._store.run(some):
            pass
        await self._store.notify("lines")
        await self._store.notify("events")

    async def _cut_leases(self, now_us: int) -> None:
        latest_us = now_us + 2 * self._limits.lease_us
        if await self._store.read("SELECT 1 FROM workers WHERE until_us > ?", (latest_us,)):
            log.warning("the clock was set back: leases begin anew")
            await self._store.write(sql.CUT_LEASES, (now_us + self._limits.lease_us, latest_us))

    # --- deadlines ---------------------------------------------------------------------------------------------------

    async def expire(self) -> None:
        now_us = self._store.now_us()
        for batch_id, status in await self._store.read(sql.OVERDUE, (now_us,)):
            if status == "validating":
                error = [ErrorInfo("deadline_exceeded", "the batch's time ran out before its file was read")]
                await self._reject(str(batch_id), msgspec.json.encode(error).decode(), now_us)
            else:
                await self.stop_all(str(batch_id), "expired")

    async def _reject(self, batch_id: str, errors: str, now_us: int) -> None:
        await self._store.run(lambda: reject(batch_id, "expired", errors, now_us, self._limits))
        await self.drop_lines(batch_id)

    async def stop_all(self, batch_id: str, state: JobState) -> None:
        """End the batch's waiting lines, a few thousand at a time; tell the workers of those that run."""
        batch, now_us = await self._batch(batch_id), self._store.now_us()
        for first in range(0, batch.counts.total, UPDATE_CHUNK):
            some = lambda at=first: stop(batch, at, at + UPDATE_CHUNK, state, now_us, self._limits)  # noqa: E731
            await self._store.run(some)
        await self._store.notify("batches", batch_id)
        await self._store.notify("events")

    # --- what was left half done -------------------------------------------------------------------------------------

    async def go_on(self) -> None:
        for (batch_id,) in await self._store.read(sql.UNRELEASED):
            await self.release(str(batch_id))
        for (batch_id,) in await self._store.read(sql.CANCELLING_NOW):
            await self.stop_all(str(batch_id), "cancelled")
        for (batch_id,) in await self._store.read(sql.ABANDONED, (self._store.now_us(),)):
            if await self.hide(str(batch_id), 0, "incoming"):
                await self.remove(str(batch_id))

    async def release(self, batch_id: str) -> None:
        """Let its lines be claimed, a few thousand at a time."""
        batch = await self._batch(batch_id)
        released, total = batch.n_released, batch.counts.total
        while released < total:
            step = lambda at=released: release(batch_id, batch.account, at, total)  # noqa: E731
            released = await self._store.run(step)
            await self._store.notify("lines")

    # --- what is old -------------------------------------------------------------------------------------------------

    async def tidy(self) -> None:
        """Batches and files past their time, blobs that nothing refers to, counters of yesterday."""
        now_us = self._store.now_us()
        for batch_id, status in await self._store.read(sql.OUTDATED, (now_us,)):
            await self.hide(str(batch_id), 1, str(status))
        for (batch_id,) in await self._store.read(sql.DELETED):
            await self.remove(str(batch_id))
        await self._files.drop_expired()
        await self._store.write(sql.FORGET_PACES, (now_us // MINUTE_US - _DAY_MINUTES,))
        await self._store.write(sql.FORGET_KEYS, (now_us,))
        await self._store.write(sql.FORGET_WORKERS, (now_us - 60 * MINUTE_US,))
        await self.collect()

    async def hide(self, batch_id: str, ended: int, status: str) -> bool:
        """From now on nobody sees it."""
        return await self._store.run(lambda: _hide(batch_id, ended, status))

    async def remove(self, batch_id: str) -> None:
        await self.drop_lines(batch_id)
        await self._store.write(sql.DELETE_BATCH, (batch_id,))

    async def drop_lines(self, batch_id: str) -> None:
        ((last,),) = await self._store.read(sql.LAST_NUMBER, (batch_id,))
        for first in range(0, int(last if last is not None else -1) + 1, INSERT_CHUNK):
            chunk = (batch_id, first, first + INSERT_CHUNK)
            await self._store.transaction([Step(sql.DELETE_LINES, chunk), Step(sql.DELETE_BODIES, chunk)])

    async def collect(self) -> None:
        grace_s = self._limits.blob_grace_s
        for name in await asyncio.to_thread(lambda: list(self._blobs.old(grace_s))):
            if not await self._store.read(sql.BLOB_USED, (name, name, name)):
                await asyncio.to_thread(self._blobs.remove, name, grace_s)

    async def _batch(self, batch_id: str) -> Batch:
        rows = await self._store.read(sql.BATCH, (batch_id,))
        if not rows:
            raise Conflict(f"{batch_id} is gone")
        return batch_from_row(rows[0])


def backoff_us(times: int, limits: QueueLimits) -> int:
    """Twice as long each time, within the limits, anywhere in the upper half: those that failed together part."""
    least, most = limits.backoff_s
    return int(min(most, least * 2 ** min(times, 30)) * random.uniform(0.5, 1.0) * 1e6 + least * 0.5e6)


DEATH = msgspec.msgpack.encode(ErrorInfo("internal", "the workers that ran this line died, each time it was tried"))


def killed(row: tuple[Value, ...], owner: str, now_us: int, limits: QueueLimits) -> JobOutcome:
    """What becomes of a line whose worker died; the row is its batch, number, epoch and earlier kills."""
    key, epoch, kills = (str(row[0]), int(row[1] or 0)), int(row[2] or 0), int(row[3] or 0)
    if kills + 1 >= limits.max_kills:
        size = len(DEATH)
        return JobOutcome(key=key, epoch=epoch, owner=owner, state="dead", kills=1, data=DEATH, n_bytes=size)
    ready_us = now_us + backoff_us(kills, limits)
    return JobOutcome(key=key, epoch=epoch, owner=owner, state="queued", kills=1, ready_us=ready_us)


def _reclaim(owner: str, now_us: int, limits: QueueLimits) -> Work[bool]:
    """Lines first, then whether the worker lives: one that claims this moment is seen with its sign of life."""
    rows = yield Step(sql.HELD_BY, (owner, INSERT_CHUNK))
    yield Step(sql.BURY, (owner, now_us))
    if not rows or (yield Step(sql.LIVES, (owner,))):
        return False
    return (yield from _take_from_dead(rows, owner, now_us, limits))


def _bury(owner: str, now_us: int, limits: QueueLimits) -> Work[bool]:
    """No question whether it lives: a sign of life that it sent before it died may arrive at any moment."""
    rows = yield Step(sql.HELD_BY, (owner, INSERT_CHUNK))
    yield Step(sql.FORGET_WORKER, (owner,))
    return (yield from _take_from_dead(rows, owner, now_us, limits))


def _take_from_dead(rows: Rows, owner: str, now_us: int, limits: QueueLimits) -> Work[bool]:
    """Whether there may be more."""
    yield from settle([killed(row, owner, now_us, limits) for row in rows], now_us, limits)
    return len(rows) == INSERT_CHUNK


def _hide(batch_id: str, ended: int, status: str) -> Work[bool]:
    rows = yield Step(sql.GONE, (batch_id, ended, status))
    for n_bytes, account in rows:
        yield Step(sql.HOLD, (account, -int(n_bytes or 0)))
    return bool(rows)
