"""OpenAI's text completions: the request body with one or more prompts, the response body and the stream."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.common.response_body import MIN_LOGPROB, usage_body
from emberline.api.common.response_format import GenerationFields
from emberline.api.common.sampling_fields import SpeculationField, TokenId
from emberline.api.common.unsupported_fields import TrueField, refuse_unsupported, unsupported
from emberline.api.http.errors import Dialect, FieldNames
from emberline.api.http.exchange import Events
from emberline.api.openai.chat import ChunkStream, StreamOptions, UsageOptions
from emberline.protocol import token_ids
from emberline.protocol.complete_response import Answer, AnswerChoice
from emberline.protocol.errors import BadInput
from emberline.protocol.events import Completed, Cost, DraftUsage, Started, TextEvent, TextLogprob, Usage
from emberline.protocol.request import GenerateRequest, session_name

MAX_PROMPTS = 128
CONCURRENT_PROMPTS = 8  # requests of one call at once, so that one long list does not fill the admission queue

Prompts = Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class CompletionRequest(GenerationFields, kw_only=True):
    model: str
    prompt: str | Prompts
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: int | None = None
    add_special_tokens: TrueField = None  # completions begin with the model's BOS token

    def to_requests(self, request_id: str, session: str | None = None) -> tuple[list[GenerateRequest], FieldNames]:
        """One canonical request per prompt; the first has the call's own id. `session` comes from the headers."""
        refuse_unsupported(self)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of")
        output, field = self.output()
        sampling, session = self.sampling(1.0, self.logprobs), session_name(session, self.prompt_cache_key, self.user)
        requests = [
            GenerateRequest(
                api="completions",
                id=request_id if number == 0 else f"{request_id}-{number}",
                model=self.model,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_ids=None if isinstance(prompt, str) else prompt,
                sampling=sampling,
                left_to_model=self.left_to_model,
                n=self.n or 1,
                session=session,
                cache_ttl_s=self.cache_ttl_s,
                priority=self.priority_class,
                reject_if_busy=self.reject_if_busy,
                speculation=SpeculationField.setting(self.speculation),
                output=output,
            )
            for number, prompt in enumerate(self._prompts())
        ]
        return requests, FieldNames(output=field)

    def to_request(self, request_id: str, session: str | None = None) -> tuple[GenerateRequest, FieldNames]:
        """Make the one request of a line of a batch."""
        requests, names = self.to_requests(request_id, session)
        if len(requests) > 1:
            raise BadInput("a line of a batch has one `prompt`: write a line for each", param="prompt")
        return requests[0], names

    @property
    def n_choices(self) -> int:
        return len(self._prompts()) * (self.n or 1)

    def _prompts(self) -> list[str | bytes]:
        """`prompt` is a text, a list of texts, one prompt's token ids, or a list of those."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if all(isinstance(item, int) for item in given):
            return [token_ids.pack(item for item in given if isinstance(item, int))]
        if len(given) > MAX_PROMPTS:
            raise BadInput(f"`prompt` may have {MAX_PROMPTS} entries, not {len(given)}", param="prompt")
        if any(isinstance(item, int) for item in given):
            raise BadInput("`prompt` mixes token ids with texts or lists", param="prompt")
        return [item if isinstance(item, str) else token_ids.pack(item) for item in given if not isinstance(item, int)]


def completion_body(request_id: str, body: CompletionRequest, created: int, answer: Answer) -> dict[str, Any]:
    choices = [_choice(index, choice, body.logprobs is not None) for index, choice in enumerate(answer.choices)]
    return _head(request_id, created, body) | {"choices": choices, "usage": usage_body(answer.usage)}


def _head(request_id: str, created: int, body: CompletionRequest) -> dict[str, Any]:
    head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": body.model}
    return head | body.tier_echo


def _choice(index: int, choice: AnswerChoice, with_logprobs: bool) -> dict[str, Any]:
    logprobs = _logprobs(choice.logprobs, 0) if with_logprobs else None
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}


def _logprobs(tokens: list[TextLogprob], offset: int) -> dict[str, Any]:
    """Parallel lists with one entry per token; `offset` is where the first token's text begins, in characters."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [max(token.logprob, MIN_LOGPROB) for token in tokens],
        "top_logprobs": [{other.token: max(other.logprob, MIN_LOGPROB) for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


class CompletionStream(ChunkStream):
    before_text = b'"text":'
    after_text = b""
    last = b'"text":""'

    def __init__(self, request_id: str, dialect: Dialect, body: CompletionRequest, created: int) -> None:
        n_choices = body.n_choices
        super().__init__(request_id, dialect, _head(request_id, created, body), n_choices, body.stream_options)
        self._offsets = [0] * n_choices

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        offset = self._offsets[index]
        self._offsets[index] += sum(len(token.token) for token in tokens)
        return _logprobs(tokens, offset)


_PromptEvent = tuple[int, TextEvent | BaseException]


async def generate_all(generate: Callable[[GenerateRequest], Events], requests: Sequence[GenerateRequest]) -> Events:
    """Several requests as one stream: choice i of request r is choice r * n + i. The first failure ends all."""
    if len(requests) == 1:
        async with aclosing(generate(requests[0])) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[_PromptEvent] = asyncio.Queue(maxsize=64)
    slots = asyncio.Semaphore(CONCURRENT_PROMPTS)

    async def forward(number: int) -> None:
        try:
            async with slots, aclosing(generate(requests[number])) as events:
                async for event in events:
                    await queue.put((number, event))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(forward(number)) for number in range(len(requests))]
    try:
        async for event in _merged(queue, len(requests), requests[0].n):
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(queue: "asyncio.Queue[_PromptEvent]", n_requests: int, n_choices: int) -> Events:
    started = False
    usages: list[Usage] = []
    while len(usages) < n_requests:
        number, event = await queue.get()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Completed):
            usages.append(event.usage)
        elif not isinstance(event, Started):
            yield msgspec.structs.replace(event, index=number * n_choices + event.index)
        elif not started:
            started = True
            yield event
    yield Completed(_total(usages))


def _total(usages: list[Usage]) -> Usage:
    cached: dict[str, int] = {}
    for usage in usages:
        for tier, n_tokens in usage.cached_by_tier.items():
            cached[tier] = cached.get(tier, 0) + n_tokens
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        cached_by_tier=cached,
        cost=_total_cost(usages),
        drafts=_total_drafts(usages),
    )


def _total_drafts(usages: list[Usage]) -> DraftUsage | None:
    found = [usage.drafts for usage in usages if usage.drafts is not None]
    return DraftUsage(sum(each.drafted for each in found), sum(each.accepted for each in found)) if found else None


def _total_cost(usages: list[Usage]) -> Cost | None:
    if any(usage.cost is None for usage in usages):
        return None
    costs = [usage.cost.pico for usage in usages if usage.cost is not None]
    return Cost(None if None in costs else sum(cost or 0 for cost in costs))
