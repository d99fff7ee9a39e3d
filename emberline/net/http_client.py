"""The HTTP/1.1 client, for upstream servers, webhooks and large requests: connections over httptools, and exchanges.

Written by hand because it is the hot path of every forwarded token: docs/lab/2026-11-upstream.md compares it
with aiohttp.
"""

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from emberline.protocol.sizes import format_limit

MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 << 10  # status line and headers; after them, chunk extensions and trailers
MAX_BUFFERED_BYTES = 512 << 10  # of a reply that is not being read; then the server has to wait
MAX_REPLY_BYTES = 64 << 20
MAX_IDLE = 256  # connections
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0  # without a byte: a long prompt in a long queue; health checks find a dead server sooner
KEEP_ALIVE_S = 60.0
FRESH_S = 2.0  # idle for less, no server has closed the connection: vLLM and SGLang do after 5 s
CLOSED_S = 2.0  # a server that closes the connection later than this has seen the request, and may have computed it
_SWEEP_INTERVAL_S = 5.0
_COPY_BYTES = 32 << 10  # smaller bodies are sent in one write with the head
# Bytes of a chunk that do not count against MAX_HEAD_BYTES: its size in 16 digits and two line ends.
_CHUNK_FRAMING_BYTES = 20
_BOUNDARY = -(1 << 40)  # lower than any count of bytes


class ConnectionFailed(Exception):
    """The exchange ended before its reply did; the message says how."""

    def __init__(self, reason: str, *, untouched: bool = False, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.untouched = untouched  # no byte came back, so the server may not have seen the request
        self.timed_out = timed_out  # nothing came for too long


class MalformedReply(ConnectionFailed):
    """The server sent something other than HTTP."""


class HeadTooLarge(ConnectionFailed):
    """The server sent more headers, chunk extensions or trailers than are accepted."""


class Address(NamedTuple):
    host: str
    port: int
    tls: bool
    path: str  # prefix of every route, "" or "/like/this"

    @property
    def host_header(self) -> str:
        """The Host header, without a default port, as some servers' Host checks want it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse(url: str, keep_version: bool = False) -> Address:
    """Parse a base URL; ValueError says what is wrong. A trailing /v1, as base URLs often have it, is dropped, unless
    `keep_version`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://host:port")
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        raise ValueError(f"{parts.scheme}://{parts.hostname}/… must have no query, fragment, user or password")
    tls = parts.scheme == "https"
    port = parts.port  # ValueError where it is out of range
    path = parts.path.rstrip("/")
    if not keep_version:
        path = path.removesuffix("/v1")
    if any(not "!" <= char <= "~" for char in parts.hostname + path):
        raise ValueError(f"{url!r} has characters that a URL cannot have")
    return Address(parts.hostname, (443 if tls else 80) if port is None else port, tls, path)


class Exchange:
    """One request and its reply. The owner reads pieces until b"", or closes the exchange before.

    The connection's parser calls it with the parts of the reply. `framing_bytes` counts what the server sends besides
    the body, before the end of the head and after it: the parser keeps a header or a trailer in memory until it is
    complete.
    """

    def __init__(self, connection: "Connection") -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.head: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # status and headers are there
        self.waiter: asyncio.Future[None] | None = None  # of the owner that waits for the next piece
        self.framing_bytes = 0
        self.until_eof = False  # the reply ends where the connection does
        self.was_read = False  # the owner has a piece of the reply
        self._connection: Connection | None = connection  # None once the reply is complete, failed or closed
        self._pieces: list[bytes] = []
        self._n_buffered = 0
        self._n_head_bytes = 0
        self._interim = False  # the head was a 1xx: the reply is still to come
        self._complete = False
        self._error: ConnectionFailed | None = None

    async def piece(self) -> bytes:
        """Return all that has arrived since the last piece; b"" at the end. Raises ConnectionFailed if the reply was
        cut off."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._complete:
                return b""
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._n_buffered > MAX_BUFFERED_BYTES and self._connection is not None:
            self._connection.pause(False)
        self._n_buffered = 0
        self.was_read = True
        return data

    async def read(self, max_bytes: int) -> bytes:
        """Return the whole body."""
        pieces: list[bytes] = []
        n_bytes = 0
        while piece := await self.piece():
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > max_bytes:
                self.close()
                raise ConnectionFailed(f"its reply is larger than {format_limit(max_bytes)}")
        return b"".join(pieces)

    def buffered(self) -> bytes | None:
        """Return the whole body if it has arrived and none of it was read, else None."""
        return b"".join(self._pieces) if self._complete else None

    def fail(self, reason: str) -> None:
        """Fail the exchange from outside: its reader gets ConnectionFailed."""
        if self._connection is not None:
            self._connection.abort(reason)

    def close(self) -> None:
        """Abandon the reply. One that is not complete takes its connection with it: so the server learns of it."""
        if self._connection is not None:
            self._connection.end(reusable=False)
            self._connection = None

    # --- called by the connection ------------------------------------------------------------------------------------

    def on_head(self, status: int) -> None:
        self.status = status
        if not self.head.done():
            self.head.set_result(None)

    def on_complete(self) -> None:
        self._complete, self._connection = True, None
        self.wake()

    def on_failed(self, error: ConnectionFailed) -> None:
        self._error, self._connection = error, None
        if not self.head.done():
            self.head.set_exception(error)
            self.head.exception()  # retrieved: the owner may be gone
        self.wake()

    def wake(self) -> None:
        """Resume the owner if it waits for a piece."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- called by the parser: also with what a server sends after the end, which is no part of the reply ------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._connection is None:
            return
        self._n_head_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._n_head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge("its headers are too large")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._connection is None:
            return
        assert self._connection.parser is not None
        status, headers = self._connection.parser.get_status_code(), self.headers
        if status < 200:
            self._interim = True
            headers.clear()
            return
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self.until_eof = not chunked and "content-length" not in headers and status not in (204, 304)
        self.framing_bytes = _BOUNDARY
        self.on_head(status)

    def on_body(self, data: bytes) -> None:
        connection, n_bytes = self._connection, len(data)
        self.framing_bytes -= n_bytes + _CHUNK_FRAMING_BYTES
        if connection is None:
            return
        self._pieces.append(data)
        before, self._n_buffered = self._n_buffered, self._n_buffered + n_bytes
        if before <= MAX_BUFFERED_BYTES < self._n_buffered:
            connection.pause(True)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif self._connection is not None:
            self._connection.completed()
            self.on_complete()


class Connection(asyncio.Protocol):
    """One connection, which carries one exchange at a time. `on_free` gets it back after a complete reply."""

    def __init__(self, on_free: "Callable[[Connection], None]", on_lost: "Callable[[Connection], None]") -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self.parser: httptools.HttpResponseParser | None = None  # of the reply to the current request
        self._exchange: Exchange | None = None
        self._received = False  # a byte of this reply has come
        self._room: asyncio.Future[None] | None = None  # while the server does not take more of a request's body
        self.n_exchanges = 0
        self.active_s = 0.0  # monotonic, of the last byte in or request out
        self.received_s = 0.0  # monotonic, of the last byte in

    @property
    def usable(self) -> bool:
        """True if the connection is open."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def busy(self) -> bool:
        """True if a request waits for its reply here, or reads it."""
        return self._exchange is not None

    def begin(self, head: bytes, body: bytes) -> Exchange:
        """Send a request."""
        assert self._transport is not None
        assert self._exchange is None
        exchange = self._exchange = Exchange(self)
        self.parser = httptools.HttpResponseParser(exchange)
        self._received = False
        self.n_exchanges += 1
        self.active_s = time.monotonic()
        if len(body) < _COPY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return exchange

    async def write(self, data: bytes) -> None:
        """Send more of the body of a request that was begun, and wait until the server takes more. Raises
        ConnectionFailed if the connection is closed."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionFailed("it closed the connection")
        self._transport.write(data)
        if self._room is not None:
            await asyncio.shield(self._room)

    def completed(self) -> None:
        """End the exchange after a complete reply; the connection is kept if both sides can use it again."""
        assert self.parser is not None
        assert self._exchange is not None
        self.end(self.parser.should_keep_alive() and not self._exchange.until_eof)

    def pause(self, paused: bool) -> None:
        """Backpressure: the server has to wait while the reply is not read."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading() if paused else self._transport.resume_reading()

    def end(self, reusable: bool) -> None:
        """End the exchange, and the connection unless it is `reusable`."""
        self._exchange, transport = None, self._transport
        if transport is None:
            return
        if reusable and not transport.is_closing():
            transport.resume_reading()
            self._on_free(self)
        else:
            transport.abort()

    def abort(self, reason: str, timed_out: bool = False) -> None:
        """Fail the exchange and close the connection."""
        self._fail(ConnectionFailed(reason, untouched=not self._received and not timed_out, timed_out=timed_out))

    def _fail(self, error: ConnectionFailed) -> None:
        exchange = self._exchange
        self.end(reusable=False)
        if exchange is not None:
            exchange.on_failed(error)

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived. The hot path: runs once for each read of a relayed reply."""
        exchange, parser = self._exchange, self.parser
        if exchange is None or parser is None:
            return self._fail(ConnectionFailed("it sent data without a request"))
        self._received = True
        exchange.framing_bytes += len(data)  # on_body subtracts
        self.active_s = self.received_s = time.monotonic()
        try:
            parser.feed_data(data)
        except ConnectionFailed as error:
            self._fail(error)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback of ours has raised
            failure = cause if isinstance(cause, ConnectionFailed) else None
            self._fail(failure or MalformedReply(f"its reply is not HTTP: {error}"))
        if exchange.framing_bytes < 0:
            exchange.framing_bytes = 0  # how much of this read came after the head is not known
        elif exchange.framing_bytes > MAX_HEAD_BYTES:
            self._fail(HeadTooLarge("its headers, chunk extensions or trailers are too large"))
        waiter = exchange.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.until_eof and exc is None:
            exchange.on_message_complete()
        elif exchange is not None:
            self.abort("it closed the connection" if exc is None else f"the connection was lost: {exc}")
        self._transport = None
        self.resume_writing()
        self._on_lost(self)


_tls: list[ssl.SSLContext] = []


async def _tls_context() -> ssl.SSLContext:
    """One for all: reading the system's certificates takes 50 ms and more, and accounts choose addresses."""
    if not _tls:
        _tls.append(await asyncio.to_thread(ssl.create_default_context))
    return _tls[-1]


async def dial(
    make: Callable[[], Connection],
    address: Address,
    hosts: Sequence[str] | None = None,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> Connection:
    """Connect to the first of `hosts` that accepts, by default to the address's own.

    Raises ConnectionFailed if none does within `timeout_s` in all: whoever owns a name decides how many it has.
    The certificate is checked against the address's host; `tls` says which ones are trusted, by default the system's.
    """
    context = (tls or await _tls_context()) if address.tls else None
    checked, failure = address.host if address.tls else None, ConnectionFailed("no connection: no address")
    hosts = (address.host,) if hosts is None else hosts
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + timeout_s
    for host in hosts:
        try:  # the first of several leaves time for others
            async with asyncio.timeout_at(min(end_s, now_s() + timeout_s / min(2, len(hosts)))):
                _, connection = await asyncio.get_running_loop().create_connection(
                    make, host, address.port, ssl=context, server_hostname=checked
                )
                return connection
        except TimeoutError:
            failure = ConnectionFailed(f"no connection within {timeout_s:g} s", timed_out=True)
            if now_s() >= end_s:
                break
        except ssl.SSLCertVerificationError as error:
            failure = ConnectionFailed(f"no connection: the certificate is not valid: {error.verify_message}")
        except ssl.SSLError as error:
            failure = ConnectionFailed(f"no connection: TLS failed: {error.reason or 'handshake'}")
        except OSError as error:
            reason = error.strerror or str(error) or ("closed during the TLS handshake" if context else "closed")
            failure = ConnectionFailed(f"no connection: {reason}")
    raise failure


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks to wait, as a number or a date. Returns None without a valid one."""
    text = headers.get("retry-after", "").strip()
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        wait_s = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
        return max(0.0, wait_s) if math.isfinite(wait_s) else None
    return None


class ConnectionPool:
    """Connections to one server; they come and go by themselves."""

    def __init__(
        self,
        address: Address,
        key: str = "",
        read_timeout_s: float = READ_TIMEOUT_S,
        resolve: Callable[[], Awaitable[Sequence[str]]] | None = None,
        closed_s: float = CLOSED_S,
    ) -> None:
        """`resolve` gives the addresses that may be connected to, in place of the system's resolver."""
        self._address = address
        self._closed_s = closed_s
        self._resolve = resolve
        self._read_timeout_s = read_timeout_s
        self._sweep_interval_s = min(_SWEEP_INTERVAL_S, read_timeout_s / 2)
        self._idle: list[Connection] = []  # the most recently used last
        self._all: set[Connection] = set()
        self._closed = False
        self._sweeper: asyncio.TimerHandle | None = None
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._fixed_headers = f"host: {address.host_header}\r\n{authorization}\r\n".encode("ascii")

    @property
    def n_connections(self) -> int:
        return len(self._all)

    @property
    def n_busy(self) -> int:
        """Number of connections that wait for a reply or read one."""
        return sum(connection.busy for connection in self._all)

    @property
    def idle_s(self) -> float:
        """Seconds since the last byte of any reply."""
        return time.monotonic() - max((connection.received_s for connection in self._all), default=0.0)

    def post(
        self,
        path: str,
        body: bytes,
        headers: str = "",
        timeout_s: float | None = None,
        on_sent: Callable[[], None] | None = None,
        once: bool = False,
        content_type: str = "application/json",
    ) -> Awaitable[Exchange]:
        """An exchange whose status and headers have arrived, within `timeout_s` of its begin if that is given.

        `headers` are whole lines, each with its end. `on_sent` is called once the server has, or will have, the
        request. The server may just have closed a kept connection; then the request is sent again on another, unless it
        must go out `once`.
        """
        head = (
            f"POST {self._address.path}{path} HTTP/1.1\r\n{headers}content-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n"
        )
        return self._send(head.encode("ascii") + self._fixed_headers, body, on_sent, once, timeout_s)

    async def get(
        self, path: str, timeout_s: float, max_bytes: int = MAX_REPLY_BYTES, headers: str = ""
    ) -> tuple[int, bytes]:
        """Status and body of something small. ConnectionFailed when that takes longer than `timeout_s` in all."""
        head = f"GET {self._address.path}{path} HTTP/1.1\r\n{headers}".encode("ascii") + self._fixed_headers
        try:
            async with asyncio.timeout(timeout_s):
                exchange = await self._send(head, b"")
                try:
                    return exchange.status, await exchange.read(max_bytes)
                finally:
                    exchange.close()
        except TimeoutError:
            raise ConnectionFailed(f"no reply to {path} within {timeout_s:g} s", timed_out=True) from None

    def abort(self, reason: str) -> None:
        """End all exchanges; their readers get the reason."""
        self._idle.clear()
        for connection in tuple(self._all):
            connection.abort(reason)

    def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.abort("we closed the connection")

    # --- connections -------------------------------------------------------------------------------------------------

    async def _send(
        self,
        head: bytes,
        body: bytes,
        on_sent: Callable[[], None] | None = None,
        once: bool = False,
        timeout_s: float | None = None,
    ) -> Exchange:
        while True:
            connection = self._take_idle(FRESH_S if once else KEEP_ALIVE_S) or await self._dial()
            reused = connection.n_exchanges > 0
            exchange = connection.begin(head, body)
            sent_s = connection.active_s
            timer = None
            if timeout_s is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(timeout_s, connection.abort, f"no data for {timeout_s:g} s", True)
            if on_sent is not None:
                on_sent()
            try:
                await exchange.head
                return exchange
            except ConnectionFailed as error:
                is_late = time.monotonic() - sent_s > self._closed_s
                if not (reused and error.untouched) or is_late or once or self._closed:
                    raise  # else the server had closed the idle connection and never saw the request
            except BaseException:
                exchange.close()
                raise
            finally:
                if timer is not None:
                    timer.cancel()

    def _take_idle(self, max_idle_s: float) -> Connection | None:
        while self._idle:
            if not self._idle[-1].usable:
                self._idle.pop()
            elif time.monotonic() - self._idle[-1].active_s > max_idle_s:
                return None  # and those before it have been idle for longer
            else:
                return self._idle.pop()
        return None

    async def _dial(self) -> Connection:
        if self._closed:
            raise ConnectionFailed("we closed the connection")
        hosts = None if self._resolve is None else await self._resolve()
        connection = await dial(lambda: Connection(self._freed, self._lost), self._address, hosts)
        self._all.add(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._sweep_interval_s, self._sweep)
        return connection

    def _freed(self, connection: Connection) -> None:
        if len(self._idle) < MAX_IDLE and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort("too many idle connections")

    def _lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _sweep(self) -> None:
        """One timer for all: closes idle connections, and fails exchanges that get no data."""
        now_s = time.monotonic()
        for connection in tuple(self._all):
            if now_s - connection.active_s > (self._read_timeout_s if connection.busy else KEEP_ALIVE_S):
                if connection in self._idle:
                    self._idle.remove(connection)
                connection.abort(f"no data for {self._read_timeout_s:g} s", timed_out=connection.busy)
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(self._sweep_interval_s, self._sweep) if self._all else None
