"""Kept-alive connections to one server, and the requests on them."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from emberline.balancer.http.address import Address
from emberline.balancer.http.connection import Connection
from emberline.balancer.http.exchange import Broken, Exchange

CONNECT_S = 5.0
SILENT_S = 600.0  # of an answer: a long prompt in a long queue; health checks find a dead server sooner
MAX_IDLE = 256
IDLE_S = 60.0
FRESH_S = 2.0  # idle for less, no server has closed it: vLLM and SGLang do after 5 s
MAX_ANSWER_BYTES = 64 << 20
_SWEEP_S = 5.0


class Pool:
    """`send` gives an exchange whose head has come. Connections come and go by themselves."""

    def __init__(self, address: Address, key: str = "", silent_s: float = SILENT_S) -> None:
        self._address = address
        self._ssl = address.context()
        self._silent_s = silent_s
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
    def silent_s(self) -> float:
        """For how long not a byte of any answer has come."""
        return time.monotonic() - max((connection.spoke_s for connection in self._all), default=0.0)

    async def post(
        self,
        path: str,
        body: bytes,
        request_id: str = "",
        silent_s: float | None = None,
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
        return await self._send(request, body, silent_s or self._silent_s, on_sent, once)

    async def get(self, path: str, silent_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> tuple[int, bytes]:
        """Status and body of something small. Broken when that takes longer than `silent_s` in all."""
        try:
            async with asyncio.timeout(silent_s):
                head = f"GET {self._address.path}{path} HTTP/1.1\r\n".encode("ascii") + self._fixed + b"\r\n"
                exchange = await self._send(head, b"", silent_s)
                try:
                    return exchange.status, await exchange.read(max_bytes)
                finally:
                    exchange.close()
        except TimeoutError:
            raise Broken(f"no answer to {path} within {silent_s:g} s") from None

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
        silent_s: float,
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
            if silent_s < self._silent_s:
                timer = asyncio.get_running_loop().call_later(silent_s, connection.abort, f"silent for {silent_s:g} s")
            try:
                await exchange.head()
                return exchange
            except Broken as error:
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
            raise Broken("we closed the connection")
        address, loop = self._address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._freed, self._lost), address.host, address.port, ssl=self._ssl
                )
        except TimeoutError:
            raise Broken(f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise Broken(f"no connection: {error.strerror or error}") from error
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
        """One timer for all: connections idle for too long, servers silent for too long."""
        now_s = time.monotonic()
        for connection in tuple(self._all):
            if now_s - connection.heard_s > (self._silent_s if connection.busy else IDLE_S):
                if connection in self._idle:
                    self._idle.remove(connection)
                connection.abort(f"silent for {self._silent_s:g} s")
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep) if self._all else None
