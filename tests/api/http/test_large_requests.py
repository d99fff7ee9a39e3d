"""Large requests are served by another process, here another thread, and no request stalls the event loop."""

import asyncio
import gc
import json
import math
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.api.http import body as bodies
from emberline.api.http.exchange import RequestLimits
from emberline.api.http.large_requests import STALL_S, LargeRequestRelay
from emberline.net.http_server import serve
from emberline.protocol.complete_response import StoredResponse
from emberline.text.text_model import TextModel
from tests.api.adversarial import attacks
from tests.api.fake_service import KEY, MODEL, FakeService, app_of
from tests.api.loopback import on_loopback
from tests.net.test_http_server import slowly, wait_for
from tests.service.conftest import MODEL as SERVED
from tests.service.conftest import Opener, open_one, say, text_model
from tests.service.fake_engine import FakeEngine, Script

__all__ = ["open_one", "say", "text_model"]  # fixtures

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
LARGE = CHAT | {"padding": "x" * bodies.LARGE_BYTES}
MANY_VALUES = CHAT | {"padding": [[]] * bodies.LARGE_VALUES}
HEADERS = {"authorization": f"Bearer {KEY}", "origin": "http://page.example"}


class Pair:
    """An app that relays large requests, and the app that serves them on a Unix socket."""

    def __init__(self, path: Path, stall_s: float = STALL_S) -> None:
        self.small, self.large = FakeService(), FakeService()
        self.path = path
        options: Any = {"key": KEY, "origins": ("http://page.example",)}
        self.app = app_of(self.small, large_requests=LargeRequestRelay(path, stall_s), **options)
        self.worker = app_of(self.large, **options)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686", headers=HEADERS)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path / "large.sock")
    with on_loopback(pair.worker, path=pair.path):
        yield pair


async def in_chunks(body: dict[str, Any]) -> AsyncIterator[bytes]:
    whole = json.dumps(body).encode()
    for at in range(0, len(whole), 100_000):
        yield whole[at : at + 100_000]


@pytest.mark.parametrize("body", [LARGE, MANY_VALUES], ids=["bytes", "values"])
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_large_requests_are_served_elsewhere(pair: Pair, body: dict, announced: bool, stream: bool) -> None:
    body = body | {"stream": stream}
    async with pair.client() as client:
        path = "/v1/chat/completions?x=1"
        answer = await client.post(path, json=body) if announced else await client.post(path, content=in_chunks(body))
        assert answer.status_code == 200, answer.text
        assert "lo" in answer.text if stream else answer.json()["choices"][0]["message"]["content"] == "Hello!"
        assert answer.headers.get_list("access-control-allow-origin") == ["http://page.example"]
        assert answer.headers.get_list("x-request-id") == [pair.large.requests[0].id]
        assert not pair.small.requests
        assert (await client.post(path, json=CHAT)).status_code == 200
    assert [request.messages for request in pair.small.requests] == [pair.large.requests[0].messages]


async def test_errors_come_back(pair: Pair) -> None:
    async with pair.client() as client:
        answer = await client.post("/v1/chat/completions", json=LARGE | {"temperature": 9})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
        answer = await client.post("/v1/chat/completions", json=CHAT | {"x": "y" * RequestLimits().max_body_bytes})
        assert answer.status_code == 413
        answer = await client.post("/v1/chat/completions", json=LARGE, headers={"authorization": "Bearer no"})
        assert answer.status_code == 401
    assert not pair.large.requests


async def test_a_long_conversation_is_read_elsewhere(pair: Pair) -> None:
    long = StoredResponse(
        id=f"resp_{'0' * 32}",
        account="local",
        parent=None,
        depth=0,
        created_us=0,
        input=json.dumps([{"type": "message", "role": "user", "content": "x" * bodies.LARGE_BYTES}]),
        body='{"status": "completed", "output": []}',
    )
    for service in (pair.small, pair.large):
        await service.responses.put(long)
    async with pair.client() as client:
        body = {"model": MODEL, "input": "Hi", "previous_response_id": long.id}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
        assert (await client.get(f"/v1/responses/{long.id}/input_items")).status_code == 200
    assert not pair.small.requests
    assert len(pair.large.requests) == 1


async def test_the_body_is_not_kept_while_its_response_is_relayed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    relay = LargeRequestRelay.relay

    async def recorded(self: LargeRequestRelay, call: Any, max_bytes: int) -> None:
        kept.append(sys.exc_info()[1])  # its frames hold what has been read
        await relay(self, call, max_bytes)
        kept.extend(call.received)

    monkeypatch.setattr(LargeRequestRelay, "relay", recorded)
    async with pair.client() as client:
        assert (await client.post("/v1/chat/completions", json=MANY_VALUES)).status_code == 200
    assert kept == [None]
    async with asyncio.timeout(60):  # the worker, a thread of this process here, may still hold what it has received
        while bodies.held_bodies.n_bytes:
            await asyncio.sleep(0.001)


async def test_without_the_worker(tmp_path: Path) -> None:
    async with Pair(tmp_path / "large.sock").client() as client:
        answer = await client.post("/v1/chat/completions", json=LARGE)
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"], ids=["at once", "later"])
def test_a_worker_that_dies(tmp_path: Path, sent: bytes) -> None:
    pair = Pair(tmp_path / "large.sock")
    with socket.socket(socket.AF_UNIX) as listener, on_loopback(pair.app) as server:
        listener.bind(str(pair.path))
        listener.listen()

        def die() -> None:
            with listener.accept()[0] as connection:
                if sent:
                    connection.recv(1)  # the relay refuses a reply that comes before its request
                    connection.sendall(sent)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 20):
                        pass

        dying = threading.Thread(target=die)
        dying.start()
        with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as client:
            if sent:
                with pytest.raises(httpx.TransportError):
                    client.post("/v1/chat/completions", json=LARGE)
            else:
                assert client.post("/v1/chat/completions", json=LARGE).status_code == 503
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        dying.join()


@pytest.mark.parametrize("announced", [True, False])
async def test_a_worker_that_does_not_read(tmp_path: Path, announced: bool) -> None:
    pair = Pair(tmp_path / "large.sock", stall_s=0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(pair.path))
        listener.listen()
        async with pair.client() as client:
            body: Any = {"json": LARGE} if announced else {"content": in_chunks(LARGE)}
            answer = await client.post("/v1/chat/completions", **body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "too many are waiting" in answer.text


def test_a_client_that_leaves(pair: Pair) -> None:
    pair.large.script = slowly(10_000)
    with on_loopback(pair.app) as server:
        with (
            httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=LARGE | {"stream": True}) as answer,
        ):
            pieces = answer.iter_bytes()
            next(pieces)
            assert pair.large.open == 1
        wait_for(lambda: pair.large.open == 0)


STALL_MS = 100


async def longest_stall(stop: asyncio.Event) -> float:
    """Milliseconds of processor time that this thread's event loop spent at once, without running other tasks."""
    longest_s, last_s = 0.0, time.thread_time()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now_s = time.thread_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return 1000 * longest_s


async def test_no_request_stalls_the_event_loop(
    tmp_path: Path, open_one: Opener, say: Callable[..., Script], text_model: TextModel
) -> None:
    """In sizes that are served here, up to the most values and the most bytes, and in one that is relayed."""
    path, stop = tmp_path / "large.sock", asyncio.Event()
    engine = await FakeEngine(tmp_path / "long.sock", say("Hello!"), context_len=1 << 16).start()
    service = await open_one(engine)
    gc.collect()
    gc.freeze()  # as a server does when it has started
    app: Any = app_of(service, large_requests=LargeRequestRelay(path))  # type: ignore[arg-type]
    with on_loopback(app_of(FakeService()), path=path), socket.create_server(("127.0.0.1", 0)) as sock:
        serving = asyncio.create_task(serve(app, sock, drain_s=0.2, stop=stop))
        with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=60) as client:
            stalls: dict[tuple[str, int], float] = {}
            for n_bytes in (1, 150_000, bodies.LARGE_BYTES - 4096, 2 * bodies.LARGE_BYTES):
                for name in attacks(SERVED, n_bytes):
                    for n in range(3):  # a noisy machine does not stall each time
                        # Another size, so that no cache knows it from the try before.
                        url, content = attacks(SERVED, n_bytes + 200 * n)[name]
                        done = asyncio.Event()
                        stall = asyncio.create_task(longest_stall(done))
                        answer = await asyncio.to_thread(client.post, url, content=content)
                        done.set()
                        stalls[name, n_bytes] = min(await stall, stalls.get((name, n_bytes), math.inf))
                        assert answer.status_code < 500, (name, answer.text)
                        if stalls[name, n_bytes] < STALL_MS:
                            break
        stop.set()
        await serving
    await engine.die()
    assert max(stalls.values()) < STALL_MS, sorted(stalls.items(), key=lambda item: -item[1])[:5]
