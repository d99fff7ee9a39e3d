"""Tools as TypeScript declarations, which Kimi K2.5's chat template takes in place of JSON (`tools_ts_str`).

namespace functions {
// Get the weather.
type get_weather = (_: {
  // City name
  city: string,
  // Default: 3
  days?: number
}) => any;
}
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Any  # JSON, unchecked: what has no declaration raises one of the errors that `declare_tools` catches

_INDENT = "  "
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}


def sorted_deep(value: Any) -> Any:
    """With the keys of every object in order, as Kimi's own tokenizer gives tools to its template."""
    if isinstance(value, dict):
        return {key: sorted_deep(value[key]) for key in sorted(value)}
    return [sorted_deep(item) for item in value] if isinstance(value, list) else value


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Declare tools in OpenAI's form as TypeScript. Returns None where a schema has no such form; the template then
    writes JSON."""
    try:
        functions = [_function(tool["function"]) for tool in tools]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


def _function(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    writer = _Writer(schema.get("$defs") or {})
    parameters = writer.object(schema, "")
    interfaces = [_interface(name, schema, writer) for name, schema in writer.definitions.items()]
    if writer.refers_to_itself:
        inner = ",\n".join(writer.properties(schema, _INDENT, in_order=False))
        interfaces.insert(0, f"interface parameters {{\n{inner}\n}}")
        parameters = "parameters"
    comment = _comment(function.get("description") or "", "")
    return "\n".join([*interfaces, *comment, f"type {function['name']} = (_: {parameters}) => any;"])


def _interface(name: str, schema: Schema, writer: "_Writer") -> str:
    return "\n".join([*_comment(schema.get("description", ""), ""), f"interface {name} {writer.type(schema, '')}"])


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


class _Writer:
    """Writes one function's schemas."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self.definitions = definitions
        self.refers_to_itself = False

    def type(self, schema: Schema, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type(option, indent) for option in schema["anyOf"])
        if "enum" in schema:
            return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
        kind = schema["type"] if schema else "any"
        if isinstance(kind, list):
            return " | ".join(_UNION[name] for name in kind)
        if kind == "object":
            return self.object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else str(kind)

    def object(self, schema: Schema, indent: str) -> str:
        entries = self.properties(schema, indent + _INDENT)
        rest = schema.get("additionalProperties")
        if rest is not None:
            other = "never" if rest is False else self.type(rest, indent + _INDENT)
            entries.append(f"{indent}{_INDENT}[k: string]: {other}")
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}" if entries else "{}"

    def properties(self, schema: Schema, indent: str, *, in_order: bool = True) -> list[str]:
        """One entry for each, the required ones first; `in_order`: by name."""
        found, required = schema.get("properties", {}), schema.get("required", [])
        names = sorted(found, key=lambda name: (name not in required, name)) if in_order else found
        return [self._property(name, found[name], name in required, indent) for name in names]

    def _property(self, name: str, schema: Schema, required: bool, indent: str) -> str:
        lines = self._notes(schema, indent)
        default = schema.get("default") if isinstance(schema, dict) else None
        if default is not None:
            plain = isinstance(default, int | float)
            lines.append(f"{indent}// Default: {default if plain else json.dumps(default, ensure_ascii=False)}")
        return "\n".join([*lines, f"{indent}{name}{'' if required else '?'}: {self.type(schema, indent)}"])

    def _array(self, schema: Schema, indent: str) -> str:
        items = schema.get("items") or {}
        inner = indent + _INDENT
        notes = self._notes(items, inner)
        if not notes:
            return f"Array<{self.type(items, indent)}>"
        return "\n".join(["Array<", *notes, inner + self.type(items, inner), f"{indent}>"])

    def _notes(self, schema: Schema, indent: str) -> list[str]:
        """Description and constraints, as comments."""
        if not isinstance(schema, dict):
            return []
        kind = schema.get("type") if not {"$ref", "anyOf", "enum"} & schema.keys() else None
        limits = _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
        found = ", ".join(f"{key}: {schema[key]}" for key in limits if key in schema)
        return [*_comment(schema.get("description", ""), indent), *([f"{indent}// {found}"] if found else [])]

    def _reference(self, target: str) -> str:
        if target == "#":
            self.refers_to_itself = True
            return "parameters"
        name = target.removeprefix("#/$defs/")
        if name not in self.definitions:
            raise ValueError(f"there is no {target}")
        return name
