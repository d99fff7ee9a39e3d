"""Tools as TypeScript declarations, as Kimi K2.5 was trained on them."""

from typing import Any

import pytest

from emberline.protocol.request import Message, Tool
from emberline.text.text_model import TextModel
from emberline.text.tool_calls.typescript_tools import declare_tools, sorted_deep
from tests.text.chats import text_model
from tests.text.tool_calls.models import KIMI, model
from tests.text.vocab import byte_level


def function(parameters: dict[str, Any], description: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": description, "parameters": parameters}}


def body(parameters: dict[str, Any], description: str = "") -> str:
    text = declare_tools([function(parameters, description)])
    assert text is not None
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head)
    assert text.endswith(tail)
    return text.removeprefix(head).removesuffix(tail)


def test_properties_required_first_with_their_notes() -> None:
    properties = {
        "days": {"type": "integer", "minimum": 1, "maximum": 7, "default": 3},
        "city": {"type": "string", "description": "City name\nin English", "minLength": 2},
        "units": {"enum": ["C", "F"], "default": "C"},
        "all": {"type": "boolean", "default": True},
    }
    assert body({"type": "object", "properties": properties, "required": ["city"]}, "Get the weather.") == (
        "// Get the weather.\n"
        "type f = (_: {\n"
        "  // City name\n"
        "  // in English\n"
        "  // minLength: 2\n"
        "  city: string,\n"
        "  // Default: True\n"
        "  all?: boolean,\n"
        "  // maximum: 7, minimum: 1\n"
        "  // Default: 3\n"
        "  days?: number,\n"
        '  // Default: "C"\n'
        '  units?: "C" | "F"\n'
        "}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "array", "items": {"type": "string"}}, "Array<string>"),
        ({"type": "array"}, "Array<any>"),
        ({"type": "array", "items": {"type": "string", "description": "A tag"}},
         "Array<\n    // A tag\n    string\n  >"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"type": ["integer", "array", "null"]}, "number | Array<any> | null"),
        ({"type": "object", "properties": {"b": {}, "a": True}, "required": ["b"]}, "{\n    b: any,\n    a?: any\n  }"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "{\n    [k: string]: number\n  }"),
        ({"type": "object", "additionalProperties": False}, "{\n    [k: string]: never\n  }"),
        ({"type": "object"}, "{}"),
    ],
)  # fmt: skip
def test_types(schema: dict[str, Any], written: str) -> None:
    assert body({"properties": {"x": schema}, "required": ["x"]}) == f"type f = (_: {{\n  x: {written}\n}}) => any;"


def test_definitions_are_interfaces() -> None:
    node = {"type": "object", "description": "A node", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    schema = {"properties": {"first": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    assert body(schema) == ("// A node\ninterface Node {\n  next?: Node\n}\ntype f = (_: {\n  first?: Node\n}) => any;")
    assert body({"properties": {"inner": {"$ref": "#"}}}) == (
        "interface parameters {\n  inner?: parameters\n}\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema", [{"properties": {"x": {"$ref": "#/$defs/None"}}}, {"properties": 7}, {"properties": {"x": {"oneOf": []}}}]
)
def test_what_has_no_declaration_is_left_to_json(schema: dict[str, Any]) -> None:
    assert declare_tools([function(schema)]) is None


def test_a_template_that_takes_them_gets_them() -> None:
    source = KIMI.replace("{{- tools | tojson }}", "{{- tools_ts_str or (tools | tojson) }}")
    special = tuple(model("kimi").tokenizer.special)
    kimi: TextModel = text_model(byte_level("qwen2", special), source)
    tool = Tool("f", "Do it.", {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}})
    rendered = kimi.render_guarded([Message("user", "Hi")], {}, [tool]).text
    assert (
        "tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n// Do it.\ntype f = (_: {" in rendered
    )
    odd = Tool("f", "", {"type": "object", "properties": {"x": {"oneOf": []}}})
    assert '"oneOf"' in kimi.render_guarded([Message("user", "Hi")], {}, [odd]).text


def test_json_has_its_keys_in_order() -> None:
    assert sorted_deep([{"b": 1, "a": [{"d": 2, "c": 3}]}]) == [{"a": [{"c": 3, "d": 2}], "b": 1}]
    tool = Tool("f", "", {"type": "object", "properties": {"b": {}, "a": {}}})
    text = model("kimi").render_guarded([Message("user", "Hi")], {}, [tool]).text
    assert text.index('"a"') < text.index('"b"')
