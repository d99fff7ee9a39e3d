"""Kept-alive connections to one server, and the requests on them."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 << 10
PAUSE_BYTES = 512 << 10  # of an answer that nobody has taken yet; then the server has to wait


class ConnectionFailed(Exception):
    """The exchange ended before its answer did; the message says how."""

    def __init__(self, reason: str, *, untouched: bool = False) -> None:
        super().__init__(reason)
        self.untouched = untouched  # not a byte came back: another connection may have better luck


class Exchange:
    """What came back so far. Its owner takes pieces until b"", or closes it before."""

    def __init__(self, on_end: Callable[[bool], None], throttle: Callable[[bool], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_end = on_end  # told once: whether the connection can carry another exchange
        self._throttle = throttle
        self._pieces: list[bytes] = []
        self._n_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False
        self._error: ConnectionFailed | None = None
        self._over = False
        self._head_bytes = 0

    async def head(self) -> None:
        """Return once status and headers are there."""
        await self._head

    async def piece(self) -> bytes:
        """All that has come since the last piece; b"" at the end. ConnectionFailed where the answer was cut off."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._complete:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._n_bytes = 0
        if self._paused:
            self._paused = False
            self._throttle(False)
        return taken

    async def read(self, max_bytes: int) -> bytes:
        """The whole body."""
        pieces: list[bytes] = []
        n_bytes = 0
        while piece := await self.piece():
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > max_bytes:
                self.close()
                raise ConnectionFailed(f"its answer is larger than {max_bytes >> 20} MiB")
        return b"".join(pieces)

    def buffered(self) -> bytes | None:
        """The whole body where it is already here; None where it is not."""
        return b"".join(self._pieces) if self._complete else None

    def fail(self, reason: str) -> None:
        """End it for a reason that lies elsewhere: whoever reads it is told."""
        if not self._over:
            self.on_broken(ConnectionFailed(reason))
            self._on_end(False)

    def close(self) -> None:
        """Let go; an answer that is not whole takes its connection with it, which is how a server learns of it."""
        if not self._over:
            self._over = True
            self._on_end(False)

    # --- called by the connection ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            raise ConnectionFailed("its headers are too large")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_head(self, status: int) -> None:
        self.status = status
        if not self._head.done():
            self._head.set_result(None)

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._n_bytes += len(data)
        if self._n_bytes > PAUSE_BYTES and not self._paused:
            self._paused = True
            self._throttle(True)

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def on_complete(self, reusable: bool) -> None:
        self._complete = True
        if not self._over:
            self._over = True
            self._on_end(reusable)

    def on_broken(self, error: ConnectionFailed) -> None:
        if self._complete or self._error is not None:
            return
        self._error = error
        self._over = True
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # retrieved: whoever asked may be gone
        self.wake()


class Connection(asyncio.Protocol):
    def __init__(self, on_free: "Callable[[Connection], None]", on_lost: "Callable[[Connection], None]") -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._exchange: Exchange | None = None
        self._to_eof = False  # the answer ends where the connection does
        self._seen = False  # a byte of this answer has come
        self._interim = False
        self.n_exchanges = 0
        self.heard_s = 0.0  # monotonic, of the last byte in or the request out
        self.spoke_s = 0.0  # of the last byte in

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def busy(self) -> bool:
        return self._exchange is not None

    def begin(self, request: bytes, body: bytes) -> Exchange:
        assert self._transport is not None
        assert self._exchange is None
        self._parser = httptools.HttpResponseParser(self)
        self._to_eof = self._seen = self._interim = False
        self.n_exchanges += 1
        self.heard_s = time.monotonic()
        self._exchange = Exchange(self._end, self._throttle)
        if len(body) < 32 << 10:
            self._transport.write(request + body)
        else:  # not copied once more
            self._transport.writelines((request, body))
        return self._exchange

    def abort(self, reason: str) -> None:
        self._fail(ConnectionFailed(reason, untouched=not self._seen))

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:  # nothing was asked
            return self._fail(ConnectionFailed("it spoke without being asked"))
        self._seen = True
        self.heard_s = self.spoke_s = time.monotonic()
        try:
            parser.feed_data(data)
        except ConnectionFailed as error:
            self._fail(error)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._fail(
                cause if isinstance(cause, ConnectionFailed) else ConnectionFailed(f"its answer is not HTTP: {error}")
            )
        exchange.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._exchange is not None:
            if self._to_eof and exc is None:
                self.on_message_complete()
            else:
                reason = "it closed the connection" if exc is None else f"the connection was lost: {exc}"
                self._fail(ConnectionFailed(reason, untouched=not self._seen))
        self._transport = None
        self._on_lost(self)

    # --- httptools ---------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_header(name, value)

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        exchange = self._exchange
        if exchange is None:
            return
        if status < 200:  # 100 Continue and its kin: the answer is still to come
            self._interim = True
            exchange.headers.clear()
            return
        headers = exchange.headers
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._to_eof = not chunked and "content-length" not in headers and status not in (204, 304)
        exchange.on_head(status)

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_body(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            return
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            assert self._parser is not None
            exchange.on_complete(self._parser.should_keep_alive() and not self._to_eof)
            exchange.wake()

    # --- ends --------------------------------------------------------------------------------------------------------

    def _throttle(self, pause: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading() if pause else self._transport.resume_reading()

    def _end(self, reusable: bool) -> None:
        self._exchange = None
        if reusable and self.usable:
            self._throttle(False)
            self._on_free(self)
        elif self._transport is not None:
            self._transport.abort()

    def _fail(self, error: ConnectionFailed) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_broken(error)
        if self._transport is not None:
            self._transport.abort()


class Address(NamedTuple):
    host: str
    port: int
    tls: bool
    path: str  # in front of every route, "" or "/like/this"

    @property
    def host_header(self) -> str:
        """The default port goes unsaid, as some servers' Host checks want it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.tls else None


def parse(url: str) -> Address:
    """ValueError says what is wrong with it. A trailing /v1 is how people write base URLs: routes bring their own."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://host:port")
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        raise ValueError(f"{parts.scheme}://{parts.hostname}/… must have no query, fragment, user or password")
    tls = parts.scheme == "https"
    port = parts.port  # ValueError where it is out of range
    path = parts.path.rstrip("/").removesuffix("/v1")
    if any(not "!" <= char <= "~" for char in parts.hostname + path):
        raise ValueError(f"{url!r} has characters that a URL cannot have")
    return Address(parts.hostname, (443 if tls else 80) if port is None else port, tls, path)


CONNECT_S = 5.0
READ_TIMEOUT_S = 600.0  # of an answer: a long prompt in a long queue; health checks find a dead server sooner
MAX_IDLE = 256
IDLE_S = 60.0
FRESH_S = 2.0  # idle for less, no server has closed it: vLLM and SGLang do after 5 s
MAX_ANSWER_BYTES = 64 << 20
_SWEEP_S = 5.0


class ConnectionPool:
    """`send` gives an exchange whose head has come. Connections come and go by themselves."""

    def __init__(self, address: Address, key: str = "", timeout_s: float = READ_TIMEOUT_S) -> None:
        self._address = address
        self._ssl = address.context()
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._closed = False
        self._sweeper: asyncio.TimerHandle | None = None
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._fixed = f"host: {address.host_header}\r\n{authorization}".encode("ascii")

    @property
    def n_connections(self) -> int:
        return len(self._all)

    @property
    def idle_s(self) -> float:
        """Seconds since the last byte of any reply."""
        return time.monotonic() - max((connection.spoke_s for connection in self._all), default=0.0)

    async def post(
        self,
        path: str,
        body: bytes,
        request_id: str = "",
        timeout_s: float | None = None,
        on_sent: Callable[[], None] | None = None,
        once: bool = False,
    ) -> Exchange:
        """`on_sent` is called once the server has, or will have, the request.

        A kept connection may have been closed by the server just now; then the request is sent again on another,
        unless it must go out `once`.
        """
        named = f"x-request-id: {request_id}\r\n" if request_id else ""
        head = (
            f"POST {self._address.path}{path} HTTP/1.1\r\n{named}content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
        )
        request = head.encode("ascii") + self._fixed + b"\r\n"
        return await self._send(request, body, timeout_s or self._timeout_s, on_sent, once)

    async def get(self, path: str, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> tuple[int, bytes]:
        """Status and body of something small. ConnectionFailed when that takes longer than `timeout_s` in all."""
        try:
            async with asyncio.timeout(timeout_s):
                head = f"GET {self._address.path}{path} HTTP/1.1\r\n".encode("ascii") + self._fixed + b"\r\n"
                exchange = await self._send(head, b"", timeout_s)
                try:
                    return exchange.status, await exchange.read(max_bytes)
                finally:
                    exchange.close()
        except TimeoutError:
            raise ConnectionFailed(f"no answer to {path} within {timeout_s:g} s") from None

    def abort(self, reason: str) -> None:
        """End all that is under way: whoever waits for it learns the reason."""
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
        timeout_s: float,
        on_sent: Callable[[], None] | None = None,
        once: bool = False,
    ) -> Exchange:
        while True:
            connection = self._take(FRESH_S if once else IDLE_S) or await self._dial()
            reused = connection.n_exchanges > 0
            exchange = connection.begin(head, body)
            if on_sent is not None:
                on_sent()
            timer = None
            if timeout_s < self._timeout_s:
                timer = asyncio.get_running_loop().call_later(
                    timeout_s, connection.abort, f"no data for {timeout_s:g} s"
                )
            try:
                await exchange.head()
                return exchange
            except ConnectionFailed as error:
                if not (reused and error.untouched) or once or self._closed:
                    raise  # else the server had closed it while it lay idle: it never saw the request
            except BaseException:
                exchange.close()
                raise
            finally:
                if timer is not None:
                    timer.cancel()

    def _take(self, max_idle_s: float) -> Connection | None:
        """The connection that was used last; those before it have been idle for longer."""
        while self._idle:
            if not self._idle[-1].usable:
                self._idle.pop()
            elif time.monotonic() - self._idle[-1].heard_s > max_idle_s:
                return None
            else:
                return self._idle.pop()
        return None

    async def _dial(self) -> Connection:
        if self._closed:
            raise ConnectionFailed("we closed the connection")
        address, loop = self._address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._freed, self._lost), address.host, address.port, ssl=self._ssl
                )
        except TimeoutError:
            raise ConnectionFailed(f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise ConnectionFailed(f"no connection: {error.strerror or error}") from error
        self._all.add(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(_SWEEP_S, self._sweep)
        return connection

    def _freed(self, connection: Connection) -> None:
        if len(self._idle) < MAX_IDLE and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort("one too many")

    def _lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _sweep(self) -> None:
        """One timer for all: connections idle for too long, servers no data for too long."""
        now_s = time.monotonic()
        for connection in tuple(self._all):
            if now_s - connection.heard_s > (self._timeout_s if connection.busy else IDLE_S):
                if connection in self._idle:
                    self._idle.remove(connection)
                connection.abort(f"no data for {self._timeout_s:g} s")
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep) if self._all else None
