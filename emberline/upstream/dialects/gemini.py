"""Google's Gemini API: a chat in OpenAI's form becomes a request to generate content, its events OpenAI's chunks."""

import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from emberline.protocol.errors import Unsupported
from emberline.upstream.dialects.chat_form import (
    ChunkWriter,
    EventParser,
    Json,
    Part,
    Turn,
    TurnToolCall,
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
from emberline.upstream.dialects.dialect import CHAT, Fields, ProviderCall, decoded
from emberline.upstream.dialects.sse import token_count

# Reasoning effort in tokens, for models that take no levels.
_BUDGETS = {"minimal": 1024, "low": 1024, "medium": 8192, "high": 24_576, "xhigh": 24_576, "max": 24_576}
_LEVELS = {"minimal": "MINIMAL", "low": "LOW", "medium": "MEDIUM"}  # else HIGH
_MODES = {"auto": "AUTO", "none": "NONE", "required": "ANY", "function": "ANY"}
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}
# What Google documents for calls that come from elsewhere: newer models refuse calls without a signature.
_NO_SIGNATURE = "skip_thought_signature_validator"
_KNOWN = frozenset(
    {
        *("messages", "max_tokens", "max_completion_tokens", "stop", "n", "tools", "tool_choice", "response_format"),
        *("reasoning_effort", "thinking_token_budget", "chat_template_kwargs", "functions", "user"),
        *_SAMPLING,
    }
)


class GeminiAPI:
    headers = ""

    def __init__(self, name: str) -> None:
        self._name = name

    def authorization(self, key: str) -> str:
        return f"x-goog-api-key: {key}\r\n"

    def call(self, path: str, fields: Fields) -> ProviderCall:
        if path != CHAT:
            raise Unsupported(f"provider {self._name} has no text completions: ask for {CHAT}", param="model")
        given = decoded(fields)
        model = str(given["model"])
        body = msgspec.json.encode(content_request(self._name, given))
        return ProviderCall(f"{model_path(model)}:streamGenerateContent?alt=sse", body, translator=GeminiStream(model))


def model_path(model: str) -> str:
    return "/models/" + quote(model.removeprefix("models/"), safe="")


# --- the request ------------------------------------------------------------------------------------------------------


def content_request(provider: str, fields: Mapping[str, Any]) -> Json:
    """Unsupported names what the API cannot express."""
    if fields.get("parallel_tool_calls") is False and fields.get("tools"):
        raise unsupported(provider, "parallel_tool_calls", "it cannot be turned off there")
    refuse_others(provider, fields, {*_KNOWN, "parallel_tool_calls"})
    has_levels = _takes_levels(str(fields["model"]))
    system, contents = _contents(provider, turns_of(fields), has_levels)
    body: Json = {"contents": contents}
    if system:
        body["systemInstruction"] = {"parts": system}
    body |= _tools(provider, fields)
    if config := _config(fields, has_levels):
        body["generationConfig"] = config
    return body


def _takes_levels(model: str) -> bool:
    """Gemini 3 and later: they take levels of thinking, and want the signatures of calls back."""
    return not model.removeprefix("models/").startswith(("gemini-1", "gemini-2", "gemma"))


def _contents(provider: str, turns: list[Turn], signed: bool) -> tuple[list[Json], list[Json]]:
    system: list[Json] = []
    contents: list[Json] = []
    called: dict[str, str] = {}  # names of the functions, by the ids of their calls
    for number, turn in enumerate(turns):
        where = f"messages[{number}]"
        parts = [_part(provider, part, f"{where}.content") for part in turn.parts]
        role = "model" if turn.role == "assistant" else "user"
        if turn.role in ("system", "developer") and not contents:
            system += parts
            continue
        if turn.role == "tool":
            name = called.get(turn.tool_call_id or "") or turn.name or ""
            parts = [_result(turn, name, parts)]
        for at, call in enumerate(turn.tool_calls or ()):
            called[call.id] = call.function.name
            parts.append(_call(call, f"{where}.tool_calls[{at}]", signed and at == 0))
        if not parts:
            continue
        if contents and contents[-1]["role"] == role:
            contents[-1]["parts"] += parts
        else:
            contents.append({"role": role, "parts": parts})
    return system, contents


def _part(provider: str, part: Part, where: str) -> Json:
    if part.type in ("text", "refusal"):
        return {"text": part.text or part.refusal or ""}
    if part.type == "image_url":
        return {"inlineData": _inline(image_url(part), where)}
    if part.type == "file" and part.file is not None and part.file.file_data:
        return {"inlineData": _inline(part.file.file_data, where)}
    if part.type == "input_audio" and part.input_audio is not None:
        return {"inlineData": {"mimeType": f"audio/{part.input_audio.format}", "data": part.input_audio.data}}
    raise unsupported(provider, where, f"a part of type {part.type[:32]!r} cannot be sent there")


def _inline(url: str, where: str) -> Json:
    mime, data = data_uri(url, where)
    return {"mimeType": mime, "data": data}


def _call(call: TurnToolCall, where: str, needs_signature: bool) -> Json:
    function: Json = {"name": call.function.name, "args": arguments_of(call, where)}
    part: Json = {"functionCall": function}
    extra = call.extra_content if isinstance(call.extra_content, dict) else {}
    google = extra.get("google")
    signature = google.get("thought_signature") if isinstance(google, dict) else None
    if isinstance(signature, str):
        part["thoughtSignature"] = signature
    elif needs_signature:
        part["thoughtSignature"] = _NO_SIGNATURE
    return part


def _result(turn: Turn, name: str, parts: list[Json]) -> Json:
    """A function's result is an object there; anything else is put into one."""
    text = "\n".join(part["text"] for part in parts if "text" in part)
    try:
        response = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        response = text
    result: Json = {"name": name, "response": response if isinstance(response, dict) else {"result": response}}
    if media := [part for part in parts if "text" not in part]:
        result["parts"] = media
    return {"functionResponse": result}


def _tools(provider: str, fields: Mapping[str, Any]) -> Json:
    found = tools_of(provider, fields)
    if not found:
        return {}
    declared: list[Json] = []
    for function, _ in found:
        made: Json = {"name": function.name, "description": function.description}
        if function.parameters:
            made["parametersJsonSchema"] = function.parameters
        declared.append(made)
    mode, name = tool_choice_of(provider, fields)
    config: Json = {"mode": _MODES[mode]}
    if mode == "auto" and any(function.strict for function, _ in found):
        config["mode"] = "VALIDATED"
    if name:
        config["allowedFunctionNames"] = [name]
    return {"tools": [{"functionDeclarations": declared}], "toolConfig": {"functionCallingConfig": config}}


def _config(fields: Mapping[str, Any], has_levels: bool) -> Json:
    config: Json = {theirs: fields[ours] for ours, theirs in _SAMPLING.items() if fields.get(ours) is not None}
    if max_tokens := fields.get("max_completion_tokens") or fields.get("max_tokens"):
        config["maxOutputTokens"] = max_tokens
    if stops := stops_of(fields):
        config["stopSequences"] = stops
    if (n := fields.get("n") or 1) > 1:
        config["candidateCount"] = n
    asked = format_of(fields)
    if asked.type != "text":
        config["responseMimeType"] = "application/json"
    if asked.json_schema is not None:
        config["responseJsonSchema"] = asked.json_schema.schema
    if thinking := _thinking(fields, has_levels):
        config["thinkingConfig"] = thinking
    return config


def _thinking(fields: Mapping[str, Any], has_levels: bool) -> Json:
    effort, budget, enabled = fields.get("reasoning_effort"), fields.get("thinking_token_budget"), thinking_of(fields)
    if budget is not None:
        return {"includeThoughts": budget > 0, "thinkingBudget": budget}
    if effort == "none" or enabled is False:
        return {"thinkingLevel": "MINIMAL"} if has_levels else {"thinkingBudget": 0}
    if effort:
        amount: Json = (
            {"thinkingLevel": _LEVELS.get(effort, "HIGH")} if has_levels else {"thinkingBudget": _BUDGETS[effort]}
        )
        return {"includeThoughts": True, **amount}
    return {"includeThoughts": True} if enabled else {}


# --- the stream -------------------------------------------------------------------------------------------------------


class _FunctionCall(msgspec.Struct):
    name: str = ""
    args: Json | None = None
    id: str | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool = False
    thought_signature: str | None = None
    function_call: _FunctionCall | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    index: int = 0


class _UsageMetadata(msgspec.Struct, rename="camel"):
    prompt_token_count: Any = None
    candidates_token_count: Any = None
    thoughts_token_count: Any = None
    tool_use_prompt_token_count: Any = None
    cached_content_token_count: Any = None


class _Feedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Error(msgspec.Struct):
    code: int = 500
    message: str = ""


class _Event(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    usage_metadata: _UsageMetadata | None = None
    prompt_feedback: _Feedback | None = None
    model_version: str = ""
    response_id: str = ""
    error: _Error | None = None


_events = msgspec.json.Decoder(_Event)
_FAILED = ("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS", "MALFORMED_RESPONSE")


class GeminiStream:
    """Translates a stream of Gemini's. It ends with the connection, once every candidate has its finish reason."""

    def __init__(self, model: str) -> None:
        self._events = EventParser()
        self._writer = ChunkWriter(model)
        self._model = model
        self._began: set[int] = set()
        self._finished: set[int] = set()
        self._n_calls: dict[int, int] = {}
        self._usage = _UsageMetadata()

    def feed(self, data: bytes) -> bytes:
        return b"".join([self._event(read(event, _events)) for event in self._events.feed(data) if event])

    def end(self) -> bytes:
        if not self._finished or self._finished != self._began:
            return b""  # it was cut off
        usage = self._usage
        prompt = token_count(usage.prompt_token_count) + token_count(usage.tool_use_prompt_token_count)
        thoughts = token_count(usage.thoughts_token_count)
        output = token_count(usage.candidates_token_count) + thoughts
        cached = token_count(usage.cached_content_token_count)
        return self._writer.usage(prompt, cached, 0, output, thoughts) + self._writer.end()

    def _event(self, event: _Event) -> bytes:
        if event.error is not None:
            return error_line(event.error.message, 400 if event.error.code == 400 else 500)
        if event.usage_metadata is not None:
            self._usage = event.usage_metadata
        if not self._began and (event.response_id or event.model_version):
            self._writer.begin(event.response_id or f"chatcmpl-{uuid.uuid4().hex}", event.model_version or self._model)
        lines = [self._candidate(candidate) for candidate in event.candidates or ()]
        if not event.candidates and event.prompt_feedback is not None and event.prompt_feedback.block_reason:
            lines.append(self._candidate(_Candidate(finish_reason=event.prompt_feedback.block_reason)))
        return b"".join(lines)

    def _candidate(self, candidate: _Candidate) -> bytes:
        index, reason = candidate.index, candidate.finish_reason
        if index in self._finished:
            return b""
        lines: list[bytes] = []
        if index not in self._began:
            self._began.add(index)
            lines.append(self._writer.delta(index, {"role": "assistant", "content": ""}))
        for part in (candidate.content.parts if candidate.content is not None else None) or ():
            lines.append(self._part(index, part))
        if reason in _FAILED:
            return b"".join(lines) + error_line(candidate.finish_message or str(reason), 500)
        if reason is not None:
            self._finished.add(index)
            lines.append(self._writer.finish(index, self._reason(index, reason)))
        return b"".join(lines)

    def _reason(self, index: int, reason: str) -> str:
        if reason == "STOP":
            return "tool_calls" if self._n_calls.get(index) else "stop"
        return "length" if reason == "MAX_TOKENS" else "content_filter"

    def _part(self, index: int, part: _Part) -> bytes:
        if part.function_call is not None:
            call, number = part.function_call, self._n_calls.get(index, 0)
            self._n_calls[index] = number + 1
            signature = part.thought_signature
            extra = None if signature is None else {"google": {"thought_signature": signature}}
            arguments = msgspec.json.encode(call.args or {}).decode()
            call_id = call.id or f"call_{uuid.uuid4().hex[:24]}"
            return self._writer.call(index, number, call_id, call.name, arguments, extra)
        if not part.text:
            return b""
        if part.thought:
            return self._writer.delta(index, {"reasoning_content": part.text})
        return self._writer.text(index, part.text)
