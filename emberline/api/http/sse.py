"""Responses sent as they are produced: server-sent events, one send per event, and plain byte streams."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import aclosing
from typing import Any

from emberline.api.http.call import EVENT_STREAM, Call, Events, encode, while_connected
from emberline.api.http.errors import Dialect, HeaderList, error_body
from emberline.api.http.resumable import HEADER, send_resumable
from emberline.protocol.errors import EmberlineError, Internal, Unavailable
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)

JSONL = b"application/x-jsonl"
_CHUNK_BYTES = 64 << 10
_PADDING = [b"abcdefghijklmnopqrstuvwxyz0123456789"[:length] for length in range(1, 33)]

log = logging.getLogger(__name__)


class EventEncoder:
    """Encodes the events of one request for one API. Each method returns the bytes to send, which may be none."""

    content_type = EVENT_STREAM

    def __init__(self, request_id: str, dialect: Dialect) -> None:
        self._request_id = request_id
        self._dialect = dialect

    def started(self, usage: Usage) -> bytes:
        return b""

    def text_delta(self, event: TextDelta) -> bytes:
        raise NotImplementedError

    def reasoning_delta(self, event: ReasoningDelta) -> bytes:
        return b""

    def tool_call_started(self, event: ToolCallStarted) -> bytes:
        return b""

    def tool_call_delta(self, event: ToolCallDelta) -> bytes:
        return b""

    def choice_done(self, event: ChoiceDone) -> bytes:
        raise NotImplementedError

    def completed(self, usage: Usage) -> bytes:
        raise NotImplementedError

    def failed(self, error: EmberlineError) -> bytes:
        return data_event(error_body(error, self._dialect, self._request_id))


def data_event(body: Any) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def named_event(name: str, body: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(body))


async def stream(call: Call, events: Events, encoder: EventEncoder, headers: HeaderList, stream_id: str = "") -> None:
    """Send `events` to the client as they come.

    An error before the first event is raised and becomes an HTTP status; a later one ends the stream with the API's
    error event. A client that disconnects closes `events`, unless it has asked to resume the stream, by `stream_id` or
    by an id of its own.
    """
    if HEADER in call.headers:
        chunks = _encoded(events, encoder)
        return await send_resumable(call, chunks, headers, encoder.content_type, encoder.failed, stream_id)
    await while_connected(call.receive, _stream(call, events, encoder, headers))


async def _stream(call: Call, events: Events, encoder: EventEncoder, headers: HeaderList) -> None:
    send = call.send
    async with aclosing(events):
        first = await anext(events)
        assert isinstance(first, Started)
        await call.start_stream(headers, encoder.content_type)
        if opening := encoder.started(first.usage):
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        last = await _send_events(call, events, encoder)
    await send({"type": "http.response.body", "body": last})


async def _send_events(call: Call, events: Events, encoder: EventEncoder) -> bytes:
    """Send every event after Started; the bytes of the last one are returned, because they end the response."""
    send, text_delta = call.send, encoder.text_delta
    try:
        async for event in events:
            chunk = text_delta(event) if type(event) is TextDelta else _encode(event, encoder)
            if type(event) is Completed:
                return chunk
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        raise Internal("the events ended before the answer was complete")
    except EmberlineError as error:
        return encoder.failed(error)
    except asyncio.CancelledError:
        # Either the client disconnected or the server stops; in the second case the client can still be told.
        await send({"type": "http.response.body", "body": encoder.failed(Unavailable("the server is stopping"))})
        raise
    except Exception:
        log.exception("a stream failed")
        return encoder.failed(Internal("the request failed; the server's log has the reason under this request's id"))


def _encode(event: TextEvent, encoder: EventEncoder) -> bytes:
    if type(event) is TextDelta:
        return encoder.text_delta(event)
    if type(event) is ToolCallDelta:
        return encoder.tool_call_delta(event)
    if type(event) is ReasoningDelta:
        return encoder.reasoning_delta(event)
    if type(event) is ToolCallStarted:
        return encoder.tool_call_started(event)
    if type(event) is ChoiceDone:
        return encoder.choice_done(event)
    if type(event) is Completed:
        return encoder.completed(event.usage)
    assert isinstance(event, Started)
    return encoder.started(event.usage)


async def _encoded(events: Events, encoder: EventEncoder) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream. An error before the first is raised; a later one is the last chunk."""
    async with aclosing(events):
        yield _encode(await anext(events), encoder)
        try:
            async for event in events:
                yield _encode(event, encoder)
                if type(event) is Completed:
                    return
            raise Internal("the events ended before the answer was complete")
        except EmberlineError as error:
            yield encoder.failed(error)


def random_padding() -> Iterator[bytes]:
    """Padding of random length for each event of a stream, so that packet sizes do not reveal token lengths."""
    while True:
        for byte in os.urandom(128):
            yield _PADDING[byte & 31]


class IncompleteBody(Exception):
    """The body cannot be finished: the connection is closed without its end, so that no client takes it for whole."""


async def send_bytes(
    call: Call, chunks: AsyncIterable[bytes], content_type: bytes, headers: HeaderList | None = None
) -> None:
    """An error before the first byte is raised and becomes an HTTP status."""
    await while_connected(call.receive, _send_bytes(call, chunks, [(b"content-type", content_type), *(headers or [])]))


async def _send_bytes(call: Call, chunks: AsyncIterable[bytes], headers: HeaderList) -> None:
    send = call.send
    async with aclosing(coalesce(chunks)) as body:
        chunk = await anext(body, b"")
        await call.start(200, [(b"x-request-id", call.id.encode()), *headers])
        try:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            async for chunk in body:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except EmberlineError as error:
            log.warning("a response body could not be completed: %s", error.message)
            raise IncompleteBody(error.message) from error
    await send({"type": "http.response.body", "body": b""})


async def coalesce(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Small chunks joined into larger ones."""
    pending: list[bytes] = []
    n_bytes = 0
    async for chunk in chunks:
        pending.append(chunk)
        n_bytes += len(chunk)
        if n_bytes >= _CHUNK_BYTES:
            yield b"".join(pending)
            pending, n_bytes = [], 0
    if pending:
        yield b"".join(pending)
