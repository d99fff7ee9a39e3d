"""Expressions in normal form, and the builder that collects the rules of one grammar.

`Builder.finish` drops rules that match nothing (unproductive) and rules that the start symbol cannot reach.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import (
    UNMATCHABLE,
    Chars,
    Expression,
    Grammar,
    OneOf,
    Repeat,
    Rule,
    Sequence,
    Text,
    encode,
    left_recursive,
    references,
    shortest_length,
    shortest_lengths,
)

MAX_RULES = 20_000
MAX_BYTES = 1 << 20
MAX_LEAST = 100_000
MAX_MOST = 1 << 20

EMPTY = Text("")
NEVER = OneOf(())  # matches nothing at all; a finished grammar has none


def sequence(*items: Expression) -> Expression:
    """A concatenation: flat, with adjacent texts joined."""
    flat: list[Expression] = []
    for item in items:
        for part in item.items if isinstance(item, Sequence) else (item,):
            if part == NEVER:
                return NEVER
            if isinstance(part, Text) and flat and isinstance(flat[-1], Text):
                flat[-1] = Text(flat[-1].text + part.text)
            elif part != EMPTY:
                flat.append(part)
    if not flat:
        return EMPTY
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(options: Iterable[Expression]) -> Expression:
    """An alternation: flat, without duplicates."""
    flat: dict[Expression, None] = {}
    for option in options:
        for part in option.options if isinstance(option, OneOf) else (option,):
            flat.setdefault(part)
    if len(flat) == 1:
        return next(iter(flat))
    return OneOf(tuple(flat))


def optional(item: Expression) -> Expression:
    return repeat(item, 0, 1)


def repeat(item: Expression, least: int = 0, most: int | None = None) -> Expression:
    assert most is None or least <= most
    if most == 0 or item == EMPTY:
        return EMPTY
    if least > MAX_LEAST:
        raise BadInput(f"at least {least} repetitions are required; the limit is {MAX_LEAST}")
    most = None if most is None else min(most, MAX_MOST)  # no reply is longer
    if item == NEVER:
        return NEVER if least else EMPTY
    if least == most == 1:
        return item
    if isinstance(item, Repeat) and item.least <= 1 and item.most is None and most is None:
        return Repeat(item.item, min(item.least, least), None) if least <= 1 else Repeat(item, least, None)
    return Repeat(item, least, most)


def separated(item: Expression, separator: Expression, least: int = 0, most: int | None = None) -> Expression:
    """Return an expression for `least` to `most` items with the separator between them."""
    if most == 0:
        return EMPTY
    more = repeat(sequence(separator, item), max(least, 1) - 1, None if most is None else most - 1)
    some = sequence(item, more)
    return some if least else optional(some)


class Builder:
    """Rules by number: each is allocated first and defined once. A rule with a key is shared by all who ask for it."""

    def __init__(self) -> None:
        self._rules: list[Expression | None] = []
        self._shared: dict[Hashable, int] = {}

    def rule(self) -> int:
        if len(self._rules) >= MAX_RULES:
            raise BadInput(f"the grammar needs more than {MAX_RULES} rules: simplify it")
        self._rules.append(None)
        return len(self._rules) - 1

    def define(self, number: int, expression: Expression) -> None:
        assert self._rules[number] is None, "a rule is defined once"
        self._rules[number] = expression

    def add(self, expression: Expression) -> Expression:
        """A rule of its own for an expression that is used more than once."""
        if isinstance(expression, Rule | Text | Chars):
            return expression
        number = self.rule()
        self.define(number, expression)
        return Rule(number)

    def known(self, key: Hashable) -> Rule | None:
        number = self._shared.get(key)
        return None if number is None else Rule(number)

    def reserve(self, key: Hashable) -> int:
        """Allocates a rule that `known(key)` finds at once, before it is defined: recursion refers to it."""
        number = self.rule()
        self._shared[key] = number
        return number

    def share(self, key: Hashable, expression: Expression) -> Expression:
        """The rule with this key, defined as `expression` if it does not exist yet."""
        found = self.known(key)
        if found is None:
            self.define(self.reserve(key), expression)
            found = self.known(key)
            assert found is not None
        return found

    def possible(self, expression: Expression) -> bool:
        """True if any text matches."""
        rules = [NEVER if rule is None else rule for rule in self._rules]
        lengths = shortest_lengths(rules, list(references(expression)))
        return shortest_length(expression, lengths) < UNMATCHABLE

    def left_recursive(self) -> int | None:
        """A rule that can begin with itself; None if there is none."""
        return left_recursive([NEVER if rule is None else rule for rule in self._rules])

    def finish(self, start: Expression) -> Grammar | None:
        """The grammar; None where no text matches it."""
        start_number = self.rule()
        self.define(start_number, start)
        defined = [NEVER if rule is None else rule for rule in self._rules]
        productive = [length < UNMATCHABLE for length in shortest_lengths(defined, [start_number])]
        if not productive[start_number]:
            return None
        rules = [_prune(rule, productive) if n else NEVER for rule, n in zip(defined, productive)]
        grammar = Grammar(_reachable(rules, start_number))
        if len(encode(grammar)) > MAX_BYTES:
            raise BadInput(f"the grammar takes more than {MAX_BYTES >> 10} KiB: simplify it")
        return grammar


def expanded_chars(expression: Expression) -> int:
    """Count the single-character matchers of an expression whose repetitions are expanded."""
    match expression:
        case Sequence(items) | OneOf(items):
            return sum(map(expanded_chars, items))
        case Repeat(item, least, most):
            return max(1, least, most or 0) * expanded_chars(item)
        case Text(text):
            return len(text)
        case _:
            return 1


def lengths_in_chars(expression: Expression) -> tuple[int, int | None]:
    """Fewest and most characters (None: unbounded) of the texts that an expression without rules matches."""
    match expression:
        case Sequence(items) | OneOf(items) if items:
            lows, highs = zip(*map(lengths_in_chars, items), strict=True)
            concatenated = isinstance(expression, Sequence)
            low = sum(lows) if concatenated else min(lows)
            return low, None if None in highs else sum(highs) if concatenated else max(highs)
        case Repeat(item, least, most):
            low, high = lengths_in_chars(item)
            return low * least, 0 if high == 0 else None if most is None or high is None else high * most
        case Text(text):
            return len(text), len(text)
        case Chars(_):
            return 1, 1
        case _:
            return 0, 0


def _prune(expression: Expression, productive: list[bool]) -> Expression:
    match expression:
        case Rule(number):
            return expression if productive[number] else NEVER
        case Sequence(items):
            return sequence(*(_prune(item, productive) for item in items))
        case OneOf(options):
            return choice(_prune(option, productive) for option in options)
        case Repeat(item, least, most):
            return repeat(_prune(item, productive), least, most)
        case Chars(ranges):
            return expression if ranges else NEVER
        case _:
            return expression


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Names the request field in errors that were raised without one."""
    try:
        yield
    except BadInput as error:
        if error.param is not None:
            raise
        raise type(error)(error.message, param=param) from None


def _reachable(rules: list[Expression], start: int) -> tuple[Expression, ...]:
    """The rules reachable from `start`, breadth first. A rule that only refers to another is replaced by it."""

    def target(number: int) -> int:
        seen: set[int] = set()
        while isinstance(rule := rules[number], Rule) and number not in seen:
            seen.add(number)
            number = rule.number
        return number

    order = {target(start): 0}
    waiting = [target(start)]
    while waiting:
        for used in sorted({target(number) for number in references(rules[waiting.pop(0)])}):
            if used not in order:
                order[used] = len(order)
                waiting.append(used)

    def renumber(expression: Expression) -> Expression:
        match expression:
            case Rule(number):
                return Rule(order[target(number)])
            case Sequence(items):
                return Sequence(tuple(renumber(item) for item in items))
            case OneOf(options):
                return OneOf(tuple(renumber(option) for option in options))
            case Repeat(item, _, _):
                return msgspec.structs.replace(expression, item=renumber(item))
            case _:
                return expression

    return tuple(renumber(rules[number]) for number in order)
