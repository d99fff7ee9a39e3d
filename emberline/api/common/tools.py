"""Functions that the model may call, and the choice among them: OpenAI's and Cloudflare's forms into the canonical."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import Tool, ToolChoice

MAX_TOOLS = 128
NAME = re.compile(r"^[A-Za-z0-9_.-]+$")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

ToolName = Annotated[str, Meta(min_length=1, max_length=64, pattern=NAME.pattern)]
OnlyFunction = Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]


class DeclaredFunction(msgspec.Struct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class DeclaredTool(msgspec.Struct, kw_only=True):
    """A function, nested as OpenAI's chat has it, or flat as Cloudflare's older models and the Responses API do."""

    type: OnlyFunction = "function"
    function: DeclaredFunction | None = None
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


DeclaredTools = Annotated[list[DeclaredTool], Meta(max_length=MAX_TOOLS)]


class FunctionName(msgspec.Struct):
    name: str


class ToolReference(msgspec.Struct, kw_only=True):
    type: OnlyFunction = "function"
    function: FunctionName | None = None
    name: str | None = None


class AllowedTools(msgspec.Struct):
    tools: list[ToolReference]
    mode: Literal["auto", "required"] = "auto"


class PickedTool(msgspec.Struct, kw_only=True):
    """One function, or a list of those that may be called; nested or flat."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function", "allowed_tools"]})] = "function"
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    tools: list[ToolReference] | None = None
    mode: Literal["auto", "required"] | None = None


Picked = Literal["auto", "none", "required", "any"] | PickedTool


class Toolset(msgspec.Struct, frozen=True):
    """What a request may call, and where its caller wrote each of the tools."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    where: tuple[str, ...] = ()


def toolset(tools: Sequence[DeclaredTool] | None, choice: Picked | None) -> Toolset:
    found: list[Tool] = []
    where: list[str] = []
    for i, tool in enumerate(tools or ()):
        function, here = _function(tool, f"tools[{i}]")
        found.append(declare(function.name, function.description, function.parameters, function.strict, here))
        where.append(here)
    whole = Toolset(tuple(found), where=tuple(where))
    check_unique(whole)
    return choose(whole, choice)


def choose(given: Toolset, choice: Picked | None) -> Toolset:
    """The toolset as the caller's `tool_choice` wants it used."""
    if isinstance(choice, PickedTool):
        if choice.type == "allowed_tools":
            return _allow(given, choice)
        if choice.type != "function":
            raise Unsupported(f"`tool_choice` of type {choice.type!r} is not supported", param="tool_choice.type")
        name = choice.function.name if choice.function else choice.name
        if name is None:
            raise BadInput("`tool_choice` names no function", param="tool_choice")
        return require(given, name)
    if choice in ("required", "any"):
        return require(given, None)
    return msgspec.structs.replace(given, choice=ToolChoice("none" if choice == "none" else "auto"))


def require(given: Toolset, name: str | None, field: str = "tool_choice") -> Toolset:
    """A call there must be: of that function, or of any (None)."""
    if not given.tools:
        raise BadInput(f"`{field}` asks for a call, and there are no tools to call", param=field)
    if name is not None and name not in {tool.name for tool in given.tools}:
        raise BadInput(f"`{field}` names {name!r}, which is not among the tools", param=field)
    return msgspec.structs.replace(given, choice=ToolChoice("required", name))


def declare(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None, where: str
) -> Tool:
    """One canonical tool. Without a schema it is a function that takes nothing."""
    if not NAME.fullmatch(name):
        where += ".name"
        raise BadInput(f"`{where}` may have letters, digits, `_`, `-` and `.`, not {name!r}", param=where)
    return Tool(name, description or "", NO_ARGUMENTS if parameters is None else parameters, bool(strict))


def check_unique(given: Toolset) -> None:
    names: set[str] = set()
    for tool, where in zip(given.tools, given.where, strict=True):
        if tool.name in names:
            raise BadInput(f"`{where}.name`: there are two tools named {tool.name!r}", param=f"{where}.name")
        names.add(tool.name)


def _function(tool: DeclaredTool, where: str) -> tuple[DeclaredFunction, str]:
    """The function that a tool declares, and where it stands."""
    if tool.type != "function":
        raise Unsupported(
            f"`{where}`: tools of type {tool.type!r} are not supported; declare a function", param=f"{where}.type"
        )
    if tool.function is not None:
        return tool.function, f"{where}.function"
    if tool.name is None:
        raise BadInput(f"`{where}` declares no function", param=where)
    return DeclaredFunction(tool.name, tool.description, tool.parameters, tool.strict), where


def _allow(given: Toolset, choice: PickedTool) -> Toolset:
    """Only the listed tools remain, so that the others are neither shown nor called."""
    listed = choice.allowed_tools or AllowedTools(choice.tools or [], choice.mode or "auto")
    names = {reference.function.name if reference.function else reference.name for reference in listed.tools}
    kept = [i for i, tool in enumerate(given.tools) if tool.name in names]
    missing = names - {given.tools[i].name for i in kept}
    if missing or not names:
        shown = ", ".join(sorted(map(repr, missing))) or "nothing"
        raise BadInput(f"`tool_choice` allows {shown}, which is not among the tools", param="tool_choice")
    fewer = Toolset(tuple(given.tools[i] for i in kept), where=tuple(given.where[i] for i in kept))
    return require(fewer, None) if listed.mode == "required" else fewer


Functions = Annotated[list[DeclaredFunction], Meta(max_length=MAX_TOOLS)]
FunctionPick = Literal["auto", "none"] | FunctionName


def functions_as_tools(functions: list[DeclaredFunction], pick: FunctionPick | None) -> Toolset:
    where = tuple(f"functions[{i}]" for i in range(len(functions)))
    tools = tuple(
        declare(function.name, function.description, function.parameters, function.strict, here)
        for function, here in zip(functions, where, strict=True)
    )
    given = Toolset(tools, where=where)
    check_unique(given)
    if isinstance(pick, FunctionName):
        return require(given, pick.name, "function_call")
    return msgspec.structs.replace(given, choice=ToolChoice("none" if pick == "none" else "auto"))
