"""Translates a grammar into llguidance's Lark dialect, whose lexer takes the longest lexeme first.

Our grammars have no lexer. Whatever needs neither recursion nor a special token therefore becomes part of a lexeme, so
that longest-match has nothing to decide: between two references to recursive rules, or two special tokens, lies exactly
one lexeme. This is Glushkov's construction with references as its symbols: which reference may come first, which
may follow which, which may come last, and which regular text lies between them. Across the border of a recursive rule
the longest match wins, so the matcher may allow less than the grammar there; `grammar_automaton` has the exact meaning.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from emberline.protocol import grammar as ir
from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import callees_first, references, walk

MAX_LARK_BYTES = 8 << 20
MAX_INLINED = 2_000  # expressions up to which a rule without recursion is inlined at its references
MAX_INLINE_DEPTH = 10
MAX_LEXEME_CHARS = 1 << 20  # of a sequence in a lexeme, with the terminals that it names expanded, as llguidance does
MAX_LEXEME_DEPTH = 600  # llguidance recurses: somewhere beyond 3,000 the process would die
MAX_CALLS = 12  # references in one linearized part; more are moved into a rule of their own
_MAX_UNNAMED_CHARS = 60  # longer parts of lexemes become named terminals instead of being copied

_NESTING = re.compile(r"[()]|T\d+")
_HEADER = '%llguidance {"no_forcing": true}\n'  # allow every tokenization of a text, not only the canonical one
_EMPTY = ""  # the lexeme of the empty text


@dataclass(slots=True)
class _Linear:
    """An expression linearized around its calls (references to recursive rules and special tokens), by number.

    Values are parts of lexemes: the regular text before, after or between the calls.
    """

    plain: str | None = None  # the text without any call; None: there is none
    first: dict[int, str] = field(default_factory=dict)  # call → the text before it
    last: dict[int, str] = field(default_factory=dict)  # call → the text after it
    follow: dict[tuple[int, int], str] = field(default_factory=dict)


def to_lark(grammar: ir.Grammar) -> str:
    return _Translator(grammar).translate()


class _Translator:
    def __init__(self, grammar: ir.Grammar) -> None:
        self._grammar = grammar
        self._recursive = recursive_rules(grammar)
        self._regular = _regular_rules(grammar, self._recursive)
        self._plain: dict[int, str | None] = {}  # regular rules as parts of lexemes
        self._sizes: dict[int, int] = {}
        self._calls: list[str] = []  # by number: a rule's name or a special token
        self._terminals: dict[str, str] = {}  # body → name
        self._depths: dict[str, int] = {}  # of terminals
        self._lengths: dict[str, int] = {}  # of terminals, with the terminals they name expanded
        self._rules: dict[str, str] = {}
        self._inline_depth = 0  # nesting of the rules being inlined
        self._named: dict[int, str] = {}  # rules that were translated or are in `_todo`
        self._todo: list[int] = []
        self._n_bytes = 0

    def translate(self) -> str:
        for number in callees_first(self._grammar.rules):
            if number in self._regular:
                self._plain[number] = self._linearize(self._grammar.rules[number]).plain
            else:
                self._size(number)
        self._rule(0)
        while self._todo:
            number = self._todo.pop()
            self._define(self._named[number], self._linearize(self._grammar.rules[number]))
        lines = [f"start: {self._named[0]}\n"]
        lines += [f"{name}: {body}\n" for name, body in self._rules.items()]
        lines += [f"{name}: {body}\n" for body, name in self._terminals.items()]
        return _HEADER + "".join(lines)

    def _rule(self, number: int) -> str:
        name = self._named.get(number)
        if name is None:
            name = self._named[number] = f"r{number}"
            self._todo.append(number)
        return name

    def _define(self, name: str, linear: _Linear) -> None:
        options = [] if linear.plain is None else [self._lexeme(linear.plain)]
        calls = dict.fromkeys((*linear.last, *(call for _, call in linear.follow), *linear.first))
        for call in calls:
            if (text := linear.last.get(call)) is not None:
                options.append(f"{name}_{call} {self._lexeme(text)}")
            prefixes = []
            if (text := linear.first.get(call)) is not None:
                prefixes.append(f"{self._lexeme(text)} {self._calls[call]}")
            prefixes += [
                f"{name}_{before} {self._lexeme(text)} {self._calls[call]}"
                for (before, after), text in linear.follow.items()
                if after == call
            ]
            if prefixes:
                self._add(f"{name}_{call}", prefixes)
        self._add(name, options)

    def _add(self, name: str, options: list[str]) -> None:
        body = " | ".join(options) if options else '"" /[^\\x{0}-\\x{10ffff}]/'
        self._rules[name] = body
        self._count(body)

    # --- linearized expressions ---------------------------------------------------------------------------------------

    def _linearize(self, expression: ir.Expression) -> _Linear:
        match expression:
            case ir.Text() | ir.Chars():
                return _Linear(plain=_leaf(expression))
            case ir.Free():
                return _Linear(plain=self._free(expression))
            case ir.Token(token_id):
                return self._call(f"<[{token_id}]>")
            case ir.Rule(number):
                return self._called(number)
            case ir.Sequence(items):
                return self._joined(list(self._items(items)))
            case ir.OneOf(options):
                return self._choice([self._linearize(option) for option in options])
            case ir.Repeat(item, least, most):
                return self._repeat(item, least, most)

    def _items(self, items: tuple[ir.Expression, ...]) -> Iterator[_Linear]:
        """The items of a sequence, with an empty call where a lexeme must end."""
        ends = _lexeme_ends(items)
        for at, item in enumerate(items):
            yield self._small(item)
            if at in ends:
                yield self._call('""')

    def _free(self, free: ir.Free) -> str:
        if not free.without and not free.not_first:
            return " /(?s:.*)/ "
        refused = []
        if free.without:
            refused.append(f"~(/(?s:.*)/ {self._pattern(free.without)} /(?s:.*)/)")
        if free.not_first:
            refused.append(f"~({self._pattern(free.not_first)} /(?s:.*)/)")
        return f" ({' & '.join(['/(?s:.*)/', *refused])}) "

    def _pattern(self, parts: tuple[str | ir.Expression, ...]) -> str:
        plains = (self._linearize(ir.Text(part) if isinstance(part, str) else part).plain for part in parts)
        return self._part(f"({' | '.join(plain for plain in plains if plain)})")

    def _called(self, number: int) -> _Linear:
        """A reference: a regular rule is one terminal; a rule with calls is inlined while it is small."""
        if number in self._plain:
            return _Linear(plain=self._plain[number])
        if number in self._recursive or self._size(number) > MAX_INLINED or self._inline_depth >= MAX_INLINE_DEPTH:
            return self._call(self._rule(number))
        self._inline_depth += 1
        linear = self._linearize(self._grammar.rules[number])
        self._inline_depth -= 1
        return linear

    def _call(self, what: str) -> _Linear:
        self._calls.append(what)
        call = len(self._calls) - 1
        return _Linear(first={call: _EMPTY}, last={call: _EMPTY})

    def _small(self, expression: ir.Expression) -> _Linear:
        """Linearized, with many calls moved into a rule of their own: `follow` grows with the square of the calls."""
        linear = self._linearize(expression)
        if len(linear.first) <= MAX_CALLS and len(linear.last) <= MAX_CALLS:
            return linear
        name = f"x{len(self._calls)}"
        self._define(name, linear)
        return self._call(name)

    def _joined(self, linears: list[_Linear]) -> _Linear:
        """A concatenation; neighbours without calls are joined at once, so that long lists stay flat."""
        found = _Linear(plain=_EMPTY)
        for regular, group in groupby(linears, key=lambda linear: not linear.first):
            if regular:
                texts = [linear.plain for linear in group]
                plain = None if None in texts else self._part("".join(text for text in texts if text))
                found = self._sequence(found, _Linear(plain=plain))
            else:
                for linear in group:
                    found = self._sequence(found, linear)
        return found

    def _sequence(self, a: _Linear, b: _Linear) -> _Linear:
        linear = _Linear(plain=_both(a.plain, b.plain), follow=a.follow | b.follow)
        linear.first = dict(a.first)
        linear.last = dict(b.last)
        if a.plain is not None:
            linear.first |= {call: self._part(a.plain + text) for call, text in b.first.items()}
        if b.plain is not None:
            linear.last |= {call: self._part(text + b.plain) for call, text in a.last.items()}
        for before, left in a.last.items():
            for after, right in b.first.items():
                linear.follow[before, after] = self._part(left + right)
        if linear.plain is not None:
            linear.plain = self._part(linear.plain)
        return linear

    def _choice(self, linears: list[_Linear]) -> _Linear:
        found = _Linear()
        plains = [linear.plain for linear in linears if linear.plain is not None]
        if plains:
            found.plain = self._part(_either(plains))
        for linear in linears:
            found.first |= linear.first
            found.last |= linear.last
            found.follow |= linear.follow
        return found

    def _repeat(self, item: ir.Expression, least: int, most: int | None) -> _Linear:
        if most == 0:
            return _Linear(plain=_EMPTY)
        linear = self._small(item)
        if not linear.first:
            if linear.plain is None:
                return _Linear(plain=None if least else _EMPTY)
            return _Linear(plain=self._part(_times(linear.plain, least, most)))
        if (least, most) == (0, 1):
            linear.plain = self._part(_either([linear.plain or _EMPTY, _EMPTY]))
            return linear
        if most is not None or least > 1:
            name = f"x{len(self._calls)}"
            self._define(f"{name}i", linear)
            self._add(name, [f"{name}i{{{least},{'' if most is None else most}}}"])
            return self._call(name)
        return self._loop(linear, least)

    def _loop(self, linear: _Linear, least: int) -> _Linear:
        around = _EMPTY if not linear.plain else self._part(_times(linear.plain, 0, None))
        found = _Linear(follow=dict(linear.follow))
        if not least or linear.plain is not None:
            found.plain = around
        found.first = {call: self._part(around + text) for call, text in linear.first.items()}
        found.last = {call: self._part(text + around) for call, text in linear.last.items()}
        for before, left in linear.last.items():
            for after, right in linear.first.items():
                text = self._part(left + around + right)
                old = found.follow.get((before, after))
                found.follow[before, after] = text if old is None else self._part(_either([old, text]))
        return found

    # --- text --------------------------------------------------------------------------------------------------------

    def _part(self, text: str) -> str:
        """A part of lexemes; a long one becomes a named terminal, so that texts do not grow with every use."""
        if len(text) <= _MAX_UNNAMED_CHARS:
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
        """Return the nesting depth of a part of a lexeme, on which llguidance recurses."""
        now = deepest = 0
        for sign in _NESTING.findall(text):
            now += {"(": 1, ")": -1}.get(sign, 0)
            deepest = max(deepest, now + self._depths.get(sign, 0))
        if deepest >= MAX_LEXEME_DEPTH:
            raise BadInput("the grammar is nested too deeply; use a flatter schema", param="grammar")
        return deepest + 1

    def _length(self, text: str) -> int:
        """Characters once named terminals are expanded: terminals that name two each double at every level.

        llguidance shares groups in parentheses, so only the longest group counts."""
        open_lengths, at = [0], 0
        for sign in _NESTING.finditer(text):
            open_lengths[-1] += sign.start() - at + self._lengths.get(sign[0], 1)
            at = sign.end()
            if open_lengths[-1] > MAX_LEXEME_CHARS:
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
        """Expressions of a rule, including those of the rules that would be inlined into it."""
        found = self._sizes.get(number)
        if found is None:
            body = self._grammar.rules[number]
            found = 0 if number in self._regular else sum(1 for _ in walk(body))
            found += sum(self._size(called) for called in references(body) if found and called not in self._recursive)
            self._sizes[number] = found = min(found, MAX_INLINED + 1)
        return found


def _lexeme_ends(items: tuple[ir.Expression, ...]) -> set[int]:
    """Return the positions where a lexeme must end: after free text and the whole of its terminator. If a lexeme ended
    earlier, free text would swallow the beginning of its terminator. If none ended there, what follows would be read
    along with free text."""
    found = set()
    for at, free in enumerate(items):
        for part in free.without if isinstance(free, ir.Free) else ():
            if isinstance(part, str):
                following = items[at + 1] if at + 2 < len(items) else None
                n = int(isinstance(following, ir.Text) and following.text.startswith(part))
            else:
                pattern = part.items if isinstance(part, ir.Sequence) else (part,)
                n = len(pattern) if items[at + 1 :][: len(pattern)] == pattern else 0
            if n:
                found.add(at + n)
    return found


def has_token(expression: ir.Expression) -> bool:
    return any(isinstance(part, ir.Token) for part in walk(expression))


def recursive_rules(grammar: ir.Grammar) -> set[int]:
    """Rules that refer to themselves, directly or through others: strongly connected components (Kosaraju)."""
    calls = [set(references(rule)) for rule in grammar.rules]
    callers: list[list[int]] = [[] for _ in calls]
    for number, called in enumerate(calls):
        for other in called:
            callers[other].append(number)
    found: set[int] = set()
    seen: set[int] = set()
    for root in reversed(callees_first(grammar.rules)):
        component: list[int] = []
        stack = [root]
        while stack:
            if (number := stack.pop()) not in seen:
                seen.add(number)
                component.append(number)
                stack += callers[number]
        if len(component) > 1 or (component and root in calls[root]):
            found.update(component)
    return found


def _regular_rules(grammar: ir.Grammar, recursive: set[int]) -> set[int]:
    """Rules of one lexeme: without recursion, special tokens and forced ends, also in those that they refer to."""
    found: set[int] = set()
    for number in callees_first(grammar.rules):
        body = grammar.rules[number]
        ends = any(isinstance(part, ir.Sequence) and _lexeme_ends(part.items) for part in walk(body))
        if number not in recursive and not ends and not has_token(body) and found.issuperset(references(body)):
            found.add(number)
    return found


def _both(a: str | None, b: str | None) -> str | None:
    return None if a is None or b is None else a + b


def _either(options: Iterable[str]) -> str:
    """An alternation; an empty option makes it optional."""
    distinct = list(dict.fromkeys(options))
    filled = [option for option in distinct if option]
    if not filled:
        return _EMPTY
    body = filled[0] if len(filled) == 1 else " | ".join(filled)
    return f"({body})" + ("?" if len(filled) < len(distinct) else "")


def _times(text: str, least: int, most: int | None) -> str:
    if not text or (least, most) == (1, 1):
        return text
    if most is None:
        return f"({text})" + {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return f"({text})?" if (least, most) == (0, 1) else f"({text}){{{least},{most}}}"


def _leaf(expression: ir.Text | ir.Chars) -> str | None:
    match expression:
        case ir.Text(text):
            return f" /{_spelled(text)}/ " if text else _EMPTY
        case ir.Chars(ranges):
            spelled = "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in ranges)
            return f" /[{spelled}]/ " if ranges else None


def _spelled(text: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)
