"""Anthropic's message batches over HTTP."""

from typing import Any

import httpx
import pytest

from emberline.api.batch_loader import BatchService
from emberline.protocol.errors import Unavailable
from emberline.protocol.request import GenerateRequest
from tests.api.batch_fixtures import lines_in, run_all, run_one, until
from tests.api.fake_service import MODEL, FakeService, agent, client_of, hello

BASES = ["/v1", "/client/v4/accounts/acme/ai/v1", "/client/v4/accounts/acme/ai/v1/v1"]


@pytest.fixture
async def client(service: FakeService, batches: BatchService) -> Any:
    async with client_of(service, batches=batches) as client:
        yield client


def request(custom_id: str, **params: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    return {"custom_id": custom_id, "params": asked | params}


async def ended(client: httpx.AsyncClient, batches: BatchService, service: FakeService, path: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        await run_all(batches.queue, service)
        batch = (await client.get(path)).json()
        return batch if batch["processing_status"] == "ended" else None

    return dict(await until(look))


@pytest.mark.parametrize("base", BASES)
async def test_a_batch(client: httpx.AsyncClient, batches: BatchService, service: FakeService, base: str) -> None:
    path = f"{base}/messages/batches"
    service.script = agent
    asked = [
        request("a", tools=[{"name": "weather", "input_schema": {"type": "object"}}]),
        request("b", model="nobody"),
        request("c", max_tokens="many"),
        request("d", stream=True),
    ]
    made = (await client.post(path, json={"requests": asked})).json()
    assert made["id"].startswith("msgbatch_")
    assert (made["type"], made["processing_status"]) == ("message_batch", "in_progress")
    assert made["request_counts"] == {"processing": 4, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    assert (made["results_url"], made["ended_at"], made["archived_at"]) == (None, None, None)
    early = await client.get(f"{path}/{made['id']}/results")
    assert (early.status_code, early.json()["error"]["type"]) == (400, "invalid_request_error")
    batch = await ended(client, batches, service, f"{path}/{made['id']}")
    assert batch["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 3, "canceled": 0, "expired": 0}
    assert batch["results_url"] == f"http://127.0.0.1:8686{path}/{made['id']}/results"
    assert batch["created_at"] < batch["ended_at"] < batch["expires_at"]
    results = {line["custom_id"]: line["result"] for line in lines_in(await client.get(batch["results_url"]))}
    message = results["a"]["message"]
    assert (results["a"]["type"], message["type"], message["stop_reason"]) == ("succeeded", "message", "tool_use")
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["model"] == MODEL
    for name, kind, said in (
        ("b", "not_found_error", "nobody"),
        ("c", "invalid_request_error", "max_tokens"),
        ("d", "invalid_request_error", "stream"),
    ):
        assert (results[name]["type"], results[name]["error"]["type"]) == ("errored", "error")
        assert results[name]["error"]["error"]["type"] == kind
        assert said in results[name]["error"]["error"]["message"]
    gone = await client.delete(f"{path}/{made['id']}")
    assert gone.json() == {"id": made["id"], "type": "message_batch_deleted"}
    assert (await client.get(f"{path}/{made['id']}")).json()["error"]["type"] == "not_found_error"
    assert (await client.get(batch["results_url"])).status_code == 404
    files = await client.get("/client/v4/accounts/acme/ai/v1/files")
    assert files.json()["data"] == []  # the stored input is not listed as a file


async def test_multiline_json_is_stored_as_one_line(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService
) -> None:
    body = b"""{"requests": [
        {"custom_id": "a", "params": {"model": "%s",
            "messages": [{"role": "user", "content": "two\\nlines"}],\r\n "max_tokens": 5.0}}
    ]}""" % MODEL.encode()
    made = (await client.post("/v1/messages/batches", content=body)).json()
    await ended(client, batches, service, f"/v1/messages/batches/{made['id']}")
    assert service.requests[0].messages[0].content == "two\nlines"
    assert service.requests[0].sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "`requests` must have at least 1 entry"),
        ([request("a"), request("a")], "requests.1.custom_id"),
        ([request("a"), {"custom_id": "b"}], "requests.1.params"),
        ([{"params": {}}], "requests.0.custom_id"),
        ([request("not valid!")], "requests.0.custom_id"),
        (["x"], "requests.0"),
    ],
)
async def test_bad_batches(client: httpx.AsyncClient, requests: list[Any], said: str) -> None:
    answer = await client.post("/v1/messages/batches", json={"requests": requests})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert (await client.get("/v1/messages/batches")).json()["data"] == []


async def test_cancel_and_failures(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    async def breaks(request: GenerateRequest) -> Any:
        if request.messages[0].content == "break":
            raise Unavailable("the engine went away")
        async for event in hello(request):
            yield event

    service.script = breaks
    path = "/v1/messages/batches"
    asked = [request("a", messages=[{"role": "user", "content": "break"}]), request("b"), request("c")]
    made = (await client.post(path, json={"requests": asked})).json()

    async def two_done() -> bool:
        leases = await batches.queue.claim("test-puller", MODEL, 2)
        for lease in leases:
            await run_one(batches.queue, service, lease)
        return bool(leases)

    await until(two_done)
    running = await client.delete(f"{path}/{made['id']}")
    assert running.status_code == 409
    cancelled = (await client.post(f"{path}/{made['id']}/cancel")).json()
    assert cancelled["cancel_initiated_at"]
    batch = await ended(client, batches, service, f"{path}/{made['id']}")
    assert batch["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 1, "expired": 0}
    results = lines_in(await client.get(f"{path}/{made['id']}/results"))
    assert sorted(line["result"]["type"] for line in results) == ["canceled", "errored", "succeeded"]
    errored = next(line["result"] for line in results if line["result"]["type"] == "errored")
    assert errored["error"]["error"] == {"type": "overloaded_error", "message": "the engine went away"}


async def test_lists(client: httpx.AsyncClient) -> None:
    path = "/v1/messages/batches"
    made = [(await client.post(path, json={"requests": [request("a")]})).json()["id"] for _ in range(4)]
    newest = made[::-1]
    first = (await client.get(path, params={"limit": 3})).json()
    assert ([row["id"] for row in first["data"]], first["has_more"]) == (newest[:3], True)
    assert (first["first_id"], first["last_id"]) == (newest[0], newest[2])
    rest = (await client.get(path, params={"after_id": first["last_id"]})).json()
    assert ([row["id"] for row in rest["data"]], rest["has_more"]) == (newest[3:], False)
    back = (await client.get(path, params={"before_id": newest[2], "limit": 1})).json()
    assert ([row["id"] for row in back["data"]], back["has_more"]) == ([newest[1]], True)
    missing = await client.get(path, params={"after_id": "msgbatch_0"})
    assert missing.status_code == 404


async def test_idempotency(client: httpx.AsyncClient) -> None:
    path, headers = "/v1/messages/batches", {"idempotency-key": "k"}
    one = await client.post(path, json={"requests": [request("a")]}, headers=headers)
    two = await client.post(path, json={"requests": [request("a")]}, headers=headers)
    assert one.content == two.content
    other = await client.post(path, json={"requests": [request("b")]}, headers=headers)
    assert other.status_code == 422
    assert len((await client.get(path)).json()["data"]) == 1
