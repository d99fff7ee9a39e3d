"""The durable queue: batches are submitted, jobs are claimed under leases, and each job gets exactly one result.

Execution is at least once, results are exactly once: a result counts only under the lease's current fencing token.
What a call did is durable when it returns. All state is in the store; this object only has tasks, so any number of
processes may have one over the same store.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.jobs.batches.batch import Batch, BatchStatus, NewBatch, batch_from_row
from emberline.jobs.batches.blobs import Blobs, BlobStore
from emberline.jobs.batches.database_blobs import DatabaseBlobs
from emberline.jobs.batches.files import FileStore, check_storage
from emberline.jobs.batches.idempotency_keys import IdempotencyKeys
from emberline.jobs.limits import INSERT_CHUNK, QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.claims import ClaimedJob, claim
from emberline.jobs.queue.completion import OutcomeWriter, replay_dead, stop_jobs
from emberline.jobs.queue.enqueue import BatchLoad, encode_jobs, insert_jobs, insert_small_batch, start_batch
from emberline.jobs.queue.finalize import reject_batch
from emberline.jobs.queue.job import HeartbeatReply, Job, JobKey, JobOutcome, JobState, Lease, NewJob
from emberline.jobs.queue.reader import QueueReader
from emberline.jobs.queue.sweeper import Sweeper, backoff_us, killed_outcome
from emberline.jobs.queue.transcript import Transcripts
from emberline.jobs.webhooks.events import EVENTS_CHANNEL
from emberline.net.periodic import stop
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import (
    BadInput,
    Conflict,
    EmberlineError,
    ErrorInfo,
    Internal,
    Overloaded,
    TooLarge,
    Unavailable,
)
from emberline.protocol.request import GenerateRequest
from emberline.store import Database, Query
from emberline.store.notifications import Subscription

BLOBS = "blobs"
_N_OPEN = "SELECT SUM(n_queued + n_leased) FROM lanes WHERE account = ?"
_FILE_BLOB = "SELECT blob FROM files WHERE id = ? AND account = ?"
_to_bytes = msgspec.msgpack.Encoder().encode
_to_request = msgspec.msgpack.Decoder(GenerateRequest).decode
_NO_REQUEST = GenerateRequest(id="", model="")  # of a lease whose request is not read yet

log = logging.getLogger("emberline.queue")


async def open_queue(store: Database, data_dir: Path, limits: QueueLimits | None = None) -> "Queue":
    """The queue over an open store, with its sweeper running. Close it before the store."""
    folder = BlobStore(data_dir / BLOBS)
    blobs = DatabaseBlobs(store, folder) if store.is_shared else folder
    queue = Queue(store, blobs, limits or QueueLimits())
    queue.start_sweeping()
    return queue


class Queue(QueueReader):
    """The durable queue: its readers, and every operation that changes it."""

    def __init__(self, store: Database, blobs: Blobs, limits: QueueLimits) -> None:
        super().__init__(store, blobs, limits)
        self.files = FileStore(store, blobs, limits)
        self.idempotency_keys = IdempotencyKeys(store, limits)
        self.transcripts = Transcripts(store)
        self._sweeper = Sweeper(store, blobs, self.files, limits)
        self._outcomes = OutcomeWriter(store, limits)
        self._sweeping: asyncio.Task[None] | None = None

    def start_sweeping(self) -> None:
        self._sweeping = asyncio.create_task(self._sweeper.run())

    async def close(self) -> None:
        await stop(self._sweeping)
        await self._outcomes.close()

    def now_us(self) -> int:
        """The time by the clock of leases and deadlines."""
        return self._store.now_us()

    # --- submitting --------------------------------------------------------------------------------------------------

    async def submit(self, new: NewBatch, jobs: Iterable[NewJob] | AsyncIterable[NewJob]) -> Batch:
        """Create a batch with its jobs, in progress. If its id exists already, the existing batch is returned."""
        if (existing := await self._existing(new)) is not None:
            return existing
        await self._check_quota(new.account)
        chunks = _chunks(jobs)
        first: list[NewJob] = await anext(chunks, [])
        if not first:
            raise BadInput("a batch needs at least one line")
        blob = await self._input_blob(new) if new.input_file_id else None
        if len(first) < INSERT_CHUNK:
            load = self._new_load(new, loader="submit")
            encoded = await encode_jobs(new.id, 0, first, self.blobs, self.limits)
            insert = _insert_batch(new, "incoming", load, blob)
            await self._store.run(lambda: insert_small_batch(load, insert, encoded, self.limits))
        else:
            await self._submit_large(new, blob, first, chunks)
        await self._notify_changed(new.id)
        return await self.batch(new.account, new.id)

    async def create(self, new: NewBatch) -> Batch:
        """Create a batch in state validating: a loader that claims it loads its jobs from its file."""
        if (existing := await self._existing(new)) is not None:
            return existing
        await self._check_quota(new.account)
        blob = await self._input_blob(new)
        load = msgspec.structs.replace(self._new_load(new, loader=""), until_us=0)
        await self._store.write(*_insert_batch(new, "validating", load, blob))
        await self._store.notify("validating", new.id)
        return await self.batch(new.account, new.id)

    async def claim_validating(self, owner: str) -> Batch | None:
        """Lease a batch whose file no process is loading; the caller resumes after its first `counts.total` jobs."""
        now_us = self._store.now_us()
        rows = await self._store.write(sql.CLAIM_VALIDATING, (owner, now_us + self.limits.lease_us, now_us))
        return batch_from_row(rows[0]) if rows else None

    async def append(self, batch: Batch, jobs: Sequence[NewJob]) -> None:
        """Insert the next jobs of a batch that the caller loads, and renew its lease."""
        for at in range(0, len(jobs), INSERT_CHUNK):
            chunk, total = jobs[at : at + INSERT_CHUNK], batch.counts.total
            if total + len(chunk) > self.limits.max_jobs:
                raise TooLarge(f"a batch has at most {self.limits.max_jobs:,} lines: split it")
            encoded = await encode_jobs(batch.id, total, chunk, self.blobs, self.limits)
            load = self._load_of(batch)
            await self._store.run(lambda load=load, encoded=encoded: insert_jobs(load, encoded))  # type: ignore[misc]
            n_failed = batch.counts.failed + sum(job.error is not None for job in encoded)
            batch.counts = msgspec.structs.replace(batch.counts, total=total + len(encoded), failed=n_failed)

    async def start(self, batch: Batch) -> Batch:
        """All jobs are loaded: make the batch runnable."""
        if not batch.counts.total:
            raise BadInput("the batch's file has no lines", param="input_file_id")
        await self._start(batch)
        await self._notify_changed(batch.id)
        return await self.batch(batch.account, batch.id)

    async def reject(self, batch: Batch, errors: Sequence[ErrorInfo]) -> Batch:
        """The file cannot be used: the batch fails as a whole."""
        await self._end_validating(batch, "failed", errors)
        return await self.batch(batch.account, batch.id)

    # --- running -----------------------------------------------------------------------------------------------------

    async def claim(self, owner: str, model: str, n: int, *, quarantined: bool = False) -> list[Lease]:
        """At most n jobs that may run now, under leases that `heartbeat` renews. Never waits.

        quarantined: at most one of the jobs under which workers died; no other job may run on its worker meanwhile.
        """
        if n <= 0:
            return []
        now_us = self._store.now_us()
        claimed = await self._store.run(lambda: claim(owner, model, n, quarantined, now_us, self.limits))
        leases = await asyncio.gather(*(self._lease(owner, job) for job in claimed))
        return [lease for lease in leases if lease is not None]

    async def heartbeat(self, owner: str, running: Collection[Lease]) -> HeartbeatReply:
        """Renew the worker's leases. Jobs that it no longer knows return to the queue."""
        now_us = self._store.now_us()
        await self._store.write(sql.HEARTBEAT, (owner, now_us + self.limits.lease_us, now_us))
        rows = await self._store.read(sql.LEASED_BY, (owner,))
        leased = {(str(row[0]), int(row[1] or 0)): row for row in rows}
        epoch_of = {lease.key: lease.epoch for lease in running}
        lost = {key for key, epoch in epoch_of.items() if key not in leased or leased[key][2] != epoch}
        stopped = {key for key, row in leased.items() if row[3] and key in epoch_of and key not in lost}
        forgotten_us = now_us - self.limits.lease_us  # a younger claim may be on its way to the caller
        for key, row in leased.items():
            if key not in epoch_of and int(row[4] or 0) < forgotten_us:
                await self._return(key, int(row[2] or 0), owner)
        return HeartbeatReply(frozenset(stopped), frozenset(lost))

    async def complete(self, lease: Lease, answer: Answer, usage: UsageRow | None = None) -> bool:
        """Store the result and its usage row. False: the lease was lost, and nothing was written."""
        return await self._finish(
            lease,
            "succeeded",
            await self._body(_to_bytes(answer)),
            input_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            cached_tokens=answer.usage.cached_tokens,
            reasoning_tokens=answer.usage.reasoning_tokens,
            usage=usage,
        )

    async def fail(
        self, lease: Lease, error: ErrorInfo, *, retry: bool, killed: bool = False, usage: UsageRow | None = None
    ) -> bool:
        """End the job, or retry it after a backoff within the limits. killed: a worker died under it."""
        now_us = self._store.now_us()
        if killed:
            outcome = killed_outcome(lease.key, lease.epoch, lease.owner, lease.kills, now_us, self.limits)
            return await self._outcomes.write(outcome)
        if retry and lease.attempts < self.limits.max_attempts:
            return await self._finish(lease, "queued", ready_us=now_us + backoff_us(lease.attempts - 1, self.limits))
        return await self._finish(lease, "failed", await self._body(_to_bytes(error)), **_usage_fields(usage))

    async def postpone(self, lease: Lease) -> bool:
        """Return a job that has to wait for others, for longer each time; it does not count as an attempt."""
        ready_us = self._store.now_us() + backoff_us(lease.epoch - 1, self.limits)
        return await self._finish(lease, "queued", ready_us=ready_us, attempts=-1)

    async def finish_stopped(self, lease: Lease, usage: UsageRow | None = None) -> bool:
        """End a job that a heartbeat said to stop, as cancelled or expired."""
        return await self._finish(lease, "queued", **_usage_fields(usage))

    async def release(self, leases: Iterable[Lease]) -> None:
        """Return jobs that were not started; it does not count as an attempt."""
        await asyncio.gather(*(self._return(lease.key, lease.epoch, lease.owner) for lease in leases))
        await self._store.notify("lines")

    async def deregister(self, owner: str) -> None:
        """A worker's clean exit: its jobs return to the queue."""
        rows = await self._store.read(sql.LEASED_BY, (owner,))
        await asyncio.gather(
            *(
                self._return((str(batch_id), int(number or 0)), int(epoch or 0), owner)
                for batch_id, number, epoch, *_ in rows
            )
        )
        await self._store.write(sql.DELETE_WORKER, (owner,))
        await self._store.notify("lines")

    async def reclaim_from(self, owner: str) -> None:
        """The worker is known to be dead: its jobs return to the queue before its leases end."""
        await self._sweeper.reclaim_from(owner)

    async def has_stop_requests(self, owner: str) -> bool:
        """True if a heartbeat would ask the worker to stop a job."""
        return bool(await self._store.read(sql.STOP_REQUESTS, (owner,)))

    def listen(self, channel: Literal["lines", "batches", "validating"], poll_s: float) -> Subscription:
        """Notifications that jobs may be claimable, or ids of batches that changed or have a file to be loaded."""
        return self._store.listen(channel, poll_s)

    # --- managing ----------------------------------------------------------------------------------------------------

    async def cancel(self, account: str, batch_id: str) -> Batch:
        """Waiting jobs end at once, running ones with their worker's next heartbeat. Idempotent."""
        batch = await self.batch(account, batch_id)
        # It may have been started since it was read: then it is cancelled like any that runs.
        if batch.status != "validating" or not await self._end_validating(batch, "cancelled", []):
            await self._store.write(sql.SET_CANCELLING, (self._store.now_us(), batch_id))
            if (await self.batch(account, batch_id)).status == "cancelling":
                await self._sweeper.stop_all(batch_id, "cancelled")
        await self._notify_changed(batch_id)
        return await self.batch(account, batch_id)

    async def cancel_job(self, account: str, batch_id: str, number: int) -> Job:
        batch = await self.batch(account, batch_id)
        now_us = self._store.now_us()
        await self._store.run(lambda: stop_jobs(batch, number, number + 1, "cancelled", now_us, self.limits))
        await self._notify_changed(batch_id)
        return await self.job(batch_id, number)

    async def delete(self, account: str, batch_id: str) -> None:
        """Delete an ended batch and its results."""
        batch = await self.batch(account, batch_id)
        if not batch.ended:
            raise Conflict(f"{batch_id} is {batch.status}: cancel it first")
        await self._sweeper.delete_batch(batch_id, 1, batch.status)

    async def replay(self, batch_id: str, number: int | None = None, account: str | None = None) -> int:
        """Move a batch's dead letters, or one, back to the queue with a fresh window; returns how many.

        The batch of an `account`, or of any.
        """
        batch = await (self._batch_of_any_account(batch_id) if account is None else self.batch(account, batch_id))
        numbers = [number] if number is not None else await self._dead_numbers(batch_id)
        deadline_us = self._store.now_us() + batch.deadline_us - batch.created_us
        n_jobs = await self._store.run(lambda: replay_dead(batch, numbers, deadline_us))
        await self._notify_changed(batch_id)
        return n_jobs

    async def sweep(self) -> None:
        await self._sweeper.sweep()

    async def purge_expired(self) -> None:
        """Enforce retention now rather than with one of the next sweeps."""
        await self._sweeper.purge_expired()

    # --- internals ---------------------------------------------------------------------------------------------------

    async def _existing(self, new: NewBatch) -> Batch | None:
        """The batch that has this id. The remains of a submission whose process died are removed."""
        rows = await self._store.read(sql.BATCH, (new.id,))
        if not rows:
            return None
        batch = batch_from_row(rows[0])
        if batch.account != new.account:
            raise Conflict(f"there is another batch {new.id}")
        if batch.status != "incoming":
            return batch
        await self._sweeper.recover()
        if await self._store.read(sql.BATCH, (new.id,)):
            raise Conflict(f"{new.id} is being submitted: ask again in a moment", retry_after_s=1)
        return None

    async def _input_blob(self, new: NewBatch) -> str:
        """The submitted file; it is kept as long as the batch, since results are shown in its terms."""
        rows = await self._store.read(_FILE_BLOB, (new.input_file_id, new.account))
        if not rows:
            raise BadInput(f"no file {new.input_file_id}: upload it first", param="input_file_id")
        return str(rows[0][0])

    async def _submit_large(
        self, new: NewBatch, blob: str | None, first: list[NewJob], rest: AsyncIterator[list[NewJob]]
    ) -> None:
        """Jobs are held until all are inserted; the sweeper removes what a crash before that leaves."""
        load = self._new_load(new, loader=secrets.token_hex(8))
        if not await self._store.write(*_insert_batch(new, "incoming", load, blob)):
            raise Conflict(f"{new.id} is being submitted: ask again in a moment", retry_after_s=1)
        batch = await self._batch_of_any_account(new.id)
        try:
            await self.append(batch, first)
            async for chunk in rest:
                await self.append(batch, chunk)
        except BaseException:
            await asyncio.shield(self._sweeper.delete_batch(new.id, 0, "incoming"))
            raise
        await self._start(batch)

    async def _start(self, batch: Batch) -> None:
        load = self._load_of(batch)
        await self._store.run(lambda: start_batch(load, self.limits))
        await self._sweeper.release(batch.id)

    def _new_load(self, new: NewBatch, loader: str) -> BatchLoad:
        return self._load(new.id, new.account, loader, self._store.now_us() + int(new.window_s * 1e6))

    def _load_of(self, batch: Batch) -> BatchLoad:
        return self._load(batch.id, batch.account, batch.loader, batch.deadline_us)

    def _load(self, batch_id: str, account: str, loader: str, deadline_us: int) -> BatchLoad:
        now_us = self._store.now_us()
        return BatchLoad(
            batch_id=batch_id,
            account=account,
            loader=loader,
            deadline_us=deadline_us,
            now_us=now_us,
            until_us=now_us + self.limits.lease_us,
        )

    async def _check_quota(self, account: str) -> None:
        await check_storage(self._store, account, self.limits)
        ((n,),) = await self._store.read(_N_OPEN, (account,))
        n_open = int(n or 0)
        if n_open >= self.limits.max_queued_jobs:
            raise Overloaded(f"the account has {n_open:,} lines in the queue: wait for some to end", retry_after_s=60)

    async def _end_validating(self, batch: Batch, status: BatchStatus, errors: Sequence[ErrorInfo]) -> bool:
        """End a batch that is validating; False if it was not any more."""
        now_us, encoded = self._store.now_us(), msgspec.json.encode(errors).decode()
        ended = await self._store.run(lambda: reject_batch(batch.id, status, encoded, now_us, self.limits))
        if ended:
            await self._sweeper.delete_jobs(batch.id)
        await self._notify_changed(batch.id)
        return ended

    async def _lease(self, owner: str, job: ClaimedJob) -> Lease | None:
        """None: its request cannot be read, so this job fails; those claimed with it run."""
        fields = job._asdict()
        del fields["data"], fields["blob"], fields["cost"]
        lease = Lease(**fields, owner=owner, request=_NO_REQUEST)
        reason: EmberlineError
        try:
            data = await self.blobs.get(job.blob) if job.blob is not None else job.data
            return msgspec.structs.replace(lease, request=_to_request(data or b""))
        except Unavailable as error:  # of the disk: another attempt may succeed
            reason, retry = error, True
        except Exception as error:
            log.error("a stored request cannot be read", exc_info=error, extra={"request_id": lease.request_id})
            reason, retry = Internal("the stored request cannot be read: submit it again"), False
        try:
            await self.fail(lease, reason.info(), retry=retry)
        except Exception as error:  # it returns to the queue when a heartbeat does not name it
            log.error("a job's failure was not written: %s", error, extra={"request_id": lease.request_id})
        return None

    async def _body(self, data: bytes) -> dict[str, Any]:
        """The fields of an outcome that hold its result."""
        if len(data) <= self.limits.blob_bytes:
            return {"data": data, "n_bytes": len(data)}
        return {"blob": await self.blobs.put(data), "n_bytes": len(data)}

    async def _finish(self, lease: Lease, state: JobState, body: dict[str, Any] | None = None, **fields: Any) -> bool:
        outcome = JobOutcome(key=lease.key, epoch=lease.epoch, owner=lease.owner, state=state, **(body or {}), **fields)
        return await self._outcomes.write(outcome)

    async def _return(self, key: JobKey, epoch: int, owner: str) -> None:
        await self._outcomes.write(JobOutcome(key=key, epoch=epoch, owner=owner, state="queued", attempts=-1))

    async def _notify_changed(self, batch_id: str) -> None:
        await self._store.notify("lines")
        await self._store.notify("batches", batch_id)
        await self._store.notify(EVENTS_CHANNEL)


def _insert_batch(new: NewBatch, status: BatchStatus, load: BatchLoad, blob: str | None) -> Query:
    identity = (new.id, new.account, new.key_id, new.kind, new.endpoint, new.model, status)
    details = (msgspec.json.encode(new.metadata).decode(), msgspec.json.encode(new.attributes).decode())
    lease, times = (load.loader, load.until_us), (load.now_us, load.deadline_us)
    return Query(sql.INSERT_BATCH, (*identity, *lease, *details, new.input_file_id, new.traceparent, blob, *times))


def _usage_fields(usage: UsageRow | None) -> dict[str, Any]:
    """Record the usage of an unsuccessful attempt; its account is charged."""
    if usage is None:
        return {}
    return {"usage": usage, "input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}


async def _chunks(jobs: Iterable[NewJob] | AsyncIterable[NewJob]) -> AsyncIterator[list[NewJob]]:
    chunk: list[NewJob] = []
    async for job in jobs if isinstance(jobs, AsyncIterable) else _as_async(jobs):
        chunk.append(job)
        if len(chunk) == INSERT_CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _as_async(jobs: Iterable[NewJob]) -> AsyncIterator[NewJob]:
    for job in jobs:
        yield job
