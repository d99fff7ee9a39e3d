from typing import Any

import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Free, Grammar, Token
from emberline.protocol.request import OutputFormat
from emberline.text.grammar.reply_grammar import GrammarSpec, ReasoningSpec, build
from tests.text.grammar.reference import Sampler, matches


def of(kind: Any, value: Any = None) -> Grammar:
    return build(GrammarSpec(output=OutputFormat(kind, value)))


def test_a_choice() -> None:
    grammar = of("choice", ["yes", "no", "no, thanks"])
    assert {Sampler(grammar, seed).text() for seed in range(50)} == {"yes", "no", "no, thanks"}


@pytest.mark.parametrize("value", [None, [], "yes", [1], [""], ["x"] * 10_001, ["x" * 300_000]])
def test_choices_that_are_none(value: Any) -> None:
    with pytest.raises(BadInput, match="choice") as caught:
        of("choice", value)
    assert caught.value.param == "output"


def test_any_object() -> None:
    grammar = of("json_object")
    assert matches(grammar, '{"a":{}}')
    assert not matches(grammar, '"a"')


def test_thinking_comes_first() -> None:
    output = OutputFormat("choice", ["yes"])
    grammar = build(GrammarSpec(output=output, reasoning=ReasoningSpec("</think>", 7)))
    parts = [part for rule in grammar.rules for part in getattr(rule, "items", ())]
    assert isinstance(parts[0], Free)
    assert Token(7) in parts
