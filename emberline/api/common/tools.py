"""Tools and the choice among them: the OpenAI and Workers AI formats converted to the canonical one."""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from emberline.api.common.unsupported_fields import ProviderMark
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import Tool, ToolChoice
from emberline.service.validation import MAX_TOOLS

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
    """A function, nested as in OpenAI's chat, or flat as in older Workers AI models and the Responses API."""

    type: OnlyFunction = "function"
    function: DeclaredFunction | None = None
    name: ToolName | None = None
    cache_control: ProviderMark = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


DeclaredTools = Annotated[list[DeclaredTool], Meta(max_length=MAX_TOOLS)]
DeclaredFunctions = Annotated[list[DeclaredFunction], Meta(max_length=MAX_TOOLS)]


class FunctionName(msgspec.Struct):
    name: str


class ToolReference(msgspec.Struct, kw_only=True):
    type: OnlyFunction = "function"
    function: FunctionName | None = None
    name: str | None = None


class AllowedTools(msgspec.Struct):
    tools: list[ToolReference]
    mode: Literal["auto", "required"] = "auto"


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """One function, or a list of those that may be called; nested or flat."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function", "allowed_tools"]})] = "function"
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    tools: list[ToolReference] | None = None
    mode: Literal["auto", "required"] | None = None


ToolChoiceField = Literal["auto", "none", "required", "any"] | NamedToolChoice
FunctionCallField = Literal["auto", "none"] | FunctionName


class Toolset(NamedTuple):
    """The canonical tools, the choice among them, and the field in which the client declared each tool."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    fields: tuple[str, ...] = ()

    @classmethod
    def of(cls, declared: Iterable[tuple[Tool, str]]) -> "Toolset":
        """Tools with the fields that declare them; two of one name are refused."""
        found: dict[str, tuple[Tool, str]] = {}
        for tool, field in declared:
            if tool.name in found:
                raise BadInput(f"`{field}.name`: there are two tools named {tool.name!r}", param=f"{field}.name")
            found[tool.name] = tool, field
        return cls(tuple(tool for tool, _ in found.values()), fields=tuple(field for _, field in found.values()))

    def optional(self, allowed: bool) -> "Toolset":
        """The model decides whether to call one, if calls are allowed at all."""
        return self._replace(choice=ToolChoice("auto" if allowed else "none"))

    def required(self, name: str | None, field: str = "tool_choice") -> "Toolset":
        """A call is required: of the named function, or of any (None)."""
        if not self.tools:
            raise BadInput(f"`{field}` requires a call, and there are no tools to call", param=field)
        if name is not None and name not in {tool.name for tool in self.tools}:
            raise BadInput(f"`{field}` names {name[:80]!r}, which is not among the tools", param=field)
        return self._replace(choice=ToolChoice("required", name))


def toolset(tools: Sequence[DeclaredTool] | None, choice: ToolChoiceField | None) -> Toolset:
    return choose(Toolset.of(_declared(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())), choice)


def provider_toolset(tools: Sequence[DeclaredTool] | None, choice: ToolChoiceField | None) -> Toolset:
    """Convert tools for a provider, who checks their names. A tool without a schema stays without one."""
    found = [(tool, *_function(tool, f"tools[{i}]")) for i, tool in enumerate(tools or ())]
    made = tuple(_marked(_tool(function, function.parameters or {}), tool) for tool, function, _ in found)
    return choose(Toolset(made, fields=tuple(field for *_, field in found)), choice)


def functions_toolset(functions: list[DeclaredFunction], choice: FunctionCallField | None) -> Toolset:
    """OpenAI's deprecated `functions` and `function_call`."""
    fields = ((function, f"functions[{i}]") for i, function in enumerate(functions))
    declared = Toolset.of((declare(function, field), field) for function, field in fields)
    if isinstance(choice, FunctionName):
        return declared.required(choice.name, "function_call")
    return declared.optional(choice != "none")


def choose(declared: Toolset, choice: ToolChoiceField | None) -> Toolset:
    """Apply the client's `tool_choice`."""
    if isinstance(choice, NamedToolChoice):
        if choice.type == "allowed_tools":
            return _allow(declared, choice)
        if choice.type != "function":
            raise Unsupported(f"`tool_choice` of type {choice.type[:80]!r} is not supported", param="tool_choice.type")
        name = choice.function.name if choice.function else choice.name
        if name is None:
            raise BadInput("`tool_choice` names no function", param="tool_choice")
        return declared.required(name)
    return declared.required(None) if choice in ("required", "any") else declared.optional(choice != "none")


def declare(function: DeclaredFunction, field: str) -> Tool:
    """The canonical tool. Without a schema it is a function without arguments."""
    if not NAME.fullmatch(function.name):
        field += ".name"
        raise BadInput(f"`{field}` may have letters, digits, `_`, `-` and `.`, not {function.name!r}", param=field)
    return _tool(function, NO_ARGUMENTS if function.parameters is None else function.parameters)


def _tool(function: DeclaredFunction, parameters: dict[str, Any]) -> Tool:
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def _declared(given: DeclaredTool, where: str) -> tuple[Tool, str]:
    """The canonical tool, and its field."""
    function, field = _function(given, where)
    return _marked(declare(function, field), given), field


def _marked(tool: Tool, given: DeclaredTool) -> Tool:
    """The tool with the mark that only providers read."""
    mark = given.cache_control
    return tool if mark is None else msgspec.structs.replace(tool, marks={"cache_control": mark})


def _function(tool: DeclaredTool, field: str) -> tuple[DeclaredFunction, str]:
    """Returns the function that a tool declares, and its field."""
    if tool.type != "function":
        raise Unsupported(
            f"`{field}`: tools of type {tool.type[:80]!r} are not supported; declare a function", param=f"{field}.type"
        )
    if tool.function is not None:
        return tool.function, f"{field}.function"
    if tool.name is None:
        raise BadInput(f"`{field}` declares no function", param=field)
    return DeclaredFunction(tool.name, tool.description, tool.parameters, tool.strict), field


def _allow(declared: Toolset, choice: NamedToolChoice) -> Toolset:
    """Keep only the listed tools, so that the model neither sees nor calls the others."""
    listed = choice.allowed_tools or AllowedTools(choice.tools or [], choice.mode or "auto")
    names = {reference.function.name if reference.function else reference.name for reference in listed.tools}
    missing = names - {tool.name for tool in declared.tools}
    if missing or not names:
        shown = ", ".join(sorted(map(repr, missing))) or "nothing"
        raise BadInput(f"`tool_choice` allows {shown}, which is not among the tools", param="tool_choice")
    pairs = zip(declared.tools, declared.fields, strict=True)
    kept = Toolset.of((tool, field) for tool, field in pairs if tool.name in names)
    return kept.required(None) if listed.mode == "required" else kept
