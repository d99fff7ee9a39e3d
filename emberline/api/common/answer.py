"""Answers that are returned whole: collected from events, and turned back into events."""

from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.api.http.call import Call, Events, while_connected
from emberline.protocol.answer import Answer, AnswerChoice, ReasoningPart, TextPart
from emberline.protocol.events import (
    ChoiceDone,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.price import format_amount
from emberline.protocol.request import ToolCall
from emberline.service.answer import ChoiceEvent, collect_answer

MIN_LOGPROB = -9999.0  # JSON has no -inf; the OpenAI API sends this


async def collect(call: Call, events: Events, n_choices: int = 1) -> Answer:
    """The whole answer; a client that disconnects closes `events`."""
    return await while_connected(call.receive, collect_answer(events, n_choices))


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        **cost_field(usage),
    }


def cost_field(usage: Usage) -> dict[str, Any]:
    """Its `cost` as an exact decimal, null without a price; nothing if the client has not asked for it."""
    if (cost := usage.cost) is None:
        return {}
    return {"cost": None if cost.pico is None else msgspec.Raw(format_amount(cost.pico).encode())}


def logprobs_body(tokens: list[TextLogprob]) -> dict[str, Any]:
    content = [{**_token(token), "top_logprobs": [_token(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _token(token: TextLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": token.bytes}


def json_arguments(call: ToolCall) -> msgspec.Raw | None:
    """A call's arguments as a JSON object, byte for byte; None if the token limit cut them off."""
    try:
        msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(call.arguments or "{}")


def events_of(answer: Answer) -> Iterator[ChoiceEvent]:
    """The events that would have produced the answer, one delta per part."""
    for index, choice in enumerate(answer.choices):
        yield from _choice_events(index, choice)


def _choice_events(index: int, choice: AnswerChoice) -> Iterator[ChoiceEvent]:
    n_texts_left = sum(isinstance(part, TextPart) for part in choice.parts)
    logprobs, n_calls = list(choice.logprobs), 0
    for part in choice.parts:
        if isinstance(part, TextPart):
            n_texts_left -= 1
            yield TextDelta(index, part.text, _take_logprobs(part.text, logprobs, last=n_texts_left == 0) or None)
        elif isinstance(part, ReasoningPart):
            yield ReasoningDelta(index, part.text)
        else:
            yield ToolCallStarted(index, n_calls, part.id, part.name)
            yield ToolCallDelta(index, n_calls, part.arguments)
            n_calls += 1
    yield ChoiceDone(index, choice.finish, choice.stop_sequence)


def _take_logprobs(text: str, logprobs: list[TextLogprob], last: bool) -> list[TextLogprob]:
    """Remove and return the logprobs of `text`, which are the first of those left; all of them if it is the last."""
    n_taken, n_chars = 0, 0
    while n_taken < len(logprobs) and (last or n_chars < len(text)):
        n_chars += len(logprobs[n_taken].token)
        n_taken += 1
    taken = logprobs[:n_taken]
    del logprobs[:n_taken]
    return taken
