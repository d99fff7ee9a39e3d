"""Chat templates: messages to the text that the model was trained on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import Template, TemplateError, meta

from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message, ToolCall
from emberline.text.template_sandbox import MAX_CHARS, BoundedEnvironment, TemplateLimit, TemplateRefusal
from emberline.text.tool_calls.formats import ToolForm, family_ids, result_text
from emberline.weights.model_config import BadCheckpoint

Turn = dict[str, Any]


class Roles:
    """What a template knows, judged by what its source names."""

    def __init__(self, source: str) -> None:
        self.developer = "developer" in source
        self.tool = re.search(r"""["']tool["']""", source) is not None
        self.tool_calls = "tool_calls" in source

    def turns(self, messages: Sequence[Message], own: ToolForm | None = None) -> list[Turn]:
        """A role that the template does not know becomes the nearest one that every template does.

        developer → system. tool → user; results of one round of calls, and a user message right after them, make one
        turn, as templates without the role want user and assistant to alternate. An assistant's tool calls → JSON
        lines in its text. With `own`, calls and results are written in that form whatever the template knows.
        """
        turns: list[Turn] = []
        results = False  # whether the last turn holds tool results
        for message in messages:
            turn = self._turn(message, own)
            was_results, results = results, message.role == "tool" and turn["role"] == "user"
            if was_results and turn["role"] == "user":
                turns[-1]["content"] += "\n\n" + turn["content"]
            else:
                turns.append(turn)
        return turns

    def _turn(self, message: Message, own: ToolForm | None) -> Turn:
        role = message.role
        if role == "developer" and not self.developer:
            role = "system"
        elif role == "tool" and (own is not None or not self.tool):
            role = "user"
        turn: Turn = {"role": role, "content": message.content}
        if message.role == "tool" and own is not None:
            turn["content"] = result_text(message.content)
        if message.reasoning is not None:
            turn["reasoning_content"] = message.reasoning
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls and own is not None:
            turn["content"] = "\n".join(filter(None, [message.content, own.write(message.tool_calls)]))
        elif message.tool_calls and self.tool_calls:
            turn["tool_calls"] = [_call(call) for call in message.tool_calls]
        elif message.tool_calls:
            turn["content"] = "\n".join(filter(None, [message.content, *map(_call_text, message.tool_calls)]))
        return turn


def with_system_text(turns: list[Turn], text: str) -> list[Turn]:
    """The text at the end of the system message that comes first, or as one."""
    first, *others = turns
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *turns]
    return [{**first, "content": "\n\n".join(filter(None, [first["content"], text]))}, *others]


def with_family_ids(messages: Sequence[Message], form: ToolForm) -> Sequence[Message]:
    """The messages with call ids as the family's templates want them."""
    ids = family_ids(form.ids, [call for message in messages for call in message.tool_calls])
    if not ids:
        return messages
    return [
        msgspec.structs.replace(
            message,
            tool_calls=tuple(msgspec.structs.replace(call, id=ids[call.id]) for call in message.tool_calls),
            tool_call_id=ids.get(message.tool_call_id or "", message.tool_call_id),
        )
        for message in messages
    ]


def gather_system(turns: list[Turn]) -> list[Turn]:
    """All system text in one message at the beginning."""
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    others = [turn for turn in turns if turn["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others] if system else turns


def fold_system(turns: list[Turn]) -> list[Turn]:
    """System text at the beginning of the first user message, for templates that have no system role."""
    first, *others = gather_system(turns)
    if first["role"] != "system" or not others or others[0]["role"] != "user":
        return turns
    return [{**others[0], "content": f"{first['content']}\n\n{others[0]['content']}"}, *others[1:]]


def text_arguments(turns: list[Turn]) -> list[Turn]:
    """Tool arguments as JSON text, for templates that write them out as they are."""
    return [
        {**turn, "tool_calls": [_as_text(call) for call in turn["tool_calls"]]} if "tool_calls" in turn else turn
        for turn in turns
    ]


def _as_text(call: Turn) -> Turn:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {**call["function"], "arguments": text}}


def _call(call: ToolCall) -> Turn:
    """In the shape that templates read; arguments as an object when they are one, as text when not."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_text(call: ToolCall) -> str:
    return f'{{"name": {msgspec.json.encode(call.name).decode()}, "arguments": {call.arguments}}}'


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
