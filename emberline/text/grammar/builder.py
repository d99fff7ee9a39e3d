"""Collects the rules of one grammar and puts them in order: what cannot match or cannot be reached is dropped."""

from collections.abc import Hashable, Iterable

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, Grammar, OneOf, Repeat, Rule, Sequence, Text, encode

MAX_RULES = 20_000
MAX_BYTES = 1 << 20
MAX_LEAST = 100_000
MAX_MOST = 1 << 20

EMPTY = Text("")
NEVER = OneOf(())  # matches nothing at all; `finish` leaves none behind


def sequence(*items: Expression) -> Expression:
    """One after the other: flat, with neighbouring texts joined."""
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
    """One of these: flat, without repetition."""
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
        raise BadInput(f"at least {least} of something are demanded; the limit is {MAX_LEAST}")
    most = None if most is None else min(most, MAX_MOST)  # longer replies do not exist
    if item == NEVER:
        return NEVER if least else EMPTY
    if least == most == 1:
        return item
    if isinstance(item, Repeat) and item.least <= 1 and item.most is None and most is None:
        return Repeat(item.item, min(item.least, least), None) if least <= 1 else Repeat(item, least, None)
    return Repeat(item, least, most)


def separated(item: Expression, separator: Expression, least: int = 0, most: int | None = None) -> Expression:
    """From `least` to `most` items with the separator between them."""
    if most == 0:
        return EMPTY
    more = repeat(sequence(separator, item), max(least, 1) - 1, None if most is None else most - 1)
    some = sequence(item, more)
    return some if least else optional(some)


class Builder:
    """Rules by number, reserved first and defined once. A key makes a rule that is shared."""

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
        """A rule of its own for what is used more than once."""
        if isinstance(expression, Rule | Text | Chars):
            return expression
        number = self.rule()
        self.define(number, expression)
        return Rule(number)

    def known(self, key: Hashable) -> Rule | None:
        number = self._shared.get(key)
        return None if number is None else Rule(number)

    def reserve(self, key: Hashable) -> int:
        """A rule that `known(key)` finds from now on, before it is defined: recursion refers to it."""
        number = self.rule()
        self._shared[key] = number
        return number

    def share(self, key: Hashable, expression: Expression) -> Expression:
        """The rule with this key, made of `expression` when it does not exist yet."""
        found = self.known(key)
        if found is None:
            self.define(self.reserve(key), expression)
            found = self.known(key)
            assert found is not None
        return found

    def possible(self, expression: Expression) -> bool:
        """Whether anything can match."""
        reachable: dict[int, None] = {}
        waiting = list(rules_of(expression))
        while waiting:
            number = waiting.pop()
            if number not in reachable:
                reachable[number] = None
                rule = self._rules[number]
                waiting.extend(rules_of(rule) if rule is not None else ())
        return _matches_something(
            expression, _completable({number: self._rules[number] or NEVER for number in reachable})
        )

    def finish(self, start: Expression) -> Grammar | None:
        """The grammar; None where nothing can match it."""
        start_number = self.rule()
        self.define(start_number, start)
        rules = _productive(self._rules)
        if rules[start_number] == NEVER:
            return None
        grammar = Grammar(_reachable(rules, start_number))
        if len(encode(grammar)) > MAX_BYTES:
            raise BadInput(f"the grammar takes more than {MAX_BYTES >> 10} KiB: simplify it")
        return grammar


def rules_of(expression: Expression) -> Iterable[int]:
    """Numbers of the rules an expression names."""
    stack = [expression]
    while stack:
        item = stack.pop()
        match item:
            case Rule(number):
                yield number
            case Sequence(items):
                stack.extend(items)
            case OneOf(options):
                stack.extend(options)
            case Repeat(inner, _, most):
                if most != 0:
                    stack.append(inner)


def _matches_something(expression: Expression, productive: set[int]) -> bool:
    match expression:
        case Rule(number):
            return number in productive
        case Sequence(items):
            return all(_matches_something(item, productive) for item in items)
        case OneOf(options):
            return any(_matches_something(option, productive) for option in options)
        case Repeat(item, least, _):
            return least == 0 or _matches_something(item, productive)
        case Chars(ranges):
            return bool(ranges)
        case _:
            return True


def _completable(rules: dict[int, Expression]) -> set[int]:
    """Numbers of the rules that some finite text matches."""
    users: dict[int, list[int]] = {number: [] for number in rules}
    for number, rule in rules.items():
        for used in rules_of(rule):
            users[used].append(number)
    productive: set[int] = set()
    waiting = list(rules)
    while waiting:
        number = waiting.pop()
        if number not in productive and _matches_something(rules[number], productive):
            productive.add(number)
            waiting.extend(users[number])
    return productive


def _productive(rules: list[Expression | None]) -> list[Expression]:
    """The rules, with NEVER in place of each that can never be completed."""
    defined = [NEVER if rule is None else rule for rule in rules]
    productive = _completable(dict(enumerate(defined)))
    return [_prune(rule, productive) if n in productive else NEVER for n, rule in enumerate(defined)]


def _prune(expression: Expression, productive: set[int]) -> Expression:
    match expression:
        case Rule(number):
            return expression if number in productive else NEVER
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


def _reachable(rules: list[Expression], start: int) -> tuple[Expression, ...]:
    """The rules that `start` needs, it first. A rule that only names another is left out."""

    def target(number: int) -> int:
        seen: set[int] = set()
        while isinstance(rule := rules[number], Rule) and number not in seen:
            seen.add(number)
            number = rule.number
        return number

    order = {target(start): 0}
    waiting = [target(start)]
    while waiting:
        for used in sorted({target(number) for number in rules_of(rules[waiting.pop(0)])}):
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
