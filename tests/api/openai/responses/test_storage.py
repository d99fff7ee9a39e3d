"""Stored responses: continued, retrieved and deleted, on the real store."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.api.app import ApiSettings, App
from emberline.api.openai.responses import endpoints as openai_responses
from emberline.protocol import token_ids as tokens
from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import ReasoningDelta, Started, TextDelta
from emberline.protocol.request import GenerateRequest, Message, ToolCall
from emberline.service import open_core_server, open_http_worker
from emberline.service.responses import DatabaseResponses
from emberline.store import SqliteStore
from emberline.text.text_model import TextModel
from tests.api.fake_service import MODEL, USAGE, FakeService, Wire, app_of
from tests.api.openai.responses.test_endpoints import ASK, CF, WEATHER, ask, calling, events_of, saying
from tests.service.conftest import MODEL as REAL_MODEL
from tests.service.conftest import PATIENCE_S, Opener, engine, offer, open_one, say, text_model
from tests.service.fake_engine import FakeEngine

__all__ = ["engine", "open_one", "say", "text_model"]  # fixtures


@pytest.fixture
async def responses(service: FakeService, tmp_path: Path) -> AsyncIterator[DatabaseResponses]:
    store = await SqliteStore.open(tmp_path / "t.db")
    service.responses = kept = DatabaseResponses(store)
    yield kept
    await store.close()


@pytest.fixture
async def client(service: FakeService, responses: DatabaseResponses) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app_of(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686") as client:
        yield client


def texts(request: GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages or ()]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_tools_by_id(client: httpx.AsyncClient, service: FakeService, stream: bool) -> None:
    """Each turn sends only new items, and the prompt repeats earlier output exactly."""

    async def turn(body: dict[str, Any]) -> dict[str, Any]:
        return (await events_of(client, body))[-1]["response"] if stream else await ask(client, body)

    service.script = saying(ReasoningDelta(0, "Hm."), *calling("weather", '{"city":"Rome"}'), finish="tool_calls")
    first = await turn(ASK | {"tools": [WEATHER], "instructions": "Be brief."})
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    service.script = saying(TextDelta(0, "Sun in Rome."))
    second = await turn({"model": MODEL, "input": [result], "previous_response_id": first["id"], "tools": [WEATHER]})
    assert second["previous_response_id"] == first["id"]
    third = await turn({"model": MODEL, "input": "Thanks", "previous_response_id": second["id"]})
    assert service.requests[2].messages == (  # without the instructions, which are each turn's own
        Message("user", "Hi"),
        Message("assistant", "", tool_calls=(ToolCall("call_1", "weather", '{"city":"Rome"}'),), reasoning="Hm."),
        Message("tool", "sunny", tool_call_id="call_1"),
        Message("assistant", "Sun in Rome."),
        Message("user", "Thanks"),
    )
    assert service.requests[0].messages[1:] == service.requests[2].messages[:1]
    assert {request.session for request in service.requests} == {first["id"]}
    stored = await client.get(f"/v1/responses/{third['id']}")
    assert stored.json() == third


async def test_a_truncated_call_is_dropped(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = saying(TextDelta(0, "Let me"), *calling("weather", '{"ci'), finish="length")
    first = await ask(client, ASK | {"tools": [WEATHER]})
    assert [item["status"] for item in first["output"]] == ["completed", "incomplete"]
    await ask(client, {"model": MODEL, "input": "Go on", "previous_response_id": first["id"]})
    assert service.requests[-1].messages == (
        Message("user", "Hi"),
        Message("assistant", "Let me"),
        Message("user", "Go on"),
    )


async def test_a_client_that_disconnects(service: FakeService, responses: DatabaseResponses) -> None:
    async def stalls(request: GenerateRequest) -> Any:
        yield Started(USAGE)
        for event in calling("weather", '{"ci'):
            yield event
        await asyncio.sleep(60)

    service.script = stalls
    wire = Wire(app_of(service), "/v1/responses", json.dumps(ASK | {"stream": True}).encode())
    await wire.until_sent(b"function_call_arguments.delta")
    wire.leave()
    await asyncio.wait_for(wire.task, 60)
    assert service.open == 0
    assert responses.n_bytes.total() == 0


async def test_a_branch(client: httpx.AsyncClient, service: FakeService) -> None:
    first = await ask(client, ASK)
    for word in ("left", "right"):
        await ask(client, {"model": MODEL, "input": word, "previous_response_id": first["id"]})
        assert texts(service.requests[-1]) == [("user", "Hi"), ("assistant", "Hello!"), ("user", word)]


@pytest.mark.parametrize("base", ["/v1", f"{CF}/v1"])
async def test_unknown_ids(client: httpx.AsyncClient, service: FakeService, base: str) -> None:
    other = await ask(client, ASK, "/client/v4/accounts/other/ai/v1")
    unstored = await ask(client, ASK | {"store": False}, base)
    service.requests.clear()
    for missing in ("resp_0", "nonsense/..", unstored["id"], other["id"]):
        answer = await client.post(f"{base}/responses", json=ASK | {"previous_response_id": missing, "stream": True})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        for missing in ("resp_0", unstored["id"], other["id"]):
            answer = await client.request(method, f"{base}/responses/{missing}{path}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "response_not_found"
    assert service.requests == []
    assert (await client.get(f"/client/v4/accounts/other/ai/v1/responses/{other['id']}")).json() == other


async def test_delete(client: httpx.AsyncClient, service: FakeService) -> None:
    first = await ask(client, ASK)
    second = await ask(client, {"model": MODEL, "input": "More", "previous_response_id": first["id"]})
    answer = await client.delete(f"/v1/responses/{first['id']}")
    assert answer.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert (await client.delete(f"/v1/responses/{first['id']}")).status_code == 404
    refused = await client.post("/v1/responses", json=ASK | {"previous_response_id": first["id"]})
    assert refused.status_code == 400
    await ask(client, {"model": MODEL, "input": "Still there?", "previous_response_id": second["id"]})
    assert [text for _, text in texts(service.requests[-1])] == ["Hi", "Hello!", "More", "Hello!", "Still there?"]


async def test_deleted_while_it_is_continued(client: httpx.AsyncClient, service: FakeService) -> None:
    first = await ask(client, ASK)

    async def slow(request: GenerateRequest) -> Any:
        assert (await client.delete(f"/v1/responses/{first['id']}")).status_code == 200
        async for event in saying(TextDelta(0, "Done."))(request):
            yield event

    service.script = slow
    second = await ask(client, {"model": MODEL, "input": "More", "previous_response_id": first["id"]})
    service.script = saying(TextDelta(0, "Yes."))
    await ask(client, {"model": MODEL, "input": "All of it?", "previous_response_id": second["id"]})
    assert [text for _, text in texts(service.requests[-1])] == ["Hi", "Hello!", "More", "Done.", "All of it?"]


async def test_long_chains_are_stored_whole(
    client: httpx.AsyncClient, service: FakeService, responses: DatabaseResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_responses, "MAX_DEPTH", 3)
    last = await ask(client, ASK)
    depths = []
    for turn in range(7):
        last = await ask(client, {"model": MODEL, "input": f"{turn}", "previous_response_id": last["id"]})
        records = await responses.get("local", last["id"], whole=True)
        depths.append(len(records))
        assert [text for _, text in texts(service.requests[-1])][::2] == ["Hi", *map(str, range(turn + 1))]
    assert depths == [2, 3, 1, 2, 3, 1, 2]


async def test_only_new_items_are_stored(
    client: httpx.AsyncClient, service: FakeService, responses: DatabaseResponses
) -> None:
    last = await ask(client, ASK | {"input": "x" * 200_000})
    sizes = []
    for _ in range(3):
        last = await ask(client, {"model": MODEL, "input": "More", "previous_response_id": last["id"]})
        (record,) = await responses.get("local", last["id"])
        sizes.append(record.n_bytes)
    assert max(sizes) < 3_000
    assert len((service.requests[-1].messages or ())[0].content) == 200_000


async def test_input_items(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = saying(*calling("weather", "{}"), finish="tool_calls")
    first = await ask(client, ASK | {"tools": [WEATHER]})
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny", "id": "fco_mine"}
    service.script = saying(TextDelta(0, "Sun."))
    second = await ask(client, {"model": MODEL, "input": [result], "previous_response_id": first["id"]})
    path, key = f"/v1/responses/{second['id']}/input_items", first["id"][5:]
    listed = (await client.get(path, params={"order": "asc"})).json()
    message, call, output = listed["data"]
    part = {"type": "input_text", "text": "Hi"}
    assert message == {
        "type": "message", "id": f"msg_{key}_i0", "role": "user", "status": "completed", "content": [part],
    }  # fmt: skip
    assert call == first["output"][0]
    assert output == result | {"status": "completed"}
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == (message["id"], "fco_mine")
    newest = (await client.get(path, params={"limit": 2})).json()
    assert ([item["id"] for item in newest["data"]], newest["has_more"]) == (["fco_mine", call["id"]], True)
    rest = (await client.get(path, params={"after": newest["last_id"]})).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([message["id"]], False)
    end = (await client.get(path, params={"after": message["id"]})).json()
    assert (end["data"], end["has_more"]) == ([], False)
    for bad in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "nowhere"}):
        answer = await client.get(path, params=bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(bad)))


async def test_references(client: httpx.AsyncClient, service: FakeService) -> None:
    """Item references, as the Vercel AI SDK sends them for stored items."""
    service.script = saying(ReasoningDelta(0, "Hm."), *calling("weather", "{}"), finish="tool_calls")
    first = await ask(client, ASK | {"tools": [WEATHER]})
    items = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    body = {"model": MODEL, "input": [{"role": "user", "content": "Hi"}, *items, result], "tools": [WEATHER]}
    second = await ask(client, body)
    assert service.requests[-1].messages == (
        Message("user", "Hi"),
        Message("assistant", "", tool_calls=(ToolCall("call_1", "weather", "{}"),), reasoning="Hm."),
        Message("tool", "sunny", tool_call_id="call_1"),
    )
    await client.delete(f"/v1/responses/{first['id']}")
    refused = await client.post("/v1/responses", json=body)  # what it refers to is gone
    assert refused.status_code == 404
    assert refused.json()["error"]["param"] == "input[1]"
    bare = {"model": MODEL, "input": [{"id": item["id"]} for item in second["output"]]}
    await ask(client, bare | {"previous_response_id": second["id"]})  # its own items stand by themselves
    foreign = await client.post(f"{CF}/v1/responses", json=bare)
    assert foreign.status_code == 404


async def test_cancel(client: httpx.AsyncClient, service: FakeService) -> None:
    first = await ask(client, ASK)
    answer = await client.post(f"/v1/responses/{first['id']}/cancel")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
    streamed = await client.get(f"/v1/responses/{first['id']}", params={"stream": "true"})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize("stream", [False, True])
async def test_stored_before_completion_is_sent(
    client: httpx.AsyncClient, service: FakeService, responses: DatabaseResponses, stream: bool
) -> None:
    """A response that cannot be stored is not reported as complete."""

    class Full(DatabaseResponses):
        async def put(self, record: StoredResponse) -> bool:
            raise Unavailable("the disk is full")

    service.responses = Full(responses._store)
    answer = await client.post("/v1/responses", json=ASK | {"stream": stream})
    if stream:
        assert "response.completed" not in answer.text
        assert "event: response.failed\n" in answer.text
        assert "the disk is full" in answer.text
    else:
        assert answer.status_code == 503
    again = await client.post("/v1/responses", json=ASK | {"stream": stream, "store": False})
    assert again.status_code == 200


async def test_input_tokens_count_the_chain(client: httpx.AsyncClient, service: FakeService) -> None:
    first = await ask(client, ASK)
    body = {"model": MODEL, "input": "one two", "previous_response_id": first["id"]}
    answer = await client.post("/v1/responses/input_tokens", json=body)
    assert answer.json()["input_tokens"] == 4


async def test_through_an_http_worker_to_an_engine(
    open_one: Opener, engine: FakeEngine, text_model: TextModel, tmp_path: Path
) -> None:
    """Two turns, the second at another HTTP worker: its prompt begins with the first one's, token for token."""
    core = await open_one(engine)
    server = await open_core_server(core, tmp_path / "core.sock")
    processes = [
        await open_http_worker([offer(text_model, engine)], core_socket=tmp_path / "core.sock") for _ in range(2)
    ]
    previous = None
    for worker in processes:
        assert await worker.ready(PATIENCE_S)
        app = App(worker, ApiSettings(auth=_auth()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
            body = {"model": REAL_MODEL, "input": "hello", "previous_response_id": previous, "stream": True}
            (*_, last) = await events_of(client, body)
            previous = last["response"]["id"]
    one, two = (request.prompt_ids for request in engine.submitted)
    said = text_model.encode("Hello!", special=False)
    assert two.startswith(one + said)
    assert tokens.count(two) > tokens.count(one + said)
    for worker in processes:
        await worker.close()
    await server.close()


def _auth() -> Any:
    from emberline.accounts.auth import Authenticator
    from emberline.accounts.secret import Secret

    return Authenticator(Secret("0" * 64), None)
