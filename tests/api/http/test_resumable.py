"""Streams that a client leaves and comes back to, in every API, against a fake service."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.audit_log import Actor
from emberline.api.http import resumable
from emberline.api.http.streaming import IncompleteBody
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, TextEvent, Usage
from emberline.protocol.request import GenerateRequest
from emberline.service.event_log import LogLimits, LogPart, MemoryEventLogs
from tests.api.fake_service import KEY, MODEL, USAGE, FakeService, Wire, app_of, client_of

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "stream": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "stream": True},
    "/v1/messages": CHAT | {"max_tokens": 64},
    f"/client/v4/accounts/local/ai/run/{MODEL}": {"messages": MESSAGES, "stream": True},
    "/v1/responses": {"model": MODEL, "input": "Hi", "stream": True},
    "/api/chat": {"model": MODEL, "messages": MESSAGES},
}
RESUME = {resumable.HEADER: "60"}
VARYING = re.compile(rb'"(p|created|created_at|completed_at|[a-z_]*duration)":("[^"]*"|\d+)')


class Paced:
    """A script whose stream pauses after its first text until it may go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go_on = asyncio.Event()
        self.error = error

    async def __call__(self, request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(Usage(prompt_tokens=12))
        yield TextDelta(0, "Hel")
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        yield TextDelta(0, "lo!")
        yield ChoiceDone(0, "stop")
        yield Completed(USAGE)


def header(wire: Wire, name: bytes) -> str:
    return next(value.decode() for found, value in wire.sent[0]["headers"] if found == name)


def start(service: FakeService, path: str = "/v1/chat/completions", **headers: str) -> Wire:
    return Wire(app_of(service), path, json.dumps(REQUESTS[path]).encode(), x_emberline_resume="60", **headers)


async def eventually(check: Any) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_resumed_stream_is_the_same_stream(service: FakeService, client: httpx.AsyncClient, path: str) -> None:
    """From any event on; but for ids, it is what a stream without resuming is."""
    plain = (await client.post(path, json=REQUESTS[path])).content
    whole = await client.post(path, json=REQUESTS[path], headers=RESUME)
    stream_id = whole.headers["x-emberline-stream-id"]
    end = b"\n" if path == "/api/chat" else b"\n\n"
    events = [event + end for event in whole.content.split(end)[:-1]]
    numbers = [int(found) for found in re.findall(rb"^id: (\d+)$", whole.content, re.MULTILINE)]
    assert numbers == ([] if path == "/api/chat" else list(range(len(events))))
    bare = re.sub(rb"(?m)^id: \d+\n", b"", whole.content)
    ids = re.compile(rb"[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f-]{27}")
    assert VARYING.sub(b"", ids.sub(b"", bare)) == VARYING.sub(b"", ids.sub(b"", plain))
    for after in range(-1, len(events)):
        query = {} if after < 0 else {"starting_after": after}
        again = await client.get(f"/v1/streams/{stream_id}", params=query)
        assert again.headers["content-type"] == whole.headers["content-type"]
        assert again.content == b"".join(events[after + 1 :])
    last = await client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": str(len(events) - 2)})
    assert last.content == events[-1]
    assert len(service.requests) == 2


def test_events_of_a_server_that_ends_lines_with_crlf() -> None:
    numbering = resumable._Numbering(b"text/event-stream")
    assert numbering.split(b"data: 1\r\n\r\ndata: 2\r\n") == [b"id: 0\ndata: 1\n\n"]
    assert numbering.split(b"\r\ndata: 3\n") == [b"id: 1\ndata: 2\n\n"]
    assert numbering.end(b"") == [b"id: 2\ndata: 3\n\n"]
    numbering.split(b"data: {")
    assert numbering.end(b"event: error\n\n") == [b"id: 3\nevent: error\n\n"]


async def test_a_client_that_leaves_comes_back(service: FakeService, client: httpx.AsyncClient) -> None:
    service.script = paced = Paced()
    wire = start(service)
    await wire.until_sent(b"Hel")
    wire.leave()
    await wire.task
    assert service.open == 1  # it goes on without a client
    seen = int(re.findall(rb"id: (\d+)", wire.body)[-1])
    stream_id = header(wire, resumable.STREAM_ID)
    resumed = Wire(app_of(service), f"/v1/streams/{stream_id}", b"", "GET", last_event_id=str(seen))
    await eventually(lambda: resumed.sent)
    paced.go_on.set()
    await resumed.task
    assert b"Hel" not in resumed.body
    assert b"lo!" in resumed.body
    assert resumed.body.endswith(b"data: [DONE]\n\n")
    assert (service.open, len(service.requests)) == (0, 1)


class LostLogs(MemoryEventLogs):
    """Event logs of a core that cannot be reached from some time on."""

    is_lost = False

    async def read(self, account: str, log_id: str, after: int, wait_s: float) -> LogPart:
        found = await super().read(account, log_id, after, wait_s)
        if self.is_lost:
            raise Unavailable("the core cannot be reached")
        return found


async def test_a_stream_whose_log_is_lost_is_cut_off(service: FakeService) -> None:
    service.event_logs = logs = LostLogs()
    service.script = paced = Paced()
    wire = start(service)
    await wire.until_sent(b"Hel")
    logs.is_lost = True
    paced.go_on.set()
    with pytest.raises(IncompleteBody):
        await wire.task
    assert [message["type"] for message in wire.sent].count("http.response.start") == 1
    assert wire.sent[-1]["more_body"], "no client takes it for whole"


async def test_without_asking_a_client_that_leaves_cancels(service: FakeService) -> None:
    service.script = Paced()
    wire = Wire(app_of(service), "/v1/chat/completions", json.dumps(CHAT).encode())
    await wire.until_sent(b"Hel")
    wire.leave()
    await wire.task
    assert service.open == 0


async def test_after_the_grace_period_the_request_is_cancelled(
    service: FakeService, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "grace_period_s", lambda call: 0.05)
    service.event_logs = MemoryEventLogs(LogLimits(idle_check_s=0.01, sweep_s=0.01))
    service.script = Paced()
    wire = start(service)
    await wire.until_sent(b"Hel")
    wire.leave()
    await eventually(lambda: service.open == 0)
    await eventually(lambda: len(service.event_logs) == 0)
    answer = await client.get(f"/v1/streams/{header(wire, resumable.STREAM_ID)}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


async def test_a_reader_keeps_the_request_alive(service: FakeService) -> None:
    service.event_logs = MemoryEventLogs(LogLimits(idle_check_s=0.01, wait_s=0.02))
    service.script = paced = Paced()
    wire = start(service)
    await wire.until_sent(b": waiting\n\n: waiting\n\n")
    assert service.open == 1
    paced.go_on.set()
    await wire.task
    assert wire.body.endswith(b"data: [DONE]\n\n")


class WatchedLogs(MemoryEventLogs):
    def __init__(self) -> None:
        super().__init__(LogLimits(idle_check_s=0.01, sweep_s=0.01))
        self.held = asyncio.Event()

    def hold(self, log_id: str) -> None:
        super().hold(log_id)
        self.held.set()


async def test_a_slow_reader_that_is_connected_keeps_its_stream(service: FakeService) -> None:
    service.event_logs = logs = WatchedLogs()
    service.script = paced = Paced()
    app, takes = app_of(service), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        async def send_slowly(message: Any) -> None:
            await send(message)
            if b"Hel" in message.get("body", b""):
                await takes.wait()

        await app(scope, receive, send_slowly)

    wire = Wire(slow, "/v1/chat/completions", json.dumps(CHAT).encode(), x_emberline_resume="60")
    await wire.until_sent(b"Hel")
    log_id = header(wire, resumable.STREAM_ID)
    await asyncio.wait_for(logs.held.wait(), 60)
    assert await logs.idle_s(log_id) == 0, "sending waits, and nobody reads"
    paced.go_on.set()
    takes.set()
    await wire.task
    assert wire.body.endswith(b"data: [DONE]\n\n")


async def test_a_stream_is_cancelled_by_its_id(service: FakeService, client: httpx.AsyncClient) -> None:
    service.event_logs = MemoryEventLogs(LogLimits(idle_check_s=0.01))
    service.script = Paced()
    wire = start(service)
    await wire.until_sent(b"Hel")
    stream_id = header(wire, resumable.STREAM_ID)
    answer = await client.delete(f"/v1/streams/{stream_id}")
    assert answer.json() == {"id": stream_id, "object": "stream", "cancelled": True}
    await wire.task
    assert service.open == 0
    assert b"cancelled" in wire.body
    assert not wire.body.endswith(b"[DONE]\n\n")


async def test_an_error_is_the_logs_last_event(service: FakeService, client: httpx.AsyncClient) -> None:
    service.script = paced = Paced(Unavailable("the engine was lost"))
    wire = start(service, "/v1/messages")
    await wire.until_sent(b"Hel")
    paced.go_on.set()
    await wire.task
    assert b"event: error" in wire.body
    again = await client.get(f"/v1/streams/{header(wire, resumable.STREAM_ID)}")
    assert again.content == wire.body


async def test_a_stream_that_is_too_long_ends(service: FakeService) -> None:
    service.event_logs = MemoryEventLogs(LogLimits(log_bytes=400))
    service.script = paced = Paced()
    paced.go_on.set()
    wire = start(service)
    await wire.task
    assert b"resumable stream has at most" in wire.body
    assert service.open == 0


async def test_responses_resume_by_their_own_id(service: FakeService, client: httpx.AsyncClient) -> None:
    whole = await client.post("/v1/responses", json=REQUESTS["/v1/responses"], headers=RESUME)
    response_id = whole.headers["x-emberline-stream-id"]
    events = [json.loads(line[6:]) for line in whole.text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["id"] == response_id
    query = {"stream": "true", "starting_after": 2}
    again = await client.get(f"/v1/responses/{response_id}", params=query)
    rest = [json.loads(line[6:]) for line in again.text.splitlines() if line.startswith("data: ")]
    assert rest == events[3:]
    without = (await client.post("/v1/responses", json=REQUESTS["/v1/responses"] | {"stream": False})).json()
    refused = await client.get(f"/v1/responses/{without['id']}", params=query)
    assert (refused.status_code, resumable.HEADER in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("given", ["soon", "4", "3601", "-1", "1.5"])
async def test_a_bad_grace_period_is_refused(client: httpx.AsyncClient, service: FakeService, given: str) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT, headers={resumable.HEADER: given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, resumable.HEADER)
    assert service.open == 0


async def test_what_is_refused_has_a_status(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "none"}, headers=RESUME)
    assert answer.status_code == 404
    for query, headers in (({"starting_after": "x"}, {}), ({}, {"last-event-id": "x"})):
        assert (await client.get("/v1/streams/a", params=query, headers=headers)).status_code == 400
    assert (await client.delete("/v1/streams/a")).status_code == 404


async def test_someone_elses_stream_does_not_exist(service: FakeService, accounts: AccountService) -> None:
    keys = [await accounts.create_key(Actor("test"), name) for name in ("acme", "other")]
    async with client_of(service, KEY, accounts=accounts) as client:
        mine, other = ({"authorization": f"Bearer {created.key.text}"} for created in keys)
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=mine | RESUME)
        url = f"/v1/streams/{answer.headers['x-emberline-stream-id']}"
        assert (await client.get(url, headers=other)).status_code == 404
        assert (await client.delete(url, headers=other)).status_code == 404
        assert (await client.get(url, headers=mine)).content == answer.content
