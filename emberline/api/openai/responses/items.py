"""The items of a response's input and output, and the conversation that they make."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from emberline.api.common.messages import join_text
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import Message, ToolCall

SEAL = "ember1."  # before reasoning that a client carries for us
CUSTOM_ARGUMENT = "input"  # what a custom tool's text is called where the model sees it as a function
_PATH = re.compile(r"`\$\.([^`]*)`$")
_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_[io][0-9]+")
_NOT_TEXT = frozenset({"input_image", "input_file", "input_audio", "computer_screenshot"})


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class PlainText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


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


Part = InputText | PlainText | OutputText | Refusal | SummaryText | ReasoningText
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    status: Status | None = "completed"
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        return _text(self.content, "" if self.role == "assistant" else None)


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True, omit_defaults=True):
    id: str | None = None
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    status: Status | None = None

    def called(self) -> ToolCall:
        return ToolCall(self.call_id, tool_name(self.name, self.namespace), self.arguments)


class CustomToolCall(msgspec.Struct, tag_field="type", tag="custom_tool_call", kw_only=True, omit_defaults=True):
    id: str | None = None
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    status: Status | None = None

    def called(self) -> ToolCall:
        arguments = msgspec.json.encode({CUSTOM_ARGUMENT: self.input}).decode()
        return ToolCall(self.call_id, tool_name(self.name, self.namespace), arguments)


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True):
    id: str | None = None
    call_id: str
    output: str | list[Part]
    status: Status | None = "completed"


class CustomToolCallOutput(msgspec.Struct, tag_field="type", tag="custom_tool_call_output", kw_only=True):
    id: str | None = None
    call_id: str
    output: str | list[Part]
    status: Status | None = "completed"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str | None = None
    summary: list[Part] | None = []
    content: list[Part] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """What we sealed, exactly; else what is there to read. Another provider's seal says nothing to us."""
        return unseal(self.encrypted_content or "") or _text(self.content, "") or _text(self.summary, "")


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference"):
    id: str


Call = FunctionCall | CustomToolCall
Output = FunctionCallOutput | CustomToolCallOutput
Item = MessageItem | Call | Output | ReasoningItem
_KINDS: dict[str, str] = {  # and how their ids begin
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
    "reasoning": "rs",
}

items_decoder = msgspec.json.Decoder(list[Item])


def parse(given: str | Sequence[dict[str, Any]] | None) -> list[Item | ItemReference]:
    """A request's `input`; what cannot be read is refused by its place in it."""
    if not given:
        return []
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    typed = [_typed(raw, f"input[{i}]") for i, raw in enumerate(given)]
    try:
        return msgspec.convert(typed, list[Item | ItemReference])
    except msgspec.ValidationError as bad:
        text = str(bad).replace("`$", "`$.input", 1)
        where = _PATH.search(text)
        raise BadInput(text, param=where[1] if where else "input") from None


def settle(items: Iterable[Item], key: str) -> list[Item]:
    """The items as they are kept and listed: each with an id, a message's text in parts."""
    settled: list[Item] = []
    for i, item in enumerate(items):
        if not item.id:
            item.id = item_id(str(item.__struct_config__.tag), key, f"i{i}")
        if isinstance(item, MessageItem) and not isinstance(item.content, list):
            text = item.content or ""
            item.content = [OutputText(text) if item.role == "assistant" else InputText(text)]
        settled.append(item)
    return settled


def item_id(kind: str, key: str, place: str) -> str:
    """Holds the response's key, so that a reference to the item finds it without an index."""
    return f"{_KINDS[kind]}_{key}_{place}"


def response_of(item: str) -> str | None:
    """The id of the response that has this item of ours; None: the id is not one of ours."""
    found = _OWN_ID.fullmatch(item)
    return f"resp_{found[1]}" if found else None


def tool_name(name: str, namespace: str | None) -> str:
    """The one name under which the model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def conversation(items: Sequence[Item], where: Sequence[str]) -> tuple[list[Message], list[str]]:
    """The canonical messages, and where the caller wrote each.

    All that the assistant did between two items of others (thoughts, text, calls) is one message, as it was one reply;
    only of two messages that directly follow each other the second stands alone.
    """
    messages: list[Message] = []
    places: list[str] = []
    calls: set[str] = set()
    last: Item | None = None
    for item, place in zip(items, where, strict=True):
        if isinstance(item, Call) and item.status == "incomplete":  # cut by the token limit: it was never made
            continue
        if isinstance(item, Output):
            if item.call_id not in calls:
                raise BadInput(f"`{place}` answers no call: there is none with the id {item.call_id!r}", param=place)
            message = Message("tool", _text(item.output, None), tool_call_id=item.call_id)
        elif isinstance(item, MessageItem) and item.role != "assistant":
            message = Message(item.role, item.text)
        else:
            if isinstance(item, Call):
                calls.add(item.call_id)
            message = _done(item)
            if last is not None and _same_reply(last, item):
                messages[-1] = _joined(messages[-1], message)
                last = item
                continue
        messages.append(message)
        places.append(place)
        last = item
    return messages, places


def seal(reasoning: str) -> str:
    """Opaque to clients, and no secret: they have been shown the text."""
    return SEAL + urlsafe_b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str:
    if not sealed.startswith(SEAL):
        return ""
    try:
        return urlsafe_b64decode(sealed[len(SEAL) :]).decode()
    except ValueError:
        raise BadInput("`encrypted_content` was altered: send it back as it came", param="input") from None


def _typed(raw: dict[str, Any], where: str) -> dict[str, Any]:
    kind = raw.get("type")
    if kind is None:
        kind = "item_reference" if raw.keys() <= {"id", "type"} else "message"
    if not isinstance(kind, str) or (kind not in _KINDS and kind != "item_reference"):
        raise Unsupported(f"`{where}`: items of type {kind!r} are not supported", param=f"{where}.type")
    for field in ("content", "output"):
        parts = raw.get(field)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and part.get("type") in _NOT_TEXT:
                here = f"{where}.{field}[{i}]"
                raise Unsupported(f"`{here}`: {part['type']} is not supported, only text is", param=f"{here}.type")
    return {**raw, "type": kind}


def _text(content: str | Sequence[Part] | None, between: str | None) -> str:
    """`between` None: parts are lines, as in every dialect."""
    if isinstance(content, str) or content is None:
        return content or ""
    texts = [part.text for part in content]
    return join_text(texts) if between is None else between.join(texts)


def _done(item: Item) -> Message:
    """One item of the assistant's as a message of its own."""
    if isinstance(item, ReasoningItem):
        return Message("assistant", "", reasoning=item.text or None)
    if isinstance(item, Call):
        return Message("assistant", "", tool_calls=(item.called(),))
    assert isinstance(item, MessageItem)
    return Message("assistant", item.text)


def _same_reply(last: Item, item: Item) -> bool:
    if isinstance(last, Output) or (isinstance(last, MessageItem) and last.role != "assistant"):
        return False
    return not (isinstance(last, MessageItem) and isinstance(item, MessageItem))


def _joined(one: Message, two: Message) -> Message:
    reasoning = (one.reasoning or "") + (two.reasoning or "") or None
    calls = one.tool_calls + two.tool_calls
    return Message("assistant", one.content + two.content, tool_calls=calls, reasoning=reasoning)
