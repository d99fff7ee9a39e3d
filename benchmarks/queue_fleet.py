"""Queued jobs and interactive requests on a fleet of simulated engines, in virtual time.

The queue, the puller, admission's job grants and every engine's scheduler are the production ones; only the step time
is modelled, from the rows and prompt tokens of a step. The engines are small and slow, so that many fit.
"""

import asyncio
import random
import statistics
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.virtual_time import RealTimeStore, VirtualLoop
from emberline.accounts.usage_row import UsageRow
from emberline.balancer.cost_model import Cost
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.grants import SHARE, Grants
from emberline.balancer.worker import Worker
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Row
from emberline.engine.core.prefill_policy import BatchTimeLimit, StepWork
from emberline.engine.core.scheduler import Scheduler
from emberline.jobs.batches.batch import NewBatch
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.job import NewJob
from emberline.jobs.queue.puller import LeaseOwner, Puller
from emberline.jobs.queue.queue import Queue
from emberline.kv.block_pool import blocks_of
from emberline.kv.cache import KVCache
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, Usage
from emberline.protocol.request import EngineRequest, GenerateRequest, Principal, Priority, SamplingParams
from emberline.service.work import TaskEvents, Work
from emberline.store import open_store
from standins.standin_engine import LAYOUT

MODEL = "m"
N_PROMPT, N_OUTPUT = 256, 32
PLACES, TOKEN_BUDGET = 16, 2048
STEP_S, ROW_S, PROMPT_S = 25e-3, 2e-4, 1e-4  # per step, sequence and prompt token
KV_TOKENS = 4 * PLACES * (N_PROMPT + N_OUTPUT)
_AGES = "SELECT ended_us - created_us FROM lines WHERE created_us >= ? AND state = 'succeeded'"
STOP_S = 3.0  # for cancelled jobs to end


@dataclass(slots=True)
class Drawn:
    token_id: int = 1
    logprob: float | None = 0.0
    top: list[tuple[int, float]] = field(default_factory=list)


class ModelledEngine:
    """A simulated engine, and its worker as admission sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        endpoint = Endpoint(name=name, address="unix:/modelled", models=(MODEL,))
        self.worker = Worker(endpoint, Capacity(max_running=PLACES), Cost(), 0)  # as admission sees it
        cache = KVCache([LAYOUT], [blocks_of(KV_TOKENS) + 1], chunk=2048)
        limits = Limits(
            context_len=4096, vocab_size=50_000, eos_ids=(2,), max_running=PLACES, token_budget=TOKEN_BUDGET
        )
        self._prefill = BatchTimeLimit()  # as engines on a CPU have it
        self._scheduler = Scheduler(cache, limits, name, prefill=self._prefill)
        self._waiting: dict[str, tuple[asyncio.Future[None], asyncio.Future[None]]] = {}  # first token, finish
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def run(self, request: EngineRequest) -> float:
        """Runs a request to its end; returns its TTFT in seconds."""
        loop, batch = asyncio.get_running_loop(), request.priority == Priority.BATCH
        began_s = loop.time()
        first, last = self._waiting[request.id] = loop.create_future(), loop.create_future()
        in_flight = self.worker.in_flight
        in_flight.active += 1
        in_flight.batch_active += batch
        self._scheduler.submit(request, began_s)
        self._work.set()
        try:
            await first
            first_s = loop.time() - began_s
            await last
            return first_s
        finally:
            del self._waiting[request.id]
            self._scheduler.abort(request.id)
            in_flight.active -= 1
            in_flight.batch_active -= batch

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self._scheduler.advance(asyncio.get_running_loop().time())
            plan = self._scheduler.plan()
            if not plan.n_rows:
                self._work.clear()
                await self._work.wait()
                continue
            self._scheduler.launched(plan)
            rows = plan.rows
            work = work_of(rows)
            step_s = took_s(len(rows), work)
            await asyncio.sleep(step_s)
            self._prefill.observe(work, step_s)
            for delta in self._scheduler.absorb(plan, [Drawn() for row in rows if row.samples]):
                if delta.id in self._waiting:
                    first, last = self._waiting[delta.id]
                    if not first.done():
                        first.set_result(None)
                    if delta.finish is not None and not last.done():
                        last.set_result(None)
            self._scheduler.catch_up()
            self.worker.load = self._scheduler.load()


def work_of(rows: Sequence[Row]) -> StepWork:
    chunks = [row for row in rows if row.end - row.start > 1]
    return StepWork.of(len(rows) - len(chunks), chunks)


def took_s(n_rows: int, work: StepWork) -> float:
    return STEP_S + ROW_S * n_rows + PROMPT_S * work.n_tokens


class ModelledFleet:
    """The interfaces of fleet and service that admission and the puller use."""

    def __init__(self, n: int) -> None:
        self.members = [ModelledEngine(f"e{i}") for i in range(n)]
        self._by_name = {member.name: member for member in self.members}
        self.grants = Grants(self, SHARE, asyncio.get_running_loop().time)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[ModelledEngine]:
        return iter(self.members)

    @property
    def workers(self) -> dict[str, Worker]:
        return {member.name: member.worker for member in self.members}

    def workers_of(self, model: str) -> list[Worker]:
        return [member.worker for member in self.members]

    async def run(self, work: Work) -> TaskEvents:
        """Run a job on the engine that was granted."""
        request, job = work.task, work.job
        assert isinstance(request, GenerateRequest)
        assert job is not None
        usage = Usage(prompt_tokens=N_PROMPT, completion_tokens=N_OUTPUT)
        yield Started(usage)
        await self._by_name[job.engine].run(sequence(request.id, Priority.BATCH))
        job.record_usage(row_of(request, work.principal))
        yield TextDelta(0, "x")
        yield ChoiceDone(0, "stop")
        yield Completed(usage)

    async def ask(self, request_id: str) -> float:
        """An interactive request; returns its TTFT in seconds."""
        loads = {member: member.worker.in_flight for member in self.members}
        member = min(loads, key=lambda member: (loads[member].sync_active, loads[member].batch_active))
        mixed = loads[member].batch_active > 0
        first_s = await member.run(sequence(request_id, Priority.DEFAULT))
        self.grants.observe_ttft(member.name, first_s, mixed)
        self.grants.notify_room()
        return first_s

    def close(self) -> None:
        for member in self.members:
            member.close()


def sequence(name: str, priority: Priority) -> EngineRequest:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    prompt = rng.integers(3, 50_000, N_PROMPT, dtype="<u4").tobytes()
    sampling = SamplingParams(max_tokens=N_OUTPUT, ignore_eos=True)
    return EngineRequest(id=name, prompt_ids=prompt, sampling=sampling, priority=priority)


def row_of(request: GenerateRequest, principal: Principal) -> UsageRow:
    now_us = int(asyncio.get_running_loop().time() * 1e6)
    return UsageRow(
        id=request.id,
        account=principal.account,
        model=MODEL,
        model_version="v",
        input_tokens=N_PROMPT,
        output_tokens=N_OUTPUT,
        status="finished",
        created_us=now_us,
        finished_us=now_us,
    )


def new_lines(n: int) -> list[NewJob]:
    return [NewJob(f"c{i}", GenerateRequest(id="", model=MODEL, prompt=f"line {i}")) for i in range(n)]


class Run:
    """A fleet with a queue."""

    def __init__(self, n: int, folder: Path, store: RealTimeStore) -> None:
        self.fleet = ModelledFleet(n)
        self.queue = Queue(store, BlobStore(folder / "blobs"), QueueLimits(max_jobs=1_000_000))
        self.queue.start_sweeping()
        self.puller = Puller(self.queue, self.fleet, self.fleet.grants, lambda: [MODEL], Principal, LeaseOwner(folder))
        self.puller.start()
        self.store = store

    async def submit(self, n: int) -> str:
        batch = await self.queue.submit(NewBatch(account="a", kind="openai", model=MODEL), new_lines(n))
        return batch.id

    async def n_done(self) -> int:
        ((n,),) = await self.store.read("SELECT SUM(completed) FROM batches")
        return int(n or 0)

    async def close(self) -> None:
        await self.puller.close(drain_s=0.1)
        await self.queue.close()
        self.fleet.close()


async def straight(n: int, seconds: float) -> float:
    """Jobs per second with every engine full, without a queue."""
    fleet, loop = ModelledFleet(n), asyncio.get_running_loop()
    n_done, begins_s, ends_s = 0, loop.time() + seconds / 4, loop.time() + seconds

    async def keep_full(member: ModelledEngine, place: int) -> None:
        nonlocal n_done
        number = 0
        while loop.time() < ends_s:
            number += 1
            await member.run(sequence(f"s-{member.name}-{place}-{number}", Priority.BATCH))
            n_done += begins_s <= loop.time() < ends_s

    places = range(PLACES + PLACES // 8)
    await asyncio.gather(*(keep_full(member, place) for member in fleet for place in places))
    fleet.close()
    return n_done / (0.75 * seconds)


async def silent(run: Run, rate: float, seconds: float) -> float:
    """Jobs per second through the queue, without other load."""
    batch_id = await run.submit(int(1.2 * rate * seconds))
    await asyncio.sleep(seconds / 4)
    before, began_s = await run.n_done(), asyncio.get_running_loop().time()
    await asyncio.sleep(0.75 * seconds)
    done, took_s = await run.n_done() - before, asyncio.get_running_loop().time() - began_s
    await run.queue.cancel("a", batch_id)
    await asyncio.sleep(STOP_S)
    return done / took_s


async def asking(run: Run, rate: float, seconds: float, seed: int, name: str = "q") -> list[float]:
    """TTFT of requests whose arrivals depend on the seed, and their prompts on the name too."""
    rng = random.Random(seed)
    tasks, end_s = [], asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end_s:
        tasks.append(asyncio.create_task(run.fleet.ask(f"{name}-{seed}-{len(tasks)}-{rng.random()}")))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


async def aged(run: Run, rate: float, seconds: float) -> tuple[list[float], list[float]]:
    """Queueing delay of jobs that arrive at half of the capacity left by requests, and the requests' TTFT."""
    now_us = run.store.now_us()
    requests = asyncio.create_task(asking(run, 0.7 * rate, seconds, seed=3))
    while not requests.done():
        await run.submit(max(1, round(0.15 * rate)))
        await asyncio.sleep(1.0)
    while await run.queue.depths():
        await asyncio.sleep(1.0)
    rows = await run.store.read(_AGES, (now_us,))
    return [float(age or 0) / 1e6 for (age,) in rows], requests.result()


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


async def measured(n: int, seconds: float, folder: Path) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    rate = await straight(n, seconds)
    store = RealTimeStore(await open_store(folder / "fleet.db"), loop)
    run = Run(n, folder, store)
    try:
        through = await silent(run, rate, seconds)
        off = await asking(run, 0.7 * rate, seconds, seed=1)
        backlog = await run.submit(int(rate * (seconds + 2)))
        await asyncio.sleep(2)
        on = await asking(run, 0.7 * rate, seconds, seed=1, name="on")  # the same arrivals, no cached prompts
        left = (await run.queue.batch("a", backlog)).counts.left
        assert left, "the queue ran empty"
        await run.queue.cancel("a", backlog)
        await asyncio.sleep(STOP_S)
        ages, request_ttfts = await aged(run, rate, seconds)
    finally:
        await run.close()
        await store.close()
    return {
        "engines": n,
        "virtual_s": round(seconds),
        "straight_per_s": round(rate, 1),
        "queued_per_s": round(through, 1),
        "ratio": round(through / rate, 3),
        "off_p95_ms": round(1e3 * quantile(off, 95), 1),
        "on_p95_ms": round(1e3 * quantile(on, 95), 1),
        "p95_more_ms": round(1e3 * (quantile(on, 95) - quantile(off, 95)), 1),
        "step_full_ms": round(1e3 * (STEP_S + ROW_S * PLACES), 1),
        "age_p50_s": round(quantile(ages, 50), 2),
        "age_p95_s": round(quantile(ages, 95), 2),
        "age_lines": len(ages),
        "request_ttft_p95_ms": round(1e3 * quantile(request_ttfts, 95), 1),
    }


def simulate(n: int, seconds: float) -> dict[str, Any]:
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="emberline-fleet-", dir=place) as name:
        loop = VirtualLoop()
        try:
            return loop.run_until_complete(measured(n, seconds, Path(name)))
        finally:
            loop.close()
