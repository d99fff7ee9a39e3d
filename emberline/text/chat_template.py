"""Chat templates: messages to the text format that the model was trained on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message, ToolCall
from emberline.text.template_renderer import BadTemplate, LocalRenderer, RefusedTurns, RendererFactory, Turn
from emberline.text.tool_calls.formats import ToolCallFormat, family_ids, tool_result_text
from emberline.weights.model_config import BadCheckpoint

Part = dict[str, str]  # of a content: a text, or the place of an image
_READS_PARTS = re.compile(r"""\[\s*["']type["']\s*\]|\.type\b""")
_PROBE = "emberline"


def _text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def joined(contents: Sequence[str | list[Part]]) -> str | list[Part]:
    """Contents of messages as one, with an empty line between two."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    parts: list[Part] = []
    for content in contents:
        parts += [_text_part("\n\n")] if parts else []
        parts += [_text_part(content)] if isinstance(content, str) else content
    return parts


class Roles:
    """The roles and fields that a template supports, judged by its source."""

    def __init__(self, source: str) -> None:
        self.developer = "developer" in source
        self.tool = re.search(r"""["']tool["']""", source) is not None
        self.tool_calls = "tool_calls" in source
        self.thinking = "message.thinking" in source  # GPT-OSS's name of the reasoning before a call

    def turns(self, messages: Sequence[Message], untemplated: ToolCallFormat | None = None) -> list[Turn]:
        """Messages as templates read them; a role that the template does not support becomes the nearest one.

        developer → system. tool → user; the results of one round of calls, and a user message right after them, make
        one turn, since templates without the role want user and assistant to alternate. An assistant's tool calls →
        JSON lines in its text. With `untemplated`, calls and results are written in that format in any case.
        """
        turns: list[Turn] = []
        contents: list[list[str | list[Part]]] = []  # of the messages of each turn
        results = False  # whether the last turn consists of tool results
        for message in messages:
            turn = self._turn(message, untemplated)
            was_results, results = results, message.role == "tool" and turn["role"] == "user"
            if was_results and turn["role"] == "user":
                contents[-1].append(turn["content"])
            else:
                turns.append(turn)
                contents.append([turn["content"]])
        for turn, found in zip(turns, contents, strict=True):
            if len(found) > 1:
                turn["content"] = joined(found)
        return turns

    def _turn(self, message: Message, untemplated: ToolCallFormat | None) -> Turn:
        role = message.role
        if role == "developer" and not self.developer:
            role = "system"
        elif role == "tool" and (untemplated is not None or not self.tool):
            role = "user"
        turn: Turn = {"role": role, "content": _content(message) if message.parts else message.content}
        if message.role == "tool" and untemplated is not None:
            images = [part for part in _content(message) if part == _IMAGE]
            text = tool_result_text(message.content)
            turn["content"] = [_text_part(text), *images] if images else text
        if message.reasoning is not None:
            turn["reasoning_content"] = message.reasoning
            if self.thinking and message.tool_calls and not message.content:  # the template refuses both
                turn["thinking"] = message.reasoning
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls and untemplated is not None:
            turn["content"] = "\n".join(filter(None, [message.content, untemplated.write(message.tool_calls)]))
        elif message.tool_calls and self.tool_calls:
            turn["tool_calls"] = [_call(call) for call in message.tool_calls]
        elif message.tool_calls:
            turn["content"] = "\n".join(filter(None, [message.content, *map(_call_text, message.tool_calls)]))
        return turn


_IMAGE: Part = {"type": "image"}


def _content(message: Message) -> str | list[Part]:
    """The text of a message, or its parts if it has images."""
    if not message.parts or not message.n_media:
        return message.content
    return [_IMAGE if part.kind == "image" else _text_part(part.value) for part in message.content_parts]


def with_system_text(turns: list[Turn], text: str) -> list[Turn]:
    """Appends the text to the leading system message, or adds one."""
    first, *others = turns
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *turns]
    return [{**first, "content": joined([content for content in (first["content"], text) if content])}, *others]


def with_family_ids(messages: Sequence[Message], form: ToolCallFormat) -> Sequence[Message]:
    """The messages with call ids in the style that the family's templates require."""
    calls = [call for message in messages for call in message.tool_calls]
    if not calls or not (ids := family_ids(form.ids, calls)):
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
    return [{"role": "system", "content": joined(system)}, *others] if system else turns


def fold_system(turns: list[Turn]) -> list[Turn]:
    """System text at the beginning of the first user message, for templates that have no system role."""
    first, *others = gather_system(turns)
    if first["role"] != "system" or not others or others[0]["role"] != "user":
        return turns
    return [{**others[0], "content": joined([first["content"], others[0]["content"]])}, *others[1:]]


def text_arguments(turns: list[Turn]) -> list[Turn]:
    """Tool arguments as JSON text, for templates that do not serialize them."""
    return [
        {**turn, "tool_calls": [_as_text(call) for call in turn["tool_calls"]]} if "tool_calls" in turn else turn
        for turn in turns
    ]


def _as_text(call: Turn) -> Turn:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {**call["function"], "arguments": text}}


def _call(call: ToolCall) -> Turn:
    """Return the call as templates read it: arguments parsed if they are JSON, otherwise as text."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_text(call: ToolCall) -> str:
    return f'{{"name": {msgspec.json.encode(call.name).decode()}, "arguments": {call.arguments}}}'


# For models without a chat template, mostly base models: plain text without special tokens.
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOPS = ("\nUser:", "\nSystem:")  # where such a model continues with the next speaker

_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"})


class ChatTemplate:
    """A model's chat template. `tokens` are the special tokens that it may refer to (bos_token, eos_token, …)."""

    def __init__(
        self,
        source: str | None,
        tokens: Mapping[str, str] | None = None,
        renderers: RendererFactory = LocalRenderer,
    ) -> None:
        """Raises BadCheckpoint if the template does not compile."""
        self.model_name = ""  # for errors, if the model has one
        self.source = PLAIN if source is None else source
        self.stops = PLAIN_STOPS if source is None else ()
        try:
            self._renderer = LocalRenderer(PLAIN) if source is None else renderers(source)
        except BadTemplate as error:
            raise BadCheckpoint(str(error)) from None
        self.variables = self._renderer.variables  # that it reads
        self.blocks = self._renderer.blocks  # True if rendering waits for another process: call it in a thread
        self._roles = Roles(self.source)
        self.tokens = dict(tokens or {})  # texts of special tokens, by their names in templates
        self._wants_parts = self._leaves_texts_out()

    def turns(self, messages: Sequence[Message], untemplated: ToolCallFormat | None = None) -> list[Turn]:
        if not messages:
            raise BadInput("messages is empty; send at least one message", param="messages")
        return self._roles.turns(messages, untemplated)

    def render(
        self,
        turns: list[Turn],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The rendered text. A template that rejects the turns is tried with other arrangements of them."""
        if taken := _RESERVED & kwargs.keys():
            raise BadInput(f"template arguments may not set {min(taken)!r}", param="template_kwargs")
        values = self.tokens | {"tools": tools, "documents": None, **kwargs}
        values["add_generation_prompt"] = add_generation_prompt
        refusal: BadInput | None = None
        for attempt in _attempts(turns):
            try:
                return self._renderer.render(_in_parts(attempt) if self._wants_parts else attempt, values)
            except RefusedTurns as error:
                refusal = refusal or error
            except BadInput as error:  # the template was stopped
                refusal = error
                break
        assert refusal is not None
        named = f"{self.model_name}: {refusal.message}" if self.model_name else refusal.message
        raise BadInput(named, param="messages")

    def _leaves_texts_out(self) -> bool:
        """True if the template renders contents that are lists of parts, and nothing of one that is a text: templates
        of some vision models are written so."""
        if _READS_PARTS.search(self.source) is None:
            return False
        found: list[bool] = []
        for content in (_PROBE, [_text_part(_PROBE)]):
            try:
                turns = [{"role": "user", "content": content}]
                found.append(_PROBE in self._renderer.render(turns, {**self.tokens, "add_generation_prompt": True}))
            except BadInput:
                found.append(False)
        return found == [False, True]


def _in_parts(turns: list[Turn]) -> list[Turn]:
    """The turns with every content as a list of parts."""
    return [
        {**turn, "content": [_text_part(turn["content"])]} if isinstance(turn["content"], str) else turn
        for turn in turns
    ]


def _attempts(turns: list[Turn]) -> Iterator[list[Turn]]:
    """The turns as they are, then in other arrangements that templates accept."""
    yield turns
    for change in (gather_system, fold_system, text_arguments):
        changed = change(turns)
        if changed != turns:
            yield changed
