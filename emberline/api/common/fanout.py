"""Several requests answered as one: a completion call with a list of prompts."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from emberline.api.http.backend import Backend, Events
from emberline.protocol.events import Completed, Started, TextEvent, Usage
from emberline.protocol.request import GenerateRequest, Principal


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
