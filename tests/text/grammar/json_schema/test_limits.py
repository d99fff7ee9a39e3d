"""Schemas that are enormous, exponential or nested without end: a clear refusal, soon."""

import json
import time
from typing import Any

import pytest

from emberline.protocol.errors import BadInput
from emberline.text.grammar.expressions.builder import Builder
from emberline.text.grammar.json_schema.compile import schema_expression

LIMIT_S = 5.0  # of CPU time; alone each takes well under one


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def pairs(n: int) -> Any:
    """2^n combinations of properties."""
    return {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(n)],
        "type": "object",
    }


def doubling(n: int) -> Any:
    """Definitions that each name the next twice."""
    definitions = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"not": {"$ref": f"#/$defs/d{i + 1}"}}]} for i in range(n)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{n}": {"minLength": 1, "minimum": 1}}}


HUGE = {
    "deep": nested(5000),
    "rather deep": nested(200),
    "combinations": pairs(40),
    "many dependencies": {"type": "object", "dependentRequired": {f"a{i}": [f"b{i}"] for i in range(40)}},
    "large": {"enum": ["x" * 1000 + str(i) for i in range(400)]},
    "many parts": {"anyOf": [{"const": i} for i in range(30_000)]},
    "pattern and length": {"type": "string", "pattern": "(a|b)*a(a|b){25}", "maxLength": 5000},
    "pattern": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    "excluded patterns": {"allOf": [{"not": {"pattern": f"(x|y)*{c}(x|y){{12}}"}} for c in "xyxyxy"], "type": "string"},
}


@pytest.mark.parametrize("name", HUGE)
def test_too_much_is_refused_soon(name: str) -> None:
    started = time.process_time()
    with pytest.raises(BadInput) as caught:
        build(HUGE[name])
    assert time.process_time() - started < LIMIT_S
    assert "contradict" not in caught.value.message


FINE = {
    "doubling": doubling(12),
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
    "many options": {"enum": [f"value {i}" for i in range(5000)]},
    "long strings": {"type": "string", "maxLength": 100_000},
    "unions of objects": {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(60)]},
    "deep enough": nested(60),
}


@pytest.mark.parametrize("name", FINE)
def test_large_but_harmless(name: str) -> None:
    started = time.process_time()
    build(FINE[name])
    assert time.process_time() - started < LIMIT_S


def build(schema: Any) -> None:
    builder = Builder()
    assert builder.finish(schema_expression(builder, schema)) is not None


def test_a_schema_is_left_as_it_was() -> None:
    schema = {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object", "properties": {"x": {"minimum": 1}}}}}
    before = json.dumps(schema)
    build(schema)
    assert json.dumps(schema) == before
