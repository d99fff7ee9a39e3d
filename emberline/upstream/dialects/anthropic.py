"""Anthropic's Messages API: a chat in OpenAI's form becomes a message request, its events OpenAI's chunks."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from emberline.protocol.errors import Unsupported
from emberline.upstream.dialects.chat_form import (
    ChunkWriter,
    EventParser,
    Json,
    Part,
    Turn,
    arguments_of,
    data_uri,
    error_line,
    format_of,
    image_url,
    read,
    refuse_others,
    stops_of,
    thinking_of,
    tool_choice_of,
    tools_of,
    turns_of,
    unsupported,
)
from emberline.upstream.dialects.dialect import CHAT, MESSAGES, Fields, ProviderCall, decoded
from emberline.upstream.dialects.sse import MalformedLine, encode, token_count

VERSION = "2023-06-01"
DEFAULT_MAX_TOKENS = 32_000  # the field is required there
# Reasoning effort as a budget, for models without adaptive thinking.
_BUDGETS = {"minimal": 1024, "low": 1024, "medium": 4096, "high": 16_384, "xhigh": 24_576, "max": 31_000}
_EFFORTS = {"minimal": "low"}
_MAX_THINKING_BLOCKS = 256
_FIXED_BUDGETS = re.compile(r"claude-(?:3|2|instant|(?:opus|sonnet|haiku)-(?:3|4(?:-[0-5])?(?:-20\d{6})?$))")
_KNOWN = frozenset(
    {
        *("messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop", "tools", "user"),
        *("tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "thinking_token_budget"),
        *("chat_template_kwargs", "functions"),
    }
)


class AnthropicAPI:
    headers = f"anthropic-version: {VERSION}\r\n"

    def __init__(self, name: str) -> None:
        self._name = name

    def authorization(self, key: str) -> str:
        return f"x-api-key: {key}\r\n"

    def call(self, path: str, fields: Fields) -> ProviderCall:
        if path == MESSAGES:
            return ProviderCall("/messages", encode(fields))
        if path != CHAT:
            raise Unsupported(f"provider {self._name} has no text completions: ask for {CHAT}", param="model")
        given = decoded(fields)
        body = message_request(self._name, given)
        return ProviderCall("/messages", msgspec.json.encode(body), translator=AnthropicStream(str(given["model"])))


# --- the request ------------------------------------------------------------------------------------------------------


def message_request(provider: str, fields: Mapping[str, Any]) -> Json:
    """Unsupported names what the Messages API cannot express."""
    refuse_others(provider, fields, _KNOWN)
    model = str(fields["model"])
    system, messages = _messages(provider, turns_of(fields))
    body: Json = {
        "model": model,
        "max_tokens": fields.get("max_completion_tokens") or fields.get("max_tokens") or DEFAULT_MAX_TOKENS,
        "messages": messages,
        "stream": True,
    }
    if system:
        body["system"] = system
    for name in ("temperature", "top_p", "top_k"):
        if fields.get(name) is not None:
            body[name] = fields[name]
    if stops := stops_of(fields):
        body["stop_sequences"] = stops
    if fields.get("user"):
        body["metadata"] = {"user_id": fields["user"]}
    return body | _tools(provider, fields) | _output(provider, fields, model)


def _messages(provider: str, turns: list[Turn]) -> tuple[list[Json], list[Json]]:
    """The system prompt, and the messages: adjacent ones of a role together, as the results of parallel calls are."""
    system: list[Json] = []
    messages: list[Json] = []
    for number, turn in enumerate(turns):
        where = f"messages[{number}]"
        blocks = [_block(provider, part, f"{where}.content") for part in turn.parts]
        if turn.cache_control is not None and blocks:
            blocks[-1].setdefault("cache_control", turn.cache_control)
        role: str = turn.role
        if role in ("system", "developer"):
            if not messages:
                system += blocks
                continue
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
                    "name": call.function.name,
                    "input": arguments_of(call, f"{where}.tool_calls[{at}]"),
                }
                for at, call in enumerate(turn.tool_calls or ())
            ]
            blocks = [*(turn.thinking_blocks or ()), *blocks, *calls]
        if not blocks:
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    return system, messages


def _block(provider: str, part: Part, where: str) -> Json:
    block: Json
    if part.type in ("text", "refusal"):
        block = {"type": "text", "text": part.text or part.refusal or ""}
    elif part.type == "image_url":
        url = image_url(part)
        if url.startswith(("https://", "http://")):  # which Anthropic fetches
            block = {"type": "image", "source": {"type": "url", "url": url}}
        else:
            block = {"type": "image", "source": _base64(url, where)}
    elif part.type == "file" and part.file is not None and part.file.file_data:
        block = {"type": "document", "source": _base64(part.file.file_data, where)}
        if part.file.filename:
            block["title"] = part.file.filename
    else:
        raise unsupported(provider, where, f"a part of type {part.type[:32]!r} cannot be sent there")
    if part.cache_control is not None:
        block["cache_control"] = part.cache_control
    return block


def _base64(url: str, where: str) -> Json:
    mime, data = data_uri(url, where)
    return {"type": "base64", "media_type": mime, "data": data}


def _tools(provider: str, fields: Mapping[str, Any]) -> Json:
    tools: list[Json] = []
    for function, tool in tools_of(provider, fields):
        made: Json = {"name": function.name, "input_schema": function.parameters or {"type": "object"}}
        if function.description:
            made["description"] = function.description
        if function.strict:
            made["strict"] = True
        if tool.cache_control is not None:
            made["cache_control"] = tool.cache_control
        tools.append(made)
    if not tools:
        return {}
    mode, name = tool_choice_of(provider, fields)
    choice: Json = {"type": {"required": "any", "function": "tool"}.get(mode, mode)}
    if name:
        choice["name"] = name
    if fields.get("parallel_tool_calls") is False and mode != "none":
        choice["disable_parallel_tool_use"] = True
    return {"tools": tools} | ({} if choice == {"type": "auto"} else {"tool_choice": choice})


def _output(provider: str, fields: Mapping[str, Any], model: str) -> Json:
    """Structured output, and how much to think."""
    config: Json = {}
    asked = format_of(fields)
    if asked.type == "json_object":
        raise unsupported(provider, "response_format", "send a json_schema in place of json_object")
    if asked.json_schema is not None:
        config["format"] = {"type": "json_schema", "schema": asked.json_schema.schema}
    effort, budget, enabled = fields.get("reasoning_effort"), fields.get("thinking_token_budget"), thinking_of(fields)
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
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_CODES = {"invalid_request_error": 400}  # of errors that are the request's; the others are the provider's


class AnthropicStream:
    def __init__(self, model: str) -> None:
        self._events = EventParser()
        self._writer = ChunkWriter(model)
        self._usage = _Usage()
        self._n_calls = 0
        self._has_arguments = False  # of the tool call that is open
        self._open: _Block | None = None
        self._signature = ""
        self._thinking: list[str] = []  # of the block that is open
        self._thinking_blocks: list[Json] = []  # all so far: a client sends them back with the results of its tools
        self._finished = False

    def feed(self, data: bytes) -> bytes:
        return b"".join([self._event(read(event, _events)) for event in self._events.feed(data) if event])

    def end(self) -> bytes:
        return b""

    def _event(self, event: _Event) -> bytes:
        kind = event.type
        if kind == "content_block_delta" and event.delta is not None:
            return self._delta(event.delta)
        if kind == "content_block_start" and event.content_block is not None:
            return self._start(event.content_block)
        if kind == "content_block_stop":
            return self._stop()
        if kind == "message_start" and event.message is not None:
            message = event.message
            self._count(message.usage)
            self._writer.begin(message.id, message.model)
            return self._writer.delta(0, {"role": "assistant", "content": ""})
        if kind == "message_delta" and event.delta is not None:
            self._count(event.usage)
            reason = event.delta.stop_reason
            if reason is None or self._finished:
                return b""
            self._finished = True
            return self._writer.finish(0, _REASONS.get(reason, "stop"), event.delta.stop_sequence)
        if kind == "message_stop":
            if not self._finished:
                raise MalformedLine("the end of a message without a stop reason")
            return self._told_usage() + self._writer.end()
        if kind == "error" and event.error is not None:
            return error_line(event.error.message or event.error.type, _CODES.get(event.error.type, 500))
        return b""  # a ping, or an event of a later version, which clients are told to skip

    def _start(self, block: _Block) -> bytes:
        self._open = block
        if block.type == "tool_use":
            self._n_calls += 1
            self._has_arguments = False
            return self._writer.call(0, self._n_calls - 1, block.id, block.name)
        self._thinking, self._signature = [block.thinking] if block.thinking else [], ""
        return self._writer.text(0, block.text) if block.type == "text" and block.text else b""

    def _delta(self, delta: _Delta) -> bytes:
        if delta.type == "text_delta":
            return self._writer.text(0, delta.text)
        if delta.type == "thinking_delta":
            self._thinking.append(delta.thinking)
            return self._writer.delta(0, {"reasoning_content": delta.thinking})
        if delta.type == "input_json_delta":
            if not delta.partial_json:
                return b""
            if not self._n_calls:
                raise MalformedLine("arguments of a tool call that it had not begun")
            self._has_arguments = True
            return self._writer.arguments(0, self._n_calls - 1, delta.partial_json)
        if delta.type == "signature_delta":
            self._signature += delta.signature
        return b""

    def _stop(self) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        if block.type == "tool_use" and not self._has_arguments:  # a call without arguments has no deltas
            arguments = msgspec.json.encode(block.input if isinstance(block.input, dict) else {}).decode()
            return self._writer.arguments(0, self._n_calls - 1, arguments)
        if block.type == "redacted_thinking":
            self._thinking_blocks.append({"type": "redacted_thinking", "data": block.data})
        elif block.type == "thinking" and self._signature:
            thinking = "".join(self._thinking)
            self._thinking_blocks.append({"type": "thinking", "thinking": thinking, "signature": self._signature})
        else:
            return b""
        if len(self._thinking_blocks) > _MAX_THINKING_BLOCKS:  # each time all are told again
            raise MalformedLine(f"more than {_MAX_THINKING_BLOCKS} blocks of thinking")
        return self._writer.delta(0, {"thinking_blocks": self._thinking_blocks})

    def _count(self, usage: _Usage | None) -> None:
        """Counts are cumulative; one that is left out, or null, stays as it was."""
        for name in _Usage.__struct_fields__ if usage is not None else ():
            if (value := getattr(usage, name)) is not None:
                setattr(self._usage, name, value)

    def _told_usage(self) -> bytes:
        usage, details = self._usage, self._usage.output_tokens_details
        cached = token_count(usage.cache_read_input_tokens)
        written = token_count(usage.cache_creation_input_tokens)
        prompt = token_count(usage.input_tokens) + cached + written
        reasoning = token_count(details.get("thinking_tokens")) if isinstance(details, dict) else 0
        return self._writer.usage(prompt, cached, written, token_count(usage.output_tokens), reasoning)
