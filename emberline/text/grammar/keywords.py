"""Each keyword of JSON Schema as values: what it allows, and what its negation allows."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emberline.text.grammar import applicators, arrays_read, objects_read, scalars_read
from emberline.text.grammar.document import Node
from emberline.text.grammar.shapes import Values, join

if TYPE_CHECKING:
    from emberline.text.grammar.algebra import Algebra

# A reader gives the values that satisfy a keyword, or, negated, values that surely do not.
Reader = Callable[["Algebra", Node, Any, bool], Values]

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions", "$vocabulary",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml", "enumDescriptions",
    "enumNames", "markdownDescription", "markdownEnumDescriptions", "errorMessage", "propertyOrdering", "strict",
})  # fmt: skip
# Read together with the keyword that they modify.
HELPERS = frozenset({
    "nullable", "exclusiveMinimum", "exclusiveMaximum", "minContains", "maxContains", "then", "else",
    "patternProperties", "additionalProperties", "additionalItems", "prefixItems", "unevaluatedProperties",
    "unevaluatedItems",
})  # fmt: skip

READERS: dict[str, Reader] = {
    "type": scalars_read.read_type,
    "enum": scalars_read.read_enum,
    "const": scalars_read.read_const,
    "minimum": scalars_read.read_minimum,
    "maximum": scalars_read.read_maximum,
    "multipleOf": scalars_read.read_multiple,
    "divisibleBy": scalars_read.read_multiple,
    "minLength": scalars_read.read_min_length,
    "maxLength": scalars_read.read_max_length,
    "pattern": scalars_read.read_pattern,
    "format": scalars_read.read_format,
    "items": arrays_read.read_items,
    "minItems": arrays_read.read_min_items,
    "maxItems": arrays_read.read_max_items,
    "uniqueItems": arrays_read.read_unique,
    "contains": arrays_read.read_contains,
    "properties": objects_read.read_properties,
    "required": objects_read.read_required,
    "minProperties": objects_read.read_min_properties,
    "maxProperties": objects_read.read_max_properties,
    "propertyNames": objects_read.read_names,
    "dependentRequired": objects_read.read_dependencies,
    "dependentSchemas": objects_read.read_dependencies,
    "dependencies": objects_read.read_dependencies,
    "allOf": applicators.read_all,
    "anyOf": applicators.read_any,
    "oneOf": applicators.read_one,
    "not": applicators.read_not,
    "if": applicators.read_if,
    "$ref": applicators.read_reference,
    "$dynamicRef": applicators.read_reference,
    "$recursiveRef": applicators.read_reference,
}
# Where one of these stands, its reader is asked though its own keyword may be absent.
_STAND_FOR = {
    "exclusiveMinimum": "minimum",
    "exclusiveMaximum": "maximum",
    "patternProperties": "properties",
    "additionalProperties": "properties",
    "prefixItems": "items",
    "additionalItems": "items",
}
_FIRST = ("type", "enum", "const")


def read(algebra: "Algebra", node: Node) -> Values:
    values: Values = {}
    for keyword in _readers(algebra, node):
        values = algebra.meet(values, READERS[keyword](algebra, node, node.schema.get(keyword), False))
    if "unevaluatedItems" in node.schema:
        values = arrays_read.close(algebra, node, values)
    if "unevaluatedProperties" in node.schema:
        values = objects_read.close(algebra, node, values)
    return values


def read_negated(algebra: "Algebra", node: Node) -> Values:
    for keyword in ("unevaluatedItems", "unevaluatedProperties"):
        if keyword in node.schema:
            algebra.give_up(node, keyword)
    readers = _readers(algebra, node)
    return join([READERS[keyword](algebra, node, node.schema.get(keyword), True) for keyword in readers])


def _readers(algebra: "Algebra", node: Node) -> list[str]:
    schema = node.schema
    if node.old and "$ref" in schema:
        return ["$ref"]
    for keyword in schema:
        if keyword not in READERS and keyword not in ANNOTATIONS | HELPERS and not keyword.startswith("x-"):
            algebra.document.refuse(node, keyword)
    named = dict.fromkeys(_STAND_FOR.get(keyword, keyword) for keyword in schema)
    return [k for k in _FIRST if k in named] + [k for k in named if k in READERS and k not in _FIRST]
