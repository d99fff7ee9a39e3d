"""The whole answer to a call, for clients that want no stream."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from emberline.api.http.call import Backend, Call, Events, while_connected
from emberline.protocol.answer import Answer, AnswerChoice, ReasoningPart, TextPart
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import GenerateRequest, Principal, ToolCall
from emberline.service.answer import Draft, gather

__all__ = ["Answer", "AnswerChoice", "Draft", "arguments_of", "collect", "gather"]


async def collect(call: Call, events: Events, n_choices: int = 1) -> Answer:
    """Wait for the end of `events`; a client that leaves ends them."""
    return await while_connected(call.receive, gather(events, n_choices))


def arguments_of(call: ToolCall) -> msgspec.Raw | None:
    """A call's arguments as a JSON object, byte for byte; None: the token limit cut them, so that it is no call."""
    try:
        msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(call.arguments or "{}")


Piece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone


def pieces_of(answer: Answer) -> Iterator[Piece]:
    for index, choice in enumerate(answer.choices):
        yield from _pieces(index, choice)


def _pieces(index: int, choice: AnswerChoice) -> Iterator[Piece]:
    n_said = sum(isinstance(part, TextPart) for part in choice.parts)
    logprobs, n_calls = list(choice.logprobs), 0
    for part in choice.parts:
        if isinstance(part, TextPart):
            n_said -= 1
            yield TextDelta(index, part.text, _of_text(part.text, logprobs, last=n_said == 0) or None)
        elif isinstance(part, ReasoningPart):
            yield ReasoningDelta(index, part.text)
        else:
            yield ToolCallStarted(index, n_calls, part.id, part.name)
            yield ToolCallDelta(index, n_calls, part.arguments)
            n_calls += 1
    yield ChoiceDone(index, choice.finish, choice.stop_sequence)


def _of_text(text: str, left: list[TextLogprob], last: bool) -> list[TextLogprob]:
    """Of the logprobs that are left, those of this text; taken away."""
    n_taken, n_chars = 0, 0
    while n_taken < len(left) and (last or n_chars < len(text)):
        n_chars += len(left[n_taken].token)
        n_taken += 1
    taken = left[:n_taken]
    del left[:n_taken]
    return taken


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def total(usages: list[Usage]) -> Usage:
    """Several requests' usage as one."""
    cached: dict[str, int] = {}
    for usage in usages:
        for tier, tokens in usage.cached_by_tier.items():
            cached[tier] = cached.get(tier, 0) + tokens
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        cached_by_tier=cached,
    )


IN_FLIGHT = 8  # requests of one call at once: one caller's list is not everybody's queue

_Arrival = tuple[int, TextEvent | BaseException]


async def generate_all(service: Backend, requests: Sequence[GenerateRequest], principal: Principal) -> Events:
    """One stream of events: choice i of request r is choice r * n + i. The first failure ends all of them."""
    if len(requests) == 1:
        async with aclosing(service.generate(requests[0], principal)) as events:
            async for event in events:
                yield event
        return
    arrivals: asyncio.Queue[_Arrival] = asyncio.Queue(maxsize=64)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def follow(number: int) -> None:
        try:
            async with slots, aclosing(service.generate(requests[number], principal)) as events:
                async for event in events:
                    await arrivals.put((number, event))
        except Exception as error:
            await arrivals.put((number, error))

    tasks = [asyncio.create_task(follow(number)) for number in range(len(requests))]
    try:
        async for event in _merged(arrivals, requests):
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(arrivals: "asyncio.Queue[_Arrival]", requests: Sequence[GenerateRequest]) -> Events:
    n_choices = requests[0].n
    started = False
    usages: list[Usage] = []
    while len(usages) < len(requests):
        number, event = await arrivals.get()
        first = number * n_choices
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Completed):
            usages.append(event.usage)
        elif not isinstance(event, Started):
            yield msgspec.structs.replace(event, index=first + event.index)
        elif not started:
            started = True
            yield event
    yield Completed(total(usages))
