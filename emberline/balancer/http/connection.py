"""A kept-alive connection to a server: one exchange at a time, parsed by httptools as bytes arrive."""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import httptools

from emberline.balancer.http.exchange import Broken, Exchange


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
        self._fail(Broken(reason, untouched=not self._seen))

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:  # nothing was asked
            return self._fail(Broken("it spoke without being asked"))
        self._seen = True
        self.heard_s = self.spoke_s = time.monotonic()
        try:
            parser.feed_data(data)
        except Broken as error:
            self._fail(error)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, Broken) else Broken(f"its answer is not HTTP: {error}"))
        exchange.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._exchange is not None:
            if self._to_eof and exc is None:
                self.on_message_complete()
            else:
                reason = "it closed the connection" if exc is None else f"the connection was lost: {exc}"
                self._fail(Broken(reason, untouched=not self._seen))
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

    def _fail(self, error: Broken) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_broken(error)
        if self._transport is not None:
            self._transport.abort()
