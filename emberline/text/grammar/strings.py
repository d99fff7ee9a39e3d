"""JSON strings: free ones, and those that patterns, lengths, formats and exclusions describe."""

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from emberline.protocol.grammar import Chars, Expression, OneOf, Repeat, Sequence, Text
from emberline.text.grammar import automaton
from emberline.text.grammar.automaton import Automaton
from emberline.text.grammar.builder import NEVER, Builder, choice, repeat, sequence
from emberline.text.grammar.formats import PATTERNS
from emberline.text.grammar.goals import Goal
from emberline.text.grammar.ranges import ANY, Ranges, chars, subtract, union
from emberline.text.grammar.regex import lengths, parse
from emberline.text.grammar.shapes import String, shapes

if TYPE_CHECKING:
    from emberline.text.grammar.algebra import Algebra

QUOTE = Text('"')
_SPECIAL = union([(0, 0x1F)], chars('"\\'))
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_HEX = Chars(chars("0123456789abcdefABCDEF"))
_PLAIN = Chars(subtract(ANY, _SPECIAL))


def _unicode_escape() -> Expression:
    """\\uXXXX of any character: of one outside the first plane as a pair of surrogates, never as half of one."""
    outside = Chars(chars("0123456789abcefABCEF"))
    single = choice([sequence(outside, _HEX), sequence(Chars(chars("dD")), Chars(chars("01234567")))])
    pair = sequence(
        Chars(chars("dD")), Chars(chars("89abAB")), repeat(_HEX, 2, 2), Text("\\u"),
        Chars(chars("dD")), Chars(chars("cdefCDEF")), repeat(_HEX, 2, 2),
    )  # fmt: skip
    return sequence(Text("\\u"), choice([sequence(single, repeat(_HEX, 2, 2)), pair]))


CHARACTER: Expression = choice([_PLAIN, sequence(Text("\\"), Chars(chars('"\\/bfnrt'))), _unicode_escape()])


def literal(value: Any) -> Expression:
    """A value as compact JSON."""
    return Text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def free_string(builder: Builder) -> Expression:
    return builder.share("string", sequence(QUOTE, repeat(builder.share("character", CHARACTER)), QUOTE))


def in_json(expression: Expression) -> Expression:
    """The same characters as they stand inside a JSON string, each in one way only."""
    match expression:
        case Text(text):
            return Text(json.dumps(text, ensure_ascii=False)[1:-1])
        case Chars(ranges):
            return _escaped(ranges)
        case Sequence(items):
            return sequence(*map(in_json, items))
        case OneOf(options):
            return choice(map(in_json, options))
        case Repeat(item, least, most):
            return repeat(in_json(item), least, most)
        case _:
            return expression


def _escaped(ranges: Ranges) -> Expression:
    plain = subtract(ranges, _SPECIAL)
    options: list[Expression] = [Chars(plain)] if plain else []
    codes = [code for low, high in ranges for code in range(low, min(high, 92) + 1) if code < 32 or code in (34, 92)]
    short = "".join(_SHORT[code] for code in codes if code in _SHORT)
    if short:
        options.append(sequence(Text("\\"), Chars(chars(short)) if len(short) > 1 else Text(short)))
    for high in (0, 1):
        last = "".join(f"{code & 15:x}" for code in codes if code >> 4 == high and code not in _SHORT)
        if last:
            options.append(sequence(Text(f"\\u00{high:x}"), Chars(chars(last + last.upper()))))
    return choice(options) if options else NEVER


def string_expression(algebra: "Algebra", builder: Builder, shape: String) -> Expression:
    if shape.among is not None:
        return choice(literal(value) for value in shape.among)
    texts = [pattern for pattern, wanted in sorted(shape.patterns) if wanted]
    trees = [parse(pattern, search=True, param=algebra.document.where) for pattern in texts]
    trees += [_of_format(name) for name in sorted(shape.formats) if name in PATTERNS]
    unwanted = any(not wanted for _, wanted in shape.patterns)
    if not trees and not unwanted and not shape.without:
        if shape.least == 0 and shape.most is None:
            return free_string(builder)
        character = builder.share("character", CHARACTER)
        return sequence(QUOTE, repeat(character, shape.least, shape.most), QUOTE)
    if len(trees) == 1 and not unwanted and not shape.without and _fits(trees[0], shape):
        return sequence(QUOTE, automaton.tidy(trees[0], builder, in_json), QUOTE)
    if not trees and not unwanted and shape.least == 0 and shape.most is None:
        return sequence(QUOTE, in_json(not_among(shape.without)), QUOTE)
    found = string_automaton(algebra, shape)
    if shape.formats and found.shortest() is None:
        algebra.document.given_up.append(f"'format' {min(shape.formats)!r}")
    return sequence(QUOTE, _written(found, builder), QUOTE)


@cache
def _of_format(name: str) -> Expression:
    return parse(PATTERNS[name], search=False)


def _written(found: Automaton, builder: Builder) -> Expression:
    return automaton.to_expression(found, builder, in_json)


def _fits(tree: Expression, shape: String) -> bool:
    """Whether the pattern alone keeps the lengths."""
    least, most = lengths(tree)
    return least >= shape.least and (shape.most is None or (most is not None and most <= shape.most))


def string_automaton(algebra: "Algebra", shape: String) -> Automaton:
    """Of the texts, not escaped; very long ones may be left out."""
    if shape.among is not None:
        return automaton.of_words(value for value in shape.among if algebra.admits(shape, value))
    found = [algebra.automaton(f"^(?:{PATTERNS[name]})$", False) for name in sorted(shape.formats) if name in PATTERNS]
    for pattern, wanted in sorted(shape.patterns):
        each = algebra.automaton(pattern, not wanted)
        found.append(each if wanted else automaton.complement(each))
    if shape.without:
        found.append(automaton.complement(automaton.of_words(sorted(shape.without))))
    total = found[0] if found else Automaton([[(low, high, 0) for low, high in ANY]], {0})
    for each in found[1:]:
        total = automaton.intersect(total, each)
        algebra.document.spend(len(total.edges))
    if shape.least or shape.most is not None:
        total = automaton.of_length(total, shape.least, shape.most)
        algebra.document.spend(len(total.edges))
    return total


def text_automaton(algebra: "Algebra", goal: Goal) -> Automaton:
    """Of the strings that satisfy a goal."""
    total: Automaton | None = None
    for shape in shapes(algebra.values(goal), "string"):
        assert isinstance(shape, String)
        each = string_automaton(algebra, shape)
        total = each if total is None else automaton.unite(total, each)
    return total or Automaton([[]], set())


def not_among(words: frozenset[str]) -> Expression:
    """Every text but these, as a tree of their beginnings: no rules needed."""
    trie: dict[str, Any] = {}
    for word in sorted(words):
        at = trie
        for char in word:
            at = at.setdefault(char, {})
        at[""] = {}
    return _beside(trie)


def _beside(trie: dict[str, Any]) -> Expression:
    children = {char: below for char, below in trie.items() if char}
    other = sequence(Chars(subtract(ANY, chars("".join(children)))), repeat(Chars(ANY)))
    options = [sequence(Text(char), _beside(below)) for char, below in children.items()]
    ends = [] if "" in trie else [Text("")]
    return choice([*options, other, *ends])
