"""Deliveries against a real receiver: every answer it can give, and what the log says of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook

from emberline.jobs.webhooks.deliverer import DELAYS_S, MAX_PER_ENDPOINT, next_delay_s
from emberline.jobs.webhooks.deliveries import LEASE_S, DeliveryRecord
from emberline.jobs.webhooks.endpoints import EndpointUpdate
from emberline.protocol.errors import BadInput
from emberline.store import open_store

from ..databases import KINDS, a_place, postgres_server
from .desks import Moved, desk_on, endpoint_at, happen, log_of, log_when
from .receiver import CLOSE, CUT, ENDLESS, GARBAGE, HANG, Instruction, receiving

RETRY_LATER = b"HTTP/1.1 503 Busy\r\nretry-after: 120\r\ncontent-length: 0\r\n\r\n"
RETRY_SOON = b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=KINDS)
async def db(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Moved]:
    server = request.getfixturevalue("server") if request.param == "postgres" else None
    async with a_place(request.param, tmp_path, server) as place:
        store = await place.open()
        yield Moved(store)
        await store.close()


def settled(log: list[DeliveryRecord]) -> bool:
    return bool(log) and all(item.delivery.state != "pending" for item in log)


def attempted(n: int) -> Callable[[list[DeliveryRecord]], bool]:
    """The first delivery's log has told how `n` attempts ended."""
    return lambda log: bool(log) and sum(bool(a.status or a.problem) for a in log[0].attempts) >= n


async def test_delivered_and_verified(db: Moved) -> None:
    async with receiving() as receiver, desk_on(db) as desk:
        endpoint = await endpoint_at(desk, receiver.url + "?a=1")
        await happen(db, "batch_1")
        (item,) = await log_when(desk, endpoint, settled)
        (got,) = receiver.got
        assert got.path == "/hook?a=1"
        assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
        assert Webhook(desk.endpoints.secret_of(endpoint)).verify(got.body, got.headers)["data"] == {"id": "batch_1"}
        assert item.event is not None
        assert got.headers["webhook-id"] == item.event.id == json.loads(got.body)["id"]
        assert (item.delivery.state, [a.status for a in item.attempts]) == ("delivered", [200])
        assert desk.deliverer.counts["delivered"] == 1


async def test_workers_ai_s_documented_form(db: Moved) -> None:
    async with receiving() as receiver, desk_on(db) as desk:
        endpoint = await desk.endpoints.create("acme", "workers_ai", EndpointUpdate(url=receiver.url, model="@cf/a/b"))
        await happen(db, "r1", "failed", kind="workers_ai", model="@cf/a/b")
        await happen(db, "r2", "failed", kind="workers_ai", model="@cf/a/other")
        await happen(db, "r3", "queued", kind="workers_ai", model="@cf/a/b")
        await receiver.until(2)
        failed, queued = sorted((json.loads(got.body) for got in receiver.got), key=lambda e: e["payload"]["requestId"])
        stamp = failed["metadata"].pop("eventTimestamp")
        assert stamp.endswith("Z")
        assert len(stamp) == 24
        assert failed == {
            "type": "cf.workersAi.model.batch.failed",
            "source": {"type": "workersAi.model", "modelName": "@cf/a/b"},
            "payload": {"requestId": "r1", "message": "the batch failed", "internalCode": 5001, "httpCode": 500},
            "metadata": {"accountId": "acme", "eventSubscriptionId": endpoint.id, "eventSchemaVersion": 1},
        }
        assert (queued["type"], queued["payload"]) == ("cf.workersAi.model.batch.queued", {"requestId": "r3"})


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (500, ""),
        (404, ""),
        (301, "redirects are not followed"),
        (b"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.1:1/\r\n\r\n", "redirects are not followed"),
        (HANG, "no answer within 1 s"),
        (CLOSE, "the connection closed before an answer came"),
        (GARBAGE, "the answer is not HTTP/1.1"),
        (ENDLESS, "the answer's head is longer than 32 KiB"),
        (b"HTTP/1.1 200", "the connection closed before an answer came"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, "interim answers without an end"),
    ],
)
async def test_failures_are_tried_again(db: Moved, answer: Instruction, problem: str) -> None:
    async with receiving(answer, then=204) as receiver, desk_on(db) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        await happen(db, "batch_1")
        (item,) = await log_when(desk, endpoint, attempted(1))
        assert (item.delivery.state, item.attempts[0].problem) == ("pending", problem)
        assert 4 < (item.delivery.ready_us - db.now_us()) / 1e6 <= 5.5
        assert (await desk.endpoints.get("acme", endpoint.id)).failing_since_us is not None
        db.ahead_s += 6
        (item,) = await log_when(desk, endpoint, settled)
        assert (item.delivery.state, [a.status for a in item.attempts][1:]) == ("delivered", [204])
        assert len(set(receiver.ids)) == 1
        assert len(receiver.got) == 2
        assert (await desk.endpoints.get("acme", endpoint.id)).failing_since_us is None


@pytest.mark.parametrize(
    "answer", [CUT, b"HTTP/1.1 103 Hints\r\n\r\nHTTP/1.0 202 Taken\r\n\r\n", b"HTTP/1.1 200\r\n\r\n"]
)
async def test_a_2xx_is_the_receiver_s_word(db: Moved, answer: Instruction) -> None:
    async with receiving(answer, then=500) as receiver, desk_on(db) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        await happen(db, "batch_1")
        (item,) = await log_when(desk, endpoint, settled)
        assert (item.delivery.state, len(receiver.got)) == ("delivered", 1)


async def test_nobody_listens(db: Moved) -> None:
    async with desk_on(db) as desk:
        async with receiving() as receiver:
            url = receiver.url
        endpoint = await endpoint_at(desk, url)
        await happen(db, "batch_1")
        (item,) = await log_when(desk, endpoint, attempted(1))
        assert item.attempts[0].problem.startswith("cannot connect: ")


@pytest.mark.parametrize(("answer", "least_s", "most_s"), [(RETRY_LATER, 119, 121), (RETRY_SOON, 4.5, 5.5)])
async def test_retry_after_is_honoured(db: Moved, answer: bytes, least_s: float, most_s: float) -> None:
    async with receiving(answer) as receiver, desk_on(db) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        await happen(db, "batch_1")
        (item,) = await log_when(desk, endpoint, attempted(1))
        assert least_s < (item.delivery.ready_us - db.now_us()) / 1e6 < most_s


async def test_the_whole_schedule_then_replay(db: Moved) -> None:
    async with receiving(*[500] * len(DELAYS_S), then=200) as receiver, desk_on(db, disable_after_days=30) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        began_us = db.now_us()
        await happen(db, "batch_1")
        for n in range(1, len(DELAYS_S)):
            (item,) = await log_when(desk, endpoint, attempted(n))
            wait_s = (item.delivery.ready_us - db.now_us()) / 1e6
            assert DELAYS_S[n] - 1 < wait_s < DELAYS_S[n] * 1.1 + 0.01
            db.ahead_s += wait_s + 0.01
        (item,) = await log_when(desk, endpoint, settled)
        assert (item.delivery.state, len(item.attempts)) == ("failed", 10)
        assert 75 * 3600 < (db.now_us() - began_us) / 1e6 < 85 * 3600
        await asyncio.sleep(0.3)
        assert len(receiver.got) == 10
        assert desk.deliverer.counts == {"failed": 10, "exhausted": 1}

        assert await desk.deliveries.replay(endpoint) == 1
        (item,) = await log_when(desk, endpoint, settled)
        assert (item.delivery.state, len(item.attempts), len(set(receiver.ids))) == ("delivered", 11, 1)
        assert await desk.deliveries.replay(endpoint) == 0
        assert await desk.deliveries.replay(endpoint, item.delivery.id) == 1
        await receiver.until(12)


def test_the_schedule() -> None:
    assert [next_delay_s(n, None, lambda: 0.0) for n in range(1, 11)] == [*DELAYS_S[1:], None]
    assert next_delay_s(1, None, lambda: 1.0) == pytest.approx(5.5)
    assert next_delay_s(1, 1e9, lambda: 0.0) == 24 * 3600


async def test_gone_disables(db: Moved) -> None:
    async with receiving(500, 410) as receiver, desk_on(db) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        await happen(db, "batch_1")
        await log_when(desk, endpoint, attempted(1))
        await happen(db, "batch_2")
        log = await log_when(desk, endpoint, settled)
        assert [item.delivery.state for item in log] == ["failed", "failed"]
        found = await desk.endpoints.get("acme", endpoint.id)
        assert (found.enabled, found.disabled_reason) == (0, "it answered 410 Gone")
        await happen(db, "batch_3")  # while disabled: nothing to deliver
        assert len(await log_of(desk, endpoint)) == 2
        with pytest.raises(BadInput, match="disabled"):
            await desk.deliveries.replay(found)
        enabled = await desk.endpoints.update("acme", endpoint.id, EndpointUpdate(enabled=True))
        assert (enabled.enabled, enabled.disabled_reason) == (1, "")
        assert await desk.deliveries.replay(enabled) == 2
        log = await log_when(desk, endpoint, settled)
        assert [item.delivery.state for item in log] == ["delivered", "delivered"]


async def test_days_of_failure_disable(db: Moved) -> None:
    async with receiving(then=500) as receiver, desk_on(db, disable_after_days=2) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        await happen(db, "batch_1")
        await log_when(desk, endpoint, attempted(1))
        db.ahead_s += 1.9 * 86400
        await log_when(desk, endpoint, attempted(2))
        assert (await desk.endpoints.get("acme", endpoint.id)).enabled
        db.ahead_s += 0.2 * 86400
        await log_when(desk, endpoint, settled)
        found = await desk.endpoints.get("acme", endpoint.id)
        assert (found.enabled, found.disabled_reason) == (0, "every delivery has failed for 2 days")
        assert desk.deliverer.counts["disabled"] == 1


async def test_a_name_that_moves_inside(db: Moved) -> None:
    """It was public when the endpoint was made; now it leads to the receiver on loopback, which must not hear of it."""
    now: Sequence[str] = ("8.8.8.8",)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return now

    async with receiving() as receiver, desk_on(db, allow=(), resolve=resolve) as desk:
        endpoint = await endpoint_at(desk, f"https://rebound.example:{receiver.port}/hook")
        now = ("127.0.0.1",)
        await happen(db, "batch_1")
        (item,) = await log_when(desk, endpoint, attempted(1))
        assert "inside the network" in item.attempts[0].problem
        assert not receiver.got
        with pytest.raises(BadInput, match="inside the network"):
            await endpoint_at(desk, receiver.url)


async def test_the_checked_address_is_the_one_dialled(db: Moved) -> None:
    """The name is resolved once for an attempt; its host stays in the request."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"]

    async with receiving() as receiver, desk_on(db, resolve=resolve) as desk:
        await endpoint_at(desk, f"http://no-such-name.invalid:{receiver.port}/hook")
        await happen(db, "batch_1")
        await receiver.until(1)
        assert receiver.got[0].headers["host"] == f"no-such-name.invalid:{receiver.port}"
        assert asked == ["no-such-name.invalid"] * 2  # at creation, at the attempt


async def test_rotation(db: Moved) -> None:
    async with receiving() as receiver, desk_on(db) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        old = Webhook(desk.endpoints.secret_of(endpoint))
        rotated = await desk.endpoints.rotate("acme", endpoint.id, overlap_s=3600)
        new = Webhook(desk.endpoints.secret_of(rotated))
        await happen(db, "batch_1")
        await receiver.until(1)
        for webhook in (old, new):
            webhook.verify(receiver.got[0].body, receiver.got[0].headers)
        db.ahead_s += 3601
        await happen(db, "batch_2")
        await receiver.until(2)
        new.verify(receiver.got[1].body, receiver.got[1].headers)
        assert len(receiver.got[1].headers["webhook-signature"].split()) == 1


async def test_a_hanging_endpoint_does_not_hold_up_others(db: Moved) -> None:
    async with receiving(then=HANG) as stuck, receiving() as well, desk_on(db, timeout_s=20.0) as desk:
        await endpoint_at(desk, stuck.url)
        endpoint = await endpoint_at(desk, well.url)
        for n in range(30):
            await happen(db, f"batch_{n}")
        log = await log_when(desk, endpoint, lambda log: len(log) == 30 and settled(log))
        assert {item.delivery.state for item in log} == {"delivered"}
        assert len(stuck.got) == MAX_PER_ENDPOINT


async def test_many_deliver_each_once(db: Moved) -> None:
    async with receiving() as receiver, desk_on(db) as desk, desk_on(db), desk_on(db):
        endpoint = await endpoint_at(desk, receiver.url)
        await asyncio.gather(*(happen(db, f"batch_{n}") for n in range(40)))
        await log_when(desk, endpoint, lambda log: len(log) == 40 and settled(log))
        assert len(receiver.got) == 40
        assert len(set(receiver.ids)) == 40


async def test_a_lease_that_ends_gives_the_delivery_back(db: Moved) -> None:
    async with receiving() as receiver, desk_on(db, deliver=False) as dead:
        endpoint = await endpoint_at(dead, receiver.url)
        await happen(db, "batch_1")
        (claimed,) = await dead.deliveries.claim(endpoint.id, 1)  # and then its process dies
        async with desk_on(db) as desk:
            await asyncio.sleep(0.3)
            assert not receiver.got
            db.ahead_s += LEASE_S + 1
            (item,) = await log_when(desk, endpoint, settled)
            assert [(a.number, a.status, a.problem) for a in item.attempts] == [(1, None, ""), (2, 200, "")]
            # The dead one comes back and says it failed: it is no longer asked.
            assert not await dead.deliveries.failed(claimed, item.attempts[0], None)
            assert (await log_of(desk, endpoint))[0].delivery.state == "delivered"


async def test_only_what_was_asked_for(db: Moved) -> None:
    async with receiving() as receiver, desk_on(db, deliver=False) as desk:
        some = await endpoint_at(desk, receiver.url, ["batch.failed", "batch.expired"])
        theirs = await endpoint_at(desk, receiver.url, account="other")
        for status in ("completed", "failed", "cancelled", "expired"):
            await happen(db, f"batch_{status}", status)
        assert [item.event.type for item in await log_of(desk, some) if item.event] == ["batch.failed", "batch.expired"]
        assert await log_of(desk, theirs) == []


async def test_disabling_and_deleting(db: Moved) -> None:
    async with receiving() as receiver, desk_on(db, deliver=False) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        await happen(db, "batch_1")
        await desk.endpoints.update("acme", endpoint.id, EndpointUpdate(enabled=False))
        (item,) = await log_of(desk, endpoint)
        assert item.delivery.state == "failed"
        await desk.endpoints.delete("acme", endpoint.id)
        assert await db.read("SELECT * FROM deliveries") == []


async def test_retention(db: Moved) -> None:
    async with receiving() as receiver, desk_on(db, deliver=False, retention_days=10) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        await happen(db, "batch_1")
        db.ahead_s += 9 * 86400
        await happen(db, "batch_2")
        db.ahead_s += 2 * 86400
        await desk.purge_expired()
        assert [item.event.subject for item in await log_of(desk, endpoint) if item.event] == ["batch_2"]
        (event,) = await desk.feed.page("acme", 0)
        assert (event.subject, event.number) == ("batch_2", 2)


ANSWERS = st.sampled_from([200, 204, 500, 302, 429, CLOSE, CUT, GARBAGE, RETRY_SOON])


@given(answers=st.lists(ANSWERS, max_size=8), n_events=st.integers(1, 5))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_every_event_arrives_and_the_log_says_the_truth(
    tmp_path_factory: pytest.TempPathFactory, answers: list[Instruction], n_events: int
) -> None:
    store = await open_store(tmp_path_factory.mktemp("events") / "events.db")
    db = Moved(store)
    async with receiving(*answers) as receiver, desk_on(db) as desk:
        endpoint = await endpoint_at(desk, receiver.url)
        for n in range(n_events):
            await happen(db, f"batch_{n}")
        async with asyncio.timeout(20):
            while not settled(log := await log_of(desk, endpoint)):
                db.skip_to(log)
                await asyncio.sleep(0.01)
        assert len(log) == n_events
        by_id: dict[str, int] = {}
        for message_id in receiver.ids:
            by_id[message_id] = by_id.get(message_id, 0) + 1
        for item in log:
            assert item.event is not None
            assert item.delivery.state == "delivered"
            assert len(item.attempts) == by_id[item.event.id]  # each arrived; each arrival is written down
            assert [a.succeeded for a in item.attempts] == [False] * (len(item.attempts) - 1) + [True]
    await store.close()
