"""The HTTP server: uvicorn on uvloop and httptools, with graceful shutdown and limits on slow clients."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from emberline.net.websocket_server import MAX_MESSAGE_BYTES, PING_INTERVAL_S, BoundedWebSocket

# The ASGI interface between this server and the application.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

DISCONNECTED = "emberline.disconnected"  # key of a future in the scope, which is done once the connection is lost
BODY_ARRIVED = "emberline.body_arrived"  # key in the scope once the whole body has arrived: `receive` waits no more

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8192
MIN_CONNECTIONS = 64
RESERVED_FILES = 512  # for engines, upstream servers, the store, files being read
KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that they close first
CANCEL_TIMEOUT_S = 5.0  # for requests cancelled after the drain to send their error and release resources
# Bytes of a chunk that do not count against the head's limit: its size in 16 digits and two line ends.
_CHUNK_FRAMING_BYTES = 20
_BOUNDARY = -(1 << 40)  # lower than any count of bytes
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass
class ServerLimits:
    """Limits on what one client may send, or leave unread."""

    # Request line, headers, chunk extensions and trailers of a request, checked after each read.
    head_bytes: int = 64 << 10
    # From the start of the connection, or of a head, to the end of the head.
    head_timeout_s: float = 30.0
    # For a client to read anything after the send buffers are full.
    write_timeout_s: float = 120.0
    # Requests sent before the responses to earlier ones.
    n_pipelined: int = 16
    # Bytes that are read and dropped so that the client reads its answer: of a body after its response has begun, and
    # from a WebSocket after a refused message.
    discarded_bytes: int = 16 << 20
    # From the end of a response to the end of a body that the endpoint did not read, and from the close frame after a
    # refused WebSocket message to the end of the connection.
    discard_timeout_s: float = 10.0
    # Open connections of the process; None: as many as the limit on open files allows.
    n_connections: int | None = None
    # WebSockets among them. Each may hold a message of `MAX_MESSAGE_BYTES` that is not complete yet.
    n_websockets: int = 512


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    drain_s: float = 30.0,
    stop: asyncio.Event | None = None,
    limits: ServerLimits | None = None,
) -> None:
    """Serve on a bound socket until SIGTERM, SIGINT, SIGHUP or `stop`.

    Then no new connections are accepted, running requests may finish within `drain_s`, and the rest are cancelled with
    an error.
    """
    limits = limits or ServerLimits()
    connections = _Connections(limits.n_connections or max_connections(), limits.n_websockets)
    config = uvicorn.Config(
        app,
        http=partial(_BoundedProtocol, connections, limits),  # type: ignore[arg-type]
        ws=partial(  # type: ignore[arg-type]
            BoundedWebSocket,
            connections,
            write_timeout_s=limits.write_timeout_s,
            discarded_bytes=limits.discarded_bytes,
            discard_timeout_s=limits.discard_timeout_s,
        ),
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_INTERVAL_S,
        ws_per_message_deflate=False,  # as for bodies: a few bytes must not become many
        loop="none",  # uses the caller's
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    stop = stop or asyncio.Event()
    with _signals(stop):
        await _Server(config, stop, connections, drain_s).serve(sockets=[sock])


class _Server(uvicorn.Server):
    """uvicorn that waits for events: to stop, and during the drain. uvicorn itself polls ten times a second."""

    def __init__(
        self, config: uvicorn.Config, stop: asyncio.Event, connections: "_Connections", drain_s: float
    ) -> None:
        super().__init__(config)
        self._stop = stop
        self._connections = connections
        self._drain_s = drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self._stop.is_set():
            await self.on_tick(0)  # updates the Date header
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections, let requests finish within the drain time, and cancel the rest."""
        for closing in (*self.servers, *(sockets or ())):
            closing.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self._requests_finished()
        if late := set(self.server_state.tasks):
            log.warning("requests cancelled at the end of the drain", extra={"requests": len(late)})
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=CANCEL_TIMEOUT_S)

    async def _requests_finished(self) -> None:
        """Return when every connection has closed and every request has ended."""
        while open_connections := list(self.server_state.connections):
            self._connections.changed.clear()
            for connection in open_connections:
                connection.shutdown()  # closes it if it is idle, else after its response
            await self._connections.changed.wait()
        while self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks)
        for server in self.servers:
            await server.wait_closed()


class _Connections:
    """Counts the server's connections.

    Beyond `most`, the connection that has waited longest for its client to send a request is closed: idle clients, and
    clients that send their head slowly, would otherwise keep everyone else out.
    """

    def __init__(self, most: int, most_websockets: int) -> None:
        self._most = most
        self._most_websockets = most_websockets
        self._n_open = 0
        self._n_websockets = 0
        self.waiting: dict[_BoundedProtocol, None] = {}  # longest first
        self.changed = asyncio.Event()  # a connection was opened or lost

    def open(self, connection: "_BoundedProtocol") -> bool:
        """Register a connection, closing the longest-waiting one at the limit. Returns False if all others are busy."""
        self._n_open += 1
        self.changed.set()
        if self._n_open > self._most:
            oldest = next(iter(self.waiting), None)
            if oldest is None:
                return False
            del self.waiting[oldest]
            oldest.transport.abort()
        self.waiting[connection] = None
        return True

    def open_websocket(self) -> bool:
        """Count a connection as a WebSocket. Returns False if there are too many."""
        self._n_websockets += 1
        return self._n_websockets <= self._most_websockets

    def lost(self, connection: "_BoundedProtocol") -> None:
        """Forget a connection that has closed."""
        self._n_open -= 1
        self.changed.set()
        self.waiting.pop(connection, None)

    def websocket_lost(self) -> None:
        """Forget a WebSocket that has closed."""
        self._n_websockets -= 1
        self._n_open -= 1
        self.changed.set()


def max_connections() -> int:
    """Most connections of one process: its limit on open files, less the files that it needs itself."""
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, n_files - RESERVED_FILES))


class _BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on what a client may send without having it read, and on how long it takes.

    `_framing_bytes` counts what a client sends besides bodies since the last boundary, the end of a head or a request:
    the parser keeps a header or a trailer in memory until it is complete.
    """

    def __init__(self, connections: _Connections, limits: ServerLimits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._all = connections
        self._limits = limits
        self._in_head = True
        self._in_body = False  # or in the trailers after it
        self._upgrades = False  # the request becomes a WebSocket
        self._framing_bytes = 0
        self._discarded_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lost: asyncio.Future[None] = self.loop.create_future()
        if not self._all.open(self):
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.lost(self)
        self._lost.set_result(None)
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        _cancel(self._discard_timer)
        if self._running is not None:  # uvicorn notifies only the last request of a pipeline
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._framing_bytes += len(data)  # on_body subtracts
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._framing_bytes = max(0, self._framing_bytes)  # how much of this read came after a boundary is not known
        if self._framing_bytes > self._limits.head_bytes:
            self._refuse_head()
        elif self._discarded_bytes > self._limits.discarded_bytes:
            self.transport.close()
        elif self._head_timer is None and not self._in_body and (self._in_head or self._framing_bytes):
            self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[DISCONNECTED] = self._lost  # type: ignore[literal-required]
        self._in_head, self._upgrades = True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # a trailer must not pass for a header: nothing has checked it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._upgrades = self._is_idle and self._asks_for_websocket() and super()._should_upgrade()
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._framing_bytes = _BOUNDARY
        self._discarded_bytes = 0
        self._all.waiting.pop(self, None)
        _cancel(self._head_timer)
        self._head_timer = None
        if len(self.pipeline) > self._limits.n_pipelined:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()  # to notice a disconnect

    def _should_upgrade(self) -> bool:
        return self._upgrades

    def _asks_for_websocket(self) -> bool:
        """True if the request may become a WebSocket. One with a body is answered as any other request."""
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        return self.parser.get_method() == b"GET" and not has_body

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body) + _CHUNK_FRAMING_BYTES
        if self.cycle.response_started:
            self._discarded_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.scope[BODY_ARRIVED] = True  # type: ignore[literal-required]
        self.flow.resume_reading()  # paused for a long body: to notice a disconnect
        self._in_body = False
        self._framing_bytes = _BOUNDARY
        _cancel(self._discard_timer)
        if self._upgrades:
            return
        if self.cycle.response_complete:  # uvicorn cancelled its timer when the rest of the body arrived
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall_timer)

    def on_response_complete(self) -> None:
        if self._in_body and self._running is self.cycle and not self.transport.is_closing():
            self._discard_timer = self.loop.call_later(self._limits.discard_timeout_s, self.transport.close)
        super().on_response_complete()
        if self._is_idle:  # else uvicorn has started the next request of the pipeline
            self._all.waiting[self] = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["method"] != "HEAD":  # whose responses have no body
            cycle.transport = _HeadFirst(cycle, self.loop)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    @property
    def _is_idle(self) -> bool:
        return self._running is None or self._running.response_complete

    def _refuse_head(self) -> None:
        """Close the connection, with a 431 unless it would end up in another response or after the request's own."""
        unanswered = self._running is self.cycle and not self.cycle.response_started if self._in_body else self._is_idle
        if unanswered:
            self.transport.write(_HEAD_TOO_LARGE)
        self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_timed_out)

    def _head_timed_out(self) -> None:
        if self._is_idle:
            self.transport.close()
        else:  # the next request of the pipeline may wait for the running one
            self._start_head_timer()


class _HeadFirst:
    """The transport of a response whose head has not been sent: the head goes out in one write with the first bytes of
    the body, or in the next iteration of the event loop if these take longer."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._loop = loop
        self._head = b""
        self.is_closing = self._transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head:
            self._send(self._head + data)
        elif self._cycle.response_started:
            self._head = data
            self._loop.call_soon(self._flush)
        else:  # 100 Continue
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._send(self._head)

    def _send(self, data: bytes) -> None:
        self._head = b""
        self._cycle.transport = self._transport
        self._transport.write(data)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` on SIGTERM, SIGINT and SIGHUP; only in the main thread, which alone receives signals.

    SIGHUP, with which a closed terminal ends a process, stays ignored under `nohup`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
