"""OpenAI's door to other people's servers: bytes out, bytes back, counted on the way."""

import contextlib
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from emberline.api.common.chat_fields import Budget, Effort, TemplateKwargs
from emberline.api.common.sampling_fields import (
    MAX_CHOICES,
    PRIORITY,
    LogitBias,
    Penalty,
    Seed,
    ServiceTier,
    StopString,
    StopStrings,
    TokenCount,
    TokenId,
    session_name,
)
from emberline.api.http.body import decode
from emberline.api.http.call import Call, HeaderList, Reply, encode, while_connected
from emberline.api.http.errors import Dialect, error_body
from emberline.api.openai.chat import ChatRequest
from emberline.api.openai.chunk_stream import StreamOptions
from emberline.api.openai.completions import CompletionRequest
from emberline.catalog.model_card import ModelCard
from emberline.protocol.errors import BadInput, EmberlineError, Internal, Unavailable
from emberline.protocol.request import Priority
from emberline.upstream.relay import Relay
from emberline.upstream.request import CHAT, COMPLETIONS, UpstreamRequest, byte_keys, estimated_tokens
from emberline.upstream.run import UpstreamRun

ABSENT = Raw()
_TEXT_PARTS = frozenset({"text", "refusal"})
_MAX_PROMPTS = 128
_OURS = frozenset({"stream_options", "service_tier", "user", "prompt_cache_key"})  # not for the server
_PLAIN = frozenset(  # what any OpenAI server knows; the rest is vLLM's and SGLang's
    {
        *("model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "n", "response_format", "logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "top_logprobs"),
        *("reasoning_effort", "echo", "suffix", "best_of"),
    }
)


class Peek(msgspec.Struct):
    """Enough to know whose request it is."""

    model: Any = None


class RelayBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None
    response_format: Raw = ABSENT
    structured_outputs: Raw = ABSENT
    guided_json: Raw = ABSENT
    guided_regex: Raw = ABSENT
    guided_choice: Raw = ABSENT
    guided_grammar: Raw = ABSENT

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        """What the prompt is made of: it grows at its end from turn to turn."""
        raise AssertionError("each endpoint has its own")

    def fields(self, kind: str) -> dict[str, Any]:
        """The body as the server gets it."""
        own = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        known = None if kind in ("vllm", "sglang") else _PLAIN
        return {
            name: value
            for name, value in own.items()
            if value is not ABSENT and name not in _OURS and (known is None or name in known)
        }


class RelayedChat(RelayBody, kw_only=True):
    messages: Raw
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    functions: Raw = ABSENT
    function_call: Raw = ABSENT
    reasoning_effort: Effort | None = None
    thinking_token_budget: Budget | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        return bytes(self.tools), bytes(self.messages).rstrip()[:-1]

    def check(self) -> None:
        """Messages whose media would have to be fetched are refused: a server must not fetch what clients name."""
        messages = _messages.decode(self.messages)
        if not messages:
            raise BadInput("`messages` is empty; send at least one message", param="messages")
        for number, message in enumerate(messages):
            for part in message.content if isinstance(message.content, list) else ():
                _check_part(part, f"messages[{number}].content")


class RelayedCompletion(RelayBody, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Literal[1] | None = None

    @property
    def prompt_bytes(self) -> tuple[bytes, ...]:
        prompt = self.prompt
        return (prompt.encode("utf-8", "replace") if isinstance(prompt, str) else msgspec.json.encode(prompt)[:-1],)

    @property
    def n_prompts(self) -> int:
        prompt = self.prompt
        return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)

    def check(self) -> None:
        if self.n_prompts > _MAX_PROMPTS:
            raise BadInput(f"`prompt` may have {_MAX_PROMPTS} entries, not {self.n_prompts}", param="prompt")


class _Url(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str = "text"
    image_url: _Url | str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_messages = msgspec.json.Decoder(list[_Message])


def _check_part(part: _Part, where: str) -> None:
    if part.type in _TEXT_PARTS or part.type == "input_audio":
        return
    if part.type != "image_url":
        raise BadInput(f"a part of type {part.type[:64]!r} cannot be sent to this model's server", param=where)
    url = part.image_url.url if isinstance(part.image_url, _Url) else part.image_url
    if url is None or not url.startswith("data:image/"):
        raise BadInput("images must come inside the request, as data:image/…;base64,… URLs", param=where)


_peek = msgspec.json.Decoder(Peek)
_chat = msgspec.json.Decoder(RelayedChat)
_completion = msgspec.json.Decoder(RelayedCompletion)
_canonical_chat = msgspec.json.Decoder(ChatRequest)
_canonical_completion = msgspec.json.Decoder(CompletionRequest)

log = logging.getLogger(__name__)


def relayed_card(call: Call, raw: bytes) -> ModelCard | None:
    """The card of the model that the body names, where others compute it."""
    if call.service.relay is None:
        return None
    try:
        name = _peek.decode(raw).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # what is wrong with it is told where it is read in full
    return call.service.relayed(name) if isinstance(name, str) else None


async def relay_chat(call: Call, card: ModelCard, raw: bytes) -> Reply | None:
    body = decode(raw, _chat)
    _checked(body.check)
    parcel = _parcel(call, card, body, CHAT, 1)
    if (text := _relay(call).text_of(card)) is not None:
        with contextlib.suppress(EmberlineError):  # not all that its server takes can be rendered here
            request = decode(raw, _canonical_chat).to_request(call)
            parcel.keys, parcel.input_tokens = await _relay(call).keys_of(request, card, text)
    return await _answer(call, parcel)


async def relay_completion(call: Call, card: ModelCard, raw: bytes) -> Reply | None:
    body = decode(raw, _completion)
    _checked(body.check)
    parcel = _parcel(call, card, body, COMPLETIONS, body.n_prompts)
    if (text := _relay(call).text_of(card)) is not None and body.n_prompts == 1:
        with contextlib.suppress(EmberlineError):
            (request,) = decode(raw, _canonical_completion).to_requests(call)
            parcel.keys, parcel.input_tokens = await _relay(call).keys_of(request, card, text)
    return await _answer(call, parcel)


def _checked(check: Callable[[], None]) -> None:
    try:
        check()
    except msgspec.ValidationError as bad:
        raise BadInput(f"`messages`: {bad}", param="messages") from None


def _relay(call: Call) -> Relay:
    relay = call.service.relay
    assert relay is not None
    return relay


def _parcel(call: Call, card: ModelCard, body: RelayBody, path: str, n_prompts: int) -> UpstreamRequest:
    relay, principal = _relay(call), call.principal
    fields = body.fields(relay.kind_of(card))
    fields["model"] = card.id
    fields |= relay.salted(card, principal)
    if body.stream:
        fields["stream_options"] = {"include_usage": True}
    prompt = body.prompt_bytes
    asked = body.stream_options is not None and body.stream_options.include_usage
    priority = PRIORITY[body.service_tier]
    most = body.max_tokens or getattr(body, "max_completion_tokens", None) or 0
    return UpstreamRequest(
        id=call.id,
        card=card,
        principal=principal,
        path=path,
        fields=fields,
        keys=byte_keys(card.id, principal.salt, *prompt),
        input_tokens=estimated_tokens(sum(map(len, prompt))),
        stream=bool(body.stream),
        hides_usage=not asked and call.dialect is not Dialect.OPENAI_ENVELOPED,
        n=(body.n or 1) * n_prompts,
        max_tokens=most,
        priority=priority,
        session=session_name(call, body.prompt_cache_key, body.user),
        reject_if_busy=priority is Priority.FLEX,
    )


async def _answer(call: Call, parcel: UpstreamRequest) -> Reply | None:
    headers: HeaderList = [(b"cf-ai-req-id", call.id.encode())]
    if parcel.stream:
        await while_connected(call.receive, _stream(call, parcel, headers))
        return None
    return Reply(200, await while_connected(call.receive, _whole(call, parcel)), headers=headers)


async def _whole(call: Call, parcel: UpstreamRequest) -> bytes:
    passage = await _relay(call).open(parcel)
    async with passage:
        return await passage.body()


async def _stream(call: Call, parcel: UpstreamRequest, headers: HeaderList) -> None:
    """What is refused before the first byte becomes an HTTP status; what fails later, the stream's last event."""
    passage = await _relay(call).open(parcel)
    async with passage:
        await call.start_stream(headers)
        last = await _pump(call, passage)
    await call.send({"type": "http.response.body", "body": last})


async def _pump(call: Call, passage: UpstreamRun) -> bytes:
    """Send all but the last block, which is returned: it closes the stream."""
    send = call.send
    try:
        block = await passage.block()
        while following := not passage.over:
            await send({"type": "http.response.body", "body": block, "more_body": following})
            block = await passage.block()
        return block
    except EmberlineError as error:
        await passage.fail(error)
        return _failed(call, error)
    except Exception as error:
        log.exception("a stream failed")
        await passage.fail(error)
        return _failed(call, Internal("the request failed; the log has it under its id"))
    except BaseException:  # the client left, or the server stops: the second still has somebody to tell
        await send({"type": "http.response.body", "body": _failed(call, Unavailable("the server is stopping"))})
        raise


def _failed(call: Call, error: EmberlineError) -> bytes:
    return b"data: " + encode(error_body(error, call.dialect, call.id)) + b"\n\n"
