"""The sweeper: reclaims jobs of dead workers, expires batches, finishes interrupted steps, enforces retention.

Every process may sweep: each action is a transaction that changes nothing if another process has done it.
"""

import logging
import random
from collections.abc import Awaitable, Callable

import msgspec

from emberline.jobs.batches.batch import Batch, batch_from_row
from emberline.jobs.batches.blobs import Blobs
from emberline.jobs.batches.files import FileStore, add_stored_bytes
from emberline.jobs.limits import INSERT_CHUNK, UPDATE_CHUNK, QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.completion import MINUTE_US, apply_outcomes, stop_jobs
from emberline.jobs.queue.enqueue import release_jobs
from emberline.jobs.queue.finalize import reject_batch
from emberline.jobs.queue.job import JobKey, JobOutcome, JobState
from emberline.jobs.webhooks.events import EVENTS_CHANNEL
from emberline.net.periodic import every
from emberline.protocol.errors import Conflict, ErrorInfo
from emberline.store import Database, Query, Rows, Transaction

_DAY_MINUTES = 24 * 60
_PURGE_INTERVAL_S = 600.0
_WORKERS_DIED = msgspec.msgpack.encode(ErrorInfo("internal", "the workers that ran this request died at every attempt"))

log = logging.getLogger("emberline.queue")


def backoff_us(n_failures: int, limits: QueueLimits) -> int:
    """Exponential backoff with jitter."""
    least, most = limits.backoff_s
    return int(min(most, least * 2 ** min(n_failures, 30)) * random.uniform(0.5, 1.0) * 1e6 + least * 0.5e6)


def killed_outcome(key: JobKey, epoch: int, owner: str, kills: int, now_us: int, limits: QueueLimits) -> JobOutcome:
    """A job whose worker died: retried after a backoff, or moved to the dead-letter queue. kills: before this one."""
    if kills + 1 < limits.max_kills:
        ready_us = now_us + backoff_us(kills, limits)
        return JobOutcome(key=key, epoch=epoch, owner=owner, state="queued", kills=1, ready_us=ready_us)
    data = _WORKERS_DIED
    return JobOutcome(key=key, epoch=epoch, owner=owner, state="dead", kills=1, data=data, n_bytes=len(data))


class Sweeper:
    def __init__(self, store: Database, blobs: Blobs, files: FileStore, limits: QueueLimits) -> None:
        self._store = store
        self._blobs = blobs
        self._files = files
        self._limits = limits
        self._next_purge_us = 0

    async def run(self) -> None:
        """Sweep until cancelled. An action that fails is repeated in the next round."""
        await every(self._limits.sweep_s, self.sweep, log, "sweeping the queue failed", jitter=0.5)

    async def sweep(self) -> None:
        actions: list[Callable[[], Awaitable[None]]] = [self._reclaim_expired_leases, self._expire, self.recover]
        if self._store.now_us() >= self._next_purge_us:
            self._next_purge_us = self._store.now_us() + int(_PURGE_INTERVAL_S * 1e6)
            actions.append(self.purge_expired)
        for action in actions:
            try:
                await action()
            except Conflict as error:
                log.debug("another process swept first: %s", error.message)
            except Exception as error:
                log.warning("sweeping the queue failed: %s", error)

    # --- dead workers ------------------------------------------------------------------------------------------------

    async def _reclaim_expired_leases(self) -> None:
        now_us = self._store.now_us()
        latest_us = now_us + 2 * self._limits.lease_us
        if await self._store.read("SELECT 1 FROM workers WHERE until_us > ?", (latest_us,)):
            log.warning("the clock was set back: leases are shortened")
            await self._store.write(sql.SHORTEN_LEASES, (now_us + self._limits.lease_us, latest_us))
        for (owner,) in await self._store.read(sql.EXPIRED_OWNERS, (now_us,)):
            await self._reclaim(str(owner), _reclaim_expired)

    async def reclaim_from(self, owner: str) -> None:
        """Reclaim the jobs of a worker that is known to be dead, even if a late heartbeat of it arrives."""
        await self._reclaim(owner, _reclaim_dead)

    async def _reclaim(self, owner: str, reclaim: Callable[[str, int, QueueLimits], Transaction[bool]]) -> None:
        now_us = self._store.now_us()
        while await self._store.run(lambda: reclaim(owner, now_us, self._limits)):
            pass
        await self._store.notify("lines")
        await self._store.notify(EVENTS_CHANNEL)

    # --- deadlines ---------------------------------------------------------------------------------------------------

    async def _expire(self) -> None:
        now_us = self._store.now_us()
        for batch_id, status in await self._store.read(sql.OVERDUE_BATCHES, (now_us,)):
            if status == "validating":
                error = [ErrorInfo("deadline_exceeded", "the batch expired before its file was read")]
                await self._expire_validating(str(batch_id), msgspec.json.encode(error).decode(), now_us)
            else:
                await self.stop_all(str(batch_id), "expired")

    async def _expire_validating(self, batch_id: str, errors: str, now_us: int) -> None:
        await self._store.run(lambda: reject_batch(batch_id, "expired", errors, now_us, self._limits))
        await self.delete_jobs(batch_id)

    async def stop_all(self, batch_id: str, state: JobState) -> None:
        """End the batch's waiting jobs, UPDATE_CHUNK at a time; ask the workers of running ones to stop."""
        batch, now_us = await self._batch(batch_id), self._store.now_us()
        for first in range(0, batch.counts.total, UPDATE_CHUNK):
            chunk = lambda at=first: stop_jobs(batch, at, at + UPDATE_CHUNK, state, now_us, self._limits)  # noqa: E731
            await self._store.run(chunk)
        await self._store.notify("batches", batch_id)
        await self._store.notify(EVENTS_CHANNEL)

    # --- interrupted steps -------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Finish releases and cancellations, and remove submissions, whose process died."""
        for (batch_id,) in await self._store.read(sql.UNRELEASED_BATCHES):
            await self.release(str(batch_id))
        for (batch_id,) in await self._store.read(sql.CANCELLING_BATCHES):
            await self.stop_all(str(batch_id), "cancelled")
        for (batch_id,) in await self._store.read(sql.ABANDONED_BATCHES, (self._store.now_us(),)):
            await self.delete_batch(str(batch_id), 0, "incoming")

    async def release(self, batch_id: str) -> None:
        """Let the batch's jobs be claimed, UPDATE_CHUNK at a time."""
        batch = await self._batch(batch_id)
        released, total = batch.n_released, batch.counts.total
        while released < total:
            chunk = lambda at=released: release_jobs(batch_id, batch.account, at, total)  # noqa: E731
            released = await self._store.run(chunk)
            await self._store.notify("lines")

    # --- retention ---------------------------------------------------------------------------------------------------

    async def purge_expired(self) -> None:
        """Delete expired batches, files, keys and counters, and blobs without a reference."""
        now_us = self._store.now_us()
        for batch_id, status in await self._store.read(sql.EXPIRED_BATCHES, (now_us,)):
            await self._hide(str(batch_id), 1, str(status))
        for (batch_id,) in await self._store.read(sql.HIDDEN_BATCHES):
            await self._delete_hidden(str(batch_id))
        await self._files.delete_expired()
        await self._store.write(sql.DELETE_OLD_PACES, (now_us // MINUTE_US - _DAY_MINUTES,))
        await self._store.write(sql.DELETE_OLD_KEYS, (now_us,))
        await self._store.write(sql.DELETE_OLD_WORKERS, (now_us - 60 * MINUTE_US,))
        grace_s = self._limits.blob_grace_s
        for name in await self._blobs.unused_since(grace_s):
            if not await self._store.read(sql.BLOB_REFERENCES, (name, name, name)):
                await self._blobs.discard(name, grace_s)

    async def delete_batch(self, batch_id: str, ended: int, status: str) -> None:
        """Delete a batch with its jobs, if it still is in this status."""
        if await self._hide(batch_id, ended, status):
            await self._delete_hidden(batch_id)

    async def delete_jobs(self, batch_id: str) -> None:
        ((last,),) = await self._store.read(sql.LAST_NUMBER, (batch_id,))
        for first in range(0, int(last if last is not None else -1) + 1, INSERT_CHUNK):
            chunk = (batch_id, first, first + INSERT_CHUNK)
            await self._store.transaction([Query(sql.DELETE_JOBS, chunk), Query(sql.DELETE_BODIES, chunk)])

    async def _hide(self, batch_id: str, ended: int, status: str) -> bool:
        """Make the batch invisible, which may then be deleted in steps."""
        return await self._store.run(lambda: _hide(batch_id, ended, status))

    async def _delete_hidden(self, batch_id: str) -> None:
        await self.delete_jobs(batch_id)
        await self._store.write(sql.DELETE_BATCH, (batch_id,))

    async def _batch(self, batch_id: str) -> Batch:
        rows = await self._store.read(sql.BATCH, (batch_id,))
        if not rows:
            raise Conflict(f"{batch_id} was deleted")
        return batch_from_row(rows[0])


def _reclaim_expired(owner: str, now_us: int, limits: QueueLimits) -> Transaction[bool]:
    """Jobs are read before the worker's lease: if it claims at this moment, its heartbeat is seen."""
    rows = yield Query(sql.LEASES_OF, (owner, INSERT_CHUNK))
    yield Query(sql.DELETE_EXPIRED_WORKER, (owner, now_us))
    if not rows or (yield Query(sql.WORKER, (owner,))):
        return False
    return (yield from _apply_killed(rows, owner, now_us, limits))


def _reclaim_dead(owner: str, now_us: int, limits: QueueLimits) -> Transaction[bool]:
    """The lease is not checked: a heartbeat that the worker sent before it died may arrive at any moment."""
    rows = yield Query(sql.LEASES_OF, (owner, INSERT_CHUNK))
    yield Query(sql.DELETE_WORKER, (owner,))
    return (yield from _apply_killed(rows, owner, now_us, limits))


def _apply_killed(rows: Rows, owner: str, now_us: int, limits: QueueLimits) -> Transaction[bool]:
    """Apply the outcomes of jobs whose worker died. Returns True if there may be more."""
    outcomes = [
        killed_outcome((str(batch_id), int(number or 0)), int(epoch or 0), owner, int(kills or 0), now_us, limits)
        for batch_id, number, epoch, kills in rows
    ]
    yield from apply_outcomes(outcomes, now_us, limits)
    return len(rows) == INSERT_CHUNK


def _hide(batch_id: str, ended: int, status: str) -> Transaction[bool]:
    rows = yield Query(sql.HIDE_BATCH, (batch_id, ended, status))
    for n_bytes, account in rows:
        yield add_stored_bytes(account, -int(n_bytes or 0))
    return bool(rows)
