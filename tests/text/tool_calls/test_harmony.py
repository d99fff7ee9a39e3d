"""GPT-OSS's Harmony format: channels become reasoning, text and calls, however the reply is split; its grammar."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.grammar import Grammar
from emberline.protocol.request import GenerateRequest, Message, OutputFormat, Tool, ToolCall, ToolChoice
from emberline.protocol.token_ids import unpack
from emberline.text.grammar.reply_grammar import build
from emberline.text.prompt import grammar_spec, reasoning_begun, render_prompt
from emberline.text.text_model import TextModel
from emberline.text.tool_calls.parser import CallEnd, ParsedCall, Reply, ReplyPiece
from tests.text.chats import text_model
from tests.text.tool_calls.parse_helpers import as_characters, matches
from tests.text.vocab import byte_level

TEMPLATE = """
{%- if tools %}{{- '<|start|>developer<|message|>' }}{{- tools | tojson }}{{- '<|end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.x to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "", CITY)
ANALYSIS = "<|channel|>analysis<|message|>Hm, 你好 🚀.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Sunny."
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}'

PARIS = ParsedCall("get_weather", "", '{"city":"Paris"}')


@cache
def model() -> TextModel:
    special = ("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
    return text_model(byte_level("gpt-4o", special), TEMPLATE)


def ids_of(text: str) -> list[int]:
    return unpack(model().encode(text, special=True))


def pieces_of(chunks: list[list[int]], *, begun: bool | None = None, cut: bool = False) -> list[ReplyPiece]:
    parser = model().reply_parser(b"", (WEATHER,), begun)
    return [piece for chunk in chunks for piece in parser.push(chunk)] + parser.finish(cut=cut)


def read(text: str, **fields: Any) -> Reply:
    return Reply().add(pieces_of([[token_id] for token_id in ids_of(text)], **fields))


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (ANALYSIS + FINAL, Reply("Sunny.", "Hm, 你好 🚀.")),
        (FINAL.removeprefix("<|start|>assistant"), Reply("Sunny.")),
        (ANALYSIS + "<|start|>assistant" + CALL, Reply("", "Hm, 你好 🚀.", [PARIS])),
        (CALL + "<|call|>", Reply("", "", [PARIS])),
        (
            CALL.replace("<|channel|>commentary ", " ").replace(" <|constrain|>", "<|channel|>commentary "),
            Reply("", "", [PARIS]),
        ),
        (
            "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant" + CALL.replace("{", "{ "),
            Reply("I look it up.", "", [ParsedCall("get_weather", "", '{ "city":"Paris"}')]),
        ),
        ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", Reply("", "1 + 1")),
        ("<|channel|>commentary to=functions.rm<|message|>{}<|call|>", Reply("", "{}")),
        ("Plain words.", Reply("Plain words.")),
        ("", Reply()),
    ],
)
def test_channels(text: str, reply: Reply) -> None:
    assert read(text) == reply


def test_an_answer_that_goes_on_is_text() -> None:
    assert read("and so on", begun=False) == Reply("and so on")


def test_a_complete_call_has_an_end_and_a_cut_one_has_none() -> None:
    chunks = [ids_of(CALL)]
    assert CallEnd() in pieces_of(chunks)
    assert CallEnd() not in pieces_of(chunks, cut=True)
    assert CallEnd() in pieces_of([ids_of(CALL + "<|call|>")], cut=True)


def test_a_call_that_is_lost_in_its_header_is_told() -> None:
    parser = model().reply_parser(b"", (WEATHER,), None)
    parser.push(ids_of("<|channel|>commentary to=functions.get_"))
    assert parser.finish(cut=True) == []
    assert parser.lost_tool_call


def test_state_is_known_token_by_token() -> None:
    """What counts reasoning tokens, and which tokens' log-probabilities are the text's."""
    parser = model().reply_parser(b"", (WEATHER,), None)
    assert not parser.decided
    parser.push(ids_of("<|channel|>analysis<|message|>Hm"))
    assert (parser.decided, parser.reasoning, parser.in_text) == (True, True, False)
    parser.push(ids_of(".<|end|><|start|>assistant<|channel|>final<|message|>"))
    assert (parser.reasoning, parser.in_text) == (False, True)


@given(cuts=st.lists(st.integers(0, 60), max_size=6))
def test_pieces_do_not_depend_on_the_split(cuts: list[int]) -> None:
    ids = ids_of(ANALYSIS + "<|start|>assistant" + CALL + "<|call|>" + FINAL)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    chunks = [ids[a:b] for a, b in pairwise(bounds)]
    assert Reply().add(pieces_of(chunks)) == Reply().add(pieces_of([ids]))


def request_of(**fields: Any) -> GenerateRequest:
    return GenerateRequest(id="r", model="m", messages=(Message("user", "Hi"),), **{"tools": (WEATHER,), **fields})


def grammar_of(**fields: Any) -> Grammar:
    request = request_of(**fields)
    begun = reasoning_begun(model(), render_prompt(model(), request))
    assert begun is None
    spec = grammar_spec(model(), request, begun)
    assert spec is not None
    return build(spec)


def allows(grammar: Grammar, text: str) -> bool:
    return matches(grammar, as_characters(model(), text))


def test_grammar_of_tools() -> None:
    auto = grammar_of()
    for reply in (ANALYSIS + FINAL, CALL, ANALYSIS + "<|start|>assistant" + CALL):
        assert allows(auto, reply)
    assert not allows(auto, CALL.replace("Paris", 'Paris","x":1,"y":"').replace('"y":""', '"y":1'))
    assert not allows(auto, CALL.replace("get_weather", "rm"))
    assert not allows(auto, "Hello.")
    required = grammar_of(tool_choice=ToolChoice("required"))
    assert allows(required, ANALYSIS + "<|start|>assistant" + CALL)
    assert not allows(required, ANALYSIS + FINAL)
    none = grammar_of(tool_choice=ToolChoice("none"))
    assert allows(none, ANALYSIS + FINAL)
    assert not allows(none, CALL)


def test_grammar_of_an_output_format() -> None:
    grammar = grammar_of(tools=(), output=OutputFormat("choice", ["Sunny.", "Rainy."]))
    assert allows(grammar, ANALYSIS + FINAL)
    assert not allows(grammar, ANALYSIS + FINAL.replace("Sunny", "Cloudy"))
    assert not allows(grammar, "Sunny.")


def test_the_template_gets_the_reasoning_before_a_call() -> None:
    call = ToolCall("1", "get_weather", '{"city":"Paris"}')
    messages = [Message("user", "Hi"), Message("assistant", "", tool_calls=(call,), reasoning="Hm.")]
    text = model().render([*messages, Message("tool", "Sunny.", tool_call_id="1")])
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in text


_SHARDS = (
    *(
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "<|call|>",
        "<|constrain|>",
        "analysis",
        "commentary",
        "final",
    ),
    *("assistant", " to=functions.get_weather", " to=", "{", "é🚀", " ", "x" * 300),
)


@given(shards=st.lists(st.sampled_from(_SHARDS), max_size=14), at=st.integers(0, 40), cut=st.booleans())
def test_any_reply_is_read_the_same_however_it_is_split(shards: list[str], at: int, cut: bool) -> None:
    ids = ids_of("".join(shards))
    whole = Reply().add(pieces_of([ids], cut=cut))
    assert Reply().add(pieces_of([ids[:at], ids[at:]], cut=cut)) == whole
    assert Reply().add(pieces_of([[token_id] for token_id in ids], cut=cut)) == whole
    assert not any("\ud800" <= char <= "\udfff" for char in whole.text + whole.reasoning)
