"""The Messages API for models of Anthropic: the body is passed on as it came, and events come back untouched.

Only an image that its server cannot read, or must not fetch, is put into the body by the core.
"""

import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from emberline.api.common.image_parts import image_from_file, image_from_url
from emberline.api.common.linked_images import Keys, LinkedImage, linked_images
from emberline.api.http.errors import HeaderList, error_body
from emberline.api.http.exchange import HttpExchange
from emberline.api.http.sse import named_event
from emberline.api.http.streaming import Response, relay
from emberline.api.http.wire import Wire
from emberline.protocol.errors import EmberlineError, Unsupported
from emberline.protocol.images import ImageLink
from emberline.protocol.route_request import RouteTerms
from emberline.service.work import RelayRequest
from emberline.upstream.dialects.dialect import MESSAGES, split_data_url
from emberline.upstream.target import Target
from emberline.upstream.upstream_request import LinkedImages, UpstreamRequest, check_known

_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")
_BETAS = re.compile(r"[A-Za-z0-9,_ .-]{1,1000}")
DEFAULT_VERSION = "2023-06-01"
_OUR_FILE = "file-"  # begins the id of a file that was uploaded here; ids of Anthropic's own begin with "file_"
_MAX_KEYS = 7  # that lead to a block: in a message, in a tool's result there, in a document there


class _Body(msgspec.Struct, kw_only=True):
    """The fields of a body that are read here; Anthropic checks the rest."""

    model: str
    messages: Raw
    max_tokens: Annotated[int, Meta(ge=0)]
    stream: bool | None = None
    speculation: Raw | None = None  # of our own engines


_body = msgspec.json.Decoder(_Body)
_any = msgspec.json.Decoder()


def forward_message(
    call: HttpExchange, wire: Wire, headers: Callable[[HttpExchange], HeaderList]
) -> Awaitable[Response]:
    """Relay a request for a model that Anthropic's API serves."""
    body = wire.decode_fields(_body)
    if body.speculation is not None:
        check_known("speculation", "anthropic")
    stream = bool(body.stream)

    def make(target: Target, request_id: str) -> UpstreamRequest:
        fields: dict[str, Any] = {**wire.fields, "model": target.remote, "stream": True}
        route = call.service.models.upstream.route_request(
            RouteTerms(request_id, "messages", session=call.session),
            target,
            call.principal,
            (bytes(body.messages),),
            max_tokens=body.max_tokens,
            body_bytes=len(wire.raw),
        )
        return UpstreamRequest(
            route,
            MESSAGES,
            fields,
            stream=stream,
            adds_cost=call.wants_cost,
            access=target.access,
            headers=_headers(call),
            linked=_linked(body.messages, target.fetches_images),
        )

    task = RelayRequest(id=call.id, model=body.model, make=make, stream=stream, session=call.session, api="messages")
    return relay(call, task, partial(_event, call), headers)


def _linked(messages: Raw, fetches: bool) -> LinkedImages | None:
    """The images that the core reads: files that were uploaded here, and URLs unless the server `fetches` them itself.

    Raises Unsupported for a document that would have to be read."""
    if fetches and f'"{_OUR_FILE}'.encode() not in bytes(messages):
        return None
    found: list[LinkedImage] = []
    n_images = 0
    for at, keys, block in _blocks(_any.decode(messages)):
        n_images += block.get("type") == "image"
        if (name := _name(block, fetches)) is not None:
            field = f"messages[{at}]" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
            if block.get("type") != "image":
                raise Unsupported(f"`{field}` must come inside the request: send it in base64", param=field)
            kind, value = name
            part = image_from_file(value) if kind == "file" else image_from_url(value, f"{field}.source.url")
            found.append(LinkedImage(ImageLink(n_images, field, part.value), at, (*keys, "source")))
    return linked_images(found, _source)


def _blocks(messages: Any) -> Iterator[tuple[int, Keys, dict[str, Any]]]:
    """Blocks, and their sources, in messages: each with its message's number and the keys that lead to it there."""
    waiting: list[tuple[int, Keys, Any]] = [(at, (), message) for at, message in enumerate(_list(messages))]
    waiting.reverse()
    while waiting:
        at, keys, holder = waiting.pop()
        if not isinstance(holder, dict) or len(keys) > _MAX_KEYS:
            continue
        if keys:
            yield at, keys, holder
            waiting.append((at, (*keys, "source"), holder.get("source")))
        content = _list(holder.get("content"))
        waiting.extend((at, (*keys, "content", index), content[index]) for index in reversed(range(len(content))))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _name(block: dict[str, Any], fetches: bool) -> tuple[str, str] | None:
    """Find the file id or the URL that a block's source names. Returns None if the server can read the source."""
    source = block.get("source")
    if isinstance(source, dict):
        file_id, url = source.get("file_id"), source.get("url")
        if source.get("type") == "file" and isinstance(file_id, str) and file_id.startswith(_OUR_FILE):
            return "file", file_id
        if source.get("type") == "url" and isinstance(url, str) and not fetches:
            return "url", url
    return None


def _source(url: str) -> dict[str, str]:
    """An image's data: URL as Anthropic's API takes it."""
    mime, data = split_data_url(url, "messages")
    return {"type": "base64", "media_type": mime, "data": data}


def _headers(call: HttpExchange) -> str:
    """The version and the beta features that the client has asked for."""
    version, betas = call.headers.get("anthropic-version", ""), call.headers.get("anthropic-beta", "")
    lines = f"anthropic-version: {version if _VERSION.fullmatch(version) else DEFAULT_VERSION}\r\n"
    return lines + (f"anthropic-beta: {betas}\r\n" if _BETAS.fullmatch(betas) else "")


def _event(call: HttpExchange, error: EmberlineError) -> bytes:
    return named_event("error", error_body(error, call.dialect, call.id))
