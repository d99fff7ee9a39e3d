"""Events over HTTP: endpoints and subscriptions, the list, the long poll, the stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from emberline.accounts.auth import Authenticator
from emberline.api.app import ApiSettings, App
from emberline.api.http.exchange import RequestLimits
from emberline.jobs.webhooks.service import WebhookService
from emberline.net.http_server import ASGIApp
from emberline.protocol.errors import Unavailable
from emberline.store import Database, open_store
from tests.api.fake_service import MODEL, FakeService, Wire
from tests.faulty_store import FaultyStore
from tests.jobs.webhooks.helpers import SECRET, emit_event, webhook_service
from tests.jobs.webhooks.receiver import receiving
from tests.lazy_modules import cloudflare

SUBSCRIPTIONS = "/client/v4/accounts/acme/event_subscriptions/subscriptions"
LIMITS = RequestLimits(heartbeat_s=0.2, store_retry_s=0.05)
ACME = "/client/v4/accounts/acme/ai/v1"


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[FaultyStore]:
    store = FaultyStore(await open_store(tmp_path / "events.db"))
    yield store
    await store.close()


@pytest.fixture
async def webhooks(db: Database) -> AsyncIterator[WebhookService]:
    async with webhook_service(db) as webhooks:
        yield webhooks


@pytest.fixture
def app(webhooks: WebhookService) -> ASGIApp:
    return App(FakeService(), ApiSettings(auth=Authenticator(SECRET), limits=LIMITS), webhooks)


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8686") as client:
        yield client


async def make(client: httpx.AsyncClient, url: str, base: str = "/v1", **fields: Any) -> dict[str, Any]:
    answer = await client.post(f"{base}/webhook_endpoints", json={"url": url, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def test_endpoint_lifecycle(client: httpx.AsyncClient, db: Database) -> None:
    async with receiving(500, then=200) as receiver:
        made = await make(client, receiver.url, name="mine", events=["batch.completed"], model=MODEL.rpartition("/")[2])
        assert made["object"] == "webhook_endpoint"
        assert (made["events"], made["model"], made["enabled"]) == (["batch.completed"], MODEL, True)
        path = f"/v1/webhook_endpoints/{made['id']}"
        shown = {name: value for name, value in made.items() if name != "secret"}
        assert (await client.get(path)).json() == shown
        assert (await client.get("/v1/webhook_endpoints")).json()["data"] == [shown]

        await emit_event(db, "batch_1", account="local", model=MODEL)
        await receiver.until(1)
        Webhook(made["secret"]).verify(receiver.got[0].body, receiver.got[0].headers)
        (item,) = await _deliveries(client, path, "pending", attempts=1)
        assert item["attempts"][0] | {"started_at": 0, "duration_ms": 0} == {
            "number": 1,
            "outcome": "failed",
            "status": 500,
            "problem": None,
            "started_at": 0,
            "duration_ms": 0,
        }
        replayed = await client.post(f"{path}/replay", json={"delivery_id": item["id"]})
        assert replayed.json() == {"object": "webhook_endpoint.replay", "replayed": 1}
        (item,) = await _deliveries(client, path, "delivered", attempts=2)
        assert item["event"]["type"] == "batch.completed"

        rotated = (await client.post(f"{path}/rotate")).json()
        assert rotated["secret"] != made["secret"]
        changed = await client.post(path, json={"enabled": False, "events": ["*"], "model": ""})
        assert (changed.json()["enabled"], changed.json()["events"], changed.json()["model"]) == (False, ["*"], None)
        refused = await client.post(f"{path}/replay")
        assert (refused.status_code, "disabled" in refused.json()["error"]["message"]) == (400, True)
        assert (await client.delete(path)).json()["deleted"] is True
        for gone in (await client.get(path), await client.delete(path), await client.post(f"{path}/rotate", json={})):
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "webhook_not_found")


async def _deliveries(client: httpx.AsyncClient, path: str, state: str, attempts: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(60):
        while True:
            found: list[dict[str, Any]] = (await client.get(f"{path}/deliveries?state={state}")).json()["data"]
            if found and sum(a["outcome"] != "unknown" for a in found[0]["attempts"]) >= attempts:
                return found
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": "http://10.0.0.1/"}, "url"),
        ({"url": "http://127.0.0.1:1/", "events": []}, "events"),
        ({"url": "http://127.0.0.1:1/", "events": ["batch.exploded"]}, "events"),
        ({"url": "http://127.0.0.1:1/", "name": "x" * 201}, "name"),
        ({"url": "ftp://127.0.0.1/"}, "url"),
    ],
)
async def test_bad_endpoints(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    answer = await client.post("/v1/webhook_endpoints", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    unknown = await client.post("/v1/webhook_endpoints", json={"url": "http://127.0.0.1:1/", "model": "nope"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_endpoint_limit(client: httpx.AsyncClient) -> None:
    for _ in range(100):
        await make(client, "http://127.0.0.1:1/")
    answer = await client.post("/v1/webhook_endpoints", json={"url": "http://127.0.0.1:1/"})
    assert (answer.status_code, "at most 100" in answer.json()["error"]["message"]) == (400, True)
    await make(client, "http://127.0.0.1:1/", ACME)  # another account has its own


async def test_accounts_do_not_see_each_other(client: httpx.AsyncClient, db: Database) -> None:
    made = await make(client, "http://127.0.0.1:1/", ACME)
    await emit_event(db, "batch_1", account="acme")
    assert (await client.get(f"/v1/webhook_endpoints/{made['id']}")).status_code == 404
    assert (await client.get("/v1/events")).json()["data"] == []
    assert len((await client.get(f"{ACME}/events")).json()["data"]) == 1


async def test_cloudflare_s_own_client_manages_subscriptions(app: ASGIApp, db: Database) -> None:
    async with receiving() as receiver, httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http:
        client = cloudflare.AsyncCloudflare(
            api_token="t", base_url="http://127.0.0.1:8686/client/v4", http_client=http, max_retries=0
        )
        subscriptions = client.queues.subscriptions
        made = await subscriptions.create(
            account_id="acme",
            name="done",
            enabled=True,
            source={"type": "workersAi.model", "model_name": MODEL},
            destination={"type": "webhook", "url": receiver.url},  # type: ignore[typeddict-item]
            events=["batch.succeeded"],
        )
        assert made is not None
        assert (made.name, made.events, made.source.ai_model_name) == ("done", ["batch.succeeded"], MODEL)  # type: ignore[union-attr]
        secret = made.destination.secret  # type: ignore[attr-defined]
        await emit_event(db, "request-1", kind="workers_ai", model=MODEL)
        await receiver.until(1)
        told = Webhook(secret).verify(receiver.got[0].body, receiver.got[0].headers)
        assert (told["type"], told["payload"]) == ("cf.workersAi.model.batch.succeeded", {"requestId": "request-1"})
        assert told["metadata"]["eventSubscriptionId"] == made.id

        changed = await subscriptions.update(
            made.id, account_id="acme", enabled=False, events=["batch.failed", "batch.queued"]
        )
        assert changed is not None
        assert (changed.enabled, changed.events) == (False, ["batch.failed", "batch.queued"])
        assert [found.id async for found in subscriptions.list(account_id="acme")] == [made.id]
        assert (await subscriptions.get(made.id, account_id="acme")) is not None
        await subscriptions.delete(made.id, account_id="acme")
        with pytest.raises(cloudflare.NotFoundError):
            await subscriptions.get(made.id, account_id="acme")


@pytest.mark.parametrize(
    "change",
    [
        {"destination": {"type": "queues.queue", "queue_id": "q"}},
        {"destination": {"type": "webhook"}},
        {"destination": {"type": "webhook", "url": "http://192.168.1.1/"}},
        {"source": {"type": "r2"}},
        {"source": {"type": "workersAi.model", "model_name": "@cf/none/such"}},
        {"events": ["batch.exploded"]},
        {"events": []},
    ],
)
async def test_bad_subscriptions(client: httpx.AsyncClient, change: dict[str, Any]) -> None:
    body = {
        "name": "n",
        "source": {"type": "workersAi.model", "model_name": MODEL},
        "destination": {"type": "webhook", "url": "http://127.0.0.1:1/"},
        "events": ["batch.failed"],
    }
    made = await client.post(SUBSCRIPTIONS, json=body)
    assert made.json()["success"]
    for answer in (
        await client.post(SUBSCRIPTIONS, json=body | change),
        await client.patch(f"{SUBSCRIPTIONS}/{made.json()['result']['id']}", json=change),
    ):
        assert answer.status_code == 400
        assert answer.json()["errors"][0]["message"]


# --- without a public address ----------------------------------------------------------------------------------------


async def test_paging(client: httpx.AsyncClient, db: Database) -> None:
    for n in range(5):
        await emit_event(db, f"batch_{n}", account="local")
    seen, after = [], "0"
    while True:
        page = (await client.get(f"/v1/events?after={after}&limit=2")).json()
        seen += [event["data"]["id"] for event in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert seen == [f"batch_{n}" for n in range(5)]
    for bad in ("after=evt_zz", "after=12", "limit=0", "limit=101", "wait=61", "wait=-1", "stream=maybe"):
        assert (await client.get(f"/v1/events?{bad}")).status_code == 400, bad


async def test_long_poll(client: httpx.AsyncClient, db: Database) -> None:
    began = asyncio.get_running_loop().time()
    waiting = asyncio.create_task(client.get("/v1/events?wait=30"))
    await asyncio.sleep(0.1)
    await emit_event(db, "batch_1", account="local")
    (event,) = (await waiting).json()["data"]
    assert asyncio.get_running_loop().time() - began < 25
    assert (event["type"], event["data"], event["object"]) == ("batch.completed", {"id": "batch_1"}, "event")
    assert (await client.get(f"/v1/events?after={event['id']}&wait=1")).json()["data"] == []


async def test_another_process_s_events_are_seen(app: ASGIApp, client: httpx.AsyncClient, tmp_path: Path) -> None:
    other = await open_store(tmp_path / "events.db")  # its notifications do not reach us
    waiting = asyncio.create_task(client.get("/v1/events?wait=30"))
    await asyncio.sleep(0.1)
    await emit_event(other, "batch_1", account="local")
    assert len((await asyncio.wait_for(waiting, 25)).json()["data"]) == 1
    await other.close()


async def test_stream_and_resume(app: ASGIApp, db: Database) -> None:
    await emit_event(db, "batch_0", account="local")  # before: not told to who names no event
    first = Wire(app, "/v1/events", b"", "GET", accept="text/event-stream")
    await first.until_sent(b"retry: ")
    await emit_event(db, "batch_1", account="local")
    await first.until_sent(b"batch_1")
    await first.until_sent(b": heartbeat")
    first.leave()
    await first.task
    assert b"batch_0" not in first.body
    last_id = first.body.partition(b"id: ")[2].partition(b"\n")[0].decode()
    await emit_event(db, "batch_2", account="local")
    again = Wire(app, "/v1/events", b"", "GET", accept="text/event-stream", last_event_id=last_id)
    await again.until_sent(b"batch_2")
    assert b"batch_1" not in again.body
    data = again.body.partition(b"data: ")[2].partition(b"\n")[0]
    assert json.loads(data)["data"] == {"id": "batch_2"}
    again.leave()
    await again.task


async def test_a_stream_ends_with_the_server(app: ASGIApp, webhooks: WebhookService) -> None:
    wire = Wire(app, "/v1/events", b"", "GET", accept="text/event-stream")
    await wire.until_sent(b"retry: ")
    webhooks.feed.end()
    await asyncio.wait_for(wire.task, 60)
    assert not wire.sent[-1].get("more_body")


async def test_a_stream_survives_a_store_outage(app: ASGIApp, db: FaultyStore) -> None:
    wire = Wire(app, "/v1/events", b"", "GET", accept="text/event-stream")
    await wire.until_sent(b"retry: ")

    async def away(name: str, asked: object) -> None:
        if name == "read":
            raise Unavailable("the database cannot be reached")

    async def heartbeats(n: int) -> None:
        n += wire.body.count(b": heartbeat")
        async with asyncio.timeout(60):
            while wire.body.count(b": heartbeat") < n:
                await asyncio.sleep(0.01)

    db.before = away
    await heartbeats(2)  # a read that had begun has ended, and another one was refused
    await emit_event(db, "batch_1", account="local")
    await heartbeats(5)
    assert b"batch_1" not in wire.body
    db.before = None
    await wire.until_sent(b"batch_1")
    wire.leave()
    await wire.task
