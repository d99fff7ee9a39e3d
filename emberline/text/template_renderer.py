"""Renders one chat template: in this process, or behind the same interface in another (`template_processes`)."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from jinja2 import Template, TemplateError, meta

from emberline.protocol.errors import BadInput
from emberline.text.template_sandbox import BoundedEnvironment, TemplateLimit, TemplateRefusal

Turn = dict[str, Any]  # a message as templates read it
MAX_SOURCE_CHARS = 1 << 20
_environment = BoundedEnvironment()


class BadTemplate(ValueError):
    """The template does not compile."""


class RefusedTurns(BadInput):
    """The template rejects the messages in this arrangement."""


class TemplateRenderer(Protocol):
    """One template, compiled."""

    variables: frozenset[str]  # that the template reads
    blocks: bool  # True if rendering waits for another process: call it in a thread

    def render(self, turns: list[Turn], values: dict[str, Any]) -> str:
        """The rendered text. Raises RefusedTurns, or BadInput if the template exceeds a limit."""


# Makes the renderer of a template's source. Raises BadTemplate.
RendererFactory = Callable[[str], TemplateRenderer]


class LocalRenderer:
    """Renders in this process: the templates of our own catalog, and any in the process that is confined for it."""

    blocks = False

    def __init__(self, source: str, environment: BoundedEnvironment = _environment) -> None:
        self._environment = environment
        self._template = _compiled(source, environment)
        self.variables = _variables(source)

    def render(self, turns: list[Turn], values: dict[str, Any]) -> str:
        self._environment.budget.begin()
        try:
            text = self._template.render(values, messages=turns)
        except TemplateRefusal as error:
            raise RefusedTurns(f"the model's chat template refuses these messages: {error.message}") from None
        except TemplateLimit as error:
            raise stopped(str(error.message)) from None
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RefusedTurns(f"the model's chat template cannot render these messages: {error}"[:1000]) from None
        except RecursionError:
            raise stopped("it went too deep") from None
        except MemoryError:
            raise stopped("it used too much memory") from None
        if len(text) > (most := self._environment.limits.chars):
            raise BadInput(f"the rendered messages are longer than {most} characters", param="messages")
        return text


def stopped(why: str) -> BadInput:
    return BadInput(f"the model's chat template was stopped: {why}", param="messages")


@lru_cache(maxsize=64)
def _compiled(source: str, environment: BoundedEnvironment) -> Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise BadTemplate(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
    environment.budget.begin()
    try:
        return environment.from_string(source)
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise BadTemplate(f"the chat template does not compile: {error}") from None


@lru_cache(maxsize=64)
def _variables(source: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(_environment.parse(source)))
