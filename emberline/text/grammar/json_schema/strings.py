"""JSON strings: their keywords (pattern, format, lengths), and the expressions of the strings that they allow."""

import json
from functools import cache
from typing import Any

from emberline.protocol.grammar import Chars, Expression, OneOf, Repeat, Sequence, Text
from emberline.text.grammar.expressions import character_dfa
from emberline.text.grammar.expressions.builder import (
    NEVER,
    Builder,
    choice,
    lengths_in_chars,
    optional,
    repeat,
    sequence,
)
from emberline.text.grammar.expressions.character_dfa import CharacterDfa
from emberline.text.grammar.expressions.characters import ANY, Ranges, chars, subtract, union
from emberline.text.grammar.expressions.regex import parse
from emberline.text.grammar.json_schema.document import Conjunction, Node
from emberline.text.grammar.json_schema.set_algebra import (
    SetAlgebra,
    StringSet,
    ValueSet,
    nothing,
    only,
    typed_sets,
)

MAX_SPLIT_CHARACTERS = 33  # of a range, by which strings are split

QUOTE = Text('"')
# The model decides whether a space follows, as it was trained to: most learned `json.dumps` spacing, some compact JSON.
COMMA, COLON = (sequence(Text(mark), optional(Text(" "))) for mark in ",:")
_SPECIAL = union([(0, 0x1F)], chars('"\\'))
_SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_HEX = Chars(chars("0123456789abcdefABCDEF"))
_UNESCAPED = Chars(subtract(ANY, _SPECIAL))


def _unicode_escape() -> Expression:
    """\\uXXXX of any character: outside the basic plane as a surrogate pair, never a lone surrogate."""
    not_d = Chars(chars("0123456789abcefABCEF"))
    single = choice([sequence(not_d, _HEX), sequence(Chars(chars("dD")), Chars(chars("01234567")))])
    pair = sequence(
        Chars(chars("dD")), Chars(chars("89abAB")), repeat(_HEX, 2, 2), Text("\\u"),
        Chars(chars("dD")), Chars(chars("cdefCDEF")), repeat(_HEX, 2, 2),
    )  # fmt: skip
    return sequence(Text("\\u"), choice([sequence(single, repeat(_HEX, 2, 2)), pair]))


CHARACTER: Expression = choice([_UNESCAPED, sequence(Text("\\"), Chars(chars('"\\/bfnrt'))), _unicode_escape()])


# --- keywords --------------------------------------------------------------------------------------------------------


def read_pattern(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    if not isinstance(value, str):
        algebra.document.fail(node, "'pattern' must be a string")
    strings = StringSet(patterns=frozenset(((value, not negated),)))
    return only("string", strings) if negated else {"string": (strings,)}


def read_format(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    """A format may be an assertion or a mere annotation: what is valid under both readings is generated."""
    if not isinstance(value, str):
        algebra.document.fail(node, "'format' must be a string")
    if negated:
        algebra.drop(node, "format")
        return nothing()
    return {"string": (StringSet(formats=frozenset(((value, FORMATS[value]),))),)} if value in FORMATS else {}


# --- expressions -----------------------------------------------------------------------------------------------------


def literal(value: Any) -> Expression:
    """A value as JSON on one line."""
    return Text(json.dumps(value, ensure_ascii=False))


def free_string(builder: Builder) -> Expression:
    return builder.share("string", sequence(QUOTE, repeat(builder.share("character", CHARACTER)), QUOTE))


def escape(expression: Expression) -> Expression:
    """The same characters as they are written inside a JSON string, each in one way only."""
    match expression:
        case Text(text):
            return Text(json.dumps(text, ensure_ascii=False)[1:-1])
        case Chars(ranges):
            return _escape_chars(ranges)
        case Sequence(items):
            return sequence(*map(escape, items))
        case OneOf(options):
            return choice(map(escape, options))
        case Repeat(item, least, most):
            return repeat(escape(item), least, most)
        case _:
            return expression


def _escape_chars(ranges: Ranges) -> Expression:
    plain = subtract(ranges, _SPECIAL)
    options: list[Expression] = [Chars(plain)] if plain else []
    codes = [code for low, high in ranges for code in range(low, min(high, 92) + 1) if code < 32 or code in (34, 92)]
    short = "".join(_SHORT_ESCAPES[code] for code in codes if code in _SHORT_ESCAPES)
    if short:
        options.append(sequence(Text("\\"), Chars(chars(short)) if len(short) > 1 else Text(short)))
    for high in (0, 1):
        last = "".join(f"{code & 15:x}" for code in codes if code >> 4 == high and code not in _SHORT_ESCAPES)
        if last:
            options.append(sequence(Text(f"\\u00{high:x}"), Chars(chars(last + last.upper()))))
    return choice(options) if options else NEVER


def quoted_dfa(dfa: CharacterDfa, builder: Builder) -> Expression:
    """A JSON string whose content the DFA accepts."""
    return sequence(QUOTE, character_dfa.to_expression(dfa, builder, escape), QUOTE)


def string_expression(algebra: SetAlgebra, builder: Builder, strings: StringSet) -> Expression:
    required = [pattern for pattern, wanted in sorted(strings.patterns) if wanted]
    trees = [parse(pattern, search=True, param=algebra.document.param) for pattern in required]
    trees += [_format_expression(pattern) for _, pattern in sorted(strings.formats)]
    needs_complement = len(required) < len(strings.patterns) or bool(strings.excluded)
    if not trees and not needs_complement:
        if strings.least == 0 and strings.most is None:
            return free_string(builder)
        character = builder.share("character", CHARACTER)
        return sequence(QUOTE, repeat(character, strings.least, strings.most), QUOTE)
    if len(trees) == 1 and not needs_complement and _has_lengths(trees[0], strings):
        return sequence(QUOTE, character_dfa.without_empty_loops(trees[0], builder, escape), QUOTE)
    if not strings.patterns and not strings.formats and strings.least == 0 and strings.most is None:
        return sequence(QUOTE, escape(none_of_words(strings.excluded)), QUOTE)
    dfa = string_dfa(algebra, strings)
    if strings.formats and dfa.shortest() is None:
        algebra.document.dropped.append(f"'format' {min(strings.formats)[0]!r}")
    return quoted_dfa(dfa, builder)


@cache
def _format_expression(pattern: str) -> Expression:
    return parse(pattern, search=False)


def _has_lengths(tree: Expression, strings: StringSet) -> bool:
    """True if the pattern alone keeps the length within bounds."""
    least, most = lengths_in_chars(tree)
    return least >= strings.least and (strings.most is None or (most is not None and most <= strings.most))


def string_dfa(algebra: SetAlgebra, strings: StringSet) -> CharacterDfa:
    """The DFA of the unescaped texts; very long ones may be left out."""
    if strings.members is not None:
        return character_dfa.of_words(value for value in strings.members if algebra.is_member(strings, value))
    parts = [algebra.format_dfa(pattern) for _, pattern in sorted(strings.formats)]
    for pattern, wanted in sorted(strings.patterns):
        each = algebra.dfa(pattern, not wanted)
        parts.append(each if wanted else character_dfa.complement(each))
    if strings.excluded:
        parts.append(character_dfa.complement(character_dfa.of_words(sorted(strings.excluded))))
    total = parts[0] if parts else CharacterDfa([[(low, high, 0) for low, high in ANY]], {0})
    for each in parts[1:]:
        total = character_dfa.intersect(total, each)
        algebra.document.spend(len(total.edges))
    if strings.least or strings.most is not None:
        total = character_dfa.of_length(total, strings.least, strings.most)
        algebra.document.spend(len(total.edges))
    return total


def string_parts(algebra: SetAlgebra, builder: Builder, dfa: CharacterDfa, wanted: int) -> list[Expression]:
    """The quoted strings of a DFA in at least `wanted` parts, or in as many as are found. No two parts have a string in
    common: they begin with different characters, as many as it takes."""
    whole: list[str] = []
    begun = [("", 0)]  # beginnings, and the state after each
    while begun and len(whole) + len(begun) < wanted and len(begun[0][0]) < wanted:
        text, state = begun.pop(0)
        whole += [text] if state in dfa.accepting else []
        for low, high, target in dfa.edges[state]:
            begun += [(text + chr(code), target) for code in range(low, min(high + 1, low + MAX_SPLIT_CHARACTERS))]
        algebra.document.spend()
    return [*map(literal, whole), *(_beginning_with(algebra, builder, dfa, text, state) for text, state in begun)]


def _beginning_with(algebra: SetAlgebra, builder: Builder, dfa: CharacterDfa, text: str, state: int) -> Expression:
    """The quoted strings of a DFA that begin with a text, after which it is in this state."""
    n = len(text)
    targets = [*range(1, n), n + state]
    spelled = [[(ord(char), ord(char), target)] for char, target in zip(text, targets, strict=False)]
    shifted = [[(low, high, target + n) for low, high, target in row] for row in dfa.edges]
    algebra.document.spend(1 + len(shifted) // 16)
    return quoted_dfa(CharacterDfa([*spelled, *shifted], {accepting + n for accepting in dfa.accepting}), builder)


def conjunction_dfa(algebra: SetAlgebra, schemas: Conjunction) -> CharacterDfa:
    """The DFA of the strings that satisfy the sub-schemas."""
    total: CharacterDfa | None = None
    for strings in typed_sets(algebra.values(schemas), "string"):
        assert isinstance(strings, StringSet)
        each = string_dfa(algebra, strings)
        total = each if total is None else character_dfa.unite(total, each)
    return total or CharacterDfa([[]], set())


def none_of_words(words: frozenset[str]) -> Expression:
    """Every text except these words, as a trie of their prefixes."""
    trie: dict[str, Any] = {}
    for word in sorted(words):
        at = trie
        for char in word:
            at = at.setdefault(char, {})
        at[""] = {}
    return _outside_trie(trie)


def _outside_trie(trie: dict[str, Any]) -> Expression:
    children = {char: below for char, below in trie.items() if char}
    other = sequence(Chars(subtract(ANY, chars("".join(children)))), repeat(Chars(ANY)))
    options = [sequence(Text(char), _outside_trie(below)) for char, below in children.items()]
    ends = [] if "" in trie else [Text("")]
    return choice([*options, other, *ends])


# --- formats: patterns of well-formed texts, without the rarely supported corners of a format -------------------------

_HOUR = r"(?:[01][0-9]|2[0-3])"
_SECONDS = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9]"
_LEAP = r"(?:1[0-9]|2[0-9])(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    r"(?:[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = rf"{_SECONDS}(?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9]|-[A-Za-z0-9]){0,20}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        rf"{_H16}(?::{_H16}){{7}}",
        *(rf"{_H16}(?::{_H16}){{{n - 1}}}::(?:{_H16}(?::{_H16}){{0,{6 - n}}})?" for n in range(1, 6)),
        rf"::(?:{_H16}(?::{_H16}){{0,6}})?",
        rf"{_H16}(?::{_H16}){{5}}::{_H16}",
        rf"{_H16}(?::{_H16}){{6}}::",
        rf"::(?:ffff:)?{_IPV4}",
    ]
)
_PATH_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_QUERY = rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
_TAIL = rf"(?:/{_PATH_CHAR}*)*{_QUERY}"
_PORT = r"(?::[1-9][0-9]{0,3})?"
_URI = rf"(?:[a-z][a-z0-9+]{{1,11}}://{_HOST}{_PORT}{_TAIL}|(?:mailto|urn|tel|data):[A-Za-z0-9._~:@/,;=+-]+)"
_RELATIVE = rf"(?:/|\./|\.\./)?(?:[A-Za-z0-9._~-]+(?:/[A-Za-z0-9._~-]*)*)?{_QUERY}"
_POINTER = r"(?:/(?:[A-Za-z0-9 _.!$%&\'()*+,;=:@?#<>|{}^-]|~[01])*)*"
_LOCAL = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.+-][A-Za-z0-9_]){0,31}"  # at most 64 characters, by the standard
_EMAIL = rf"{_LOCAL}@{_LABEL}(?:\.{_LABEL}){{0,3}}\.[A-Za-z]{{2,10}}"
_CLOCK_PART = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)".replace("[0-9]+", "[0-9]{1,9}")
_DURATION = (
    rf"P(?:{_CLOCK_PART}|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_CLOCK_PART})?|[0-9]+W)"
).replace("[0-9]+", "[0-9]{1,9}")
_REGEX = r"\^?(?:(?:[A-Za-z0-9 _/@:,-]|\\[dws.]|\[[a-z0-9]+\]|\.)[*+?]?)*\$?"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "iri": _URI,
    "url": _URI,
    "uri-reference": rf"(?:{_URI}|{_RELATIVE})",
    "iri-reference": rf"(?:{_URI}|{_RELATIVE})",
    "uri-template": rf"(?:https?://{_HOST})?(?:/(?:[A-Za-z0-9._~-]+|\{{[a-z][a-z0-9_]*\}}))*",
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
    "regex": _REGEX,
}
