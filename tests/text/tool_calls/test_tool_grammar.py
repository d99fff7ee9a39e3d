"""Grammars of replies: they allow what the automaton reads as declared calls, and no other calls."""

import json
from typing import Any

import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Grammar
from emberline.protocol.request import GenerateRequest, OutputFormat, Tool, ToolCall, ToolChoice
from emberline.protocol.token_ids import unpack
from emberline.text.grammar.reply_grammar import build
from emberline.text.prompt import grammar_spec
from emberline.text.tool_calls.parser import Reply
from tests.text.grammar.reference import Sampler
from tests.text.tool_calls.models import CALLERS, model
from tests.text.tool_calls.parse_helpers import as_characters, as_text, matches, plain_grammar

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
WEATHER, NOW = Tool("get_weather", "", CITY), Tool("now")
PARIS, NOTHING = ToolCall("", "get_weather", '{"city":"Paris"}'), ToolCall("", "now", "{}")
FREE = ("", "Let me see.", "a < b\n", '{"a": 1}')


def grammar_of(name: str, thinking: bool | None = False, **fields: Any) -> Grammar:
    request = GenerateRequest(id="r", model="m", prompt="", **{"tools": (WEATHER, NOW), **fields})
    spec = grammar_spec(model(name), request, thinking)
    assert spec is not None
    return build(spec)


SPACINGS = (('{"city":"Paris"}', True), ('{"city": "Paris"}', True), ('{"city":  "Paris"}', False))


def allows(name: str, grammar: Grammar, text: str) -> bool:
    return matches(grammar, as_characters(model(name), text))


def written(name: str, *calls: ToolCall) -> str:
    return model(name).tool_format.write(calls)


@pytest.mark.parametrize("name", CALLERS)
def test_auto_is_text_or_declared_calls(name: str) -> None:
    grammar = grammar_of(name)
    form = model(name).tool_format
    assert allows(name, grammar, "Hello.")
    assert allows(name, grammar, "")
    assert allows(name, grammar, written(name, PARIS))
    assert allows(name, grammar, written(name, PARIS, NOTHING)) == form.parallel
    assert allows(name, grammar, "Let me see.\n" + written(name, PARIS)) == (not form.alone)
    assert not allows(name, grammar, written(name, ToolCall("", "rm", "{}")))
    assert not allows(name, grammar, written(name, ToolCall("", "get_weather", "{}")))
    for arguments, possible in SPACINGS:  # tags have no white space between JSON's values
        call = written(name, ToolCall("", "get_weather", arguments))
        assert allows(name, grammar, call) == (possible or form.tags is not None)
    assert not allows(name, grammar, written(name, PARIS)[:-1])


@pytest.mark.parametrize("name", CALLERS)
def test_required_is_calls_and_nothing_else(name: str) -> None:
    required = grammar_of(name, tool_choice=ToolChoice("required"))
    assert allows(name, required, written(name, NOTHING))
    assert not allows(name, required, "")
    assert not allows(name, required, "Hello." + written(name, NOTHING))
    named = grammar_of(name, tool_choice=ToolChoice("required", "now"), parallel_tool_calls=False)
    assert allows(name, named, written(name, NOTHING))
    assert not allows(name, named, written(name, PARIS))
    assert not allows(name, named, written(name, NOTHING, NOTHING))


@pytest.mark.parametrize("name", CALLERS)
def test_a_line_break_after_a_call_binds_to_no_other_call(name: str) -> None:
    form = model(name).tool_format
    text = written(name, PARIS) + "\n"
    may_end = form.parallel and form.between == "\n" and not form.close
    for mode in ("auto", "required"):
        assert allows(name, grammar_of(name, tool_choice=ToolChoice(mode)), text) == may_end
    assert not allows(name, grammar_of(name, parallel_tool_calls=False), text)


@pytest.mark.parametrize("name", CALLERS)
def test_none_is_text_without_an_opening(name: str) -> None:
    grammar = grammar_of(name, tool_choice=ToolChoice("none"))
    assert allows(name, grammar, "Hello.")
    assert not allows(name, grammar, written(name, NOTHING))


@pytest.mark.parametrize("name", CALLERS)
def test_with_an_output_format_text_has_that_format(name: str) -> None:
    grammar = grammar_of(name, output=OutputFormat("choice", ["yes", "no"]))
    assert allows(name, grammar, "yes")
    assert allows(name, grammar, written(name, PARIS))
    assert not allows(name, grammar, "perhaps")
    none = grammar_of(name, output=OutputFormat("choice", ["yes", "no"]), tool_choice=ToolChoice("none"))
    assert allows(name, none, "no")
    assert not allows(name, none, written(name, PARIS))


@pytest.mark.parametrize("name", ["qwen", "hermes-special", "kimi"])
def test_reasoning_comes_before(name: str) -> None:
    begun = grammar_of(name, True, tool_choice=ToolChoice("required"))
    assert allows(name, begun, "Hm.</think>\n\n" + written(name, PARIS))
    assert allows(name, begun, "Hm." + written(name, PARIS))  # a call ends reasoning
    assert not allows(name, begun, "Hm.</think>Well.")
    assert not allows(name, begun, "Hm.")
    own = grammar_of(name, None, output=OutputFormat("choice", ["yes"]), tools=())
    assert allows(name, own, "<think>Hm.</think>\n\nyes")
    assert allows(name, own, "yes")
    assert not allows(name, own, "<think>Hm.</think>no")
    ended = grammar_of(name, False, output=OutputFormat("choice", ["yes"]), tools=())
    assert not allows(name, ended, "<think>Hm.</think>yes")


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_whatever_a_grammar_allows_is_read_as_declared_calls(name: str, mode: Any) -> None:
    """Whole replies, at random."""
    text_model = model(name)
    grammar = grammar_of(name, tool_choice=ToolChoice(mode))
    sampler = Sampler(plain_grammar(grammar, FREE), seed=1)
    for _ in range(30):
        text = as_text(text_model, sampler.text())
        parser = text_model.reply_parser(b"", (WEATHER, NOW), False)
        ids = unpack(text_model.encode(text, special=True))
        reply = Reply().add(parser.push(ids)).add(parser.finish())
        assert reply.calls or mode == "auto"
        if "{" not in reply.text or mode == "required":  # free text goes on through objects that are no calls
            assert reply.text in {free if not reply.calls else free.rstrip() for free in FREE}
        for call in reply.calls:
            arguments = json.loads(call.arguments)
            assert call.name == "now" or isinstance(arguments["city"], str)


def test_a_schema_that_cannot_be_followed_is_refused() -> None:
    """A call must match its schema: no tool is bound to less."""
    odd = {"type": "object", "properties": {"a": {"$recursiveRef": "#"}}}
    for strict in (False, True):
        with pytest.raises(BadInput, match=r"tool odd: .*recursiveRef") as caught:
            grammar_of("qwen", tools=(Tool("odd", "", odd, strict=strict),))
        assert caught.value.param == "tools"


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_a_keyword_of_nobody_is_a_note_unless_the_tool_is_strict(name: str) -> None:
    noted = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3, "widget": "slider"}}}
    grammar = grammar_of(name, tools=(Tool("f", "", noted),))
    assert allows(name, grammar, written(name, ToolCall("", "f", '{"a": 3}')))
    assert not allows(name, grammar, written(name, ToolCall("", "f", '{"a": 4}')))
    with pytest.raises(BadInput, match=r"tool f: .*'widget'"):
        grammar_of(name, tools=(Tool("f", "", noted, strict=True),))


def test_a_tool_without_parameters_gets_none() -> None:
    given = ToolCall("", "now", '{"a":1}')
    for parameters, some in (({"type": "object", "properties": {}}, False), ({}, True)):
        grammar = grammar_of("qwen", tools=(Tool("now", "", parameters),))
        assert allows("qwen", grammar, written("qwen", NOTHING))
        assert allows("qwen", grammar, written("qwen", given)) == some


def test_a_schema_that_nothing_fits_is_refused() -> None:
    never = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    with pytest.raises(BadInput, match=r"tool never: .*no value"):
        grammar_of("qwen", tools=(Tool("never", "", never),))


def test_without_tools_or_a_format_anything_goes() -> None:
    request = GenerateRequest(id="r", model="m", prompt="")
    assert grammar_spec(model("qwen"), request, None) is None


@pytest.mark.parametrize("name", ["glm", "glm-lines", "qwen3-coder"])
def test_tagged_values_follow_their_schemas(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "minLength": 2, "maxLength": 3},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
        },
        "required": ["code"],
        "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
    }

    def allowed(arguments: str, **fields: Any) -> bool:
        grammar = grammar_of(name, tools=(Tool("f", "", schema, **fields),), tool_choice=ToolChoice("required"))
        return allows(name, grammar, written(name, ToolCall("", "f", arguments)))

    for good in ('{"code":"ab"}', '{"code":"abc","unit":"F","days":[1,7]}', '{"code":"é\\n","days":[]}'):
        assert allowed(good)
        assert allowed(good, strict=True)
    for bad in (
        '{"code":"a"}',
        '{"code":"abcd"}',
        '{"unit":"F"}',
        '{"code":"ab","unit":"K"}',
        '{"code":"ab","days":[8]}',
    ):
        assert not allowed(bad)


def test_a_keyword_beyond_tagged_text_is_refused_of_a_strict_tool() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64"}}}
    assert allows("glm", grammar_of("glm", tools=(Tool("f", "", schema),)), "Hello.")
    with pytest.raises(BadInput, match="tool f: 'contentEncoding' is not supported with this model"):
        grammar_of("glm", tools=(Tool("f", "", schema, strict=True),))


@pytest.mark.parametrize("name", ["glm", "glm-lines", "qwen3-coder"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^[a-z]+-[0-9]{2}$"}, ["ab-12"], ["ab-1", "AB-12", "ab-12x"]),
        ({"pattern": "b"}, ["abc", "b"], ["ac", ""]),
        ({"format": "date"}, ["2026-11-19"], ["tomorrow", "2026-13-01"]),
        ({"format": "uuid", "pattern": "^a"}, ["a" * 8 + "-1111" * 3 + "-" + "2" * 12], ["b" * 36, "a"]),
        ({"pattern": "^a*$", "minLength": 2, "maxLength": 3}, ["aa", "aaa"], ["a", "aaaa", "ab"]),
        ({"format": "of nobody"}, ["anything"], []),
    ],
)
def test_tagged_texts_follow_patterns_and_formats(
    name: str, strict: bool, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    grammar = grammar_of(name, tools=(Tool("f", "", parameters, strict=strict),), tool_choice=ToolChoice("required"))
    for text in (*good, *bad):
        call = written(name, ToolCall("", "f", json.dumps({"a": text})))
        assert allows(name, grammar, call) == (text in good), text


@pytest.mark.parametrize("pattern", ["^<$", "(?=a)", "(", "(a{1,1000}){1,1000}"])
def test_a_pattern_that_tagged_text_cannot_follow_is_an_error_of_a_strict_tool(pattern: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    grammar = grammar_of("qwen3-coder", tools=(Tool("f", "", parameters),), tool_choice=ToolChoice("required"))
    assert allows("qwen3-coder", grammar, written("qwen3-coder", ToolCall("", "f", '{"a": "any text"}')))
    with pytest.raises(BadInput, match="tool f: "):
        grammar_of("qwen3-coder", tools=(Tool("f", "", parameters, strict=True),))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "maxLength": "x"}}},
        {"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}},
        {"properties": {"a": {"type": "string", "minLength": -1}}},
        {"properties": {"a": {"type": "string"}}, "required": 7},
        {"properties": {"a": {"type": "no such type"}}},
    ],
)
def test_a_malformed_schema_is_refused_with_tags_too(schema: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="tool f"):
        grammar_of("glm", tools=(Tool("f", "", schema),))
