"""Chat messages from OpenAI's and Cloudflare's form into the canonical one."""

from typing import Any

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message, Role, ToolCall


class Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class CalledTool(msgspec.Struct, kw_only=True):
    """A call of an earlier turn: OpenAI's nested form, or Cloudflare's flat one."""

    id: str = ""
    function: Function | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Role
    content: str | list[Text | Refusal] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None


def canonical(messages: list[ChatMessage]) -> tuple[Message, ...]:
    if not messages:
        raise BadInput("`messages` is empty; send at least one message", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def join_text(texts: list[str]) -> str:
    """Several text parts of one message are one text, a line each."""
    return "\n".join(texts)


def _message(message: ChatMessage, where: str) -> Message:
    content = message.content
    if isinstance(content, list):
        content = join_text([part.text if isinstance(part, Text) else part.refusal for part in content])
    calls = tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ()))
    return Message(message.role, content or "", message.name, calls, message.tool_call_id)


def _tool_call(call: CalledTool, where: str) -> ToolCall:
    function = call.function or (Function(call.name, call.arguments or "") if call.name else None)
    if function is None:
        raise BadInput(f"`{where}` names no function", param=where)
    arguments = function.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(call.id, function.name, arguments)
