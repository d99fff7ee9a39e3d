"""OpenAI's door: chat completions, completions, models."""

import time

import msgspec

from emberline.api.common.answer import collect, generate_all
from emberline.api.common.model_list import openai_model
from emberline.api.http.body import decode, read_body
from emberline.api.http.call import Call, HeaderList, Reply, json_reply
from emberline.api.http.errors import Dialect
from emberline.api.http.sse import stream
from emberline.api.openai.chat import ChatRequest, ChatStream, chat_body
from emberline.api.openai.chunk_stream import StreamOptions
from emberline.api.openai.completions import CompletionRequest, CompletionStream, completion_body
from emberline.api.openai.upstream_passthrough import forward_chat, forward_completion, upstream_card
from emberline.protocol.errors import BadInput

MAX_CHOICES_IN_ALL = 128  # of one call: prompts times n

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


async def chat_completions(call: Call) -> Reply | None:
    raw = await read_body(call)
    if (card := upstream_card(call, raw)) is not None:
        return await forward_chat(call, card, raw)
    body = decode(raw, _chat_decoder)
    request = body.to_request(call)
    created = int(time.time())
    events = call.service.generate(request, call.principal)
    if body.stream:
        body.stream_options = _options(call, body.stream_options)
        await stream(call, events, ChatStream(call, body, created), _headers(call))
        return None
    answer = await collect(call, events, request.n)
    return json_reply(chat_body(call, body, created, answer), headers=_headers(call))


async def completions(call: Call) -> Reply | None:
    raw = await read_body(call)
    if (card := upstream_card(call, raw)) is not None:
        return await forward_completion(call, card, raw)
    body = decode(raw, _completion_decoder)
    requests = body.to_requests(call)
    n_choices = len(requests) * requests[0].n
    if n_choices > MAX_CHOICES_IN_ALL:
        raise BadInput(f"{n_choices} choices asked for, at most {MAX_CHOICES_IN_ALL} in one call", param="n")
    created = int(time.time())
    events = generate_all(call.service, requests, call.principal)
    if body.stream:
        body.stream_options = _options(call, body.stream_options)
        await stream(call, events, CompletionStream(call, body, created, n_choices), _headers(call))
        return None
    answer = await collect(call, events, n_choices)
    return json_reply(completion_body(call, body, created, answer), headers=_headers(call))


async def list_models(call: Call) -> Reply:
    return json_reply({"object": "list", "data": [openai_model(card) for card in call.service.models()]})


async def get_model(call: Call) -> Reply:
    return json_reply(openai_model(call.service.resolve(call.tail)))


def _options(call: Call, options: StreamOptions | None) -> StreamOptions:
    """Cloudflare's clients are told the usage of every stream, OpenAI's when they ask."""
    options = options or StreamOptions()
    if call.dialect is Dialect.OPENAI_ENVELOPED:
        options.include_usage = True
    return options


def _headers(call: Call) -> HeaderList:
    return [(b"cf-ai-req-id", call.id.encode())]
