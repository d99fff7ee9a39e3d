"""The items of a response's input and output, and their conversion to canonical messages."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from emberline.api.common.image_parts import Detail, FileId, image_from_file, image_from_url
from emberline.api.common.unsupported_fields import unsupported
from emberline.api.http.decode_errors import explain
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import ContentPart, Message, ToolCall

SEAL = "ember1."  # prefix of `encrypted_content`: reasoning or a summary, which the client stores and sends back
CUSTOM_ARGUMENT = "input"  # the argument of the function that represents a custom tool
_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_[io][0-9]+")
# Fields of messages in other APIs, and where an item has the same.
_OTHER_APIS = {"images": "content[].image_url", "tool_calls": "input", "function_call": "input", "prefix": None}
_NOT_READ = frozenset({"input_file", "input_audio", "input_video", "computer_screenshot"})


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class PlainText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class InputImage(msgspec.Struct, tag_field="type", tag="input_image", omit_defaults=True):
    image_url: str | None = None
    file_id: FileId | None = None
    detail: Detail | None = None

    def part(self, field: str) -> ContentPart:
        if (self.image_url is None) == (self.file_id is None):
            raise BadInput(f"`{field}` needs either an `image_url` or a `file_id`", param=field)
        if self.file_id is not None:
            return image_from_file(self.file_id, self.detail)
        return image_from_url(self.image_url, f"{field}.image_url", self.detail)


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


TextContent = InputText | PlainText | OutputText | Refusal | SummaryText | ReasoningText
Content = TextContent | InputImage
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    status: Status | None = "completed"
    content: str | list[Content] | None = None
    # Labels of an agent's own: kept with the item, without effect on the prompt.
    phase: Literal["commentary", "final_answer"] | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def text(self) -> str:
        return _text(self.content, "" if self.role == "assistant" else "\n")


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True, omit_defaults=True):
    id: str | None = None
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    status: Status | None = None

    def tool_call(self) -> ToolCall:
        return ToolCall(self.call_id, tool_name(self.name, self.namespace), self.arguments)


class CustomToolCall(msgspec.Struct, tag_field="type", tag="custom_tool_call", kw_only=True, omit_defaults=True):
    id: str | None = None
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    status: Status | None = None

    def tool_call(self) -> ToolCall:
        arguments = msgspec.json.encode({CUSTOM_ARGUMENT: self.input}).decode()
        return ToolCall(self.call_id, tool_name(self.name, self.namespace), arguments)


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True):
    id: str | None = None
    call_id: str
    output: str | list[Content]
    status: Status | None = "completed"


class CustomToolCallOutput(FunctionCallOutput, tag="custom_tool_call_output", kw_only=True):
    pass


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str | None = None
    summary: list[TextContent] | None = []
    content: list[TextContent] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """The exact text we sealed, else the readable parts. Content encrypted by another provider is ignored."""
        return unseal(self.encrypted_content or "") or _text(self.content) or _text(self.summary)


class CompactionItem(msgspec.Struct, tag_field="type", tag="compaction", kw_only=True):
    """A summary in place of all that the model said and did until then."""

    id: str | None = None
    encrypted_content: str

    @property
    def text(self) -> str:
        return "Summary of our conversation so far:\n\n" + unseal(self.encrypted_content)


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference"):
    id: str


CallItem = FunctionCall | CustomToolCall
CallOutput = FunctionCallOutput | CustomToolCallOutput
Item = MessageItem | CallItem | CallOutput | ReasoningItem | CompactionItem
_ID_PREFIXES: dict[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
    "reasoning": "rs",
    "compaction": "cmp",
}

items_decoder = msgspec.json.Decoder(list[Item])


def parse_input(given: str | Sequence[dict[str, Any]] | None) -> list[Item | ItemReference]:
    """The items of a request's `input`; BadInput names the one that is wrong."""
    if not given:
        return []
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    typed = [_typed(raw, f"input[{i}]") for i, raw in enumerate(given)]
    try:
        return msgspec.convert(typed, list[Item | ItemReference])
    except msgspec.ValidationError as bad:
        message, field = explain(str(bad), "input", list[Item | ItemReference])
        raise BadInput(message, param=field) from None


def with_ids(items: Iterable[Item], key: str) -> list[Item]:
    """The items as they are stored and listed: each with an id, the text of messages as content parts."""
    stored: list[Item] = []
    for i, item in enumerate(items):
        if not item.id:
            item.id = item_id(str(item.__struct_config__.tag), key, f"i{i}")
        if isinstance(item, MessageItem) and not isinstance(item.content, list):
            text = item.content or ""
            item.content = [OutputText(text) if item.role == "assistant" else InputText(text)]
        stored.append(item)
    return stored


def item_id(kind: str, key: str, position: str) -> str:
    """An id that holds its response's key, so that a reference to the item is resolved without an index."""
    return f"{_ID_PREFIXES[kind]}_{key}_{position}"


def response_of(item_id: str) -> str | None:
    """The id of the response that has this item; None if the id was not made here."""
    found = _OWN_ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def tool_name(name: str, namespace: str | None) -> str:
    """The name of a tool as the model sees it."""
    return f"{namespace}__{name}" if namespace else name


def to_messages(items: Sequence[Item], fields: Sequence[str]) -> tuple[list[Message], list[str]]:
    """The canonical messages, and the field in which the client sent each.

    Consecutive items of the assistant (reasoning, text, calls) become one message, as they were one reply; but of two
    messages that directly follow each other, the second starts a new one.
    """
    replies: list[list[Message]] = []  # the parts of each message
    message_fields: list[str] = []
    calls: set[str] = set()
    last: Item | None = None
    for item, field in zip(items, fields, strict=True):
        if isinstance(item, CallItem) and item.status == "incomplete":  # cut off by the token limit: it never ran
            continue
        if isinstance(item, CallOutput):
            if item.call_id not in calls:
                raise BadInput(
                    f"`{field}` answers no call: there is none with the id {item.call_id[:80]!r}", param=field
                )
            parts = _parts(item.output, f"{field}.output")
            message = Message("tool", _text(item.output, "\n"), tool_call_id=item.call_id, parts=parts)
        elif isinstance(item, MessageItem) and item.role != "assistant":
            message = Message(item.role, item.text, parts=_parts(item.content, f"{field}.content"))
        elif isinstance(item, CompactionItem):
            if not item.encrypted_content.startswith(SEAL):
                problem = f"`{field}` was compacted by another server, and only that one can read it: send its items"
                raise BadInput(problem, param=field)
            message = Message("assistant", item.text)
        else:
            if isinstance(item, CallItem):
                calls.add(item.call_id)
            message = _assistant_message(item, field)
            if last is not None and _same_reply(last, item):
                replies[-1].append(message)
                last = item
                continue
        replies.append([message])
        message_fields.append(field)
        last = item
    return [parts[0] if len(parts) == 1 else _joined(parts) for parts in replies], message_fields


def seal(reasoning: str) -> str:
    """Opaque to clients but not secret: reasoning they have seen, and the summary is of their own conversation."""
    return SEAL + urlsafe_b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str:
    if not sealed.startswith(SEAL):
        return ""
    try:
        return urlsafe_b64decode(sealed[len(SEAL) :]).decode()
    except ValueError:
        raise BadInput("`encrypted_content` was altered: send it back unchanged", param="input") from None


def _typed(raw: dict[str, Any], field: str) -> dict[str, Any]:
    kind = raw.get("type")
    if kind is None:
        kind = "item_reference" if raw.keys() <= {"id", "type"} else "message"
    if not isinstance(kind, str):
        raise BadInput(f"`{field}.type` must be a text", param=f"{field}.type")
    if kind not in _ID_PREFIXES and kind != "item_reference":
        raise Unsupported(f"`{field}`: items of type {kind[:80]!r} are not supported", param=f"{field}.type")
    if kind == "message":
        for name, alternative in _OTHER_APIS.items():
            if raw.get(name):
                raise unsupported(f"{field}.{name}", alternative)
    for name in ("content", "output"):
        parts = raw.get(name)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and part.get("type") in _NOT_READ:
                where = f"{field}.{name}[{i}]"
                message = f"`{where}`: {part['type']} is not supported, only text and images are"
                raise Unsupported(message, param=f"{where}.type")
    return {**raw, "type": kind}


def _text(content: str | Sequence[Content] | None, separator: str = "") -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return separator.join(part.text for part in content if not isinstance(part, InputImage))


def _parts(content: str | Sequence[Content] | None, field: str) -> tuple[ContentPart, ...]:
    """The content as canonical parts, if it has images: otherwise its text says everything."""
    if isinstance(content, str) or content is None or not any(isinstance(part, InputImage) for part in content):
        return ()
    return tuple(
        part.part(f"{field}[{at}]") if isinstance(part, InputImage) else ContentPart("text", part.text)
        for at, part in enumerate(content)
    )


def _assistant_message(item: Item, field: str) -> Message:
    """The canonical message of one item of the assistant. Raises BadInput for an image, which no reply can contain."""
    if isinstance(item, ReasoningItem):
        return Message("assistant", "", reasoning=item.text or None)
    if isinstance(item, CallItem):
        return Message("assistant", "", tool_calls=(item.tool_call(),))
    assert isinstance(item, MessageItem)
    for at, part in enumerate(item.content if isinstance(item.content, list) else ()):
        if isinstance(part, InputImage):
            where = f"{field}.content[{at}]"
            message = f"`{where}`: images are for messages of the user and of tools, not of the assistant"
            raise BadInput(message, param=where)
    return Message("assistant", item.text)


def _same_reply(last: Item, item: Item) -> bool:
    if isinstance(last, CallOutput | CompactionItem) or (isinstance(last, MessageItem) and last.role != "assistant"):
        return False
    return not (isinstance(last, MessageItem) and isinstance(item, MessageItem))


def _joined(parts: Sequence[Message]) -> Message:
    reasoning = "".join(part.reasoning or "" for part in parts) or None
    calls = tuple(call for part in parts for call in part.tool_calls)
    return Message("assistant", "".join(part.content for part in parts), tool_calls=calls, reasoning=reasoning)
