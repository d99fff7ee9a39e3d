"""Ollama's API: chat, generate, embeddings and the models there are.

Its clients load and unload a model by an empty request, with `keep_alive: 0` for the second, and say with each request
how long the model shall stay loaded. Here an admin may; other callers leave it to the server (`[models] keep_alive_s`).
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from emberline import __version__
from emberline.api.common.encoding import json_rows, run_encoding
from emberline.api.common.model_list import listed_names, ollama_details, ollama_model
from emberline.api.common.response_body import collect
from emberline.api.http.body import read_body, read_json
from emberline.api.http.exchange import HttpExchange, Reply, encode, json_reply, while_connected
from emberline.api.http.streaming import Blocks, BlockStream, EventStream, LastBlock, Response
from emberline.api.http.wire import Wire
from emberline.api.ollama.chat_request import (
    ModelRequest,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaPrompt,
    OllamaPull,
    OllamaShow,
)
from emberline.api.ollama.context import decode_context
from emberline.api.ollama.response_body import NDJSON, ReplyStream, Stopwatch, embed_body, empty_body, reply_body
from emberline.catalog.model_card import TEXT_EMBEDDINGS, TEXT_GENERATION, ModelCard
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import BadInput, EmberlineError, Forbidden, ModelNotFound, Unsupported
from emberline.protocol.request import GenerateRequest

API_VERSION = "0.13.5"  # of Ollama, whose API this is: clients ask before they use newer parts of it
_INSERTS = "{# .Suffix: the model fills in the middle #}"  # editors look for that name in a template
LATEST = ":latest"  # the tag that Ollama's clients append to a name without one

_PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # Ollama's names

T = TypeVar("T")

_chat = msgspec.json.Decoder(OllamaChat)
_generate = msgspec.json.Decoder(OllamaPrompt)
_embed = msgspec.json.Decoder(OllamaEmbed)
_embeddings = msgspec.json.Decoder(OllamaEmbeddings)


async def chat(call: HttpExchange) -> Response:
    body = await _read(call, _chat)
    return await _answer(call, body, is_chat=True)


async def generate(call: HttpExchange) -> Response:
    body = await _read(call, _generate)
    return await _answer(call, body, is_chat=False)


async def _answer(call: HttpExchange, body: OllamaChat | OllamaPrompt, is_chat: bool) -> Response:
    name = _served_name(call, body.model)
    if body.is_empty:
        return await _load(call, name, body, is_chat)
    request, call.field_names = body.to_request(name, call.id, call.session)
    request = msgspec.structs.replace(request, keep_alive_s=_keep_alive_s(call, body))
    if isinstance(body, OllamaPrompt) and body.context:
        request = _continuing(call, request, body.context)
    # Without their images, tokens of images mean nothing: a reply to images has no context to send back.
    watch = Stopwatch(call, has_context=isinstance(body, OllamaPrompt) and not (body.raw or body.images))
    events = call.run(request)
    if body.streams:
        encoder = ReplyStream(call.id, call.dialect, body.model, is_chat, watch)
        return EventStream(events, encoder, headers=call.id_headers)
    answer = await collect(call, watch.watch(events))
    return json_reply(reply_body(body.model, is_chat, answer, watch), headers=call.id_headers)


def _continuing(call: HttpExchange, request: GenerateRequest, context: list[int]) -> GenerateRequest:
    """The request with the tokens of earlier turns before its own."""
    card = call.model_card(request.model)
    if request.messages is None or call.service.models.is_upstream(card):
        raise Unsupported("`context` is for models of this server, with their chat template", param="context")
    return msgspec.structs.replace(request, context_ids=decode_context(card, context))


async def _load(call: HttpExchange, name: str, body: OllamaChat | OllamaPrompt, is_chat: bool) -> Reply:
    """A model that is loaded on demand is loaded by the first request, whoever sends it."""
    models = call.service.models
    card = call.card or models.find(name, call.principal.account)
    models.check_scope(card, call.principal)
    is_managed = models.state(card.id) not in ("", "provider")
    if body.unloads and not call.principal.is_admin:
        raise Forbidden("unloading a model needs an admin key")
    if is_managed and call.principal.is_admin:
        action = call.service.operations.load_model(card.id, "unload" if body.unloads else "load", body.keep_alive_s)
        await while_connected(call, action)
    reply = empty_body(body.model, is_chat, "unload" if body.unloads else "load")
    return _lines_reply(reply) if body.streams else json_reply(reply)


async def embed(call: HttpExchange) -> Reply:
    watch = Stopwatch(call)
    body = await _read(call, _embed)
    if not body.input:
        return json_reply({"model": body.model, "embeddings": []})
    encoded = await _encode(call, body)
    vectors = await json_rows(encoded)
    return json_reply(embed_body(body.model, vectors, encoded.usage, watch), headers=call.id_headers)


async def embeddings(call: HttpExchange) -> Reply:
    """The older form: one text, one vector."""
    body = await _read(call, _embeddings)
    if not body.prompt:
        return json_reply({"embedding": []})
    encoded = await _encode(call, body)
    return json_reply({"embedding": (await json_rows(encoded))[0]}, headers=call.id_headers)


async def _encode(call: HttpExchange, body: OllamaEmbed | OllamaEmbeddings) -> Encoded:
    request, call.field_names = body.to_request(_served_name(call, body.model), call.id)
    request = msgspec.structs.replace(request, keep_alive_s=_keep_alive_s(call, body))
    if isinstance(body, OllamaEmbeddings) or body.truncate is None:  # as Ollama does; a provider cannot be asked to
        card = call.model_card(request.model)
        request = msgspec.structs.replace(request, truncate=not call.service.models.is_upstream(card))
    encoded = await run_encoding(call, request)
    if encoded.pooling is None:
        raise BadInput(f"{body.model} makes no vectors: ask for /v1/rerank or `run`", param="model")
    return encoded


def _keep_alive_s(call: HttpExchange, body: ModelRequest) -> float | None:
    """The wish of an admin: other callers do not decide how the server's memory is used."""
    return body.keep_alive_s if call.principal.is_admin else None


async def tags(call: HttpExchange) -> Reply:
    return json_reply({"models": [ollama_model(card, name) for name, card in listed_names(call.models())]})


async def show(call: HttpExchange) -> Reply:
    body = await read_json(call, OllamaShow)
    card = _find(call, body.model or body.name)
    architecture = card.architecture or "unknown"
    info: dict[str, object] = {
        "general.architecture": architecture,
        "general.basename": card.id.rpartition("/")[2],
        f"{architecture}.context_length": card.context_window,
    }
    if card.n_parameters:
        info["general.parameter_count"] = card.n_parameters
    if card.capabilities.output_dimensions:
        info[f"{architecture}.embedding_length"] = card.capabilities.output_dimensions
    format = await call.service.chat_format(card)
    stops = [f"stop {encode(stop).decode()}" for stop in format.stops]
    defaults = [f"{_PARAMETERS.get(name, name)} {value:g}" for name, value in card.defaults.given.items()]
    shown = {
        "modelfile": f"FROM {card.id}\n",
        "parameters": "\n".join([*defaults, *stops]),
        "template": format.template + (_INSERTS if format.inserts else ""),
        "license": card.license,
        "details": ollama_details(card),
        "model_info": info,
        "capabilities": [*_capabilities(card, format.reasons), *(["insert"] if format.inserts else [])],
        "modified_at": ollama_model(card)["modified_at"],
    }
    return json_reply(shown)


def _capabilities(card: ModelCard, reasons: bool) -> list[str]:
    if card.task == TEXT_EMBEDDINGS:
        return ["embedding"]
    if card.task != TEXT_GENERATION:
        return []
    can = card.capabilities
    thinks = can.reasoning or reasons
    return ["completion", "tools", *(["thinking"] if thinks else []), *(["vision"] if can.vision else [])]


async def version(call: HttpExchange) -> Reply:
    return json_reply({"version": API_VERSION, "emberline": __version__})


async def pull(call: HttpExchange) -> Response:
    """Scripts ask for a model before they use it: one that is served is there. The operator's key downloads others."""
    body = await read_json(call, OllamaPull)
    name = body.model or body.name
    try:
        _find(call, name)
    except ModelNotFound as missing:
        if not call.has_pulls or not call.principal.is_admin:
            message = f"{missing.message}: add it with `emberline pull {name[:100]}`"
            raise ModelNotFound(message, param="model") from None
    else:
        reply = {"status": "success"}
        return json_reply(reply) if body.stream is False else _lines_reply(reply)
    call.audit_target = name[:256]
    if body.stream is False:
        async for _ in call.pulls.pull(name):
            pass
        return json_reply({"status": "success"})
    return BlockStream(blocks=_pull_lines(call, name), failed=_failed_line, content_type=NDJSON)


async def _pull_lines(call: HttpExchange, name: str) -> Blocks:
    """A line per update of a download, as Ollama's clients read them."""
    async for update in call.pulls.pull(name):
        if isinstance(update, str):
            line: dict[str, object] = {"status": update}
        else:
            line = {"status": f"pulling {name}", "total": update.total_bytes, "completed": update.done_bytes}
        yield encode(line) + b"\n"
    yield LastBlock(encode({"status": "success"}) + b"\n")


def _failed_line(error: EmberlineError) -> bytes:
    return encode({"error": error.message}) + b"\n"


def _lines_reply(line: object) -> Reply:
    return Reply(200, encode(line) + b"\n", NDJSON)


async def _read(call: HttpExchange, decoder: msgspec.json.Decoder[T]) -> T:
    """The body. An unknown model is refused before anything else in it."""
    wire = call.wire = Wire(await read_body(call))
    if (name := wire.model) is not None:
        _served_name(call, name)
    return wire.decode(decoder)


def _served_name(call: HttpExchange, name: str) -> str:
    """The name under which the model is served: without the tag that a client appended."""
    if call.named_model is None:
        call.named_model = _untagged(name, call.use_model)[0]
    return call.named_model


def _find(call: HttpExchange, name: str) -> ModelCard:
    """The model that a client asks about."""
    return _untagged(name, lambda asked: call.service.models.find(asked, call.principal.account))[1]


def _untagged(name: str, find: Callable[[str], ModelCard]) -> tuple[str, ModelCard]:
    """The name that `find` knows, and its model: without the tag that a client appended, if need be."""
    try:
        return name, find(name)
    except ModelNotFound:
        if not name.endswith(LATEST):
            raise
        name = name.removesuffix(LATEST)
        return name, find(name)
