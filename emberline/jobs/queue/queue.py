"""The durable queue: batches in, lines out under leases, results back, each exactly once.

A promise holds when the call returns: it is on disk. Everything is in the store; this object has no state but tasks,
so any number of processes may have one over the same store.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from emberline.accounts.usage_ledger import UsageRow
from emberline.jobs.batches.batch import Batch, NewBatch, batch_from_row
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.batches.files import FileStore, held_bytes
from emberline.jobs.batches.idempotency_keys import IdempotencyKeys
from emberline.jobs.limits import INSERT_CHUNK, QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.batch_end import reject
from emberline.jobs.queue.claims import Claimed, claim
from emberline.jobs.queue.completion import replay, settle, stop
from emberline.jobs.queue.enqueue import Load, add, all_at_once, encode, start
from emberline.jobs.queue.group_commit import Gatherer
from emberline.jobs.queue.job import HeartbeatReply, Job, JobKey, JobOutcome, Lease, NewJob
from emberline.jobs.queue.reader import QueueDepth, QueuePosition, QueueReader, place
from emberline.jobs.queue.sweeper import Sweeper, backoff_us, killed
from emberline.jobs.queue.transcript import Transcripts
from emberline.protocol.answer import Answer
from emberline.protocol.errors import BadInput, Conflict, ErrorInfo, NotFound, Overloaded, TooLarge
from emberline.protocol.request import GenerateRequest
from emberline.store import Database, Step

BLOBS = "blobs"
_QUEUED = "SELECT SUM(n_queued + n_leased) FROM lanes WHERE account = ?"
_FILE = "SELECT blob FROM files WHERE id = ? AND account = ?"
_to_bytes = msgspec.msgpack.Encoder().encode
_to_request = msgspec.msgpack.Decoder(GenerateRequest).decode


async def open_queue(store: Database, data_dir: Path, limits: QueueLimits | None = None) -> "Queue":
    """The queue over an open store, sweeping from now on. Close it before the store."""
    queue = Queue(store, BlobStore(data_dir / BLOBS), limits or QueueLimits())
    queue.start_sweeping()
    return queue


class Queue:
    def __init__(self, store: Database, blobs: BlobStore, limits: QueueLimits) -> None:
        self.blobs = blobs
        self.limits = limits
        self.files = FileStore(store, blobs, limits)
        self.idempotency_keys = IdempotencyKeys(store, limits)
        self.transcripts = Transcripts(store)
        self._store = store
        self._shelf = QueueReader(store, blobs)
        self._sweeper = Sweeper(store, blobs, self.files, limits)
        self._settling: Gatherer[JobKey, JobOutcome] = Gatherer(self._settle_group)
        self._sweeping: asyncio.Task[None] | None = None

    def start_sweeping(self) -> None:
        self._sweeping = asyncio.create_task(self._sweeper.run())

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._settling.close()

    # --- in ----------------------------------------------------------------------------------------------------------

    async def submit(self, new: NewBatch, lines: Iterable[NewJob] | AsyncIterable[NewJob]) -> Batch:
        """In progress and durable when it returns. Under an id that there is, the batch that there is."""
        if (known := await self._known(new)) is not None:
            return known
        await self._check_room(new.account)
        chunks = _chunks(lines)
        first: list[NewJob] = await anext(chunks, [])
        if not first:
            raise BadInput("a batch needs at least one line")
        if len(first) < INSERT_CHUNK:
            await self._submit_small(new, first)
        else:
            await self._submit_large(new, first, chunks)
        await self._changed(new.id)
        return await self.batch(new.account, new.id)

    async def create(self, new: NewBatch) -> Batch:
        """Validating and durable when it returns; whoever takes it reads its lines from its file."""
        if (known := await self._known(new)) is not None:
            return known
        await self._check_room(new.account)
        blob = await self._input_blob(new)
        load = self._load(new, loader="")
        insert = _insert(new, "validating", msgspec.structs.replace(load, until_us=0), blob)
        await self._store.write(*insert)
        await self._store.notify("validating", new.id)
        return await self.batch(new.account, new.id)

    async def claim_validating(self, owner: str) -> Batch | None:
        """One whose lines nobody reads now; the caller does, from line `n_loaded` on, and has a lease to renew."""
        now_us = self._store.now_us()
        rows = await self._store.write(sql.TAKE_LOAD, (owner, now_us + self.limits.lease_us, now_us))
        return batch_from_row(rows[0]) if rows else None

    async def append(self, batch: Batch, lines: Sequence[NewJob]) -> None:
        """The next lines of a batch that the caller took; renews its lease."""
        for at in range(0, len(lines), INSERT_CHUNK):
            total = batch.counts.total
            self._check_lines(total + len(lines[at : at + INSERT_CHUNK]))
            encoded = await encode(batch.id, total, lines[at : at + INSERT_CHUNK], self.blobs, self.limits)
            load = self._load_of(batch)
            await self._store.run(lambda load=load, encoded=encoded: add(load, encoded))  # type: ignore[misc]
            n_failed = batch.counts.failed + sum(line.error is not None for line in encoded)
            batch.counts = msgspec.structs.replace(batch.counts, total=total + len(encoded), failed=n_failed)

    async def start(self, batch: Batch) -> Batch:
        """All lines are there."""
        if not batch.counts.total:
            raise BadInput("the batch's file has no lines", param="input_file_id")
        load = self._load_of(batch)
        await self._store.run(lambda: start(load, self.limits))
        await self._sweeper.release(batch.id)
        await self._changed(batch.id)
        return await self.batch(batch.account, batch.id)

    async def reject(self, batch: Batch, errors: Sequence[ErrorInfo]) -> Batch:
        """Its file cannot be used: it fails as a whole."""
        await self._end_validating(batch, "failed", errors)
        return await self.batch(batch.account, batch.id)

    # --- work --------------------------------------------------------------------------------------------------------

    async def claim(self, owner: str, model: str, n: int, *, alone: bool = False) -> list[Lease]:
        """At most n lines that may run now, under leases that `heartbeat` renews. Never waits.

        alone: at most one of the lines under which workers died; nothing else of the queue shall run beside it.
        """
        if n <= 0:
            return []
        now_us = self._store.now_us()
        claimed = await self._store.run(lambda: claim(owner, model, n, alone, now_us, self.limits))
        return [await self._lease(owner, row, alone) for row in claimed]

    async def heartbeat(self, owner: str, running: Collection[Lease]) -> HeartbeatReply:
        """Keep the worker's leases; what it shall stop. Lines it does not know of (any more) go back to the queue."""
        now_us = self._store.now_us()
        await self._store.write(sql.ALIVE, (owner, now_us + self.limits.lease_us, now_us))
        rows = await self._store.read(sql.LEASED_BY, (owner,))
        held = {(str(row[0]), int(row[1] or 0)): row for row in rows}
        mine = {lease.key: lease.epoch for lease in running}
        lost = {key for key, epoch in mine.items() if key not in held or held[key][2] != epoch}
        stop = {key for key, row in held.items() if row[3] and key in mine and key not in lost}
        forgotten_us = now_us - self.limits.lease_us  # younger ones may be on their way to the caller
        for key, row in held.items():
            if key not in mine and int(row[4] or 0) < forgotten_us:
                await self._put_back(key, int(row[2] or 0), owner)
        return HeartbeatReply(frozenset(stop), frozenset(lost))

    async def complete(self, lease: Lease, answer: Answer, usage: UsageRow | None = None) -> bool:
        """The result, its usage row with it. False: the line is no longer the caller's, and nothing was written."""
        data, blob, size = await self._body(_to_bytes(answer))
        return await self._settle(
            lease,
            "succeeded",
            data=data,
            blob=blob,
            n_bytes=size,
            input_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            cached_tokens=answer.usage.cached_tokens,
            reasoning_tokens=answer.usage.reasoning_tokens,
            usage=usage,
        )

    async def fail(
        self, lease: Lease, error: ErrorInfo, *, retry: bool, killed: bool = False, usage: UsageRow | None = None
    ) -> bool:
        """Final, or tried again after a while, as often as the limits allow. killed: a worker died under it."""
        if killed:
            return await self._died(lease)
        if retry and lease.attempts < self.limits.max_attempts:
            ready_us = self._store.now_us() + backoff_us(lease.attempts - 1, self.limits)
            return await self._settle(lease, "queued", ready_us=ready_us)
        data, blob, size = await self._body(_to_bytes(error))
        tokens = _tokens(usage)
        return await self._settle(lease, "failed", data=data, blob=blob, n_bytes=size, usage=usage, **tokens)

    async def finish_stopped(self, lease: Lease, usage: UsageRow | None = None) -> bool:
        """The end of a line that a heartbeat said to stop: cancelled or expired, whichever was why."""
        return await self._settle(lease, "queued", usage=usage, **_tokens(usage))

    async def release(self, leases: Iterable[Lease]) -> None:
        """Unused: back at once, and it was no attempt."""
        await asyncio.gather(*(self._put_back(lease.key, lease.epoch, lease.owner) for lease in leases))
        await self._store.notify("lines")

    async def deregister(self, owner: str) -> None:
        """A worker's clean end."""
        rows = await self._store.read(sql.LEASED_BY, (owner,))
        keys = [((str(row[0]), int(row[1] or 0)), int(row[2] or 0)) for row in rows]
        await asyncio.gather(*(self._put_back(key, epoch, owner) for key, epoch in keys))
        await self._store.write(sql.FORGET_WORKER, (owner,))
        await self._store.notify("lines")

    def wait_ready(self, poll_s: float = 1.0) -> AsyncIterator[str]:
        """Yields when there may be lines to claim."""
        return self._store.listen("lines", poll_s)

    def listen(self, channel: Literal["batches", "validating"], poll_s: float) -> AsyncIterator[str]:
        """Ids of batches that changed, or that have a file to be read; "": look at all."""
        return self._store.listen(channel, poll_s)

    async def has_stop_requests(self, owner: str) -> bool:
        """Whether a heartbeat would tell the worker to stop something."""
        return bool(await self._store.read(sql.STOPPING_OF, (owner,)))

    async def reclaim_from(self, owner: str) -> None:
        """The worker is known to be dead: what it held goes back now, not when its lease ends."""
        await self._sweeper.bury(owner)

    def now_us(self) -> int:
        """By the clock of leases and deadlines."""
        return self._store.now_us()

    async def depths(self) -> list[QueueDepth]:
        return await self._shelf.depths(self.limits.quarantine_kills)

    async def count_dead_letters(self) -> int:
        ((n_lines,),) = await self._store.read(sql.COUNT_DEAD)
        return int(n_lines or 0)

    # --- out ---------------------------------------------------------------------------------------------------------

    async def batch(self, account: str, batch_id: str) -> Batch:
        return await self._shelf.batch(account, batch_id)

    async def batches(
        self, account: str, kind: str, *, after: str | None = None, before: str | None = None, limit: int = 20
    ) -> tuple[list[Batch], bool]:
        """A page, newest first, and whether there is more in that direction."""
        return await self._shelf.batches(account, kind, after, before, limit)

    async def jobs(
        self, batch_id: str, *, after: int = -1, limit: int = 500, states: Collection[str] = (), bodies: bool = True
    ) -> list[Job]:
        """By number; the caller has checked whose batch it is."""
        return await self._shelf.lines(batch_id, after, limit, states, bodies)

    async def job(self, batch_id: str, number: int) -> Job:
        found = await self._shelf.lines(batch_id, number - 1, 1, (), True)
        if not found or found[0].number != number:
            raise NotFound(f"no line {number} in {batch_id}")
        return found[0]

    async def position(self, batch: Batch) -> QueuePosition:
        return await place(self._store, batch)

    async def wait_for_change(self, batch_id: str, timeout_s: float) -> None:
        """Return when the batch may have changed, or after `timeout_s`."""

        async def heard() -> None:
            async for payload in self._store.listen("batches", poll_s=max(1.0, timeout_s)):
                if payload in ("", batch_id):
                    return

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await heard()

    async def cancel(self, account: str, batch_id: str) -> Batch:
        """What waits ends at once, what runs with its worker's next heartbeat. Cancelling twice is fine."""
        batch = await self.batch(account, batch_id)
        # It may have been started since it was read: then it is stopped like any that runs.
        if batch.status != "validating" or not await self._end_validating(batch, "cancelled", []):
            await self._store.write(sql.CANCELLING, (self._store.now_us(), batch_id))
            if (await self.batch(account, batch_id)).status == "cancelling":
                await self._sweeper.stop_all(batch_id, "cancelled")
        await self._changed(batch_id)
        return await self.batch(account, batch_id)

    async def cancel_job(self, account: str, batch_id: str, number: int) -> Job:
        batch = await self.batch(account, batch_id)
        now_us = self._store.now_us()
        await self._store.run(lambda: stop(batch, number, number + 1, "cancelled", now_us, self.limits))
        await self._changed(batch_id)
        return await self.job(batch_id, number)

    async def delete(self, account: str, batch_id: str) -> None:
        """It and its results are gone. Only of a batch that has ended."""
        batch = await self.batch(account, batch_id)
        if not batch.ended:
            raise Conflict(f"{batch_id} is {batch.status}: cancel it first")
        if await self._sweeper.hide(batch_id, 1, batch.status):
            await self._sweeper.remove(batch_id)

    async def dead_letters(self, *, after: JobKey | None = None, limit: int = 100) -> list[Job]:
        """The dead letters of all accounts, by batch and number."""
        return await self._shelf.dead(after, limit)

    async def replay(self, batch_id: str, number: int | None = None) -> int:
        """Dead lines of a batch, or one, back to the queue with the time that the batch had; how many."""
        batch = await self._shelf.any_batch(batch_id)
        numbers = [number] if number is not None else await self._shelf.dead_numbers(batch_id)
        deadline_us = self._store.now_us() + batch.deadline_us - batch.created_us
        n_lines = await self._store.run(lambda: replay(batch, numbers, deadline_us))
        await self._changed(batch_id)
        return n_lines

    async def sweep(self) -> None:
        await self._sweeper.sweep()

    async def purge_expired(self) -> None:
        """Remove what is past its time, now rather than with one of the next sweeps."""
        await self._sweeper.tidy()

    # --- within ------------------------------------------------------------------------------------------------------

    async def _known(self, new: NewBatch) -> Batch | None:
        """The batch that has this id. The remains of a submission that died are cleared away."""
        rows = await self._store.read(sql.BATCH, (new.id,))
        if not rows:
            return None
        batch = batch_from_row(rows[0])
        if batch.account != new.account:
            raise Conflict(f"there is another batch {new.id}")
        if batch.status != "incoming":
            return batch
        await self._sweeper.go_on()
        if await self._store.read(sql.BATCH, (new.id,)):
            raise Conflict(f"{new.id} is being submitted: ask again in a moment", retry_after_s=1)
        return None

    async def _input_blob(self, new: NewBatch) -> str:
        """What the batch was submitted as; it is kept as long as the batch, since results are shown in its terms."""
        rows = await self._store.read(_FILE, (new.input_file_id, new.account))
        if not rows:
            raise BadInput(f"no file {new.input_file_id}: upload it first", param="input_file_id")
        return str(rows[0][0])

    async def _submit_small(self, new: NewBatch, lines: list[NewJob]) -> None:
        load = self._load(new, loader="submit")
        encoded = await encode(new.id, 0, lines, self.blobs, self.limits)
        insert = _insert(new, "incoming", load, await self._input_blob(new) if new.input_file_id else None)
        await self._store.run(lambda: all_at_once(load, insert, encoded, self.limits))

    async def _submit_large(self, new: NewBatch, first: list[NewJob], rest: AsyncIterator[list[NewJob]]) -> None:
        """Held back until all are written; a crash before that leaves what the sweep clears away."""
        load = self._load(new, loader=secrets.token_hex(8))
        blob = await self._input_blob(new) if new.input_file_id else None
        if not await self._store.write(*_insert(new, "incoming", load, blob)):
            raise Conflict(f"{new.id} is being submitted: ask again in a moment", retry_after_s=1)
        rows = await self._store.read(sql.BATCH, (new.id,))
        batch = batch_from_row(rows[0])
        try:
            await self.append(batch, first)
            async for chunk in rest:
                await self.append(batch, chunk)
        except BaseException:
            if await asyncio.shield(self._sweeper.hide(new.id, 0, "incoming")):
                await asyncio.shield(self._sweeper.remove(new.id))
            raise
        load = self._load_of(batch)
        await self._store.run(lambda: start(load, self.limits))
        await self._sweeper.release(new.id)

    def _load(self, new: NewBatch, loader: str) -> Load:
        now_us = self._store.now_us()
        return Load(
            batch_id=new.id,
            account=new.account,
            loader=loader,
            deadline_us=now_us + int(new.window_s * 1e6),
            now_us=now_us,
            until_us=now_us + self.limits.lease_us,
        )

    def _load_of(self, batch: Batch) -> Load:
        now_us = self._store.now_us()
        return Load(
            batch_id=batch.id,
            account=batch.account,
            loader=batch.loader,
            deadline_us=batch.deadline_us,
            now_us=now_us,
            until_us=now_us + self.limits.lease_us,
        )

    async def _check_room(self, account: str) -> None:
        if await held_bytes(self._store, account) >= self.limits.max_account_bytes:
            raise TooLarge("the account's files and batches have used up its storage: delete some")
        ((queued,),) = await self._store.read(_QUEUED, (account,))
        n_queued = int(queued or 0)
        if n_queued >= self.limits.max_queued_jobs:
            raise Overloaded(f"the account has {n_queued:,} lines in the queue: wait for some to end", retry_after_s=60)

    def _check_lines(self, total: int) -> None:
        if total > self.limits.max_jobs:
            raise TooLarge(f"a batch has at most {self.limits.max_jobs:,} lines: split it")

    async def _end_validating(self, batch: Batch, status: Any, errors: Sequence[ErrorInfo]) -> bool:
        """Whether it was still being read."""
        now_us, said = self._store.now_us(), msgspec.json.encode(errors).decode()
        ended = await self._store.run(lambda: reject(batch.id, status, said, now_us, self.limits))
        if ended:
            await self._sweeper.drop_lines(batch.id)
        await self._changed(batch.id)
        return ended

    async def _lease(self, owner: str, row: Claimed, alone: bool) -> Lease:
        data = row.data if row.data is not None else await self.blobs.get(str(row.blob))
        fields = row._asdict()
        del fields["data"], fields["blob"]
        return Lease(**fields, owner=owner, alone=alone, request=_to_request(data))

    async def _body(self, data: bytes) -> tuple[bytes | None, str | None, int]:
        if len(data) <= self.limits.blob_bytes:
            return data, None, len(data)
        return None, await self.blobs.put(data), len(data)

    async def _settle(self, lease: Lease, state: Any, **fields: Any) -> bool:
        outcome = JobOutcome(key=lease.key, epoch=lease.epoch, owner=lease.owner, state=state, **fields)
        return await self._settling.put(lease.key, outcome)

    async def _died(self, lease: Lease) -> bool:
        row = (*lease.key, lease.epoch, lease.kills)
        return await self._settling.put(lease.key, killed(row, lease.owner, self._store.now_us(), self.limits))

    async def _put_back(self, key: JobKey, epoch: int, owner: str) -> bool:
        outcome = JobOutcome(key=key, epoch=epoch, owner=owner, state="queued", attempts=-1)
        return await self._settling.put(key, outcome)

    async def _settle_group(self, outcomes: list[JobOutcome]) -> set[JobKey]:
        now_us = self._store.now_us()
        work: Callable[[], Any] = lambda: settle(outcomes, now_us, self.limits)  # noqa: E731
        states: dict[JobKey, str] = await self._store.run(work)
        for batch_id in {batch_id for batch_id, _ in states}:
            await self._store.notify("batches", batch_id)
        await self._store.notify("events")
        return set(states)

    async def _changed(self, batch_id: str) -> None:
        await self._store.notify("lines")
        await self._store.notify("batches", batch_id)
        await self._store.notify("events")


def _insert(new: NewBatch, status: str, load: Load, blob: str | None = None) -> Step:
    said = (msgspec.json.encode(new.metadata).decode(), msgspec.json.encode(new.attributes).decode())
    who = (new.id, new.account, new.key_id, new.kind, new.endpoint, new.model, status)
    when = (load.now_us, load.deadline_us)
    return Step(sql.INSERT_BATCH, (*who, load.loader, load.until_us, *said, new.input_file_id, blob, *when))


def _tokens(usage: UsageRow | None) -> dict[str, int]:
    """What it took although it did not end well; its account is charged for it."""
    if usage is None:
        return {}
    return {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}


async def _chunks(lines: Iterable[NewJob] | AsyncIterable[NewJob]) -> AsyncIterator[list[NewJob]]:
    chunk: list[NewJob] = []
    async for line in _each(lines):
        chunk.append(line)
        if len(chunk) == INSERT_CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _each(lines: Iterable[NewJob] | AsyncIterable[NewJob]) -> AsyncIterator[NewJob]:
    if isinstance(lines, AsyncIterable):
        async for line in lines:
            yield line
    else:
        for line in lines:
            yield line
