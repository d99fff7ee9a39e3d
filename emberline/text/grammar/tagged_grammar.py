"""Tool-call arguments as tagged keys and values (GLM, Qwen3-Coder): their grammar, from the tool's schema."""

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Expression, Free, Text, Token
from emberline.protocol.request import Tool
from emberline.text.grammar.builder import Builder, choice, optional, repeat, sequence
from emberline.text.grammar.json_schema.compile import schema_expression
from emberline.text.grammar.json_schema.document import UnsupportedSchema
from emberline.text.tool_calls.formats import ToolCallFormat, split_tokens
from emberline.text.tool_calls.tagged_arguments import is_text

MAX_PAIRS = 64  # of a tool that declares no properties


def spelled(text: str, format: ToolCallFormat) -> Expression:
    """The text, with those of the format's markers that are special tokens as tokens."""
    pieces = split_tokens(text, format.tokens)
    return sequence(*(Token(piece) if isinstance(piece, int) else Text(piece) for piece in pieces))


def tagged_expression(builder: Builder, tool: Tool, format: ToolCallFormat) -> Expression:
    """The properties in their declared order; any keys and texts for a tool that declares none."""
    assert format.tags is not None
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required", [])
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
    if is_text(schema):
        values = (
            schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
        )
        return choice([Text(value) for value in values if isinstance(value, str)]) if values else None
    if not isinstance(schema, dict | bool):
        return None
    document = schema if isinstance(schema, bool) else _with_definitions(tool, schema)
    try:
        return schema_expression(builder, document, "tools")
    except UnsupportedSchema as error:
        if tool.strict:
            raise BadInput(f"tool {tool.name}: {error.message}", param="tools") from None
        return None
    except BadInput as error:
        raise BadInput(f"tool {tool.name}: {error.message}", param="tools") from None


def _with_definitions(tool: Tool, schema: dict[str, object]) -> dict[str, object]:
    inherited = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return inherited | schema


def _until(text: str, format: ToolCallFormat) -> Free:
    first = split_tokens(text, format.tokens)[0]
    return Free(() if isinstance(first, int) else (first,))
