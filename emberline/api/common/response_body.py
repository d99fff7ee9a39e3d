"""Answers that are returned whole: collected from events, and their parts in JSON."""

from typing import Any

import msgspec

from emberline.api.http.exchange import Events, HttpExchange, while_connected
from emberline.protocol.complete_response import Answer
from emberline.protocol.events import TextLogprob, Usage
from emberline.protocol.price import format_amount
from emberline.protocol.request import ToolCall
from emberline.service.event_collector import collect_answer

MIN_LOGPROB = -9999.0  # JSON has no -inf; the OpenAI API sends this


async def collect(call: HttpExchange, events: Events, n_choices: int = 1) -> Answer:
    """The whole answer; a client that disconnects closes `events`."""
    return await while_connected(call, collect_answer(events, n_choices))


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            **tiers_field(usage, "cached_tokens"),
            **images_field(usage),
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        **cost_field(usage),
        **drafts_field(usage),
    }


def cost_field(usage: Usage) -> dict[str, Any]:
    """The `cost` as an exact decimal, null without a price. Empty if the client has not asked for it."""
    if (cost := usage.cost) is None:
        return {}
    return {"cost": None if cost.pico is None else msgspec.Raw(format_amount(cost.pico).encode())}


def drafts_field(usage: Usage) -> dict[str, Any]:
    """Draft tokens of speculative decoding. Empty if the client has not asked for them."""
    if (drafts := usage.drafts) is None:
        return {}
    return {"speculation": {"draft_tokens": drafts.drafted, "accepted_tokens": drafts.accepted}}


def tiers_field(usage: Usage, name: str) -> dict[str, Any]:
    """Cached tokens by tier of the KV cache, for the field beside `name`. Empty if all were on the device."""
    tiers = usage.cached_below_device
    return {f"{name}_by_tier": tiers} if tiers else {}


def images_field(usage: Usage) -> dict[str, Any]:
    """Tokens of the prompt that stand for images. Empty if it has none."""
    return {"image_tokens": usage.image_tokens} if usage.image_tokens else {}


def logprobs_body(tokens: list[TextLogprob]) -> dict[str, Any]:
    content = [{**_token(token), "top_logprobs": [_token(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _token(token: TextLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": token.bytes}


def json_arguments(call: ToolCall) -> msgspec.Raw | None:
    """A call's arguments as a JSON object, byte for byte but on one line; None if the token limit cut them off."""
    try:
        msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    # Inside the strings of JSON they are escaped, so these are between its values, where a stream's line would end.
    return msgspec.Raw((call.arguments or "{}").replace("\n", " ").replace("\r", " "))
