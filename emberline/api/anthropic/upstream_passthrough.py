"""The Messages API for models of Anthropic: the body is passed on as it came, and events come back untouched."""

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from emberline.api.http.errors import HeaderList, error_body
from emberline.api.http.exchange import HttpExchange
from emberline.api.http.sse import named_event
from emberline.api.http.streaming import Response, relay
from emberline.api.http.wire import Wire
from emberline.protocol.errors import EmberlineError
from emberline.protocol.route_request import RouteTerms
from emberline.service.work import RelayRequest
from emberline.upstream.dialects.dialect import MESSAGES
from emberline.upstream.target import Target
from emberline.upstream.upstream_request import UpstreamRequest, check_known

_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")
_BETAS = re.compile(r"[A-Za-z0-9,_ .-]{1,1000}")
DEFAULT_VERSION = "2023-06-01"


class _Body(msgspec.Struct, kw_only=True):
    """The fields of a body that are read here; Anthropic checks the rest."""

    model: str
    messages: Raw
    max_tokens: Annotated[int, Meta(ge=0)]
    stream: bool | None = None
    speculation: Raw | None = None  # of our own engines


_body = msgspec.json.Decoder(_Body)


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
        )

    task = RelayRequest(id=call.id, model=body.model, make=make, stream=stream, session=call.session, api="messages")
    return relay(call, task, partial(_event, call), headers)


def _headers(call: HttpExchange) -> str:
    """The version and the beta features that the client has asked for."""
    version, betas = call.headers.get("anthropic-version", ""), call.headers.get("anthropic-beta", "")
    lines = f"anthropic-version: {version if _VERSION.fullmatch(version) else DEFAULT_VERSION}\r\n"
    return lines + (f"anthropic-beta: {betas}\r\n" if _BETAS.fullmatch(betas) else "")


def _event(call: HttpExchange, error: EmberlineError) -> bytes:
    return named_event("error", error_body(error, call.dialect, call.id))
