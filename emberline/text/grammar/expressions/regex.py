"""Parses regular expressions (the common subset of ECMA-262, Rust and Python) into expressions over characters.

Dialects disagree on details (is a Bengali digit a \\d?). The `narrow` reading contains only what every dialect matches;
the `wide` one, for complements, everything that any dialect matches.
"""

from typing import Any, NoReturn, TypeAlias

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, OneOf, Repeat, Sequence, Text
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
from emberline.text.grammar.expressions.characters import (
    ANY,
    Ranges,
    category,
    chars,
    complement,
    digit_characters,
    union,
    word_characters,
)

MAX_PATTERN = 16 << 10
MAX_DEPTH = 50
MAX_EXPANDED = 50_000  # characters once counted repetitions are expanded

_SPACE = union(chars(" \t\n\r\v\f\u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), [(0x2000, 0x200A)])
_DIGIT: Ranges = ((48, 57),)
_WORD = union(_DIGIT, [(65, 90), (97, 122), (95, 95)])
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}

_REFUSED_GROUPS = {
    "=": "look-ahead (?=…)",
    "!": "negative look-ahead (?!…)",
    "<=": "look-behind (?<=…)",
    "<!": "negative look-behind (?<!…)",
    ">": "an atomic group (?>…)",
    "(": "a conditional group",
    "P=": "a back-reference",
    "P>": "a recursive group",
    "R": "a recursive group",
    "#": "a comment",
}


class Anchor(msgspec.Struct, frozen=True):
    end: bool


Tree: TypeAlias = Any  # an Expression in which anchors occur, until `_split_anchors` has removed them


def regex_expression(builder: Builder, pattern: Any, param: str = "output") -> Expression:
    """The texts that the pattern matches as a whole; `^` and `$` at its ends change nothing."""
    if not isinstance(pattern, str):
        raise BadInput("a regex must be a string", param=param)
    with blaming(param):
        return without_empty_loops(parse(pattern, search=False, param=param), builder)


def parse(pattern: str, *, search: bool, wide: bool = False, param: str | None = None) -> Expression:
    """The texts that a pattern matches as a whole or, with `search`, somewhere in them."""
    if len(pattern) > MAX_PATTERN:
        raise BadInput(f"a regex may have {MAX_PATTERN} characters, not {len(pattern)}", param=param)
    parser = _Parser(pattern, wide, param)
    tree = parser.alternatives(0)
    if parser.at < len(pattern):
        parser.fail("an unbalanced )")
    found = choice(
        sequence(
            repeat(Chars(ANY)) if search and not begins else EMPTY,
            body,
            repeat(Chars(ANY)) if search and not ends else (_line_end(wide) if ends else EMPTY),
        )
        for begins, body, ends in _split_anchors(tree, parser)
    )
    if expanded_chars(found) > MAX_EXPANDED:
        parser.fail(f"counted repetitions of more than {MAX_EXPANDED} characters in all")
    return found


def _line_end(wide: bool) -> Expression:
    return repeat(Text("\n"), 0, 1) if wide else EMPTY  # Python's $ allows a last line break


def _has_anchor(tree: Tree) -> bool:
    match tree:
        case Anchor(_):
            return True
        case Sequence(items) | OneOf(items):
            return any(map(_has_anchor, items))
        case Repeat(item, _, _):
            return _has_anchor(item)
        case _:
            return False


def _split_anchors(tree: Tree, parser: "_Parser") -> list[tuple[bool, Expression, bool]]:
    """The alternatives without anchors: (anchored at the start, body, anchored at the end)."""
    if not _has_anchor(tree):
        return [(False, tree, False)]
    if isinstance(tree, OneOf):
        return [each for option in tree.options for each in _split_anchors(option, parser)]
    items = list(tree.items) if isinstance(tree, Sequence) else [tree]
    begins = ends = False
    while items and isinstance(items[0], Anchor) and not items[0].end:
        begins, items = True, items[1:]
    while items and isinstance(items[-1], Anchor) and items[-1].end:
        ends, items = True, items[:-1]
    if any(map(_has_anchor, items[1:-1])) or any(
        isinstance(item, Anchor | Repeat) and _has_anchor(item) for item in items
    ):
        parser.fail("^ or $ inside it (only at its ends can they match)")
    first = _split_anchors(items[0], parser) if items else [(False, EMPTY, False)]
    last = _split_anchors(items[-1], parser) if len(items) > 1 else [(False, EMPTY, False)]
    middle = items[1:-1]
    if len(items) > 1 and (any(each[2] for each in first) or any(each[0] for each in last)):
        parser.fail("^ or $ inside it (only at its ends can they match)")
    return [
        (begins or head[0], sequence(head[1], *middle, tail[1]), ends or head[2] or tail[2])
        for head in first
        for tail in last
    ]


class _Parser:
    def __init__(self, pattern: str, wide: bool, param: str | None) -> None:
        self.pattern, self.at, self.wide, self._param = pattern, 0, wide, param
        self._any_case = False

    def fail(self, what: str) -> NoReturn:
        short = self.pattern if len(self.pattern) <= 80 else self.pattern[:77] + "..."
        message = f"the regex {short!r} has {what} near position {self.at}: rewrite it without"
        raise BadInput(message, param=self._param)

    def _peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def _take(self, text: str) -> bool:
        if found := self._peek(text):
            self.at += len(text)
        return found

    def _next(self) -> str:
        if self.at >= len(self.pattern):
            self.fail("an unfinished end")
        self.at += 1
        return self.pattern[self.at - 1]

    def _until(self, mark: str) -> str:
        """Consume and return the text before the next `mark`, and consume the mark."""
        end = self.pattern.find(mark, self.at)
        text, self.at = self.pattern[self.at : max(end, self.at)], end + 1
        return text

    def alternatives(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            self.fail(f"groups more than {MAX_DEPTH} deep")
        options = [self._terms(depth)]
        while self._take("|"):
            options.append(self._terms(depth))
        return options[0] if len(options) == 1 else OneOf(tuple(dict.fromkeys(options)))

    def _terms(self, depth: int) -> Tree:
        items: list[Tree] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            item = self._quantified(self._atom(depth))
            if isinstance(item, Text) and items and isinstance(items[-1], Text):
                items[-1] = Text(items[-1].text + item.text)
            elif item != EMPTY:
                items.append(item)
        if not items:
            return EMPTY
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _quantified(self, atom: Tree) -> Tree:
        while (bounds := self._bounds()) is not None:
            least, most = bounds
            if most is not None and least > most:
                self.fail("a repetition whose least exceeds its most")
            if isinstance(atom, Anchor):
                self.fail("a repeated anchor")
            if self._take("+"):
                self.fail("a possessive quantifier")
            self._take("?")  # lazy or greedy: the same texts match
            atom = repeat(atom, least, most)
            if expanded_chars(atom) > MAX_EXPANDED:
                self.fail(f"counted repetitions of more than {MAX_EXPANDED} characters in all")
        return atom

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        if not self._peek("{"):
            return None
        end = self.pattern.find("}", self.at)
        least, comma, most = self.pattern[self.at + 1 : max(end, self.at)].partition(",")
        if not least and comma and _is_count(most):
            self.fail(f"{{,{most}}}, which dialects read differently ({{0,{most}}} is clear),")
        if not _is_count(least) or (most and not _is_count(most)):
            return None  # a brace that stands for itself
        if len(least) > 6 or len(most) > 6:
            self.fail("a repetition count of more than six digits")
        self.at = end + 1
        return int(least), (int(most) if most else None if comma else int(least))

    def _atom(self, depth: int) -> Tree:
        char = self._next()
        match char:
            case "^":
                return Anchor(end=False)
            case "$":
                return Anchor(end=True)
            case ".":
                return Chars(complement(chars("\n") if self.wide else chars("\n\r\u2028\u2029")))
            case "[":
                return self._chars(self._class())
            case "(":
                return self._group(depth)
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                self.fail(f"a {char} that repeats nothing")
        return self._literal(char)

    def _literal(self, char: str) -> Tree:
        if 0xD800 <= ord(char) <= 0xDFFF:
            self.fail("half of a surrogate pair")
        if self._any_case and char.lower() != char.upper():
            return self._chars(chars(char))
        return Text(char)

    def _chars(self, ranges: Ranges) -> Expression:
        if self._any_case:
            ranges = _any_case(ranges)
        return Chars(ranges) if ranges else NEVER

    def _group(self, depth: int) -> Tree:
        if self._take("?"):
            self._group_head()
        tree = self.alternatives(depth + 1)
        if not self._take(")"):
            self.fail("a group that is not closed")
        return tree

    def _group_head(self) -> None:
        for mark, name in _REFUSED_GROUPS.items():
            if self._peek(mark):
                self.fail(name)
        if self._take("P<") or self._take("<"):
            end = self.pattern.find(">", self.at)
            if end < 0:
                self.fail("a group name that is not closed")
            self.at = end + 1
        elif self._take("i)") and self.at == 4:
            self._any_case = True
            self.at -= 1  # the group was only its flag: its end is read by the caller
        elif not self._take(":"):
            self.fail(f"flags or an unknown group (?{self.pattern[self.at : self.at + 1]}…)")

    def _escape(self) -> Tree:
        char = self._next()
        if char in "dDwWsS":
            return self._chars(self._shorthand(char, self.wide))
        if char in "pP":
            return self._chars(self._property(char == "P"))
        if char in "bB":
            self.fail(f"a word boundary \\{char}")
        if char in "AzZ":
            return Anchor(end=char != "A")
        if char in "123456789kg":
            self.fail(f"a back-reference \\{char}")
        return self._literal(self._escaped_character(char))

    def _escaped_character(self, char: str) -> str:
        if char in "ux" and self._take("{"):
            return self._code(self._until("}"))
        if char in "xuU":
            size = {"x": 2, "u": 4, "U": 8}[char]
            text = self.pattern[self.at : self.at + size]
            self.at += size
            code = self._code(text)
            if 0xD800 <= ord(code) <= 0xDBFF and self._take("\\u"):
                low = ord(self._code(self.pattern[self.at : self.at + 4]))
                self.at += 4
                return chr(0x10000 + ((ord(code) - 0xD800) << 10) + (low - 0xDC00)) if 0xDC00 <= low <= 0xDFFF else code
            return code
        if char == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                self.fail("an unknown control escape \\c")
            return chr(ord(letter) % 32)
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isalnum() and char.isascii():
            self.fail(f"an unknown escape \\{char}")
        return char

    def _code(self, text: str) -> str:
        try:
            code = int(text, 16) if text.isalnum() else -1
        except ValueError:
            code = -1
        if not 0 <= code <= 0x10FFFF:
            self.fail("a malformed character code")
        return chr(code)

    def _shorthand(self, char: str, wide: bool) -> Ranges:
        negated = char.isupper()
        loose = wide != negated
        match char.lower():
            case "d":
                ranges = digit_characters() if loose else _DIGIT
            case "w":
                ranges = union(word_characters(), _WORD) if loose else _WORD
            case _:
                ranges = (
                    union(_SPACE, [(0x1C, 0x1F), (0x85, 0x85)]) if loose else chars(" \t\n\r\v\f\u00a0\u2028\u2029")
                )
        return complement(ranges) if negated else ranges

    def _property(self, negated: bool) -> Ranges:
        name = self._until("}") if self._take("{") else self._next()
        negated ^= name.startswith("^")
        ranges = category(name.removeprefix("^"))
        if ranges is None:
            self.fail(f"an unknown Unicode property \\p{{{name}}}")
        return complement(ranges) if negated else ranges

    def _class(self) -> Ranges:
        negated = self._take("^")
        wide = self.wide != negated
        sets: list[Ranges] = []
        while not self._take("]"):
            low = self._class_item(wide)
            if not isinstance(low, str):
                sets.append(low)
            elif self._peek("-") and not self._peek("-]"):
                self.at += 1
                high = self._class_item(wide)
                if not isinstance(high, str):
                    sets += [chars(low + "-"), high]
                elif ord(high) < ord(low):
                    self.fail("a reversed range")
                else:
                    sets.append(((ord(low), ord(high)),))
            else:
                sets.append(((ord(low), ord(low)),))
        ranges = union(*sets) if sets else ()
        if self._any_case:
            ranges = _any_case(ranges)
        return complement(ranges) if negated else ranges

    def _class_item(self, wide: bool) -> str | Ranges:
        char = self._next()
        if char == "[" and self._peek(":"):
            self.fail("a POSIX class [[:…:]]")
        if char == "&" and self._peek("&"):
            self.fail("an intersection of classes &&")
        if char != "\\":
            return char
        char = self._next()
        if char in "dDwWsS":
            return self._shorthand(char, wide)
        if char in "pP":
            return self._property(char == "P")
        if char == "b":
            return "\b"
        return self._escaped_character(char)


def _any_case(ranges: Ranges) -> Ranges:
    """The ranges with both cases of their ASCII letters."""
    letters = (code for low, high in ranges for code in range(max(low, 65), min(high, 122) + 1))
    return union(ranges, *(chars(chr(code).swapcase()) for code in letters))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()
