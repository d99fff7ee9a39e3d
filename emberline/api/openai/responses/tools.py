"""The tools of the Responses API: functions, namespaces of functions, and custom tools that take plain text."""

import re
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from emberline.api.common.tools import (
    DeclaredTool,
    Picked,
    PickedTool,
    ToolName,
    Toolset,
    check_unique,
    choose,
    declare,
)
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


class Called(NamedTuple):
    """How the client knows a tool that the model calls by one name."""

    name: str
    namespace: str | None
    custom: bool


class Offered(NamedTuple):
    toolset: Toolset
    called: dict[str, Called]  # by the model's name


def offered(tools: list[dict[str, Any]] | None, choice: Picked | None) -> Offered:
    """The tools that the model is shown. One that only the provider could run is refused, unless it need not run."""
    found: list[tuple[Tool, str, Called]] = []
    for i, raw in enumerate(tools or ()):
        if not needless(raw, choice):
            found += _tools(raw, f"tools[{i}]", None)
    given = Toolset(tuple(tool for tool, _, _ in found), where=tuple(where for _, where, _ in found))
    check_unique(given)
    if isinstance(choice, PickedTool) and choice.type == "custom":
        choice = msgspec.structs.replace(choice, type="function")
    return Offered(choose(given, choice), {tool.name: called for tool, _, called in found})


def _tools(raw: dict[str, Any], where: str, namespace: str | None) -> list[tuple[Tool, str, Called]]:
    kind = raw.get("type")
    if kind == "function":
        function = _converted(raw, DeclaredTool, where)
        if function.name is None:
            raise BadInput(f"`{where}` has no name", param=f"{where}.name")
        name = tool_name(function.name, namespace)
        tool = declare(name, function.description, function.parameters, function.strict, where)
        return [(tool, where, Called(function.name, namespace, custom=False))]
    if kind == "custom":
        custom = _converted(raw, CustomTool, where)
        return [(_as_function(custom, namespace), where, Called(custom.name, namespace, custom=True))]
    if kind == "namespace" and namespace is None:
        space = _converted(raw, Namespace, where)
        inner = [_tools(tool, f"{where}.tools[{i}]", space.name) for i, tool in enumerate(space.tools)]
        return [one for several in inner for one in several]
    raise Unsupported(
        f"`{where}`: tools of type {kind!r} are not offered here; leave it out, or declare a function of your own",
        param=f"{where}.type",
    )


def needless(raw: dict[str, Any], choice: Picked | None) -> bool:
    """Whether a provider's own tool can be left out: no tool is called when none may be, and a search that the model
    may make is one that it may not make. Codex sends one always, and does not run where it is refused."""
    kind = raw.get("type")
    if kind in ("function", "custom", "namespace"):
        return False
    return choice == "none" or kind in _SEARCHES


def _as_function(custom: CustomTool, namespace: str | None) -> Tool:
    """A function with one string. A regular expression is enforced; a Lark grammar is shown to the model."""
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


def _converted(raw: dict[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as bad:
        raise BadInput(str(bad).replace("`$", f"`$.{where}", 1), param=where) from None


_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_ARGUMENT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_UNIT = re.compile(r"\\u([0-9A-Fa-f]{4})")
_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class ArgumentText:
    """Fed with the arguments' pieces, gives the string inside them piece by piece."""

    def __init__(self) -> None:
        self._rest = ""  # not understood yet: the opening, or an escape that is cut
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
    """The character that the escape at `at` stands for and where it ends; None: more is to come."""
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
    """The number of the \\uXXXX at `at`; None: it is not whole, or none."""
    found = _UNIT.match(text, at)
    return int(found[1], 16) if found else None
