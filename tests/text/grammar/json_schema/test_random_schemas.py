"""Any combination of keywords: what is generated is valid, and what is called contradictory has no value."""

import json
from typing import Any

import jsonschema_rs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.protocol.errors import BadInput
from emberline.text.grammar.expressions.builder import Builder
from emberline.text.grammar.json_schema.compile import schema_expression
from tests.examples import n_examples
from tests.text.grammar.reference import Sampler

NAMES = st.sampled_from(["a", "b", "c", "ab", "1"])
PATTERNS = st.sampled_from(["^a", "b$", "^[a-c]{1,3}$", "[0-9]+", "^(a|bc)*$", r"^\d{2}$", "a.c", "^[^a]*$", r"\w+"])
SMALL = st.integers(0, 4)
TEXTS = st.sampled_from(["", "a", "ab", "12"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 12), st.sampled_from([0.5, 1.0, -2.25]), TEXTS)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
KINDS = ["null", "boolean", "integer", "number", "string", "array", "object"]
TYPES = st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True)
BOUNDS = st.sampled_from([-5, 0, 1, 2.5, 7.5, 10, 1000])
# Steps that doubles can hold: with others, validators disagree among themselves.
STEPS = st.sampled_from([1, 2, 3, 7, 10, 20, 0.5, 0.25])


def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    by_name = st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    return {
        "type": TYPES, "enum": st.lists(JSON, min_size=1, max_size=4), "const": JSON,
        "minimum": BOUNDS, "maximum": BOUNDS, "exclusiveMinimum": BOUNDS, "exclusiveMaximum": BOUNDS,
        "multipleOf": STEPS,
        "minLength": SMALL, "maxLength": SMALL, "pattern": PATTERNS,
        "format": st.sampled_from(["date", "uuid", "unknown"]),
        "items": inner, "prefixItems": several, "minItems": SMALL, "maxItems": SMALL, "uniqueItems": st.booleans(),
        "contains": inner, "minContains": SMALL, "maxContains": SMALL, "unevaluatedItems": inner,
        "properties": by_name, "patternProperties": st.dictionaries(PATTERNS, inner, min_size=1, max_size=2),
        "additionalProperties": inner, "unevaluatedProperties": inner, "propertyNames": inner,
        "required": st.lists(NAMES, max_size=2, unique=True), "minProperties": SMALL, "maxProperties": SMALL,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": by_name, "allOf": several, "anyOf": several, "oneOf": several, "not": inner,
        "if": inner, "then": inner, "else": inner, "$ref": st.just("#/$defs/x"),
    }  # fmt: skip


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    table = keywords(inner)
    chosen = st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: table[name] for name in names}))


LEAVES = st.sampled_from([True, False, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": ["a", 2, None]}])
LEVEL = schemas(LEAVES)
SCHEMAS = schemas(LEAVES | LEVEL)


@settings(max_examples=n_examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, definition=LEVEL, values=st.lists(JSON, min_size=20, max_size=20))
def test_generated_values_are_valid(schema: dict[str, Any], definition: dict[str, Any], values: list[Any]) -> None:
    whole = {**schema, "$defs": {"x": definition}}
    validator = jsonschema_rs.Draft202012Validator(whole)
    builder = Builder()
    try:
        grammar = builder.finish(schema_expression(builder, whole))
    except BadInput as error:
        if "contradict" in error.message:
            assert not any(map(validator.is_valid, values))
        return
    assert grammar is not None
    sampler = Sampler(grammar, 7)
    for size in (4, 15, 40, 100) * 4:
        text = sampler.text(size)
        assert validator.is_valid(json.loads(text)), text
