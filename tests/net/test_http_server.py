"""The HTTP server on real sockets: limits, timeouts, graceful shutdown."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from emberline.api.http.exchange import RequestLimits
from emberline.net import http_server as servers
from emberline.net.http_server import BODY_ARRIVED, ASGIApp, Receive, Scope, Send, ServerLimits, serve
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, TextEvent
from emberline.protocol.request import GenerateRequest
from tests.api.fake_service import MODEL, USAGE, FakeService, app_of
from tests.api.loopback import Loopback, on_loopback

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
PATIENCE_S = 60.0
MAX_HEAD_BYTES = ServerLimits().head_bytes


@contextlib.contextmanager
def served(
    service: FakeService | None = None, key: str | None = None, **limits: float
) -> Iterator[tuple[Loopback, socket.socket]]:
    """A server with these limits, and a connection to it."""
    app = app_of(service or FakeService(), key)
    bounds = ServerLimits(**limits)  # type: ignore[arg-type]
    with on_loopback(app, limits=bounds) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        yield server, raw


def slowly(count: int):
    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(USAGE)
        for number in range(count):
            yield TextDelta(0, f"{number} ")
            await asyncio.sleep(0.02)
        yield ChoiceDone(0, "stop")
        yield Completed(USAGE)

    return script


def held(release: threading.Event):
    """A stream that says "0 " and goes on with "1 " once `release` is set."""

    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(USAGE)
        yield TextDelta(0, "0 ")
        while not release.is_set():
            await asyncio.sleep(0.005)
        yield TextDelta(0, "1 ")
        yield ChoiceDone(0, "stop")
        yield Completed(USAGE)

    return script


def wait_for(true) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n_chars", [1, 300_000])  # beyond its buffer the server stops reading for a while
def test_a_closed_connection_stops_generation(stream: bool, n_chars: int) -> None:
    service = FakeService(slowly(10_000))
    with on_loopback(app_of(service)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(post(CHAT | {"stream": stream, "messages": [{"role": "user", "content": "x" * n_chars}]}))
            if stream:
                assert b"200 OK" in raw.recv(100)
            wait_for(lambda: service.open == 1)
        wait_for(lambda: service.open == 0)


def test_a_drain_lets_streams_finish() -> None:
    release = threading.Event()
    service = FakeService(held(release))
    with (
        on_loopback(app_of(service), drain_s=PATIENCE_S) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            wait_for(lambda: refused(server.port))
            release.set()
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert any("1 " in line for line in rest)
        server.join()


def test_a_drain_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService(slowly(100_000))
    with (
        on_loopback(app_of(service), drain_s=0.2) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            lines = answer.iter_lines()
            next(lines)
            began = time.monotonic()
            server.stop()
            rest = list(lines)
        assert time.monotonic() - began < 30
        assert "the server is stopping" in rest[-2]
        wait_for(lambda: service.open == 0)
        server.join()
    assert not [record for record in caplog.records if record.exc_info]  # told to the client, not a failure of ours


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return True
    return False


def send_for_ever(raw: socket.socket) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        raw.sendall(b"x" * (MAX_HEAD_BYTES // 2))
        time.sleep(0.01)


def test_endless_request_heads_are_closed() -> None:
    with on_loopback(app_of(FakeService())) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                send_for_ever(raw)
        headers = {"x-long": "x" * (MAX_HEAD_BYTES // 2)}
        assert httpx.get(f"{server.url}/health", headers=headers, timeout=PATIENCE_S).status_code == 200


def test_the_limit_on_open_files_bounds_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (servers.RESERVED_FILES + 100, hard))
    try:
        assert servers.max_connections() == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_half_sent_heads_lock_nobody_out() -> None:
    """The server closes those that have waited longest, and not a stream that runs."""
    release, most = threading.Event(), 100
    with (
        on_loopback(app_of(FakeService(held(release))), limits=ServerLimits(n_connections=most)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT) as streamed,
        contextlib.ExitStack() as stack,
    ):
        lines = streamed.iter_lines()
        next(lines)
        half_sent = []
        for _ in range(most + 30):
            half_sent.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)))
            half_sent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: ")
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
        with contextlib.suppress(ConnectionResetError):
            assert not half_sent[0].recv(1)
        release.set()
        assert "data: [DONE]" in list(lines)


def test_connections_beyond_the_limit_are_told() -> None:
    service = FakeService(slowly(10_000))
    with on_loopback(app_of(service), limits=ServerLimits(n_connections=2)) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            raw.sendall(post(CHAT))
        wait_for(lambda: service.open == 2)
        answer = httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        raw.close()
        wait_for(lambda: service.open == 1)
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200


def test_large_request_heads_get_a_response() -> None:
    with on_loopback(app_of(FakeService())) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * (MAX_HEAD_BYTES + 1))
        assert raw.recv(100).startswith(b"HTTP/1.1 431 ")


def test_invalid_bytes_do_not_stop_the_server() -> None:
    with on_loopback(app_of(FakeService())) as server:
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
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200


def test_a_body_over_the_limit_over_a_socket() -> None:
    app = app_of(FakeService(), limits=RequestLimits(max_body_bytes=1 << 20))
    with on_loopback(app) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for _ in range(2):  # the connection is still good
            assert client.post("/v1/completions", content=b"x" * (2 << 20)).status_code == 413


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_it(number: signal.Signals) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    server = asyncio.create_task(serve(app_of(FakeService()), sock, drain_s=1))
    async with asyncio.timeout(60):
        while signal.getsignal(number) is signal.SIG_DFL:
            await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(server, 60)
    assert signal.getsignal(number) is signal.SIG_DFL


async def test_a_closed_terminal_does_not_end_it_under_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    stop, added = asyncio.Event(), []
    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", lambda number, act: added.append(number))
    monkeypatch.setattr(asyncio.get_running_loop(), "remove_signal_handler", lambda number: None)
    stop.set()
    await serve(app_of(FakeService()), socket.create_server(("127.0.0.1", 0)), drain_s=1, stop=stop)
    assert added == [signal.SIGTERM, signal.SIGINT]


def closed_by_server(raw: socket.socket) -> bool:
    raw.settimeout(PATIENCE_S)
    return raw.recv(100) == b""


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc", b"\r\n"])
def test_request_head_timeout(sent: bytes) -> None:
    with served(head_timeout_s=0.1) as (_, raw):
        raw.sendall(sent)
        assert closed_by_server(raw)


@pytest.mark.parametrize("sent", [b"GET /hea", b"\r\n"])
def test_second_request_head_timeout(sent: bytes) -> None:
    limits = ServerLimits()
    app = app_of(FakeService())
    with on_loopback(app, limits=limits) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        for _ in range(2):
            raw.sendall(b"GET /favicon.ico HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"204 No Content" in read_until(raw, b"\r\n\r\n")
            limits.head_timeout_s = 0.05  # not for the first: this thread may wait for a core
            time.sleep(0.1)  # idle between requests is not late
        raw.sendall(sent)
        assert closed_by_server(raw)


def test_a_late_second_head_does_not_end_the_running_response() -> None:
    limits = ServerLimits()
    app = app_of(FakeService(slowly(10)))
    with on_loopback(app, limits=limits) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(post(CHAT))
        read_until(raw, b"0 ")
        limits.head_timeout_s = 0.05
        raw.sendall(b"GET /hea")
        assert read_until(raw, b"[DONE]").endswith(b"[DONE]")


def test_a_client_that_does_not_read() -> None:
    async def flood(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(USAGE)
        while True:
            yield TextDelta(0, "x" * 100_000)
            await asyncio.sleep(0)

    service = FakeService(flood)
    with served(service, write_timeout_s=0.1) as (_, raw):
        raw.sendall(post(CHAT))
        wait_for(lambda: service.requests)
        wait_for(lambda: service.open == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_pipelines_and_leaves(stream: bool) -> None:
    service = FakeService(slowly(10_000))
    with on_loopback(app_of(service)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(2 * post(CHAT | {"stream": stream}))
            wait_for(lambda: service.open == 1)
        wait_for(lambda: service.open == 0)


def test_pipelined_requests_are_answered_in_turn() -> None:
    with on_loopback(app_of(FakeService())) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(3 * post(CHAT))
        assert read_until(raw, b"[DONE]", 3).count(b"200 OK") == 3


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": []}


@contextlib.contextmanager
def connected_to(app: ASGIApp) -> Iterator[socket.socket]:
    with on_loopback(app) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(PATIENCE_S)
        yield raw


def test_a_head_is_sent_with_the_first_bytes_of_its_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await send({"type": "http.response.body", "body": b"last"})

    with connected_to(app) as raw:
        raw.sendall(GET)
        read_until(raw, b"0\r\n\r\n")
        n_segments = struct.unpack_from("I", raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 152)
        assert n_segments == (2,)  # tcpi_data_segs_in


def test_a_head_does_not_wait_for_its_body() -> None:
    release = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await asyncio.to_thread(release.wait, PATIENCE_S)
        await send({"type": "http.response.body", "body": b"late"})

    with connected_to(app) as raw:
        raw.sendall(GET)
        head = read_until(raw, b"\r\n\r\n")
        release.set()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"late" not in head
        assert b"late" in read_until(raw, b"0\r\n\r\n")


def test_a_failure_after_the_head_leaves_the_head() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        raise RuntimeError("no body")

    with connected_to(app) as raw:
        raw.sendall(GET)
        assert read_until(raw, b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")
        assert raw.recv(1) == b""


def test_the_scope_tells_when_the_body_has_arrived() -> None:
    has_arrived: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        has_arrived.append(BODY_ARRIVED in scope)
        while (await receive())["more_body"]:
            has_arrived.append(BODY_ARRIVED in scope)
        has_arrived.append(BODY_ARRIVED in scope)
        await send(START)
        await send({"type": "http.response.body", "body": b""})

    request = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nab"
    with connected_to(app) as raw:
        raw.sendall(request)
        wait_for(lambda: len(has_arrived) == 2)
        raw.sendall(b"cd")
        read_until(raw, b"0\r\n\r\n")
        assert has_arrived == [False, False, True]


def test_too_many_pipelined_requests() -> None:
    service = FakeService(slowly(10_000))
    with on_loopback(app_of(service)) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall((ServerLimits().n_pipelined + 3) * post(CHAT | {"stream": False}))
        wait_for(lambda: service.requests and service.open == 0)


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LINES = b"X-Trailer: aaaa\r\n" * 4096
ENDLESS = {
    "trailers": (CHUNKED + b"0\r\n", LINES),
    "one trailer": (CHUNKED + b"0\r\nX-Trailer: ", b"a" * 65536),
    "a trailer's name": (CHUNKED + b"0\r\n", b"a" * 65536),
    "a chunk's extension": (CHUNKED + b"1;name=", b"a" * 65536),
    "a chunk's size": (CHUNKED, b"0" * 65536),
    "extensions of one-byte chunks": (CHUNKED, (b"1;" + b"a" * 1000 + b"\r\nx\r\n") * 64),
    "headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", LINES),
    "empty lines": (b"", b"\r\n" * 32768),
    "trailers in a pipeline": (3 * (CHUNKED + b"0\r\n\r\n") + CHUNKED + b"0\r\n", LINES),
}


def sent_until_closed(raw: socket.socket, piece: bytes, limit: int) -> int:
    """Number of bytes that the client can send before the server closes the connection."""
    raw.settimeout(PATIENCE_S)
    n_sent = 0
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while n_sent < limit:
            n_sent += raw.send(piece)
    return n_sent


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("name", ENDLESS)
def test_what_is_sent_besides_a_body_is_bounded(name: str, key: str | None) -> None:
    """With a key that the client does not send, the request is refused and the rest of it is not wanted."""
    head, piece = ENDLESS[name]
    with served(key=key) as (server, raw):
        raw.sendall(head)
        assert sent_until_closed(raw, piece, 64 << 20) < 32 << 20  # the limit, and the buffers of two sockets
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200


def test_health_is_answered_while_trailers_come() -> None:
    with served(key="secret") as (server, raw), httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        raw.sendall(CHUNKED + b"0\r\n")
        raw.settimeout(PATIENCE_S)
        answers: list[int] = []
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while len(answers) < 100:
                raw.sendall(LINES[:8192])
                answers.append(client.get("/health").status_code)
        assert len(answers) < 20  # up to the limit of 64 KiB, then the connection closes
        assert set(answers) == {200}


def test_a_trailer_beyond_the_limit_gets_a_response() -> None:
    with served() as (_, raw):
        raw.sendall(CHUNKED + b"0\r\n" + b"x-trailer: ")
        sent_until_closed(raw, b"a" * 1024, 8 * MAX_HEAD_BYTES)
        assert raw.recv(100).startswith(b"HTTP/1.1 431 ")


def test_trailers_beyond_the_limit_do_not_corrupt_a_running_response() -> None:
    """The client gets its stream up to where the connection closes, and no second status line in it."""
    with served(FakeService(slowly(10_000))) as (_, raw):
        raw.sendall(post(CHAT))
        read = read_until(raw, b"0 ")
        raw.sendall(CHUNKED + b"0\r\nx-trailer: ")
        sent_until_closed(raw, b"a" * 65536, 64 << 20)
        with contextlib.suppress(ConnectionResetError):
            while piece := raw.recv(65536):
                read += piece
        assert read.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("n_chunk", [1, 1000])
def test_a_chunked_body_of_any_chunk_size_is_read(n_chunk: int) -> None:
    service = FakeService()
    whole = httpx.Request("POST", "http://localhost", json=CHAT | {"user": "u" * 50_000}).content
    chunks = [whole[at : at + n_chunk] for at in range(0, len(whole), n_chunk)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    with served(service) as (_, raw):
        raw.sendall(CHUNKED + body + b"0\r\nX-Trailer: a\r\n\r\n")
        assert b" 200 OK" in read_until(raw, b"[DONE]")


def test_a_trailer_does_not_pass_for_a_header() -> None:
    async def app(scope, receive, send) -> None:
        while (await receive())["more_body"]:
            pass
        names = b" ".join(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": names})

    with on_loopback(app) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(CHUNKED + b"0\r\nAuthorization: Bearer secret\r\n\r\n")
        assert b"host transfer-encoding\r\n" in read_until(raw, b"0\r\n\r\n")


@pytest.mark.parametrize("length", [b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 100000000000\r\n\r\n"])
def test_a_body_after_its_refusal_is_read_up_to_a_limit(length: bytes) -> None:
    with served(key="secret", discarded_bytes=1 << 20) as (_, raw):
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + length)
        assert b" 401 " in read_until(raw, b"\r\n\r\n")
        assert sent_until_closed(raw, b"10000\r\n" + b"x" * 65536 + b"\r\n", 64 << 20) < 32 << 20


def test_a_body_that_trickles_after_its_refusal() -> None:
    """Bytes that keep arriving do not keep the connection open."""
    with served(key="secret", discard_timeout_s=0.1) as (_, raw):
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 401 " in read_until(raw, b"\r\n\r\n")
        raw.settimeout(0.01)
        end = time.monotonic() + PATIENCE_S
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() < end:
                raw.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if raw.recv(1000) == b"":
                        break
        assert time.monotonic() < end


def test_a_short_body_after_its_refusal_leaves_the_connection_good() -> None:
    """The discard timeout ends with the body: a second connection, whose body never comes, tells when it has passed."""
    timeout_s = 0.4
    with served(key="secret", discard_timeout_s=timeout_s) as (server, other), contextlib.ExitStack() as stack:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        end_s, took_s = time.monotonic() + PATIENCE_S, timeout_s
        while took_s > timeout_s / 4:  # this thread was starved: the body may have come too late
            assert time.monotonic() < end_s
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            start_s = time.monotonic()
            raw.sendall(head)
            assert b" 401 " in read_until(raw, b"\r\n\r\n")
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                raw.sendall(b"x" * 9)
            took_s = time.monotonic() - start_s
        other.sendall(head)
        read_until(other, b"\r\n\r\n")
        while other.recv(65536):
            pass
        raw.sendall(b"GET /favicon.ico HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"204 No Content" in read_until(raw, b"\r\n\r\n")


def post(body: dict) -> bytes:
    whole = httpx.Request("POST", "http://localhost", json=body).content
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(whole)}\r\n\r\n"
    return head.encode() + whole


def read_until(raw: socket.socket, text: bytes, times: int = 1) -> bytes:
    raw.settimeout(PATIENCE_S)
    read = b""
    while read.count(text) < times:
        piece = raw.recv(65536)
        assert piece, read
        read += piece
    return read[: read.rindex(text) + len(text)]
