"""OpenAI's chat form, as the translators read and write it: the turns of a request, and the chunks of a reply."""

import re
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from emberline.protocol.errors import BadInput, Unsupported
from emberline.upstream.dialects.sse import MAX_LINE_BYTES, MalformedLine

Json = dict[str, Any]

# --- requests ---------------------------------------------------------------------------------------------------------

# Bookkeeping of the client, and hints: without them the reply is the same. The model and the stream are the caller's.
_NO_EFFECT = frozenset(
    {
        *("model", "stream", "stream_options", "service_tier", "usage", "metadata", "store", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "verbosity"),
    }
)
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})  # values that ask for nothing
_DATA_URI = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,")
_MAX_MIME_CHARS = 100


class ImageUrl(msgspec.Struct):
    url: str


class FilePart(msgspec.Struct):
    file_data: str | None = None
    filename: str | None = None


class AudioPart(msgspec.Struct):
    data: str
    format: str


class Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    file: FilePart | None = None
    input_audio: AudioPart | None = None
    cache_control: Any = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | Json = ""


class TurnToolCall(msgspec.Struct):
    function: CalledFunction
    id: str = ""
    extra_content: Any = None  # Google's: what a model needs to get back with the call


class Turn(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[TurnToolCall] | None = None
    function_call: Any = None
    tool_call_id: str | None = None
    thinking_blocks: list[Any] | None = None  # Anthropic's signed thinking, in the form that gateways pass it in
    cache_control: Any = None

    @property
    def parts(self) -> list[Part]:
        """Without empty texts, which providers refuse."""
        content = self.content
        if isinstance(content, str):
            return [Part(text=content)] if content else []
        return [part for part in content or () if part.type != "text" or part.text]


class Function(msgspec.Struct):
    name: str
    description: str = ""
    parameters: Json | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct):
    type: str = "function"
    function: Function | None = None
    cache_control: Any = None


class Schema(msgspec.Struct):
    schema: Json = {}
    name: str = ""
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


def refuse_others(provider: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Unsupported names a field that the provider's API lacks, unless it asks for nothing."""
    for name, value in fields.items():
        if name in known or name in _NO_EFFECT or any(value is item or value == item for item in _NOTHING):
            continue
        if name == "n" and value == 1:
            continue
        raise unsupported(provider, name)


def unsupported(provider: str, field: str, hint: str = "") -> Unsupported:
    return Unsupported(f"provider {provider} has no `{field}`{hint and '; ' + hint}", param=field)


def turns_of(fields: Mapping[str, Any]) -> list[Turn]:
    turns: list[Turn] = convert(fields.get("messages"), list[Turn], "messages")
    for number, turn in enumerate(turns):
        if turn.function_call is not None or turn.role == "function":
            raise Unsupported("`function_call` is the older form: send `tool_calls`", param=f"messages[{number}]")
    return turns


def tools_of(provider: str, fields: Mapping[str, Any]) -> list[tuple[Function, FunctionTool]]:
    if fields.get("functions"):
        raise Unsupported("`functions` is the older form of `tools`; send that", param="functions")
    tools: list[FunctionTool] = convert(fields.get("tools") or [], list[FunctionTool], "tools")
    found: list[tuple[Function, FunctionTool]] = []
    for number, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise unsupported(provider, f"tools[{number}].type", "it must be a function")
        found.append((tool.function, tool))
    return found


def tool_choice_of(provider: str, fields: Mapping[str, Any]) -> tuple[str, str]:
    """auto, none, required or function, and that function's name."""
    choice = fields.get("tool_choice") or "auto"
    if choice in ("auto", "none", "required"):
        return str(choice), ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = (choice.get("function") or {}).get("name")
        if isinstance(name, str):
            return "function", name
    raise unsupported(provider, "tool_choice", "it is auto, none, required or a function")


def format_of(fields: Mapping[str, Any]) -> ResponseFormat:
    given = fields.get("response_format")
    return convert(given, ResponseFormat, "response_format") if given else ResponseFormat("text")


def stops_of(fields: Mapping[str, Any]) -> list[str]:
    stop = fields.get("stop") or []
    stops: list[str] = convert([stop] if isinstance(stop, str) else stop, list[str], "stop")
    return stops


def thinking_of(fields: Mapping[str, Any]) -> bool | None:
    """True or False if `chat_template_kwargs`, as every API here writes it, turns thinking on or off; else None."""
    kwargs = fields.get("chat_template_kwargs") or {}
    for name in kwargs:
        if name not in ("enable_thinking", "thinking"):
            raise Unsupported(f"`{name}` is for a chat template, which providers do not take", param=name)
    value = kwargs.get("enable_thinking", kwargs.get("thinking"))
    return None if value is None else bool(value)


def arguments_of(call: TurnToolCall, where: str) -> Json:
    """Arguments of an earlier tool call, as an object."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            raise BadInput(f"the arguments of {call.function.name[:64]} are not JSON", param=where) from None
    if not isinstance(arguments, dict):
        raise BadInput(f"the arguments of {call.function.name[:64]} are not an object", param=where)
    return arguments


def image_url(part: Part) -> str:
    return part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url or ""


def data_uri(text: str, where: str) -> tuple[str, str]:
    """MIME type and base64 of a data: URL; the base64 is not decoded here."""
    found = _DATA_URI.match(text[: _MAX_MIME_CHARS + 20])
    if found is None:
        raise BadInput("media must be data:<type>;base64,… URLs", param=where)
    return found[1], text[found.end() :]


def convert(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadInput(f"`{where}`: {error}", param=where) from None


# --- replies ----------------------------------------------------------------------------------------------------------


class EventParser:
    """Cuts a stream into the data of its events. What is not whole at the end is not an event."""

    def __init__(self) -> None:
        self._tail: list[bytes] = []  # the pieces of a line that has not ended yet
        self._n_tail_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        cut = data.rfind(b"\n") + 1
        lines: list[bytes] = []
        if cut:
            lines = b"".join((*self._tail, data[:cut])).split(b"\n")
            self._tail, self._n_tail_bytes = [], 0
        if cut < len(data):
            self._tail.append(data[cut:])
            self._n_tail_bytes += len(data) - cut
            if self._n_tail_bytes > MAX_LINE_BYTES:
                raise MalformedLine(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def read(data: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedLine(f"an event that cannot be read: {error}") from None


_encode = msgspec.json.Encoder().encode
_MORE = b',"finish_reason":null}]}\n\n'


class ChunkWriter:
    """Writes the chunks of one reply."""

    def __init__(self, model: str) -> None:
        self._created = int(time.time())
        self.begin(f"chatcmpl-{uuid.uuid4().hex}", model)

    def begin(self, reply_id: str, model: str) -> None:
        """The reply's own id and model, once they are known."""
        head = {"id": reply_id, "object": "chat.completion.chunk", "created": self._created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._text = self._head + b'{"index":0,"delta":{"content":'

    def text(self, index: int, text: str) -> bytes:
        if index == 0:
            return self._text + _encode(text) + b"}" + _MORE
        return self.delta(index, {"content": text})

    def delta(self, index: int, delta: Json) -> bytes:
        return self._head + b'{"index":%d,"delta":' % index + _encode(delta) + _MORE

    def call(self, index: int, number: int, call_id: str, name: str, arguments: str = "", extra: Any = None) -> bytes:
        function = {"name": name, "arguments": arguments}
        call: Json = {"index": number, "id": call_id, "type": "function", "function": function}
        if extra is not None:
            call["extra_content"] = extra
        return self.delta(index, {"tool_calls": [call]})

    def arguments(self, index: int, number: int, piece: str) -> bytes:
        return self.delta(index, {"tool_calls": [{"index": number, "function": {"arguments": piece}}]})

    def finish(self, index: int, reason: str, stop: str | None = None) -> bytes:
        choice: Json = {"index": index, "delta": {}, "finish_reason": reason}
        if stop is not None:
            choice["stop_reason"] = stop
        return self._head + _encode(choice) + b"]}\n\n"

    def usage(self, prompt: int, cached: int, written: int, output: int, reasoning: int) -> bytes:
        """`prompt` includes the cached tokens and those written to the cache."""
        details: Json = {"cached_tokens": cached}
        if written:
            details["cache_creation_tokens"] = written
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": details,
        }
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"


def error_line(message: str, code: int) -> bytes:
    return b"data: " + _encode({"error": {"message": message, "code": code}}) + b"\n\n"
