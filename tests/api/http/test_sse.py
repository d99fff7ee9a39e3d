"""Streams that fail, clients that disconnect, and slow answers."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from emberline.protocol.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EmberlineError,
    Internal,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from emberline.protocol.events import Started, TextDelta, TextEvent
from emberline.protocol.request import GenerateRequest
from tests.api.fake_service import MODEL, USAGE, FakeModels, FakeService, Wire, app_of, hello

MESSAGES = [{"role": "user", "content": "Hi"}]
CF = "/client/v4/accounts/acme/ai"
ENDPOINTS = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/completions": {"model": MODEL, "prompt": ["a", "b"]},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES},
    f"{CF}/run/{MODEL}": {"prompt": "Hi"},
    f"{CF}/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
}


def fails(error: Exception, after: int):
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        for event in [Started(USAGE), TextDelta(0, "Hel"), TextDelta(0, "lo")][:after]:
            yield event
        raise error

    return script


async def forever(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    yield Started(USAGE)
    yield TextDelta(0, "first")
    await asyncio.Event().wait()


async def never(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    await asyncio.Event().wait()
    yield Started(USAGE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("error", "native", "other"),
    [
        (Overloaded("full", retry_after_s=2.5), (429, 3040), 429),
        (Unavailable("the engine is starting"), (503, 3040), 503),
        (ContextExceeded("too long"), (413, 5021), 400),
        (ModelNotFound("none"), (400, 5007), 404),
        (DeadlineExceeded("late"), (408, 3007), 408),
        (Internal("broken"), (500, 5001), 500),
        (RuntimeError("secret of the inside"), (500, 5001), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_refused_before_the_start_is_a_status(
    client: httpx.AsyncClient,
    service: FakeService,
    path: str,
    stream: bool,
    error: Exception,
    native: tuple,
    other: int,
) -> None:
    service.script = fails(error, after=0)
    answer = await client.post(path, json=ENDPOINTS[path] | {"stream": stream})
    assert answer.headers["content-type"] == "application/json"
    assert "secret" not in answer.text
    if "/run/" in path:
        assert (answer.status_code, answer.json()["errors"][0]["code"]) == native
    else:
        assert answer.status_code == other
    if answer.status_code in (429, 503):
        assert answer.headers["retry-after"] == ("3" if error.retry_after_s else "1")
        assert answer.headers["retry-after-ms"] == ("2500" if error.retry_after_s else "1000")
    assert service.open == 0


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("error", [Internal("the model produced invalid numbers"), RuntimeError("secret")])
async def test_a_stream_error_is_reported_once(
    client: httpx.AsyncClient, service: FakeService, path: str, error: Exception
) -> None:
    service.script = fails(error, after=2)
    answer = await client.post(path, json=ENDPOINTS[path] | {"stream": True})
    assert answer.status_code == 200
    assert "secret" not in answer.text
    assert "[DONE]" not in answer.text
    assert "message_stop" not in answer.text
    *_, last = answer.text.removesuffix("\n\n").split("\n\n")
    told = json.loads(last.rpartition("data: ")[2])
    if path == "/v1/messages":
        assert last.startswith("event: error\n")
        assert (told["type"], told["error"]["type"]) == ("error", "api_error")
    elif "/run/" in path:
        assert told["errors"][0]["code"] == 5001
    else:
        assert told["error"]["type"] == "server_error"
        assert ("errors" in told) == path.startswith("/client")
    if isinstance(error, EmberlineError):
        assert error.message in answer.text
    assert service.open == 0


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_an_answer_that_never_completes_is_an_error(
    client: httpx.AsyncClient, service: FakeService, path: str
) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(USAGE)

    service.script = script
    if path != "/v1/completions":  # several prompts wait for each other
        assert (await client.post(path, json=ENDPOINTS[path])).status_code == 500
        assert "[DONE]" not in (await client.post(path, json=ENDPOINTS[path] | {"stream": True})).text


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("stream", "script"), [(True, forever), (False, forever), (True, never), (False, never)])
async def test_a_client_that_disconnects_stops_generation(
    service: FakeService, path: str, stream: bool, script
) -> None:
    service.script = script
    wire = Wire(app_of(service), path, json.dumps(ENDPOINTS[path] | {"stream": stream}).encode())
    if stream and script is forever:
        await wire.until_sent(b"first")
    else:
        while not service.open:
            await asyncio.sleep(0)
    assert service.open
    wire.leave()
    await asyncio.wait_for(wire.task, 60)
    assert service.open == 0
    if not (stream and script is forever):
        assert wire.sent == []


async def test_a_client_that_disconnects_while_sending(service: FakeService) -> None:
    wire = Wire(app_of(service), "/v1/chat/completions", b"")
    wire.inbox.get_nowait()
    wire.inbox.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    wire.leave()
    await asyncio.wait_for(wire.task, 60)
    assert wire.sent == []


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_stopping_server_reports_it(service: FakeService, path: str) -> None:
    service.script = forever
    streamed = Wire(app_of(service), path, json.dumps(ENDPOINTS[path] | {"stream": True}).encode())
    whole = Wire(app_of(service), path, json.dumps(ENDPOINTS[path]).encode())
    await streamed.until_sent(b"first")
    for wire in (streamed, whole):
        wire.task.cancel()
        await asyncio.wait([wire.task], timeout=60)
        assert b"the server is stopping" in wire.body
        assert not wire.sent[-1].get("more_body", False)
    assert whole.sent[0]["status"] == 503
    assert service.open == 0


async def test_one_send_per_event(service: FakeService) -> None:
    path = "/v1/chat/completions"
    wire = Wire(app_of(service), path, json.dumps(ENDPOINTS[path] | {"stream": True}).encode())
    await asyncio.wait_for(wire.task, 60)
    assert len(wire.sent) == 1 + 3 + 1 + 1  # the head, three texts (the role goes with the first), the finish, the end


async def test_one_log_line_with_the_id(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="emberline.api.app"):
        answer = await client.get("/v1/models", headers={"x-request-id": "theirs\x7f" + "x" * 500})
    (record,) = [record for record in caplog.records if record.name == "emberline.api.app"]
    assert record.getMessage() == "GET /v1/models"
    assert record.status == 200
    assert len(record.client_request_id) == 64
    assert answer.headers["x-request-id"] not in ("", "theirs")


class LoadingModels(FakeModels):
    def state(self, model_id: str) -> str:
        return "loading"


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_client_that_waits_for_its_model_is_told(service: FakeService, path: str) -> None:
    service.models, loaded = LoadingModels(), asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        await loaded.wait()
        async for event in hello(request):
            yield event

    service.script = script
    wire = Wire(app_of(service), path, json.dumps(ENDPOINTS[path] | {"stream": True}).encode())
    await wire.until_sent(f": loading {MODEL}\n\n".encode())
    loaded.set()
    await asyncio.wait_for(wire.task, 60)
    assert wire.sent[0]["status"] == 200
    assert wire.body.count(b": loading") == 1
    assert b"Hel" in wire.body


async def test_a_model_that_cannot_be_loaded_fails_its_streams(service: FakeService) -> None:
    service.models, path, failed = LoadingModels(), "/v1/chat/completions", asyncio.Event()
    body = json.dumps(ENDPOINTS[path] | {"stream": True}).encode()

    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        await failed.wait()
        raise Unavailable("no memory")
        yield Started(USAGE)

    service.script = script
    late = Wire(app_of(service), path, body)
    await late.until_sent(b": loading")
    stopped = Wire(app_of(service), path, body)
    await stopped.until_sent(b": loading")
    stopped.task.cancel()
    await asyncio.wait([stopped.task], timeout=60)
    assert b"the server is stopping" in stopped.body
    failed.set()
    await asyncio.wait_for(late.task, 60)
    assert b"no memory" in late.body
    soon = Wire(app_of(service), path, body)
    await asyncio.wait_for(soon.task, 60)
    assert soon.sent[0]["status"] == 503, "what is refused at once has its status"
    assert service.open == 0
