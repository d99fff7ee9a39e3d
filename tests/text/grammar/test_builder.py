from emberline.protocol.grammar import Chars, OneOf, Repeat, Rule, Sequence, Text, decode, encode
from emberline.text.grammar.expressions.builder import (
    EMPTY,
    NEVER,
    Builder,
    choice,
    optional,
    repeat,
    separated,
    sequence,
)
from tests.text.grammar.reference import matches


def test_what_is_written_together_is_one() -> None:
    assert sequence(Text("a"), EMPTY, Sequence((Text("b"), Chars(((48, 57),))))) == Sequence(
        (Text("ab"), Chars(((48, 57),)))
    )
    assert choice([Text("a"), choice([Text("b"), Text("a")])]) == OneOf((Text("a"), Text("b")))
    assert sequence(Text("a"), NEVER) == NEVER
    assert optional(NEVER) == EMPTY
    assert repeat(NEVER, 1) == NEVER
    assert repeat(repeat(Text("a")), 1) == Repeat(Text("a"), 0, None)


def test_rules_that_cannot_be_completed_are_dropped() -> None:
    builder = Builder()
    endless = builder.rule()
    builder.define(endless, sequence(Text("a"), Rule(endless)))
    unused = builder.add(Sequence((Text("x"), Chars(((97, 99),)))))
    assert unused == Rule(1)
    grammar = builder.finish(choice([Rule(endless), Text("b")]))
    assert grammar is not None
    assert grammar.rules == (Text("b"),)
    assert decode(encode(grammar)) == grammar


def test_nothing_left_is_no_grammar() -> None:
    builder = Builder()
    endless = builder.rule()
    builder.define(endless, sequence(Text("a"), Rule(endless)))
    assert not builder.possible(Rule(endless))
    assert builder.finish(Rule(endless)) is None


def test_separated() -> None:
    builder = Builder()
    grammar = builder.finish(separated(Text("x"), Text(","), 2, 3))
    assert grammar is not None
    assert [n for n in range(6) if matches(grammar, ",".join("x" * n))] == [2, 3]
    assert separated(Text("x"), Text(","), 0, 0) == EMPTY
