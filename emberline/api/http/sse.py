"""Server-sent events: one pump for every dialect, one send per event."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Protocol

from emberline.api.http.call import Call, Events, HeaderList, while_connected
from emberline.protocol.errors import EmberlineError, Internal, Unavailable
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """One stream in one dialect. Each method gives the bytes to send for its event, which may be none."""

    def started(self, usage: Usage) -> bytes: ...

    def delta(self, event: TextDelta) -> bytes: ...

    def reasoning(self, event: ReasoningDelta) -> bytes: ...

    def call_started(self, event: ToolCallStarted) -> bytes: ...

    def call_delta(self, event: ToolCallDelta) -> bytes: ...

    def done(self, event: ChoiceDone) -> bytes: ...

    def completed(self, usage: Usage) -> bytes: ...

    def failed(self, error: EmberlineError) -> bytes: ...


async def stream(call: Call, events: Events, encoder: Encoder, headers: HeaderList) -> None:
    """Send `events` to the client as they come.

    What is refused before the first event is raised, so that it becomes an HTTP status; what fails later ends the
    stream with the dialect's error event. A client that leaves ends `events`.
    """
    await while_connected(call.receive, _pump(call, events, encoder, headers))


async def _pump(call: Call, events: Events, encoder: Encoder, headers: HeaderList) -> None:
    send = call.send
    async with aclosing(events):
        first = await anext(events)
        assert isinstance(first, Started)
        await call.start_stream(headers)
        if opening := encoder.started(first.usage):
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        last = await _relay(call, events, encoder)
    await send({"type": "http.response.body", "body": last})


async def _relay(call: Call, events: Events, encoder: Encoder) -> bytes:
    """Send everything after Started but the last piece, which is returned: it closes the stream."""
    send, delta = call.send, encoder.delta
    try:
        async for event in events:
            if type(event) is TextDelta:
                piece = delta(event)
            elif type(event) is ToolCallDelta:
                piece = encoder.call_delta(event)
            elif type(event) is ReasoningDelta:
                piece = encoder.reasoning(event)
            elif type(event) is ToolCallStarted:
                piece = encoder.call_started(event)
            elif type(event) is ChoiceDone:
                piece = encoder.done(event)
            elif type(event) is Completed:
                return encoder.completed(event.usage)
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        raise Internal("the answer ended before it was complete")
    except EmberlineError as error:
        return encoder.failed(error)
    except asyncio.CancelledError:
        # The client left, or the server stops: the second still has somebody to tell.
        await send({"type": "http.response.body", "body": encoder.failed(Unavailable("the server is stopping"))})
        raise
    except Exception:
        log.exception("a stream failed")
        return encoder.failed(Internal("the request failed; the log has it under its id"))


_LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789"
_PADS = [_LETTERS[:length] for length in range(1, 33)]


def pads() -> Iterator[bytes]:
    """An endless supply of pads for one stream."""
    while True:
        for byte in os.urandom(128):
            yield _PADS[byte & 31]


JSONL = b"application/x-jsonl"
_PIECE_BYTES = 64 << 10


class BrokenOff(Exception):
    """The body cannot be finished: the connection ends without its end, so that nobody takes it for whole."""


async def send_bytes(
    call: Call, chunks: AsyncGenerator[bytes, None], content_type: bytes, headers: HeaderList | None = None
) -> None:
    """What fails before the first byte is raised, so that it becomes an HTTP status."""
    await while_connected(call.receive, _send(call, chunks, [(b"content-type", content_type), *(headers or [])]))


async def _send(call: Call, chunks: AsyncGenerator[bytes, None], headers: HeaderList) -> None:
    send = call.send
    async with aclosing(chunks):
        piece = await anext(chunks, b"")
        await call.start(200, [(b"x-request-id", call.id.encode()), *headers])
        try:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            async for piece in chunks:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except EmberlineError as error:
            log.warning("a body broke off: %s", error.message)
            raise BrokenOff(error.message) from error
    await send({"type": "http.response.body", "body": b""})


async def gathered(lines: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Small pieces put together to larger ones."""
    pieces: list[bytes] = []
    n_bytes = 0
    async for line in lines:
        pieces.append(line)
        n_bytes += len(line)
        if n_bytes >= _PIECE_BYTES:
            yield b"".join(pieces)
            pieces, n_bytes = [], 0
    if pieces:
        yield b"".join(pieces)


async def pieces_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        yield chunk
