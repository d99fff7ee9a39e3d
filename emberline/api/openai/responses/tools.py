"""The tools of the Responses API: functions, namespaces of functions, and custom tools that take plain text."""

import re
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from emberline.api.common.tools import (
    DeclaredFunction,
    DeclaredTool,
    NamedToolChoice,
    ToolChoiceField,
    ToolName,
    Toolset,
    choose,
    declare,
)
from emberline.api.http.decode_errors import explain
from emberline.api.openai.responses.items import CUSTOM_ARGUMENT, tool_name
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import Tool

T = TypeVar("T")

_SEARCHES = frozenset({"web_search", "web_search_preview"})


class TextFormat(msgspec.Struct):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] = "lark"
    definition: str = ""


class CustomTool(msgspec.Struct):
    name: ToolName
    description: str | None = None
    format: TextFormat | None = None


class Namespace(msgspec.Struct):
    name: ToolName
    tools: list[dict[str, Any]]


class _FunctionTool(DeclaredFunction, tag_field="type", tag="function"):
    function: DeclaredFunction | None = None  # nested, as in chats


class _TaggedCustomTool(CustomTool, tag_field="type", tag="custom"):
    pass


class _TaggedNamespace(Namespace, tag_field="type", tag="namespace"):
    pass


AnyTool = _FunctionTool | _TaggedCustomTool | _TaggedNamespace  # names the fields that tools may have


class ClientTool(NamedTuple):
    """A tool as the client declared it; the model sees one flat name."""

    name: str
    namespace: str | None
    custom: bool


class ParsedTools(NamedTuple):
    toolset: Toolset
    client_tools: dict[str, ClientTool]  # by the name that the model sees


_Declaration = tuple[Tool, str, ClientTool]  # with the field that declares it


def parse_tools(tools: list[dict[str, Any]] | None, choice: ToolChoiceField | None) -> ParsedTools:
    """The tools that the model may call. Tools that the provider would run are refused unless `droppable`."""
    found: list[_Declaration] = []
    for i, raw in enumerate(tools or ()):
        if not droppable(raw, choice):
            found += _declarations(raw, f"tools[{i}]", None)
    declared = Toolset.of((tool, field) for tool, field, _ in found)
    if isinstance(choice, NamedToolChoice) and choice.type == "custom":
        choice = msgspec.structs.replace(choice, type="function")
    return ParsedTools(choose(declared, choice), {tool.name: client_tool for tool, _, client_tool in found})


def _declarations(raw: dict[str, Any], field: str, namespace: str | None) -> list[_Declaration]:
    kind = raw.get("type")
    if not isinstance(kind, str):
        raise BadInput(f"`{field}.type` must be a text", param=f"{field}.type")
    if kind == "function":
        function = _converted(raw, DeclaredTool, field)
        if function.name is None:
            raise BadInput(f"`{field}` has no name", param=f"{field}.name")
        name = tool_name(function.name, namespace)
        tool = declare(DeclaredFunction(name, function.description, function.parameters, function.strict), field)
        return [(tool, field, ClientTool(function.name, namespace, custom=False))]
    if kind == "custom":
        custom = _converted(raw, CustomTool, field)
        return [(_as_function(custom, namespace), field, ClientTool(custom.name, namespace, custom=True))]
    if kind == "namespace" and namespace is None:
        space = _converted(raw, Namespace, field)
        inner = [_declarations(tool, f"{field}.tools[{i}]", space.name) for i, tool in enumerate(space.tools)]
        return [declaration for declarations in inner for declaration in declarations]
    raise Unsupported(
        f"`{field}`: tools of type {kind[:80]!r} are not supported; leave it out, or declare a function of your own",
        param=f"{field}.type",
    )


def droppable(raw: dict[str, Any], choice: ToolChoiceField | None) -> bool:
    """True if a provider's own tool can be left out: if no tool may be called, or for a search, which a model is never
    obliged to make. Codex always declares one and fails where it is refused."""
    kind = raw.get("type")
    if kind in ("function", "custom", "namespace"):
        return False
    return choice == "none" or (isinstance(kind, str) and kind in _SEARCHES)


def _as_function(custom: CustomTool, namespace: str | None) -> Tool:
    """A function with one string. A regular expression is enforced; a Lark grammar is only shown to the model."""
    text: dict[str, Any] = {"type": "string"}
    description = custom.description or ""
    form = custom.format
    if form is not None and form.type == "grammar" and form.syntax == "regex":
        text["pattern"] = f"^(?:{form.definition})$"
    elif form is not None and form.type == "grammar":
        description += f"\n\n`{CUSTOM_ARGUMENT}` is text of this Lark grammar:\n{form.definition}"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: text},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    return Tool(tool_name(custom.name, namespace), description.strip(), parameters, strict=True)


def _converted(raw: dict[str, Any], kind: type[T], field: str) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as bad:
        raise BadInput(explain(str(bad), field)[0], param=field) from None


_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_ARGUMENT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_UNIT = re.compile(r"\\u([0-9A-Fa-f]{4})")
_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class ArgumentTextDecoder:
    """Decodes the string inside a custom tool's JSON arguments incrementally, as the arguments arrive."""

    def __init__(self) -> None:
        self._rest = ""  # undecoded: an incomplete opening or escape
        self._inside = False
        self._ended = False

    def push(self, piece: str) -> str:
        rest = self._rest + piece
        if not self._inside:
            opening = _OPENING.match(rest)
            if opening is None:
                self._rest = rest
                return ""
            self._inside, rest = True, rest[opening.end() :]
        texts: list[str] = []
        at = 0
        while at < len(rest) and not self._ended:
            if plain := _PLAIN.match(rest, at):
                texts.append(plain[0])
                at = plain.end()
            elif rest[at] == '"':
                self._ended = True
            elif (escape := _escape(rest, at)) is not None:
                texts.append(escape[0])
                at = escape[1]
            else:
                break
        self._rest = rest[at:]
        return "".join(texts)


def _escape(text: str, at: int) -> tuple[str, int] | None:
    """The character of the escape at `at`, and where the escape ends; None if it is incomplete."""
    kind = text[at + 1 : at + 2]
    if kind in _SHORT:
        return _SHORT[kind], at + 2
    unit = _unit(text, at)
    if unit is None:
        return None
    if not 0xD800 <= unit < 0xDC00:
        return chr(unit if not 0xDC00 <= unit < 0xE000 else 0xFFFD), at + 6
    if len(text) < at + 8 and "\\u".startswith(text[at + 6 :]):
        return None
    low = _unit(text, at + 6)
    if low is None:
        return None if text.startswith("\\u", at + 6) else ("\ufffd", at + 6)
    if not 0xDC00 <= low < 0xE000:
        return "\ufffd", at + 6
    return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)), at + 12


def _unit(text: str, at: int) -> int | None:
    """The code unit of the \\uXXXX at `at`; None if it is incomplete or no such escape."""
    found = _UNIT.match(text, at)
    return int(found[1], 16) if found else None
