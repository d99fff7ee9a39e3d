"""The body of an Anthropic Messages request, and its conversion to the canonical request."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from emberline.api.common.chat_fields import Effort, Thinking
from emberline.api.common.chat_messages import join_text
from emberline.api.common.image_parts import FileId, image_from_base64, image_from_file, image_from_url
from emberline.api.common.response_format import RequestedFormat
from emberline.api.common.sampling_fields import (
    Probability,
    SpeculationField,
    StopStrings,
    TokenCount,
    clamp_top_p,
    left_to_model,
)
from emberline.api.common.tools import DeclaredFunction, ToolName, Toolset, declare
from emberline.api.common.unsupported_fields import (
    NoSamplingFields,
    PeerMessageFields,
    ProviderMark,
    UnsupportedField,
    refuse_unsupported,
)
from emberline.api.http.errors import FieldNames
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import (
    ContentPart,
    GenerateRequest,
    Marks,
    Message,
    OutputFormat,
    Reasoning,
    SamplingParams,
    Tool,
    ToolCall,
    session_name,
)
from emberline.service.validation import MAX_TOKENS, MAX_TOOLS

# Clients send thinking back only if it has a signature. Ours is constant and is not verified.
SIGNATURE = "ZW1iZXJsaW5l"


class CacheControl(msgspec.Struct, omit_defaults=True):
    """Time for which the client wants the conversation kept in the cache; the longest counts if there are several.
    Providers get each mark where the client put it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> int:
        return 3_600 if self.ttl == "1h" else 300


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None


class OnlyTextBlock(msgspec.Struct):
    """A text block where no other type is allowed."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    url: str


class FileSource(msgspec.Struct, tag_field="type", tag="file"):
    file_id: FileId


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    source: Base64Source | UrlSource | FileSource
    cache_control: CacheControl | None = None

    def part(self, field: str) -> ContentPart:
        marks, source = _marks(self.cache_control), self.source
        if isinstance(source, Base64Source):
            return image_from_base64(source.data, f"{field}.source.data", marks)
        if isinstance(source, UrlSource):
            return image_from_url(source.url, f"{field}.source.url", marks=marks)
        return image_from_file(source.file_id, marks=marks)


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}
    cache_control: CacheControl | None = None


class ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier turn. A signature that is not ours goes back to the provider whose it is."""

    thinking: str = ""
    signature: ProviderMark = None

    @property
    def is_signed(self) -> bool:
        return isinstance(self.signature, str) and self.signature not in ("", SIGNATURE)


class RedactedThinking(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that a provider has encrypted: only that provider reads it."""

    data: ProviderMark = None


class TurnMessage(PeerMessageFields):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ImageBlock | ToolUse | ToolResult | ThinkingBlock | RedactedThinking]
    tool_calls: UnsupportedField = None
    function_call: UnsupportedField = None


class AnthropicMetadata(msgspec.Struct):
    user_id: str | None = None


class AnthropicTool(msgspec.Struct):
    """A function of the client's. Tools that Anthropic defines or runs itself have another type."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"enum": ["custom", None]})] = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputSchema(msgspec.Struct):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    effort: Effort | None = None
    format: OutputSchema | None = None


class CountRequest(NoSamplingFields, kw_only=True):
    """The fields of both the messages and the token-counting endpoint."""

    model: str
    messages: Annotated[list[TurnMessage], Meta(min_length=1)]
    system: str | list[OnlyTextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_format: OutputSchema | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @property
    def cache_ttl_s(self) -> int:
        """The longest that some part of the request asks for."""
        blocks = [block for turn in self.messages if not isinstance(turn.content, str) for block in turn.content]
        system = self.system if isinstance(self.system, list) else []
        found = (getattr(part, "cache_control", None) for part in (self, *system, *(self.tools or ()), *blocks))
        return max((control.ttl_s for control in found if control is not None), default=0)

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.hidden

    def to_request(self, request_id: str, session: str | None = None) -> tuple[GenerateRequest, FieldNames]:
        """The canonical request; `session` is the session id from the headers."""
        refuse_unsupported(self)
        tools = self._toolset()
        output, output_field = self._output()
        effort = self.output_config.effort if self.output_config else None
        messages = _canonical_messages(self.system, self.messages, _marks(self.cache_control))
        continue_final = self.messages[-1].role == "assistant"
        if continue_final:
            self._check_prefill(messages[-1].message)
        request = GenerateRequest(
            api="messages",
            id=request_id,
            model=self.model,
            messages=tuple(sent.message for sent in messages),
            sampling=self.sampling(),
            left_to_model=left_to_model(self),
            session=session,
            cache_ttl_s=self.cache_ttl_s,
            continue_final=continue_final,
            tools=tools.tools,
            tool_choice=tools.choice,
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            output=output,
            reasoning=self.thinking.reasoning(effort) if self.thinking else Reasoning(effort=effort),
            speculation=SpeculationField.setting(self.speculation),
        )
        return request, FieldNames(
            output=output_field,
            tools=tools.fields,
            schema="input_schema",
            messages=[sent.field for sent in messages],
            parts={number: sent.parts for number, sent in enumerate(messages) if sent.parts},
        )

    def _check_prefill(self, message: Message) -> None:
        """A last message of the assistant begins the reply. As in Anthropic's own API, which its clients know."""
        field = f"messages[{len(self.messages) - 1}]"
        if self.thinking is not None and self.thinking.type != "disabled":
            text = f"`{field}` begins the reply, which is not possible with `thinking`: leave one of them out"
            raise BadInput(text, param=field)
        if message.content != message.content.rstrip():
            text = f"`{field}` begins the reply and must not end with white space, which would come before every word"
            raise BadInput(text, param=field)

    def sampling(self) -> SamplingParams:
        return SamplingParams()

    def _toolset(self) -> Toolset:
        declared = Toolset.of((_tool(tool, f"tools[{i}]"), f"tools[{i}]") for i, tool in enumerate(self.tools or ()))
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return declared.optional(choice is None or choice.type == "auto")
        if choice.type == "tool" and choice.name is None:
            raise BadInput("`tool_choice` of type `tool` needs a `name`", param="tool_choice.name")
        return declared.required(choice.name if choice.type == "tool" else None)

    def _output(self) -> RequestedFormat:
        """`output_format` is the older name of `output_config.format`."""
        older, newer = self.output_format, self.output_config.format if self.output_config else None
        if older is not None and newer is not None:
            raise BadInput("`output_format` and `output_config.format` are the same; send one", param="output_format")
        schema, field = (newer, "output_config.format.schema") if older is None else (older, "output_format.schema")
        return RequestedFormat(OutputFormat("json_schema", schema.schema) if schema else None, field)


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: TokenCount | None = None
    stream: bool | None = None
    temperature: Probability | None = None  # the Anthropic API's range is 0 to 1
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop_sequences: StopStrings | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speculation: SpeculationField | None = None

    def to_request(self, request_id: str, session: str | None = None) -> tuple[GenerateRequest, FieldNames]:
        session = session_name(session, self.metadata.user_id if self.metadata else None)
        return super().to_request(request_id, session)

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=clamp_top_p(self.top_p),
            top_k=self.top_k or 0,
            stop=tuple(self.stop_sequences or ()),
        )


def _tool(tool: AnthropicTool, field: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise Unsupported(f"`{field}`: tools of type {tool.type[:80]!r} are not supported", param=f"{field}.type")
    if tool.input_schema is None:
        raise BadInput(f"`{field}` needs an `input_schema`", param=f"{field}.input_schema")
    made = declare(DeclaredFunction(tool.name, tool.description, tool.input_schema, tool.strict), field)
    return msgspec.structs.replace(made, marks=_marks(tool.cache_control)) if tool.cache_control else made


class Sent(NamedTuple):
    """A canonical message, and the fields of the body in which it and its parts came."""

    message: Message
    field: str
    parts: Sequence[str] = ()


def _canonical_messages(
    system: str | list[OnlyTextBlock] | None, turns: list[TurnMessage], last_marks: Marks
) -> list[Sent]:
    """The canonical messages. `last_marks` are those of the body itself, which Anthropic applies to its last block."""
    messages: list[Sent] = []
    if system:
        fields = [f"system[{at}]" for at in range(len(system))] if isinstance(system, list) else ()
        messages.append(Sent(Message("system", _text(system), parts=_parts(system, fields)), "system"))
    for number, turn in enumerate(turns):
        messages += _turn_messages(turn, f"messages[{number}]")
    if last_marks:
        last = messages[-1].message
        messages[-1] = messages[-1]._replace(message=msgspec.structs.replace(last, marks={**last_marks, **last.marks}))
    return messages


def _marks(control: CacheControl | None) -> Marks:
    return {} if control is None else {"cache_control": msgspec.to_builtins(control)}


def _parts(
    content: str | Sequence[TextBlock | OnlyTextBlock | ImageBlock], fields: Sequence[str]
) -> tuple[ContentPart, ...]:
    """The content as parts, if it has images or marks: otherwise its joined text says everything. `fields` are those of
    the blocks."""
    if isinstance(content, str) or all(
        block.cache_control is None and not isinstance(block, ImageBlock) for block in content
    ):
        return ()
    return tuple(
        block.part(field)
        if isinstance(block, ImageBlock)
        else ContentPart("text", block.text, marks=_marks(block.cache_control))
        for block, field in zip(content, fields, strict=True)
    )


def _turn_messages(turn: TurnMessage, field: str) -> list[Sent]:
    """The canonical messages of a turn: one for each tool result, then one for the turn's own content."""
    if turn.images or turn.prefix or turn.tool_calls or turn.function_call:
        refuse_unsupported(turn, f"{field}.")
    if isinstance(turn.content, str):
        return [Sent(Message(turn.role, turn.content), field)]
    messages: list[Sent] = []
    calls: list[ToolCall] = []
    said: list[TextBlock | ImageBlock] = []
    said_in: list[str] = []  # the fields of what was said
    thinking: list[str] = []
    signed: list[ThinkingBlock | RedactedThinking] = []
    for number, block in enumerate(turn.content):
        block_field = f"{field}.content[{number}]"
        if isinstance(block, TextBlock) or (isinstance(block, ImageBlock) and turn.role == "user"):
            said.append(block)
            said_in.append(block_field)
        elif isinstance(block, ThinkingBlock):
            thinking.append(block.thinking)
            if block.is_signed:
                signed.append(block)
        elif isinstance(block, RedactedThinking):
            if isinstance(block.data, str):
                signed.append(block)
        elif isinstance(block, ToolResult) and turn.role == "user":
            messages.append(_result(block, block_field))
        elif isinstance(block, ToolUse) and turn.role == "assistant":
            arguments = msgspec.json.encode(block.input).decode()
            calls.append(ToolCall(block.id, block.name, arguments, _marks(block.cache_control)))
        elif isinstance(block, ToolResult | ToolUse | ImageBlock):
            raise BadInput(f"`{block_field}` is not allowed in a turn of the {turn.role}", param=block_field)
    if said or calls or not messages:
        marks: Marks = {"thinking_blocks": msgspec.to_builtins(signed)} if signed else {}
        own = Message(
            turn.role,
            _text(said),
            tool_calls=tuple(calls),
            reasoning=join_text(thinking) or None,
            parts=_parts(said, said_in),
            marks=marks,
        )
        messages.append(Sent(own, field, said_in if own.parts else ()))
    return messages


def _result(block: ToolResult, field: str) -> Sent:
    """A tool result. Chat templates have no failed results, so the text says it. A mark within it is one of the whole:
    providers keep what comes before."""
    within = block.content if isinstance(block.content, list) else []
    fields = [f"{field}.content[{at}]" for at in range(len(within))]
    text, parts = _text(block.content or ""), _parts(within, fields)
    controls = [block.cache_control, *(each.cache_control for each in reversed(within))]
    if not any(isinstance(each, ImageBlock) for each in within):
        parts = ()
    if block.is_error:
        text = f"Error: {text}" if text else "Error"
        parts = (ContentPart("text", "Error: "), *parts) if parts else ()
        fields = [field, *fields]
    control = next((each for each in controls if each is not None), None)
    parts = tuple(msgspec.structs.replace(part, marks={}) for part in parts)
    message = Message("tool", text, tool_call_id=block.tool_use_id, parts=parts, marks=_marks(control))
    return Sent(message, field, fields if parts else ())


def _text(content: str | Sequence[TextBlock | OnlyTextBlock | ImageBlock]) -> str:
    if isinstance(content, str):
        return content
    return join_text([block.text for block in content if not isinstance(block, ImageBlock)])
