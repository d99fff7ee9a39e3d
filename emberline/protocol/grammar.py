"""A grammar as plain data: the front end compiles one from a schema, a regex or tools; an engine constrains a sequence
to it.

Expressions over characters, with numbered nonterminals ("rules") for recursion. Rule 0 is the start symbol: the whole
reply must match it. The meaning is that of a context-free grammar: no lexer, no longest match.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Final, TypeAlias

import msgspec

MAX_CODE_POINT = 0x10FFFF
UNMATCHABLE: Final = 1 << 60  # the shortest length of what no text matches


class Text(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """A literal text."""

    text: str


class Chars(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """One character of these ranges of code points: inclusive, ascending, disjoint. Surrogates are in none."""

    ranges: tuple[tuple[int, int], ...]


class Token(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """One special token of the model. No other expression ever matches a special token."""

    token_id: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Any text, including the empty one, that contains none of the strings and no match of the patterns in `without`,
    and does not begin with one of `not_first`. Patterns have neither rules, special tokens nor free text. What follows
    must begin with one of `without`, or with a special token, or be the end."""

    without: tuple["str | Expression", ...] = ()
    not_first: tuple["str | Expression", ...] = ()


class Sequence(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    items: tuple["Expression", ...]


class OneOf(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    options: tuple["Expression", ...]


class Repeat(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    item: "Expression"
    least: int = 0
    most: int | None = None


class Rule(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """A reference to the nonterminal of this number. Rules may be recursive, except on the left."""

    number: int


Expression: TypeAlias = Text | Chars | Token | Free | Sequence | OneOf | Repeat | Rule


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    rules: tuple[Expression, ...]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Grammar).decode


def children(expression: Expression) -> tuple[Expression, ...]:
    match expression:
        case Sequence():
            return expression.items
        case OneOf():
            return expression.options
        case Repeat():
            return (expression.item,)
        case Free():
            parts = expression.without + expression.not_first
            return tuple(part for part in parts if not isinstance(part, str))
    return ()


def walk(*expressions: Expression) -> Iterator[Expression]:
    """The expressions and everything inside them, without following rules."""
    stack = list(expressions)
    while stack:
        expression = stack.pop()
        yield expression
        stack += children(expression)


def references(expression: Expression) -> Iterator[int]:
    """The numbers of the rules that an expression refers to."""
    return (part.number for part in walk(expression) if isinstance(part, Rule))


def callees_first(rules: Seq[Expression], starts: Seq[int] | None = None) -> list[int]:
    """Every rule reachable from `starts` (default: all), where possible after the rules it refers to (postorder)."""
    order: list[int] = []
    seen: set[int] = set()
    stack = [(number, False) for number in (range(len(rules)) if starts is None else starts)]
    while stack:
        number, done = stack.pop()
        if done:
            order.append(number)
        elif number not in seen:
            seen.add(number)
            stack.append((number, True))
            stack += [(called, False) for called in references(rules[number])]
    return order


def shortest_lengths(rules: Seq[Expression], starts: Seq[int] | None = None) -> list[int]:
    """The fewest bytes and special tokens that each rule matches. 0: it may be empty; UNMATCHABLE: nothing matches it.

    A fixpoint over the rules that `starts` (default: every rule) can reach; others are left UNMATCHABLE.
    """
    lengths = [UNMATCHABLE] * len(rules)
    order = callees_first(rules, starts)
    changed = True
    while changed:
        changed = False
        for number in order:
            length = shortest_length(rules[number], lengths)
            if length < lengths[number]:
                lengths[number], changed = length, True
    return lengths


def shortest_length(expression: Expression, lengths: Seq[int]) -> int:
    """Shortest length of one expression, given the lengths of the rules."""
    match expression:
        case Text():
            return len(expression.text.encode("utf-8", "surrogatepass"))
        case Chars():
            return (
                len(chr(expression.ranges[0][0]).encode("utf-8", "surrogatepass")) if expression.ranges else UNMATCHABLE
            )
        case Token():
            return 1
        case Free():
            return 0
        case Sequence():
            return min(UNMATCHABLE, sum(shortest_length(item, lengths) for item in expression.items))
        case OneOf():
            return min((shortest_length(option, lengths) for option in expression.options), default=UNMATCHABLE)
        case Repeat():
            item = shortest_length(expression.item, lengths) if expression.least else 0
            return min(UNMATCHABLE, expression.least * item)
        case Rule():
            return lengths[expression.number]


def left_recursive(rules: Seq[Expression]) -> int | None:
    """A rule that can begin with itself, directly or through others; None if there is none."""
    lengths = shortest_lengths(rules)
    corners = [set(_left_corners(rule, lengths)) for rule in rules]
    on_path, done = 1, 2
    state = [0] * len(rules)
    for start in range(len(rules)):
        stack = [(start, False)]
        while stack:
            number, leaving = stack.pop()
            if leaving:
                state[number] = done
            elif state[number] == 0:
                state[number] = on_path
                stack.append((number, True))
                for called in corners[number]:
                    if state[called] == on_path:
                        return called
                    stack.append((called, False))
    return None


def _left_corners(expression: Expression, lengths: Seq[int]) -> Iterator[int]:
    """The rules that an expression may begin with."""
    match expression:
        case Rule():
            yield expression.number
        case Sequence():
            for item in expression.items:
                yield from _left_corners(item, lengths)
                if shortest_length(item, lengths):
                    return
        case OneOf() | Repeat():
            for part in children(expression):
                yield from _left_corners(part, lengths)
