"""WebSockets of the HTTP server: uvicorn's protocol with bounds, and a drain that lets messages be answered."""

import asyncio
from typing import Any, Protocol

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from emberline.net.held_bodies import held_bodies
from emberline.protocol.errors import Unavailable

# Tells the application, as an ASGI message, that the server stops: it answers what has begun, and closes with 1012.
DRAIN = "websocket.drain"
MAX_MESSAGE_BYTES = 4 << 20
MAX_FRAGMENTS = 16_384  # of one message: each takes memory beside its bytes, also an empty one
PING_INTERVAL_S = 20.0  # a client that does not answer a ping for as long is disconnected
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class WebSocketCounter(Protocol):
    """Counts the WebSockets among the server's connections."""

    def open_websocket(self) -> bool:
        """Count one more. Returns False if there are too many."""

    def websocket_lost(self) -> None:
        """Count one less."""


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose number, messages and unread bytes are bounded."""

    def __init__(
        self,
        connections: WebSocketCounter,
        *,
        write_timeout_s: float,
        discarded_bytes: int,
        discard_timeout_s: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._all = connections
        self._write_timeout_s = write_timeout_s
        self._discarded_bytes_left = discarded_bytes
        self._discard_timeout_s = discard_timeout_s
        self._discards = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._drains = False
        self._fragment_bytes = 0  # of the message that is not complete
        self.held_bytes = 0  # of that message, with the frame that is arriving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._all.open_websocket():
            self.transport.write(_TOO_MANY)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.websocket_lost()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        held_bodies.release(self)
        super().connection_lost(exc)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # by a refusal, which uvicorn would report as a missing handshake

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._discards:
            self._discarded_bytes_left -= len(data)
            if self._discarded_bytes_left < 0:
                self.transport.close()
            return
        super().data_received(data)
        held_bodies.release(self)
        try:
            held_bodies.add(self, self._fragment_bytes + len(self.conn.reader.buffer))
        except Unavailable as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, error.message)

    def handle_text(self, event: Frame) -> None:
        self._fragment_bytes = 0 if event.fin else len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._fragment_bytes = 0 if event.fin else len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            self._fragment_bytes = 0 if event.fin else self._fragment_bytes + len(event.data)
            super().handle_cont(event)
        else:
            self._fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close the connection over a message that the server does not take."""
        self.frames.clear()
        self._fragment_bytes = 0
        if not self.close_sent:
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Send the close frame, then read and drop what the client still sends until it closes.

        A connection that is closed with bytes unread is reset, and a client that is reset may never see the close code.
        """
        assert self.conn.close_sent is not None
        code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.write_eof()  # a client waits for the server to close, and this tells it to do so
        self.close_sent = self._discards = True
        self.read_paused = False
        self.transport.resume_reading()
        if self.close_timer is None:
            self.close_timer = self.loop.call_later(self._discard_timeout_s, self.transport.close)

    def pause_writing(self) -> None:
        """Read nothing more from a client that does not read: every ping of it has an answer."""
        super().pause_writing()
        self.transport.pause_reading()
        self._stall_timer = self.loop.call_later(self._write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def shutdown(self) -> None:
        """Begin the drain. Called again as other connections close."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
        elif not self._drains:
            self._drains = True
            self.queue.put_nowait({"type": DRAIN})  # type: ignore[misc, arg-type]
