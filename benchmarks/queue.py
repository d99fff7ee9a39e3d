"""Throughput and latency of the durable queue: `python -m benchmarks.queue [--peer]`. Prints JSON.

SQLite with full durability and PostgreSQL (EMBERLINE_TEST_POSTGRES, or from its wheel) with its defaults; requests of
2 KB. With --peer, procrastinate runs as many jobs on the same PostgreSQL, also with four workers.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contender import Setup
from benchmarks.peers.venv import ensure_venv
from emberline.jobs.batches.batch import NewBatch
from emberline.jobs.queue.job import NewJob
from emberline.jobs.queue.queue import Queue, open_queue
from emberline.protocol.complete_response import Answer, AnswerChoice, TextPart
from emberline.protocol.events import Usage
from emberline.protocol.request import GenerateRequest, Message
from emberline.store import Database, open_store
from tests.databases import drop_schema, make_schema, postgres_server

MODEL = "m"
PULLERS = 4
AT_ONCE = 64
PEER = ("procrastinate==3.10.0", "psycopg[binary]==3.3.8")
ANSWER = Answer([AnswerChoice([TextPart("word " * 100)])], Usage(prompt_tokens=400, completion_tokens=100))


def lines(n: int) -> Iterator[NewJob]:
    for i in range(n):
        text = f"{i} ".ljust(1900, "x")
        yield NewJob(f"request-{i}", GenerateRequest(id="", model=MODEL, messages=(Message("user", text),)))


def new(account: str = "a") -> NewBatch:
    return NewBatch(account=account, kind="openai", model=MODEL)


async def pull(owner: str, queue: Queue) -> int:
    """Claim and complete until nothing is left."""
    n = 0
    while leases := await queue.claim(owner, MODEL, AT_ONCE):
        n += sum(await asyncio.gather(*(queue.complete(lease, ANSWER) for lease in leases)))
    return n


async def timed(act: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await act()
    return time.perf_counter() - began


async def submit_and_work(queue: Queue, n: int) -> dict[str, float]:
    submit_s = await timed(lambda: queue.submit(new(), lines(n)))
    work_s = await timed(lambda: asyncio.gather(*(pull(f"w{i}", queue) for i in range(PULLERS))))
    return {
        "submit_s": round(submit_s, 3),
        "enqueued_per_s": round(n / submit_s),
        "claimed_and_completed_per_s": round(n / work_s),
    }


async def small_submits(queue: Queue, n: int = 2000) -> float:
    """Batches of one job each, 64 concurrent callers."""
    gate = asyncio.Semaphore(64)

    async def one() -> None:
        async with gate:
            await queue.submit(new("small"), lines(1))

    return round(n / await timed(lambda: asyncio.gather(*(one() for _ in range(n)))))


async def backlog(queue: Queue, n: int) -> dict[str, float]:
    """Latency in milliseconds of client requests while n jobs are queued."""
    batch = await queue.submit(new("c"), lines(n // 2))
    await queue.submit(new("d"), lines(n - n // 2))

    async def status() -> None:
        found = await queue.batch("c", batch.id)
        await queue.position(found)

    acts: dict[str, Callable[[], Awaitable[Any]]] = {
        "status_ms": status,
        "list_batches_ms": lambda: queue.batches("c", "openai"),
        "list_lines_ms": lambda: queue.jobs(batch.id, after=n // 4, limit=100),
        "depth_ms": queue.depths,
        "claim_ms": lambda: queue.claim("probe", MODEL, 1),
    }
    found = {name: round(1000 * median([await timed(act) for _ in range(20)]), 2) for name, act in acts.items()}
    return {"lines": n, **found}


async def memory_mb(where: str, folder: str) -> int:
    """The longest time of a process that reads the queue, claims, releases and sweeps."""
    (row,) = await _together([[sys.executable, "-m", "benchmarks.queue", "--look", where, folder]])
    return int(row["mb"])


async def look_here(where: str, folder: Path) -> None:
    store = await open_store(where)
    queue = await open_queue(store, folder)
    await queue.depths()
    for account in ("small", "c"):
        for batch in (await queue.batches(account, "openai"))[0]:
            await queue.position(batch)
            await queue.jobs(batch.id, limit=100)
    await queue.release(await queue.claim("look", MODEL, AT_ONCE))
    await queue.sweep()
    await queue.close()
    await store.close()
    print(json.dumps({"mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


async def measure(where: str, n: int, n_waiting: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        store: Database = await open_store(where)
        queue = await open_queue(store, Path(folder))
        rows: dict[str, Any] = await submit_and_work(queue, n)
        rows["one_line_batches_per_s"] = await small_submits(queue)
        before_mb = await memory_mb(where, folder)
        rows["backlog"] = await backlog(queue, n_waiting)
        rows["backlog"] |= {"memory_mb": await memory_mb(where, folder), "memory_mb_without": before_mb}
        await queue.close()
        await store.close()
        return rows


async def four_processes(url: str, n: int) -> int:
    """Dequeues per second by pullers in separate processes."""
    with tempfile.TemporaryDirectory() as folder:
        store = await open_store(url)
        queue = await open_queue(store, Path(folder))
        await queue.submit(new("p"), lines(n))
        command = [sys.executable, "-m", "benchmarks.queue", "--pull", url, folder]
        rows = await _together([command] * PULLERS)
        await queue.close()
        await store.close()
    began = min(row["began"] for row in rows)
    return round(sum(row["n"] for row in rows) / (max(row["ended"] for row in rows) - began))


async def pull_here(url: str, folder: Path) -> None:
    store = await open_store(url)
    queue = await open_queue(store, folder)
    began = time.time()
    n = await pull(f"process-{began}", queue)
    print(json.dumps({"n": n, "began": began, "ended": time.time()}))
    await queue.close()
    await store.close()


async def _together(commands: list[list[str]]) -> list[dict[str, Any]]:
    def run(command: list[str]) -> dict[str, Any]:
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row: dict[str, Any] = json.loads(said.splitlines()[-1])
        return row

    return await asyncio.gather(*(asyncio.to_thread(run, command) for command in commands))


async def peer(url: str, n: int, cache: Path) -> dict[str, float]:
    cache.mkdir(parents=True, exist_ok=True)
    setup = Setup(Path(), cache.resolve(), lambda text: print(text, file=sys.stderr))
    python = str(ensure_venv(setup, "procrastinate", PEER))
    script = str(Path(__file__).parent / "peers" / "procrastinate_worker.py")
    libpq_url = url.replace("search_path=", "options=-csearch_path%3D")
    (filled,) = await _together([[python, script, libpq_url, "fill", str(n)]])
    worked = await _together([[python, script, libpq_url, "work", "16"]] * PULLERS)
    work_s = max(row["seconds"] for row in worked)
    return {"enqueued_per_s": round(n / filled["seconds"]), "dequeued_per_s": round(n / work_s)}


def said(part: Any) -> Any:
    """Printed as soon as it is known: the whole run may take long."""
    print(json.dumps(part), file=sys.stderr, flush=True)
    return part


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--waiting", type=int, default=100_000, help="jobs of the backlog (100,000)")
    parser.add_argument("--peer", action="store_true", help="also measure procrastinate; installs it into --cache")
    parser.add_argument("--cache", type=Path, default=Path(".cache/peers"))
    parser.add_argument("--pull", nargs=2, metavar=("URL", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--look", nargs=2, metavar=("WHERE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        await look_here(options.look[0], Path(options.look[1]))
        return
    if options.pull:
        await pull_here(options.pull[0], Path(options.pull[1]))
        return
    report: dict[str, Any] = {"machine": platform.machine(), "python": platform.python_version()}
    report["load"] = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        report["sqlite"] = said(await measure(f"{folder}/queue.db", options.lines, options.waiting))
    with postgres_server() as server:
        url = await make_schema(server)
        report["postgres"] = said(await measure(url, options.lines, options.waiting))
        await drop_schema(server, url)
        url = await make_schema(server)
        report["postgres"]["four_processes_dequeued_per_s"] = said(await four_processes(url, 2 * options.lines))
        await drop_schema(server, url)
        if options.peer:
            url = await make_schema(server)
            report["procrastinate"] = await peer(url, options.lines, options.cache)
            await drop_schema(server, url)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
