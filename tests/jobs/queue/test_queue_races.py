"""Concurrent transactions: the decision of one must hold although another changes the same job."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from emberline.jobs.batches.batch import Batch
from emberline.jobs.queue.completion import apply_outcomes
from emberline.jobs.queue.enqueue import encode_jobs, insert_jobs, release_jobs, start_batch
from emberline.jobs.queue.job import JobOutcome
from emberline.jobs.queue.queue import Queue
from emberline.store import Database, Transaction
from tests.databases import DatabaseLocation
from tests.jobs.queue.helpers import MODEL, audit, make_queue, new_batch, new_job, new_jobs

ROUNDS = 12
LEFT = "SELECT number, state, stopping FROM lines WHERE batch_id = ? AND (state <> 'leased' OR stopping = 0)"


@pytest.fixture
async def queue(store: Database, tmp_path: Path) -> AsyncIterator[Queue]:
    queue = make_queue(store, tmp_path)  # without a sweeper, which would repair an incomplete call
    yield queue
    await queue.close()
    await audit(store)


@contextlib.asynccontextmanager
async def repeating(act: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Repeat `act` concurrently while the body runs."""

    async def forever() -> None:
        while True:
            await act()
            await asyncio.sleep(0)

    task = asyncio.create_task(forever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def still_open(store: Database, batch: Batch) -> list[Any]:
    """Jobs that may still run although their workers would not be asked to stop."""
    rows = await store.read(LEFT, (batch.id,))
    return [row for row in rows if row[1] in ("held", "queued", "leased")]


async def test_a_late_heartbeat_does_not_keep_the_jobs_of_a_dead_worker(queue: Queue) -> None:
    """The database may execute a statement after the process that sent it was killed."""
    async with repeating(lambda: queue.heartbeat("dead", [])):
        for i in range(ROUNDS):
            batch = await queue.submit(new_batch(), new_jobs(3))
            assert len(await queue.claim("dead", MODEL, 3)) == 3
            await queue.reclaim_from("dead")
            assert [item.state for item in await queue.jobs(batch.id)] == ["queued"] * 3, i
            await queue.cancel("a", batch.id)


async def test_cancel_races_with_claims_and_returns(
    queue: Queue, database: DatabaseLocation, store: Database, tmp_path: Path
) -> None:
    other_store = await database.open()
    other = make_queue(other_store, tmp_path)

    async def claim_and_release() -> None:
        await other.release(await other.claim("w", MODEL, 8))

    async with repeating(claim_and_release):
        for i in range(ROUNDS):
            batch = await queue.submit(new_batch(), new_jobs(40))
            await asyncio.sleep(0.003 * i)
            await queue.cancel("a", batch.id)
            assert await still_open(store, batch) == [], i
    await other.deregister("w")
    ended = await queue.batch("a", batch.id)
    assert (ended.status, ended.counts.cancelled) == ("cancelled", 40)
    await other.close()
    await other_store.close()


class Paused:
    """A transaction on its own connection that commits when the block ends."""

    def __init__(self, connection: Any, work: Transaction[Any]) -> None:
        self._connection = connection
        self._transaction = connection.transaction()
        self._work = work

    async def __aenter__(self) -> "Paused":
        from emberline.store.postgres import _rows

        await self._transaction.start()
        rows: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                rows = await _rows(self._connection, self._work.send(rows))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._transaction.commit()


@pytest.fixture
async def connection(database: DatabaseLocation) -> AsyncIterator[Any]:
    if database.kind != "postgres":
        pytest.skip("SQLite has one writer")
    import asyncpg

    connection = await asyncpg.connect(database.where)
    yield connection
    await connection.close()


async def blocked(connection: Any) -> None:
    """Wait until another connection waits for a lock that this one holds."""
    pid = await connection.fetchval("SELECT pg_backend_pid()")
    look = "SELECT COUNT(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))"
    async with asyncio.timeout(60):
        while not await connection.fetchval(look, pid):
            await asyncio.sleep(0.01)


async def test_cancel_during_release(queue: Queue, store: Database, connection: Any) -> None:
    file = await queue.files.add("a", "in.jsonl", "batch", b"two\nlines")
    batch = await queue.create(new_batch(input_file_id=file.id))
    loading = await queue.claim_validating("loader")
    assert loading is not None
    load = queue._load_of(loading)
    encoded = await encode_jobs(batch.id, 0, new_jobs(2), queue.blobs, queue.limits)
    await store.run(lambda: insert_jobs(load, encoded))
    await store.run(lambda: start_batch(load, queue.limits))
    async with Paused(connection, release_jobs(batch.id, "a", 0, 2)):
        cancelling = asyncio.create_task(queue.cancel("a", batch.id))
        await blocked(connection)
    assert (await cancelling).status == "cancelled"


@pytest.mark.parametrize("whole", [True, False])
async def test_cancel_during_return(queue: Queue, connection: Any, whole: bool) -> None:
    batch = await queue.submit(new_batch(), [new_job(0)])
    (lease,) = await queue.claim("w", MODEL, 1)
    back = JobOutcome(key=lease.key, epoch=lease.epoch, owner="w", state="queued", attempts=-1)
    async with Paused(connection, apply_outcomes([back], queue.now_us(), queue.limits)):
        stop = queue.cancel("a", batch.id) if whole else queue.cancel_job("a", batch.id, 0)
        cancelling = asyncio.ensure_future(stop)
        await blocked(connection)
    await cancelling
    assert (await queue.job(batch.id, 0)).state == "cancelled"


@pytest.mark.parametrize("whole", [True, False])
async def test_cancel_during_claim(queue: Queue, connection: Any, whole: bool) -> None:
    from emberline.jobs.queue.claims import claim

    batch = await queue.submit(new_batch(), [new_job(0)])
    async with Paused(connection, claim("w", MODEL, 1, False, queue.now_us(), queue.limits)):
        stop = queue.cancel("a", batch.id) if whole else queue.cancel_job("a", batch.id, 0)
        cancelling = asyncio.ensure_future(stop)
        await blocked(connection)
    await cancelling
    assert await queue.has_stop_requests("w")
    await queue.deregister("w")
    assert (await queue.job(batch.id, 0)).state == "cancelled"
