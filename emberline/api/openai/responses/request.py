"""The body of a Responses API request, its conversion to the canonical request, and the fields a response repeats."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.chat_fields import Effort, TemplateKwargs
from emberline.api.common.sampling_fields import (
    Metadata,
    ModelName,
    SamplingFields,
    SpeculationField,
    TokenCount,
    TopLogprobs,
    required_model,
)
from emberline.api.common.tools import ToolChoiceField
from emberline.api.common.unsupported_fields import OneField, UnsupportedField
from emberline.api.http.errors import FieldNames
from emberline.api.http.unknown_fields import READ_AS
from emberline.api.openai.responses.items import Item, ItemReference, response_of, to_messages
from emberline.api.openai.responses.tools import AnyTool, ParsedTools, droppable, parse_tools
from emberline.protocol.errors import BadInput
from emberline.protocol.request import (
    GenerateRequest,
    Message,
    OutputFormat,
    Priority,
    Reasoning,
    SamplingDefaults,
    SamplingParams,
    session_name,
)
from emberline.service.validation import MAX_TOOLS

ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

PAST = "previous_response_id"  # the field that stands for all items of the response that is continued

Json = dict[str, Any]


# The items of a tool that no model here can call have no details to include.
Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class TextFormatField(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def body(self) -> Json:
        """The format as the response repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return msgspec.structs.asdict(self) | {"strict": bool(self.strict)}

    def output(self) -> OutputFormat | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return OutputFormat("json_object")
        if self.schema is None:
            raise BadInput("`text.format` has no `schema`", param="text.format.schema")
        return OutputFormat("json_schema", self.schema)


class TextOptions(msgspec.Struct):
    format: TextFormatField | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesReasoning(msgspec.Struct):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name


class ResponsesStreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of a request for a response: all that a chat takes for sampling, and what the API adds."""

    model: ModelName = ""
    input: str | Annotated[list[dict[str, Any]], Meta(extra={READ_AS: list[Item | ItemReference]})] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    background: bool | None = None
    generate: bool | None = None  # false: the prompt is computed, for a response that continues this one
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS, extra={READ_AS: list[AnyTool]})] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None  # limits the provider's own tools; there are none
    text: TextOptions | None = None
    reasoning: ResponsesReasoning | None = None
    include: list[Include] | None = None
    max_output_tokens: TokenCount | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None  # ignored: an input that is too long is refused
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    context_management: UnsupportedField = None
    # Fields of chats that this API names otherwise, or lacks.
    max_tokens: UnsupportedField = None
    max_completion_tokens: UnsupportedField = None
    n: OneField = None
    logprobs: UnsupportedField = None
    response_format: UnsupportedField = None
    guided_json: UnsupportedField = None
    guided_regex: UnsupportedField = None
    guided_choice: UnsupportedField = None
    guided_grammar: UnsupportedField = None
    guided_whitespace_pattern: UnsupportedField = None
    structured_outputs: UnsupportedField = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def wants_summary(self) -> bool:
        """True if reasoning is sent as a summary. It is the whole text, in the field where the client looks."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())

    @property
    def obfuscates(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

    def parse_tools(self) -> ParsedTools:
        return parse_tools(self.tools, self.tool_choice)

    def to_request(
        self, request_id: str, items: list[Item], fields: list[str], tools: ParsedTools, session: str | None = None
    ) -> tuple[GenerateRequest, FieldNames]:
        """The canonical request. `items` are the whole conversation, each sent in the field of the same index;
        `session` is the session id from the headers."""
        messages, message_fields = to_messages(items, fields)
        # Without a session id of the client's, the id of the conversation's first response, which item ids contain.
        own = response_id(request_id)
        first = next((found for item in items if (found := response_of(item.id or "")) not in (None, own)), own)
        if self.instructions:
            messages, message_fields = (
                [Message("system", self.instructions), *messages],
                ["instructions", *message_fields],
            )
        if not messages:
            raise BadInput("`input` is empty; send a text or at least one item", param="input")
        priority, kwargs = self.priority_class, self.chat_template_kwargs or TemplateKwargs()
        request = GenerateRequest(
            api="responses",
            id=request_id,
            model=required_model(self.model),
            messages=tuple(messages),
            sampling=self._sampling(),
            left_to_model=self.left_to_model,
            session=session_name(session, self.prompt_cache_key, self.safety_identifier, self.user, first),
            cache_ttl_s=self.cache_ttl_s,
            priority=priority,
            reject_if_busy=priority is Priority.FLEX and not self.background,
            tools=tools.toolset.tools,
            tool_choice=tools.toolset.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            output=self.text.format.output() if self.text and self.text.format else None,
            reasoning=self._reasoning(kwargs),
            template_kwargs=kwargs.given,
            speculation=SpeculationField.setting(self.speculation),
        )
        names = FieldNames(
            output="text.format.schema",
            tools=tools.toolset.fields,
            messages=message_fields,
            parts={
                number: [f"{field}.{_content(message)}[{at}]" for at in range(len(message.parts))]
                for number, (message, field) in enumerate(zip(messages, message_fields, strict=True))
                if message.parts and field != PAST
            },
        )
        return request, names

    def initial_body(self, own_id: str, created: int, defaults: SamplingDefaults) -> Json:
        """The response object before any output. `defaults` are the model's, for what the request leaves out."""
        reasoning, text = self.reasoning or ResponsesReasoning(), self.text or TextOptions()
        sampling = defaults.apply(self._sampling(), self.left_to_model)
        return {
            "id": own_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": bool(self.background),
            "completed_at": None,
            "error": None,
            "frequency_penalty": sampling.frequency_penalty,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": sampling.presence_penalty,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": self.priority_class.name.lower(),
            "store": self.stored,
            "temperature": sampling.temperature,
            "text": {"format": (text.format or TextFormatField("text")).body, "verbosity": text.verbosity or "medium"},
            "tool_choice": "auto" if self.tool_choice is None else _without_nulls(self.tool_choice),
            "tools": [_tool_body(tool) for tool in self.tools or () if not droppable(tool, self.tool_choice)],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": self.truncation or "disabled",
            "usage": None,
            "user": self.user,
            "metadata": self.metadata or {},
        }

    def _sampling(self) -> SamplingParams:
        with_logprobs = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        sampling = self.sampling(1.0, (self.top_logprobs or 0) if with_logprobs else None)
        return msgspec.structs.replace(sampling, max_tokens=self.max_output_tokens)

    def _reasoning(self, kwargs: TemplateKwargs) -> Reasoning:
        effort = self.reasoning.effort if self.reasoning else None
        return Reasoning(enabled=False if effort == "none" else kwargs.thinks, effort=effort)


def item_fields(n_past: int, n_new: int) -> list[str]:
    """The field of each item of a conversation: of those of a continued response, and of those of `input`."""
    return [PAST] * n_past + [f"input[{number}]" for number in range(n_new)]


def _content(message: Message) -> str:
    """Name of the field in which an item has its parts."""
    return "output" if message.role == "tool" else "content"


def response_id(request_id: str) -> str:
    return "resp_" + request_id.replace("-", "")


def _tool_body(raw: Json) -> Json:
    """A tool as the response repeats it: clients expect a function's optional fields."""
    if raw.get("type") != "function":
        return raw
    return {"description": None, "parameters": None, **raw, "strict": bool(raw.get("strict"))}


def _without_nulls(value: Any) -> Any:
    value = msgspec.to_builtins(value)
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return value
