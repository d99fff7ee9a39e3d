"""Google's Gemini API: canonical requests written in its form, and its streams read as events."""

import uuid
from typing import Any
from urllib.parse import quote

import msgspec

from emberline.protocol.errors import Unsupported
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
from emberline.protocol.request import ContentPart, GenerateRequest, Marks, Message, Reasoning, ToolCall
from emberline.upstream.dialects.dialect import (
    CHAT,
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
from emberline.upstream.dialects.whole_reply import candidate_lines

Json = dict[str, Any]
# Reasoning effort in tokens, for models that take no levels.
_BUDGETS = {"minimal": 1024, "low": 1024, "medium": 8192, "high": 24_576, "xhigh": 24_576, "max": 24_576}
_LEVELS = {"minimal": "MINIMAL", "low": "LOW", "medium": "MEDIUM"}  # else HIGH
_MODES = {"auto": "AUTO", "none": "NONE", "required": "ANY"}
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


class GeminiAPI:
    headers = ""

    def __init__(self, name: str) -> None:
        self._name = name

    def authorization(self, key: str) -> str:
        return f"x-goog-api-key: {key}\r\n"

    def call(self, path: str, fields: Fields) -> ProviderCall:
        raise Unsupported(f"provider {self._name} has no text completions: ask for {CHAT}", param="model")

    def check(self, request: GenerateRequest) -> None:
        _check(self._name, request)

    def write(self, request: GenerateRequest, model: str) -> ProviderCall:
        body = encode(content_request(self._name, request, model))
        return ProviderCall(f"{model_path(model)}:streamGenerateContent?alt=sse", body)

    def reader(self, request: GenerateRequest, input_tokens: int) -> EventReader:
        return GeminiReader(input_tokens, request.n)


def model_path(model: str) -> str:
    return "/models/" + quote(model.removeprefix("models/"), safe="")


# --- the request ------------------------------------------------------------------------------------------------------


def content_request(provider: str, request: GenerateRequest, model: str) -> Json:
    """Write a body. Raises Unsupported, which names what the API cannot express."""
    _check(provider, request)
    has_levels = _takes_levels(model)
    system, contents = _contents(request.messages or (), has_levels)
    body: Json = {"contents": contents}
    if system:
        body["systemInstruction"] = {"parts": system}
    body |= _tools(request)
    if config := _config(request, has_levels):
        body["generationConfig"] = config
    return body


def _check(provider: str, request: GenerateRequest) -> None:
    if not request.parallel_tool_calls and request.tools:
        raise unsupported(provider, "parallel_tool_calls", "it cannot be turned off there")
    if request.continue_final:
        message = "the server of this model cannot continue a message"
        raise Unsupported(message, param="continue_final_message")
    refuse_settings(provider, request, {*_SAMPLING, "max_tokens", "stop", "n"})


def _takes_levels(model: str) -> bool:
    """True for Gemini 3 and later: they take levels of thinking, and want the signatures of calls back."""
    return not model.removeprefix("models/").startswith(("gemini-1", "gemini-2", "gemma"))


def _contents(turns: tuple[Message, ...], signed: bool) -> tuple[list[Json], list[Json]]:
    """The system prompt, and the contents: adjacent ones of a role together."""
    system: list[Json] = []
    contents: list[Json] = []
    called: dict[str, str] = {}  # names of the functions, by the ids of their calls
    for number, turn in enumerate(turns):
        where = f"messages[{number}]"
        parts = [_part(part, f"{where}.content") for part in turn.content_parts]
        role = "model" if turn.role == "assistant" else "user"
        if turn.role in ("system", "developer") and not contents:
            system += parts
            continue
        if turn.role == "tool":
            parts = [_result(called.get(turn.tool_call_id or "") or turn.name or "", parts)]
        for at, call in enumerate(turn.tool_calls):
            called[call.id] = call.name
            parts.append(_call(call, f"{where}.tool_calls[{at}]", signed and at == 0))
        if not parts:
            continue
        if contents and contents[-1]["role"] == role:
            contents[-1]["parts"] += parts
        else:
            contents.append({"role": role, "parts": parts})
    return system, contents


def _part(part: ContentPart, where: str) -> Json:
    if part.kind == "text":
        return {"text": part.value}
    mime, data = split_data_url(part.value, where)
    return {"inlineData": {"mimeType": mime, "data": data}}


def _call(call: ToolCall, where: str, needs_signature: bool) -> Json:
    part: Json = {"functionCall": {"name": call.name, "args": arguments_of(call, where)}}
    signature = thought_signature(call.marks)
    if signature is None and needs_signature:
        signature = _NO_SIGNATURE
    return part if signature is None else part | {"thoughtSignature": signature}


def signature_mark(signature: str) -> Json:
    """The `extra_content` of a tool call that holds Google's signature, as OpenAI's clients of Gemini know it."""
    return {"google": {"thought_signature": signature}}


def thought_signature(marks: Marks) -> str | None:
    """Google's signature in the marks of a tool call. Returns None if there is none."""
    extra = marks.get("extra_content")
    google = extra.get("google") if isinstance(extra, dict) else None
    signature = google.get("thought_signature") if isinstance(google, dict) else None
    return signature if isinstance(signature, str) else None


def _result(name: str, parts: list[Json]) -> Json:
    """A function's result, which is an object there; anything else is put into one."""
    text = "\n".join(part["text"] for part in parts if "text" in part)
    try:
        response = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        response = text
    result: Json = {"name": name, "response": response if isinstance(response, dict) else {"result": response}}
    if media := [part for part in parts if "text" not in part]:
        result["parts"] = media
    return {"functionResponse": result}


def _tools(request: GenerateRequest) -> Json:
    if not request.tools:
        return {}
    declared: list[Json] = []
    for tool in request.tools:
        made: Json = {"name": tool.name, "description": tool.description}
        if tool.parameters:
            made["parametersJsonSchema"] = tool.parameters
        declared.append(made)
    choice = request.tool_choice
    config: Json = {"mode": _MODES[choice.mode]}
    if choice.mode == "auto" and any(tool.strict for tool in request.tools):
        config["mode"] = "VALIDATED"
    if choice.name:
        config["allowedFunctionNames"] = [choice.name]
    return {"tools": [{"functionDeclarations": declared}], "toolConfig": {"functionCallingConfig": config}}


def _config(request: GenerateRequest, has_levels: bool) -> Json:
    config = chosen(request, _SAMPLING)
    if "top_p" not in request.left_to_model:  # 1 is not the default there
        config["topP"] = request.sampling.top_p
    if request.sampling.max_tokens:
        config["maxOutputTokens"] = request.sampling.max_tokens
    if request.sampling.stop:
        config["stopSequences"] = list(request.sampling.stop)
    if request.n > 1:
        config["candidateCount"] = request.n
    if (output := request.output) is not None:
        config["responseMimeType"] = "application/json"
        if output.kind == "json_schema":
            config["responseJsonSchema"] = output.value
    if thinking := _thinking(request.reasoning, has_levels):
        config["thinkingConfig"] = thinking
    return config


def _thinking(asked: Reasoning, has_levels: bool) -> Json:
    if asked.budget_tokens is not None:
        return {"includeThoughts": asked.budget_tokens > 0, "thinkingBudget": asked.budget_tokens}
    if asked.effort == "none" or asked.enabled is False:
        return {"thinkingLevel": "MINIMAL"} if has_levels else {"thinkingBudget": 0}
    if asked.effort:
        level, budget = _LEVELS.get(asked.effort, "HIGH"), _BUDGETS[asked.effort]
        return {"includeThoughts": True, **({"thinkingLevel": level} if has_levels else {"thinkingBudget": budget})}
    return {"includeThoughts": True} if asked.enabled else {}


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
_FINISHES: dict[str, Finish] = {"STOP": "stop", "MAX_TOKENS": "length"}  # else "content_filter"
_FAILED = ("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS", "MALFORMED_RESPONSE")


class GeminiReader(EventReader):
    """Reads a reply, which ends with the connection, once every candidate has its finish reason."""

    whole_calls = True

    def __init__(self, input_tokens: int, n: int) -> None:
        super().__init__(input_tokens, n)
        self._counts = _UsageMetadata()

    def feed(self, piece: bytes) -> list[TextEvent]:
        events = super().feed(piece)
        self.ended = not piece and self.finished
        return events

    def whole_lines(self, body: bytes) -> bytes:
        return candidate_lines(body)

    def _read(self, data: bytes, events: list[TextEvent]) -> None:
        event: _Event = self._decoded(data, _events)
        if event.error is not None:
            raise StreamError(event.error.message, 400 if event.error.code == 400 else 500)
        if event.usage_metadata is not None:
            self._counts = event.usage_metadata
        candidates = event.candidates or []
        if not candidates and event.prompt_feedback is not None and (why := event.prompt_feedback.block_reason):
            candidates = [_Candidate(finish_reason=why, index=index) for index in range(self._n)]
        for candidate in candidates:
            self._begin(events, event.response_id, event.model_version)
            self._candidate(candidate, events)

    def _candidate(self, candidate: _Candidate, events: list[TextEvent]) -> None:
        index, reason = candidate.index, candidate.finish_reason
        if not 0 <= index < self._n:
            raise MalformedLine(f"candidate {index} of {self._n}")
        if index in self._done:
            return
        self._begun.add(index)
        for part in (candidate.content.parts if candidate.content is not None else None) or ():
            self._part(index, part, events)
        if reason in _FAILED:
            raise StreamError(candidate.finish_message or str(reason), 500)
        if reason is not None:
            self._finish(events, ChoiceDone(index, _FINISHES.get(reason, "content_filter")))

    def _part(self, index: int, part: _Part, events: list[TextEvent]) -> None:
        if (call := part.function_call) is not None:
            number = self._next_call(index)
            events.append(ToolCallStarted(index, number, call.id or f"call_{uuid.uuid4().hex[:24]}", call.name))
            if part.thought_signature is not None:
                events.append(Opaque(index, "extra_content", signature_mark(part.thought_signature), number))
            events.append(self._arguments(index, encode(call.args or {}).decode()))
        elif part.text:
            events.append(ReasoningDelta(index, part.text) if part.thought else TextDelta(index, part.text))

    def _usage(self) -> Usage:
        counts = self._counts
        prompt = token_count(counts.prompt_token_count) + token_count(counts.tool_use_prompt_token_count)
        thoughts = token_count(counts.thoughts_token_count)
        output = token_count(counts.candidates_token_count) + thoughts
        return make_usage(prompt, token_count(counts.cached_content_token_count), output, thoughts)
