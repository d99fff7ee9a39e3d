"""How a model that can think shall think: the fields that OpenAI's, vLLM's and OpenRouter's clients send."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.sampling_fields import Generation
from emberline.api.common.tools import DeclaredTools, Picked, Toolset, toolset
from emberline.api.http.body import refuse_unsupported
from emberline.api.http.call import Call
from emberline.api.http.errors import Names
from emberline.protocol.request import OutputFormat, Reasoning

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class TemplateKwargs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a client may tell a chat template. Anything else could reach into it."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class Thinking(msgspec.Struct):
    """Anthropic's switch; some of OpenAI's clients send it too."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def hidden(self) -> bool:
        return self.display == "omitted"

    def reasoning(self, effort: Effort | None = None) -> Reasoning:
        if self.type == "disabled":
            return Reasoning(enabled=False)
        return Reasoning(enabled=True, effort=effort, budget_tokens=self.budget_tokens)


class ReasoningOptions(msgspec.Struct):
    """OpenRouter's."""

    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class Thoughtful(Generation, kw_only=True):
    """A body that may say how to think. Where two fields say it, the plainer one counts."""

    reasoning_effort: Effort | None = None
    thinking_token_budget: Budget | None = None  # vLLM's name
    include_reasoning: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking: Thinking | bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @property
    def hides_reasoning(self) -> bool:
        """Whether the caller wants the answer alone."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        omitted = isinstance(self.thinking, Thinking) and self.thinking.hidden
        return self.include_reasoning is False or bool(excluded) or omitted

    def how_to_think(self) -> Reasoning:
        options = self.reasoning or ReasoningOptions()
        switch = self.thinking if isinstance(self.thinking, Thinking) else None
        kwargs = self.chat_template_kwargs or TemplateKwargs()
        effort = _first(self.reasoning_effort, options.effort)
        budget = _first(self.thinking_token_budget, options.max_tokens, switch.budget_tokens if switch else None)
        enabled = _first(
            options.enabled,
            self.thinking if isinstance(self.thinking, bool) else None,
            switch.type != "disabled" if switch else None,
            kwargs.enable_thinking,
            kwargs.thinking,
            False if effort == "none" else None,
        )
        return Reasoning(enabled, effort, budget)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs = self.chat_template_kwargs
        found = msgspec.structs.asdict(kwargs) if kwargs else {}
        return {name: value for name, value in found.items() if value is not None}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


class Conversation(Thoughtful, kw_only=True):
    tools: DeclaredTools | None = None
    tool_choice: Picked | None = None
    parallel_tool_calls: bool | None = None

    def toolset(self) -> Toolset:
        return toolset(self.tools, self.tool_choice)

    def agency(self, call: Call) -> dict[str, Any]:
        """What the canonical request has beside messages and sampling; the call learns the caller's names of it."""
        refuse_unsupported(self)
        output, field = self.output()
        found = self.toolset()
        call.names = Names(output=field, tools=found.where)
        return {
            "tools": found.tools,
            "tool_choice": found.choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "output": output,
            "reasoning": self.how_to_think(),
            "template_kwargs": self.template_kwargs,
        }


def is_json(output: OutputFormat | None) -> bool:
    return output is not None and output.kind in ("json_object", "json_schema")
