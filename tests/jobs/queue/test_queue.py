import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.accounts.usage_ledger import UsageLedger
from emberline.jobs.limits import INSERT_CHUNK
from emberline.jobs.queue.job import Lease, NewJob
from emberline.jobs.queue.queue import Queue
from emberline.protocol.complete_response import Answer, AnswerChoice, TextPart
from emberline.protocol.errors import BadInput, Conflict, ErrorInfo, NotFound, Overloaded, TooLarge
from emberline.protocol.events import Usage
from emberline.store import Database
from tests.databases import DatabaseLocation
from tests.jobs.queue.helpers import MODEL, ManualClock, answer, audit, make_queue, new_batch, new_job, new_jobs, usage

DAY_S = 86_400


@pytest.fixture
async def time(store: Database) -> ManualClock:
    return ManualClock(store)


@pytest.fixture
async def queue(store: Database, time: ManualClock, tmp_path: Path) -> AsyncIterator[Queue]:
    queue = make_queue(store, tmp_path, lease_s=60)
    yield queue
    await queue.close()
    await audit(store)


async def finish_all(queue: Queue, owner: str = "w", model: str = MODEL) -> list[Lease]:
    done: list[Lease] = []
    while leases := await queue.claim(owner, model, 64):
        assert all(await asyncio.gather(*(queue.complete(lease, answer()) for lease in leases)))
        done += leases
    return done


async def types_of(store: Database) -> list[str]:
    return [str(name) for (name,) in await store.read("SELECT type FROM events ORDER BY created_us")]


async def test_from_submission_to_results(queue: Queue, store: Database) -> None:
    batch = await queue.submit(new_batch(metadata={"k": "v"}, attributes={"x": 1}, key_id="key"), new_jobs(5))
    assert (batch.status, batch.counts.total, batch.metadata, batch.attributes) == (
        "in_progress",
        5,
        {"k": "v"},
        {"x": 1},
    )
    leases = await queue.claim("w", MODEL, 10)
    assert [lease.number for lease in sorted(leases, key=lambda lease: lease.number)] == [0, 1, 2, 3, 4]
    first = next(lease for lease in leases if lease.number == 0)
    assert first.request.id == first.request_id == f"{batch.id}-0"
    assert first.request.messages is not None
    assert first.request.messages[0].content == "question 0"
    assert (first.key_id, first.kind, first.account, first.attempts, first.epoch) == ("key", "openai", "a", 1, 1)
    assert await queue.claim("other", MODEL, 10) == []
    for lease in leases:
        assert await queue.complete(lease, answer(f"said {lease.number}"), usage(lease))
        assert not await queue.complete(lease, answer("again"), usage(lease))
    ended = await queue.batch("a", batch.id)
    assert (ended.status, ended.counts.completed, ended.counts.left) == ("completed", 5, 0)
    assert (ended.input_tokens, ended.output_tokens) == (25, 35)
    assert ended.ended_us == ended.completed_us == ended.finalizing_us
    found = await queue.jobs(batch.id)
    assert [(item.number, item.custom_id, item.state) for item in found] == [
        (i, f"c{i}", "succeeded") for i in range(5)
    ]
    assert found[3].answer == answer("said 3")
    row = await UsageLedger(store).find(f"{batch.id}-3")
    assert row is not None
    assert row.output_tokens == 7
    assert await store.read("SELECT COUNT(*) FROM usage") == [(5,)]
    assert await types_of(store) == ["batch.completed"]


async def test_a_large_batch_is_not_claimable_before_it_is_complete(queue: Queue, store: Database) -> None:
    seen: list[int] = []

    async def slowly() -> AsyncIterator[NewJob]:
        for i in range(2 * INSERT_CHUNK + 10):
            if i == INSERT_CHUNK + 5:
                seen.append(len(await queue.claim("early", MODEL, 10)))
                with pytest.raises(NotFound):
                    await queue.batch("a", batch_new.id)
                assert (await queue.batches("a", "openai"))[0] == []
            yield new_job(i)

    batch_new = new_batch()
    batch = await queue.submit(batch_new, slowly())
    assert seen == [0]
    assert batch.counts.total == 2 * INSERT_CHUNK + 10
    done = await finish_all(queue)
    assert Counter(lease.number for lease in done) == Counter(range(2 * INSERT_CHUNK + 10))
    assert (await queue.batch("a", batch.id)).status == "completed"


async def test_a_failed_or_killed_submission_leaves_nothing(queue: Queue, store: Database, time: ManualClock) -> None:
    def broken() -> "list[NewJob]":
        yield from new_jobs(INSERT_CHUNK + 3)  # type: ignore[misc]
        raise BadInput("the body ended early")

    with pytest.raises(BadInput, match="ended early"):
        await queue.submit(new_batch(id="b1"), broken())
    assert await store.read("SELECT COUNT(*) FROM lines") == [(0,)]

    stuck = asyncio.Event()

    async def hanging() -> AsyncIterator[NewJob]:
        for item in new_jobs(INSERT_CHUNK + 3):
            yield item
        stuck.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(queue.submit(new_batch(id="b2"), hanging()))
    await stuck.wait()
    ((n,),) = await store.read("SELECT COUNT(*) FROM lines")
    assert n == INSERT_CHUNK
    with pytest.raises(Conflict, match="being submitted"):
        await queue.submit(new_batch(id="b2"), new_jobs(3))
    time.advance(61)  # as if its process were dead
    await queue.sweep()
    assert await store.read("SELECT COUNT(*) FROM lines") == [(0,)]
    assert (await queue.submit(new_batch(id="b2"), new_jobs(3))).counts.total == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await queue.batch("a", "b2")).counts.total == 3


async def test_submitting_an_existing_id_returns_that_batch(queue: Queue) -> None:
    first = await queue.submit(new_batch(id="mine"), new_jobs(2))
    assert await queue.submit(new_batch(id="mine"), new_jobs(9)) == first
    with pytest.raises(Conflict):
        await queue.submit(new_batch("other", id="mine"), new_jobs(1))
    with pytest.raises(BadInput, match="at least one line"):
        await queue.submit(new_batch(), [])


async def test_invalid_requests_fail_and_the_others_run(queue: Queue, store: Database) -> None:
    bad = NewJob("bad\0", None, ErrorInfo("bad_input", "line 2 is not JSON"))
    batch = await queue.submit(new_batch(), [new_job(0), bad, new_job(2)])
    assert batch.counts.failed == 1
    assert len(await finish_all(queue)) == 2
    ended = await queue.batch("a", batch.id)
    assert (ended.status, ended.counts.completed, ended.counts.failed) == ("completed", 2, 1)
    failed = await queue.jobs(batch.id, states=["failed"])
    assert failed[0].error == ErrorInfo("bad_input", "line 2 is not JSON")
    only_bad = await queue.submit(new_batch(kind="workers_ai"), [bad, bad])
    assert (only_bad.status, only_bad.counts.failed) == ("completed", 2)
    assert (await types_of(store))[-2:] == ["cf.workersAi.model.batch.queued", "cf.workersAi.model.batch.failed"]


async def test_only_a_too_large_request_fails(store: Database, time: ManualClock, tmp_path: Path) -> None:
    queue = make_queue(store, tmp_path, max_job_bytes=1000, max_jobs=INSERT_CHUNK + 100)
    batch = await queue.submit(new_batch(), [new_job(0), new_job(1, text="x" * 2000)])
    assert batch.counts.failed == 1
    (failed,) = await queue.jobs(batch.id, states=["failed"])
    assert failed.error is not None
    assert failed.error.kind == "too_large"
    with pytest.raises(TooLarge, match="at most 600 lines"):
        await queue.submit(new_batch(), new_jobs(INSERT_CHUNK + 101))
    assert len((await queue.batches("a", "openai"))[0]) == 1
    await audit(store)


async def test_account_quotas(store: Database, time: ManualClock, tmp_path: Path) -> None:
    queue = make_queue(store, tmp_path, max_account_bytes=1500, max_queued_jobs=4)
    await queue.submit(new_batch(), new_jobs(4))
    with pytest.raises(Overloaded, match="4 lines in the queue"):
        await queue.submit(new_batch(), new_jobs(1))
    await queue.submit(new_batch("b"), [new_job(0, text="x" * 2000)])
    with pytest.raises(TooLarge, match="storage"):
        await queue.submit(new_batch("b"), new_jobs(1))
    with pytest.raises(TooLarge, match="storage"):
        await queue.files.add("b", "f", "batch", b"x")
    await audit(store)


# --- from a file -----------------------------------------------------------------------------------------------------


async def test_loading_a_file_resumes_where_the_loader_died(queue: Queue, time: ManualClock) -> None:
    file = await queue.files.add("a", "in.jsonl", "batch", b"three\nlines\nhere")
    batch = await queue.create(new_batch(input_file_id=file.id))
    assert (batch.status, batch.input_blob) == ("validating", file.blob)
    first = await queue.claim_validating("loader-1")
    assert first is not None
    assert first.id == batch.id
    assert await queue.claim_validating("loader-2") is None
    await queue.append(first, new_jobs(2))
    assert await queue.files.delete("a", file.id)
    assert await queue.claim("w", MODEL, 9) == []
    time.advance(61)
    second = await queue.claim_validating("loader-2")
    assert second is not None
    assert second.counts.total == 2
    assert b"".join([chunk async for chunk in queue.blobs.stream(str(second.input_blob))]) == b"three\nlines\nhere"
    with pytest.raises(Conflict):
        await queue.append(first, [new_job(2)])
    await queue.append(second, [new_job(2)])
    started = await queue.start(second)
    assert (started.status, started.counts.total, started.input_blob) == ("in_progress", 3, file.blob)
    assert len(await finish_all(queue)) == 3
    with pytest.raises(BadInput, match="upload it first"):
        await queue.create(new_batch(input_file_id=file.id))


async def test_a_validating_batch_is_rejected_cancelled_or_expired(
    queue: Queue, store: Database, time: ManualClock
) -> None:
    file = await queue.files.add("a", "in.jsonl", "batch", b"")
    for end in ("reject", "cancel", "expire"):
        await queue.create(new_batch(input_file_id=file.id, window_s=100))
        batch = await queue.claim_validating("loader")
        assert batch is not None
        await queue.append(batch, [new_job(0), NewJob("x", None)])
        if end == "reject":
            ended = await queue.reject(batch, [ErrorInfo("bad_input", "no")])
            assert (ended.status, ended.errors) == ("failed", [ErrorInfo("bad_input", "no")])
        elif end == "cancel":
            assert (await queue.cancel("a", batch.id)).status == "cancelled"
        else:
            time.advance(101)
            await queue.sweep()
            assert (await queue.batch("a", batch.id)).status == "expired"
        assert (await queue.batch("a", batch.id)).counts.total == 0
        assert await queue.jobs(batch.id) == []
        with pytest.raises(Conflict):
            await queue.append(batch, [new_job(2)])
    assert await types_of(store) == ["batch.failed", "batch.cancelled", "batch.expired"]


# --- who goes first --------------------------------------------------------------------------------------------------


async def test_claim_order_is_deadline_prefix_number(queue: Queue) -> None:
    late = await queue.submit(new_batch(), [new_job(i, prefix=1 + i % 2) for i in range(4)])
    soon = await queue.submit(new_batch(window_s=DAY_S / 2), [new_job(0, prefix=7)])
    leases = await queue.claim("w", MODEL, 4)
    assert [(lease.batch_id, lease.prefix, lease.number) for lease in leases] == [
        (soon.id, 7, 0),
        (late.id, 1, 0),
        (late.id, 1, 2),
        (late.id, 2, 1),
    ]
    assert await queue.claim("w", "another model", 4) == []
    assert await queue.claim("w", MODEL, 0) == []


async def test_fair_queueing_counts_tokens(queue: Queue) -> None:
    await queue.submit(new_batch("greedy"), new_jobs(300))
    await queue.submit(new_batch("small"), new_jobs(20))
    leases = await queue.claim("w", MODEL, 20)
    assert Counter(lease.account for lease in leases) == {"greedy": 10, "small": 10}
    for lease in leases:  # the greedy one's answers are a hundred times as long
        tokens = 1000 if lease.account == "greedy" else 10
        await queue.complete(lease, answer(n_in=0, n_out=tokens))
    leases = await queue.claim("w", MODEL, 10)
    assert Counter(lease.account for lease in leases) == {"small": 10}
    assert len(await queue.claim("w", MODEL, 10)) == 10
    latecomer = await queue.submit(new_batch("late"), new_jobs(50))
    leases = await queue.claim("w", MODEL, 8)
    assert latecomer.counts.total == 50
    assert {lease.account for lease in leases} == {"greedy", "late"}  # no credit for having been idle


async def test_urgent_jobs_go_before_fair_queueing(queue: Queue, time: ManualClock) -> None:
    await queue.submit(new_batch("a", window_s=4000), new_jobs(10))
    await finish_some(queue, 5, tokens=10_000)
    await queue.submit(new_batch("b"), new_jobs(50))
    time.advance(1000)  # 3,000 s are left to a
    leases = await queue.claim("w", MODEL, 8)
    assert Counter(lease.account for lease in leases) == {"a": 5, "b": 3}


async def finish_some(queue: Queue, n: int, tokens: int) -> None:
    for lease in await queue.claim("w", MODEL, n):
        await queue.complete(lease, answer(n_in=0, n_out=tokens))


# --- what can go wrong with a line -----------------------------------------------------------------------------------


async def test_a_transient_failure_is_retried_with_backoff(queue: Queue, time: ManualClock) -> None:
    batch = await queue.submit(new_batch(), new_jobs(1))
    waits: list[float] = []
    for attempt in range(1, 6):
        (lease,) = await queue.claim("w", MODEL, 5)
        assert lease.attempts == attempt
        assert await queue.fail(lease, ErrorInfo("internal", "oops"), retry=True)
        assert not await queue.fail(lease, ErrorInfo("internal", "oops"), retry=True)
        began = time.us
        for _ in range(130):
            if (await queue.batch("a", batch.id)).ended:
                break
            time.advance(0.5)
            found = await queue.claim("probe", MODEL, 1)
            if found:
                await queue.release(found)
                waits.append((time.us - began) / 1e6)
                break
    ended = await queue.batch("a", batch.id)
    assert (ended.status, ended.counts.failed) == ("completed", 1)
    assert len(waits) == 4
    assert waits
    assert all(2 <= wait <= 61.5 for wait in waits)
    assert waits[3] > waits[0]
    assert (await queue.job(batch.id, 0)).error == ErrorInfo("internal", "oops")


async def test_a_permanent_failure(queue: Queue, store: Database) -> None:
    batch = await queue.submit(new_batch(kind="response"), new_jobs(1))
    (lease,) = await queue.claim("w", MODEL, 1)
    assert await queue.fail(lease, ErrorInfo("bad_input", "no such tool"), retry=False)
    assert (await queue.batch("a", batch.id)).status == "failed"
    assert await types_of(store) == ["response.failed"]


async def test_jobs_of_a_dead_worker_are_reclaimed_and_its_results_fenced_off(queue: Queue, time: ManualClock) -> None:
    batch = await queue.submit(new_batch(), new_jobs(3))
    old = await queue.claim("dead", MODEL, 3)
    time.advance(50)
    assert (await queue.heartbeat("dead", old)).lost == frozenset()
    time.advance(50)
    await queue.sweep()
    assert await queue.claim("w", MODEL, 3) == []  # its heartbeat keeps them
    time.advance(11)
    await queue.sweep()
    assert not await queue.complete(old[0], answer("too late"))
    time.advance(61)
    again = await queue.claim("w", MODEL, 3)
    assert [(lease.epoch, lease.kills) for lease in again] == [(2, 1)] * 3
    assert not await queue.complete(old[0], answer("too late"))
    assert (await queue.heartbeat("dead", old)).lost == {lease.key for lease in old}
    for lease in again:
        assert await queue.complete(lease, answer("in time"))
    assert [item.answer for item in await queue.jobs(batch.id)] == [answer("in time")] * 3


async def test_quarantine_dead_letter_and_replay(queue: Queue, store: Database, time: ManualClock) -> None:
    batch = await queue.submit(new_batch(), new_jobs(2))
    for _ in range(2):
        for lease in await queue.claim("w", MODEL, 5):
            assert await queue.fail(lease, ErrorInfo("unavailable", "gone"), retry=True, killed=True)
        time.advance(61)
    assert await queue.claim("w", MODEL, 5) == []  # neither runs concurrently with others any more
    assert [depth.n_quarantined for depth in await queue.depths()] == [2]
    (guilty,) = await queue.claim("w", MODEL, 5, quarantined=True)
    assert await queue.fail(guilty, ErrorInfo("unavailable", "gone"), retry=True, killed=True)
    (innocent,) = await queue.claim("w", MODEL, 5, quarantined=True)
    assert await queue.complete(innocent, answer())
    ended = await queue.batch("a", batch.id)
    assert (ended.status, ended.counts.failed, ended.counts.completed) == ("completed", 1, 1)
    (dead,) = await queue.dead_letters()
    assert (dead.number, dead.kills) == (guilty.number, 3)
    assert dead.error is not None
    assert "died" in dead.error.message
    await audit(store)
    assert await queue.replay(batch.id) == 1
    assert await queue.replay(batch.id) == 0
    assert (await queue.batch("a", batch.id)).counts.failed == 0
    (lease,) = await queue.claim("w", MODEL, 5)
    assert lease.kills == 0
    assert await queue.complete(lease, answer("at last"))
    ended = await queue.batch("a", batch.id)
    assert (ended.status, ended.counts.failed, ended.counts.completed) == ("completed", 0, 2)
    assert await types_of(store) == ["batch.completed"]


async def test_released_leases_are_claimable_at_once(queue: Queue) -> None:
    await queue.submit(new_batch(), new_jobs(4))
    leases = await queue.claim("w", MODEL, 4)
    await queue.release(leases[:2])
    await queue.deregister("w")
    again = await queue.claim("w2", MODEL, 4)
    assert [lease.attempts for lease in again] == [1] * 4
    assert not await queue.complete(leases[0], answer())


async def test_jobs_missing_in_heartbeats_return_to_the_queue(queue: Queue, time: ManualClock) -> None:
    await queue.submit(new_batch(), new_jobs(2))
    leases = await queue.claim("w", MODEL, 2)
    await queue.heartbeat("w", leases[:1])  # the other may be on its way
    assert await queue.claim("x", MODEL, 2) == []
    for _ in range(3):
        time.advance(25)
        await queue.heartbeat("w", leases[:1])
    (back,) = await queue.claim("x", MODEL, 2)
    assert back.number == leases[1].number


# --- stopping --------------------------------------------------------------------------------------------------------


async def test_cancelling_a_batch(queue: Queue, store: Database) -> None:
    batch = await queue.submit(new_batch(), new_jobs(6))
    leases = await queue.claim("w", MODEL, 3)
    assert await queue.complete(leases[0], answer())
    stopped = await queue.cancel("a", batch.id)
    assert (stopped.status, stopped.counts.cancelled) == ("cancelling", 3)
    told = await queue.heartbeat("w", leases[1:])
    assert told.stopped == {lease.key for lease in leases[1:]}
    assert await queue.fail(leases[1], ErrorInfo("unavailable", "engine away"), retry=True)  # does not come back
    assert await queue.finish_stopped(leases[2], usage(leases[2]))
    ended = await queue.cancel("a", batch.id)
    assert (ended.status, ended.counts.cancelled, ended.counts.completed) == ("cancelled", 5, 1)
    assert await queue.claim("w", MODEL, 9) == []
    found = await queue.jobs(batch.id, states=["cancelled"])
    assert found
    assert all(item.error is not None and item.error.kind == "cancelled" and item.ended_us for item in found)
    assert await UsageLedger(store).find(leases[2].request_id) is not None
    assert await types_of(store) == ["batch.cancelled"]
    with pytest.raises(NotFound):
        await queue.cancel("someone else", batch.id)


async def test_cancelling_a_job(queue: Queue) -> None:
    batch = await queue.submit(new_batch(), new_jobs(3))
    (lease,) = await queue.claim("w", MODEL, 1)
    other = next(n for n in range(3) if n != lease.number)
    assert (await queue.cancel_job("a", batch.id, other)).state == "cancelled"
    assert (await queue.cancel_job("a", batch.id, lease.number)).state == "leased"
    assert (await queue.heartbeat("w", [lease])).stopped == {lease.key}
    assert await queue.finish_stopped(lease)
    assert (await queue.job(batch.id, lease.number)).state == "cancelled"
    assert len(await finish_all(queue)) == 1
    assert (await queue.batch("a", batch.id)).status == "completed"
    with pytest.raises(NotFound):
        await queue.cancel_job("a", batch.id, 17)


async def test_a_cancelled_job_of_a_dead_worker_is_not_requeued(queue: Queue, time: ManualClock) -> None:
    batch = await queue.submit(new_batch(), new_jobs(1))
    await queue.claim("w", MODEL, 1)
    await queue.cancel("a", batch.id)
    time.advance(61)
    await queue.sweep()
    assert (await queue.batch("a", batch.id)).status == "cancelled"


async def test_an_expired_batch_keeps_its_results(queue: Queue, store: Database, time: ManualClock) -> None:
    batch = await queue.submit(new_batch(window_s=600), new_jobs(5))
    leases = await queue.claim("w", MODEL, 3)
    assert await queue.complete(leases[0], answer())
    for _ in range(20):
        time.advance(30)
        await queue.heartbeat("w", leases[1:])
    assert await queue.claim("w", MODEL, 9) == []  # too late to begin
    await queue.sweep()
    assert (await queue.heartbeat("w", leases[1:])).stopped == {lease.key for lease in leases[1:]}
    assert await queue.complete(leases[1], answer("just made it"))
    assert await queue.finish_stopped(leases[2])
    ended = await queue.batch("a", batch.id)
    assert (ended.status, ended.counts.completed, ended.counts.expired) == ("expired", 2, 3)
    assert {item.state for item in await queue.jobs(batch.id)} == {"succeeded", "expired"}
    assert await types_of(store) == ["batch.expired"]


# --- reading ---------------------------------------------------------------------------------------------------------


async def test_pagination(queue: Queue, time: ManualClock) -> None:
    made = []
    for _ in range(5):
        made.append((await queue.submit(new_batch(), new_jobs(1))).id)
        time.advance(1)
    await queue.submit(new_batch(kind="anthropic"), new_jobs(1))
    newest = made[::-1]
    page, more = await queue.batches("a", "openai", limit=2)
    assert ([batch.id for batch in page], more) == (newest[:2], True)
    page, more = await queue.batches("a", "openai", after=newest[1], limit=3)
    assert ([batch.id for batch in page], more) == (newest[2:], False)
    page, more = await queue.batches("a", "openai", before=newest[3], limit=2)
    assert ([batch.id for batch in page], more) == (newest[1:3], True)
    assert await queue.batches("b", "openai") == ([], False)
    with pytest.raises(NotFound):
        await queue.batches("a", "openai", after="nothing")
    batch = await queue.submit(new_batch(), new_jobs(7))
    assert [item.number for item in await queue.jobs(batch.id, after=2, limit=3)] == [3, 4, 5]
    assert [item.number for item in await queue.jobs(batch.id, after=2, limit=3, states=["queued", "dead"])] == [
        3,
        4,
        5,
    ]


async def test_position_and_eta(queue: Queue, time: ManualClock) -> None:
    await queue.submit(new_batch(window_s=DAY_S / 2), new_jobs(30))
    mine = await queue.submit(new_batch(), new_jobs(10))
    assert (await queue.position(mine)).position == 30
    assert (await queue.position(mine)).eta_s is None
    await queue.submit(new_batch("b"), new_jobs(50))
    assert (await queue.position(mine)).position == 60  # turns with the other account
    leases = await queue.claim("w", MODEL, 2)
    for _ in range(10):
        time.advance(30)
        for lease in leases:
            assert await queue.complete(lease, answer(n_in=264, n_out=0))
        leases = await queue.claim("w", MODEL, 2)
    place = await queue.position(await queue.batch("a", mine.id))
    assert place.rate_per_s == pytest.approx(20 / 300)
    assert place.eta_s == pytest.approx((20 + 10 + 30) / place.rate_per_s, rel=0.2)
    assert [(depth.account, depth.n_queued) for depth in await queue.depths()] == [("a", 29), ("b", 39)]


async def test_wait_for_change_is_notified(queue: Queue) -> None:
    batch = await queue.submit(new_batch(), new_jobs(1))
    waiting = asyncio.create_task(queue.wait_for_change(batch.id, 30))
    await asyncio.sleep(0.3)
    (lease,) = await queue.claim("w", MODEL, 1)
    await queue.complete(lease, answer())
    await asyncio.wait_for(waiting, 25)
    await asyncio.wait_for(queue.wait_for_change(batch.id, 0.05), 60)


# --- bodies, retention -----------------------------------------------------------------------------------------------


async def test_large_bodies_are_blobs_and_are_collected(store: Database, time: ManualClock, tmp_path: Path) -> None:
    queue = make_queue(store, tmp_path, blob_grace_s=0)
    big = "long " * 30_000
    batch = await queue.submit(new_batch(), [new_job(0, text=big), new_job(1)])
    again = await queue.submit(new_batch(), [new_job(0, text=big)])
    blobs = lambda: [path for path in (tmp_path / "blobs").rglob("*") if path.is_file() and path.name != ".lock"]  # noqa: E731
    assert len(blobs()) == 2  # the ids in them differ
    leases = await queue.claim("w", MODEL, 5)
    assert max(len(lease.request.messages[0].content) for lease in leases if lease.request.messages) == len(big)
    reply = Answer([AnswerChoice([TextPart(big)])], Usage())
    for lease in leases:
        assert await queue.complete(lease, reply)
    assert len(blobs()) == 3  # three times the same answer
    assert (await queue.job(batch.id, 0)).answer == reply
    await queue.purge_expired()
    assert len(blobs()) == 3
    await queue.delete("a", again.id)
    await queue.purge_expired()
    assert len(blobs()) == 2
    assert (await queue.job(batch.id, 0)).answer == reply
    time.advance(29 * DAY_S)
    await queue.purge_expired()
    assert (await queue.batch("a", batch.id)).status == "completed"
    time.advance(2 * DAY_S)
    await queue.purge_expired()
    with pytest.raises(NotFound):
        await queue.batch("a", batch.id)
    assert blobs() == []
    for table in ("batches", "lines", "bodies"):
        assert await store.read(f"SELECT COUNT(*) FROM {table}") == [(0,)]
    await audit(store)


async def test_an_unreadable_request_fails_only_its_job(store: Database, time: ManualClock, tmp_path: Path) -> None:
    queue = make_queue(store, tmp_path, blob_bytes=1000, max_attempts=2)
    texts = ["fine", "damaged", "missing", "long " * 500, "also fine"]
    batch = await queue.submit(new_batch(), [new_job(i, text=text) for i, text in enumerate(texts)])
    damage = "UPDATE bodies SET data = ? WHERE batch_id = ? AND number = 1"
    await store.write(damage, (b"\x93\xc1", batch.id))
    await store.write("DELETE FROM bodies WHERE batch_id = ? AND number = 2", (batch.id,))
    (blob,) = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file() and path.name != ".lock"]
    blob.rename(tmp_path / "away")
    leases = await queue.claim("w", MODEL, 8)
    assert sorted(lease.number for lease in leases) == [0, 4]
    assert (await queue.heartbeat("w", leases)).lost == frozenset()
    states = [job.state for job in await queue.jobs(batch.id)]
    assert states == ["leased", "failed", "failed", "queued", "leased"]  # a file may come back
    error = (await queue.job(batch.id, 1)).error
    assert error is not None
    assert error.message == "the stored request cannot be read: submit it again"
    time.advance(600)
    assert await queue.claim("w", MODEL, 8) == []
    error = (await queue.job(batch.id, 3)).error
    assert error is not None
    assert error.message.startswith("cannot read a stored body")
    for lease in leases:
        assert await queue.complete(lease, answer())
    assert (await queue.batch("a", batch.id)).status == "completed"
    await queue.close()
    await audit(store)


async def test_only_ended_batches_can_be_deleted(queue: Queue) -> None:
    batch = await queue.submit(new_batch(), new_jobs(1))
    with pytest.raises(Conflict, match="cancel it first"):
        await queue.delete("a", batch.id)
    await finish_all(queue)
    await queue.delete("a", batch.id)
    with pytest.raises(NotFound):
        await queue.batch("a", batch.id)


async def test_leases_are_shortened_after_the_clock_was_set_back(queue: Queue, time: ManualClock) -> None:
    await queue.submit(new_batch(), new_jobs(1))
    await queue.claim("w", MODEL, 1)
    time.advance(-3600)  # a restart after the clock was set
    await queue.sweep()
    time.advance(61)
    await queue.sweep()
    time.advance(5)
    assert len(await queue.claim("w2", MODEL, 1)) == 1


async def test_a_clock_set_forward_repeats_a_job_but_keeps_one_result(queue: Queue, time: ManualClock) -> None:
    batch = await queue.submit(new_batch(window_s=10 * DAY_S), new_jobs(1))
    (first,) = await queue.claim("w", MODEL, 1)
    time.advance(7200)
    await queue.sweep()
    time.advance(10)
    (second,) = await queue.claim("w2", MODEL, 1)
    assert not await queue.complete(first, answer("first"))
    assert await queue.complete(second, answer("second"))
    assert (await queue.job(batch.id, 0)).answer == answer("second")


# --- many at once ----------------------------------------------------------------------------------------------------


async def test_four_workers_on_two_connections_share_the_jobs(database: DatabaseLocation, tmp_path: Path) -> None:
    stores = [await database.open() for _ in range(2)]
    queues = [make_queue(store, tmp_path) for store in stores]
    batches = [await queues[i % 2].submit(new_batch(f"account {i % 3}"), new_jobs(150)) for i in range(4)]
    ran: list[tuple[str, int]] = []

    async def pull(owner: str, queue: Queue) -> None:
        while leases := await queue.claim(owner, MODEL, 7):
            await asyncio.sleep(0)
            took = await asyncio.gather(*(queue.complete(lease, answer()) for lease in leases))
            assert all(took)
            ran.extend(lease.key for lease in leases)

    await asyncio.gather(*(pull(f"w{i}", queues[i % 2]) for i in range(4)))
    assert Counter(ran) == Counter((batch.id, n) for batch in batches for n in range(150))
    for batch in batches:
        assert (await queues[0].batch(batch.account, batch.id)).status == "completed"
    assert len(await types_of(stores[0])) == 4
    await audit(stores[0])
    for store in stores:
        await store.close()


async def test_a_job_cancelled_during_its_release_is_cancelled(queue: Queue) -> None:
    """`start` shows the batch first and lets its lines go a moment later."""
    file = await queue.files.add("a", "in.jsonl", "batch", b"three\nlines\nhere")
    for _ in range(12):
        batch = await queue.create(new_batch(input_file_id=file.id))
        loading = await queue.claim_validating("loader")
        assert loading is not None
        await queue.append(loading, new_jobs(3))
        starting = asyncio.create_task(queue.start(loading))
        while (await queue.batch("a", batch.id)).status != "in_progress":
            await asyncio.sleep(0)
        assert (await queue.cancel_job("a", batch.id, 1)).state == "cancelled"
        await starting
        assert (await queue.batch("a", batch.id)).counts.cancelled == 1
