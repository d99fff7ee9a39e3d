"""Deliveries to a real receiver: its possible responses, and the delivery log."""

import asyncio
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook

from emberline.jobs.webhooks.deliverer import DELAYS_S, MAX_PER_ENDPOINT, account_room, next_delay_s
from emberline.jobs.webhooks.deliveries import LEASE_S, DeliveryRecord
from emberline.jobs.webhooks.webhook_store import EndpointUpdate
from emberline.protocol.errors import BadInput
from emberline.store import open_store
from tests.databases import mostly_sqlite, on_both_databases
from tests.examples import n_examples
from tests.jobs.webhooks.helpers import (
    ShiftedClock,
    create_endpoint,
    delivery_records,
    emit_event,
    wait_for_counts,
    wait_for_records,
    webhook_service,
)
from tests.jobs.webhooks.receiver import CLOSE, CUT, ENDLESS, GARBAGE, HANG, Instruction, receiving

database = mostly_sqlite
RETRY_LATER = b"HTTP/1.1 503 Busy\r\nretry-after: 120\r\ncontent-length: 0\r\n\r\n"
RETRY_SOON = b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


def settled(log: list[DeliveryRecord]) -> bool:
    return bool(log) and all(item.delivery.state != "pending" for item in log)


def attempts_of(item: DeliveryRecord) -> int:
    """The number of logged attempts."""
    return sum(bool(a.status or a.problem) for a in item.attempts)


def attempted(n: int) -> Callable[[list[DeliveryRecord]], bool]:
    """The first delivery has `n` logged attempts."""
    return lambda log: bool(log) and attempts_of(log[0]) >= n


@on_both_databases
async def test_delivered_and_verified(db: ShiftedClock) -> None:
    async with receiving() as receiver, webhook_service(db) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url + "?a=1")
        await emit_event(db, "batch_1")
        (item,) = await wait_for_records(webhooks, endpoint, settled)
        (got,) = receiver.got
        assert got.path == "/hook?a=1"
        assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
        assert Webhook(webhooks.endpoints.secret_of(endpoint)).verify(got.body, got.headers)["data"] == {
            "id": "batch_1"
        }
        assert item.event is not None
        assert got.headers["webhook-id"] == item.event.id == json.loads(got.body)["id"]
        assert (item.delivery.state, [a.status for a in item.attempts]) == ("delivered", [200])
        await wait_for_counts(webhooks, delivered=1)


@on_both_databases
async def test_workers_ai_delivery_form(db: ShiftedClock) -> None:
    async with receiving() as receiver, webhook_service(db) as webhooks:
        endpoint = await webhooks.endpoints.create(
            "acme", "workers_ai", EndpointUpdate(url=receiver.url, model="@cf/a/b")
        )
        await emit_event(db, "r1", "failed", kind="workers_ai", model="@cf/a/b")
        await emit_event(db, "r2", "failed", kind="workers_ai", model="@cf/a/other")
        await emit_event(db, "r3", "queued", kind="workers_ai", model="@cf/a/b")
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
        (HANG, "no answer within 0.2 s"),
        (CLOSE, "the connection closed before an answer came"),
        (GARBAGE, "the answer is not HTTP/1.1"),
        (ENDLESS, "the answer's head is too large"),
        (b"HTTP/1.1 200", "the connection closed before an answer came"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, "the answer's head is too large"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, "the connection closed before an answer came"),
    ],
)
async def test_failed_attempts_are_retried(db: ShiftedClock, answer: Instruction, problem: str) -> None:
    limit_s = 0.2 if answer == HANG else 30.0
    async with receiving(answer, then=204) as receiver:
        async with webhook_service(db, timeout_s=limit_s) as webhooks:
            endpoint = await create_endpoint(webhooks, receiver.url)
            await emit_event(db, "batch_1")
            (item,) = await wait_for_records(webhooks, endpoint, attempted(1))
        assert (item.delivery.state, item.attempts[0].problem) == ("pending", problem)
        assert 4 < (item.delivery.ready_us - db.now_us()) / 1e6 <= 5.5
        assert (await webhooks.endpoints.get("acme", endpoint.id)).failing_since_us is not None
        async with webhook_service(db) as webhooks:
            await db.advance(6)
            (item,) = await wait_for_records(webhooks, endpoint, settled)
        assert (item.delivery.state, [a.status for a in item.attempts][1:]) == ("delivered", [204])
        assert len(set(receiver.ids)) == 1
        assert len(receiver.got) == 2
        assert (await webhooks.endpoints.get("acme", endpoint.id)).failing_since_us is None


@pytest.mark.parametrize(
    "answer", [CUT, b"HTTP/1.1 103 Hints\r\n\r\nHTTP/1.0 202 Taken\r\n\r\n", b"HTTP/1.1 200\r\n\r\n"]
)
async def test_a_2xx_status_counts_whatever_follows(db: ShiftedClock, answer: Instruction) -> None:
    async with receiving(answer, then=500) as receiver, webhook_service(db) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        await emit_event(db, "batch_1")
        (item,) = await wait_for_records(webhooks, endpoint, settled)
        assert (item.delivery.state, len(receiver.got)) == ("delivered", 1)


async def test_connection_refused(db: ShiftedClock) -> None:
    with socket.socket() as deaf:  # it has the port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/hook"
        async with webhook_service(db) as webhooks:
            endpoint = await create_endpoint(webhooks, url)
            await emit_event(db, "batch_1")
            (item,) = await wait_for_records(webhooks, endpoint, attempted(1))
            assert item.attempts[0].problem.startswith("cannot connect: ")


@pytest.mark.parametrize(("answer", "least_s", "most_s"), [(RETRY_LATER, 119, 121), (RETRY_SOON, 4.5, 5.5)])
async def test_retry_after_is_respected(db: ShiftedClock, answer: bytes, least_s: float, most_s: float) -> None:
    async with receiving(answer) as receiver, webhook_service(db) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        await emit_event(db, "batch_1")
        (item,) = await wait_for_records(webhooks, endpoint, attempted(1))
        assert least_s < (item.delivery.ready_us - db.now_us()) / 1e6 < most_s


@on_both_databases
async def test_retry_schedule_until_exhausted_then_replay(db: ShiftedClock) -> None:
    async with (
        receiving(*[500] * len(DELAYS_S), then=200) as receiver,
        webhook_service(db, disable_after_days=30) as webhooks,
    ):
        endpoint = await create_endpoint(webhooks, receiver.url)
        began_us = db.now_us()
        await emit_event(db, "batch_1")
        for n in range(1, len(DELAYS_S)):
            (item,) = await wait_for_records(webhooks, endpoint, attempted(n))
            wait_s = (item.delivery.ready_us - db.now_us()) / 1e6
            assert (await webhooks.endpoints.get("acme", endpoint.id)).failing_since_us == began_us
            assert DELAYS_S[n] - 1 < wait_s < DELAYS_S[n] * 1.1 + 0.01
            await db.advance(wait_s + 0.01)
        (item,) = await wait_for_records(webhooks, endpoint, settled)
        assert (item.delivery.state, len(item.attempts)) == ("failed", 10)
        assert 75 * 3600 < (db.now_us() - began_us) / 1e6 < 85 * 3600
        await wait_for_counts(webhooks, failed=10, exhausted=1, delivered=0, disabled=0)

        assert await webhooks.deliveries.replay(endpoint) == 1
        (item,) = await wait_for_records(webhooks, endpoint, settled)
        assert (item.delivery.state, len(item.attempts), len(set(receiver.ids))) == ("delivered", 11, 1)
        assert (await webhooks.endpoints.get("acme", endpoint.id)).failing_since_us is None
        assert len(receiver.got) == 11, "nothing was sent after the last attempt"
        assert await webhooks.deliveries.replay(endpoint) == 0
        assert await webhooks.deliveries.replay(endpoint, item.delivery.id) == 1
        await receiver.until(12)


def test_retry_delays() -> None:
    assert [next_delay_s(n, None, lambda: 0.0) for n in range(1, 11)] == [*DELAYS_S[1:], None]
    assert next_delay_s(1, None, lambda: 1.0) == pytest.approx(5.5)
    assert next_delay_s(1, 1e9, lambda: 0.0) == 24 * 3600


@on_both_databases
async def test_410_disables_the_endpoint(db: ShiftedClock) -> None:
    async with receiving(500, 410) as receiver, webhook_service(db) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        await emit_event(db, "batch_1")
        await wait_for_records(webhooks, endpoint, attempted(1))
        await emit_event(db, "batch_2")
        log = await wait_for_records(webhooks, endpoint, settled)
        assert [item.delivery.state for item in log] == ["failed", "failed"]
        found = await webhooks.endpoints.get("acme", endpoint.id)
        assert (found.enabled, found.disabled_reason) == (0, "it answered 410 Gone")
        await emit_event(db, "batch_3")  # while disabled: nothing to deliver
        assert len(await delivery_records(webhooks, endpoint)) == 2
        with pytest.raises(BadInput, match="disabled"):
            await webhooks.deliveries.replay(found)
        enabled = await webhooks.endpoints.update("acme", endpoint.id, EndpointUpdate(enabled=True))
        assert (enabled.enabled, enabled.disabled_reason) == (1, "")
        assert await webhooks.deliveries.replay(enabled) == 2
        log = await wait_for_records(webhooks, endpoint, settled)
        assert [item.delivery.state for item in log] == ["delivered", "delivered"]


@on_both_databases
async def test_failing_for_days_disables_the_endpoint(db: ShiftedClock) -> None:
    async with receiving(then=500) as receiver, webhook_service(db, disable_after_days=2) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        await emit_event(db, "batch_1")
        await wait_for_records(webhooks, endpoint, attempted(1))
        await db.advance(1.9 * 86400)
        await wait_for_records(webhooks, endpoint, attempted(2))
        assert (await webhooks.endpoints.get("acme", endpoint.id)).enabled
        await db.advance(0.2 * 86400)
        await wait_for_records(webhooks, endpoint, settled)
        found = await webhooks.endpoints.get("acme", endpoint.id)
        assert (found.enabled, found.disabled_reason) == (0, "every delivery has failed for 2 days")
        await wait_for_counts(webhooks, disabled=1)


async def test_dns_rebinding_is_blocked(db: ShiftedClock) -> None:
    """The name was public when the endpoint was created and then resolves to loopback: nothing is sent there."""
    now: Sequence[str] = ("8.8.8.8",)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return now

    async with receiving() as receiver, webhook_service(db, allow=(), resolve=resolve) as webhooks:
        endpoint = await create_endpoint(webhooks, f"https://rebound.example:{receiver.port}/hook")
        now = ("127.0.0.1",)
        await emit_event(db, "batch_1")
        (item,) = await wait_for_records(webhooks, endpoint, attempted(1))
        assert "inside the network" in item.attempts[0].problem
        assert not receiver.got
        with pytest.raises(BadInput, match="inside the network"):
            await create_endpoint(webhooks, receiver.url)


async def test_the_checked_address_is_connected_to(db: ShiftedClock) -> None:
    """The name is resolved once for an attempt; its host stays in the request."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"]

    async with receiving() as receiver, webhook_service(db, resolve=resolve) as webhooks:
        await create_endpoint(webhooks, f"http://no-such-name.invalid:{receiver.port}/hook")
        await emit_event(db, "batch_1")
        await receiver.until(1)
        assert receiver.got[0].headers["host"] == f"no-such-name.invalid:{receiver.port}"
        assert asked == ["no-such-name.invalid"] * 2  # at creation, at the attempt


@on_both_databases
async def test_secret_rotation(db: ShiftedClock) -> None:
    async with receiving() as receiver, webhook_service(db) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        old = Webhook(webhooks.endpoints.secret_of(endpoint))
        rotated = await webhooks.endpoints.rotate("acme", endpoint.id, overlap_s=3600)
        new = Webhook(webhooks.endpoints.secret_of(rotated))
        await emit_event(db, "batch_1")
        await receiver.until(1)
        for webhook in (old, new):
            webhook.verify(receiver.got[0].body, receiver.got[0].headers)
        await db.advance(3601)
        await emit_event(db, "batch_2")
        await receiver.until(2)
        new.verify(receiver.got[1].body, receiver.got[1].headers)
        assert len(receiver.got[1].headers["webhook-signature"].split()) == 1


async def test_a_hanging_endpoint_does_not_block_others(db: ShiftedClock) -> None:
    async with webhook_service(db, timeout_s=59) as webhooks, receiving(then=HANG) as stuck, receiving() as well:
        await create_endpoint(webhooks, stuck.url)
        endpoint = await create_endpoint(webhooks, well.url)
        for n in range(30):
            await emit_event(db, f"batch_{n}")
        log = await wait_for_records(webhooks, endpoint, lambda log: len(log) == 30 and settled(log))
        assert {item.delivery.state for item in log} == {"delivered"}
        await stuck.until(MAX_PER_ENDPOINT)
        assert len(stuck.got) == MAX_PER_ENDPOINT


@on_both_databases
async def test_hanging_endpoints_of_one_account_leave_attempts_for_others(db: ShiftedClock) -> None:
    settings = {"timeout_s": 59, "max_in_flight": 8}
    async with webhook_service(db, **settings) as webhooks, receiving(then=HANG) as stuck, receiving() as well:
        for _ in range(3):
            await create_endpoint(webhooks, stuck.url, account="mallory")
        for n in range(MAX_PER_ENDPOINT):
            await emit_event(db, f"batch_{n}", account="mallory")
        await stuck.until(6)
        endpoint = await create_endpoint(webhooks, well.url, account="acme")
        for n in range(5):
            await emit_event(db, f"batch_{n}", account="acme")
        log = await wait_for_records(webhooks, endpoint, lambda log: len(log) == 5 and settled(log))
        assert {item.delivery.state for item in log} == {"delivered"}
        assert len(stuck.got) == 6  # three for each of the two that stay free


async def test_deliveries_that_wait_for_an_attempt_to_end_are_not_polled(db: ShiftedClock) -> None:
    class Counting(ShiftedClock):
        n_reads = 0

        def read(self, *query: Any) -> Any:
            self.n_reads += 1
            return self._db.read(*query)

    counted = Counting(db)
    async with webhook_service(counted, timeout_s=59, poll_s=60) as webhooks, receiving(then=HANG) as stuck:
        await create_endpoint(webhooks, stuck.url)
        for n in range(MAX_PER_ENDPOINT + 1):
            await emit_event(db, f"batch_{n}")
        await stuck.until(MAX_PER_ENDPOINT)
        n_before = counted.n_reads
        await asyncio.sleep(0.3)
        assert counted.n_reads - n_before <= 8  # the end of one look, and another; polling made twelve reads


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 100), st.booleans()), max_size=60))
def test_no_account_takes_every_attempt(steps: list[tuple[int, int, bool]]) -> None:
    """An account holds at most 3/4 of the attempts, however the others come and go; with none, it gets a free one."""
    total, held = 64, [0] * 5
    for account, n, ends in steps:
        if ends:
            held[account] -= min(n, held[account])
            continue
        free = total - sum(held)
        room = account_room(held[account], free)
        assert held[account] or room >= min(free, 1)
        held[account] += min(n, room)
        assert held[account] <= 48
        assert sum(held) <= total


@on_both_databases
async def test_several_deliverers_send_each_delivery_once(db: ShiftedClock) -> None:
    async with receiving() as receiver, webhook_service(db) as webhooks, webhook_service(db), webhook_service(db):
        endpoint = await create_endpoint(webhooks, receiver.url)
        await asyncio.gather(*(emit_event(db, f"batch_{n}") for n in range(40)))
        await wait_for_records(webhooks, endpoint, lambda log: len(log) == 40 and settled(log))
        assert len(receiver.got) == 40
        assert len(set(receiver.ids)) == 40


@on_both_databases
async def test_an_expired_lease_makes_the_delivery_claimable(db: ShiftedClock) -> None:
    async with receiving() as receiver, webhook_service(db, deliver=False) as dead:
        endpoint = await create_endpoint(dead, receiver.url)
        await emit_event(db, "batch_1")
        (claimed,) = await dead.deliveries.claim(endpoint.id, 1)  # and then its process dies
        async with webhook_service(db) as webhooks:
            await emit_event(db, "batch_2")
            log = await wait_for_records(webhooks, endpoint, lambda log: [attempts_of(one) for one in log] == [0, 1])
            assert receiver.ids == [item.event.id for item in log[1:] if item.event]
            await db.advance(LEASE_S + 1)
            item, _ = await wait_for_records(webhooks, endpoint, settled)
            assert [(a.number, a.status, a.problem) for a in item.attempts] == [(1, None, ""), (2, 200, "")]
            # The dead one comes back and says it failed: it is no longer asked.
            assert not await dead.deliveries.failed(claimed, item.attempts[0], None)
            assert (await delivery_records(webhooks, endpoint))[0].delivery.state == "delivered"


@on_both_databases
async def test_only_subscribed_types_are_delivered(db: ShiftedClock) -> None:
    async with receiving() as receiver, webhook_service(db, deliver=False) as webhooks:
        some = await create_endpoint(webhooks, receiver.url, ["batch.failed", "batch.expired"])
        theirs = await create_endpoint(webhooks, receiver.url, account="other")
        for status in ("completed", "failed", "cancelled", "expired"):
            await emit_event(db, f"batch_{status}", status)
        assert [item.event.type for item in await delivery_records(webhooks, some) if item.event] == [
            "batch.failed",
            "batch.expired",
        ]
        assert await delivery_records(webhooks, theirs) == []


@on_both_databases
async def test_disabling_and_deleting_an_endpoint(db: ShiftedClock) -> None:
    async with receiving() as receiver, webhook_service(db, deliver=False) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        await emit_event(db, "batch_1")
        await webhooks.endpoints.update("acme", endpoint.id, EndpointUpdate(enabled=False))
        (item,) = await delivery_records(webhooks, endpoint)
        assert item.delivery.state == "failed"
        await webhooks.endpoints.delete("acme", endpoint.id)
        assert await db.read("SELECT * FROM deliveries") == []


@on_both_databases
async def test_retention(db: ShiftedClock) -> None:
    async with receiving() as receiver, webhook_service(db, deliver=False, retention_days=10) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        await emit_event(db, "batch_1")
        await db.advance(9 * 86400)
        await emit_event(db, "batch_2")
        await db.advance(2 * 86400)
        await webhooks.purge_expired()
        assert [item.event.subject for item in await delivery_records(webhooks, endpoint) if item.event] == ["batch_2"]
        (event,) = await webhooks.feed.page("acme", 0)
        assert (event.subject, event.number) == ("batch_2", 2)


ANSWERS = st.sampled_from([200, 204, 500, 302, 429, CLOSE, CUT, GARBAGE, RETRY_SOON])


@given(answers=st.lists(ANSWERS, max_size=8), n_events=st.integers(1, 5))
@settings(max_examples=n_examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_every_event_is_delivered_and_every_attempt_logged(
    tmp_path_factory: pytest.TempPathFactory, answers: list[Instruction], n_events: int
) -> None:
    store = await open_store(tmp_path_factory.mktemp("events") / "events.db")
    db = ShiftedClock(store)
    async with receiving(*answers) as receiver, webhook_service(db) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        for n in range(n_events):
            await emit_event(db, f"batch_{n}")
        async with asyncio.timeout(60):
            while not settled(log := await delivery_records(webhooks, endpoint)):
                await db.skip_to(log)
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
