"""The OpenAI API's chat completions, completions and models."""

from collections.abc import Awaitable
from functools import partial

import msgspec

from emberline.api.common.form import Form
from emberline.api.common.model_list import listed_names, openai_model
from emberline.api.http.body import read_wire
from emberline.api.http.exchange import HttpExchange, Reply, json_reply, list_reply
from emberline.api.http.streaming import Response
from emberline.api.http.wire import Wire
from emberline.api.openai.chat import ChatRequest, ChatStream, chat_body
from emberline.api.openai.completions import CompletionRequest, CompletionStream, completion_body, generate_all
from emberline.api.openai.upstream_passthrough import forward_chat, forward_completion
from emberline.gateway.stage_chain import StageChain
from emberline.protocol.errors import BadInput

MAX_TOTAL_CHOICES = 128  # of one call: prompts times n


def _relay(call: HttpExchange, wire: Wire, unread: bool = False) -> Awaitable[Response] | None:
    """Relay a chat. Returns None if the chat has to be read here."""
    return forward_chat(call, wire) if _relays(call, call.gateway, unread) else None


def _relays(call: HttpExchange, gateway: StageChain | None, unread: bool = False) -> bool:
    """True if upstream servers compute the model of the request.

    Through a gateway: if upstream servers compute all models that it tries and nothing of the request or its reply has
    to be read. `unread`: the request cannot be read, so it is neither cached nor logged with its content; guardrails
    still refuse it.
    """
    if gateway is None:
        return call.card is not None and call.service.models.is_upstream(call.card)
    rules = gateway.rules
    if call.named_model is None or (rules.settings.guardrails if unread else rules.reads_prompts):
        return False
    return rules.relays(rules.plan(call.named_model, call.session, call.id))


CHAT = Form(
    decoder=msgspec.json.Decoder(ChatRequest),
    to_task=ChatRequest.to_request,
    to_body=chat_body,
    to_stream=ChatStream,
    relay=_relay,
    relay_unread=partial(_relay, unread=True),
)
COMPLETION = Form(
    decoder=msgspec.json.Decoder(CompletionRequest),
    to_task=CompletionRequest.to_request,
    to_body=completion_body,
    to_stream=CompletionStream,
)


async def completions(call: HttpExchange) -> Response:
    """Complete one or more prompts, whose choices come as one answer."""
    wire = await read_wire(call)
    if _relays(call, call.gateway):
        return await forward_completion(call, wire)
    body: CompletionRequest = wire.decode(COMPLETION.decoder)
    call.wants_cost = call.wants_cost or bool(body.usage and body.usage.include)
    requests, call.field_names = body.to_requests(call.id, call.session)
    if body.n_choices > MAX_TOTAL_CHOICES:
        raise BadInput(f"{body.n_choices} choices requested, at most {MAX_TOTAL_CHOICES} in one call", param="n")
    return await COMPLETION.answer(call, body, generate_all(call.run, requests), body.n_choices, body.stream)


async def list_models(call: HttpExchange) -> Reply:
    models, names = call.service.models, listed_names(call.models())
    caller = call.principal
    rows = [openai_model(card, models.state(card.id), name, models.problem(card, caller)) for name, card in names]
    return list_reply(rows, has_more=False)


async def get_model(call: HttpExchange) -> Reply:
    models = call.service.models
    card = models.find(call.path_param, call.principal.account)
    return json_reply(openai_model(card, models.state(card.id), problem=models.problem(card, call.principal)))
