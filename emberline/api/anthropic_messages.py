"""Anthropic's messages: the body, and its way into the canonical request."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.call import Call
from emberline.api.fields import (
    LEAST_TOP_P,
    StopStrings,
    TokenCount,
    Unbuilt,
    refuse_unbuilt,
    session_name,
    unsupported,
)
from emberline.api.messages import join_text
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import GenerateRequest, Message, SamplingParams, ToolCall


class Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class OnlyText(msgspec.Struct):
    """A text block where no other kind is taken."""

    type: Literal["text"]
    text: str


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[OnlyText] | None = None


class Thought(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier turn: accepted, and not shown to the model again."""


class HiddenThought(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """The same, encrypted by who made it."""


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Text | ToolUse | ToolResult | Thought | HiddenThought]


class Metadata(msgspec.Struct):
    user_id: str | None = None


class Thinking(msgspec.Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["disabled"]})] = "disabled"


class ToolChoice(msgspec.Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none"]})]


class CountRequest(msgspec.Struct, kw_only=True):
    """What both the messages and the token-counting call have."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[OnlyText] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    tools: Unbuilt = None
    mcp_servers: Unbuilt = None
    container: Unbuilt = None
    output_format: Unbuilt = None
    output_config: Unbuilt = None

    def to_request(self, call: Call) -> GenerateRequest:
        return self._request(call, SamplingParams(), None)

    def _request(self, call: Call, sampling: SamplingParams, session: str | None) -> GenerateRequest:
        refuse_unbuilt(self)
        if self.thinking is not None and self.thinking.type != "disabled":
            raise unsupported("thinking")
        if self.tool_choice is not None and self.tool_choice.type not in ("auto", "none"):
            raise unsupported("tool_choice")
        messages = _canonical(self.system, self.messages)
        return GenerateRequest(id=call.id, model=self.model, messages=messages, sampling=sampling, session=session)


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: TokenCount | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    stop_sequences: StopStrings | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def to_request(self, call: Call) -> GenerateRequest:
        if self.messages[-1].role == "assistant":
            raise Unsupported("continuing a last message of the assistant is not supported yet", param="messages")
        sampling = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            top_k=self.top_k or 0,
            stop=tuple(self.stop_sequences or ()),
        )
        return self._request(call, sampling, session_name(call, self.metadata.user_id if self.metadata else None))


def _canonical(system: str | list[OnlyText] | None, turns: list[Turn]) -> tuple[Message, ...]:
    messages: list[Message] = []
    if system:
        messages.append(Message("system", _text(system)))
    for number, turn in enumerate(turns):
        messages += _messages(turn, f"messages[{number}].content")
    return tuple(messages)


def _messages(turn: Turn, where: str) -> list[Message]:
    """A turn as canonical messages: each tool result is a message of its own, before what the user says beside it."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    results: list[Message] = []
    calls: list[ToolCall] = []
    texts: list[str] = []
    for number, block in enumerate(turn.content):
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, ToolResult) and turn.role == "user":
            results.append(Message("tool", _text(block.content or ""), tool_call_id=block.tool_use_id))
        elif isinstance(block, ToolUse) and turn.role == "assistant":
            calls.append(ToolCall(block.id, block.name, msgspec.json.encode(block.input).decode()))
        elif isinstance(block, ToolResult | ToolUse):
            here = f"{where}[{number}]"
            raise BadInput(f"`{here}` does not belong to a turn of the {turn.role}", param=here)
    if texts or calls or not results:
        results.append(Message(turn.role, join_text(texts), tool_calls=tuple(calls)))
    return results


def _text(content: str | list[OnlyText]) -> str:
    return content if isinstance(content, str) else join_text([block.text for block in content])
