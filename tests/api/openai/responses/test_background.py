"""Background responses: retrieved, streamed from any sequence number, cancelled, continued."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.api.batch_loader import BatchService
from emberline.api.http.exchange import RequestLimits
from emberline.jobs.batches.batch import NewBatch
from emberline.protocol.complete_response import Answer, AnswerChoice, TextPart
from emberline.protocol.errors import BadInput, Unavailable
from emberline.protocol.events import ChoiceDone, Started, TextDelta, Usage
from emberline.protocol.request import GenerateRequest, Message, Priority
from emberline.service.responses import DatabaseResponses
from emberline.store import SqliteStore
from tests.api.batch_fixtures import run_all, run_one
from tests.api.fake_service import AGENT, MODEL, FakeService, Wire, agent, app_of, client_of, says
from tests.faulty_queue import FaultyQueue

ASK: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True}


@pytest.fixture
async def client(service: FakeService, batches: BatchService) -> Any:
    async with client_of(service, batches=batches) as client:
        yield client


async def made(client: httpx.AsyncClient, base: str = "/v1", **body: Any) -> dict[str, Any]:
    answer = await client.post(f"{base}/responses", json=ASK | body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_in(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            event = json.loads(lines["data"])
            assert event["type"] == lines["event"]
            found.append(event)
    return found


async def streamed(client: httpx.AsyncClient, response_id: str, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get(f"/v1/responses/{response_id}", params={"stream": "true"} | query)
    assert answer.headers["content-type"] == "text/event-stream"
    return events_in(answer.text)


@pytest.mark.parametrize("base", ["/v1", "/client/v4/accounts/acme/ai/v1"])
async def test_states(client: httpx.AsyncClient, batches: BatchService, service: FakeService, base: str) -> None:
    service.script = agent
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    response = await made(client, base, tools=tools, metadata={"k": "v"})
    assert (response["status"], response["background"], response["output"]) == ("queued", True, [])
    path = f"{base}/responses/{response['id']}"
    assert (await client.get(path)).json() == response
    (lease,) = await batches.queue.claim("test-puller", MODEL, 1)
    assert (await client.get(path)).json() == response | {"status": "in_progress"}
    assert lease.request.priority is Priority.BATCH
    await run_one(batches.queue, service, lease)
    complete = (await client.get(path)).json()
    assert (complete["status"], complete["error"]) == ("completed", None)
    assert complete["completed_at"] >= complete["created_at"]
    assert [item["type"] for item in complete["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert complete["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    sync = (await client.post(f"{base}/responses", json=ASK | {"background": False, "tools": tools})).json()
    differ = {key for key in sync if sync[key] != complete[key]}
    assert differ <= {"id", "created_at", "completed_at", "background", "output", "metadata"}
    stripped = [[{**item, "id": ""} for item in one["output"]] for one in (sync, complete)]
    assert stripped[0] == stripped[1]
    elsewhere = await client.get(f"/client/v4/accounts/other/ai/v1/responses/{response['id']}")
    assert elsewhere.status_code == 404
    assert (await client.delete(path)).json()["deleted"] is True
    assert (await client.get(path)).status_code == 404


async def test_streams_resume_at_any_sequence_number(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService
) -> None:
    service.script = agent
    response = await made(client)
    await run_all(batches.queue, service)
    events = await streamed(client, response["id"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = (await client.get(f"/v1/responses/{response['id']}")).json()
    assert events[-1]["response"] == final
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert said == "".join(event.text for event in AGENT if isinstance(event, TextDelta))
    for after in range(len(events)):
        assert await streamed(client, response["id"], starting_after=after) == events[after + 1 :]


@pytest.mark.parametrize("how", ["create", "retrieve"])
async def test_a_stream_waits_for_its_end(service: FakeService, batches: BatchService, how: str) -> None:
    """A stream that is resumed has every event once."""
    app = app_of(service, batches=batches)
    async with client_of(service, batches=batches) as client:
        if how == "create":
            wire = Wire(app, "/v1/responses", json.dumps(ASK | {"stream": True}).encode())
        else:
            wire = Wire(app, f"/v1/responses/{(await made(client))['id']}", b"", method="GET")
            wire.scope["query_string"] = b"stream=true"
        await wire.until_sent(b"response.queued")
        first = events_in(wire.body.decode())
        assert [event["type"] for event in first] == ["response.created", "response.queued"]
        response_id = first[0]["response"]["id"]
        if how == "create":
            wire.leave()
            await asyncio.wait_for(wire.task, 60)
            rest = asyncio.create_task(streamed(client, response_id, starting_after=1))
        (lease,) = await batches.queue.claim("test-puller", MODEL, 1)
        if how == "retrieve":
            await wire.until_sent(b"response.in_progress")
        await run_one(batches.queue, service, lease)
        if how == "create":
            events = first + await asyncio.wait_for(rest, 60)
        else:
            await asyncio.wait_for(wire.task, 60)
            events = events_in(wire.body.decode())
        assert events == await streamed(client, response_id)
        assert events[-1]["type"] == "response.completed"


async def test_cancel(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    response = await made(client)
    path = f"/v1/responses/{response['id']}"
    assert (await client.delete(path)).status_code == 409
    cancelled = (await client.post(f"{path}/cancel")).json()
    assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
    assert (await client.post(f"{path}/cancel")).json() == cancelled
    assert await run_all(batches.queue, service) == 0
    events = await streamed(client, response["id"])
    assert events[-1]["type"] == "response.cancelled"
    running = await made(client)
    (lease,) = await batches.queue.claim("w", MODEL, 1)
    stopped = (await client.post(f"/v1/responses/{running['id']}/cancel")).json()
    assert stopped["status"] == "cancelled"
    told = await batches.queue.heartbeat("w", [lease])
    assert told.stopped == {lease.key}
    assert await batches.queue.finish_stopped(lease)
    assert (await client.get(f"/v1/responses/{running['id']}")).json()["status"] == "cancelled"
    done = await made(client)
    await run_all(batches.queue, service)
    kept = (await client.post(f"/v1/responses/{done['id']}/cancel")).json()
    assert kept["status"] == "completed"


async def test_failures(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    async def breaks(request: GenerateRequest) -> Any:
        raise Unavailable("the engine went away")
        yield

    service.script = breaks
    response = await made(client)
    await run_all(batches.queue, service)
    failed = (await client.get(f"/v1/responses/{response['id']}")).json()
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "the engine went away"}
    events = await streamed(client, response["id"])
    assert events[-1] == {"type": "response.failed", "response": failed, "sequence_number": 3}


async def test_a_waiting_stream_has_heartbeats(
    client: httpx.AsyncClient, service: FakeService, batches: BatchService
) -> None:
    """A stream sends heartbeats while its job generates nothing."""
    response = await made(client)
    (lease,) = await batches.queue.claim("test-puller", MODEL, 1)
    app = app_of(service, batches=batches, limits=RequestLimits(heartbeat_s=0.05))
    wire = Wire(app, f"/v1/responses/{response['id']}", b"", method="GET")
    usual = Wire(app_of(service, batches=batches), wire.scope["path"], b"", method="GET")
    wire.scope["query_string"] = usual.scope["query_string"] = b"stream=true"
    await wire.until_sent(b": heartbeat\n\n: heartbeat\n\n")
    await run_one(batches.queue, service, lease)
    await asyncio.wait_for(wire.task, 60)
    assert events_in(wire.body.decode()) == await streamed(client, response["id"])
    await asyncio.wait_for(usual.task, 60)
    assert b": heartbeat" not in usual.body


async def test_incomplete(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    service.script = says(TextDelta(0, "Once upon"), ChoiceDone(0, "length"))
    response = await made(client)
    await run_all(batches.queue, service)
    events = await streamed(client, response["id"])
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.fixture
async def kept(service: FakeService, tmp_path: Path) -> Any:
    store = await SqliteStore.open(tmp_path / "responses.db")
    service.responses = responses = DatabaseResponses(store)
    yield responses
    await store.close()


async def test_conversations(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService, kept: DatabaseResponses
) -> None:
    """Background and other turns continue each other; an incomplete response cannot be continued."""
    first = (await client.post("/v1/responses", json={"model": MODEL, "input": "One"})).json()
    second = await made(client, input="Two", previous_response_id=first["id"])
    early = await client.post(
        "/v1/responses", json={"model": MODEL, "input": "Three", "previous_response_id": second["id"]}
    )
    assert (early.status_code, early.json()["error"]["param"]) == (409, "previous_response_id")
    await run_all(batches.queue, service)
    third = await client.post(
        "/v1/responses", json={"model": MODEL, "input": "Three", "previous_response_id": second["id"]}
    )
    assert third.status_code == 200, third.text
    assert service.requests[-1].messages == (
        Message("user", "One"),
        Message("assistant", "Hello!"),
        Message("user", "Two"),
        Message("assistant", "Hello!"),
        Message("user", "Three"),
    )
    items = (await client.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["One", "Hello!", "Two"]
    assert (await client.delete(f"/v1/responses/{first['id']}")).status_code == 200
    assert (await client.delete(f"/v1/responses/{second['id']}")).status_code == 200
    fourth = await client.post(
        "/v1/responses", json={"model": MODEL, "input": "Four", "previous_response_id": third.json()["id"]}
    )
    assert len(service.requests[-1].messages or ()) == 7, fourth.text


async def test_refused(client: httpx.AsyncClient) -> None:
    for body, param in (
        ({"store": False}, "store"),
        ({"conversation": "c"}, "conversation"),
        ({"temperature": 9}, "temperature"),
        ({"input": []}, "input"),
    ):
        answer = await client.post("/v1/responses", json=ASK | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await client.post("/v1/responses", json=ASK | {"model": "nobody"})).status_code == 404
    sync = (await client.post("/v1/responses", json={"model": MODEL, "input": "Hi"})).json()
    assert (await client.get(f"/v1/responses/{sync['id']}?stream=true")).status_code == 400
    assert (await client.get(f"/v1/responses/{sync['id']}?starting_after=1")).status_code == 400
    assert (await client.get("/v1/responses/resp_1?stream=true")).status_code == 404
    assert (await client.post(f"/v1/responses/{sync['id']}/cancel")).status_code == 400


async def test_idempotency(client: httpx.AsyncClient, batches: BatchService) -> None:
    key = {"idempotency-key": "k"}
    ids: list[str] = []

    async def breaks_once(submit: Any, new: NewBatch) -> Any:
        ids.append(new.id)
        batch = await submit()
        if len(ids) == 1:
            raise Unavailable("gone after the commit")
        return batch

    assert isinstance(batches.queue, FaultyQueue)
    batches.queue.around["submit"] = breaks_once
    assert (await client.post("/v1/responses", json=ASK, headers=key)).status_code == 503
    first = await client.post("/v1/responses", json=ASK, headers=key)
    again = await client.post("/v1/responses", json=ASK, headers=key)
    assert first.content == again.content
    assert [first.json()["id"]] * 2 == ids
    assert (await client.post("/v1/responses", json=ASK | {"input": "Ho"}, headers=key)).status_code == 422
    assert len(await batches.queue.claim("w", MODEL, 9)) == 1


async def test_deleting_a_response_ends_its_streams(service: FakeService, batches: BatchService) -> None:
    async with client_of(service, batches=batches) as client:
        response = await made(client)
        wire = Wire(app_of(service, batches=batches), f"/v1/responses/{response['id']}", b"", method="GET")
        wire.scope["query_string"] = b"stream=true"
        await wire.until_sent(b"response.queued")
        (lease,) = await batches.queue.claim("w", MODEL, 1)
        await batches.queue.complete(lease, Answer([AnswerChoice([TextPart("x")])], Usage()))
        await client.delete(f"/v1/responses/{response['id']}")
        await asyncio.wait_for(wire.task, 60)
        assert events_in(wire.body.decode())[-1]["type"] in ("response.completed", "response.cancelled")


# --- flex -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_flex_does_not_wait(client: httpx.AsyncClient, service: FakeService, path: str, body: Any) -> None:
    answer = await client.post(path, json={"model": MODEL, "service_tier": "flex"} | body)
    assert answer.json()["service_tier"] == "flex"
    answer = await client.post(path, json={"model": MODEL, "service_tier": "default"} | body)
    assert answer.json()["service_tier"] == "default"
    asked = [(request.priority, request.reject_if_busy) for request in service.requests]
    assert asked == [(Priority.FLEX, True), (Priority.DEFAULT, False)]


async def test_an_error_names_the_place_that_the_client_knows(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService
) -> None:
    where = "messages[0].content[1]"

    async def refuse(request: GenerateRequest) -> Any:
        yield Started(Usage())
        raise BadInput(f"image 1 of the request (`{where}`) cannot be used: no", param=where)

    service.script = refuse
    parts = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": "https://example.org/a.png"}]
    response = await made(client, input=[{"role": "user", "content": parts}])
    await run_all(batches.queue, service)
    failed = (await client.get(f"/v1/responses/{response['id']}")).json()
    assert "(`input[0].content[1]`)" in failed["error"]["message"]
