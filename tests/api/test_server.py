"""The server under the app: real sockets, its limits, its end."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from emberline.api import body as bodies
from emberline.api.server import MAX_HEAD_BYTES, serve
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, TextEvent
from emberline.protocol.request import GenerateRequest

from .loopback import on_loopback
from .scripted import MODEL, USAGE, ScriptedService, app_of

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def slowly(count: int):
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(USAGE)
        for number in range(count):
            yield TextDelta(0, f"{number} ")
            await asyncio.sleep(0.02)
        yield ChoiceDone(0, "stop")
        yield Completed(USAGE)

    return script


def wait_for(true, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_stops_the_work(stream: bool) -> None:
    service = ScriptedService(slowly(10_000))
    with on_loopback(app_of(service)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            body = httpx.Request("POST", server.url, json=CHAT | {"stream": stream}).content
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            if stream:
                assert b"200 OK" in raw.recv(100)
            wait_for(lambda: service.open == 1)
        wait_for(lambda: service.open == 0, 1)


def test_a_drain_lets_streams_finish() -> None:
    service = ScriptedService(slowly(30))
    with on_loopback(app_of(service), drain_s=10) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            wait_for(lambda: refused(server.port))
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert any("29 " in line for line in rest)
        server.join()


def test_a_drain_has_a_limit() -> None:
    service = ScriptedService(slowly(100_000))
    with on_loopback(app_of(service), drain_s=0.2) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            lines = answer.iter_lines()
            next(lines)
            began = time.monotonic()
            server.stop()
            rest = list(lines)
        assert time.monotonic() - began < 3
        assert "the server is stopping" in rest[-2]
        assert service.open == 0
        server.join()


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return True
    return False


def send_for_ever(raw: socket.socket) -> None:
    for _ in range(100):
        raw.sendall(b"x" * (MAX_HEAD_BYTES // 2))
        time.sleep(0.01)


def test_endless_heads_are_cut_off() -> None:
    with on_loopback(app_of(ScriptedService())) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                send_for_ever(raw)
        headers = {"x-long": "x" * (MAX_HEAD_BYTES // 2)}
        assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200


def test_large_heads_get_an_answer() -> None:
    with on_loopback(app_of(ScriptedService())) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * (MAX_HEAD_BYTES + 1))
        assert raw.recv(100).startswith(b"HTTP/1.1 431 ")


def test_odd_bytes_leave_the_server_standing() -> None:
    with on_loopback(app_of(ScriptedService())) as server:
        for raw_request in (
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n{",
            b"GET /v1/models HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(raw_request)
                raw.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    raw.recv(1000)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_body_over_the_limit_over_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1 << 20)
    with on_loopback(app_of(ScriptedService())) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(2):  # the connection is still good
            assert client.post("/v1/completions", content=b"x" * (2 << 20)).status_code == 413


async def test_sigterm_ends_it() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    server = asyncio.create_task(serve(app_of(ScriptedService()), sock, drain_s=1))
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(server, 5)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
