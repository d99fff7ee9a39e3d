"""Compiles a JSON Schema to a grammar. Every text of the grammar is valid; not every valid value need have a text.

Each sub-schema is read into a set of values (`set_algebra`), keyword by keyword; each conjunction of sub-schemas that
the document needs becomes one nonterminal (`writer`).
"""

import json
from typing import Any

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Expression
from emberline.text.grammar.expressions.builder import Builder, blaming
from emberline.text.grammar.json_schema import arrays, keywords, numbers, objects, strings
from emberline.text.grammar.json_schema.document import Document, Node, UnsupportedSchema
from emberline.text.grammar.json_schema.keywords import Reader, size_reader
from emberline.text.grammar.json_schema.set_algebra import ArraySet, ObjectSet, SetAlgebra, ValueSet, union
from emberline.text.grammar.json_schema.writer import GrammarWriter, free_value

MAX_SCHEMA_BYTES = 256 << 10

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions", "$vocabulary",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml", "enumDescriptions",
    "enumNames", "markdownDescription", "markdownEnumDescriptions", "errorMessage", "propertyOrdering", "strict",
})  # fmt: skip
# Read together with the keyword that they modify.
MODIFIERS = frozenset(
    {"nullable", "minContains", "maxContains", "then", "else", "unevaluatedProperties", "unevaluatedItems"}
)
# Read by the reader of another keyword, which may itself be absent.
READ_WITH = {
    "exclusiveMinimum": "minimum",
    "exclusiveMaximum": "maximum",
    "patternProperties": "properties",
    "additionalProperties": "properties",
    "prefixItems": "items",
    "additionalItems": "items",
}
READERS: dict[str, Reader] = {
    "type": keywords.read_type,
    "enum": keywords.read_enum,
    "const": keywords.read_const,
    "minimum": numbers.read_minimum,
    "maximum": numbers.read_maximum,
    "multipleOf": numbers.read_multiple_of,
    "divisibleBy": numbers.read_multiple_of,
    "minLength": size_reader("string", "minLength"),
    "maxLength": size_reader("string", "maxLength"),
    "pattern": strings.read_pattern,
    "format": strings.read_format,
    "items": arrays.read_items,
    "minItems": size_reader("array", "minItems"),
    "maxItems": size_reader("array", "maxItems"),
    "uniqueItems": arrays.read_unique_items,
    "contains": arrays.read_contains,
    "properties": objects.read_properties,
    "required": objects.read_required,
    "minProperties": size_reader("object", "minProperties"),
    "maxProperties": size_reader("object", "maxProperties"),
    "propertyNames": objects.read_property_names,
    "dependentRequired": objects.read_dependencies,
    "dependentSchemas": objects.read_dependencies,
    "dependencies": objects.read_dependencies,
    "allOf": keywords.read_all_of,
    "anyOf": keywords.read_any_of,
    "oneOf": keywords.read_one_of,
    "not": keywords.read_not,
    "if": keywords.read_if,
    "$ref": keywords.read_reference,
    "$dynamicRef": keywords.read_reference,
    "$recursiveRef": keywords.read_reference,
}
_KNOWN = READERS.keys() | ANNOTATIONS | MODIFIERS | READ_WITH.keys()
_FIRST = ("type", "enum", "const")


def schema_expression(builder: Builder, schema: Any, param: str = "output", lenient: bool = False) -> Expression:
    """The JSON texts that satisfy the schema: on one line, properties in the schema's order. `lenient`: the document's.
    Raises UnsupportedSchema if the schema's meaning, or the values that it allows, are beyond this compiler."""
    _check_size(schema, param)
    algebra = SetAlgebra(Document(schema, param, lenient), _read_schema)
    try:
        with blaming(param):
            expression = GrammarWriter(builder, algebra, _container_expression).nonterminal(algebra.document.root)
            possible = builder.possible(expression)
    except RecursionError:
        raise BadInput("the schema is nested too deep: flatten it with $defs", param=param) from None
    if not possible:
        if dropped := algebra.document.dropped:
            message = f"the schema keyword {dropped[0]} is not supported in this combination"  # a value may exist
            raise UnsupportedSchema(message, param=param)
        raise BadInput("no value satisfies the schema: its constraints contradict each other", param=param)
    return expression


def any_object_expression(builder: Builder) -> Expression:
    """Any JSON object."""
    free_value(builder)
    found = builder.known("object")
    assert found is not None
    return found


def _check_size(schema: Any, param: str) -> None:
    try:
        size = len(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError, UnicodeError):
        raise BadInput("the schema is not plain JSON, or nested too deep", param=param) from None
    if size > MAX_SCHEMA_BYTES:
        raise BadInput(f"the schema takes {size >> 10} KiB; the limit is {MAX_SCHEMA_BYTES >> 10}", param=param)
    if not isinstance(schema, dict | bool):
        raise BadInput("a schema must be an object or a boolean", param=param)


def _container_expression(writer: GrammarWriter, typed: ArraySet | ObjectSet) -> Expression:
    if isinstance(typed, ArraySet):
        return arrays.array_expression(writer, typed)
    return objects.object_expression(writer, typed)


def _read_schema(algebra: SetAlgebra, node: Node, negated: bool) -> ValueSet:
    schema = node.schema
    sets = (READERS[keyword](algebra, node, schema.get(keyword), negated) for keyword in _readers(algebra, node))
    if negated:
        for keyword in ("unevaluatedItems", "unevaluatedProperties"):
            if keyword in schema:
                algebra.drop(node, keyword)
        return union(list(sets))
    values: ValueSet = {}
    for each in sets:
        values = algebra.intersect(values, each)
    if "unevaluatedItems" in schema:
        values = arrays.close_unevaluated(algebra, node, values)
    if "unevaluatedProperties" in schema:
        values = objects.close_unevaluated(algebra, node, values)
    return values


def _readers(algebra: SetAlgebra, node: Node) -> list[str]:
    """The keywords whose readers are asked, the cheapest to intersect with first."""
    schema = node.schema
    if node.ref_overrides and "$ref" in schema:
        return ["$ref"]
    for keyword in schema:
        if keyword not in _KNOWN and not keyword.startswith("x-") and not algebra.document.lenient:
            algebra.document.refuse(node, keyword)
    named = dict.fromkeys(READ_WITH.get(keyword, keyword) for keyword in schema)
    return [k for k in _FIRST if k in named] + [k for k in named if k in READERS and k not in _FIRST]
