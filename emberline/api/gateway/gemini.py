"""Gemini's own API on the paths of a gateway: `models/{model}:generateContent` and `:streamGenerateContent`.

A request becomes the chat that every other API makes of it, and any model can answer it.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.form import Form
from emberline.api.common.response_body import json_arguments
from emberline.api.http.body import decode
from emberline.api.http.errors import Dialect
from emberline.api.http.exchange import HttpExchange, encode
from emberline.api.http.sse import EventEncoder, data_event
from emberline.api.http.streaming import Response
from emberline.api.openai.chat import ChatRequest
from emberline.protocol.complete_response import Answer, AnswerChoice
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted, Usage
from emberline.protocol.request import ToolCall

_PATH = re.compile(r"(?:v1|v1beta)/models/([^/:]+(?:/[^/:]+)*):(generateContent|streamGenerateContent)")
_FINISH = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
_CHOICE = {"AUTO": "auto", "ANY": "required", "NONE": "none"}

Json = dict[str, Any]


class _Struct(msgspec.Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    pass


class FunctionCall(_Struct, frozen=True):
    name: str
    args: Json = {}
    id: str | None = None


class FunctionResponse(_Struct, frozen=True):
    name: str
    response: Json = {}
    id: str | None = None


class Blob(_Struct, frozen=True):
    mime_type: str
    data: str


class Part(_Struct, frozen=True):
    text: str | None = None
    inline_data: Blob | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    thought: bool = False
    thought_signature: str | None = None


class Content(_Struct, frozen=True):
    parts: list[Part]
    role: Literal["user", "model", "function", "system"] = "user"


class FunctionDeclaration(_Struct, frozen=True):
    name: str
    description: str = ""
    parameters: Json | None = None
    parameters_json_schema: Json | None = None


class GeminiTool(_Struct, frozen=True):
    function_declarations: list[FunctionDeclaration]


class FunctionCalling(_Struct, frozen=True):
    mode: Literal["AUTO", "ANY", "NONE"] = "AUTO"
    allowed_function_names: tuple[str, ...] = ()


class ToolConfig(_Struct, frozen=True):
    function_calling_config: FunctionCalling = FunctionCalling()


class GenerationConfig(_Struct, frozen=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: Annotated[int, Meta(ge=1, le=1)] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_mime_type: Literal["text/plain", "application/json"] | None = None
    response_schema: Json | None = None
    response_json_schema: Json | None = None


class GenerateContent(_Struct, frozen=True):
    contents: Annotated[list[Content], Meta(min_length=1)]
    system_instruction: Content | None = None
    tools: list[GeminiTool] = []
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None

    def chat(self, model: str) -> Json:
        """As the body of a chat in OpenAI's API."""
        messages = [] if self.system_instruction is None else [_said("system", self.system_instruction.parts)]
        for content in self.contents:
            messages += _messages(content)
        body: Json = {"model": model, "messages": messages, **_config(self.generation_config or GenerationConfig())}
        functions = [_function(one) for tool in self.tools for one in tool.function_declarations]
        if functions:
            body["tools"] = functions
        if self.tool_config is not None:
            calling = self.tool_config.function_calling_config
            names = calling.allowed_function_names
            if len(names) > 1:
                raise Unsupported("`allowedFunctionNames` may have one name", param="toolConfig")
            body["tool_choice"] = (
                {"type": "function", "function": {"name": names[0]}} if names else _CHOICE[calling.mode]
            )
        return body


_decoder = msgspec.json.Decoder(GenerateContent)


def _config(given: GenerationConfig) -> Json:
    names = {"max_output_tokens": "max_completion_tokens", "stop_sequences": "stop", "candidate_count": "n"}
    plain = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", *names)
    fields = {names.get(name, name): value for name in plain if (value := getattr(given, name)) is not None}
    schema = given.response_json_schema or given.response_schema
    if schema is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": _lower(schema)}}
    elif given.response_mime_type == "application/json":
        fields["response_format"] = {"type": "json_object"}
    return fields


def _lower(schema: Any) -> Any:
    """Gemini writes the types of a schema in capitals."""
    if isinstance(schema, dict):
        return {
            name: value.lower() if name == "type" and isinstance(value, str) else _lower(value)
            for name, value in schema.items()
        }
    return [_lower(one) for one in schema] if isinstance(schema, list) else schema


def _function(one: FunctionDeclaration) -> Json:
    parameters = one.parameters_json_schema or _lower(one.parameters or {"type": "object", "properties": {}})
    return {
        "type": "function",
        "function": {"name": one.name, "description": one.description, "parameters": parameters},
    }


def _messages(content: Content) -> list[Json]:
    answers = [part.function_response for part in content.parts if part.function_response is not None]
    others = [part for part in content.parts if part.function_response is None]
    messages = [
        {"role": "tool", "tool_call_id": one.id or one.name, "name": one.name, "content": encode(one.response).decode()}
        for one in answers
    ]
    return [*messages, *([_said("assistant" if content.role == "model" else "user", others)] if others else [])]


def _said(role: str, parts: list[Part]) -> Json:
    calls = [part.function_call for part in parts if part.function_call is not None]
    shown = [part for part in parts if part.function_call is None and not part.thought]
    if any(part.inline_data is not None for part in shown):
        content: Any = [_content_part(part) for part in shown]
    else:
        content = "".join(part.text or "" for part in shown)
    message: Json = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": one.id or one.name,
                "type": "function",
                "function": {"name": one.name, "arguments": encode(one.args).decode()},
            }
            for one in calls
        ]
    return message


def _content_part(part: Part) -> Json:
    if part.inline_data is None:
        return {"type": "text", "text": part.text or ""}
    url = f"data:{part.inline_data.mime_type};base64,{part.inline_data.data}"
    return {"type": "image_url", "image_url": {"url": url}}


# --- the answer -------------------------------------------------------------------------------------------------------


def model_of(endpoint: str) -> str | None:
    """The model that the path of one of these calls names; None: it is another path."""
    found = _PATH.fullmatch(endpoint)
    return None if found is None else found[1]


async def generate_content(call: HttpExchange, model: str, endpoint: str) -> Response:
    given = decode(call.body or b"", _decoder)
    body: ChatRequest = decode(encode(given.chat(model)), GEMINI.decoder)
    call.use_model(model)
    request, call.field_names = body.to_request(call.id, call.session)
    streams = endpoint.endswith(":streamGenerateContent")
    if streams and call.query.get("alt", "sse") != "sse":
        raise BadInput("a stream comes as server-sent events: add `alt=sse` to the query", param="alt")
    return await GEMINI.answer(call, body, call.run(request), streams=streams)


def content_body(request_id: str, body: ChatRequest, created: int, answer: Answer) -> Json:
    choice = answer.choices[0]
    candidate = {"content": {"parts": _parts(choice), "role": "model"}, "index": 0}
    return _body(body.model, request_id, candidate | {"finishReason": _FINISH[choice.finish]}, answer.usage)


def _parts(choice: AnswerChoice) -> list[Json]:
    parts: list[Json] = [{"text": choice.reasoning, "thought": True}] if choice.reasoning else []
    if choice.text or not choice.tool_calls:
        parts.append({"text": choice.text})
    return [*parts, *map(_call_part, choice.tool_calls)]


def _call_part(call: ToolCall) -> Json:
    return {"functionCall": {"id": call.id, "name": call.name, "args": json_arguments(call) or {}}}


def _usage(usage: Usage) -> Json:
    return {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
        "thoughtsTokenCount": usage.reasoning_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
        "totalTokenCount": usage.total_tokens,
    }


def _body(model: str, response_id: str, candidate: Json, usage: Usage | None) -> Json:
    body = {"candidates": [candidate], "modelVersion": model, "responseId": response_id}
    return body if usage is None else body | {"usageMetadata": _usage(usage)}


class GeminiStream(EventEncoder):
    """One chunk per piece of text; a function call comes whole; the last chunk has the finish reason and the usage."""

    def __init__(self, request_id: str, dialect: Dialect, body: ChatRequest, created: int) -> None:
        super().__init__(request_id, dialect)
        self._model = body.model
        self._finish = "STOP"
        self._calls: list[tuple[ToolCallStarted, list[str]]] = []

    def _chunk(self, parts: list[Json], finish: str = "", usage: Usage | None = None) -> bytes:
        candidate: Json = {"content": {"parts": parts, "role": "model"}, "index": 0}
        if finish:
            candidate["finishReason"] = finish
        return data_event(_body(self._model, self._request_id, candidate, usage))

    def text_delta(self, event: TextDelta) -> bytes:
        return self._chunk([{"text": event.text}])

    def reasoning_delta(self, event: ReasoningDelta) -> bytes:
        return self._chunk([{"text": event.text, "thought": True}])

    def tool_call_started(self, event: ToolCallStarted) -> bytes:
        self._calls.append((event, []))
        return b""

    def tool_call_delta(self, event: ToolCallDelta) -> bytes:
        self._calls[event.call][1].append(event.arguments)
        return b""

    def choice_done(self, event: ChoiceDone) -> bytes:
        self._finish = _FINISH[event.finish]
        parts = [_call_part(ToolCall(one.id, one.name, "".join(pieces))) for one, pieces in self._calls]
        return self._chunk(parts) if parts else b""

    def completed(self, usage: Usage) -> bytes:
        return self._chunk([{"text": ""}], self._finish, usage)


# The body is the chat that `GenerateContent.chat` makes of a request.
GEMINI = Form(
    decoder=msgspec.json.Decoder(ChatRequest),
    to_task=ChatRequest.to_request,
    to_body=content_body,
    to_stream=GeminiStream,
)
