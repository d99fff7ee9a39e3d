"""The paths of a gateway, `/v1/{account}/{gateway}/…`: which endpoint of which API a path leads to.

`workers-ai/…` and `compat/…` reach every model; a provider's name reaches its own models, under the paths and with the
bodies of its own API. The universal endpoint takes several of them, to be tried in order.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.anthropic import message_form as anthropic
from emberline.api.gateway import gemini
from emberline.api.http.body import read_body
from emberline.api.http.exchange import HttpExchange, Reply
from emberline.api.http.router import APIS, Endpoint, check_api
from emberline.api.http.streaming import Response, Streaming
from emberline.api.http.wire import Wire, decode
from emberline.api.openai import audio, embeddings, media
from emberline.api.openai import chat_completions as openai
from emberline.api.openai.responses import endpoints as responses
from emberline.api.workers_ai import handlers as workers_ai
from emberline.gateway.attempts import LOCAL
from emberline.gateway.gateway_errors import InvalidProvider
from emberline.gateway.retry import falls_back
from emberline.gateway.stage_chain import StageChain
from emberline.protocol.errors import BadInput, EmberlineError, NotFound
from emberline.protocol.gateway import StepConfig
from emberline.protocol.provider import OwnKey

COMPAT = "compat"
MAX_STEPS = 10
_OPENAI: Mapping[str, Endpoint] = {
    "chat/completions": openai.CHAT,
    "completions": openai.completions,
    "responses": responses.create,
    "embeddings": embeddings.EMBEDDINGS,
    "rerank": embeddings.RERANK,
    "images/generations": media.generate_images,
    "audio/speech": media.speech,
}
_FORMS: Mapping[str, Endpoint] = {  # not JSON: their model is named in a form
    "images/edits": media.edit_images,
    "audio/transcriptions": audio.transcriptions,
    "audio/translations": audio.translations,
}
_ANTHROPIC: Mapping[str, Endpoint] = {
    "messages": anthropic.MESSAGES,
    "messages/count_tokens": anthropic.count_tokens,
}
_KEY_HEADERS = {"authorization", "x-api-key", "x-goog-api-key", "api-key"}
_IGNORED_HEADERS = {"content-type", "accept", "user-agent", "anthropic-version"}


class UniversalStep(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    provider: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: Annotated[str, Meta(min_length=1, max_length=512)]
    query: msgspec.Raw
    headers: Annotated[dict[str, str], Meta(max_length=32)] = {}
    config: StepConfig | None = None


Steps = Annotated[list[UniversalStep], Meta(min_length=1, max_length=MAX_STEPS)]
_steps: msgspec.json.Decoder[list[UniversalStep]] = msgspec.json.Decoder(Steps)


async def dispatch(call: HttpExchange) -> Response:
    """Any path of a gateway."""
    _check_gateway(call)
    provider, _, endpoint = call.path_param.partition("/")
    if provider == COMPAT and (found := _FORMS.get(_without_version(endpoint))) is not None:
        check_api(call.principal, APIS[_without_version(endpoint).partition("/")[0]])
        return await found(call)
    wire = call.wire = Wire(await read_body(call))
    return await _run(call, wire, provider, endpoint, call.headers.get)


async def list_models(call: HttpExchange) -> Reply:
    """GET `compat/models`, and of a provider's."""
    _check_gateway(call)
    if call.path_param.partition("/")[2].removeprefix("v1/") != "models":
        raise NotFound(f"there is nothing to read at {call.path_param[:100]!r}; `compat/models` lists models")
    check_api(call.principal, "models")
    return await openai.list_models(call)


async def universal(call: HttpExchange) -> Response:
    """Answer by the first step that can: a step that fails before its first byte is followed by the next."""
    _check_gateway(call)
    steps = decode(await read_body(call), _steps)
    for number, step in enumerate(steps):
        _check_headers(step.headers, f"[{number}].headers")
        _check_provider(call, step.provider)
    return await _run_step(call, steps, 0, call.route)


async def _run_step(call: HttpExchange, steps: list[UniversalStep], number: int, route: str) -> Response:
    step = steps[number]
    _check_gateway(call).rules.begin_step(number, step.config, number + 1 < len(steps))
    wire = call.wire = Wire(bytes(step.query))
    call.path_param, call.route, call.card = "", route, None
    headers = {name.lower(): value for name, value in step.headers.items()}
    otherwise = partial(_run_next_step, call, steps, number, route)
    try:
        response = await _run(call, wire, step.provider, step.endpoint.lstrip("/"), headers.get, is_step=True)
    except EmberlineError as error:
        return await otherwise(error)
    if isinstance(response, Streaming):
        response.otherwise = otherwise
    return response


async def _run_next_step(
    call: HttpExchange, steps: list[UniversalStep], number: int, route: str, error: EmberlineError
) -> Response:
    """Run the step after one that failed, if the error is one that the next step is for. Raises the error if not."""
    gateway = _check_gateway(call)
    if not gateway.rules.has_next_step or not falls_back(error):
        gateway.log_failure(error)
        raise error
    return await _run_step(call, steps, number + 1, route)


def _check_gateway(call: HttpExchange) -> StageChain:
    """Raise GatewayNotFound before anything else."""
    assert call.gateway is not None, "the path names it"
    return call.gateway


async def _run(
    call: HttpExchange, wire: Wire, provider: str, endpoint: str, header: Any, is_step: bool = False
) -> Response:
    """Call the endpoint of a provider's API with the body that was read."""
    if provider in (COMPAT, LOCAL):
        return await _run_any(call, wire, provider, endpoint, header)
    _check_provider(call, provider)
    name = provider.lower()
    call.route = f"{call.route}/{name}"
    if (model := gemini.model_of(endpoint)) is not None:
        check_api(call.principal, "chat")
        _use_own_key(call, name, header, is_step)
        return await gemini.generate_content(call, f"{name}/{model}", endpoint)
    path = _without_version(endpoint)
    found = (_ANTHROPIC if path in _ANTHROPIC else _OPENAI).get(path)
    if found is None:
        raise _no_endpoint(provider, endpoint)
    check_api(call.principal, APIS[path.partition("/")[0]])
    if (model := wire.model) is not None:  # by the name that it has here
        wire.use_model(f"{name}/{model}")
    _use_own_key(call, name, header, is_step)
    return await found(call)


async def _run_any(call: HttpExchange, wire: Wire, provider: str, endpoint: str, header: Any) -> Response:
    path = _without_version(endpoint)
    if (found := _OPENAI.get(path)) is not None:
        check_api(call.principal, APIS[path.partition("/")[0]])
        model = (wire.model or "").partition("/")[0].lower()
        _use_own_key(call, model, header, is_step=False)
        return await found(call)
    if provider == COMPAT:
        raise _no_endpoint(provider, endpoint)
    check_api(call.principal, "run")
    call.path_param = endpoint
    return await workers_ai.run(call)


def _without_version(endpoint: str) -> str:
    """`v1/chat/completions` as `chat/completions`, and likewise `openai/v1/…` and `api/v1/…`."""
    head, found, rest = endpoint.partition("v1/")
    return rest if found and head in ("", "openai/", "api/") else endpoint


def _no_endpoint(provider: str, endpoint: str) -> NotFound:
    gemini_path = "v1beta/models/{model}:generateContent"
    known = ", ".join((*_OPENAI, *_FORMS, *(f"v1/{path}" for path in _ANTHROPIC), gemini_path))
    return NotFound(f"the gateway has no endpoint {endpoint[:100]!r} of {provider}; there are {known}")


def _check_provider(call: HttpExchange, provider: str) -> None:
    if provider in (COMPAT, LOCAL):
        return
    if call.service.models.upstream.find(f"{provider}/model", call.principal.account) is None:
        clients = call.service.models.upstream.providers.clients.values()  # the others are of some accounts
        known = ", ".join((COMPAT, LOCAL, *(client.name for client in clients if client.is_configured)))
        raise InvalidProvider(
            f"there is no provider {provider[:64]!r} here; there are {known}. Add it to [[providers]]", param="provider"
        )


def _check_headers(headers: Mapping[str, str], where: str) -> None:
    for name in headers:
        if name.lower() not in _KEY_HEADERS | _IGNORED_HEADERS:
            raise BadInput(f"the header `{name[:64]}` is not sent to providers: leave it out", param=where)


def _use_own_key(call: HttpExchange, provider: str, header: Any, is_step: bool) -> None:
    """Take the provider's key that the client sends along with ours, if it does.

    A client's `Authorization` is one only if our key is in `cf-aig-authorization`, or in a universal step."""
    gateway, key = _check_gateway(call), ""
    if is_step or "cf-aig-authorization" in call.headers:
        found = next((value for name in sorted(_KEY_HEADERS) if (value := header(name))), "")
        key = found.removeprefix("Bearer ").strip()
        if key and not (key.isascii() and key.isprintable() and " " not in key and len(key) <= 4096):
            raise BadInput("the provider's key has characters that a header cannot have", param="authorization")
    gateway.rules.own_key = OwnKey(provider, key) if key else None
