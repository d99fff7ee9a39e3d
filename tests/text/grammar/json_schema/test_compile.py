"""JSON Schema: what is generated is valid, what is refused is named, what is asked for can be written."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Grammar, Text
from emberline.text.grammar.expressions.builder import Builder, choice, sequence
from emberline.text.grammar.json_schema.compile import any_object_expression, schema_expression
from tests.text.grammar.reference import Sampler, matches

FUNCTIONS = json.loads((Path(__file__).parent / "function_schemas.json").read_text())


def grammar(schema: Any) -> Grammar:
    builder = Builder()
    found = builder.finish(schema_expression(builder, schema))
    assert found is not None
    return found


def refusal(schema: Any) -> str:
    with pytest.raises(BadInput) as caught:
        grammar(schema)
    assert caught.value.param == "output"
    return caught.value.message


def check_samples(schema: Any, n: int, seed: int = 0) -> None:
    validator = jsonschema_rs.validator_for(schema)
    sampler = Sampler(grammar(schema), seed)
    for index in range(n):
        text = sampler.text((5, 20, 80, 200)[index % 4])
        value = json.loads(text)
        assert validator.is_valid(value), text


@pytest.mark.parametrize("tool", FUNCTIONS, ids=lambda tool: tool["name"])
def test_arguments_of_real_functions_are_valid(tool: dict[str, Any]) -> None:
    check_samples(tool["parameters"], 150)


def test_there_are_enough_real_functions() -> None:
    assert len(FUNCTIONS) >= 60


BOX = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v"],
        }
    },
}

# schema, texts that must be possible, texts that must not
CASES: list[tuple[Any, list[str], list[str]]] = [
    (True, ["1", '{"a":[null]}', '"x"'], ["", "{", "01"]),
    ({"type": "null"}, ["null"], ["0"]),
    ({"type": ["boolean", "null"]}, ["true", "null"], ["1"]),
    ({"type": "integer"}, ["0", "-7", "123456789012345"], ["1.0", "-", "00", "1e3", "1234567890123456"]),
    ({"type": "number"}, ["0.5", "-12.25", "3"], [".5", "1.", "1.12345678901"]),
    ({"type": "integer", "minimum": 3, "maximum": 120}, ["3", "99", "120"], ["2", "121", "-5"]),
    ({"type": "integer", "minimum": -12, "maximum": -3}, ["-12", "-3", "-9"], ["-2", "-13", "3"]),
    ({"type": "integer", "exclusiveMinimum": 0}, ["1", "99999"], ["0", "-1"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "0.5", "1", "0.0000000001"], ["1.1", "-0.1", "1.0001"]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.3}, 
     ["0.2", "0.29999"], ["0", "0.0", "0.3", "0.30"]),
    ({"type": "number", "minimum": -1.5, "maximum": 2.25}, ["-1.5", "2.25", "2.2", "0"], ["-1.51", "2.251", "3"]),
    ({"type": "number", "minimum": 1.25, "maximum": 1.75}, ["1.25", "1.5", "1.75"], ["1.2", "1.76", "1", "2"]),
    ({"type": "integer", "multipleOf": 5}, ["0", "-15", "1000000005"], ["3", "12"]),
    ({"type": "integer", "multipleOf": 100}, ["0", "300", "-12300"], ["30", "301"]),
    ({"type": "number", "multipleOf": 0.01}, ["1.25", "19.99", "7"], ["1.255"]),
    ({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 2}, ["0", "0.5", "1.5", "2"], ["0.25", "2.5"]),
    ({"minimum": 5, "exclusiveMinimum": True, "type": "integer"}, ["6"], ["5"]),
    ({"type": "string"}, ['""', '"a\\n\\u00e9\\ud83d\\ude00"', '"é😀"'], ['"\n"', '"\\ud83d"', '"\\x"', '"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, 
     ['"ab"', '"\\n\\n\\n"', '"\\ud83d\\ude00x"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^a+$"}, ['"a"', '"aaa"'], ['""', '"ab"']),
    ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"']),
    ({"type": "string", "pattern": '^["\\\\\\n]+$'}, ['"\\"\\\\\\n"'], ['"""', '"\\"', '"n"']),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"', '""']),
    ({"type": "string", "pattern": "^a", "not": {"pattern": "z$"}}, ['"ab"'], ['"az"', '"b"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"1999-12-31"'], ['"2023-02-29"', '"2024-13-01"', '"x"']),
    ({"type": "string", "format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"']),
    ({"type": "string", "format": "no-such"}, ['"anything"'], ["1"]),
    ({"enum": ["a", 1, None, [1, {"x": 2}]]}, ['"a"', "1", "null", '[1, {"x": 2}]'], ['"b"', "2", "[1]"]),
    ({"enum": ["a", 1], "type": "string"}, ['"a"'], ["1"]),
    ({"const": {"k": [True]}}, ['{"k": [true]}'], ["{}"]),
    ({"not": {"const": 5}, "type": "integer"}, ["4", "6", "-5"], ["5"]),
    ({"not": {"enum": ["a", "b"]}, "type": "string"}, ['"c"', '"ab"', '""'], ['"a"', '"b"', '"\\u0061"']),
    ({"not": {"type": ["string", "object"]}}, ["1", "[]"], ['"x"', "{}"]),
    (BOX, ['{"b":"x"}', '{"a":1,"b":"x"}'], ["{}", '{"a":1}', '{"b":"x","a":1}', '{"b":"x","c":1}']),
    ({**BOX, "additionalProperties": {"type": "null"}}, 
     ['{"b":"x","c":null}'], ['{"b":"x","c":1}', '{"b":"","b":null}']),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"x":1,"y":2}'], ['{"x":"1"}']),
    ({"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
     ["{}", '{"x1":null}'], ['{"y":null}', '{"x":1}']),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, ['{"a":1}'], ['{"ab":1}']),
    ({"type": "object", "minProperties": 2}, ['{"a":1,"ab":1}'], ["{}", '{"a":1}', '{"a":1,"a":2}']),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
     ["{}", '{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}, 
     ["[null]", "[null,null]"], ["[]", "[1]"]),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False},
     ["[]", "[null]", "[null,true]"], ["[true]", "[null,true,1]"]),
    ({"items": [{"type": "null"}], "additionalItems": {"type": "integer"}, "type": "array"}, ["[null,1,2]"], ["[1]"]),
    ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, 
     ["[]", "[1,3]", "[1,2,3]"], ["[1,1]", "[2,2]"]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ['["a","bc"]'], ['["a","a"]']),
    ({"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}}, ["[1]", "[2,1,3]"], ["[]", "[2]"]),
    ({"type": "array", "contains": {"const": 1}, "maxContains": 1, "items": {"enum": [1, 2]}}, ["[2,1]"], ["[1,1]"]),
    ({"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 3}], "minimum": 2}, ["null", "2", "3"], ["4", "1"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ["1", "2.5", "-4"], ["3"]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": {}, "b": {}}},
     ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
    ({"allOf": [{"properties": {"a": {"minimum": 2}}}, {"properties": {"a": {"maximum": 3}}, "required": ["a"]}],
      "type": "object", "properties": {"a": {"type": "integer"}}},
     ['{"a":2}', '{"a":3}'], ['{"a":1}', '{"a":4}', "{}"]),
    ({"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["x"]}, "type": "object",
      "properties": {"k": {"type": "integer"}, "x": {"type": "null"}}},
     ['{"k":1,"x":null}', '{"k":2}', "{}"], ['{"k":1}']),
    ({"type": "string", "nullable": True}, ["null", '"x"'], ["1"]),
    ({"allOf": [{"properties": {"a": {"type": "null"}}}], "unevaluatedProperties": False, "type": "object"},
     ["{}", '{"a":null}'], ['{"b":null}']),
    (TREE, ['{"v":1}', '{"v":1,"kids":[{"v":2,"kids":[]},{"v":3}]}'], ['{"kids":[]}', '{"v":1,"kids":[1]}']),
    ({"$anchor": "top", "type": "array", "items": {"$ref": "#top"}}, ["[]", "[[],[[]]]"], ["[1]"]),
    ({"$id": "http://x/y", "$defs": {"a": {"$id": "z", "type": "null"}}, "$ref": "z"}, ["null"], ["1"]),
]  # fmt: skip


def spaced(text: str) -> str:
    """The JSON text with a space after each comma and colon outside strings."""
    return re.sub(r'("(?:\\.|[^"\\])*")|([,:]) ?', lambda found: found[1] or found[2] + " ", text)


@pytest.mark.parametrize(("schema", "possible", "impossible"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_texts_of_a_schema(schema: Any, possible: list[str], impossible: list[str]) -> None:
    found = grammar(schema)
    for text in possible:
        assert matches(found, text), text
        assert matches(found, spaced(text)), "a model writes JSON as it was trained to, mostly with spaces"
    for text in impossible:
        assert not matches(found, text), text


VALIDATED = [case[0] for case in CASES if "nullable" not in json.dumps(case[0])]  # only OpenAPI knows that word


@pytest.mark.parametrize("schema", VALIDATED, ids=lambda schema: json.dumps(schema)[:60])
def test_samples_of_a_schema_are_valid(schema: Any) -> None:
    if isinstance(schema, dict) and schema.get("exclusiveMinimum") is True:
        schema = {"$schema": "http://json-schema.org/draft-04/schema#", **schema}
    elif isinstance(schema, dict) and isinstance(schema.get("items"), list):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    check_samples(schema, 200)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"frobnicate": 1}}}, "'frobnicate' at #/properties/a/frobnicate"),
        ({"$ref": "http://elsewhere/x.json"}, "'$ref' at #/$ref"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "#"}, "refers to itself without end"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "strin"}, "'type' must be"),
        ({"minLength": "3"}, "'minLength' must be"),
        ({"multipleOf": 0}, "'multipleOf' must be above 0"),
        ({"anyOf": []}, "'anyOf' must be a list"),
        ({"properties": {"a": 3}}, "must be an object or a boolean (at #/properties/a)"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "contradict"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "contradict"),
        (False, "contradict"),
        ({"enum": []}, "contradict"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "contradict"),
        ({"$ref": "#/$defs/n",
          "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}},
         "contradict"),
        ({"type": "string", "not": {"format": "date"}}, "'format' at #/not/format"),
        ({"type": "string", "format": "ipv4", "maxLength": 4}, "'format' 'ipv4' is not supported in this combination"),
        ([], "must be an object or a boolean"),
        ({"type": "string", "minLength": 10**9}, "the limit is 100000"),
        ({"const": float("nan")}, "not plain JSON"),
    ],
)  # fmt: skip
def test_refusals_name_what_is_wrong(schema: Any, named: str) -> None:
    assert named in refusal(schema)


def test_any_object() -> None:
    builder = Builder()
    found = builder.finish(any_object_expression(builder))
    assert found is not None
    assert matches(found, '{"a":[1,{"b":null}]}')
    assert not matches(found, "[]")
    assert matches(found, '{"a": [1, {"b": null}]}')
    for endless in ('{"a":  1}', '{ "a":1}', '{"a" :1}', '{"a":[1,  2]}', '{"a":1\n}'):
        assert not matches(found, endless), "white space is bounded"


def test_declared_order_and_no_exponential_growth() -> None:
    names = [f"p{n}" for n in range(300)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    found = grammar(schema)
    assert matches(found, json.dumps(dict.fromkeys(names[::7], 1), separators=(",", ":")))
    assert not matches(found, '{"p2":1,"p1":1}')
    assert len(found.rules) < 700


def test_schemas_in_one_grammar_are_not_confused() -> None:
    """Many documents in one grammar: none is mistaken for another, even if its object's memory was reused."""
    builder = Builder()
    options = [
        sequence(Text(f"{n}:"), schema_expression(builder, {"type": "object", "properties": {"a": {"const": n}}}))
        for n in range(200)
    ]
    found = builder.finish(choice(options))
    assert found is not None
    for n in range(200):
        assert matches(found, f'{n}:{{"a":{n}}}')
        assert not matches(found, f'{n}:{{"a":{n + 1}}}')


def test_the_same_definition_is_one_rule() -> None:
    address = {"type": "object", "properties": {"street": {"type": "string", "maxLength": 99}}, "required": ["street"]}
    one = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": address}}
    many = {"type": "object", "properties": {n: {"$ref": "#/$defs/x"} for n in "abcdefgh"}, "$defs": {"x": address}}
    assert len(grammar(many).rules) <= len(grammar(one).rules) + 16


@pytest.mark.parametrize(
    ("items", "least"),
    [
        ({"type": "integer", "multipleOf": 5}, 10),
        pytest.param({"type": "integer", "multipleOf": 5}, 30, marks=pytest.mark.slow),
        pytest.param({"type": "integer", "multipleOf": 97, "minimum": 1}, 30, marks=pytest.mark.slow),
        pytest.param({"type": "integer", "minimum": 0, "maximum": 100_000}, 60, marks=pytest.mark.slow),
        ({"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 90}, 12),
        pytest.param({"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 90}, 30, marks=pytest.mark.slow),
        ({"type": "string"}, 40),
        ({"type": "string", "minLength": 1, "maxLength": 3}, 10),
        ({"type": "string", "pattern": "^x[0-9]+$"}, 5),
        ({"type": "array", "items": {"type": "integer"}}, 12),
    ],
)
def test_many_items_that_differ(items: dict[str, Any], least: int) -> None:
    check_samples({"type": "array", "items": items, "uniqueItems": True, "minItems": least}, 3)


def test_many_properties() -> None:
    check_samples({"type": "object", "minProperties": 3, "propertyNames": {"maxLength": 1}}, 3)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 300},
        {"type": "array", "items": {"type": "object"}, "uniqueItems": True, "minItems": 3},
        {"type": "number", "minimum": 1e300},
    ],
)
def test_what_may_be_possible_is_never_called_contradictory(schema: dict[str, Any]) -> None:
    assert "contradict" not in refusal(schema)


def test_what_is_impossible_is_called_contradictory() -> None:
    for items, least in (({"type": "boolean"}, 3), ({"type": "integer", "minimum": 5, "maximum": 20}, 17)):
        array = {"type": "array", "items": items, "uniqueItems": True, "minItems": least}
        assert "contradict" in refusal(array)
    assert "contradict" in refusal({"type": "object", "minProperties": 3, "propertyNames": {"enum": ["a", "b"]}})
