"""Reading the queue: batches, jobs and their results, the dead-letter queue, depth, and a batch's position."""

import asyncio
import contextlib
from collections.abc import Collection
from typing import Any

import msgspec

from emberline.jobs.batches.batch import Batch, batch_from_row
from emberline.jobs.batches.blobs import Blobs
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.completion import MINUTE_US
from emberline.jobs.queue.job import Job, JobKey
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import ErrorInfo, NotFound
from emberline.store import Database, Sql, Value
from emberline.store.database import Row, decode_row

_RATE_MINUTES = 10  # over which the duration of a job is averaged
_JOB_FIELDS = [name.rpartition(".")[2] for name in sql.JOB_COLUMNS.split(", ")]
_DEAD_NUMBERS = "SELECT number FROM lines WHERE state = 'dead' AND batch_id = ? ORDER BY number LIMIT 1000"
_OWN_AHEAD = """
    SELECT SUM(total - completed - failed - cancelled - expired) FROM batches
    WHERE ended = 0 AND account = ? AND deadline_us < ? AND id <> ? AND status IN ('in_progress', 'cancelling')
"""
_LANES = "SELECT account, n_queued, n_leased FROM lanes WHERE (n_queued > 0 OR n_leased > 0) AND (model = ? OR ? = '')"
_COMPLETIONS = "SELECT SUM(n), SUM(busy_us) FROM paces WHERE minute > ? AND (model = ? OR ? = '')"
_IS_RUNNING = "SELECT 1 FROM lines{hint} WHERE state = 'leased' AND batch_id = ? LIMIT 1"
# Without the hint SQLite scans every job of the batch.
_RUNNING = Sql(_IS_RUNNING.format(hint=" INDEXED BY lines_leased"), postgres=_IS_RUNNING.format(hint=""))
_ERROR_OF_STATE = {
    "cancelled": ErrorInfo("cancelled", "the request was cancelled"),
    "expired": ErrorInfo("deadline_exceeded", "the batch expired before the request was done"),
}
_to_answer = msgspec.msgpack.Decoder(Answer).decode
_to_error = msgspec.msgpack.Decoder(ErrorInfo).decode


class QueueDepth(msgspec.Struct, frozen=True):
    """The open jobs of one account for one model."""

    model: str
    account: str
    n_queued: int
    n_leased: int
    served: int  # tokens, by the counter of fair queueing
    oldest_us: int | None  # when the job that is next was submitted
    n_quarantined: int


class QueuePosition(msgspec.Struct, frozen=True):
    position: int  # jobs that are claimed before this batch's next one; 0: it is next
    n_left: int
    running: bool  # one of its jobs is leased
    rate_per_s: float | None  # jobs of its model that end per second; None: none has ended lately
    eta_s: float | None


class QueueReader:
    def __init__(self, store: Database, blobs: Blobs, limits: QueueLimits) -> None:
        self.blobs = blobs
        self.limits = limits
        self._store = store

    async def batch(self, account: str, batch_id: str) -> Batch:
        rows = await self._store.read(sql.VISIBLE_BATCH, (batch_id, account))
        if not rows:
            raise NotFound(f"no batch {batch_id}", param="batch_id")
        return batch_from_row(rows[0])

    async def batches(
        self, account: str, kind: str, *, after: str | None = None, before: str | None = None, limit: int = 20
    ) -> tuple[list[Batch], bool]:
        """A page, newest first, and whether there is more in that direction."""
        params: tuple[Value, ...] = (account, kind)
        backward = before is not None and after is None
        condition = ""
        if cursor := after or before:
            condition = f"AND (created_us, id) {'>' if backward else '<'} (?, ?)"
            params = (*params, (await self.batch(account, cursor)).created_us, cursor)
        query = sql.batches_page(condition, "ASC" if backward else "DESC")
        rows = await self._store.read(query, (*params, limit + 1))
        page = [batch_from_row(row) for row in rows[:limit]]
        return page[::-1] if backward else page, len(rows) > limit

    async def open_batches(self, limit: int) -> list[Batch]:
        """The batches of all accounts that have not ended, by deadline."""
        return [batch_from_row(row) for row in await self._store.read(sql.OPEN_BATCHES, (limit,))]

    async def jobs(
        self, batch_id: str, *, after: int = -1, limit: int = 500, states: Collection[str] = ()
    ) -> list[Job]:
        """A page by number, with results; the caller has checked whose batch it is."""
        rows = await self._store.read(sql.jobs_page(len(states)), (batch_id, after, *states, limit))
        return [await self._job(row) for row in rows]

    async def job(self, batch_id: str, number: int) -> Job:
        found = await self.jobs(batch_id, after=number - 1, limit=1)
        if not found or found[0].number != number:
            raise NotFound(f"no request {number} in {batch_id}")
        return found[0]

    async def dead_letters(
        self, account: str | None = None, *, after: JobKey | None = None, limit: int = 100
    ) -> list[Job]:
        """The dead-letter queue of an account or of all, by batch and number."""
        rows = await self._store.report(sql.DEAD_LETTERS, (*(after or ("", -1)), account, account, limit))
        return [await self._job(row) for row in rows]

    async def count_dead_letters(self, account: str | None = None) -> int:
        ((n_jobs,),) = await self._store.report(sql.COUNT_DEAD_LETTERS, (account, account))
        return int(n_jobs or 0)

    async def depths(self) -> list[QueueDepth]:
        rows = await self._store.read(sql.DEPTHS, (self.limits.quarantine_kills,))
        return [decode_row(QueueDepth, ", ".join(QueueDepth.__struct_fields__), row) for row in rows]

    async def position(self, batch: Batch) -> QueuePosition:
        """An account's own earlier deadlines go first; with other accounts it takes turns, job by job."""
        if batch.ended or not batch.counts.left:
            return QueuePosition(0, 0, False, None, 0.0)
        ((own,),) = await self._store.read(_OWN_AHEAD, (batch.account, batch.deadline_us, batch.id))
        ahead, left = int(own or 0), batch.counts.left
        lanes = await self._store.read(_LANES, (batch.model, batch.model))
        others = [int(n_queued or 0) for account, n_queued, _ in lanes if account != batch.account]
        position = ahead + sum(min(n, ahead) for n in others)
        until_done = ahead + left + sum(min(n, ahead + left) for n in others)
        rate = await self._rate_per_s(batch.model, sum(int(n_leased or 0) for *_, n_leased in lanes))
        running = bool(await self._store.read(_RUNNING, (batch.id,)))
        return QueuePosition(position, left, running, rate, until_done / rate if rate else None)

    async def wait_for_change(self, batch_id: str, timeout_s: float) -> None:
        """Return when the batch may have changed, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                async for payload in self._store.listen("batches", poll_s=max(1.0, timeout_s)):
                    if payload in ("", batch_id):
                        return

    async def _batch_of_any_account(self, batch_id: str) -> Batch:
        rows = await self._store.read(sql.BATCH, (batch_id,))
        if not rows:
            raise NotFound(f"no batch {batch_id}", param="batch_id")
        return batch_from_row(rows[0])

    async def _dead_numbers(self, batch_id: str) -> list[int]:
        return [int(number or 0) for (number,) in await self._store.read(_DEAD_NUMBERS, (batch_id,))]

    async def _rate_per_s(self, model: str, n_running: int) -> float | None:
        """Estimate the rate at which jobs complete: as many as run now, each for the recent average duration. Idle time
        says nothing about the rate."""
        since = self._store.now_us() // MINUTE_US - _RATE_MINUTES
        ((n, busy_us),) = await self._store.read(_COMPLETIONS, (since, model, model))
        if not n or not busy_us:
            return None
        return max(1, n_running) / (int(busy_us) / int(n) / 1e6)

    async def _job(self, row: Row) -> Job:
        *columns, data, blob = row
        fields: dict[str, Any] = dict(zip(_JOB_FIELDS, columns, strict=True))
        job = msgspec.convert(fields, Job)
        job.error = _ERROR_OF_STATE.get(job.state)
        if job.state in ("succeeded", "failed", "dead"):
            result = await self.blobs.get(blob) if isinstance(blob, str) else data
            if isinstance(result, bytes) and job.state == "succeeded":
                job.answer = _to_answer(result)
            elif isinstance(result, bytes):
                job.error = _to_error(result)
        return job
