"""Grammars in EBNF (`root ::= …`), in the syntax of vLLM and llama.cpp."""

from typing import Any, NoReturn

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, OneOf, Rule, Sequence, Text
from emberline.text.grammar.expressions.builder import (
    EMPTY,
    NEVER,
    Builder,
    blaming,
    choice,
    expanded_chars,
    repeat,
    sequence,
)
from emberline.text.grammar.expressions.character_dfa import without_empty_loops
from emberline.text.grammar.expressions.characters import ANY, Ranges, chars, complement, union
from emberline.text.grammar.expressions.regex import MAX_EXPANDED, parse

MAX_TEXT = 256 << 10
MAX_DEPTH = 50
MAX_COUNT = 10_000
PARAM = "output"

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", "v": "\v", "0": "\0"}
_SIZES = {"x": 2, "u": 4, "U": 8}


def grammar_expression(builder: Builder, text: Any) -> Expression:
    """The expression of the rule named `root` (or `start`)."""
    if not isinstance(text, str):
        raise BadInput("a grammar must be a string", param=PARAM)
    if len(text) > MAX_TEXT:
        raise BadInput(f"a grammar may have {MAX_TEXT >> 10} KiB, not {len(text) >> 10}", param=PARAM)
    with blaming(PARAM):
        rules = _Parser(builder, text).rules()
    start = next((name for name in ("root", "start") if name in rules.bodies), None)
    if start is None:
        raise BadInput("the grammar has no rule named root: root ::= …", param=PARAM)
    for name, line in rules.used.items():
        if name not in rules.bodies:
            raise BadInput(f"the grammar uses the rule {name!r} (line {line}), which it does not define", param=PARAM)
    for name, body in rules.bodies.items():
        number = rules.number(name)
        builder.define(number, _without_left_recursion(number, body))
    if (recursive := builder.left_recursive()) is not None:
        name = next(name for name, number in rules.numbers.items() if number == recursive)
        message = f"the grammar's rule {name!r} begins with itself through other rules: avoid left recursion"
        raise BadInput(message, param=PARAM)
    expression = Rule(rules.numbers[start])
    if not builder.possible(expression):
        raise BadInput(f"the grammar's rule {start!r} can never be completed: its recursion has no end", param=PARAM)
    return expression


class _Rules:
    """Rules by name: number, body, and the line of their first use."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self.numbers: dict[str, int] = {}
        self.bodies: dict[str, Expression] = {}
        self.used: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self.numbers:
            self.numbers[name] = self._builder.rule()
        return self.numbers[name]


def _without_left_recursion(number: int, body: Expression) -> Expression:
    """Direct left recursion as repetition: a ::= a x | y becomes a ::= y x*."""
    options = body.options if isinstance(body, OneOf) else (body,)
    tails: list[Expression] = []
    others: list[Expression] = []
    for option in options:
        items = option.items if isinstance(option, Sequence) else (option,)
        if items[0] == Rule(number):
            tails.append(sequence(*items[1:]))
        else:
            others.append(option)
    tails = [tail for tail in tails if tail != EMPTY]
    return sequence(choice(others), repeat(choice(tails))) if tails else choice(others)


class _Parser:
    """Parses `name ::= alternatives`, and `name: alternatives` in Lark's syntax."""

    def __init__(self, builder: Builder, text: str) -> None:
        self._builder, self._text, self._at = builder, text, 0
        self._rules = _Rules(builder)

    def _fail(self, what: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        raise BadInput(f"the grammar cannot be read: {what} (line {line})", param=PARAM)

    def rules(self) -> _Rules:
        self._skip()
        while self._at < len(self._text):
            if self._text.startswith("%", self._at):
                self._fail("directives (%import, %ignore …) are not supported")
            name = self._name()
            if name is None:
                self._fail(f"a rule's name was expected, not {self._text[self._at : self._at + 10]!r}")
            self._skip()
            if not (self._take("::=") or self._take(":") or self._take("=")):
                self._fail(f"::= was expected after {name!r}")
            if name in self._rules.bodies:
                self._fail(f"the rule {name!r} is defined twice")
            self._rules.number(name)
            self._rules.bodies[name] = self._alternatives(0)
            self._take(";")
            self._skip()
        return self._rules

    def _skip(self) -> None:
        while self._at < len(self._text):
            if self._text[self._at].isspace():
                self._at += 1
            elif self._text.startswith(("#", "//"), self._at):
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _name(self) -> str | None:
        start = self._at
        while self._at < len(self._text) and (self._text[self._at].isalnum() or self._text[self._at] in "_-?!"):
            if self._text[self._at] in "?!" and self._at > start:
                break
            self._at += 1
        return self._text[start : self._at].lstrip("?!") or None

    def _begins_rule(self) -> bool:
        """True if the name at this position begins the next rule."""
        start = self._at
        self._name()
        self._skip()
        found = self._text.startswith((":", "="), self._at)
        self._at = start
        return found

    def _alternatives(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            self._fail(f"groups more than {MAX_DEPTH} deep")
        options = [self._terms(depth)]
        while self._take("|"):
            options.append(self._terms(depth))
        return choice(options)

    def _terms(self, depth: int) -> Expression:
        items: list[Expression] = []
        while True:
            self._skip()
            if self._at >= len(self._text) or self._text[self._at] in "|);":
                break
            if (self._text[self._at].isalnum() or self._text[self._at] in "_?!") and self._begins_rule():
                break
            items.append(self._quantified(self._atom(depth)))
        return sequence(*items)

    def _quantified(self, item: Expression) -> Expression:
        while True:
            if self._take("*"):
                item = self._repeated(item, 0, None)
            elif self._take("+"):
                item = self._repeated(item, 1, None)
            elif self._take("?"):
                item = self._repeated(item, 0, 1)
            elif self._text.startswith("{", self._at):
                item = self._repeated(item, *self._counts())
            else:
                return item

    def _repeated(self, item: Expression, least: int, most: int | None) -> Expression:
        found = repeat(item, least, most)
        if expanded_chars(found) > MAX_EXPANDED:
            self._fail(f"counted repetitions of more than {MAX_EXPANDED} characters in all")
        return found

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, self._at)].partition(",")
        low, high = low.strip(), high.strip()
        if not all(part == "" or (part.isascii() and part.isdigit()) for part in (low, high)) or (not low and not high):
            self._fail("a repetition must be {n}, {n,}, {,m} or {n,m}")
        self._at = end + 1
        least = int(low or 0)
        most = int(high) if high else None if comma else least
        if least > MAX_COUNT or (most or 0) > MAX_COUNT or (most is not None and least > most):
            self._fail(f"a repetition's counts must ascend and stay within {MAX_COUNT}")
        return least, most

    def _atom(self, depth: int) -> Expression:
        char = self._text[self._at]
        if char in "\"'":
            return self._literal(char)
        if char == "[":
            return self._class()
        if char == "/":
            return self._regex()
        self._at += 1
        if char == "(":
            inner = self._alternatives(depth + 1)
            self._skip()
            if not self._take(")"):
                self._fail("a group is not closed")
            return inner
        if char == ".":
            return Chars(ANY)
        self._at -= 1
        name = self._name()
        if name is None:
            self._fail(f"{char!r} has no meaning here")
        self._rules.used.setdefault(name, self._text.count("\n", 0, self._at) + 1)
        return Rule(self._rules.number(name))

    def _literal(self, quote: str) -> Expression:
        self._at += 1
        found = ""
        while not self._take(quote):
            found += self._character()
        if self._take("i"):
            return sequence(
                *(Chars(chars(c.lower() + c.upper())) if c.lower() != c.upper() else Text(c) for c in found)
            )
        return Text(found)

    def _character(self) -> str:
        if self._at >= len(self._text):
            self._fail("a literal or class is not closed")
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char in _SIZES:
            code = self._text[self._at : self._at + _SIZES[char]]
            self._at += _SIZES[char]
            try:
                number = int(code, 16)
            except ValueError:
                number = -1
            if not 0 <= number <= 0x10FFFF or 0xD800 <= number <= 0xDFFF:
                self._fail(f"\\{char}{code} is no character")
            return chr(number)
        return _ESCAPES.get(char, char)

    def _class(self) -> Expression:
        self._at += 1
        negated = self._take("^")
        sets: list[Ranges] = []
        while not self._take("]"):
            low = self._character()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character()
                if high < low:
                    self._fail(f"the range {low}-{high} is reversed")
                sets.append(((ord(low), ord(high)),))
            else:
                sets.append(chars(low))
        ranges = union(*sets) if sets else ()
        ranges = complement(ranges) if negated else ranges
        return Chars(ranges) if ranges else NEVER

    def _regex(self) -> Expression:
        start = self._at = self._at + 1
        while self._at < len(self._text) and self._text[self._at] not in "/\n":
            self._at += 2 if self._text[self._at] == "\\" else 1
        pattern = self._text[start : self._at].replace("\\/", "/")
        if not self._take("/"):
            self._fail("a /regex/ is not closed")
        return without_empty_loops(parse(pattern, search=False, param=PARAM), self._builder)
