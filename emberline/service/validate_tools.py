"""What a request may declare as tools, and whether its tool results answer calls."""

import re
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message, Tool, ToolChoice

MAX_TOOLS = 128
MAX_DEPTH = 64  # of a tool's parameters
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def validate_tools(request: GenerateRequest) -> None:
    """BadInput names the field that is wrong."""
    if request.tools or request.tool_choice.mode == "required":
        _check_tools(request.tools)
        _check_choice(request.tool_choice, request.tools)
    if request.messages is not None:
        _check_results(request.messages)


def _check_tools(tools: tuple[Tool, ...]) -> None:
    if len(tools) > MAX_TOOLS:
        raise BadInput(f"a request may declare {MAX_TOOLS} tools, not {len(tools)}", param="tools")
    names: set[str] = set()
    for at, tool in enumerate(tools):
        if not NAME.fullmatch(tool.name):
            raise BadInput(
                f"a tool's name has 1 to 64 letters, digits, dots, dashes and underscores, unlike {tool.name[:80]!r}",
                param=f"tools[{at}].name",
            )
        if tool.name in names:
            raise BadInput(f"two tools are named {tool.name}: rename one", param=f"tools[{at}].name")
        names.add(tool.name)
        if tool.parameters.get("type", "object") != "object":
            message = f"tool {tool.name}: parameters must be the schema of an object, with type 'object'"
            raise BadInput(message, param=f"tools[{at}].parameters")
        if _deeper(tool.parameters, MAX_DEPTH):
            message = f"tool {tool.name}: parameters are nested deeper than {MAX_DEPTH}"
            raise BadInput(message, param=f"tools[{at}].parameters")
    try:
        msgspec.json.encode(tools)
    except UnicodeEncodeError:
        message = "the tools contain a lone surrogate (half of a UTF-16 pair), which is not Unicode"
        raise BadInput(message, param="tools") from None


def _check_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    if choice.mode == "required" and not tools:
        raise BadInput("tool_choice demands a call, but tools is empty: declare at least one", param="tool_choice")
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        raise BadInput(f"tool_choice names {choice.name[:80]!r}, which is not among tools", param="tool_choice")


def _check_results(messages: tuple[Message, ...]) -> None:
    """A result without an id is taken as it stands: not every dialect has ids."""
    called: set[str] = set()
    for at, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id is not None and message.tool_call_id not in called:
            raise BadInput(
                f"a tool result answers {message.tool_call_id[:80]!r}, but no assistant message before it has a call "
                "with that id",
                param=f"messages[{at}].tool_call_id",
            )


def _deeper(value: Any, most: int) -> bool:
    """Level by level, so that depth costs no stack."""
    level = [value]
    for _ in range(most + 1):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return bool(level)
