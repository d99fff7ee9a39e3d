import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from emberline.jobs.batches.batch import Batch
from emberline.jobs.queue.attempt import JobAttempt, StopReason
from emberline.jobs.queue.job import Job
from emberline.jobs.queue.puller import LeaseOwner, Puller, PullerTimings
from emberline.protocol.errors import Unavailable
from emberline.protocol.request import Principal
from emberline.store import Database, SqliteStore
from tests.databases import mostly_sqlite, on_both_databases
from tests.faulty_queue import Hook
from tests.jobs.queue.fakes import FakeAdmission, FakeGrant, FakeService
from tests.jobs.queue.helpers import MODEL, ManualClock, audit, make_queue, new_batch, new_job, new_jobs

database = mostly_sqlite
PATIENCE_S = 60.0
QUICK = PullerTimings(poll_s=0.05, capacity_poll_s=0.02, heartbeat_s=0.05, monitor_s=0.05, restart_s=0.05)


class Bench:
    """A queue, fakes of the service and admission, and pullers."""

    def __init__(self, store: Database, folder: Path, **limits: object) -> None:
        self.store = store
        self.folder = folder
        self.queue = make_queue(store, folder, **{"backoff_s": (0.01, 0.02), "sweep_s": 0.05, **limits})
        self.service = FakeService()
        self.admission = FakeAdmission()
        self.models = [MODEL]
        self.pullers: list[Puller] = []
        self.settled: list[tuple[str, bool]] = []  # attempts, by the status of their row, and whether it was stored

    def pull(self, stop: asyncio.Event | None = None) -> Puller:
        puller = Puller(
            self.queue,
            self.service,
            self.admission,
            lambda: self.models,
            Principal,
            LeaseOwner(self.folder),
            QUICK,
            lambda row, is_stored: self.settled.append((row.status, is_stored)),
        )
        self.pullers.append(puller)
        puller.start(stop)
        return puller

    async def submit(self, *prompts: str, **fields: object) -> Batch:
        return await self.queue.submit(new_batch(**fields), [new_job(i, text=text) for i, text in enumerate(prompts)])

    async def ended(self, batch: Batch) -> Batch:
        return await until(lambda: self.queue.batch(batch.account, batch.id), lambda found: found.ended)

    async def usage(self) -> dict[str, tuple[str, int]]:
        rows = await self.store.read("SELECT id, status, output_tokens FROM usage")
        assert len({row[0] for row in rows}) == len(rows)
        return {str(row[0]): (str(row[1]), int(row[2] or 0)) for row in rows}

    async def close(self) -> None:
        for puller in self.pullers:
            await puller.close(drain_s=0.5)
        await self.queue.close()
        assert self.admission.taken == 0
        for patience_s in (0.1, 1.0, 10.0):  # the server may still carry out what was cancelled here
            with suppress(AssertionError):
                return await audit(self.store)
            await asyncio.sleep(patience_s)
        await audit(self.store)


async def until(look: Callable[[], Awaitable[Any]], enough: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not enough(found := await look()):
            await asyncio.sleep(0.01)
    return found


@pytest.fixture
async def bench(store: Database, tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(store, tmp_path)
    yield bench
    await bench.close()


def states(found: list[Job]) -> list[str]:
    return [item.state for item in found]


def refused_first(n_times: int) -> Hook:
    """A hook of the queue's calls: the first `n_times` find the database away."""
    refusals = iter(range(n_times))

    async def hook(call: Callable[[], Awaitable[Any]]) -> Any:
        if next(refusals, None) is not None:
            raise Unavailable("the database is away")
        return await call()

    return hook


@on_both_databases
async def test_every_job_runs_once_with_one_usage_row(bench: Bench) -> None:
    bench.pull()
    batch = await bench.queue.submit(new_batch(key_id="k"), new_jobs(40))
    ended = await bench.ended(batch)
    assert (ended.status, ended.counts.completed) == ("completed", 40)
    assert (ended.input_tokens, ended.output_tokens) == (120, 80)
    found = await bench.queue.jobs(batch.id)
    assert [item.answer.choices[0].text for item in found if item.answer] == [f"said question {i}" for i in range(40)]
    assert set(bench.service.attempts.values()) == {1}
    assert bench.service.principals[0] == Principal("a", "k")
    assert await bench.usage() == {f"{batch.id}-{i}": ("finished", 2) for i in range(40)}


async def test_concurrency_is_bounded_by_grants(bench: Bench) -> None:
    bench.admission.n = 3
    bench.pull()
    await bench.ended(await bench.queue.submit(new_batch(), new_jobs(30)))
    assert bench.service.max_running == 3


async def test_jobs_of_a_model_that_joins_later_run(bench: Bench) -> None:
    bench.pull()
    batch = await bench.queue.submit(new_batch(model="later"), new_jobs(3, "later"))
    await bench.ended(await bench.submit("x"))
    assert states(await bench.queue.jobs(batch.id)) == ["queued"] * 3
    bench.models.append("later")
    await bench.ended(batch)


async def test_nothing_is_claimed_without_a_grant(bench: Bench) -> None:
    bench.admission.n = 0
    bench.pull()
    batch = await bench.submit("x")
    await until(_now(bench.admission), lambda admission: admission.n_asked > 3)
    assert states(await bench.queue.jobs(batch.id)) == ["queued"]
    bench.admission.n = 1
    bench.admission.notify_room()
    await bench.ended(batch)


@on_both_databases
async def test_a_transient_error_is_retried_and_billed_once(bench: Bench) -> None:
    bench.pull()
    batch = await bench.submit("busy:2", "bug:1", "fine")
    ended = await bench.ended(batch)
    assert ended.counts.completed == 3
    assert bench.service.attempts == {f"{batch.id}-0": 3, f"{batch.id}-1": 2, f"{batch.id}-2": 1}
    assert await bench.usage() == {f"{batch.id}-{i}": ("finished", 2) for i in range(3)}


async def test_a_job_waits_for_a_reserved_budget_as_long_as_it_takes(bench: Bench) -> None:
    bench.pull()
    n_times = bench.queue.limits.max_attempts + 1
    batch = await bench.submit(f"reserved:{n_times}")
    assert (await bench.ended(batch)).counts.completed == 1
    assert bench.service.attempts == {f"{batch.id}-0": n_times + 1}
    assert await bench.usage() == {f"{batch.id}-0": ("finished", 2)}


@on_both_databases
async def test_attempts_are_bounded_and_a_permanent_error_is_final(bench: Bench) -> None:
    bench.pull()
    batch = await bench.submit("busy", "bad", "fine")
    ended = await bench.ended(batch)
    assert (ended.counts.completed, ended.counts.failed) == (1, 2)
    found = await bench.queue.jobs(batch.id)
    assert [item.error.kind if item.error else None for item in found] == ["unavailable", "bad_input", None]
    assert bench.service.attempts[f"{batch.id}-0"] == bench.queue.limits.max_attempts
    assert bench.service.attempts[f"{batch.id}-1"] == 1
    assert await bench.usage() == {
        f"{batch.id}-0": ("failed", 1),
        f"{batch.id}-1": ("failed", 1),
        f"{batch.id}-2": ("finished", 2),
    }


@on_both_databases
async def test_a_job_that_kills_engines_is_quarantined_then_dead_lettered(bench: Bench) -> None:
    bench.pull()
    batch = await bench.submit("kill", *(f"fine {i}" for i in range(20)))
    ended = await bench.ended(batch)
    assert (ended.counts.completed, ended.counts.failed) == (20, 1)
    assert states(await bench.queue.dead_letters()) == ["dead"]
    assert bench.service.attempts[f"{batch.id}-0"] == 3
    concurrent = [others for prompt, others in bench.service.neighbours if prompt == "kill"]
    assert concurrent[-1] == frozenset()
    assert f"{batch.id}-0" not in await bench.usage()
    metrics = bench.pullers[0].metrics  # they count an outcome after it is written
    await until(_now(metrics), lambda metrics: (metrics.total("dead"), metrics.total("retried")) == (1, 2))
    assert await bench.queue.replay(batch.id) == 1
    await until(lambda: bench.queue.job(batch.id, 0), lambda found: found.state == "dead")
    assert bench.service.attempts[f"{batch.id}-0"] == 6


async def test_draining_an_engine_is_undone_when_the_quarantined_job_is_cancelled(bench: Bench) -> None:
    bench.admission.n = 2
    bench.pull()
    held = await bench.submit("hold")
    suspect = await bench.submit("kill")
    await until(lambda: bench.queue.job(suspect.id, 0), lambda found: found.kills == 2)
    await until(_now(bench.admission), lambda admission: admission.draining)
    await bench.queue.cancel("a", suspect.id)
    await until(_now(bench.admission), lambda admission: not admission.draining)
    await bench.ended(await bench.submit("fine"))
    bench.service.hold.set()
    await bench.ended(held)


@on_both_databases
async def test_cancelling_a_batch_stops_its_running_jobs(bench: Bench) -> None:
    bench.admission.n = 2
    bench.pull()
    batch = await bench.submit("hold", "hold", "hold", "hold")
    await until(bench.queue.depths, lambda found: bool(found) and found[0].n_leased == 2)
    await until(_now(bench.service.running), lambda running: len(running) == 2)
    await bench.queue.cancel("a", batch.id)
    ended = await bench.ended(batch)
    assert (ended.status, ended.counts.cancelled) == ("cancelled", 4)
    assert bench.service.aborted == ["hold", "hold"]
    assert list((await bench.usage()).values()) == [("cancelled", 1)] * 2


async def test_models_with_queued_jobs_are_told_so_that_they_can_be_loaded(bench: Bench) -> None:
    bench.admission.n = 0
    bench.pull()
    batch = await bench.submit("fine")
    await until(_now(bench.admission), lambda admission: list(admission.queued_s) == [MODEL])
    assert 0 <= bench.admission.queued_s[MODEL] < 60
    bench.admission.n = 1
    await bench.ended(batch)
    await until(_now(bench.admission), lambda admission: not admission.queued_s)


async def test_cancelling_one_job_leaves_the_others_running(bench: Bench) -> None:
    bench.pull()
    batch = await bench.submit("hold", "hold")
    await until(_now(bench.service.running), lambda running: len(running) == 2)
    await bench.queue.cancel_job("a", batch.id, 0)
    await until(lambda: bench.queue.job(batch.id, 0), lambda found: found.state == "cancelled")
    bench.service.hold.set()
    assert (await bench.ended(batch)).counts.completed == 1


async def test_a_result_is_written_again_when_the_store_was_unavailable(bench: Bench) -> None:
    bench.queue.around["complete"] = refused_first(2)
    bench.pull()
    batch = await bench.submit("x")
    await bench.ended(batch)
    assert bench.service.attempts == {f"{batch.id}-0": 1}


@on_both_databases
async def test_closing_returns_unfinished_jobs_to_the_queue(bench: Bench) -> None:
    first = bench.pull()
    batch = await bench.submit("hold", "quick")
    await until(lambda: bench.queue.job(batch.id, 1), lambda found: found.state == "succeeded")
    await until(_now(bench.service.running), lambda running: [prompt for prompt, _ in running.values()] == ["hold"])
    await first.close(drain_s=0.1)
    found = await bench.queue.jobs(batch.id)
    assert [(item.state, item.attempts, item.kills) for item in found] == [("queued", 0, 0), ("succeeded", 1, 0)]
    assert list(await bench.usage()) == [f"{batch.id}-1"]
    bench.service.hold.set()
    bench.pull()
    await bench.ended(batch)


async def test_a_draining_puller_claims_nothing_and_finishes_running_jobs(bench: Bench) -> None:
    claiming, stop = asyncio.Lock(), asyncio.Event()

    async def claim_alone(claim: Callable[[], Awaitable[Any]]) -> Any:
        async with claiming:
            return await claim()

    bench.queue.around["claim"] = claim_alone
    bench.pull(stop)
    running = await bench.submit("hold", "hold")
    await until(_now(bench.service.running), lambda running: len(running) == 2)
    stop.set()
    async with claiming:  # one that had begun before has ended
        later = await bench.submit("late")
    n_waits = bench.admission.n_waits
    await until(_now(bench.admission), lambda admission: admission.n_waits > n_waits + 5)  # it polls
    assert states(await bench.queue.jobs(later.id)) == ["queued"]
    await bench.queue.cancel_job("a", running.id, 0)  # still heard
    await until(lambda: bench.queue.job(running.id, 0), lambda found: found.state == "cancelled")
    bench.service.hold.set()
    await until(lambda: bench.queue.job(running.id, 1), lambda found: found.state == "succeeded")


@on_both_databases
async def test_jobs_of_a_dead_process_are_reclaimed_at_startup(bench: Bench, tmp_path: Path) -> None:
    dead = LeaseOwner(tmp_path)
    batch = await bench.submit("x", "y")
    assert len(await bench.queue.claim(dead.name, MODEL, 2)) == 2
    alive = LeaseOwner(tmp_path)
    other = await bench.submit("z")
    assert len(await bench.queue.claim(alive.name, MODEL, 2)) == 1
    os_close(dead)
    bench.pull()
    ended = await bench.ended(batch)
    assert ended.counts.completed == 2
    assert [item.kills for item in await bench.queue.jobs(batch.id)] == [1, 1]
    assert states(await bench.queue.jobs(other.id)) == ["leased"]
    await bench.queue.deregister(alive.name)
    alive.close()


def os_close(owner: LeaseOwner) -> None:
    """Release the lock without removing the file, as a kill does."""
    import os

    assert owner._file is not None
    os.close(owner._file)


@on_both_databases
async def test_an_attempt_whose_lease_was_lost_is_closed(bench: Bench) -> None:
    bench.pull()
    batch = await bench.submit("hold")
    await until(_now(bench.service.running), lambda running: len(running) == 1)
    await bench.queue.reclaim_from(bench.pullers[0].owner.name)  # as if its lease had ended
    await until(_now(bench.service.aborted), lambda closed: closed == ["hold"])
    bench.service.hold.set()
    await bench.ended(batch)
    assert await bench.usage() == {f"{batch.id}-0": ("finished", 2)}
    assert bench.service.attempts[f"{batch.id}-0"] == 2
    await until(_now(bench.settled), lambda settled: settled == [("cancelled", False), ("finished", True)])


async def test_an_attempt_spends_of_its_budget_only_if_its_row_is_stored(bench: Bench) -> None:
    bench.pull()
    await bench.ended(await bench.submit("busy:1"))
    await bench.ended(await bench.submit("bad"))
    await bench.ended(await bench.submit("fine"))
    stored = [("failed", False), ("finished", True), ("failed", True), ("finished", True)]
    await until(_now(bench.settled), lambda settled: settled == stored)


async def test_a_deadline_ends_a_running_job(bench: Bench) -> None:
    clock = ManualClock(bench.store)
    bench.pull()
    batch = await bench.submit("hold", window_s=20)
    await until(_now(bench.service.running), lambda running: len(running) == 1)
    clock.advance(21)  # less than a lease
    await bench.queue.sweep()
    ended = await bench.ended(batch)
    assert (ended.status, ended.counts.expired) == ("expired", 1)
    assert bench.service.aborted == ["hold"]


@on_both_databases
async def test_several_pullers_share_the_jobs(bench: Bench) -> None:
    batch = await bench.queue.submit(new_batch(), new_jobs(100))
    for _ in range(3):
        bench.pull()
    ended = await bench.ended(batch)
    assert ended.counts.completed == 100
    assert set(bench.service.attempts.values()) == {1}
    await until(_now(bench.pullers), lambda pullers: sum(one.metrics.total("completed") for one in pullers) == 100)


async def test_the_puller_recovers_from_an_unavailable_store(bench: Bench) -> None:
    bench.queue.around["claim"] = refused_first(1)
    bench.pull()
    await bench.ended(await bench.submit("x"))


async def test_a_request_for_n_choices_takes_n_slots(bench: Bench) -> None:
    import msgspec

    item = new_job(0, text="hold")
    assert item.request is not None
    item.request = msgspec.structs.replace(item.request, n=3)
    bench.pull()
    batch = await bench.queue.submit(new_batch(), [item])
    await until(_now(bench.service.running), lambda running: len(running) == 1)
    await until(_now(bench.admission), lambda admission: admission.taken == 3)  # once the grants left over are returned
    bench.service.hold.set()
    await bench.ended(batch)


def _now(value: Any) -> Callable[[], Awaitable[Any]]:
    async def look() -> Any:
        return value

    return look


async def held_attempt(bench: Bench) -> tuple[Batch, JobAttempt, asyncio.Task[None]]:
    """Runs the only job of a batch, without a puller, until it generates."""
    batch = await bench.submit("hold")
    (lease,) = await bench.queue.claim("w", MODEL, 1)
    attempt = JobAttempt(bench.queue, lease, FakeGrant(bench.admission), lambda event, model: None)
    running = asyncio.create_task(attempt.run(bench.service, Principal("a")))
    while not bench.service.running:
        await asyncio.sleep(0)
    return batch, attempt, running


async def test_a_job_that_is_told_twice_to_stop_is_billed(tmp_path: Path) -> None:
    """Every heartbeat names a cancelled job until it has ended, which takes a while: its usage row is not lost."""
    bench = Bench(await SqliteStore.open(tmp_path / "store.db"), tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        batch, attempt, running = await held_attempt(bench)
        bench.service.settled.clear()
        await bench.queue.cancel("a", batch.id)
        attempt.stop(StopReason.CANCELLED)
        while not bench.service.aborted:
            await asyncio.sleep(0)
        attempt.stop(StopReason.CANCELLED)
        await asyncio.sleep(0)
        bench.service.settled.set()
        await running
    assert await bench.usage() == {f"{batch.id}-0": ("cancelled", 1)}
    await bench.close()
    await bench.store.close()


async def test_a_cancelled_job_does_not_hold_up_the_shutdown_while_the_store_is_away(tmp_path: Path) -> None:
    bench = Bench(await SqliteStore.open(tmp_path / "store.db"), tmp_path, store_retry_s=(0.001, 0.001))
    refused = asyncio.Event()

    async def refuse(call: object) -> bool:
        refused.set()
        raise Unavailable("the store is away")

    bench.queue.around["finish_stopped"] = refuse
    async with asyncio.timeout(PATIENCE_S):
        batch, attempt, running = await held_attempt(bench)
        await bench.queue.cancel("a", batch.id)
        attempt.stop(StopReason.CANCELLED)
        await refused.wait()
        attempt.stop(StopReason.LEAVING)
        await running
    await bench.close()
    await bench.store.close()
