"""The HTTP server: uvicorn on uvloop and httptools, with graceful shutdown and limits on slow clients."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from emberline.api.http.call import ASGIApp

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10  # request line and headers, checked after each read
HEAD_TIMEOUT_S = 30.0  # from the start of the connection, or of the head, to its end
WRITE_TIMEOUT_S = 120.0  # for a client to read anything once the send buffers are full
MAX_CONNECTIONS = 8192
MIN_CONNECTIONS = 64
RESERVED_FILES = 512  # for engines, upstream servers, the store, files being read
MAX_PIPELINED = 16  # requests sent before the responses to earlier ones
KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that they close first
CANCEL_TIMEOUT_S = 5.0  # for requests cancelled after the drain to send their error and release resources
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


async def serve(app: ASGIApp, sock: socket.socket, *, drain_s: float = 30.0, stop: asyncio.Event | None = None) -> None:
    """Serve on a bound socket until SIGTERM, SIGINT, SIGHUP or `stop`.

    Then no new connections are accepted, running requests may finish within `drain_s`, and the rest are cancelled with
    an error.
    """
    config = uvicorn.Config(
        app,
        http=partial(_BoundedProtocol, _Connections(max_connections())),  # type: ignore[arg-type]
        ws="none",
        loop="none",  # uses the caller's
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_s,  # type: ignore[arg-type]  # seconds, passed to asyncio unchanged
    )
    stop = stop or asyncio.Event()
    with _signals(stop):
        await _Server(config, stop).serve(sockets=[sock])


class _Server(uvicorn.Server):
    """uvicorn that stops on an event instead of a signal, and wakes once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self._stop.is_set():
            await self.on_tick(0)  # updates the Date header
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if cancelled := set(self.server_state.tasks):
            log.warning("requests cancelled at the end of the drain", extra={"requests": len(cancelled)})
            await asyncio.wait(cancelled, timeout=CANCEL_TIMEOUT_S)


class _Connections:
    """Counts the server's connections. Beyond `most`, those give way that have waited longest for a client to send a
    request: idle ones, and ones that send their head slowly, which would otherwise keep everyone else out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._n_open = 0
        self.waiting: dict[_BoundedProtocol, None] = {}  # longest first

    def open(self, connection: "_BoundedProtocol") -> bool:
        """Whether there is room for it: always, unless all others have requests that run."""
        self._n_open += 1
        if self._n_open > self._most:
            oldest = next(iter(self.waiting), None)
            if oldest is None:
                return False
            del self.waiting[oldest]
            oldest.transport.abort()
        self.waiting[connection] = None
        return True

    def lost(self, connection: "_BoundedProtocol") -> None:
        self._n_open -= 1
        self.waiting.pop(connection, None)


def max_connections() -> int:
    """Of one process: as many as may be open as files, less those that it needs itself."""
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, n_files - RESERVED_FILES))


class _BoundedProtocol(HttpToolsProtocol):
    """Adds the timeouts that uvicorn lacks: for a request head to end, and for a client to read its response."""

    def __init__(self, connections: "_Connections", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._all = connections
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.open(self):
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.lost(self)
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        if self._running is not None:  # uvicorn notifies only the last request of a pipeline
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head:
            return
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_timed_out)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._all.waiting.pop(self, None)
        self._head_bytes = 0
        _cancel(self._head_timer)
        self._head_timer = None
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()  # to notice a disconnect

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall_timer)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._running is None or self._running.response_complete:  # else uvicorn has started the next of a pipeline
            self._all.waiting[self] = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _head_timed_out(self) -> None:
        if self._running is None or self._running.response_complete:
            self.transport.close()
        else:  # the next request of the pipeline may wait for the running one
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_timed_out)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP set `stop`; only in the main thread, which alone receives signals. SIGHUP, with which
    a closed terminal ends a process, stays ignored under `nohup`."""
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
