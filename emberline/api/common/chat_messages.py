"""Chat messages: the OpenAI and Workers AI formats converted to the canonical one."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from emberline.api.common.image_parts import Detail, image_from_url
from emberline.api.common.unsupported_fields import NotDocumented, PeerMessageFields, ProviderMark, refuse_unsupported
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import ContentPart, Marks, Message, ToolCall


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    cache_control: ProviderMark = None


class RefusalContent(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class ImageUrl(msgspec.Struct):
    url: str
    detail: Detail | None = None


class ImageContent(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: str | ImageUrl
    cache_control: ProviderMark = None

    def part(self, field: str) -> ContentPart:
        given = self.image_url if isinstance(self.image_url, ImageUrl) else ImageUrl(self.image_url)
        return image_from_url(given.url, f"{field}.image_url", given.detail, marks(self))


class FileContent(msgspec.Struct, tag_field="type", tag="file"):
    file: dict[str, Any] | None = None
    cache_control: Any = None

    def part(self, field: str) -> ContentPart | None:
        file = self.file or {}
        data, name = file.get("file_data"), file.get("filename")
        if not isinstance(data, str) or not data:
            return None
        return ContentPart("file", data, name if isinstance(name, str) else "", marks(self))


class AudioContent(msgspec.Struct, tag_field="type", tag="input_audio"):
    input_audio: dict[str, Any] | None = None

    def part(self, field: str) -> ContentPart | None:
        audio = self.input_audio or {}
        data, form = audio.get("data"), audio.get("format")
        if not isinstance(data, str) or not isinstance(form, str):
            return None
        return ContentPart("audio", f"data:audio/{form};base64,{data}")


class VideoContent(msgspec.Struct, tag_field="type", tag="video_url"):
    video_url: Any = None

    def part(self, field: str) -> ContentPart | None:
        return None


NO_PARTS: tuple[ContentPart, ...] = ()
TextPart = TextContent | RefusalContent
# Parts that our engines refuse; upstream servers and providers may take them. `part` returns None for what no provider
# could be sent.
ProviderPart = FileContent | AudioContent | VideoContent
MediaPart = ImageContent | ProviderPart


class AnyContent(msgspec.Struct):
    """A part for a provider: a text, if it has no type."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    file: dict[str, Any] | None = None
    input_audio: dict[str, Any] | None = None
    cache_control: Any = None

    def typed(self, field: str) -> TextPart | MediaPart:
        """The part as the struct of its type. Raises Unsupported for a type that no provider takes."""
        match self.type:
            case "text" | "refusal":
                return TextContent(self.text or self.refusal or "", self.cache_control)
            case "image_url":
                return ImageContent(self.image_url or "", self.cache_control)
            case "file":
                return FileContent(self.file, self.cache_control)
            case "input_audio":
                return AudioContent(self.input_audio)
        field += ".type"
        raise Unsupported(f"`{field}`: a {self.type[:64]!r} cannot be sent to this model's server", param=field)


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCallField(msgspec.Struct, kw_only=True):
    """A tool call of an earlier turn: OpenAI's nested format, or Workers AI's flat one."""

    id: str | None = None
    function: CalledFunction | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    extra_content: ProviderMark = None


class ChatMessage(PeerMessageFields, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart | ImageContent | Annotated[ProviderPart, NotDocumented]] | None = None
    name: str | None = None
    tool_calls: list[ToolCallField] | None = None
    function_call: CalledFunction | None = None  # from clients that use the deprecated `functions`
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking_blocks: ProviderMark = None
    cache_control: ProviderMark = None


class AnyMessage(ChatMessage, kw_only=True):
    """A message for a provider."""

    content: str | list[AnyContent] | None = None  # type: ignore[assignment]
    thinking_blocks: list[Any] | None = None


def marks(field: Any, *names: str) -> Marks:
    """The values of a field that only providers read, by name: `cache_control`, if no names are given."""
    return {name: value for name in names or ("cache_control",) if (value := getattr(field, name)) is not None}


def canonical_messages(messages: Sequence[ChatMessage], takes_media: bool = False) -> tuple[Message, ...]:
    """Convert messages. Media other than images are refused unless `takes_media`; then a message keeps all its parts as
    they came."""
    if not messages:
        raise BadInput("`messages` is empty; send at least one message", param="messages")
    matcher = _ResultMatcher()
    return tuple(_message(message, matcher, f"messages[{i}]", takes_media) for i, message in enumerate(messages))


def join_text(texts: list[str]) -> str:
    """Join the text parts of one message into one text, one line each."""
    return "\n".join(texts)


class _ResultMatcher:
    """Matches tool results to tool calls; where a client sends no ids, by name and in order."""

    def __init__(self) -> None:
        self._n_calls = 0
        # Calls of the last turn of the assistant, by number in order, and the numbers of those that a result may mean.
        self._unanswered: dict[int, ToolCall] = {}
        self._by_id: defaultdict[str, deque[int]] = defaultdict(deque)
        self._by_name: defaultdict[str | None, deque[int]] = defaultdict(deque)  # None: of any name

    def call(self, call: ToolCallField, field: str) -> ToolCall:
        function = call.function or (CalledFunction(call.name, call.arguments or "") if call.name else None)
        if function is None:
            raise BadInput(f"`{field}` names no function", param=field)
        arguments = function.arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        self._n_calls += 1
        call_id = call.id or f"call_{self._n_calls - 1}"
        return ToolCall(call_id, function.name, arguments, marks(call, "extra_content"))

    def made(self, calls: tuple[ToolCall, ...]) -> None:
        self._unanswered = dict(enumerate(calls))
        self._by_id.clear()
        self._by_name.clear()
        for number, call in self._unanswered.items():
            for numbers in (self._by_id[call.id], self._by_name[call.name], self._by_name[None]):
                numbers.append(number)

    def result(self, call_id: str | None, name: str | None) -> str | None:
        """Returns the id of the call that a result answers. An unknown id stays as it is: the service refuses it."""
        numbers = self._by_id.get(call_id) if call_id else self._by_name.get(name)
        while numbers:
            call = self._unanswered.pop(numbers.popleft(), None)  # None: another result has answered it
            if call is not None:
                return call.id
        return call_id


def _message(message: ChatMessage, matcher: _ResultMatcher, field: str, takes_media: bool) -> Message:
    content, parts = message.content or "", NO_PARTS
    if isinstance(content, list):
        content, parts = _content(content, f"{field}.content", takes_media)
    if message.images or message.prefix:
        refuse_unsupported(message, f"{field}.")
    kept: Marks = {}
    if message.cache_control is not None or message.thinking_blocks is not None:
        kept = marks(message, "cache_control", "thinking_blocks")
    if message.role == "tool" or message.role == "function":
        call_id = matcher.result(message.tool_call_id, message.name)
        return Message("tool", content, message.name, tool_call_id=call_id, parts=parts, marks=kept)
    given = [(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        given.append((ToolCallField(function=message.function_call), f"{field}.function_call"))
    calls = tuple(matcher.call(call, where) for call, where in given)
    if message.role == "assistant":
        matcher.made(calls)
    reasoning = message.reasoning_content or message.reasoning
    return Message(message.role, content, message.name, calls, message.tool_call_id, reasoning, parts, kept)


def _content(
    given: Sequence[TextPart | MediaPart | AnyContent], field: str, takes_media: bool
) -> tuple[str, tuple[ContentPart, ...]]:
    """The text of a list of parts, and the parts, unless the text says everything."""
    parts: list[ContentPart] = []
    for number, part_given in enumerate(given):
        where = f"{field}[{number}]"
        one = part_given.typed(where) if isinstance(part_given, AnyContent) else part_given
        if isinstance(one, ImageContent):
            parts.append(one.part(where))
        elif isinstance(one, ProviderPart):
            kind, where = str(one.__struct_config__.tag), f"{where}.type"
            if not takes_media:
                message = f"`{where}` has the value {kind!r}, which is not supported; only text and images are"
                raise BadInput(message, param=where)
            if (part := one.part(where)) is None:
                raise Unsupported(f"`{where}`: such a {kind!r} cannot be sent to this model's server", param=where)
            parts.append(part)
        elif isinstance(one, TextContent):
            parts.append(ContentPart("text", one.text, marks=marks(one)))
        else:
            parts.append(ContentPart("text", one.refusal))
    text = join_text([part.value for part in parts if part.kind == "text"])
    says_all = not takes_media and all(part.kind == "text" and not part.marks for part in parts)
    return text, () if says_all else tuple(parts)
