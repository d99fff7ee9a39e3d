"""Requests to upstream servers, and the canonical request as the body of a chat or text completion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import Unsupported
from emberline.protocol.images import ImageLink
from emberline.protocol.request import ContentPart, GenerateRequest, Message, SamplingParams, Speculation, Tool
from emberline.protocol.route_request import RouteRequest
from emberline.upstream.dialects.dialect import BYTES_PER_TOKEN, split_data_url

if TYPE_CHECKING:
    from emberline.upstream.providers.access import Access


@dataclass(frozen=True, slots=True)
class LinkedImages:
    """Images of a relayed body that the core reads, so that the body's server gets the images themselves."""

    links: Sequence[ImageLink]
    # Puts the images into the body's fields, as data: URLs in the order of the links.
    put: Callable[[dict[str, Any], Sequence[str]], None]


@dataclass(slots=True)
class UpstreamRequest:
    route: RouteRequest
    path: str  # CHAT, COMPLETIONS or MESSAGES
    fields: dict[str, Any]  # the body, always one that asks for a stream; large values are `msgspec.Raw`
    stream: bool = True  # whether the client gets a stream too
    hides_usage: bool = False  # the client has not asked for the usage that we need
    adds_cost: bool = False  # to the usage that the client gets
    access: "Access | None" = None  # to the provider that serves it
    headers: str = ""  # for it: whole lines, each with its end; empty: its API's usual ones
    task: GenerateRequest | None = None  # for a provider whose dialect writes it; then `fields` has only the model
    linked: LinkedImages | None = None  # to be put into `fields` before they are sent
    as_events: bool = False  # with `task`: the caller takes events, not OpenAI's lines


# --- prefix cache keys without a tokenizer ----------------------------------------------------------------------------

CHUNK_BYTES = 512
KEYS_PER_CHUNK = CHUNK_BYTES // (16 * BYTES_PER_TOKEN)
_STEM_BYTES = 15
_NUMBERS = [bytes([number]) for number in range(KEYS_PER_CHUNK)]


def byte_keys(model: str, salt: bytes, *parts: bytes) -> bytes:
    """Two prompts share keys as far as their bytes are equal; never across models or tenants."""
    chain = blake2b(b"%d/%s%s" % (len(salt), salt, model.encode()), person=b"emberline.bytes").digest()
    text = b"".join(parts)
    keys: list[bytes] = []
    for start in range(0, len(text) - CHUNK_BYTES + 1, CHUNK_BYTES):
        chain = blake2b(text[start : start + CHUNK_BYTES], key=chain, digest_size=_STEM_BYTES).digest()
        keys.append(chain + chain.join(_NUMBERS))
    return b"".join(keys)


# --- the body ---------------------------------------------------------------------------------------------------------

_ENGINES = ("vllm", "sglang")
_DEFAULTS = SamplingParams()
# Sent only where they are not the default.
_SAMPLING = ("max_tokens", "top_p", "frequency_penalty", "presence_penalty", "seed")
_EXTRAS = ("min_tokens", "top_k", "min_p", "repetition_penalty", "ignore_eos")  # no part of OpenAI's API


_VLLM_ONLY = ("bad_words", "include_stop_str_in_output", "allowed_token_ids")
_EXTRAS_OF = {  # of other servers and providers
    "sampling": frozenset({"top_k", "min_p", "repetition_penalty"}),
}


def continuation_fields(kind: str) -> dict[str, Any]:
    """The fields with which a server continues the last message."""
    if kind not in _ENGINES:
        message = "the server of this model cannot continue a message"
        raise Unsupported(message, param="continue_final_message")
    return {"continue_final_message": True} | ({"add_generation_prompt": False} if kind == "vllm" else {})


def check_known(name: str, kind: str) -> None:
    """Refuse a field outside OpenAI's API that this kind of server does not know."""
    if name == "speculation":
        raise Unsupported("`speculation` is for models of this server's own engines; leave it out", param=name)
    if name in _EXTRAS_OF.get(kind, ()):
        return
    if kind not in _ENGINES or (name in _VLLM_ONLY and kind != "vllm"):
        raise Unsupported(f"`{name}` is not known to the server of this model", param=name)


def body_of(request: GenerateRequest, kind: str) -> dict[str, Any]:
    """All fields but the model; `messages` are encoded already."""
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if request.messages is not None:
        fields["messages"] = msgspec.Raw(msgspec.json.encode(_messages(request.messages)))
    else:
        fields["prompt"] = request.prompt if request.prompt is not None else tokens.unpack(request.prompt_ids or b"")
    if request.suffix is not None:
        fields["suffix"] = request.suffix
    if request.n != 1:
        fields["n"] = request.n
    if request.continue_final:
        fields |= continuation_fields(kind)
    if request.speculation != Speculation():
        check_known("speculation", kind)
    _refuse_prompt_report(request)
    return fields | _sampling(request, kind) | tool_fields(request) | _output(request, kind) | _thinking(request, kind)


def _refuse_prompt_report(request: GenerateRequest) -> None:
    """Refuse what is read from our own engines' deltas alone."""
    asked = {
        "echo": request.echo,
        "return_token_ids": request.return_ids,
        "prompt_logprobs": request.sampling.prompt_logprobs is not None,
        "max_tokens": request.sampling.max_tokens == 0,
    }
    if (name := next((name for name, is_asked in asked.items() if is_asked), None)) is not None:
        what = "`max_tokens: 0`" if name == "max_tokens" else f"`{name}`"
        raise Unsupported(f"{what} is supported for models of this server's own engines", param=name)


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form. A result of a tool is text there: its images follow as a message of the user,
    after all results of the turn, which belong together."""
    made: list[dict[str, Any]] = []
    shown: list[ContentPart] = []
    for message in (*messages, None):
        if shown and (message is None or message.role != "tool"):
            made.append({"role": "user", "content": [_part(part) for part in shown]})
            shown = []
        if message is None:
            break
        made.append(_message(message))
        if message.role == "tool" and message.n_media:
            name = message.tool_call_id or message.name or "a tool"
            shown.append(ContentPart("text", f"Images in the result of {name}:"))
            shown += (part for part in message.parts if part.kind == "image")
    return made


def _message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.n_media and message.role != "tool":
        made["content"] = [_part(part) for part in message.content_parts]
    if message.name is not None:
        made["name"] = message.name
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
        made["content"] = message.content or None
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        made["reasoning_content"] = message.reasoning
    return made


def _part(part: ContentPart) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.value}
    if part.kind == "image":
        detail = {"detail": part.detail} if part.detail else {}
        return {"type": "image_url", "image_url": {"url": part.value, **detail}}
    if part.kind == "file":
        return {"type": "file", "file": {"file_data": part.value, "filename": part.name}}
    mime, data = split_data_url(part.value, "messages")
    return {"type": "input_audio", "input_audio": {"data": data, "format": mime.removeprefix("audio/")}}


def _sampling(request: GenerateRequest, kind: str) -> dict[str, Any]:
    sampling = request.sampling
    fields: dict[str, Any] = {}  # the client's own: defaults of the API that it used are for our engines
    if "temperature" not in request.left_to_model:
        fields["temperature"] = sampling.temperature
    for name in (*_SAMPLING, *_EXTRAS):
        if name in request.left_to_model:
            continue
        if (value := getattr(sampling, name)) != getattr(_DEFAULTS, name):
            if name in _EXTRAS:
                check_known(name, kind)
            fields[name] = value
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.stop_ids:
        check_known("stop_token_ids", kind)
        fields["stop_token_ids"] = list(sampling.stop_ids)
    if sampling.include_stop:
        check_known("include_stop_str_in_output", kind)
        fields["include_stop_str_in_output"] = True
    if sampling.allowed_ids:
        check_known("allowed_token_ids", kind)
        fields["allowed_token_ids"] = list(sampling.allowed_ids)
    if sampling.bad_words:
        check_known("bad_words", kind)
        fields["bad_words"] = list(sampling.bad_words)
    if sampling.logprobs is not None and request.messages is not None:
        fields |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    elif sampling.logprobs is not None:
        fields["logprobs"] = sampling.logprobs
    return fields


def tool_fields(request: GenerateRequest) -> dict[str, Any]:
    """The tools and the choice among them, in OpenAI's form."""
    if not request.tools:
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in request.tools]}
    choice = request.tool_choice
    if choice.name is not None:
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.mode != "auto":
        fields["tool_choice"] = choice.mode
    if not request.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
    if tool.description:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _output(request: GenerateRequest, kind: str) -> dict[str, Any]:
    output = request.output
    if output is None:
        return {}
    if output.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if output.kind == "json_schema":
        schema = {"name": "output", "schema": output.value, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if kind == "vllm":
        return {"structured_outputs": {output.kind: output.value}}
    if kind == "sglang" and output.kind in ("regex", "grammar"):
        return {"regex" if output.kind == "regex" else "ebnf": output.value}
    raise Unsupported(f"the server of this model has no `{output.kind}` outputs", param="output")


def _thinking(request: GenerateRequest, kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    reasoning = request.reasoning
    kwargs = dict(request.template_kwargs)
    if reasoning.effort is not None:
        fields["reasoning_effort"] = reasoning.effort
    if reasoning.enabled is not None and kind in _ENGINES:
        kwargs.setdefault("enable_thinking", reasoning.enabled)
    if reasoning.budget_tokens is not None:
        if kind != "vllm":
            raise Unsupported("the server of this model cannot limit its reasoning", param="reasoning")
        fields["thinking_token_budget"] = reasoning.budget_tokens
    if kwargs and kind in _ENGINES:
        fields["chat_template_kwargs"] = kwargs
    return fields
