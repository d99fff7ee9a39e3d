"""The OpenAI API for models on upstream servers: the body is checked and passed on, SSE lines come back untouched.

The body is decoded into a struct whose fields are an allow-list, so that a client cannot name an address, a file, a
template or a place in the server's cache.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from emberline.api.common.chat_fields import Effort, TemplateKwargs, continues_final
from emberline.api.common.linked_images import LinkedImage, linked_images
from emberline.api.common.sampling_fields import (
    PRIORITY,
    ModelName,
    SamplingFields,
    TokenCountOrZero,
    TokenId,
    TopLogprobs,
    biases,
)
from emberline.api.common.unsupported_fields import UnsupportedField, refuse_unsupported, supported_fields
from emberline.api.http.decode_errors import explain
from emberline.api.http.errors import Dialect, error_body
from emberline.api.http.exchange import HttpExchange, encode
from emberline.api.http.streaming import Response, relay
from emberline.api.http.wire import Wire
from emberline.api.openai.chat import AnyChatRequest, ChatRequest
from emberline.api.openai.chunk_stream import StreamOptions, UsageOptions, check_options
from emberline.api.openai.completions import CompletionRequest
from emberline.protocol.errors import BadInput, EmberlineError, Unsupported
from emberline.protocol.images import ImageLink
from emberline.protocol.request import GenerateRequest, Priority
from emberline.protocol.route_request import RouteTerms
from emberline.service.work import RelayRequest
from emberline.upstream.dialects.dialect import CHAT, COMPLETIONS, refuse_others
from emberline.upstream.target import TRANSLATED, Target
from emberline.upstream.upstream_request import LinkedImages, UpstreamRequest, check_known, continuation_fields

ABSENT = Raw()
_KNOWN_PARTS = frozenset({"text", "refusal", "input_audio"})
_REMOTE = ("https://", "http://")
_MAX_PROMPTS = 128
_NOT_FORWARDED = frozenset(
    {
        *("stream", "stream_options", "service_tier", "user", "prompt_cache_key", "usage"),
        *("continue_final_message", "add_generation_prompt"),  # these in the form that the server takes
    }
)
_OPENAI_FIELDS = frozenset(  # known to any OpenAI-compatible server; the others are vLLM's and SGLang's
    {
        *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "n", "response_format", "logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "top_logprobs"),
        *("reasoning_effort", "echo", "suffix", "best_of"),
    }
)


_OURS = ("usage", "options", "rejectIfBusy", "speculation")  # fields that are for this server


class PassthroughBody(SamplingFields, kw_only=True):
    """Sampling fields are checked as for our own engines; what the server itself understands stays undecoded."""

    model: ModelName = ""
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    response_format: Raw = ABSENT
    structured_outputs: Raw = ABSENT
    guided_json: Raw = ABSENT
    guided_regex: Raw = ABSENT
    guided_choice: Raw = ABSENT
    guided_grammar: Raw = ABSENT

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        """The prompt's bytes for prefix keys: they grow at their end from turn to turn."""
        raise NotImplementedError

    @property
    def n_prompts(self) -> int:
        return 1

    def check(self, any_part: bool) -> Sequence[LinkedImage]:
        """Check what the server could be made to fetch. Returns all images. `any_part`: parts of other types pass."""
        raise NotImplementedError

    def upstream_fields(self, kind: str, sent: Iterable[str]) -> dict[str, Any]:
        """The body as a server of this kind gets it; `sent` names the fields that the client has sent. Upstream
        requests are always streamed."""
        refuse_unsupported(self)
        if (options := self.stream_options) is not None:
            check_options(self.stream)
            if options.continuous_usage_stats:
                message = "`stream_options.continuous_usage_stats` is supported for models of this server's own engines"
                raise Unsupported(message, param="stream_options")
        if self.logit_bias:
            biases(self.logit_bias)
        forwarded = _forwarded(type(self))
        fields: dict[str, Any] = {}
        for name in sent:
            if name in forwarded and (value := getattr(self, name)) is not None:
                if name not in _OPENAI_FIELDS:
                    check_known(name, kind)
                fields[name] = value
        fields["stream"], fields["stream_options"] = True, {"include_usage": True}
        return fields


@cache
def _forwarded(body: type[PassthroughBody]) -> frozenset[str]:
    return frozenset(supported_fields(body)) - _NOT_FORWARDED


class PassthroughChat(PassthroughBody, kw_only=True):
    messages: Raw
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    functions: Raw = ABSENT
    function_call: Raw = ABSENT
    reasoning_effort: Effort | None = None
    thinking_token_budget: TokenCountOrZero | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        return bytes(self.tools), bytes(self.messages).rstrip()[:-1]

    def upstream_fields(self, kind: str, sent: Iterable[str]) -> dict[str, Any]:
        fields = super().upstream_fields(kind, sent)
        if self.continue_final_message is None and self.add_generation_prompt is None:
            return fields
        continues = continues_final(self.continue_final_message, self.add_generation_prompt)
        return fields | (continuation_fields(kind) if continues else {})

    def check(self, any_part: bool) -> Sequence[LinkedImage]:
        try:
            messages = _messages.decode(self.messages)
        except msgspec.ValidationError as error:
            text, field = explain(str(error), "messages")
            raise BadInput(text, param=field) from None
        if not messages:
            raise BadInput("`messages` is empty; send at least one message", param="messages")
        images: list[LinkedImage] = []
        for number, message in enumerate(messages):
            if isinstance(message.content, list):
                for index, part in enumerate(message.content):
                    if part.type == "image_url":
                        images.append(_image(part, number, index, len(images) + 1))
                    elif not any_part and part.type not in _KNOWN_PARTS:
                        problem = f"a part of type {part.type[:64]!r} cannot be sent to this model's server"
                        raise BadInput(problem, param=f"messages[{number}].content")
        return images


class PassthroughCompletion(PassthroughBody, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Literal[1] | None = None
    max_completion_tokens: UnsupportedField = None

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        prompt = self.prompt
        return (prompt.encode("utf-8", "replace") if isinstance(prompt, str) else msgspec.json.encode(prompt)[:-1],)

    @property
    def n_prompts(self) -> int:
        prompt = self.prompt
        return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)

    def check(self, any_part: bool) -> Sequence[LinkedImage]:
        if self.n_prompts > _MAX_PROMPTS:
            raise BadInput(f"`prompt` may have {_MAX_PROMPTS} entries, not {self.n_prompts}", param="prompt")
        return ()


class _Url(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str = "text"
    image_url: _Url | str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_messages = msgspec.json.Decoder(list[_Message])


def _image(part: _Part, message: int, index: int, number: int) -> LinkedImage:
    """Find the URL of an image. Raises BadInput for a URL that is neither data: nor http(s)."""
    given, keys = part.image_url, ("content", index, "image_url")
    url = given.url if isinstance(given, _Url) else given
    found = ImageLink(number, f"messages[{message}].content[{index}]", url or "")
    if not found.url[:12].lower().startswith((*_REMOTE, "data:image/")):
        raise found.named(BadInput("it must be an https:// URL, or the image itself as data:image/…;base64,…"))
    return LinkedImage(found, message, (*keys, "url") if isinstance(given, _Url) else keys)


def _linked(images: Sequence[LinkedImage], target: Target) -> LinkedImages | None:
    """The images that the core fetches. A server in the operator's network must not fetch what a client names; a
    provider may, from a network that is not ours."""
    if target.takes_any_field:
        return None
    return linked_images([image for image in images if image.link.url[:8].lower().startswith(_REMOTE)], str)


# Fields of a chat that the canonical request has, or refuses; dialects refuse those that their providers lack.
_TRANSLATED = frozenset(
    {
        *("messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop", "n", "seed"),
        *("presence_penalty", "frequency_penalty", "tools", "tool_choice", "parallel_tool_calls", "functions", "user"),
        *("response_format", "reasoning_effort", "thinking_token_budget", "chat_template_kwargs"),
    }
)


_any_chat = msgspec.json.Decoder(AnyChatRequest)
_chat = msgspec.json.Decoder(PassthroughChat)
_completion = msgspec.json.Decoder(PassthroughCompletion)
_canonical_chat = msgspec.json.Decoder(ChatRequest)
_canonical_completion = msgspec.json.Decoder(CompletionRequest)

log = logging.getLogger(__name__)


def forward_chat(call: HttpExchange, wire: Wire) -> Awaitable[Response]:
    """Relay a chat to an upstream server."""

    def canonical() -> GenerateRequest:
        request, call.field_names = wire.decode(_canonical_chat).to_request(call.id, call.session)
        return request

    return _relay(call, wire, wire.decode_fields(_chat), CHAT, canonical)


def forward_completion(call: HttpExchange, wire: Wire) -> Awaitable[Response]:
    """Relay a text completion to an upstream server."""
    body = wire.decode_fields(_completion)

    def canonical() -> GenerateRequest:
        (request,), call.field_names = wire.decode(_canonical_completion).to_requests(call.id, call.session)
        return request

    return _relay(call, wire, body, COMPLETIONS, canonical if body.n_prompts == 1 else None)


def _relay(
    call: HttpExchange, wire: Wire, body: PassthroughBody, path: str, canonical: Callable[[], GenerateRequest] | None
) -> Awaitable[Response]:
    task = RelayRequest(
        id=call.id,
        model=body.model,
        make=partial(_upstream_request, call, wire, body, path),
        stream=bool(body.stream),
        canonical=canonical,
        session=call.session,
        api="chat" if path == CHAT else "completions",
    )
    return relay(call, task, partial(_error_event, call))


def _upstream_request(
    call: HttpExchange, wire: Wire, body: PassthroughBody, path: str, target: Target, request_id: str
) -> UpstreamRequest:
    """The request as the target's server gets it."""
    upstream = call.service.models.upstream
    if body.speculation is not None:
        check_known("speculation", target.kind)
    images = body.check(any_part=target.takes_any_field)
    linked: LinkedImages | None = None
    task: GenerateRequest | None = None
    fields: dict[str, Any] = {}
    if target.kind in TRANSLATED and path == CHAT:
        task = _canonical(call, upstream.provider_of(target.card), request_id, wire)
        upstream.check(task, target)
    else:
        fields = _all_fields(wire) if target.takes_any_field else body.upstream_fields(target.kind, wire.fields)
        if not target.takes_any_field:
            wire.ignore_all_but(type(body))
        linked = _linked(images, target) if images else None
    fields["model"] = target.remote
    if call.principal.salt:
        fields |= upstream.cache_salt(target, call.principal)
    priority = PRIORITY[body.service_tier]
    terms = RouteTerms(
        request_id,
        "chat" if path == CHAT else "completions",
        priority,
        call.session,
        n=(body.n or 1) * (body.n_prompts if path == COMPLETIONS else 1),
        reject_if_busy=priority is Priority.FLEX,
    )
    max_tokens = body.max_completion_tokens or body.max_tokens or 0
    route = upstream.route_request(
        terms, target, call.principal, body.prompt_bytes, max_tokens, body_bytes=len(wire.raw), images=len(images)
    )
    call.wants_cost = call.wants_cost or bool(body.usage and body.usage.include)
    asks_usage = call.wants_cost or (body.stream_options is not None and body.stream_options.include_usage)
    hides_usage = bool(body.stream) and not asks_usage and call.dialect is not Dialect.OPENAI_ENVELOPED
    return UpstreamRequest(
        route,
        path,
        fields,
        stream=bool(body.stream),
        hides_usage=hides_usage,
        adds_cost=call.wants_cost,
        access=target.access,
        task=task,
        linked=linked,
    )


def _canonical(call: HttpExchange, provider: str, request_id: str, wire: Wire) -> GenerateRequest:
    """The canonical request for a provider whose API is not OpenAI's. Raises Unsupported for a field of which that
    provider would not hear."""
    refuse_others(provider, _for_provider(wire), _TRANSLATED)
    body = wire.decode(_any_chat)
    if body.functions:
        raise Unsupported("`functions` is the older form of `tools`; send that", param="functions")
    for number, message in enumerate(body.messages):
        if message.function_call is not None or message.role == "function":
            raise Unsupported("`function_call` is the older form: send `tool_calls`", param=f"messages[{number}]")
    request, call.field_names = body.to_request(request_id, call.session, takes_media=True)
    return msgspec.structs.replace(request, end_user=body.user or "")


def _all_fields(wire: Wire) -> dict[str, Any]:
    """The body as a provider gets it: with every field, also those that only the provider knows."""
    return {**_for_provider(wire), "stream": True, "stream_options": {"include_usage": True}}


def _for_provider(wire: Wire) -> dict[str, Raw]:
    """The fields of a body, without those that are for this server."""
    return {name: value for name, value in wire.fields.items() if name not in _OURS}


def _error_event(call: HttpExchange, error: EmberlineError) -> bytes:
    return b"data: " + encode(error_body(error, call.dialect, call.id)) + b"\n\n"
