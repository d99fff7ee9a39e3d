"""Responses over a WebSocket: every message `response.create` is a request, whose events are sent as messages.

A connection has one thing to know: its last response that was not stored, which the next message may continue.
"""

from typing import Any

import msgspec

from emberline.api.http.errors import UpgradeRequired
from emberline.api.http.exchange import HttpExchange, encode
from emberline.api.http.websocket import WebSocketConnection
from emberline.api.http.wire import UNREADABLE, Wire
from emberline.api.openai.responses.unstored import CONNECTION, UnstoredResponse
from emberline.protocol.errors import BadInput, Unsupported

_CREATE = "response.create"


class _Create(msgspec.Struct):
    """The fields of a message that its connection has to know."""

    type: str
    previous_response_id: Any = None
    background: Any = None


_create_decoder = msgspec.json.Decoder(_Create)


async def connect(call: HttpExchange) -> WebSocketConnection:
    """Answer a handshake."""
    if call.scope["type"] != "websocket":
        raise UpgradeRequired("`GET` on this path opens a WebSocket; `POST` creates a response over HTTP")
    return ResponsesConnection()


def _request_body(message: bytes) -> bytes:
    """The body of the request that a message stands for, without `type`, which is no field of a request."""
    fields = Wire(message).fields
    if not fields:  # too many values: the request is refused for them
        return message
    del fields["type"]
    return encode({**fields, "stream": True})


class ResponsesConnection(WebSocketConnection):
    def __init__(self) -> None:
        super().__init__()
        self._unstored = UnstoredResponse()

    def closed(self) -> None:
        self._unstored.forget()

    async def answer(self, text: str) -> None:
        raw = text.encode()
        try:
            create = _create_decoder.decode(raw)
        except UNREADABLE:
            return await self.refuse(BadInput(f"a message is a JSON object with `type: {_CREATE!r}`", param="type"))
        if create.type != _CREATE:
            problem = f"messages of type {create.type[:80]!r} are not supported, only {_CREATE!r} is"
            return await self.refuse(Unsupported(problem, param="type"))
        if create.background:
            problem = "a response over a WebSocket is not made in the background: leave `background` out, or use HTTP"
            return await self.refuse(Unsupported(problem, param="background"))
        if not await self.run(_request_body(raw), {CONNECTION: self._unstored}):
            previous = create.previous_response_id
            if isinstance(previous, str) and self._unstored.find(self.account, previous) is not None:
                self._unstored.forget()
