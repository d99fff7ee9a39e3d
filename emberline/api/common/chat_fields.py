"""Chat fields that the OpenAI and Workers AI request bodies share: tools and reasoning."""

from typing import Any, Literal

import msgspec

from emberline.api.common.response_format import GenerationFields
from emberline.api.common.sampling_fields import TokenCountOrZero
from emberline.api.common.tools import DeclaredTools, ToolChoiceField, Toolset, toolset
from emberline.api.common.unsupported_fields import refuse_unsupported
from emberline.api.http.errors import FieldNames
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import OutputFormat, Reasoning

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateKwargs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The chat template variables that a client may set; others could change the template's own logic."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    @property
    def thinks(self) -> bool | None:
        """True if the model is told to reason, False if it is told not to, None if neither."""
        return self.thinking if self.enable_thinking is None else self.enable_thinking

    @property
    def given(self) -> dict[str, Any]:
        """The variables that the client sets."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Thinking(msgspec.Struct):
    """The Anthropic API's `thinking`; some OpenAI clients send it too."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: TokenCountOrZero | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def hidden(self) -> bool:
        return self.display == "omitted"

    def reasoning(self, effort: Effort | None = None) -> Reasoning:
        if self.type == "disabled":
            return Reasoning(enabled=False)
        return Reasoning(enabled=True, effort=effort, budget_tokens=self.budget_tokens)


class OpenRouterReasoning(msgspec.Struct):
    effort: Effort | None = None
    max_tokens: TokenCountOrZero | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatFields(GenerationFields, kw_only=True):
    """The body of a chat request. Where two fields set the same thing, the more specific one counts."""

    tools: DeclaredTools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: TokenCountOrZero | None = None  # vLLM's name
    include_reasoning: bool | None = None
    reasoning: OpenRouterReasoning | None = None
    thinking: Thinking | bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def hides_reasoning(self) -> bool:
        excluded = self.reasoning is not None and self.reasoning.exclude
        omitted = isinstance(self.thinking, Thinking) and self.thinking.hidden
        return self.include_reasoning is False or bool(excluded) or omitted

    def toolset(self) -> Toolset:
        return toolset(self.tools, self.tool_choice) if self.tools or self.tool_choice else Toolset()

    def chat_request_fields(self) -> tuple[dict[str, Any], FieldNames]:
        """The canonical request's fields besides messages and sampling, and the client's names of them."""
        refuse_unsupported(self)
        output, field = self.output()
        found = self.toolset()
        fields = {
            "tools": found.tools,
            "tool_choice": found.choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "output": output,
            "reasoning": self._reasoning(),
            "template_kwargs": self.chat_template_kwargs.given if self.chat_template_kwargs else {},
            "continue_final": continues_final(self.continue_final_message, self.add_generation_prompt),
        }
        return fields, FieldNames(output=field, tools=found.fields)

    def _reasoning(self) -> Reasoning:
        options = self.reasoning or OpenRouterReasoning()
        thinking = self.thinking if isinstance(self.thinking, Thinking) else None
        kwargs = self.chat_template_kwargs
        effort = _first(self.reasoning_effort, options.effort)
        budget = _first(self.thinking_token_budget, options.max_tokens, thinking and thinking.budget_tokens)
        enabled = _first(
            options.enabled,
            self.thinking if isinstance(self.thinking, bool) else None,
            thinking.type != "disabled" if thinking else None,
            kwargs.thinks if kwargs else None,
            False if effort == "none" else None,
        )
        return Reasoning(enabled, effort, budget)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def continues_final(continue_final_message: bool | None, add_generation_prompt: bool | None) -> bool:
    """True if the reply continues the last message. The two fields are vLLM's, where they exclude each other."""
    if continue_final_message and add_generation_prompt:
        message = "`continue_final_message` excludes `add_generation_prompt`: the reply begins inside the message"
        raise BadInput(message, param="add_generation_prompt")
    if add_generation_prompt is False and not continue_final_message:
        message = "`add_generation_prompt: false` is supported only together with `continue_final_message`"
        raise Unsupported(message, param="add_generation_prompt")
    return bool(continue_final_message)


def is_json(output: OutputFormat | None) -> bool:
    return output is not None and output.kind in ("json_object", "json_schema")
