"""Splits what a goal allows into sets of which no two share a value: how arrays and names stay free of doubles.

A context-free grammar cannot compare two values of unlimited kind. It can take at most one value from each of several
sets, in a fixed order; what cannot be reached that way is left out.
"""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from emberline.protocol.grammar import Expression
from emberline.text.grammar import automaton
from emberline.text.grammar.builder import NEVER, sequence
from emberline.text.grammar.goals import Goal, impossible
from emberline.text.grammar.numbers import number_expression
from emberline.text.grammar.shapes import KINDS, Array, Number, Object, Plain, Shape, String, exact, shapes
from emberline.text.grammar.strings import QUOTE, in_json, literal, string_automaton, string_expression

if TYPE_CHECKING:
    from emberline.text.grammar.schema import Writer

MAX_LENGTHS = 32
MAX_NESTED = 3


def finite(writer: "Writer", goal: Goal, limit: int) -> list[Any] | None:
    """All values of a goal; None where there are more than `limit`."""
    if impossible(goal):
        return []
    found: dict[Any, Any] = {}
    for kind in KINDS:
        for shape in shapes(writer.algebra.values(goal), kind):
            some = _members(shape, limit)
            if some is None:
                return None
            found.update((exact(value), value) for value in some)
    return list(found.values()) if len(found) <= limit else None


def _members(shape: Shape, limit: int) -> list[Any] | None:
    if shape.among is not None:
        return list(shape.among)
    if isinstance(shape, Array) and shape.most == 0:
        return [[]]
    if isinstance(shape, Object) and shape.most == 0:
        return [{}]
    if isinstance(shape, Number) and shape.integral and shape.low and shape.high and not shape.not_multiples:
        first, last = int(-(-shape.low[0] // 1)), int(shape.high[0] // 1)
        if last - first <= 4 * limit:
            kept = [Fraction(n) for n in range(first, last + 1) if (Fraction(n), False) >= shape.low]
            kept = [n for n in kept if n < shape.high[0] or not shape.high[1]]
            kept = [
                n for n in kept if n not in shape.without and all((n / m).denominator == 1 for m in shape.multiples)
            ]
            return [int(n) for n in kept]
    return None


def classes(writer: "Writer", goal: Goal, depth: int = 0) -> list[Expression]:
    """Expressions for parts of the goal that have no value in common."""
    listed = finite(writer, goal, 256)
    if listed is not None:
        return [literal(value) for value in listed]
    found: list[Expression] = []
    for kind in KINDS:
        options = shapes(writer.algebra.values(goal), kind)
        if len(options) > 1:  # they may overlap: the first alone is apart from nothing else
            options = options[:1]
        for shape in options:
            found.extend(_split(writer, shape, depth))
    return [each for each in found if each != NEVER]


def _split(writer: "Writer", shape: Shape, depth: int) -> list[Expression]:
    if shape.among is not None:
        return [literal(value) for value in shape.among]
    match shape:
        case Number():
            return _numbers(writer, shape)
        case String():
            return _strings(writer, shape)
        case Array():
            return _arrays(writer, shape)
        case Object():
            return _objects(writer, shape, depth)
        case Plain():
            return [literal(value) for value in shape.among]


def _numbers(writer: "Writer", shape: Number) -> list[Expression]:
    """The small ones each, the larger ones in wider and wider steps."""
    edges = [*range(20), *range(20, 100, 10), 100, 200, 500, *(10**k for k in (3, 4, 5, 6, 9, 15))]
    starts = sorted({*edges, *(-edge for edge in edges)})
    found: list[Expression] = []
    for start, end in pairwise(starts):
        part = Number(low=(Fraction(start), False), high=(Fraction(end), True))
        met = writer.algebra.meet_shapes(shape, part)
        if isinstance(met, Number):
            found.append(number_expression(writer.builder, met))
    return found


def _strings(writer: "Writer", shape: String) -> list[Expression]:
    """By length; where a pattern fixes that, by the first character."""
    if not shape.patterns and not shape.formats and not shape.without:
        longest = shape.least + MAX_LENGTHS
        most = longest if shape.most is None else min(shape.most, longest)
        exactly = [replace(shape, least=n, most=n) for n in range(shape.least, most + 1)]
        return [string_expression(writer.algebra, writer.builder, each) for each in exactly]
    whole = string_automaton(writer.algebra, shape)
    found: list[Expression] = []
    if 0 in whole.accepting:
        found.append(literal(""))
    for low, high, target in whole.edges[0]:
        for code in range(low, min(high, low + MAX_LENGTHS) + 1):
            shifted = [[(a, b, t + 1) for a, b, t in row] for row in whole.edges]
            rest = automaton.Automaton([[(code, code, target + 1)], *shifted], {state + 1 for state in whole.accepting})
            found.append(sequence(QUOTE, automaton.to_expression(rest, writer.builder, in_json), QUOTE))
    return found


def _arrays(writer: "Writer", shape: Array) -> list[Expression]:
    """By length."""
    from emberline.text.grammar.arrays import array_expression

    last = shape.least + 8 if shape.most is None else min(shape.most, shape.least + 8)
    return [array_expression(writer, replace(shape, least=n, most=n)) for n in range(shape.least, last + 1)]


def _objects(writer: "Writer", shape: Object, depth: int) -> list[Expression]:
    """By the classes of one property that is always there."""
    from emberline.text.grammar.objects import object_shape_expression

    best: list[Expression] = []
    for name in shape.required if depth < MAX_NESTED else ():
        goal = writer.algebra.property_goal(shape, name)
        parts = classes(writer, goal, depth + 1)
        if len(parts) > max(1, len(best)):
            best = [object_shape_expression(writer, shape, {name: part}) for part in parts]
        if len(best) >= MAX_LENGTHS:
            break
    return best or [object_shape_expression(writer, shape)]
