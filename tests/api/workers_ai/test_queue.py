"""Workers AI's queue over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.api.batch_loader import BatchService
from emberline.protocol.events import ChoiceDone, TextDelta
from emberline.store import open_store
from tests.api.batch_fixtures import open_batch_service, run_all, until
from tests.api.fake_service import MODEL, FakeService, client_of, says
from tests.jobs.webhooks.helpers import webhook_service

RUN = f"/client/v4/accounts/acme/ai/run/{MODEL}"
UNIVERSAL = "/client/v4/accounts/acme/ai/run"


@pytest.fixture
async def client(service: FakeService, batches: BatchService) -> Any:
    async with client_of(service, batches=batches) as client:
        yield client


async def submitted(client: httpx.AsyncClient, body: Any, url: str = f"{RUN}?queueRequest=true", **kw: Any) -> Any:
    answer = await client.post(url, json=body, **kw)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cf-ai-req-id"]
    told = answer.json()
    assert (told["success"], told["errors"], told["messages"]) == (True, [], [])
    assert told["result"]["status"] == "queued"
    return told["result"]


async def polled(client: httpx.AsyncClient, request_id: str, url: str = RUN) -> Any:
    answer = await client.post(url, json={"request_id": request_id})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()["result"]


async def done(client: httpx.AsyncClient, batches: BatchService, service: FakeService, request_id: str) -> Any:
    async def look() -> Any:
        await run_all(batches.queue, service)
        result = await polled(client, request_id)
        return result if "responses" in result else None

    return await until(look)


@pytest.mark.parametrize("query", ["", "?queueRequest=true"])
async def test_requests(client: httpx.AsyncClient, batches: BatchService, service: FakeService, query: str) -> None:
    body = {
        "requests": [
            {"prompt": "Hi", "external_reference": "ref-1"},
            {"messages": [{"role": "user", "content": "Hi"}], "external_reference": "ref-2"},
            {"prompt": "Hi", "max_tokens": -1, "external_reference": "ref-3"},
            {"prompt": "Hi", "stream": True},
            "nonsense",
        ]
    }
    made = await submitted(client, body, RUN + query)
    assert set(made) == {"status", "request_id", "model"}
    assert made["model"] == MODEL

    async def loaded() -> bool:
        return (await batches.queue.batch("acme", made["request_id"])).status == "in_progress"

    await until(loaded)
    waits = await polled(client, made["request_id"], RUN + query)
    assert {key: waits[key] for key in ("request_id", "position")} == {
        "request_id": made["request_id"],
        "position": 0,
    }
    assert waits["status"] == "running"  # the bad ones have ended
    result = await done(client, batches, service, made["request_id"])
    assert result["usage"] == {"prompt_tokens": 24, "completion_tokens": 6, "total_tokens": 30}
    first, second, *bad = result["responses"]
    assert first["result"]["response"] == "Hello!"
    assert first["result"]["usage"]["total_tokens"] == 15
    assert {key: first[key] for key in ("id", "success", "external_reference")} == {
        "id": 0,
        "success": True,
        "external_reference": "ref-1",
    }
    assert (second["id"], second["external_reference"]) == (1, "ref-2")
    for number, said in ((0, "max_tokens"), (1, "stream"), (2, "must be an object")):
        assert (bad[number]["id"], bad[number]["success"]) == (number + 2, False)
        assert bad[number]["error"]["code"] == 5006
        assert said in bad[number]["error"]["message"]
        assert "result" not in bad[number]
    assert bad[0]["external_reference"] == "ref-3"
    assert "external_reference" not in bad[1]


async def test_queued_then_running(client: httpx.AsyncClient, batches: BatchService) -> None:
    made = await submitted(client, {"requests": [{"prompt": "Hi"}]})
    assert (await polled(client, made["request_id"]))["status"] == "queued"

    async def claimed() -> Any:
        return await batches.queue.claim("w", MODEL, 1)

    await until(claimed)
    assert (await polled(client, made["request_id"]))["status"] == "running"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (f"{RUN}?queueRequest=true", {"prompt": "Hi", "external_reference": "r"}),
        (RUN, {"prompt": "Hi", "options": {"queueRequest": True}, "external_reference": "r"}),
        (f"{UNIVERSAL}?queueRequest=true", {"model": MODEL, "input": {"prompt": "Hi", "external_reference": "r"}}),
        (UNIVERSAL, {"model": MODEL, "input": {"requests": [{"prompt": "Hi", "external_reference": "r"}]}}),
    ],
)
async def test_one_input(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService, url: str, body: Any
) -> None:
    made = await submitted(client, body, url)
    (one,) = (await done(client, batches, service, made["request_id"]))["responses"]
    assert (one["id"], one["result"]["response"], one["external_reference"]) == (0, "Hello!", "r")


async def test_json_mode(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    """Results are parsed in JSON mode, and an error if the JSON was truncated."""
    service.script = says(TextDelta(0, '{"a":1}'), ChoiceDone(0, "stop"))
    asked = {"prompt": "Hi", "response_format": {"type": "json_object"}}
    made = await submitted(client, {"requests": [asked]})
    (one,) = (await done(client, batches, service, made["request_id"]))["responses"]
    assert one["result"]["response"] == {"a": 1}
    service.script = says(TextDelta(0, '{"a":'), ChoiceDone(0, "length"))
    made = await submitted(client, {"requests": [asked]})
    (one,) = (await done(client, batches, service, made["request_id"]))["responses"]
    assert (one["success"], one["error"]["code"]) == (False, 5024)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"requests": []}, 400, 5006),
        ({"requests": [{"prompt": "x"}], "prompt": "y"}, 400, 5006),
        ({"prompt": "x", "stream": True}, 400, 5006),
        ({}, 400, 5006),
        ({"request_id": "nonsense"}, 404, 7000),
        ({"request_id": "00000000-0000-4000-8000-000000000000"}, 404, 7000),
    ],
)
async def test_bad_input(client: httpx.AsyncClient, body: Any, status: int, code: int) -> None:
    answer = await client.post(f"{RUN}?queueRequest=true", json=body)
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (status, code), answer.text


async def test_who_and_what(client: httpx.AsyncClient) -> None:
    answer = await client.post("/client/v4/accounts/acme/ai/run/@cf/no/such?queueRequest=true", json={"prompt": "x"})
    assert answer.json()["errors"][0]["code"] == 5007
    answer = await client.post(f"{RUN}?queueRequest=maybe", json={"prompt": "x"})
    assert answer.status_code == 400
    made = await submitted(client, {"prompt": "x"})
    other = await client.post(RUN.replace("acme", "other"), json={"request_id": made["request_id"]})
    assert other.status_code == 404


async def test_idempotency(client: httpx.AsyncClient) -> None:
    key = {"idempotency-key": "k"}
    one = await submitted(client, {"prompt": "x"}, headers=key)
    assert await submitted(client, {"prompt": "x"}, headers=key) == one
    answer = await client.post(f"{RUN}?queueRequest=true", json={"prompt": "y"}, headers=key)
    assert answer.status_code == 422


async def test_cancelled_jobs_are_reported(client: httpx.AsyncClient, batches: BatchService) -> None:
    made = await submitted(client, {"requests": [{"prompt": "x", "external_reference": "r"}, {"prompt": "y"}]})
    while (await batches.queue.batch("acme", made["request_id"])).status == "validating":
        await asyncio.sleep(0.01)
    await batches.queue.cancel("acme", made["request_id"])
    result = await polled(client, made["request_id"])
    assert [(one["success"], one["error"]["code"]) for one in result["responses"]] == [(False, 3008)] * 2
    assert result["responses"][0]["external_reference"] == "r"


async def test_events_are_published(service: FakeService, tmp_path: Path) -> None:
    store = await open_store(tmp_path / "both.db")
    async with (
        open_batch_service(store, service, tmp_path) as batches,
        webhook_service(store, deliver=False) as events,
        client_of(service, webhooks=events, batches=batches) as client,
    ):
        made = await submitted(client, {"requests": [{"prompt": "x"}]})
        await done(client, batches, service, made["request_id"])
        listed = (await client.get("/client/v4/accounts/acme/ai/v1/events")).json()["data"]
        assert [event["type"] for event in listed] == [
            "cf.workersAi.model.batch.queued",
            "cf.workersAi.model.batch.succeeded",
        ]
        assert listed[1]["data"]["payload"] == {"requestId": made["request_id"]}
        assert listed[1]["data"]["source"]["modelName"] == MODEL
    await store.close()
