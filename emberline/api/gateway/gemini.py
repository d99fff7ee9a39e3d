"""Gemini's own API on the paths of a gateway: `models/{model}:generateContent` and `:streamGenerateContent`.

Any model can answer.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from emberline.api.common.form import AnswerForm
from emberline.api.common.image_parts import image_from_base64, image_from_url
from emberline.api.common.response_body import json_arguments
from emberline.api.common.sampling_fields import (
    Penalty,
    Probability,
    Seed,
    StopStrings,
    Temperature,
    TokenCount,
    TopK,
    clamp_top_p,
    left_to_model,
)
from emberline.api.common.tools import DeclaredFunction, ToolName, Toolset, declare
from emberline.api.http.errors import Dialect, FieldNames
from emberline.api.http.exchange import HttpExchange, encode
from emberline.api.http.sse import EventEncoder, data_event
from emberline.api.http.streaming import Response
from emberline.protocol.complete_response import Answer, AnswerChoice
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.events import (
    ChoiceDone,
    Opaque,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import (
    ContentPart,
    GenerateRequest,
    Marks,
    Message,
    MessageRole,
    OutputFormat,
    SamplingParams,
    Tool,
    ToolCall,
    session_name,
)
from emberline.service.validation import MAX_TOOLS
from emberline.upstream.dialects.gemini import signature_mark, thought_signature

_PATH = re.compile(r"(?:v1|v1beta)/models/([^/:]+(?:/[^/:]+)*):(generateContent|streamGenerateContent)")
_FINISH = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP", "content_filter": "SAFETY"}

Json = dict[str, Any]


class _Struct(msgspec.Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    pass


class FunctionCall(_Struct, frozen=True):
    name: str
    args: Json = {}
    id: str | None = None


class Blob(_Struct, frozen=True):
    mime_type: str
    data: str
    display_name: str | None = None


class FileData(_Struct, frozen=True):
    file_uri: str
    mime_type: str | None = None


class ResponsePart(_Struct, frozen=True):
    """A picture in a function's response."""

    inline_data: Blob


class FunctionResponse(_Struct, frozen=True):
    name: str
    response: Json = {}
    id: str | None = None
    parts: list[ResponsePart] = []


class Part(_Struct, frozen=True):
    text: str | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    thought: bool = False
    thought_signature: str | None = None


class Content(_Struct, frozen=True):
    parts: list[Part]
    role: Literal["user", "model", "function", "system"] = "user"


class FunctionDeclaration(_Struct, frozen=True):
    name: ToolName
    description: str = ""
    parameters: Json | None = None
    parameters_json_schema: Json | None = None

    def tool(self, field: str) -> Tool:
        parameters = self.parameters_json_schema or _lower(self.parameters or {"type": "object", "properties": {}})
        return declare(DeclaredFunction(self.name, self.description, parameters), field)


class GeminiTool(_Struct, frozen=True):
    function_declarations: Annotated[list[FunctionDeclaration], Meta(max_length=MAX_TOOLS)]


class FunctionCalling(_Struct, frozen=True):
    mode: Literal["AUTO", "ANY", "NONE"] = "AUTO"
    allowed_function_names: tuple[str, ...] = ()


class ToolConfig(_Struct, frozen=True):
    function_calling_config: FunctionCalling = FunctionCalling()


class GenerationConfig(_Struct, frozen=True):
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    max_output_tokens: TokenCount | None = None
    stop_sequences: StopStrings | None = None
    candidate_count: Annotated[int, Meta(ge=1, le=1)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_mime_type: Literal["text/plain", "application/json"] | None = None
    response_schema: Json | None = None
    response_json_schema: Json | None = None

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=clamp_top_p(self.top_p),
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=self.seed,
            stop=tuple(self.stop_sequences or ()),
        )

    def output(self) -> OutputFormat | None:
        schema = self.response_json_schema or self.response_schema
        if schema is not None:
            return OutputFormat("json_schema", _lower(schema))
        return OutputFormat("json_object") if self.response_mime_type == "application/json" else None


class GenerateContent(_Struct, frozen=True):
    contents: Annotated[list[Content], Meta(min_length=1)]
    system_instruction: Content | None = None
    tools: list[GeminiTool] = []
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None

    def to_request(self, model: str, request_id: str, session: str | None) -> tuple[GenerateRequest, FieldNames]:
        """The canonical request."""
        messages: list[_Sent] = []
        if self.system_instruction is not None:
            messages.append(_said("system", list(enumerate(self.system_instruction.parts)), "systemInstruction"))
        for number, content in enumerate(self.contents):
            messages += _messages(content, f"contents[{number}]")
        config, found = self.generation_config or GenerationConfig(), self._toolset()
        request = GenerateRequest(
            api="chat",
            id=request_id,
            model=model,
            messages=tuple(sent.message for sent in messages),
            sampling=config.sampling(),
            left_to_model=left_to_model(config),
            session=session_name(session),
            tools=found.tools,
            tool_choice=found.choice,
            output=config.output(),
        )
        return request, FieldNames(
            output="generationConfig.responseSchema",
            tools=found.fields,
            messages=[sent.field for sent in messages],
            parts={number: sent.parts for number, sent in enumerate(messages) if sent.message.parts},
        )

    def _toolset(self) -> Toolset:
        declared = [one for tool in self.tools for one in tool.function_declarations]
        fields = [f"functionDeclarations[{number}]" for number in range(len(declared))]
        found = Toolset.of((one.tool(field), field) for one, field in zip(declared, fields, strict=True))
        calling = FunctionCalling() if self.tool_config is None else self.tool_config.function_calling_config
        names = calling.allowed_function_names
        if len(names) > 1:
            raise Unsupported("`allowedFunctionNames` may have one name", param="toolConfig")
        if names or calling.mode == "ANY":
            return found.required(names[0] if names else None, "toolConfig")
        return found.optional(calling.mode != "NONE")


def _lower(schema: Any) -> Any:
    """Write the types of a schema, which Gemini has in capitals, in small letters."""
    if isinstance(schema, dict):
        return {
            name: value.lower() if name == "type" and isinstance(value, str) else _lower(value)
            for name, value in schema.items()
        }
    return [_lower(one) for one in schema] if isinstance(schema, list) else schema


class _Sent(NamedTuple):
    """A canonical message, and the fields in which it and its parts came."""

    message: Message
    field: str
    parts: list[str]


def _messages(content: Content, field: str) -> list[_Sent]:
    """The results of functions, each a message, and what else was said."""
    results: list[_Sent] = []
    others: list[tuple[int, Part]] = []
    for number, part in enumerate(content.parts):
        if part.function_response is None:
            others.append((number, part))
        else:
            results.append(_result(part.function_response, f"{field}.parts[{number}].functionResponse"))
    role: MessageRole = "assistant" if content.role == "model" else "user"
    return [*results, *([_said(role, others, field)] if others else [])]


def _result(given: FunctionResponse, field: str) -> _Sent:
    text = encode(given.response).decode()
    images = [_image(part.inline_data, f"{field}.parts[{at}]") for at, part in enumerate(given.parts)]
    parts = (ContentPart("text", text), *images) if images else ()
    message = Message("tool", text, given.name, tool_call_id=given.id or given.name, parts=parts)
    return _Sent(message, field, [f"{field}.response", *(f"{field}.parts[{at}]" for at in range(len(images)))])


def _said(role: MessageRole, given: Sequence[tuple[int, Part]], field: str) -> _Sent:
    parts: list[ContentPart] = []
    fields: list[str] = []
    for number, part in given:
        where = f"{field}.parts[{number}]"
        if part.inline_data is not None:
            parts.append(_image(part.inline_data, f"{where}.inlineData"))
        elif part.file_data is not None:
            parts.append(image_from_url(part.file_data.file_uri, f"{where}.fileData.fileUri"))
        elif part.text is not None and part.function_call is None and not part.thought:
            parts.append(ContentPart("text", part.text))
        if len(parts) > len(fields):
            fields.append(where)
    text = "".join(part.value for part in parts if part.kind == "text")
    calls = tuple(_tool_call(part) for _, part in given if part.function_call is not None)
    has_images = any(part.kind == "image" for part in parts)
    return _Sent(Message(role, text, tool_calls=calls, parts=tuple(parts) if has_images else ()), field, fields)


def _image(given: Blob, field: str) -> ContentPart:
    if not given.mime_type.startswith("image/"):
        raise Unsupported(f"`{field}` is {given.mime_type[:64]!r}; only text and images are supported", param=field)
    return image_from_base64(given.data, field)


def _tool_call(part: Part) -> ToolCall:
    call = part.function_call
    assert call is not None
    marks = {} if part.thought_signature is None else {"extra_content": signature_mark(part.thought_signature)}
    return ToolCall(call.id or call.name, call.name, encode(call.args).decode(), marks)


# --- the answer -------------------------------------------------------------------------------------------------------


def model_of(endpoint: str) -> str | None:
    """The model that the path of one of these calls names; None: it is another path."""
    found = _PATH.fullmatch(endpoint)
    return None if found is None else found[1]


async def generate_content(call: HttpExchange, model: str, endpoint: str) -> Response:
    assert call.wire is not None, "the gateway has read the body"
    given = call.wire.decode(_decoder)
    call.use_model(model)
    request, call.field_names = given.to_request(model, call.id, call.session)
    streams = endpoint.endswith(":streamGenerateContent")
    if streams and call.query.get("alt", "sse") != "sse":
        raise BadInput("a stream comes as server-sent events: add `alt=sse` to the query", param="alt")
    return await GEMINI.answer(call, request, call.run(request), streams=streams)


def content_body(request_id: str, body: GenerateRequest, created: int, answer: Answer) -> Json:
    choice = answer.choices[0]
    candidate = {"content": {"parts": _parts(choice), "role": "model"}, "index": 0}
    return _body(body.model, request_id, candidate | {"finishReason": _FINISH[choice.finish]}, answer.usage)


def _parts(choice: AnswerChoice) -> list[Json]:
    parts: list[Json] = [{"text": choice.reasoning, "thought": True}] if choice.reasoning else []
    if choice.text or not choice.tool_calls:
        parts.append({"text": choice.text})
    return [*parts, *map(_call_part, choice.tool_calls)]


def _call_part(call: ToolCall) -> Json:
    part: Json = {"functionCall": {"id": call.id, "name": call.name, "args": json_arguments(call) or {}}}
    signature = thought_signature(call.marks)
    return part if signature is None else part | {"thoughtSignature": signature}


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

    def __init__(self, request_id: str, dialect: Dialect, body: GenerateRequest, created: int) -> None:
        super().__init__(request_id, dialect)
        self._model = body.model
        self._finish = "STOP"
        self._calls: list[tuple[ToolCallStarted, list[str], Marks]] = []

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
        self._calls.append((event, [], {}))
        return b""

    def tool_call_delta(self, event: ToolCallDelta) -> bytes:
        self._calls[event.call][1].append(event.arguments)
        return b""

    def opaque(self, event: Opaque) -> bytes:
        if event.call is not None:
            self._calls[event.call][2][event.name] = event.value
        return b""

    def choice_done(self, event: ChoiceDone) -> bytes:
        self._finish = _FINISH[event.finish]
        parts = [_call_part(ToolCall(one.id, one.name, "".join(pieces), marks)) for one, pieces, marks in self._calls]
        return self._chunk(parts) if parts else b""

    def completed(self, usage: Usage) -> bytes:
        return self._chunk([{"text": ""}], self._finish, usage)


# The path names the model, so answers are written from the canonical request.
GEMINI = AnswerForm(to_body=content_body, to_stream=GeminiStream)
_decoder = msgspec.json.Decoder(GenerateContent)
