"""Tools in a conversation: in the shape that templates take, and in our own words for templates that know none."""

from collections.abc import Sequence
from typing import Any

import msgspec

from emberline.protocol.request import Tool


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """OpenAI's shape. Some templates go over the properties without asking whether there are any."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": {"type": "object", "properties": {}} | tool.parameters,
            },
        }
        for tool in tools
    ]


def system_text(tools: Sequence[Tool]) -> str:
    """The same for the same tools, to the byte: it stands at the beginning of every prompt of a conversation."""
    lines = [_declaration(tool) for tool in tools]
    return "\n".join([_BEFORE, *lines, _AFTER])


_BEFORE = "You can call these functions, given as JSON lines:\n<tools>"
_AFTER = (
    "</tools>\n"
    "To call one, reply with its name and its arguments as JSON inside these tags, one pair of tags per call:\n"
    '<tool_call>\n{"name": "the name", "arguments": {"key": "value"}}\n</tool_call>\n'
    "What it returns comes back inside <tool_response> tags. Then answer, or call again."
)


def result_text(content: str) -> str:
    """A call's result, in a user's turn."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _declaration(tool: Tool) -> str:
    """Parameters in the order they were declared: calls are written in that order."""
    row = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return msgspec.json.encode({key: value for key, value in row.items() if value}).decode()
