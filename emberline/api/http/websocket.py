"""WebSockets whose messages are requests: each runs through the app as the streamed POST that it stands for.

Authentication, limits, accounting, logs, traces and the relay of large requests are therefore those of any request.
What an API adds is how it reads a message (`WebSocketConnection.answer`).
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.api.http.errors import Dialect, HeaderList, codes, error_body
from emberline.api.http.exchange import HttpExchange, RequestLimits, encode
from emberline.api.http.resumable import HEADER
from emberline.api.http.streaming import WebSocketSession
from emberline.net.held_bodies import held_bodies
from emberline.net.http_server import ASGIApp, Message, Scope
from emberline.net.periodic import stop
from emberline.net.websocket_server import DRAIN, MAX_MESSAGE_BYTES
from emberline.protocol.errors import BadInput, EmberlineError, Internal, Overloaded, Unavailable

MAX_WAITING = 8  # messages of one connection that wait for the response under way
_NORMAL, _IDLE, _RESTARTS = 1000, 1001, 1012  # close codes
_TOO_OLD = "websocket_connection_limit_reached"
# Headers of the handshake that say nothing about the requests that follow it.
_OF_HANDSHAKE = (b"connection", b"upgrade", b"sec-websocket-", b"content-", b"transfer-encoding", HEADER.encode())


@dataclass(slots=True)
class _WaitingMessage:
    """A message that counts among the bodies of requests in this process's memory."""

    text: str
    held_bytes: int = 0


class WebSocketConnection(WebSocketSession):
    """One connection. Its messages are answered one after the other."""

    def __init__(self) -> None:
        self.left = asyncio.Event()  # set once the client has closed the connection
        self._waiting: deque[_WaitingMessage] = deque()
        self._changed = asyncio.Event()  # a message arrived, the client left, or the server stops
        self._drains = False
        self._call: HttpExchange  # the handshake

    async def answer(self, text: str) -> None:
        """Answer one message."""
        raise NotImplementedError

    def closed(self) -> None:
        """Release what the connection holds."""

    async def serve(self, call: HttpExchange, app: ASGIApp) -> None:
        """Answer messages until the client leaves, the connection is too old or idle, or the server stops."""
        self._call, self._app = call, app
        await call.send({"type": "websocket.accept", "headers": [(b"x-request-id", call.id.encode())]})
        call.status = 101
        reader = asyncio.create_task(self._read())
        code = _RESTARTS
        try:
            code = await self._answer_messages(call.limits)
        except asyncio.CancelledError:  # at the end of the drain
            pass
        finally:
            self.closed()
            await stop(reader)
            while self._waiting:
                self._take()
            await self._send({"type": "websocket.close", "code": code})

    async def run(self, body: bytes, extra: Mapping[str, Any]) -> bool:
        """Run a request with this body, and send its events. `extra` is added to its scope. Returns False if it failed,
        which the client has been told."""
        exchange = _MessageExchange(self, self._call.scope, body, extra)
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception:  # a relayed response broke off, or a failure that the app has logged
            await self.refuse(Internal("the response broke off: try again"))
            return False
        return not exchange.failed

    async def refuse(self, error: EmberlineError) -> None:
        """Send an error that concerns a message, or its connection."""
        await self.send_error(codes(error).status, error_body(error, Dialect.OPENAI, self._call.id)["error"])

    async def send_error(self, status: int, body: Mapping[str, Any], headers: HeaderList | None = None) -> None:
        """Send the error of a reply as an event. Every error has a code there."""
        named = {**body, "code": body.get("code") or body["type"]}
        shown = {name.decode(): value.decode() for name, value in headers or () if name.startswith(b"retry-after")}
        await self.send_text(encode({"type": "error", "status": status, "error": named, "headers": shown}))

    async def send_text(self, text: bytes) -> None:
        """Send a message."""
        await self._send({"type": "websocket.send", "text": text.decode()})

    @property
    def account(self) -> str:
        """The account of the caller who opened the connection."""
        return self._call.principal.account

    async def _send(self, message: Message) -> None:
        with suppress(OSError, RuntimeError):  # the client has left
            await self._call.send(message)

    async def _answer_messages(self, limits: RequestLimits) -> int:
        """Returns the code to close the connection with."""
        clock = asyncio.get_running_loop().time
        closes_s = clock() + limits.websocket_age_s
        while not self.left.is_set() and not self._drains:
            if self._waiting:
                await self.answer(self._take())
                continue
            self._changed.clear()
            idle_s = clock() + limits.websocket_idle_s
            try:
                async with asyncio.timeout_at(min(idle_s, closes_s)):
                    await self._changed.wait()
            except TimeoutError:  # maybe a millisecond early: timers are that coarse
                if idle_s < closes_s:
                    return _IDLE
                message = f"the connection is {limits.websocket_age_s / 60:.0f} minutes old: open another one"
                fields = {"type": "invalid_request_error", "code": _TOO_OLD, "message": message, "param": None}
                await self.send_error(400, fields)
                return _NORMAL
        return _RESTARTS if self._drains else _NORMAL

    async def _read(self) -> None:
        """Take messages as they arrive, also while one is answered: pings are read in between."""
        while not self.left.is_set():
            message = await self._call.receive()
            if message["type"] == "websocket.disconnect":
                self.left.set()
            elif message["type"] == DRAIN:
                self._drains = True
            elif message["type"] != "websocket.receive":  # the handshake itself
                continue
            elif message.get("text") is None:
                await self.refuse(BadInput("messages are JSON texts; this one is binary"))
            elif not self._has_room(message["text"]):
                most = f"{MAX_WAITING} messages, of {MAX_MESSAGE_BYTES >> 20} MiB in all"
                await self.refuse(Overloaded(f"too much is waiting, at most {most}: read their responses first"))
            else:
                await self._add(message["text"])
            self._changed.set()

    async def _add(self, text: str) -> None:
        """Let a message wait, if this process has room for one more."""
        waiting = _WaitingMessage(text)
        try:
            held_bodies.add(waiting, len(text))
        except Unavailable as error:
            return await self.refuse(error)
        self._waiting.append(waiting)

    def _take(self) -> str:
        """The message that has waited longest. Whoever answers it counts its body."""
        waiting = self._waiting.popleft()
        held_bodies.release(waiting)
        return waiting.text

    def _has_room(self, text: str) -> bool:
        """True if the message may wait. One alone may always."""
        n_chars = sum(len(waiting.text) for waiting in self._waiting) + len(text)
        return not self._waiting or (len(self._waiting) < MAX_WAITING and n_chars <= MAX_MESSAGE_BYTES)


class _MessageExchange:
    """The HTTP request of one message, and the messages of its response."""

    def __init__(
        self, connection: WebSocketConnection, handshake: Scope, body: bytes, extra: Mapping[str, Any]
    ) -> None:
        headers = [field for field in handshake["headers"] if not field[0].startswith(_OF_HANDSHAKE)]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self.scope: Scope = {**handshake, "type": "http", "method": "POST", "headers": headers, **extra}
        self.failed = False  # the response is an error, or ends with one
        self._connection = connection
        self._body: bytes | None = body
        self._status = 0
        self._headers: HeaderList = []
        self._pieces: list[bytes] = []  # of an event, or of an error, that is not complete

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._connection.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
            self.failed = self._status != 200
            return
        piece: bytes = message.get("body", b"")
        if self._status == 200:
            for event in self._events(piece):
                await self._send_event(event)
            return
        self._pieces.append(piece)
        if not message.get("more_body", False):
            error = msgspec.json.decode(b"".join(self._pieces))["error"]
            await self._connection.send_error(self._status, error, self._headers)

    def _events(self, piece: bytes) -> list[bytes]:
        """The events that are complete with this piece of the stream."""
        last = self._pieces[-1][-1:] if self._pieces else b""
        self._pieces.append(piece)
        if b"\n\n" not in last + piece:
            return []
        *events, rest = b"".join(self._pieces).split(b"\n\n")
        self._pieces = [rest] if rest else []
        return events

    async def _send_event(self, event: bytes) -> None:
        """Send an event, without its name. A stream that fails has two events for that: here one is enough."""
        name, _, data = event.partition(b"\ndata: ")
        if not data or name == b"event: error":
            return
        self.failed = self.failed or name == b"event: response.failed"
        await self._connection.send_text(data)
