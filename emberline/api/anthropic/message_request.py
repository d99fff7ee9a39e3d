"""Anthropic's tools, the choice among them, and its form of structured output."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.chat_fields import Effort, Thinking
from emberline.api.common.messages import join_text
from emberline.api.common.response_format import Asked
from emberline.api.common.sampling_fields import LEAST_TOP_P, StopStrings, TokenCount, session_name
from emberline.api.common.tools import MAX_TOOLS, ToolName, Toolset, check_unique, declare, require
from emberline.api.http.body import UnsupportedField, refuse_unsupported
from emberline.api.http.call import Call
from emberline.api.http.errors import Names
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import (
    GenerateRequest,
    Message,
    OutputFormat,
    Reasoning,
    SamplingParams,
    ToolCall,
    ToolChoice,
)


class CustomTool(msgspec.Struct):
    """A function of the caller's. Tools that Anthropic runs or defines itself have another type."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"enum": ["custom", None]})] = None
    strict: bool | None = None


CustomTools = Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)]


class Pick(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputSchema(msgspec.Struct):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    effort: Effort | None = None
    format: OutputSchema | None = None


def toolset(tools: list[CustomTool] | None, pick: Pick | None) -> Toolset:
    where = tuple(f"tools[{i}]" for i in range(len(tools or ())))
    found = []
    for tool, here in zip(tools or (), where, strict=True):
        if tool.type not in (None, "custom"):
            raise Unsupported(f"`{here}`: tools of type {tool.type!r} are not supported", param=f"{here}.type")
        if tool.input_schema is None:
            raise BadInput(f"`{here}` needs an `input_schema`", param=f"{here}.input_schema")
        found.append(declare(tool.name, tool.description, tool.input_schema, tool.strict, here))
    given = Toolset(tuple(found), where=where)
    check_unique(given)
    if pick is None or pick.type in ("auto", "none"):
        return msgspec.structs.replace(given, choice=ToolChoice("none" if pick and pick.type == "none" else "auto"))
    if pick.type == "tool" and pick.name is None:
        raise BadInput("`tool_choice` of type `tool` needs a `name`", param="tool_choice.name")
    return require(given, pick.name if pick.type == "tool" else None)


def output(early: OutputSchema | None, config: OutputConfig | None) -> Asked:
    """`output_format` is the older place of what `output_config.format` says."""
    late = config.format if config else None
    if early is not None and late is not None:
        raise BadInput("`output_format` and `output_config.format` are the same; send one", param="output_format")
    schema, field = (late, "output_config.format.schema") if early is None else (early, "output_format.schema")
    return Asked(OutputFormat("json_schema", schema.schema) if schema else None, field)


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
    is_error: bool | None = None


class Thought(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier turn, with a signature that we do not ask for."""

    thinking: str = ""


class HiddenThought(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """The same, encrypted by who made it: nothing to us."""


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Text | ToolUse | ToolResult | Thought | HiddenThought]


class Metadata(msgspec.Struct):
    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """What both the messages and the token-counting call have."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[OnlyText] | None = None
    tools: CustomTools | None = None
    tool_choice: Pick | None = None
    thinking: Thinking | None = None
    output_format: OutputSchema | None = None
    output_config: OutputConfig | None = None
    mcp_servers: UnsupportedField = None
    container: UnsupportedField = None

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.hidden

    def to_request(self, call: Call) -> GenerateRequest:
        return self._request(call, SamplingParams(), None)

    def _request(self, call: Call, sampling: SamplingParams, session: str | None) -> GenerateRequest:
        refuse_unsupported(self)
        offered = toolset(self.tools, self.tool_choice)
        output_format, field = output(self.output_format, self.output_config)
        placed = _canonical(self.system, self.messages)
        call.names = Names(
            output=field, tools=offered.where, schema="input_schema", messages=[where for _, where in placed]
        )
        return GenerateRequest(
            id=call.id,
            model=self.model,
            messages=tuple(message for message, _ in placed),
            sampling=sampling,
            session=session,
            tools=offered.tools,
            tool_choice=offered.choice,
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            output=output_format,
            reasoning=self._how_to_think(),
        )

    def _how_to_think(self) -> Reasoning:
        """Without a word about it the model does as it does by itself."""
        effort = self.output_config.effort if self.output_config else None
        return self.thinking.reasoning(effort) if self.thinking else Reasoning(effort=effort)


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


Placed = tuple[Message, str]  # a canonical message, and where in the body it came from


def _canonical(system: str | list[OnlyText] | None, turns: list[Turn]) -> list[Placed]:
    placed: list[Placed] = []
    if system:
        placed.append((Message("system", _text(system)), "system"))
    for number, turn in enumerate(turns):
        placed += _messages(turn, f"messages[{number}]")
    return placed


def _messages(turn: Turn, where: str) -> list[Placed]:
    """A turn as canonical messages: each tool result is a message of its own, before what the user says beside it."""
    if isinstance(turn.content, str):
        return [(Message(turn.role, turn.content), where)]
    results: list[Placed] = []
    calls: list[ToolCall] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for number, block in enumerate(turn.content):
        here = f"{where}.content[{number}]"
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, Thought):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolResult) and turn.role == "user":
            results.append((_result(block), here))
        elif isinstance(block, ToolUse) and turn.role == "assistant":
            calls.append(ToolCall(block.id, block.name, msgspec.json.encode(block.input).decode()))
        elif isinstance(block, ToolResult | ToolUse):
            raise BadInput(f"`{here}` does not belong to a turn of the {turn.role}", param=here)
    if texts or calls or not results:
        reasoning = join_text(thoughts) or None
        results.append((Message(turn.role, join_text(texts), tool_calls=tuple(calls), reasoning=reasoning), where))
    return results


def _result(block: ToolResult) -> Message:
    """A result as a message. Templates know no failed ones, so its text says it."""
    text = _text(block.content or "")
    if block.is_error:
        text = f"Error: {text}" if text else "Error"
    return Message("tool", text, tool_call_id=block.tool_use_id)


def _text(content: str | list[OnlyText]) -> str:
    return content if isinstance(content, str) else join_text([block.text for block in content])
