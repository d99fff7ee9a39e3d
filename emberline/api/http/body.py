"""Reading a request body as it arrives: bounded in size and time, as JSON whatever its content type."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from emberline.api.http.errors import Dialect
from emberline.api.http.exchange import ClientDisconnected, HttpExchange, LargeRequest
from emberline.api.http.wire import SESSION_FIELDS, Wire, has_more_values
from emberline.net.held_bodies import held_bodies
from emberline.net.http_server import BODY_ARRIVED
from emberline.protocol.errors import BadInput, DeadlineExceeded, TooLarge
from emberline.protocol.sizes import format_limit

T = TypeVar("T")

MIN_BYTES_PER_S = 16 << 10  # of a body, after a first pause of `RequestLimits.idle_s`
LARGE_BYTES = 1 << 20  # a longer body, or one with more values, is decoded in another process: here that would take
LARGE_VALUES = 10_000  # tens of milliseconds, in which no stream goes on
_ONLY_MODEL = (Dialect.OPENAI, Dialect.OPENAI_ENVELOPED)  # APIs whose `model` may be left out
_NULL = msgspec.Raw(b"null")
_NOT_JSON = ("multipart/", "audio/", "image/", "application/octet-stream")


async def read_json(call: HttpExchange, kind: type[T]) -> T:
    """Read a JSON body of this type."""
    if call.wire is None:
        call.wire = Wire(await read_body(call))
    body: T = call.wire.decode(_decoder(kind))  # type: ignore[arg-type]
    return body


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


async def read_body(call: HttpExchange, max_bytes: int | None = None, any_type: bool = False) -> bytes:
    """Read a JSON body without decoding it, or a body of any type if `any_type`."""
    if call.wire is not None:
        return call.wire.raw
    content_type = call.headers.get("content-type", "").lower()
    if content_type.startswith(_NOT_JSON) and not any_type:
        raise BadInput(f"this endpoint takes JSON, not {content_type.partition(';')[0]}", param="content-type")
    if call.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadInput("compressed request bodies are not accepted", param="content-encoding")
    max_bytes = max_bytes or call.limits.max_body_bytes
    if call.relays_large and announced_bytes(call, max_bytes) > LARGE_BYTES:
        raise LargeRequest(max_bytes)
    n_bytes = 0
    async for chunk in body_chunks(call, max_bytes):
        held_bodies.add(call, len(chunk))
        call.received.append(chunk)
        n_bytes += len(chunk)
        if call.relays_large and n_bytes > LARGE_BYTES:
            raise LargeRequest(max_bytes)
    body = b"".join(call.received)
    call.received, call.body_complete = [body], True
    if call.relays_large and has_more_values(body, LARGE_VALUES):
        raise LargeRequest
    return body


async def read_wire(exchange: HttpExchange, session_fields: Sequence[str] = SESSION_FIELDS) -> Wire:
    """Read a JSON body. Sets the model and the session of the exchange; refuses an unknown model. In the OpenAI API a
    body without a model is for the only one that there is.

    `session_fields` are the body's names of its session, by precedence.
    """
    wire = exchange.wire
    if wire is None:
        wire = exchange.wire = Wire(await read_body(exchange))
    exchange.session = exchange.header_session or wire.session(session_fields)
    model = wire.model
    if model is None and exchange.dialect in _ONLY_MODEL and wire.fields.get("model", _NULL) == _NULL and wire.fields:
        model = exchange.only_model()
        wire.use_model(model)
    if model is not None:
        exchange.named_model = model
        exchange.use_model(model)
    return wire


async def body_chunks(call: HttpExchange, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it arrives."""
    announced_bytes(call, max_bytes)
    clock, idle_s = asyncio.get_running_loop().time, call.limits.idle_s
    n_bytes, waited_s, more = 0, 0.0, True
    while more:
        began_s = clock()
        if BODY_ARRIVED in call.scope:  # then nothing is waited for, and a timer would cost more than the rest
            message = await call.receive()
        else:
            try:
                async with asyncio.timeout(idle_s):
                    message = await call.receive()
            except TimeoutError:
                raise DeadlineExceeded(f"the request body stopped arriving for {idle_s:.0f} s") from None
        waited_s += clock() - began_s
        if n_bytes < MIN_BYTES_PER_S * (waited_s - idle_s):
            raise DeadlineExceeded(f"the request body arrives at less than {MIN_BYTES_PER_S >> 10} KiB/s")
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        n_bytes += len(chunk)
        if n_bytes > max_bytes:
            raise _too_large(max_bytes)
        yield chunk


def announced_bytes(call: HttpExchange, max_bytes: int) -> int:
    """The body's size as the client announces it; 0 if it does not."""
    announced = call.headers.get("content-length", "")
    n_bytes = int(announced) if announced.isdecimal() else 0
    if n_bytes > max_bytes:
        raise _too_large(max_bytes)
    return n_bytes


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {format_limit(max_bytes)}")
