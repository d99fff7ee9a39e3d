"""Events are told once, in the order of their commits, to whoever follows; also when many write at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from emberline.jobs.webhooks.events import batch_event, cursor_number, event_object, event_statements
from emberline.protocol.errors import BadInput, ErrorInfo
from emberline.store.notifications import Notifier

from ..databases import KINDS, Place, a_place, postgres_server
from .desks import desk_on, endpoint_at, happen, log_of


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=KINDS)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    server = request.getfixturevalue("server") if request.param == "postgres" else None
    async with a_place(request.param, tmp_path, server) as place:
        yield place


async def test_a_follower_misses_nothing(place: Place) -> None:
    """Three processes write; a number that is seen means that all before it have been."""
    stores = [await place.open() for _ in range(3)]
    seen: list[int] = []

    async def follow() -> None:
        while len(seen) < 60:
            seen.extend(event.number for event in await desk.feed.wait("acme", seen[-1] if seen else 0, 10, limit=7))

    async with desk_on(stores[0], deliver=False) as desk, asyncio.timeout(30):
        following = asyncio.create_task(follow())
        await asyncio.gather(*(happen(stores[n % 3], f"batch_{n}") for n in range(60)))
        await following
    assert sorted(set(seen)) == seen
    assert len(seen) == 60
    for store in stores:
        await store.close()


async def test_told_once(place: Place) -> None:
    store = await place.open()
    async with desk_on(store, deliver=False) as desk:
        endpoint = await endpoint_at(desk, "http://127.0.0.1:1/")
        for _ in range(3):
            await happen(store, "batch_1")
        assert [event.subject for event in await desk.feed.page("acme", 0)] == ["batch_1"]
        assert len(await log_of(desk, endpoint)) == 1
    await store.close()


async def test_only_if_it_happened(place: Place) -> None:
    store = await place.open()
    event = batch_event("openai", "failed", account="acme", batch_id="batch_1", now_us=1)
    assert event is not None
    condition = "EXISTS (SELECT 1 FROM webhook_endpoints WHERE account = ? AND enabled = 1)"
    async with desk_on(store, deliver=False) as desk:
        await store.transaction(event_statements(event, condition, ("acme",)))
        assert await desk.feed.page("acme", 0) == []
        await endpoint_at(desk, "http://127.0.0.1:1/")
        await store.transaction(event_statements(event, condition, ("acme",)))
        assert len(await desk.feed.page("acme", 0)) == 1
    await store.close()


async def test_undone_with_its_transaction(place: Place) -> None:
    store = await place.open()
    event = batch_event("openai", "failed", account="acme", batch_id="batch_1", now_us=1)
    assert event is not None
    async with desk_on(store, deliver=False) as desk:
        endpoint = await endpoint_at(desk, "http://127.0.0.1:1/")
        with pytest.raises(Exception, match="no_such_table"):
            await store.transaction([*event_statements(event), ("DELETE FROM no_such_table", ())])
        assert await desk.feed.page("acme", 0) == []
        assert await log_of(desk, endpoint) == []
    await store.close()


def test_what_is_told_of_which_work() -> None:
    def told(kind: str, status: str) -> str | None:
        event = batch_event(kind, status, account="a", batch_id="b", now_us=1)  # type: ignore[arg-type]
        return event.type if event else None

    assert told("openai", "queued") is None
    assert told("openai", "in_progress") is None
    assert told("anthropic", "expired") == "batch.expired"
    assert told("workers_ai", "completed") == "cf.workersAi.model.batch.succeeded"
    assert told("workers_ai", "expired") == "cf.workersAi.model.batch.failed"
    assert told("response", "incomplete") == "response.incomplete"


def test_why_a_batch_failed() -> None:
    error = ErrorInfo("overloaded", "no room")
    for status, given, codes in (
        ("failed", error, ("no room", 3040, 429)),
        ("expired", None, ("the batch expired", 3007, 408)),
        ("cancelled", None, ("the batch was cancelled", 3008, 408)),
    ):
        event = batch_event("workers_ai", status, account="a", batch_id="b", now_us=1, error=given)
        assert event is not None
        assert event.data == {
            "requestId": "b",
            "message": codes[0],
            "internalCode": codes[1],
            "httpCode": codes[2],
        }


async def test_ids_sort_and_tell_where_to_go_on(place: Place) -> None:
    store = await place.open()
    async with desk_on(store, deliver=False) as desk:
        for n in range(20):
            await happen(store, f"batch_{n}")
        events = await desk.feed.page("acme", 0)
        ids = [event_object(event)["id"] for event in events]
        assert ids == sorted(ids)
        assert [cursor_number(event_id) for event_id in ids] == [event.number for event in events]
        for bad in ("", "evt_", "1", "evt_00000000000g00", "resp_000000000001"):
            with pytest.raises(BadInput):
                cursor_number(bad)
    await store.close()


@pytest.mark.parametrize("ticks", range(4))
async def test_a_cancellation_together_with_a_notification_is_not_lost(ticks: int) -> None:
    """It still cancels, or a process would not end."""
    notifier = Notifier()
    notifications = notifier.subscribe("events", 5)

    async def listen() -> None:
        async for _ in notifications:
            pass

    async def wait_with_timeout() -> None:
        own = notifier.subscribe("events", 5)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await anext(own)

    tasks = [asyncio.create_task(listen()), asyncio.create_task(wait_with_timeout())]
    await asyncio.sleep(0.01)
    notifier.publish("events")
    for _ in range(ticks):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=1)
    assert len(done) == 2
