"""A plain reading of the grammar's meaning: random texts of a grammar, and whether a text belongs to it."""

import random
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from emberline.protocol.grammar import Chars, Expression, Grammar, OneOf, Repeat, Rule, Sequence, Text

ENDLESS = 10**9
P = ParamSpec("P")
T = TypeVar("T")


def deep(function: Callable[P, T]) -> Callable[P, T]:
    """Rules are followed by calls, more of them than usual."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(max(before, 20_000))
        try:
            return function(*args, **kwargs)
        finally:
            sys.setrecursionlimit(before)

    return call


class Sampler:
    """Random texts; past a size only the shortest ways out are taken."""

    @deep
    def __init__(self, grammar: Grammar, seed: int = 0) -> None:
        self._rules = grammar.rules
        self._random = random.Random(seed)
        self._costs = [ENDLESS] * len(grammar.rules)
        changed = True
        while changed:
            changed = False
            for number, rule in enumerate(grammar.rules):
                cost = self._cost(rule)
                if cost < self._costs[number]:
                    self._costs[number], changed = cost, True
        self._cached: dict[int, int] = {}

    def _cost(self, expression: Expression) -> int:
        match expression:
            case Text(text):
                return len(text)
            case Rule(number):
                return self._costs[number]
            case Sequence(items):
                return min(ENDLESS, sum(map(self._cost, items)))
            case OneOf(options):
                return min(map(self._cost, options), default=ENDLESS)
            case Repeat(item, least, _):
                return min(ENDLESS, least * self._cost(item)) if least else 0
            case _:
                return 1

    @deep
    def text(self, size: int = 60) -> str:
        self._out: list[str] = []
        self._left = size
        self._write(self._rules[0])
        return "".join(self._out)

    def _put(self, text: str) -> None:
        self._out.append(text)
        self._left -= len(text)

    def _write(self, expression: Expression) -> None:
        match expression:
            case Text(text):
                self._put(text)
            case Chars(ranges):
                self._put(self._character(ranges))
            case Rule(number):
                self._write(self._rules[number])
            case Sequence(items):
                for item in items:
                    self._write(item)
            case OneOf(options):
                self._write(self._option(options))
            case Repeat(item, least, most):
                n = 0
                while n < least or (self._left > 0 and (most is None or n < most) and self._random.random() < 0.7):
                    self._write(item)
                    n += 1
            case _:
                raise AssertionError(expression)

    def _option(self, options: tuple[Expression, ...]) -> Expression:
        if self._left > 0:
            return self._random.choice(options)
        costs = [self._cost(option) for option in options]
        return options[costs.index(min(costs))]

    def _character(self, ranges: tuple[tuple[int, int], ...]) -> str:
        low, high = self._random.choice(ranges)
        if self._random.random() < 0.5:
            high = min(high, low + 100)
        return chr(self._random.choice((low, high, self._random.randint(low, high))))


@deep
def matches(grammar: Grammar, text: str) -> bool:
    """Whether the grammar has the text: by following every reading."""

    @cache
    def rule_ends(number: int, start: int) -> frozenset[int]:
        return ends(grammar.rules[number], start)

    def ends(expression: Expression, start: int) -> frozenset[int]:
        match expression:
            case Text(literal):
                return frozenset((start + len(literal),)) if text.startswith(literal, start) else frozenset()
            case Chars(ranges):
                inside = start < len(text) and any(low <= ord(text[start]) <= high for low, high in ranges)
                return frozenset((start + 1,)) if inside else frozenset()
            case Rule(number):
                return rule_ends(number, start)
            case Sequence(items):
                places = frozenset((start,))
                for item in items:
                    places = frozenset().union(*(ends(item, place) for place in places))
                return places
            case OneOf(options):
                return frozenset().union(*(ends(option, start) for option in options))
            case Repeat(item, least, most):
                places, found, n = frozenset((start,)), frozenset((start,)) if least == 0 else frozenset(), 0
                while places and (most is None or n < most):
                    places = frozenset().union(*(ends(item, place) for place in places))
                    n += 1
                    if n >= least:
                        if places <= found:
                            break
                        found |= places
                return found
        raise AssertionError(expression)

    return len(text) in ends(grammar.rules[0], 0)
