"""Reading a request body: bounded in size and time, decoded as JSON into a typed struct whatever its content type."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

import msgspec

from emberline.api.http.decode_errors import explain
from emberline.api.http.errors import NoBody
from emberline.api.http.exchange import ClientDisconnected, HttpExchange, LargeRequest
from emberline.protocol.errors import BadInput, DeadlineExceeded, TooLarge, Unavailable

T = TypeVar("T")

MAX_VALUES = 1 << 18  # of one request's JSON: a prompt of as many token ids, or far more messages than any client sends
NO_LIMIT = 32 << 20  # of values, of which a body has no more than bytes: its parts are decoded and limited one by one
MIN_BYTES_PER_S = 16 << 10  # of a body, after a first pause of `RequestLimits.idle_s`
LARGE_BYTES = 1 << 20  # a longer body, or one with more values, is decoded in another process: here that would take
LARGE_VALUES = 10_000  # tens of milliseconds, in which no stream goes on
SCAN_BYTES = 256 << 10  # of a body, looked at together
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # errors of a body that cannot be decoded
_NOT_JSON = ("multipart/", "audio/", "image/", "application/octet-stream")


class HeldBodies:
    """The bytes of request bodies in this process's memory, of all requests until they end."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.n_bytes = 0

    def add(self, call: HttpExchange, n_bytes: int) -> None:
        if self.n_bytes + n_bytes > self.most:
            raise Unavailable("too many large requests are being served: try again in a moment", retry_after_s=5)
        self.n_bytes += n_bytes
        call.held_bytes += n_bytes

    def release(self, call: HttpExchange) -> None:
        self.n_bytes -= call.held_bytes
        call.held_bytes = 0


held_bodies = HeldBodies(min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8))


async def read_json(call: HttpExchange, decoder: msgspec.json.Decoder[T]) -> T:
    return decode(await read_body(call), decoder)


async def read_body(call: HttpExchange, max_bytes: int | None = None, any_type: bool = False) -> bytes:
    """A JSON body, not yet decoded; or any other where `any_type`."""
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


def decode(body: bytes, decoder: msgspec.json.Decoder[T], max_values: int = MAX_VALUES) -> T:
    """Decode a body as the decoder's type. Raises BadInput, which names the field that is wrong."""
    if not body:
        raise NoBody("the request has no body; send a JSON object")
    if has_more_values(body, max_values):
        raise TooLarge(f"the JSON has more than {max_values:,} values; send fewer or smaller lists and objects")
    try:
        if not body.isascii():
            str(body, "utf-8")  # msgspec does not validate the strings of fields that it skips
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as bad:
            return convert(body, decoder, bad, {})
    except UNREADABLE as bad:
        raise problem(bad) from None


def problem(bad: Exception) -> BadInput:
    """Explain to the client why a body cannot be decoded, by one of the UNREADABLE errors."""
    if isinstance(bad, msgspec.ValidationError):
        message, field = explain(str(bad))
        return BadInput(message, param=field)
    if isinstance(bad, UnicodeDecodeError):
        return BadInput(f"the body is not valid UTF-8: {bad.reason} at byte {bad.start}")
    if isinstance(bad, RecursionError):
        return BadInput("the JSON is nested too deeply")
    return BadInput(f"the body is not valid JSON: {bad}")


def convert(
    body: bytes, decoder: msgspec.json.Decoder[T], bad: msgspec.ValidationError, unread: Mapping[str, msgspec.Raw]
) -> T:
    """Decode a body that failed with `bad` once more, with 1.0 read as 1: some languages have one kind of number.

    `unread` are fields to put in place of the body's. Raises `bad` if it is about something else."""
    if "got `float`" not in str(bad):
        raise bad
    values = _whole_floats.decode(body)
    return msgspec.convert({**values, **unread} if unread else values, decoder.type)


def _number(text: str) -> int | float:
    """Read 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


_whole_floats = msgspec.json.Decoder(float_hook=_number)


def has_more_values(body: bytes, most: int, scan_bytes: int = SCAN_BYTES) -> bool:
    """True if the JSON has more than about `most` values, judged by the commas and brackets outside its strings.

    Linear, and without decoding: values cost far more time and memory than the bytes of a long text.
    """
    if len(body) <= most or n_separators(body) <= most:  # also those inside strings: an upper bound
        return False
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    inside, n_found, n_quotes = False, 0, 0
    for at in range(0, len(unescaped), scan_bytes):
        parts = unescaped[at : at + scan_bytes].split(b'"')
        n_found += n_separators(b" ".join(parts[inside::2]))
        n_quotes += len(parts) - 1
        inside ^= len(parts) % 2 == 0
        if n_found > most or n_quotes > 4 * (most + 1):  # a separator has at most a key and a text
            return True
    return False


def n_separators(body: bytes) -> int:
    return len(body) - len(body.translate(None, b",[{"))  # unlike bytes.count, as fast where there are many


class _Named(msgspec.Struct):
    model: Any = None


_named = msgspec.json.Decoder(_Named)


def named_model(body: bytes) -> str | None:
    """The model that a body names. What is wrong with a body without one is reported where it is decoded in full."""
    try:
        name = _named.decode(body).model
    except UNREADABLE:
        return None
    return name if isinstance(name, str) else None


async def body_chunks(call: HttpExchange, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it arrives."""
    announced_bytes(call, max_bytes)
    clock, idle_s = asyncio.get_running_loop().time, call.limits.idle_s
    n_bytes, waited_s, more = 0, 0.0, True
    while more:
        began_s = clock()
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
    return TooLarge(f"the request body is larger than {max_bytes >> 20} MiB")
