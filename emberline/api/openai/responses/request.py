"""The body of a request to the Responses API, what the service is asked for it, and what the answer repeats of it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.chat_fields import Effort
from emberline.api.common.sampling_fields import LEAST_TOP_P, ServiceTier, TokenCount, session_name
from emberline.api.common.tools import MAX_TOOLS, Picked
from emberline.api.http.body import UnsupportedField
from emberline.api.http.call import Call
from emberline.api.http.errors import Names
from emberline.api.openai.responses.items import Item, conversation, response_of
from emberline.api.openai.responses.tools import Offered, needless
from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message, OutputFormat, Priority, Reasoning, SamplingParams

SEALED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

Json = dict[str, Any]


class Format(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def output(self) -> OutputFormat | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return OutputFormat("json_object")
        if self.schema is None:
            raise BadInput("`text.format` has no `schema`", param="text.format.schema")
        return OutputFormat("json_schema", self.schema)


class Text(msgspec.Struct):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name


class StreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Picked | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None  # of the provider's own tools, of which there are none
    text: Text | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # nothing is ever dropped: what is too long is refused
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None
    conversation: UnsupportedField = None
    prompt: UnsupportedField = None
    context_management: UnsupportedField = None
    moderation: UnsupportedField = None

    @property
    def kept(self) -> bool:
        return self.store is not False

    @property
    def summarises(self) -> bool:
        """Whether reasoning is to be told as a summary. Ours is the whole text, in the place where the client looks."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    def includes(self, what: str) -> bool:
        return what in (self.include or ())

    def to_request(self, call: Call, items: list[Item], where: list[str], offer: Offered) -> GenerateRequest:
        """`items` are the whole conversation, each written at its `where`.

        Leaves on the call what the client calls things, for errors that come later.
        """
        messages, places = conversation(items, where)
        # A conversation that nobody named is named by the response that began it, which its items' ids tell.
        own = response_id(call)
        thread = next((found for item in items if (found := response_of(item.id or "")) not in (None, own)), own)
        if self.instructions:
            messages, places = [Message("system", self.instructions), *messages], ["instructions", *places]
        if not messages:
            raise BadInput("`input` is empty; send a text or at least one item", param="input")
        call.names = Names(output="text.format.schema", tools=offer.toolset.where, messages=places)
        effort = self.reasoning.effort if self.reasoning else None
        return GenerateRequest(
            id=call.id,
            model=self.model,
            messages=tuple(messages),
            sampling=self._sampling(),
            session=session_name(call, self.prompt_cache_key, self.safety_identifier, self.user, thread),
            priority=self._priority,
            reject_if_busy=self._priority is Priority.FLEX and not self.background,
            tools=offer.toolset.tools,
            tool_choice=offer.toolset.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            output=self.text.format.output() if self.text and self.text.format else None,
            reasoning=Reasoning(enabled=False if effort == "none" else None, effort=effort),
        )

    def echo(self, own_id: str, created: int) -> Json:
        """The response object as it is when nothing has been said yet."""
        reasoning, text = self.reasoning or ReasoningOptions(), self.text or Text()
        return {
            "id": own_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": bool(self.background),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": self._priority.name.lower(),
            "store": self.kept,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": text.format or Format("text"), "verbosity": text.verbosity or "medium"},
            "tool_choice": "auto" if self.tool_choice is None else _said(msgspec.to_builtins(self.tool_choice)),
            "tools": [_tool(tool) for tool in self.tools or () if not needless(tool, self.tool_choice)],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "usage": None,
            "user": self.user,
            "metadata": self.metadata or {},
        }

    @property
    def _priority(self) -> Priority:
        named = {"flex": Priority.FLEX, "priority": Priority.PRIORITY}
        return named.get(self.service_tier or "", Priority.DEFAULT)

    def _sampling(self) -> SamplingParams:
        wanted = self.top_logprobs is not None or self.includes(LOGPROBS)
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            logprobs=(self.top_logprobs or 0) if wanted else None,
        )


def response_id(call: Call) -> str:
    return "resp_" + call.id.replace("-", "")


def _tool(raw: Json) -> Json:
    """A function's optional fields, which clients expect to be told."""
    if raw.get("type") != "function":
        return raw
    return {"description": None, "parameters": None, **raw, "strict": bool(raw.get("strict"))}


def _said(value: Any) -> Any:
    """Without what was not said."""
    if isinstance(value, list):
        return [_said(one) for one in value]
    if isinstance(value, dict):
        return {name: _said(one) for name, one in value.items() if one is not None}
    return value
