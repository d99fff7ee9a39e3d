"""Chat messages from OpenAI's and Cloudflare's form into the canonical one."""

from typing import Any, Literal

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message, ToolCall


class Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class CalledTool(msgspec.Struct, kw_only=True):
    """A call of an earlier turn: OpenAI's nested form, or Cloudflare's flat one."""

    id: str | None = None
    function: Function | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Text | Refusal] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    function_call: Function | None = None  # of those who still send `functions`
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def canonical(messages: list[ChatMessage]) -> tuple[Message, ...]:
    if not messages:
        raise BadInput("`messages` is empty; send at least one message", param="messages")
    pairs = _Pairs()
    return tuple(_message(message, pairs, f"messages[{i}]") for i, message in enumerate(messages))


def join_text(texts: list[str]) -> str:
    """Several text parts of one message are one text, a line each."""
    return "\n".join(texts)


class _Pairs:
    """Which result answers which call, where a dialect leaves the ids out: by name, in order."""

    def __init__(self) -> None:
        self._n_calls = 0
        self._open: list[ToolCall] = []  # of the last turn with calls, those without a result

    def call(self, call: CalledTool, where: str) -> ToolCall:
        function = call.function or (Function(call.name, call.arguments or "") if call.name else None)
        if function is None:
            raise BadInput(f"`{where}` names no function", param=where)
        arguments = function.arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        made = ToolCall(call.id or f"call_{self._n_calls}", function.name, arguments)
        self._n_calls += 1
        return made

    def called(self, calls: tuple[ToolCall, ...]) -> None:
        self._open = list(calls)

    def result(self, call_id: str | None, name: str | None) -> str | None:
        """The id of the call that a result answers; None: there is no such call, which the service will say."""
        for call in self._open:
            if call.id == call_id or (not call_id and name in (None, call.name)):
                self._open.remove(call)
                return call.id
        return call_id


def _message(message: ChatMessage, pairs: _Pairs, where: str) -> Message:
    content = message.content
    if isinstance(content, list):
        content = join_text([part.text if isinstance(part, Text) else part.refusal for part in content])
    content = content or ""
    if message.role == "tool" or message.role == "function":
        answered = pairs.result(message.tool_call_id, message.name)
        return Message("tool", content, message.name, tool_call_id=answered)
    called = [(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        called.append((CalledTool(function=message.function_call), f"{where}.function_call"))
    calls = tuple(pairs.call(call, here) for call, here in called)
    if message.role == "assistant":
        pairs.called(calls)
    reasoning = message.reasoning_content or message.reasoning
    return Message(message.role, content, message.name, calls, message.tool_call_id, reasoning)
