"""Position and estimated time to completion of a batch."""

from pathlib import Path

import pytest

from emberline.jobs.queue.job import Lease
from emberline.jobs.queue.queue import Queue
from emberline.store import Database
from tests.databases import DatabaseLocation
from tests.jobs.queue.helpers import MODEL, ManualClock, answer, make_queue, new_batch, new_jobs


@pytest.fixture
async def store(database: DatabaseLocation):  # type: ignore[no-untyped-def]
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
def time(store: Database) -> ManualClock:
    return ManualClock(store)


@pytest.fixture
async def queue(store: Database, tmp_path: Path, time: ManualClock):  # type: ignore[no-untyped-def]
    queue = make_queue(store, tmp_path, lease_s=3600.0)
    yield queue
    await queue.close()


async def work(queue: Queue, time: ManualClock, n_running: int, line_s: float, rounds: int) -> list[Lease]:
    """Run jobs in rounds of equal duration; returns the leases that still run."""
    leases = await queue.claim("w", MODEL, n_running)
    for _ in range(rounds):
        time.advance(line_s)
        for lease in leases:
            assert await queue.complete(lease, answer())
        leases = await queue.claim("w", MODEL, n_running)
    return leases


@pytest.mark.parametrize("second", [0, 7, 58])
async def test_eta_is_right_from_the_first_completed_job(queue: Queue, time: ManualClock, second: int) -> None:
    """Whatever second of a minute it starts at."""
    time.us = (time.us // 60_000_000) * 60_000_000 + second * 1_000_000
    batch = await queue.submit(new_batch(), new_jobs(100))
    assert (await queue.position(batch)).eta_s is None
    await work(queue, time, n_running=4, line_s=2.0, rounds=1)
    batch = await queue.batch(batch.account, batch.id)
    place = await queue.position(batch)
    assert (place.running, place.rate_per_s) == (True, pytest.approx(2.0))
    assert place.eta_s == pytest.approx(48.0)


async def test_idle_time_does_not_lower_the_rate(queue: Queue, time: ManualClock) -> None:
    first = await queue.submit(new_batch(), new_jobs(4))
    await work(queue, time, n_running=4, line_s=2.0, rounds=1)
    assert (await queue.batch(first.account, first.id)).ended
    time.advance(8 * 60)
    batch = await queue.submit(new_batch(), new_jobs(40))
    await queue.claim("w", MODEL, 4)
    place = await queue.position(batch)
    assert place.eta_s == pytest.approx(20.0), "known at once from what came before"


async def test_eta_of_a_few_long_jobs(queue: Queue, time: ManualClock) -> None:
    batch = await queue.submit(new_batch(), new_jobs(10))
    await work(queue, time, n_running=2, line_s=90.0, rounds=2)
    batch = await queue.batch(batch.account, batch.id)
    assert (await queue.position(batch)).eta_s == pytest.approx(6 / 2 * 90.0)


async def test_jobs_that_never_ran_do_not_count_in_the_rate(queue: Queue, time: ManualClock) -> None:
    batch = await queue.submit(new_batch(), new_jobs(10))
    await queue.cancel_job(batch.account, batch.id, 3)
    batch = await queue.batch(batch.account, batch.id)
    place = await queue.position(batch)
    assert (place.position, place.running, place.eta_s) == (0, False, None)


async def test_batch_usage_includes_cached_and_reasoning_tokens(queue: Queue) -> None:
    from emberline.protocol.complete_response import Answer, AnswerChoice, TextPart
    from emberline.protocol.events import Usage

    batch = await queue.submit(new_batch(), new_jobs(3))
    for lease in await queue.claim("w", MODEL, 3):
        used = Usage(prompt_tokens=10, completion_tokens=5, reasoning_tokens=2, cached_by_tier={"device": 6, "host": 1})
        assert await queue.complete(lease, Answer([AnswerChoice([TextPart("x")])], used))
    batch = await queue.batch(batch.account, batch.id)
    assert (batch.input_tokens, batch.cached_tokens) == (30, 21)
    assert (batch.output_tokens, batch.reasoning_tokens) == (15, 6)
