"""Events are written once and read in commit order, also with concurrent writers."""

import asyncio
import contextlib

import pytest

from emberline.jobs.webhooks.events import batch_event, cursor_number, event_object, event_statements
from emberline.protocol.errors import BadInput, ErrorInfo
from emberline.store import Database
from emberline.store.notifications import Notifier
from tests.databases import DatabaseLocation
from tests.jobs.webhooks.helpers import create_endpoint, delivery_records, emit_event, webhook_service


async def test_a_feed_reader_misses_nothing(database: DatabaseLocation) -> None:
    """With three writers, a number that was read means that all before it were."""
    stores = [await database.open() for _ in range(3)]
    seen: list[int] = []

    async def follow() -> None:
        while len(seen) < 60:
            seen.extend(
                event.number for event in await webhooks.feed.wait("acme", seen[-1] if seen else 0, 10, limit=7)
            )

    async with webhook_service(stores[0], deliver=False) as webhooks, asyncio.timeout(60):
        following = asyncio.create_task(follow())
        await asyncio.gather(*(emit_event(stores[n % 3], f"batch_{n}") for n in range(60)))
        await following
    assert sorted(set(seen)) == seen
    assert len(seen) == 60
    for store in stores:
        await store.close()


async def test_an_event_is_written_once(store: Database) -> None:
    async with webhook_service(store, deliver=False) as webhooks:
        endpoint = await create_endpoint(webhooks, "http://127.0.0.1:1/")
        for _ in range(3):
            await emit_event(store, "batch_1")
        assert [event.subject for event in await webhooks.feed.page("acme", 0)] == ["batch_1"]
        assert len(await delivery_records(webhooks, endpoint)) == 1
    await store.close()


async def test_conditional_events(store: Database) -> None:
    event = batch_event("openai", "failed", account="acme", batch_id="batch_1", now_us=1)
    assert event is not None
    condition = "EXISTS (SELECT 1 FROM webhook_endpoints WHERE account = ? AND enabled = 1)"
    async with webhook_service(store, deliver=False) as webhooks:
        await store.transaction(event_statements(event, condition, ("acme",)))
        assert await webhooks.feed.page("acme", 0) == []
        await create_endpoint(webhooks, "http://127.0.0.1:1/")
        await store.transaction(event_statements(event, condition, ("acme",)))
        assert len(await webhooks.feed.page("acme", 0)) == 1
    await store.close()


async def test_an_event_is_rolled_back_with_its_transaction(store: Database) -> None:
    event = batch_event("openai", "failed", account="acme", batch_id="batch_1", now_us=1)
    assert event is not None
    async with webhook_service(store, deliver=False) as webhooks:
        endpoint = await create_endpoint(webhooks, "http://127.0.0.1:1/")
        with pytest.raises(Exception, match="no_such_table"):
            await store.transaction([*event_statements(event), ("DELETE FROM no_such_table", ())])
        assert await webhooks.feed.page("acme", 0) == []
        assert await delivery_records(webhooks, endpoint) == []
    await store.close()


def test_event_types_by_kind_and_status() -> None:
    def told(kind: str, status: str) -> str | None:
        event = batch_event(kind, status, account="a", batch_id="b", now_us=1)  # type: ignore[arg-type]
        return event.type if event else None

    assert told("openai", "queued") is None
    assert told("openai", "in_progress") is None
    assert told("anthropic", "expired") == "batch.expired"
    assert told("workers_ai", "completed") == "cf.workersAi.model.batch.succeeded"
    assert told("workers_ai", "expired") == "cf.workersAi.model.batch.failed"
    assert told("response", "incomplete") == "response.incomplete"


def test_workers_ai_failure_payload() -> None:
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


async def test_ids_sort_and_serve_as_cursors(store: Database) -> None:
    async with webhook_service(store, deliver=False) as webhooks:
        for n in range(20):
            await emit_event(store, f"batch_{n}")
        events = await webhooks.feed.page("acme", 0)
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
                async with asyncio.timeout(60):
                    await anext(own)

    tasks = [asyncio.create_task(listen()), asyncio.create_task(wait_with_timeout())]
    await asyncio.sleep(0.01)
    notifier.publish("events")
    for _ in range(ticks):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=60)
    assert len(done) == 2
