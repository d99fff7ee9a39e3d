"""kill -9 of a process that submits, claims and completes: what was acknowledged is durable, the rest is reclaimed."""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from emberline.jobs.queue.queue import Queue
from tests.databases import DatabaseLocation
from tests.jobs.queue.helpers import MODEL, ManualClock, answer, audit, make_queue, usage

WORKER = """
import asyncio, sys
from pathlib import Path
from emberline.store import open_store
from tests.jobs.queue.helpers import MODEL, answer, make_queue, new_batch, new_jobs, usage

async def main(where, folder, run):
    store = await open_store(where)
    queue = make_queue(store, Path(folder))
    async def submit():
        for i in range(1000):
            await queue.submit(new_batch(id=f"b{run}-{i}"), new_jobs(700 if i % 3 == 1 else 20))
            print("submitted", f"b{run}-{i}", 700 if i % 3 == 1 else 20, flush=True)
    async def pull():
        while True:
            for lease in await queue.claim(f"w{run}", MODEL, 16):
                if await queue.complete(lease, answer(str(run)), usage(lease)):
                    print("completed", *lease.key, run, flush=True)
            await asyncio.sleep(0.001)
    await asyncio.gather(submit(), pull())

asyncio.run(main(*sys.argv[1:4]))
"""


async def run_and_kill(place: DatabaseLocation, folder: Path, run: int, after_s: float) -> list[list[str]]:
    """The acknowledgements it printed before it was killed."""
    command = (sys.executable, "-c", WORKER, place.where, str(folder), str(run))
    root = Path(__file__).parents[3]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=root)
    assert process.stdout is not None
    first = b""
    while b"submitted" not in first or b"completed" not in first:
        first += await process.stdout.readline()
    await asyncio.sleep(after_s)
    os.kill(process.pid, signal.SIGKILL)
    said = (first + await process.stdout.read()).decode().splitlines()
    assert await process.wait() == -9
    return [row.split() for row in said if row.count(" ") >= 2]


async def finish(queue: Queue, time: ManualClock) -> None:
    while True:
        leases = await queue.claim("last", MODEL, 200)
        if not leases:
            if not await queue.depths():
                return
            time.advance(61)
            await queue.heartbeat("last", [])
            await queue.sweep()
        done = await asyncio.gather(*(queue.complete(lease, answer("last"), usage(lease)) for lease in leases))
        assert all(done)


@pytest.mark.parametrize("n_kills", [2, pytest.param(6, marks=pytest.mark.slow)])
async def test_acknowledged_batches_and_results_survive_kills(
    database: DatabaseLocation, tmp_path: Path, n_kills: int
) -> None:
    seed = random.Random(7)
    promised: dict[str, int] = {}
    told: dict[tuple[str, int], str] = {}
    for run in range(n_kills):
        for row in await run_and_kill(database, tmp_path, run, seed.uniform(0.05, 0.5)):
            if row[0] == "submitted":
                promised[row[1]] = int(row[2])
            elif len(row) == 4:
                assert told.setdefault((row[1], int(row[2])), row[3]) == row[3], "completed twice"
    assert promised
    assert told
    store = await database.open()
    time = ManualClock(store)
    queue = make_queue(store, tmp_path, max_kills=100)
    time.advance(61)
    await queue.sweep()
    await audit(store)
    await finish(queue, time)
    await audit(store)
    for batch_id, n_lines in promised.items():
        batch = await queue.batch("a", batch_id)
        assert (batch.status, batch.counts.completed) == ("completed", n_lines)
    for (batch_id, number), run_name in told.items():
        assert (await queue.job(batch_id, number)).answer == answer(run_name)
    counted = await store.read("SELECT (SELECT COUNT(*) FROM lines), (SELECT COUNT(*) FROM usage)")
    assert counted[0][0] == counted[0][1]
    assert await store.read("SELECT COUNT(*) FROM batches WHERE ended <> 1") == [(0,)]
    await queue.close()
    await store.close()
