"""OpenAI's text completions: the request body with one or more prompts, the response body and the stream."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.common.prompt_body import TokenTexts, prompt_logprobs_body, prompt_tokens, reply_tokens
from emberline.api.common.response_body import usage_body
from emberline.api.common.response_format import GenerationFields
from emberline.api.common.sampling_fields import (
    ModelName,
    SpeculationField,
    TokenCountOrZero,
    TokenId,
    TopLogprobs,
    required_model,
)
from emberline.api.common.unsupported_fields import TrueField, refuse_unsupported, unsupported
from emberline.api.http.errors import Dialect, FieldNames
from emberline.api.http.exchange import Events, encode
from emberline.api.openai.chunk_stream import END, ChunkStream, StreamOptions, UsageOptions, check_streaming, wants_ids
from emberline.protocol import token_ids
from emberline.protocol.complete_response import Answer, AnswerChoice
from emberline.protocol.errors import BadInput
from emberline.protocol.events import (
    Completed,
    Cost,
    DraftUsage,
    PromptEcho,
    PromptTokens,
    Started,
    TextEvent,
    TextLogprob,
    Usage,
)
from emberline.protocol.request import GenerateRequest, SamplingParams, session_name
from emberline.protocol.token_ids import unpack

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 128
CONCURRENT_PROMPTS = 8  # requests of one call at once, so that one long list does not fill the admission queue

Prompts = Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class CompletionRequest(GenerationFields, kw_only=True):
    model: ModelName = ""
    prompt: str | Prompts
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    max_tokens: TokenCountOrZero | None = None
    echo: bool | None = None
    suffix: str | None = None  # the reply is what stands between the prompt and this text; empty: nothing follows
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    best_of: int | None = None
    add_special_tokens: TrueField = None  # completions begin with the model's BOS token

    def to_requests(self, request_id: str, session: str | None = None) -> tuple[list[GenerateRequest], FieldNames]:
        """One canonical request per prompt; the first has the call's own id. `session` comes from the headers."""
        refuse_unsupported(self)
        if self.stream_options is not None or self.prompt_logprobs is not None:
            check_streaming(self)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of")
        if self.suffix and self.echo:
            raise BadInput("`echo` and `suffix` exclude each other: of a gap only the middle is returned", param="echo")
        output, field = self.output()
        sampling, session = self._sampling(), session_name(session, self.prompt_cache_key, self.user)
        requests = [
            GenerateRequest(
                api="completions",
                id=request_id if number == 0 else f"{request_id}-p{number}",  # "-1" is of a second choice
                model=self.model or required_model(self.model),
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
                suffix=self.suffix or None,
                echo=bool(self.echo),
                return_ids=wants_ids(self),
            )
            for number, prompt in enumerate(self._prompts())
        ]
        return requests, FieldNames(output=field)

    def _sampling(self) -> SamplingParams:
        """Sampling parameters. A prompt that is echoed with `logprobs` is scored, too."""
        sampling = self.sampling(1.0, self.logprobs)
        if sampling.max_tokens is None:
            sampling = msgspec.structs.replace(sampling, max_tokens=DEFAULT_MAX_TOKENS)
        n_top = [each for each in (self.logprobs if self.echo else None, self.prompt_logprobs) if each is not None]
        return msgspec.structs.replace(sampling, prompt_logprobs=max(n_top)) if n_top else sampling

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
    choices = [_choice(index, choice, body) for index, choice in enumerate(answer.choices)]
    return _head(request_id, created, body) | {"choices": choices, "usage": usage_body(answer.usage)}


def _head(request_id: str, created: int, body: CompletionRequest) -> dict[str, Any]:
    head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": body.model}
    return head | body.tier_echo


def _choice(index: int, choice: AnswerChoice, body: CompletionRequest) -> dict[str, Any]:
    """A choice; with the prompt's text before its own if that is echoed."""
    prompt, text = choice.prompt, choice.text
    echoed = prompt if body.echo else None
    if echoed is not None:
        text = echoed.text + text
    logprobs = None
    if body.logprobs is not None:
        found = reply_tokens(choice.logprobs)
        logprobs = found.body(0) if echoed is None else _echoed_logprobs(echoed, body.logprobs, found)
    made = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
    if prompt is not None and body.prompt_logprobs is not None:
        made["prompt_logprobs"] = prompt_logprobs_body(prompt, body.prompt_logprobs)
    if prompt is not None and body.return_token_ids:
        made |= {"token_ids": unpack(choice.token_ids), "prompt_token_ids": unpack(prompt.ids)}
    return made


def _echoed_logprobs(prompt: PromptTokens, n_top: int, reply: TokenTexts) -> dict[str, Any]:
    """The `logprobs` of a prompt and its reply."""
    found = prompt_tokens(prompt, n_top)
    begin = len(prompt.text) - sum(map(len, found.tokens))
    return found.followed_by(reply).body(begin)


class CompletionStream(ChunkStream):
    before_text = b'"text":'
    after_text = b""
    last = b'"text":""'

    def __init__(self, request_id: str, dialect: Dialect, body: CompletionRequest, created: int) -> None:
        n_choices = body.n_choices
        head = _head(request_id, created, body)
        super().__init__(request_id, dialect, head, n_choices, body.stream_options, bool(body.return_token_ids))
        self._echoes, self._n_top = bool(body.echo), body.logprobs
        self._offsets = [0] * n_choices

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        offset = self._offsets[index]
        self._offsets[index] += sum(len(token.token) for token in tokens)
        return reply_tokens(tokens).body(offset)

    def prompt_echo(self, event: PromptEcho) -> bytes:
        """A first chunk: with the text of the prompt if that is echoed, and with its token ids if they are wanted."""
        super().prompt_echo(event)
        if not self._echoes and not self._returns_ids:
            return b""
        chunk: dict[str, Any] = {"text": event.prompt.text if self._echoes else "", "logprobs": None}
        if self._echoes:
            self._offsets[event.index] = len(event.prompt.text)
            if self._n_top is not None:
                chunk["logprobs"] = _echoed_logprobs(event.prompt, self._n_top, reply_tokens(()))
        chunk["finish_reason"] = None
        if self._returns_ids:
            chunk["prompt_token_ids"] = unpack(event.prompt.ids)
        return self._choices[event.index] + encode(chunk)[1:] + b"]" + self._usage_so_far(event.index) + END


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
