"""The OpenAI API's chat completions, completions and models."""

import time

import msgspec

from emberline.api.common.model_list import openai_model
from emberline.api.common.response_body import collect
from emberline.api.http.body import decode, read_model_body
from emberline.api.http.call import Call, Reply, json_reply, list_reply
from emberline.api.http.streaming import EventStream, Response
from emberline.api.openai.chat import ChatRequest, ChatStream, chat_body
from emberline.api.openai.completions import CompletionRequest, CompletionStream, completion_body, generate_all
from emberline.api.openai.upstream_passthrough import forward_chat, forward_completion
from emberline.catalog.model_card import ModelCard
from emberline.gateway.routing import Plan
from emberline.protocol.errors import BadInput

MAX_TOTAL_CHOICES = 128  # of one call: prompts times n

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


async def chat_completions(call: Call) -> Response:
    raw = await read_model_body(call)
    if (targets := _upstream_targets(call)) is not None:
        return await forward_chat(call, targets, raw)
    try:
        body = decode(raw, _chat_decoder)
        request, call.field_names = body.to_request(call.id, call.session)
    except BadInput:
        if (targets := _upstream_targets(call, unread=True)) is None:
            raise
        return await forward_chat(call, targets, raw)  # images, say, which only its server can read
    call.wants_cost = call.wants_cost or bool(body.usage and body.usage.include)
    created = int(time.time())
    events = call.generate(request)
    if body.stream:
        return EventStream(events, ChatStream(call.id, call.dialect, body, created), headers=call.id_headers)
    answer = await collect(call, events, request.n)
    return json_reply(chat_body(call.id, body, created, answer), headers=call.id_headers)


async def completions(call: Call) -> Response:
    raw = await read_model_body(call)
    if (targets := _upstream_targets(call)) is not None:
        return await forward_completion(call, targets, raw)
    body = decode(raw, _completion_decoder)
    call.wants_cost = call.wants_cost or bool(body.usage and body.usage.include)
    requests, call.field_names = body.to_requests(call.id, call.session)
    n_choices = len(requests) * requests[0].n
    if n_choices > MAX_TOTAL_CHOICES:
        raise BadInput(f"{n_choices} choices requested, at most {MAX_TOTAL_CHOICES} in one call", param="n")
    created = int(time.time())
    events = generate_all(call.generate, requests)
    if body.stream:
        encoder = CompletionStream(call.id, call.dialect, body, created, n_choices)
        return EventStream(events, encoder, headers=call.id_headers)
    answer = await collect(call, events, n_choices)
    return json_reply(completion_body(call.id, body, created, answer), headers=call.id_headers)


def _upstream_targets(call: Call, unread: bool = False) -> ModelCard | Plan | None:
    """The model of the request, if upstream servers compute the model.

    Through a gateway: the models that it tries, if upstream servers compute all of them and nothing of the request or
    its reply has to be read. `unread`: the request cannot be read, so it is neither cached nor logged with its content;
    guardrails still refuse it.
    """
    gateway, card = call.gateway, call.card
    if gateway is None:
        return card if card is not None and call.service.models.is_upstream(card) else None
    if call.named_model is None or (gateway.settings.guardrails if unread else gateway.reads_prompts):
        return None
    plan = gateway.plan(call.named_model, call.session, call.id)
    return plan if gateway.relays(plan) else None


async def list_models(call: Call) -> Reply:
    state = call.service.models.state
    return list_reply([openai_model(card, state(card.id)) for card in call.models()], has_more=False)


async def get_model(call: Call) -> Reply:
    models = call.service.models
    card = models.find(call.path_param)
    return json_reply(openai_model(card, models.state(card.id)))
