"""Chat templates: messages to the text that the model was trained on."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta

from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message
from emberline.text.chat_messages import Roles, Turn, fold_system, gather_system, text_arguments
from emberline.text.template_sandbox import MAX_CHARS, BoundedEnvironment, TemplateLimit, TemplateRefusal
from emberline.text.tool_calls.formats import ToolForm
from emberline.weights.model_config import BadCheckpoint

MAX_SOURCE_CHARS = 1 << 20

# For models without a template of their own, base models mostly: no special token, and nothing they were trained on
# but what the web is full of.
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOPS = ("\nUser:", "\nSystem:")  # where such a model begins to speak for others

_OURS = frozenset({"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"})
_environment = BoundedEnvironment()


class ChatTemplate:
    """`tokens` are the special tokens that a template may name: bos_token, eos_token, …"""

    def __init__(self, source: str | None, tokens: Mapping[str, str] | None = None) -> None:
        self.source = PLAIN if source is None else source
        self.stops = PLAIN_STOPS if source is None else ()
        self._template = _compiled(self.source)
        self.variables = _variables(self.source)  # what it reads, by name
        self._roles = Roles(self.source)
        self._tokens = dict(tokens or {})

    def turns(self, messages: Sequence[Message], own: ToolForm | None = None) -> list[Turn]:
        if not messages:
            raise BadInput("messages is empty; send at least one message", param="messages")
        return self._roles.turns(messages, own)

    def render(
        self,
        turns: list[Turn],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The whole text. A template that refuses the turns gets them in other shapes before we give up."""
        if taken := _OURS & kwargs.keys():
            raise BadInput(f"template arguments may not set {min(taken)!r}", param="template_kwargs")
        values = self._tokens | {"tools": tools, "documents": None, **kwargs}
        values["add_generation_prompt"] = add_generation_prompt
        refusal: BadInput | None = None
        for attempt in _attempts(turns):
            try:
                return self._render(attempt, values)
            except _Refused as error:
                refusal = refusal or error
        assert refusal is not None
        raise BadInput(refusal.message, param="messages")

    def _render(self, turns: list[Turn], values: dict[str, Any]) -> str:
        _environment.budget.begin()
        try:
            text = self._template.render(values, messages=turns)
        except TemplateRefusal as error:
            raise _Refused(f"the model's chat template refuses these messages: {error.message}") from None
        except TemplateLimit as error:
            raise BadInput(f"the model's chat template was stopped: {error.message}", param="messages") from None
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _Refused(f"the model's chat template cannot render these messages: {error}"[:1000]) from None
        except (RecursionError, MemoryError):
            raise BadInput("the model's chat template was stopped: it went too deep", param="messages") from None
        if len(text) > MAX_CHARS:
            raise BadInput(f"the rendered messages are longer than {MAX_CHARS} characters", param="messages")
        return text


class _Refused(BadInput):
    """Messages that do not fit the template as they are."""


def _attempts(turns: list[Turn]) -> Iterator[list[Turn]]:
    """The turns as they are, then in the other shapes that templates want."""
    yield turns
    for change in (gather_system, fold_system, text_arguments):
        changed = change(turns)
        if changed != turns:
            yield changed


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise BadCheckpoint(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
    _environment.budget.begin()
    try:
        return _environment.from_string(source)
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise BadCheckpoint(f"the chat template does not compile: {error}") from None


@lru_cache(maxsize=64)
def _variables(source: str) -> frozenset[str]:
    """Of a source that compiles."""
    return frozenset(meta.find_undeclared_variables(_environment.parse(source)))
