"""Tool-call arguments as tagged keys and values (GLM, Qwen3-Coder): their grammar, from the tool's schema."""

from collections.abc import Set
from typing import Any

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import MAX_CODE_POINT, Chars, Expression, Free, Text, Token
from emberline.protocol.request import Tool
from emberline.text.grammar.expressions import character_dfa
from emberline.text.grammar.expressions.builder import Builder, choice, optional, repeat, sequence
from emberline.text.grammar.expressions.character_dfa import CharacterDfa
from emberline.text.grammar.expressions.regex import parse
from emberline.text.grammar.json_schema.compile import schema_expression
from emberline.text.grammar.json_schema.strings import FORMATS
from emberline.text.tool_calls.formats import ToolCallFormat, split_tokens
from emberline.text.tool_calls.tagged_arguments import is_text

MAX_PAIRS = 64  # of a tool that declares no properties
_NOTES = {"title", "description", "default", "examples", "$schema", "$comment"}
_KEYWORDS = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_TEXT_KEYWORDS = _NOTES | {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"}
_ANY = Chars(((0, 0xD7FF), (0xE000, MAX_CODE_POINT)))
_NOT_A_TAG = Chars(((0, ord("<") - 1), (ord("<") + 1, 0xD7FF), (0xE000, MAX_CODE_POINT)))


def spelled(text: str, format: ToolCallFormat) -> Expression:
    """The text, with those of the format's markers that are special tokens as tokens."""
    pieces = split_tokens(text, format.tokens)
    return sequence(*(Token(piece) if isinstance(piece, int) else Text(piece) for piece in pieces))


def tagged_expression(builder: Builder, tool: Tool, format: ToolCallFormat) -> Expression:
    """The properties in their declared order; any keys and texts for a tool that declares none."""
    assert format.tags is not None
    _check(tool, tool.parameters.keys() - _KEYWORDS)
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required", [])
    if not isinstance(required, list):
        raise BadInput(f"tool {tool.name}: 'required' is not a list", param="tools")
    text = builder.add(sequence(_until(format.tags.end, format), spelled(format.tags.end, format)))
    if not isinstance(properties, dict):
        key = sequence(spelled(format.tags.key, format), _until(format.tags.value, format))
        pair = builder.add(sequence(key, spelled(format.tags.value, format), text))
        return repeat(pair, 0, MAX_PAIRS) if not tool.strict else Text("")
    pairs = []
    for name, schema in properties.items():
        value = _value(builder, tool, schema, format)
        rest = text if value is None else sequence(value, spelled(format.tags.end, format))
        pair = sequence(spelled(format.tags.key + name + format.tags.value, format), rest)
        pairs.append(pair if name in required else optional(pair))
    return sequence(*pairs)


def _value(builder: Builder, tool: Tool, schema: object, format: ToolCallFormat) -> Expression | None:
    """A value of this schema; None: any text."""
    if isinstance(schema, dict) and is_text(schema):
        return _text(builder, tool, schema, format)
    if not isinstance(schema, dict | bool):
        return None
    document = schema if isinstance(schema, bool) else _with_definitions(tool, schema)
    try:
        return schema_expression(builder, document, "tools", lenient=not tool.strict)
    except BadInput as error:
        raise BadInput(f"tool {tool.name}: {error.message}", param="tools") from None


def _text(builder: Builder, tool: Tool, schema: dict[str, Any], format: ToolCallFormat) -> Expression | None:
    """Plain text of this schema; None: any."""
    _check(tool, schema.keys() - _TEXT_KEYWORDS)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return choice([Text(value) for value in values if isinstance(value, str)])
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    lengths = (least, least if most is None else most)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in lengths) or lengths[0] > lengths[1]:
        raise BadInput(f"tool {tool.name}: minLength and maxLength allow no text", param="tools")
    assert format.tags is not None
    spelled_out = isinstance(split_tokens(format.tags.end.strip(), format.tokens)[0], str)
    character = _NOT_A_TAG if spelled_out else _ANY
    if (patterns := _patterns(schema)) and (dfa := _matching(tool, patterns, character, least, most)) is not None:
        return character_dfa.to_expression(dfa, builder)
    return repeat(character, least, most) if least or most is not None else None


def _patterns(schema: dict[str, Any]) -> list[str]:
    """Regular expressions of `pattern` and `format`; a format that is not known here is a note."""
    pattern, name = schema.get("pattern"), schema.get("format")
    found = [pattern] if isinstance(pattern, str) else []
    return [*found, f"^(?:{FORMATS[name]})$"] if isinstance(name, str) and name in FORMATS else found


def _matching(tool: Tool, patterns: list[str], character: Chars, least: int, most: int | None) -> CharacterDfa | None:
    """The texts of these characters and lengths in which every pattern is found. Returns None if a tool that is not
    strict has no such text, or a pattern that cannot be followed."""
    dfa = CharacterDfa([[(low, high, 0) for low, high in character.ranges]], {0})
    try:
        for pattern in patterns:
            each = character_dfa.from_expression(parse(pattern, search=True, param="tools"))
            dfa = character_dfa.intersect(dfa, each)
        if least or most is not None:
            dfa = character_dfa.of_length(dfa, least, most)
        if dfa.shortest() is None:
            raise BadInput(f"no text of this tool call matches {patterns[0]!r} and the other constraints")
    except BadInput as error:
        if tool.strict:
            raise BadInput(f"tool {tool.name}: {error.message}", param="tools") from None
        return None
    return dfa


def _check(tool: Tool, unsupported: Set[str]) -> None:
    """A keyword that the grammar does not follow is an error of a strict tool; others are bound without it."""
    if tool.strict and unsupported:
        raise BadInput(f"tool {tool.name}: {min(unsupported)!r} is not supported with this model", param="tools")


def _with_definitions(tool: Tool, schema: dict[str, object]) -> dict[str, object]:
    inherited = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return inherited | schema


def _until(text: str, format: ToolCallFormat) -> Free:
    first = split_tokens(text, format.tokens)[0]
    return Free(() if isinstance(first, int) else (first,))
