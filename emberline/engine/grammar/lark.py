"""A grammar in the language of the matcher's library, whose parser reads lexemes, longest first.

Whatever needs no recursion and no special token becomes part of a lexeme, so that longest-first has no say in it:
between two calls of recursive rules, or two special tokens, lies exactly one. It is Glushkov's construction with calls
in place of letters: which call may come first, which after which, which last, and what text lies between. Across the
border of a recursive rule the longest reading wins; what the grammar means otherwise, the automaton knows.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

from emberline.engine.grammar.bounds import called_first, parts, references
from emberline.protocol import grammar as ir
from emberline.protocol.errors import BadInput

MAX_LARK_BYTES = 8 << 20
MAX_INLINED = 2_000  # expressions that rules without recursion may grow to where they are called
MAX_INSIDE = 10
MAX_WRITTEN_OUT = 1 << 20  # characters of a sequence in a lexeme: the library copies the named ones into it
MAX_LEXEME_DEPTH = 600  # the library recurses: somewhere beyond 3,000 the process would die
MAX_CALLS = 12  # in one part of an expression; more are put into a rule of their own
_SHORT = 60  # bytes of a lexeme's part that are repeated rather than named

_NESTING = re.compile(r"[()]|T\d+")
_HEAD = '%llguidance {"no_forcing": true}\n'  # any tokens that spell the text, not only the tokenizer's own choice
_NOTHING = ""  # the lexeme of the empty text


@dataclass(slots=True)
class _Shape:
    """An expression around its calls. Texts are lexemes' parts, None where there is no way."""

    whole: str | None = None  # without any call
    first: dict[int, str] = field(default_factory=dict)  # call → the text before it
    last: dict[int, str] = field(default_factory=dict)  # call → the text after it
    between: dict[tuple[int, int], str] = field(default_factory=dict)


def to_lark(grammar: ir.Grammar) -> str:
    return _Translator(grammar).translate()


class _Translator:
    def __init__(self, grammar: ir.Grammar) -> None:
        self._grammar = grammar
        self._recursive = recursive_rules(grammar)
        self._texts = _rules_without_calls(grammar, self._recursive)
        self._plain: dict[int, str | None] = {}  # rules without calls, as lexemes' parts
        self._sizes: dict[int, int] = {}
        self._calls: list[str] = []  # what a call's number stands for
        self._terminals: dict[str, str] = {}  # body → name
        self._depths: dict[str, int] = {}  # of terminals
        self._lengths: dict[str, int] = {}  # of terminals, with the parts they name written out
        self._rules: dict[str, str] = {}
        self._n_inside = 0  # rules that are being inlined, one in the other
        self._named: dict[int, str] = {}  # rules that were translated, or are about to be
        self._todo: list[int] = []
        self._n_bytes = 0

    def translate(self) -> str:
        for number in called_first(self._grammar):
            if number in self._texts:
                self._plain[number] = self._shape(self._grammar.rules[number]).whole
            else:
                self._size(number)
        self._rule(0)
        while self._todo:
            number = self._todo.pop()
            self._define(self._named[number], self._shape(self._grammar.rules[number]))
        lines = [f"start: {self._named[0]}\n"]
        lines += [f"{name}: {body}\n" for name, body in self._rules.items()]
        lines += [f"{name}: {body}\n" for body, name in self._terminals.items()]
        return _HEAD + "".join(lines)

    def _rule(self, number: int) -> str:
        name = self._named.get(number)
        if name is None:
            name = self._named[number] = f"r{number}"
            self._todo.append(number)
        return name

    def _define(self, name: str, shape: _Shape) -> None:
        options = [] if shape.whole is None else [self._lexeme(shape.whole)]
        behind = dict.fromkeys((*shape.last, *(call for _, call in shape.between), *shape.first))
        for call in behind:
            if (text := shape.last.get(call)) is not None:
                options.append(f"{name}_{call} {self._lexeme(text)}")
            ways = []
            if (text := shape.first.get(call)) is not None:
                ways.append(f"{self._lexeme(text)} {self._calls[call]}")
            ways += [
                f"{name}_{before} {self._lexeme(text)} {self._calls[call]}"
                for (before, after), text in shape.between.items()
                if after == call
            ]
            if ways:
                self._add(f"{name}_{call}", ways)
        self._add(name, options)

    def _add(self, name: str, options: list[str]) -> None:
        body = " | ".join(options) if options else '"" /[^\\x{0}-\\x{10ffff}]/'
        self._rules[name] = body
        self._count(body)

    # --- shapes ------------------------------------------------------------------------------------------------------

    def _shape(self, expression: ir.Expression) -> _Shape:
        match expression:
            case ir.Text() | ir.Chars() | ir.Free():
                return _Shape(whole=_leaf(expression))
            case ir.Token(token_id):
                return self._call(f"<[{token_id}]>")
            case ir.Rule(number):
                return self._called(number)
            case ir.Sequence(items):
                return self._joined([self._small(item) for item in items])
            case ir.OneOf(options):
                return self._choice([self._shape(option) for option in options])
            case ir.Repeat(item, least, most):
                return self._repeat(item, least, most)

    def _called(self, number: int) -> _Shape:
        """A rule where it is called: plain text is written down once, what has calls is inlined while it is small."""
        if number in self._plain:
            return _Shape(whole=self._plain[number])
        if number in self._recursive or self._size(number) > MAX_INLINED or self._n_inside >= MAX_INSIDE:
            return self._call(self._rule(number))
        self._n_inside += 1
        shape = self._shape(self._grammar.rules[number])
        self._n_inside -= 1
        return shape

    def _call(self, what: str) -> _Shape:
        self._calls.append(what)
        call = len(self._calls) - 1
        return _Shape(first={call: _NOTHING}, last={call: _NOTHING})

    def _small(self, expression: ir.Expression) -> _Shape:
        """The shape, with many calls put behind one: texts between them are as many as their pairs."""
        shape = self._shape(expression)
        if len(shape.first) <= MAX_CALLS and len(shape.last) <= MAX_CALLS:
            return shape
        name = f"x{len(self._calls)}"
        self._define(name, shape)
        return self._call(name)

    def _joined(self, shapes: list[_Shape]) -> _Shape:
        """One after the other; texts without calls between them in one go, so that long lists stay flat."""
        found = _Shape(whole=_NOTHING)
        for plain, group in groupby(shapes, key=lambda shape: not shape.first):
            if plain:
                texts = [shape.whole for shape in group]
                whole = None if None in texts else self._part("".join(text for text in texts if text))
                found = self._sequence(found, _Shape(whole=whole))
            else:
                for shape in group:
                    found = self._sequence(found, shape)
        return found

    def _sequence(self, a: _Shape, b: _Shape) -> _Shape:
        shape = _Shape(whole=_both(a.whole, b.whole), between=a.between | b.between)
        shape.first = dict(a.first)
        shape.last = dict(b.last)
        if a.whole is not None:
            shape.first |= {call: self._part(a.whole + text) for call, text in b.first.items()}
        if b.whole is not None:
            shape.last |= {call: self._part(text + b.whole) for call, text in a.last.items()}
        for before, left in a.last.items():
            for after, right in b.first.items():
                shape.between[before, after] = self._part(left + right)
        if shape.whole is not None:
            shape.whole = self._part(shape.whole)
        return shape

    def _choice(self, shapes: list[_Shape]) -> _Shape:
        found = _Shape()
        wholes = [shape.whole for shape in shapes if shape.whole is not None]
        if wholes:
            found.whole = self._part(_either(wholes))
        for shape in shapes:
            found.first |= shape.first
            found.last |= shape.last
            found.between |= shape.between
        return found

    def _repeat(self, item: ir.Expression, least: int, most: int | None) -> _Shape:
        if most == 0:
            return _Shape(whole=_NOTHING)
        shape = self._small(item)
        if not shape.first:
            if shape.whole is None:
                return _Shape(whole=None if least else _NOTHING)
            return _Shape(whole=self._part(_times(shape.whole, least, most)))
        if (least, most) == (0, 1):
            shape.whole = self._part(_either([shape.whole or _NOTHING, _NOTHING]))
            return shape
        if most is not None or least > 1:
            name = f"x{len(self._calls)}"
            self._define(f"{name}i", shape)
            self._add(name, [f"{name}i{{{least},{'' if most is None else most}}}"])
            return self._call(name)
        return self._loop(shape, least)

    def _loop(self, shape: _Shape, least: int) -> _Shape:
        around = _NOTHING if not shape.whole else self._part(_times(shape.whole, 0, None))
        found = _Shape(between=dict(shape.between))
        if not least or shape.whole is not None:
            found.whole = around
        found.first = {call: self._part(around + text) for call, text in shape.first.items()}
        found.last = {call: self._part(text + around) for call, text in shape.last.items()}
        for before, left in shape.last.items():
            for after, right in shape.first.items():
                text = self._part(left + around + right)
                old = found.between.get((before, after))
                found.between[before, after] = text if old is None else self._part(_either([old, text]))
        return found

    # --- text --------------------------------------------------------------------------------------------------------

    def _part(self, text: str) -> str:
        """A part of lexemes; what is long gets a name, so that texts do not grow with every use."""
        if len(text) <= _SHORT:
            return text
        return f" {self._name(text)} "

    def _lexeme(self, text: str) -> str:
        if not text:
            return '""'
        return self._name(text)

    def _name(self, text: str) -> str:
        name = self._terminals.get(text)
        if name is None:
            name = self._terminals[text] = f"T{len(self._terminals)}"
            self._count(text)
            self._depths[name] = self._depth(text)
            self._lengths[name] = self._length(text)
        return name

    def _depth(self, text: str) -> int:
        """How deep a lexeme's part is nested. The library recurses on it, on a stack of the process."""
        now = deepest = 0
        for sign in _NESTING.findall(text):
            now += {"(": 1, ")": -1}.get(sign, 0)
            deepest = max(deepest, now + self._depths.get(sign, 0))
        if deepest >= MAX_LEXEME_DEPTH:
            raise BadInput("the grammar is nested too deeply; use a flatter schema", param="grammar")
        return deepest + 1

    def _length(self, text: str) -> int:
        """Parts that name parts twice, and those twice again, double each time. A group is one thing to the library."""
        open_lengths, at = [0], 0
        for sign in _NESTING.finditer(text):
            open_lengths[-1] += sign.start() - at + self._lengths.get(sign[0], 1)
            at = sign.end()
            if open_lengths[-1] > MAX_WRITTEN_OUT:
                raise BadInput("the grammar is too large for its matcher; use a smaller schema", param="grammar")
            if sign[0] == "(":
                open_lengths.append(0)
            elif sign[0] == ")":
                open_lengths.pop()
        return open_lengths[0] + len(text) - at

    def _count(self, text: str) -> None:
        self._n_bytes += len(text)
        if self._n_bytes > MAX_LARK_BYTES:
            raise BadInput("the grammar is too large for its matcher; use a smaller schema", param="grammar")

    def _size(self, number: int) -> int:
        """Expressions of a rule, with those of the rules it would be inlined with."""
        found = self._sizes.get(number)
        if found is None:
            body = self._grammar.rules[number]
            found = 0 if number in self._texts else _n_expressions(body)
            found += sum(self._size(called) for called in references(body) if found and called not in self._recursive)
            self._sizes[number] = found = min(found, MAX_INLINED + 1)
        return found


def has_token(expression: ir.Expression) -> bool:
    todo = [expression]
    while todo:
        one = todo.pop()
        if isinstance(one, ir.Token):
            return True
        todo += parts(one)
    return False


def recursive_rules(grammar: ir.Grammar) -> set[int]:
    """Rules that lead back to themselves: Tarjan's strongly connected components, without recursion of its own."""
    calls = [sorted(set(references(rule))) for rule in grammar.rules]
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: set[int] = set()
    for start in range(len(calls)):
        todo = [(start, 0)] if start not in index else []
        while todo:
            number, n = todo.pop()
            if n == 0:
                index[number] = low[number] = len(index)
                stack.append(number)
                on_stack.add(number)
            else:
                low[number] = min(low[number], low[calls[number][n - 1]])
            while n < len(calls[number]) and calls[number][n] in index:
                if calls[number][n] in on_stack:
                    low[number] = min(low[number], index[calls[number][n]])
                n += 1
            if n < len(calls[number]):
                todo += [(number, n + 1), (calls[number][n], 0)]
            elif low[number] == index[number]:
                component = [stack.pop()]
                while component[-1] != number:
                    component.append(stack.pop())
                on_stack.difference_update(component)
                if len(component) > 1 or number in calls[number]:
                    found.update(component)
    return found


def _rules_without_calls(grammar: ir.Grammar, recursive: set[int]) -> set[int]:
    """Rules that are nothing but text."""
    found: set[int] = set()
    for number in called_first(grammar):
        body = grammar.rules[number]
        if number not in recursive and not has_token(body) and found.issuperset(references(body)):
            found.add(number)
    return found


def _n_expressions(expression: ir.Expression) -> int:
    n, todo = 0, [expression]
    while todo:
        n += 1
        todo += parts(todo.pop())
    return n


def _both(a: str | None, b: str | None) -> str | None:
    return None if a is None or b is None else a + b


def _either(options: Iterable[str]) -> str:
    """Any of these; with the empty one, none is fine too."""
    distinct = list(dict.fromkeys(options))
    filled = [option for option in distinct if option]
    if not filled:
        return _NOTHING
    body = filled[0] if len(filled) == 1 else " | ".join(filled)
    return f"({body})" + ("?" if len(filled) < len(distinct) else "")


def _times(text: str, least: int, most: int | None) -> str:
    if not text or (least, most) == (1, 1):
        return text
    if most is None:
        return f"({text})" + {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return f"({text})?" if (least, most) == (0, 1) else f"({text}){{{least},{most}}}"


def _leaf(expression: ir.Text | ir.Chars | ir.Free) -> str | None:
    match expression:
        case ir.Text(text):
            return f" /{_spelled(text)}/ " if text else _NOTHING
        case ir.Chars(ranges):
            spelled = "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in ranges)
            return f" /[{spelled}]/ " if ranges else None
        case ir.Free(without):
            if not without:
                return " /(?s:.*)/ "
            return f" (/(?s:.*)/ & ~/(?s:.*)(?:{'|'.join(map(_spelled, without))})(?s:.*)/) "


def _spelled(text: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)
