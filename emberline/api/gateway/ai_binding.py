"""The `AI` binding of a local Worker: the requests that workerd makes of `env.AI.run(…)`, answered without an envelope.

They arrive in three forms. workerd itself, with this server as an external service, sends them as they are. Miniflare,
with this server as its `remoteProxyConnectionString`, puts the URL and the headers into other headers (`MF-URL`,
`MF-Header-…`). Older wrangler sends them to `/ai/run/proxy`, with the URL in `X-Forwarded`.
"""

import base64
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from emberline.api.gateway.paths import universal
from emberline.api.http.body import read_body
from emberline.api.http.errors import Dialect
from emberline.api.http.exchange import HttpExchange, Reply, encode, json_reply
from emberline.api.http.guard import BINDING_HOST
from emberline.api.http.router import APIS, check_api
from emberline.api.http.streaming import Response
from emberline.api.http.wire import NO_LIMIT, decode
from emberline.api.workers_ai import catalog
from emberline.api.workers_ai.handlers import run_model
from emberline.api.workers_ai.response_body import envelope
from emberline.api.workers_ai.run_request import RunOptions, RunRequest
from emberline.catalog.model_card import SPEECH_RECOGNITION
from emberline.net.http_server import Scope
from emberline.protocol.errors import BadInput, NotFound
from emberline.protocol.gateway import DYNAMIC

WRAPPED = "/binding"  # the route of requests inside another one, whatever path they were sent to
UNIVERSAL = "/ai-gateway/universal/run/"
GATEWAYS = "/ai-gateway/gateways/"
WRAPS = b"mf-binding"
_HEADER = b"mf-header-"
_OUTER = frozenset({b"host", b"origin", b"content-length", b"transfer-encoding", b"connection", b"content-encoding"})
_MODEL = "cf-consn-model-id"
_JSON = ("", "application/json", "text/plain")


class BindingRequest(msgspec.Struct):
    """The body as the OpenAPI document has it. What the model's task makes of the input is decided later."""

    inputs: RunRequest
    options: RunOptions | None = None


class _Body(msgspec.Struct):
    inputs: msgspec.Raw
    options: msgspec.Raw = msgspec.Raw()


_body = msgspec.json.Decoder(_Body)
_object = msgspec.json.Decoder(dict[str, Any])


async def run(call: HttpExchange) -> Response:
    model = _model(call)
    card = None if model.startswith(DYNAMIC) else call.use_model(model)
    content_type = call.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in _JSON:
        body = decode(await read_body(call), _body, NO_LIMIT)  # the values of the input are limited where it is read
        return await run_model(call, model, _input(body))
    if card is None or card.task != SPEECH_RECOGNITION:
        raise BadInput(f"{model} takes no stream of {content_type[:80]}: send its input as an object", param="inputs")
    return await run_model(call, model, _with_fields(call, await read_body(call, any_type=True)))


def _model(call: HttpExchange) -> str:
    model = call.headers.get(_MODEL)
    if not model:
        raise BadInput(f"the header `{_MODEL}` must name the model", param=_MODEL)
    prefix, at, rest = model.partition("@")  # `options.prefix` comes before it, with a colon
    return at + rest if at and prefix.endswith(":") else model


def _input(body: _Body) -> bytes:
    """The model's input, with the options of the call in it, as `run` takes them."""
    given, options = bytes(body.inputs).strip(), bytes(body.options).strip()
    if not given.startswith(b"{"):
        raise BadInput("`inputs` must be an object", param="inputs")
    if options in (b"", b"{}", b"null"):
        return given
    fields = given[1:-1].strip()
    return b'{"options":' + options + (b"," if fields else b"") + fields + b"}"


def _with_fields(call: HttpExchange, audio: bytes) -> bytes:
    """Recorded speech as it was streamed; the input's other fields are in the query."""
    fields = decode(call.query.get("userInputs", "{}").encode(), _object)
    return encode(fields | {"audio": base64.b64encode(audio).decode()}) if fields else audio


# --- env.AI.gateway(id) -----------------------------------------------------------------------------------------------


async def run_universal(call: HttpExchange) -> Response:
    """`gateway(id).run(…)`: several providers in order. The binding returns the response as it is."""
    call.gateway_name, call.path_param, call.dialect = call.path_param, "", Dialect.GATEWAY
    return await universal(call)


async def gateway_url(call: HttpExchange) -> Reply:
    """`gateway(id).getUrl(provider)`: where a client of the provider's own reaches the gateway."""
    name, _, rest = call.path_param.partition("/")
    what, _, provider = rest.partition("/")
    if what != "url":
        raise NotFound("the `AI` binding of this server reads no gateway's log: `GET /api/gateways/{name}/logs` does")
    host = call.headers.get("host", "")
    if host == BINDING_HOST:
        address, port = call.scope.get("server") or ("127.0.0.1", 8686)
        host = f"{address}:{port}"
    url = f"{call.scope.get('scheme', 'http')}://{host}/v1/{call.principal.account}/{name}"
    return json_reply(envelope({"url": url if provider in ("", "universal") else f"{url}/{provider}"}))


# --- requests inside others -------------------------------------------------------------------------------------------

_ENDPOINTS: dict[str, Callable[[HttpExchange], Awaitable[Response]]] = {
    "/run": run,
    "/ai-gateway/run": run,
    "/ai-api/models/search": catalog.models,
}
_PREFIXES: dict[str, Callable[[HttpExchange], Awaitable[Response]]] = {UNIVERSAL: run_universal, GATEWAYS: gateway_url}


async def wrapped(call: HttpExchange) -> Response:
    url = call.headers.get("mf-url") or call.headers.get("x-forwarded")
    if not url:
        raise BadInput("the header `mf-url` must have the URL of the binding's request", param="mf-url")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadInput("the URL of the binding's request is none", param="mf-url") from None
    endpoint = _ENDPOINTS.get(parts.path)
    for prefix, found in _PREFIXES.items():
        if parts.path.startswith(prefix):
            endpoint, call.path_param = found, unquote(parts.path[len(prefix) :])
    if endpoint is None:
        known = ", ".join(_ENDPOINTS)
        raise NotFound(f"the `AI` binding of this server has no {parts.path[:100]!r}; it has {known}")
    check_api(call.principal, APIS[parts.path.split("/")[1]])
    call.scope["query_string"] = parts.query.encode("ascii", "replace")
    return await endpoint(call)


def unwrap(scope: Scope) -> Scope:
    """The scope of a request that miniflare wrapped: with the headers that the Worker's runtime sent, under the route
    for such requests. What describes the connection stays as it is."""
    inner = {name.removeprefix(_HEADER): value for name, value in scope["headers"] if name.startswith(_HEADER)}
    outer = [(name, value) for name, value in scope["headers"] if not name.startswith(_HEADER)]
    sent = [(name, value) for name, value in inner.items() if name not in _OUTER]
    kept = [(name, value) for name, value in outer if name in _OUTER or name not in inner]
    return {**scope, "headers": [*kept, *sent], "path": WRAPPED, "raw_path": WRAPPED.encode()}
