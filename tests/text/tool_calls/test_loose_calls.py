"""Calls beside the model's format: the parser takes for calls exactly what the grammar has bound to their schemas."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.grammar import Grammar
from emberline.protocol.request import GenerateRequest, OutputFormat, Tool, ToolChoice
from emberline.protocol.token_ids import unpack
from emberline.text.grammar.reply_grammar import build
from emberline.text.prompt import grammar_spec
from emberline.text.tool_calls.parser import CallStart, ParsedCall, Reply
from tests.text.tool_calls.models import CALLERS, model
from tests.text.tool_calls.parse_helpers import as_characters, matches

LOOSE = tuple(name for name in CALLERS if model(name).tool_format.loose)
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
AGE = {"type": "integer", "minimum": 0, "maximum": 120}
WEATHER = Tool("get_weather", "", {"type": "object", "properties": {"unit": UNIT}, "required": ["unit"]})
SET_AGE = Tool("set_age", "", {"type": "object", "properties": {"age": AGE}, "additionalProperties": False})
ORDERS = Tool("list_orders", "", {"type": "object", "properties": {}})
TOOLS = (WEATHER, SET_AGE, ORDERS)
CALL = '{"name": "get_weather", "arguments": {"unit": "celsius"}}'
LINES = '{\n  "name": "get_weather",\n  "arguments": {"unit": "celsius"}\n}'
READ = [ParsedCall("get_weather", "", '{"unit": "celsius"}')]


def grammar_of(name: str, **fields: Any) -> Grammar:
    request = GenerateRequest(id="r", model="m", prompt="", **{"tools": TOOLS, **fields})
    spec = grammar_spec(model(name), request, False)
    assert spec is not None
    return build(spec)


def allows(name: str, text: str, **fields: Any) -> bool:
    return matches(grammar_of(name, **fields), as_characters(model(name), text))


def read(name: str, text: str, *, loose: bool = True, cut: bool = False, tools: tuple[Tool, ...] = TOOLS) -> Reply:
    """The reply, read token by token."""
    parser = model(name).reply_parser(b"", tools, False, loose=loose)
    reply = Reply()
    for token_id in unpack(model(name).encode(text, special=True)):
        reply.add(parser.push([token_id]))
    return reply.add(parser.finish(cut=cut))


@pytest.mark.parametrize("name", LOOSE)
@pytest.mark.parametrize("call", [CALL, LINES, "{" + CALL + "}", CALL.replace(" ", "")])
@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("```json\n", "\n```"), ("```\n", "\n```"), ("```json\n", ""), ("<tools>\n", "\n</tools>")],
)
def test_each_form_is_bound_and_read(name: str, call: str, before: str, after: str) -> None:
    for text in ("", "Let me see.\n\n"):
        reply = read(name, text + before + call + after)
        arguments = [(each.name, json.loads(each.arguments)) for each in reply.calls]
        assert (reply.text, arguments) == (text.rstrip(), [("get_weather", {"unit": "celsius"})])
        assert allows(name, text + before + call + after)
        assert not allows(name, text + before + call.replace("celsius", "kelvin") + after)


@pytest.mark.parametrize("name", LOOSE)
@pytest.mark.parametrize(
    ("tool", "good", "bad"),
    [
        ("set_age", '{"age": 120}', '{"age": 500}'),
        ("list_orders", "{}", '{"type": "object", "properties": {}}'),
        ("get_weather", '{"unit": "celsius"}', "{}"),
    ],
)
def test_arguments_are_bound_to_the_schema(name: str, tool: str, good: str, bad: str) -> None:
    for text in ('```json\n{{\n"name": "{}",\n"arguments": {}\n}}\n```', '{{"name": "{}", "arguments": {}}}'):
        assert allows(name, text.format(tool, good))
        assert not allows(name, text.format(tool, bad))


@pytest.mark.parametrize("name", LOOSE)
def test_several_calls_follow_each_other(name: str) -> None:
    for between in ("\n", ",\n", "\n```\n\n```json\n"):
        text = f"```json\n{LINES}{between}{CALL}\n```"
        assert read(name, text) == Reply("", "", 2 * READ)
        assert allows(name, text) == model(name).tool_format.parallel
        assert not allows(name, text, parallel_tool_calls=False)


@pytest.mark.parametrize("name", LOOSE)
@pytest.mark.parametrize(
    "text",
    [
        "```json\n" + CALL.replace("get_weather", "rm_rf") + "\n```",
        CALL.replace("arguments", "parameters"),
        '```json\n{"city": "Paris"}\n```\nand so on',
        '{"name": "get_weather", "description": "Get it.", "parameters": {"type": "object"}}',
        'People: [{"name": "Ann"}, {"name": "Bob", "age": 3}, { "name" : 1 }]',
        '{"name": "' + "x" * 80 + '"}',
        "```json",
        'def f():\n    return {"a": {}}',
        "Use `{` and ``` as you like, or <tools>.",
    ],
)
def test_other_objects_and_blocks_are_text(name: str, text: str) -> None:
    assert read(name, text) == Reply(text)
    assert allows(name, text)


@pytest.mark.parametrize("name", LOOSE)
def test_nothing_but_the_end_of_its_wrapper_follows_a_call(name: str) -> None:
    assert not allows(name, CALL + "\nThe weather is fine.")
    assert not allows(name, f"```json\n{CALL}\n```\nThe weather is fine.")
    assert allows(name, CALL + "\n")


def test_a_call_goes_out_while_it_is_written() -> None:
    parser = model("hermes-text").reply_parser(b"", TOOLS, False)
    pieces = [piece for char in "```json\n" + CALL[:-3] for piece in parser.push_text(char)]
    assert pieces[0] == CallStart("get_weather", "")
    assert "".join(getattr(piece, "text", "") for piece in pieces) == '{"unit": "celsius'


def test_text_that_cannot_be_a_call_is_not_held_back() -> None:
    for text in ('```json\n{"city":', "```python\nx", "<tools>[", '{"name": "Ann"', '{"name": "get_weather", "par'):
        parser = model("hermes-text").reply_parser(b"", TOOLS, False)
        assert Reply().add(parser.push_text(text)).text == text


def test_without_tools_or_beside_an_output_format_such_an_object_is_text() -> None:
    assert read("hermes-text", CALL, tools=()) == Reply(CALL)
    assert read("hermes-text", CALL, loose=False) == Reply(CALL)
    assert allows("hermes-text", CALL, output=OutputFormat("json_object"))
    assert allows("hermes-text", CALL.replace("celsius", "kelvin"), output=OutputFormat("json_object"))


def test_a_required_call_is_in_the_models_format() -> None:
    assert not allows("hermes-text", CALL, tool_choice=ToolChoice("required"))


@pytest.mark.parametrize("cut", ['```json\n{"name": "get_wea', '{"name": "get_weather", "argu', CALL[:-20]])
def test_a_call_that_is_cut_before_its_arguments_is_lost(cut: str) -> None:
    parser = model("hermes-text").reply_parser(b"", TOOLS, False)
    reply = Reply().add(parser.push_text("So.\n" + cut)).add(parser.finish(cut=True))
    assert (reply.text, parser.lost_tool_call) == ("So.", not reply.calls)


PARTS = (
    *("```", "```json\n", "<tools>", "</tools>", "{", "{{", "}", '"name"', ":", " ", "\n", '"get_weather"', '"rm"'),
    ",",
    *('"arguments"', '{"unit": "celsius"}', "{}", CALL, LINES, "so", '{"name": "', '", "arguments": ', "é", '"'),
)


@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), at=st.integers(0, 80), cut=st.booleans())
def test_any_text_is_read_the_same_however_it_is_split(parts: list[str], at: int, cut: bool) -> None:
    text = "".join(parts)
    replies = []
    for pieces in ([text], [text[:at], text[at:]], list(text)):
        parser = model("hermes-text").reply_parser(b"", TOOLS, False)
        reply = Reply()
        for piece in pieces:
            reply.add(parser.push_text(piece))
        replies.append(reply.add(parser.finish(cut=cut)))
    assert replies[0] == replies[1] == replies[2]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=9))
def test_what_is_read_as_a_call_was_bound(parts: list[str]) -> None:
    """Of any text that the grammar allows."""
    text = "".join(parts)
    if allows("hermes-text", text):
        for call in read("hermes-text", text).calls:
            arguments = json.loads(call.arguments)
            assert arguments.get("unit") in ("celsius", "fahrenheit") if call.name == "get_weather" else arguments == {}
