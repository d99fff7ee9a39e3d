"""Reading a request body: bounded in size and time, decoded as JSON into a typed struct whatever its content type."""

import asyncio
import re
from collections.abc import AsyncIterator
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from emberline.api.http.call import Call, ClientDisconnected
from emberline.api.http.errors import NoBody
from emberline.protocol.errors import BadInput, DeadlineExceeded, TooLarge, Unsupported

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
IDLE_S = 30.0  # the longest pause between two chunks of a body
_NOT_JSON = ("multipart/", "audio/", "image/", "application/octet-stream")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]+)`")

EMPTY: list[Any] = [None, False, 0, "", [], {}]  # values that ask for nothing
UnsupportedField = Annotated[Any, Meta(description="Not supported yet.", extra_json_schema={"enum": EMPTY})]


def unsupported(field: str) -> Unsupported:
    return Unsupported(f"`{field}` is not supported yet", param=field)


def refuse_unsupported(body: msgspec.Struct, prefix: str = "") -> None:
    """Raise for the first UnsupportedField of `body` that is not empty; `prefix` is the path to `body`, with its dot.

    Fields that the API does not define are ignored; fields that it defines and we do not implement are not.
    """
    for name in _unsupported_fields(type(body)):
        if getattr(body, name) not in EMPTY:
            raise unsupported(prefix + name)


@cache
def _unsupported_fields(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(struct) if field.type == UnsupportedField)


async def read_json(call: Call, decoder: msgspec.json.Decoder[T]) -> T:
    return decode(await read_body(call), decoder)


async def read_body(call: Call, max_bytes: int | None = None) -> bytes:
    """A JSON body, not yet decoded."""
    content_type = call.headers.get("content-type", "").lower()
    if content_type.startswith(_NOT_JSON):
        raise BadInput(f"this endpoint takes JSON, not {content_type.partition(';')[0]}", param="content-type")
    if call.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadInput("compressed request bodies are not accepted", param="content-encoding")
    return b"".join([chunk async for chunk in body_chunks(call, max_bytes or MAX_BODY_BYTES)])


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """`body` as the decoder's type; BadInput names the field that is wrong."""
    if not body:
        raise NoBody("the request has no body; send a JSON object")
    try:
        if not body.isascii():
            str(body, "utf-8")  # msgspec does not validate the strings of fields that it skips
        return _decode(body, decoder)
    except msgspec.ValidationError as bad:
        raise BadInput(str(bad), param=_param(str(bad))) from None
    except UnicodeDecodeError as bad:
        raise BadInput(f"the body is not valid UTF-8: {bad.reason} at byte {bad.start}") from None
    except msgspec.DecodeError as bad:
        raise BadInput(f"the body is not valid JSON: {bad}") from None
    except RecursionError:
        raise BadInput("the JSON is nested too deeply") from None


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as bad:
        if "got `float`" not in str(bad):
            raise
    return msgspec.convert(_integers(msgspec.json.decode(body)), decoder.type)


def _integers(value: Any) -> Any:
    """The value with 1.0 replaced by 1: some languages have only one kind of number."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value
    if isinstance(value, list):
        return [_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _integers(item) for key, item in value.items()}
    return value


def _param(message: str) -> str | None:
    """The field a validation message is about: its path, and the name of a field missing there."""
    parts = [found[1] for found in (_PATH.search(message), _MISSING.search(message)) if found and found[1]]
    return ".".join(parts) or None


async def body_chunks(call: Call, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it arrives."""
    too_large = TooLarge(f"the request body is larger than {max_bytes >> 20} MiB")
    announced = call.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    n_bytes, more = 0, True
    while more:
        try:
            async with asyncio.timeout(IDLE_S):
                message = await call.receive()
        except TimeoutError:
            raise DeadlineExceeded(f"the request body stopped arriving for {IDLE_S:.0f} s") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        n_bytes += len(chunk)
        if n_bytes > max_bytes:
            raise too_large
        yield chunk
