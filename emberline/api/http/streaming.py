"""Responses that are sent as they are produced: an endpoint returns one of these descriptions, and the app sends it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from emberline.api.http.errors import HeaderList
from emberline.api.http.exchange import EVENT_STREAM, Events, HttpExchange, Reply
from emberline.api.http.sse import EventEncoder
from emberline.net.http_server import ASGIApp, Message, Send
from emberline.protocol.errors import EmberlineError, Internal, Unavailable
from emberline.protocol.events import Completed, Started, TextDelta, TextEvent
from emberline.service.work import RelayRequest

JSONL = b"application/x-jsonl"
LOADING_S = 1.0  # after which a client is told what it waits for; before, a refusal has its HTTP status
STILL_LOADING_S = 10.0  # between two comments on a model's loading, which also keep proxies from closing the connection
_CHUNK_BYTES = 64 << 10

log = logging.getLogger(__name__)

Chunks = AsyncGenerator[bytes, None]
# Parts of a body, as bytes; the last part is the `result` of a LastBlock, or of Completed.
Blocks = AsyncGenerator[Any, None]
Failed = Callable[[EmberlineError], bytes]  # encodes an error as the last event of a stream


class LastBlock(NamedTuple):
    """The last part of a body."""

    result: bytes


class IncompleteBody(Exception):
    """The body cannot be finished: the connection is closed without its end, so that no client takes it for whole."""


class Streaming(msgspec.Struct, kw_only=True):
    """A response whose body is not known yet. An error before its first byte is raised and becomes an HTTP status."""

    headers: HeaderList = []
    log_id: str = ""  # the id by which a client can resume the stream; empty if it gets one of its own
    # Makes another response if this one fails before its first byte.
    otherwise: "Callable[[EmberlineError], Awaitable[Response]] | None" = None

    @property
    def content_type(self) -> bytes:
        return EVENT_STREAM

    @property
    def failed(self) -> Failed | None:
        """Encodes an error. Returns None for a response that is cut off if it fails; such a one cannot be resumed."""
        return None

    async def send(self, call: HttpExchange) -> None:
        """Send the response. Only the app calls this, in a task that a client's disconnection cancels."""
        raise NotImplementedError

    def chunks(self) -> Chunks:
        """The body for an event log. An error before the first chunk is raised; a later one is the last chunk."""
        raise NotImplementedError


class WebSocketSession:
    """The answer to the handshake of a WebSocket."""

    async def serve(self, call: HttpExchange, app: ASGIApp) -> None:
        """Accept the connection and serve it to its end. Requests that come over it are run by the app."""
        raise NotImplementedError


def as_denial(send: Send) -> Send:
    """`send` for a handshake: a reply, instead of a session, refuses it."""

    async def send_denial(message: Message) -> None:
        if message["type"].startswith("http."):
            message = {**message, "type": f"websocket.{message['type']}"}
        await send(message)

    return send_denial


Response = Reply | Streaming | WebSocketSession


class EventStream(Streaming):
    """The events of a request in the encoding of one API."""

    events: Events
    encoder: EventEncoder

    @property
    def content_type(self) -> bytes:
        return self.encoder.content_type

    @property
    def failed(self) -> Failed:
        return self.encoder.failed

    async def send(self, call: HttpExchange) -> None:
        events, encoder, send = self.events, self.encoder, call.send
        async with aclosing(events):
            if call.loading_model or call.wants_queue_position:
                try:
                    first = await self._first_of_waiting(call)
                except EmberlineError as error:
                    if not call.status:
                        raise
                    await send({"type": "http.response.body", "body": encoder.failed(error)})
                    return
                except asyncio.CancelledError:
                    if call.status:
                        await _send_stopping(call, encoder)
                    raise
            else:
                first = await anext(events)
            assert isinstance(first, Started)
            if not call.status:
                await call.start_stream(self.headers, encoder.content_type)
            if opening := encoder.started(first.usage):
                await send({"type": "http.response.body", "body": opening, "more_body": True})
            last = await _send_events(call, events, encoder)
        await send({"type": "http.response.body", "body": last})

    async def _first_of_waiting(self, call: HttpExchange) -> TextEvent:
        """The first event of a request that may have to wait. A client that waits for long gets comments."""
        waiting = asyncio.create_task(_first_event(self.events))
        wait_s = LOADING_S
        try:
            while not (await asyncio.wait([waiting], timeout=wait_s))[0]:
                if comment := self.encoder.comment(await _reason_to_wait(call)):
                    if not call.status:
                        await call.start_stream(self.headers, self.encoder.content_type)
                    await call.send({"type": "http.response.body", "body": comment, "more_body": True})
                    wait_s = LOADING_S if call.wants_queue_position else STILL_LOADING_S
            return await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def chunks(self) -> Chunks:
        events, encoder = self.events, self.encoder
        async with aclosing(events):
            yield encoder.encode(await anext(events))
            try:
                async for event in events:
                    yield encoder.encode(event)
                    if type(event) is Completed:
                        return
                raise Internal("the events ended before the answer was complete")
            except EmberlineError as error:
                yield encoder.failed(error)


async def _reason_to_wait(call: HttpExchange) -> str:
    """Name what a request without its first event waits for. Empty if its client is told nothing."""
    if model := call.loading_model:
        return f"loading {model}"
    if not call.wants_queue_position:
        return ""
    try:
        n_ahead = await call.service.n_ahead(call.id)
    except Unavailable:  # this HTTP worker has lost the core
        return ""
    if n_ahead is not None:
        return f"waiting, {n_ahead} ahead"
    return "running" if call.status else ""  # a client that was told of the queue is told that it is over


async def _first_event(events: Events) -> TextEvent:
    return await anext(events)


async def _send_events(call: HttpExchange, events: Events, encoder: EventEncoder) -> bytes:
    """Send every event after Started. Returns the bytes of the last one, because they end the response."""
    send, text_delta = call.send, encoder.text_delta
    try:
        async for event in events:
            chunk = text_delta(event) if type(event) is TextDelta else encoder.encode(event)
            if type(event) is Completed:
                return chunk
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        raise Internal("the events ended before the answer was complete")
    except EmberlineError as error:
        return encoder.failed(error)
    except asyncio.CancelledError:
        await _send_stopping(call, encoder)
        raise
    except Exception:
        log.exception("a stream failed")
        return encoder.failed(Internal("the request failed; the server's log has the reason under this request's id"))


async def _send_stopping(call: HttpExchange, encoder: EventEncoder) -> None:
    """End a stream that is cancelled: if the client has not disconnected, the server stops, and it can be told."""
    body = encoder.failed(Unavailable("the server is stopping"))
    await call.send({"type": "http.response.body", "body": body})


class BlockStream(Streaming):
    """Blocks of bytes that are events already: a relayed reply, one write per network read, or a log of events."""

    blocks: Blocks
    failed: Failed | None = None
    content_type: bytes = EVENT_STREAM

    async def send(self, call: HttpExchange) -> None:
        blocks, send, failed = self.blocks, call.send, self.failed
        async with aclosing(blocks):
            block = await anext(blocks)
            await call.start_stream(self.headers, self.content_type)
            try:
                while type(block) is bytes:
                    if block:
                        await send({"type": "http.response.body", "body": block, "more_body": True})
                    block = await anext(blocks)
                last: bytes = block.result
            except EmberlineError as error:
                if failed is None:
                    raise IncompleteBody(error.message) from error
                last = failed(error)
            except BaseException:  # the client disconnected, or the server stops: then the client still reads
                if failed is not None:
                    await send({"type": "http.response.body", "body": failed(Unavailable("the server is stopping"))})
                raise
        await send({"type": "http.response.body", "body": last})

    async def chunks(self) -> Chunks:
        assert self.failed is not None
        async with aclosing(self.blocks) as blocks:
            block = await anext(blocks)
            yield block if type(block) is bytes else block.result
            try:
                async for block in blocks:
                    yield block if type(block) is bytes else block.result
            except EmberlineError as error:
                yield self.failed(error)


async def relay(
    call: HttpExchange,
    task: RelayRequest,
    failed: Failed,
    headers: Callable[[HttpExchange], HeaderList] = attrgetter("id_headers"),
) -> Response:
    """Answer with the reply of an upstream server, as it comes or whole."""
    if task.stream:
        return BlockStream(call.run(task), failed, headers=headers(call))
    body: bytes = await call.result(task)
    return Reply(200, body, headers=headers(call))


class ByteStream(Streaming):
    """A file, or what is written as one. A body that cannot be finished is cut off."""

    body: Chunks
    content_type: bytes

    async def send(self, call: HttpExchange) -> None:
        send = call.send
        async with aclosing(self.body), aclosing(coalesce(self.body)) as body:
            chunk = await anext(body, b"")
            head = [(b"x-request-id", call.id.encode()), (b"content-type", self.content_type)]
            await call.start(200, [*head, *self.headers])
            try:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                async for chunk in body:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except EmberlineError as error:
                log.warning("a response body could not be completed: %s", error.message)
                raise IncompleteBody(error.message) from error
        await send({"type": "http.response.body", "body": b""})


async def coalesce(chunks: AsyncIterable[bytes]) -> Chunks:
    """Join small chunks into larger ones."""
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
