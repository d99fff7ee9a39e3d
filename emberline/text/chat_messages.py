"""Messages as chat templates expect them: the roles a template knows, tool calls as parsed JSON."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from emberline.protocol.request import Message, ToolCall
from emberline.text.tool_calls.formats import ToolForm, family_ids
from emberline.text.tool_calls.prompt import result_text

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
