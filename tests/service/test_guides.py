"""Grammars of replies, as an engine follows them: every family's special tokens, with and without reasoning."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.protocol.grammar import encode
from emberline.protocol.request import GenerateRequest, OutputFormat, Tool, ToolCall, ToolChoice
from emberline.protocol.token_ids import unpack
from emberline.text.grammar.reply_grammar import build
from emberline.text.prompt import grammar_spec
from tests.text.tool_calls.models import CALLERS, model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("get_weather", "", CITY), Tool("now", "", {"type": "object", "properties": {}}))
PARIS, NOTHING = ToolCall("", "get_weather", '{"city":"Paris"}'), ToolCall("", "now", "{}")
PATIENCE_S = 60.0


compilers: dict[str, MatcherCompiler] = {}  # by model; all tests share them, as each starts a process


def compiler(name: str) -> MatcherCompiler:
    """Return the compiler of a model's engine."""
    if name not in compilers:
        compilers[name] = MatcherCompiler(model(name).vocab_size)
        compilers[name].learn(model(name).vocabulary)
    return compilers[name]


@pytest.fixture(autouse=True, scope="module")
def close_compilers() -> Iterator[None]:
    """End the processes of the compilers after the last test."""
    yield
    for each in compilers.values():
        each.close()
    compilers.clear()


def follows(name: str, text: str, thinking: bool | None = False, **fields: Any) -> tuple[bool, bool]:
    """Return two booleans: an engine lets the text pass, token by token; the reply may end there."""
    request = GenerateRequest(id="r", model="m", prompt="", **{"tools": TOOLS, **fields})
    spec = grammar_spec(model(name), request, thinking)
    assert spec is not None
    pending = compiler(name).request(encode(build(spec)))
    give_up_s = time.monotonic() + PATIENCE_S
    while not pending.ready:
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    guide = pending.guide()
    accepted = all(guide.accept(token_id) for token_id in unpack(model(name).encode(text, special=True)))
    return accepted, accepted and guide.complete


@pytest.mark.parametrize("name", CALLERS)
def test_calls_pass_and_others_do_not(name: str) -> None:
    form = model(name).tool_format
    assert follows(name, form.write([PARIS])) == (True, True)
    assert follows(name, form.write([PARIS]), tool_choice=ToolChoice("required")) == (True, True)
    assert follows(name, form.write([ToolCall("", "get_weather", '{"town":1}')])) == (False, False)
    assert follows(name, "Hello.") == (True, True)
    assert follows(name, "Hello.", tool_choice=ToolChoice("required")) == (False, False)
    if form.parallel:
        assert follows(name, "So:\n" + form.write([PARIS, NOTHING])) == (True, True)


@pytest.mark.parametrize("name", ["qwen", "hermes-special", "hermes-text", "kimi"])
def test_reasoning_passes_before(name: str) -> None:
    written = model(name).tool_format.write([PARIS])
    required = {"tool_choice": ToolChoice("required")}
    assert follows(name, "Is <b> so?</think>\n\n" + written, True, **required) == (True, True)
    assert follows(name, "I look.\n" + written, True, **required) == (True, True)
    assert follows(name, "I look.", True, **required) == (True, False)
    yes = {"output": OutputFormat("choice", ["yes"]), "tools": ()}
    assert follows(name, "<think>Hm.</think>\n\nyes", None, **yes) == (True, True)
    assert follows(name, "yes", None, **yes) == (True, True)
    assert follows(name, "<think>Hm.</think>\n\nno", None, **yes) == (False, False)
