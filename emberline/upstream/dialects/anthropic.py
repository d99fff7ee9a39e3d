"""Anthropic's Messages API: canonical requests written in its form, and its streams read as events."""

import re
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.events import (
    ChoiceDone,
    Finish,
    Opaque,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import ContentPart, GenerateRequest, Marks, Message
from emberline.upstream.dialects.dialect import (
    CHAT,
    MESSAGES,
    Fields,
    ProviderCall,
    arguments_of,
    chosen,
    refuse_settings,
    split_data_url,
    unsupported,
)
from emberline.upstream.dialects.event_reader import EventReader
from emberline.upstream.dialects.sse import MalformedLine, StreamError, encode, make_usage, token_count
from emberline.upstream.dialects.whole_reply import message_lines

Json = dict[str, Any]
VERSION = "2023-06-01"
DEFAULT_MAX_TOKENS = 32_000  # the field is required there
# Reasoning effort as a budget, for models without adaptive thinking.
_BUDGETS = {"minimal": 1024, "low": 1024, "medium": 4096, "high": 16_384, "xhigh": 24_576, "max": 31_000}
_EFFORTS = {"minimal": "low"}
_MAX_THINKING_BLOCKS = 256
_FIXED_BUDGETS = re.compile(r"claude-(?:3|2|instant|(?:opus|sonnet|haiku)-(?:3|4(?:-[0-5])?(?:-20\d{6})?$))")
_SAMPLING = frozenset({"max_tokens", "temperature", "top_p", "top_k", "stop"})


class AnthropicAPI:
    headers = f"anthropic-version: {VERSION}\r\n"

    def __init__(self, name: str) -> None:
        self._name = name

    def authorization(self, key: str) -> str:
        return f"x-api-key: {key}\r\n"

    def call(self, path: str, fields: Fields) -> ProviderCall:
        if path == MESSAGES:
            return ProviderCall("/messages", encode(fields))
        raise Unsupported(f"provider {self._name} has no text completions: ask for {CHAT}", param="model")

    def check(self, request: GenerateRequest) -> None:
        _check(self._name, request)

    def write(self, request: GenerateRequest, model: str) -> ProviderCall:
        return ProviderCall("/messages", encode(message_request(self._name, request, model)))

    def reader(self, request: GenerateRequest, input_tokens: int) -> EventReader:
        return AnthropicReader(input_tokens)


# --- the request ------------------------------------------------------------------------------------------------------


def message_request(provider: str, request: GenerateRequest, model: str) -> Json:
    """Write a body. Raises Unsupported, which names what the Messages API cannot express."""
    _check(provider, request)
    system, messages = _messages(provider, request.messages or ())
    body: Json = {
        "model": model,
        "max_tokens": request.sampling.max_tokens or DEFAULT_MAX_TOKENS,
        "messages": messages,
        "stream": True,
    }
    if system:
        body["system"] = system
    body |= chosen(request, {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"})
    if request.sampling.stop:
        body["stop_sequences"] = list(request.sampling.stop)
    if request.end_user:
        body["metadata"] = {"user_id": request.end_user}
    return body | _tools(request) | _output(request, model)


def _check(provider: str, request: GenerateRequest) -> None:
    refuse_settings(provider, request, _SAMPLING)
    if request.output is not None and request.output.kind == "json_object":
        raise unsupported(provider, "response_format", "send a json_schema in place of json_object")


def _messages(provider: str, turns: tuple[Message, ...]) -> tuple[list[Json], list[Json]]:
    """The system prompt, and the messages: adjacent ones of a role together, as the results of parallel calls are."""
    system: list[Json] = []
    messages: list[Json] = []
    for number, turn in enumerate(turns):
        where = f"messages[{number}]"
        blocks = [_block(provider, part, f"{where}.content") for part in turn.content_parts]
        role: str = turn.role
        if role == "developer":
            role = "system"
        elif role == "tool":
            result: Json = {"type": "tool_result", "tool_use_id": turn.tool_call_id or "", "content": blocks}
            if blocks and (cached := blocks[-1].pop("cache_control", None)) is not None:
                result["cache_control"] = cached
            role, blocks = "user", [result]
        elif role == "assistant":
            calls = [
                {
                    "type": "tool_use",
                    "id": call.id,
                    "name": call.name,
                    "input": arguments_of(call, f"{where}.tool_calls[{at}]"),
                }
                | _cache_control(call.marks)
                for at, call in enumerate(turn.tool_calls)
            ]
            blocks = [*_thinking(turn.marks.get("thinking_blocks", []), where), *blocks, *calls]
        if not blocks:
            continue
        blocks[-1] = _cache_control(turn.marks) | blocks[-1]
        if role == "system" and not messages:
            system += blocks
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    return system, messages


def _cache_control(marks: Marks) -> Json:
    return {} if (mark := marks.get("cache_control")) is None else {"cache_control": mark}


def _thinking(blocks: Any, where: str) -> list[Json]:
    """Return the signed thinking that a client sends back. Other blocks would be content that no rule has seen."""
    kinds = ("thinking", "redacted_thinking")
    if not isinstance(blocks, list) or any(not isinstance(one, dict) or one.get("type") not in kinds for one in blocks):
        raise BadInput("thinking_blocks is a list of thinking and redacted_thinking blocks", param=where)
    return blocks


def _block(provider: str, part: ContentPart, where: str) -> Json:
    if part.kind == "text":
        block: Json = {"type": "text", "text": part.value}
    elif part.kind == "image" and part.value.startswith(("https://", "http://")):  # which Anthropic fetches
        block = {"type": "image", "source": {"type": "url", "url": part.value}}
    elif part.kind in ("image", "file"):
        mime, data = split_data_url(part.value, where)
        source = {"type": "base64", "media_type": mime, "data": data}
        block = {"type": "image" if part.kind == "image" else "document", "source": source}
        if part.name:
            block["title"] = part.name
    else:
        raise unsupported(provider, where, f"{part.kind} cannot be sent there")
    return block | part.marks


def _tools(request: GenerateRequest) -> Json:
    tools: list[Json] = []
    for tool in request.tools:
        made: Json = {"name": tool.name, "input_schema": tool.parameters or {"type": "object"}}
        if tool.description:
            made["description"] = tool.description
        if tool.strict:
            made["strict"] = True
        tools.append(made | tool.marks)
    if not tools:
        return {}
    mode, name = request.tool_choice.mode, request.tool_choice.name
    choice: Json = {"type": "tool", "name": name} if name else {"type": "any" if mode == "required" else mode}
    if not request.parallel_tool_calls and mode != "none":
        choice["disable_parallel_tool_use"] = True
    return {"tools": tools} | ({} if choice == {"type": "auto"} else {"tool_choice": choice})


def _output(request: GenerateRequest, model: str) -> Json:
    """Structured output, and how much to think."""
    config: Json = {}
    if (output := request.output) is not None:
        config["format"] = {"type": "json_schema", "schema": output.value}
    effort, budget, enabled = request.reasoning.effort, request.reasoning.budget_tokens, request.reasoning.enabled
    thinking: Json | None = None
    if effort == "none" or enabled is False or budget == 0:
        thinking = {"type": "disabled"}
    elif _FIXED_BUDGETS.match(model) or budget:
        if effort or budget or enabled:
            thinking = {"type": "enabled", "budget_tokens": budget or _BUDGETS[effort or "medium"]}
    elif effort or enabled:
        thinking = {"type": "adaptive"}
        if effort:
            config["effort"] = _EFFORTS.get(effort, effort)
    made: Json = {} if thinking is None else {"thinking": thinking}
    return made | ({"output_config": config} if config else {})


# --- the stream -------------------------------------------------------------------------------------------------------


class _Usage(msgspec.Struct):
    input_tokens: Any = None
    cache_creation_input_tokens: Any = None
    cache_read_input_tokens: Any = None
    output_tokens: Any = None
    output_tokens_details: Any = None


class _Message(msgspec.Struct):
    id: str = ""
    model: str = ""
    usage: _Usage | None = None


class _Block(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    data: str = ""


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Error(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: _Error | None = None


_events = msgspec.json.Decoder(_Event)
_FINISHES: dict[str, Finish] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}  # else "stop"
_CODES = {"invalid_request_error": 400}  # of errors that are the request's; the others are the provider's


class AnthropicReader(EventReader):
    """Reads a message, which ends with `message_stop`."""

    def __init__(self, input_tokens: int) -> None:
        super().__init__(input_tokens)
        self._counts = _Usage()
        self._has_arguments = False  # of the tool call that is open
        self._open: _Block | None = None
        self._signature = ""
        self._thinking: list[str] = []  # of the block that is open
        self._thinking_blocks: list[Json] = []  # all so far: a client sends them back with the results of its tools

    def whole_lines(self, body: bytes) -> bytes:
        return message_lines(body)

    def _read(self, data: bytes, events: list[TextEvent]) -> None:
        event: _Event = self._decoded(data, _events)
        kind = event.type
        if kind == "content_block_delta" and event.delta is not None:
            self._delta(event.delta, events)
        elif kind == "content_block_start" and event.content_block is not None:
            self._start(event.content_block, events)
        elif kind == "content_block_stop":
            self._stop(events)
        elif kind == "message_start" and event.message is not None:
            self._count(event.message.usage)
            self._begin(events, event.message.id, event.message.model)
        elif kind == "message_delta" and event.delta is not None:
            self._count(event.usage)
            if (reason := event.delta.stop_reason) is not None and not self.finished:
                finish = _FINISHES.get(reason, "stop")
                self._finish(events, ChoiceDone(0, finish, event.delta.stop_sequence if finish == "stop" else None))
        elif kind == "message_stop":
            if not self.finished:
                raise MalformedLine("the end of a message without a stop reason")
            self.ended = True
        elif kind == "error" and event.error is not None:
            raise StreamError(event.error.message or event.error.type, _CODES.get(event.error.type, 500))
        # Others are pings, or events of a later version, which clients are told to skip.

    def _start(self, block: _Block, events: list[TextEvent]) -> None:
        self._open = block
        if block.type == "tool_use":
            self._has_arguments = False
            events.append(ToolCallStarted(0, self._next_call(0), block.id, block.name))
            return
        self._thinking, self._signature = [block.thinking], ""
        if block.thinking:
            events.append(ReasoningDelta(0, block.thinking))
        if block.type == "text" and block.text:
            events.append(TextDelta(0, block.text))

    def _delta(self, delta: _Delta, events: list[TextEvent]) -> None:
        if delta.type == "text_delta":
            if delta.text:
                events.append(TextDelta(0, delta.text))
        elif delta.type == "thinking_delta":
            self._thinking.append(delta.thinking)
            if delta.thinking:
                events.append(ReasoningDelta(0, delta.thinking))
        elif delta.type == "input_json_delta":
            if delta.partial_json:
                self._has_arguments = True
                events.append(self._arguments(0, delta.partial_json))
        elif delta.type == "signature_delta":
            self._signature += delta.signature

    def _stop(self, events: list[TextEvent]) -> None:
        block, self._open = self._open, None
        if block is None:
            return
        if block.type == "tool_use" and not self._has_arguments:  # a call without arguments has no deltas
            arguments = encode(block.input if isinstance(block.input, dict) else {}).decode()
            events.append(self._arguments(0, arguments))
        if block.type == "redacted_thinking":
            self._thinking_blocks.append({"type": "redacted_thinking", "data": block.data})
        elif block.type == "thinking" and self._signature:
            thinking = "".join(self._thinking)
            self._thinking_blocks.append({"type": "thinking", "thinking": thinking, "signature": self._signature})
        else:
            return
        if len(self._thinking_blocks) > _MAX_THINKING_BLOCKS:  # each time all are told again
            raise MalformedLine(f"more than {_MAX_THINKING_BLOCKS} blocks of thinking")
        events.append(Opaque(0, "thinking_blocks", list(self._thinking_blocks)))

    def _count(self, usage: _Usage | None) -> None:
        """Counts are cumulative; one that is left out, or null, stays as it was."""
        for name in _Usage.__struct_fields__ if usage is not None else ():
            if (value := getattr(usage, name)) is not None:
                setattr(self._counts, name, value)

    def _usage(self) -> Usage:
        counts, details = self._counts, self._counts.output_tokens_details
        cached = token_count(counts.cache_read_input_tokens)
        self.written_tokens = token_count(counts.cache_creation_input_tokens)
        prompt = token_count(counts.input_tokens) + cached + self.written_tokens
        reasoning = token_count(details.get("thinking_tokens")) if isinstance(details, dict) else 0
        return make_usage(prompt, cached, token_count(counts.output_tokens), reasoning)
