"""A grammar as an automaton over bytes and special tokens, built lazily by derivatives (Brzozowski).

A state is the expression of what may still follow; the next state is its derivative by a byte or special token. States
are hash-consed and immutable, so a sequence keeps a list of them to roll back. Every state knows the length of its
shortest completion, with which a reply is closed within `max_tokens`. Counted repeats keep a counter; they are never
expanded. The language is exactly that of the grammar, unlike the matcher's (see `lark`).
"""

import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter
from typing import Final, TypeAlias

from emberline.protocol import grammar as ir
from emberline.protocol.grammar import UNMATCHABLE

MAX_STATES = 20_000  # in the table; states in use outlive it
MAX_NESTING = 280  # of ambiguous open expressions
MAX_ALTERNATIVES = 2048  # simultaneous parses of one text
MAX_FORCED_BYTES = 96  # looked ahead where only one text may follow

_TOKEN: Final = 256  # symbols: a byte, or this plus a special token's id
_PREFERRED = (
    b"a0bcdefghijklmnopqrstuvwxyz123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # in completions where any character will do
)


_BUILT_AT_ONCE: Final = 256  # expressions, about two milliseconds: then other threads get the interpreter's lock
_PAUSE_S: Final = 0.002
_MIN_TRIE_OPTIONS: Final = 9
_MAX_TRIE_DEPTH: Final = 60

ByteRanges: TypeAlias = tuple[tuple[int, int], ...]


class TooComplex(Exception):
    """The text has too many simultaneous parses."""


class State:
    """Texts that may still follow. `cost` is the bytes and special tokens of the cheapest completion; with 0 the text
    may end here."""

    __slots__ = ("cost", "nesting", "next")

    def __init__(self, cost: int, nesting: int = 0) -> None:
        self.cost = cost
        self.nesting = nesting
        self.next: dict[int, State] = {}  # transitions by symbol, computed on first use


class _Literal(State):
    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        super().__init__(len(text))
        self.text = text


class _Byte(State):
    __slots__ = ("preferred", "ranges")

    def __init__(self, ranges: ByteRanges) -> None:
        super().__init__(1)
        self.ranges = ranges
        self.preferred = _preferred(ranges)


class _Special(State):
    __slots__ = ("token_id",)

    def __init__(self, token_id: int) -> None:
        super().__init__(1)
        self.token_id = token_id


class _Free(State):
    """Text without any match of `forbidden`. `begun` is what the matches under way still need (DEAD: there are none),
    `rest` the byte ranges that the last character still needs."""

    __slots__ = ("begun", "forbidden", "rest")

    def __init__(self, forbidden: State, begun: State, rest: ByteRanges) -> None:
        super().__init__(len(rest))
        self.forbidden, self.begun, self.rest = forbidden, begun, rest


class _Then(State):
    __slots__ = ("first", "rest")

    def __init__(self, first: State, rest: State) -> None:
        super().__init__(first.cost + rest.cost, max(first.nesting + 1, rest.nesting))
        self.first, self.rest = first, rest


class _Any(State):
    __slots__ = ("cheapest", "options")

    def __init__(self, options: tuple[State, ...]) -> None:
        self.cheapest = min(options, key=attrgetter("cost"))
        super().__init__(self.cheapest.cost, 1 + max(option.nesting for option in options))
        self.options = options


class _Repeat(State):
    __slots__ = ("item", "least", "most")

    def __init__(self, item: State, least: int, most: int | None) -> None:
        super().__init__(least * item.cost, item.nesting)
        self.item, self.least, self.most = item, least, most


class _Call(State):
    __slots__ = ("number",)

    def __init__(self, number: int, cost: int) -> None:
        super().__init__(cost)
        self.number = number


DEAD: Final = State(UNMATCHABLE)
END: Final = State(0)


class Automaton:
    """The automaton of one grammar. Not thread-safe."""

    def __init__(self, grammar: ir.Grammar) -> None:
        self._costs = ir.shortest_lengths(grammar.rules)
        self._known: dict[tuple[object, ...], State] = {}
        self._characters: dict[ByteRanges, State] = {}
        self._only: dict[State, int] = {}  # the symbol that must follow a state; -1: several may
        self.completion_bytes: set[int] = set()  # bytes that a completion may contain
        self._n_built = 0  # expressions
        self._rules: list[State] = []
        self._rules = [self._build(rule) for rule in grammar.rules]
        self.start: State = self._rules[0]

    def step(self, state: State, symbol: int) -> State:
        """The state after a byte or special token; DEAD where the grammar does not allow it."""
        found = state.next.get(symbol)
        if found is None:
            if len(self._known) > MAX_STATES:
                self._clear_table()
            try:
                found = self._derive(state, symbol)
            except RecursionError:
                raise TooComplex from None
            if found.nesting > MAX_NESTING:
                raise TooComplex
        return found

    def feed(self, state: State, text: bytes) -> State:
        for byte in text:
            state = state.next.get(byte) or self.step(state, byte)
        return state

    def token(self, state: State, token_id: int) -> State:
        return self.step(state, _TOKEN + token_id)

    def completion(self, state: State) -> list[bytes | int]:
        """The cheapest completion: texts, and ids of special tokens between them."""
        found: list[bytes | int] = []
        todo = [state]
        while todo:
            one = todo.pop()
            match one:
                case _Literal():
                    found.append(one.text)
                case _Byte():
                    found.append(one.preferred)
                case _Special():
                    found.append(one.token_id)
                case _Free():
                    found.append(self._last_character(one))
                case _Then():
                    todo += (one.rest, one.first)
                case _Any():
                    todo.append(one.cheapest)
                case _Repeat() if one.item.cost:
                    item = one.item.cheapest if isinstance(one.item, _Any) else one.item
                    if isinstance(item, _Byte):  # a string with a minimum length, which may be thousands
                        found.append(item.preferred * one.least)
                    else:
                        todo += [item] * one.least
                case _Call():
                    if one.cost:
                        todo.append(self._rules[one.number])
        return _joined(found)

    def _last_character(self, free: _Free) -> bytes:
        """Bytes that complete the character at the end of a text, but no forbidden match."""
        found = b""
        while free.rest:
            low, high = free.rest[0]
            after = ((byte, self._derive(free, byte)) for byte in range(low, high + 1))
            byte, state = next(((byte, state) for byte, state in after if isinstance(state, _Free)), (low, DEAD))
            found += bytes([byte])
            if not isinstance(state, _Free):
                return found + bytes(low for low, _ in free.rest[1:])
            free = state
        return found

    def forced(self, state: State) -> list[bytes | int]:
        """Texts and ids of special tokens that must follow a state. Empty if several may, or if the text may end."""
        found: list[bytes | int] = []
        while len(found) < MAX_FORCED_BYTES:
            symbol = self._only.get(state)
            if symbol is None:
                symbol = self._only[state] = self._only_symbol(state)
            if symbol < 0:
                break
            found.append(bytes([symbol]) if symbol < _TOKEN else symbol - _TOKEN)
            state = state.next.get(symbol) or self.step(state, symbol)
        return _joined(found)

    def _only_symbol(self, state: State) -> int:
        """The symbol of the single transition of a state; -1 where there are several, or the text may end."""
        found = -1
        todo = [state] if state.cost else []
        called: set[int] = set()
        while todo:
            one = todo.pop()
            match one:
                case _Then():
                    todo += (one.first,) if one.first.cost else (one.first, one.rest)
                    continue
                case _Any():
                    todo += one.options
                    continue
                case _Repeat():
                    todo.append(one.item)
                    continue
                case _Call():
                    if one.number not in called:
                        called.add(one.number)
                        todo.append(self._rules[one.number])
                    continue
                case _Literal():
                    symbol = one.text[0]
                case _Special():
                    symbol = _TOKEN + one.token_id
                case _Byte() if one.ranges[0][0] == one.ranges[-1][1]:
                    symbol = one.ranges[0][0]
                case _:
                    return -1
            if found not in (-1, symbol):
                return -1
            found = symbol
        return found

    # --- states ------------------------------------------------------------------------------------------------------

    def _share(self, key: tuple[object, ...], make: Callable[[], State]) -> State:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make()
        return found

    def _literal(self, text: bytes) -> State:
        return self._share(("text", text), lambda: _Literal(text)) if text else END

    def _then(self, first: State, rest: State) -> State:
        if first is DEAD or rest is DEAD:
            return DEAD
        if first is END:
            return rest
        if rest is END:
            return first
        if type(first) is not _Then:
            return self._pair(first, rest)
        chain = []
        while isinstance(first, _Then):  # a right-nested list: only its head changes from byte to byte
            chain.append(first.first)
            first = first.rest
        chain.append(first)
        for part in reversed(chain):
            rest = self._pair(part, rest)
        return rest

    def _pair(self, first: State, rest: State) -> State:
        found = self._known.get((first, rest))
        if found is None:
            found = self._known[first, rest] = _Then(first, rest)
        return found

    def _any(self, options: Iterable[State]) -> State:
        found: dict[State, None] = {}
        for option in options:
            if isinstance(option, _Any):
                found.update(dict.fromkeys(option.options))
            elif option is not DEAD:
                found[option] = None
        if len(found) <= 1:
            return next(iter(found), DEAD)
        if len(found) > MAX_ALTERNATIVES and self._rules:  # a grammar may list any number of options
            raise TooComplex
        return self._share(("any", frozenset(found)), lambda: _Any(tuple(found)))

    def _repeat(self, item: State, least: int, most: int | None) -> State:
        if most == 0 or item is END:
            return END
        if item is DEAD:
            return DEAD if least else END
        key = (item, least if item.cost else 0, most)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _Repeat(*key)
        return found

    def _clear_table(self) -> None:
        for state in self._known.values():
            state.next.clear()
        self._known.clear()
        self._only.clear()

    # --- from expressions --------------------------------------------------------------------------------------------

    def _build(self, expression: ir.Expression) -> State:
        self._n_built += 1
        if not self._n_built % _BUILT_AT_ONCE:
            time.sleep(_PAUSE_S)
        match expression:
            case ir.Text():
                self.completion_bytes.update(expression.text.encode())
                return self._literal(expression.text.encode())
            case ir.Chars():
                return self._character(expression.ranges)
            case ir.Token():
                return self._share(("token", expression.token_id), lambda: _Special(expression.token_id))
            case ir.Free():
                self.completion_bytes.update(range(_TAIL[0], _TAIL[1] + 1))
                forbidden, begun = self._forbidden(expression.without), self._forbidden(expression.not_first)
                return self._free(forbidden, begun, ())
            case ir.Sequence():
                state: State = END
                for item in reversed(expression.items):
                    state = self._then(self._build(item), state)
                return state
            case ir.OneOf():
                return self._choice([self._build(option) for option in expression.options])
            case ir.Repeat():
                return self._repeat(self._build(expression.item), expression.least, expression.most)
            case ir.Rule():
                cost = self._costs[expression.number]
                return self._share(("call", expression.number), lambda: _Call(expression.number, cost))

    def _choice(self, options: list[State], depth: int = 0) -> State:
        """Many options with common prefixes (an enum, names of tools) as a trie, so that few are open at once."""
        if len(options) < _MIN_TRIE_OPTIONS or depth > _MAX_TRIE_DEPTH:
            return self._any(options)
        groups: dict[int | State, list[State]] = {}
        for option in options:
            text = _literal_prefix(option)
            groups.setdefault(text[0] if text else option, []).append(option)
        found = []
        for group in groups.values():
            shared = _common_prefix([_literal_prefix(option) for option in group]) if len(group) > 1 else b""
            if shared:
                rests = [self._without_prefix(option, len(shared)) for option in group]
                found.append(self._then(self._literal(shared), self._choice(rests, depth + 1)))
            else:
                found += group
        return self._any(found)

    def _without_prefix(self, option: State, n: int) -> State:
        if isinstance(option, _Then):
            return self._then(self._without_prefix(option.first, n), option.rest)
        assert isinstance(option, _Literal)
        return self._literal(option.text[n:])

    def _character(self, ranges: ByteRanges) -> State:
        found = self._characters.get(ranges)
        if found is None:
            paths = [path for low, high in ranges for path in _utf8(low, high)]
            found = self._any(self._bytes(path) for path in paths)
            self._characters[ranges] = found
            for path in paths:  # any character that was begun may have to be completed
                self.completion_bytes.update(_preferred((step,))[0] for step in path[len(path) > found.cost :])
        return found

    def _bytes(self, path: ByteRanges) -> State:
        state: State = END
        for step in reversed(path):
            state = self._then(self._share(("byte", step), lambda step=step: _Byte((step,))), state)  # type: ignore[misc]
        return state

    def _forbidden(self, without: tuple[str | ir.Expression, ...]) -> State:
        parts = (ir.Text(part) if isinstance(part, str) else part for part in without)
        return self._choice([self._build(part) for part in parts])

    def _free(self, forbidden: State, begun: State, rest: ByteRanges) -> State:
        return self._share(("free", forbidden, begun, rest), lambda: _Free(forbidden, begun, rest))

    # --- derivatives -------------------------------------------------------------------------------------------------

    def _derive(self, state: State, symbol: int) -> State:
        found = state.next.get(symbol)
        if found is not None:
            return found
        match state:
            case _Then():
                found = self._derive_then(state, symbol)
            case _Any():
                found = self._any([option.next.get(symbol) or self._derive(option, symbol) for option in state.options])
            case _Repeat():
                once = state.item.next.get(symbol) or self._derive(state.item, symbol)
                if once is DEAD:
                    return DEAD
                most = None if state.most is None else state.most - 1
                found = self._then(once, self._repeat(state.item, max(0, state.least - 1), most))
            case _Call():
                found = self._derive(self._rules[state.number], symbol)
            case _:
                found = self._derive_leaf(state, symbol)
        if found.cost >= UNMATCHABLE:
            found = DEAD  # it has no completion
        state.next[symbol] = found
        return found

    def _derive_then(self, state: _Then, symbol: int) -> State:
        options = []
        rest: State = state
        while type(rest) is _Then:
            head = rest.first.next.get(symbol) or self._derive(rest.first, symbol)
            if head is not DEAD:
                options.append(self._then(head, rest.rest))
            if rest.first.cost:
                break
            rest = rest.rest
        else:
            options.append(self._derive(rest, symbol))
        return options[0] if len(options) == 1 else self._any(options)

    def _derive_leaf(self, state: State, symbol: int) -> State:
        match state:
            case _Literal():
                return self._literal(state.text[1:]) if state.text[0] == symbol else DEAD
            case _Byte():
                return END if any(low <= symbol <= high for low, high in state.ranges) else DEAD
            case _Special():
                return END if symbol == _TOKEN + state.token_id else DEAD
            case _Free() if symbol < _TOKEN:
                return self._derive_free(state, symbol)
        return DEAD

    def _derive_free(self, state: _Free, byte: int) -> State:
        if state.rest:
            (low, high), *more = state.rest
            rest = tuple(more) if low <= byte <= high else None
        else:
            rest = _continuation(byte)
        if rest is None:
            return DEAD
        begun = self._any([self._derive(state.begun, byte), self._derive(state.forbidden, byte)])
        return self._free(state.forbidden, begun, rest) if begun.cost else DEAD


def _literal_prefix(option: State) -> bytes:
    first = option.first if isinstance(option, _Then) else option
    return first.text if isinstance(first, _Literal) else b""


def _common_prefix(texts: list[bytes]) -> bytes:
    """The longest common prefix of the texts."""
    first, last = min(texts), max(texts)
    n = next((n for n, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:n]


def _preferred(ranges: ByteRanges) -> bytes:
    for byte in _PREFERRED:
        if any(low <= byte <= high for low, high in ranges):
            return bytes([byte])
    return bytes([ranges[0][0]])


def _joined(pieces: list[bytes | int]) -> list[bytes | int]:
    found: list[bytes | int] = []
    for special, group in groupby(pieces, key=lambda piece: isinstance(piece, int)):
        if special:
            found += group
        elif text := b"".join(piece for piece in group if isinstance(piece, bytes)):
            found.append(text)
    return found


# --- UTF-8 ----------------------------------------------------------------------------------------------------------

_TAIL = (0x80, 0xBF)


def _continuation(byte: int) -> ByteRanges | None:
    """The ranges of the bytes that must follow the first byte of a character; None: it is not a first byte."""
    if byte < 0x80:
        return ()
    if 0xC2 <= byte <= 0xDF:
        return (_TAIL,)
    if 0xE0 <= byte <= 0xEF:
        second = (0xA0, 0xBF) if byte == 0xE0 else (0x80, 0x9F) if byte == 0xED else _TAIL
        return (second, _TAIL)
    if 0xF0 <= byte <= 0xF4:
        second = (0x90, 0xBF) if byte == 0xF0 else (0x80, 0x8F) if byte == 0xF4 else _TAIL
        return (second, _TAIL, _TAIL)
    return None


def _utf8(low: int, high: int) -> list[ByteRanges]:
    """The UTF-8 encodings of a range of code points, as sequences of byte ranges."""
    found: list[ByteRanges] = []
    for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
        if low <= last and high >= first:
            a, b = chr(max(low, first)).encode(), chr(min(high, last)).encode()
            found += _paths(a, b)
    return found


def _paths(low: bytes, high: bytes) -> list[ByteRanges]:
    """All byte strings between two of one length, as sequences of byte ranges."""
    if len(low) == 1:
        return [((low[0], high[0]),)]
    if low[0] == high[0]:
        return [((low[0], low[0]), *path) for path in _paths(low[1:], high[1:])]
    n = len(low) - 1
    lowest, highest = bytes([0x80]) * n, bytes([0xBF]) * n
    found = []
    first, last = low[0], high[0]
    if low[1:] != lowest:
        found += [((first, first), *path) for path in _paths(low[1:], highest)]
        first += 1
    if high[1:] != highest:
        found += [((last, last), *path) for path in _paths(lowest, high[1:])]
        last -= 1
    if first <= last:
        found.append(((first, last), *([_TAIL] * n)))
    return found
