"""Chat messages: the OpenAI and Workers AI formats converted to the canonical one."""

from collections import defaultdict, deque
from typing import Any, Literal

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message, ToolCall


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class RefusalContent(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCallField(msgspec.Struct, kw_only=True):
    """A tool call of an earlier turn: OpenAI's nested format, or Workers AI's flat one."""

    id: str | None = None
    function: CalledFunction | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextContent | RefusalContent] | None = None
    name: str | None = None
    tool_calls: list[ToolCallField] | None = None
    function_call: CalledFunction | None = None  # from clients that use the deprecated `functions`
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def canonical_messages(messages: list[ChatMessage]) -> tuple[Message, ...]:
    if not messages:
        raise BadInput("`messages` is empty; send at least one message", param="messages")
    matcher = _ResultMatcher()
    return tuple(_message(message, matcher, f"messages[{i}]") for i, message in enumerate(messages))


def join_text(texts: list[str]) -> str:
    """The text parts of one message as one text, one line each."""
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
        return ToolCall(call.id or f"call_{self._n_calls - 1}", function.name, arguments)

    def made(self, calls: tuple[ToolCall, ...]) -> None:
        self._unanswered = dict(enumerate(calls))
        self._by_id.clear()
        self._by_name.clear()
        for number, call in self._unanswered.items():
            for numbers in (self._by_id[call.id], self._by_name[call.name], self._by_name[None]):
                numbers.append(number)

    def result(self, call_id: str | None, name: str | None) -> str | None:
        """The id of the call that a result answers. An unknown one is returned as it is: the service refuses it."""
        numbers = self._by_id.get(call_id) if call_id else self._by_name.get(name)
        while numbers:
            call = self._unanswered.pop(numbers.popleft(), None)  # None: another result has answered it
            if call is not None:
                return call.id
        return call_id


def _message(message: ChatMessage, matcher: _ResultMatcher, field: str) -> Message:
    content = message.content
    if isinstance(content, list):
        content = join_text([part.text if isinstance(part, TextContent) else part.refusal for part in content])
    content = content or ""
    if message.role == "tool" or message.role == "function":
        call_id = matcher.result(message.tool_call_id, message.name)
        return Message("tool", content, message.name, tool_call_id=call_id)
    given = [(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        given.append((ToolCallField(function=message.function_call), f"{field}.function_call"))
    calls = tuple(matcher.call(call, where) for call, where in given)
    if message.role == "assistant":
        matcher.made(calls)
    reasoning = message.reasoning_content or message.reasoning
    return Message(message.role, content, message.name, calls, message.tool_call_id, reasoning)
