"""Subsets of a schema's values of which no two have a value in common, for the items of `uniqueItems`."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from emberline.protocol.grammar import Expression, Text
from emberline.text.grammar.expressions.builder import NEVER
from emberline.text.grammar.json_schema.document import Conjunction, contradictory
from emberline.text.grammar.json_schema.numbers import common_multiple, decimal
from emberline.text.grammar.json_schema.objects import object_expression
from emberline.text.grammar.json_schema.set_algebra import (
    JSON_TYPES,
    ArraySet,
    NumberSet,
    ObjectSet,
    SetAlgebra,
    StringSet,
    TypedSet,
    canonical,
    has_number,
    highest_integer,
    lowest_integer,
    typed_sets,
)
from emberline.text.grammar.json_schema.strings import literal, string_dfa, string_parts
from emberline.text.grammar.json_schema.writer import GrammarWriter

MAX_LISTED = 256  # values that are listed one by one
MAX_PARTS = 32  # that are made though fewer are needed
MAX_NESTED = 3
_FAR = (100, *(10**k for k in (3, 4, 6, 9, 15)))  # distances, in steps, at which numbers are split beside the nearest


def all_values(writer: GrammarWriter, schemas: Conjunction, limit: int) -> list[Any] | None:
    """Every value that satisfies the sub-schemas; None where there are more than `limit`."""
    if contradictory(schemas):
        return []
    found: dict[Any, Any] = {}
    for json_type in JSON_TYPES:
        for typed in typed_sets(writer.algebra.values(schemas), json_type):
            members = _members(writer.algebra, typed, limit)
            if members is None:
                return None
            found.update((canonical(value), value) for value in members)
    return list(found.values()) if len(found) <= limit else None


def _members(algebra: SetAlgebra, typed: TypedSet, limit: int) -> list[Any] | None:
    if typed.members is not None:
        return list(typed.members)
    match typed:
        case ArraySet(most=0):
            return [[]]
        case ObjectSet(most=0):
            return [{}]
        case NumberSet(integral=True, low=low, high=high) if low and high:
            first, last = lowest_integer(low), highest_integer(high)
            if last - first <= 4 * limit:
                return [n for n in range(first, last + 1) if algebra.is_member(typed, n)]
    return None


def disjoint_parts(writer: GrammarWriter, schemas: Conjunction, wanted: int) -> tuple[list[Expression], bool]:
    """Expressions of at least `wanted` parts, or of as many as are found; and whether those are all values, singly."""
    listed = all_values(writer, schemas, max(MAX_LISTED, wanted))
    if listed is not None:
        return [literal(value) for value in listed], True
    return _parts(writer, schemas, wanted, 0), False


def _parts(writer: GrammarWriter, schemas: Conjunction, wanted: int, depth: int) -> list[Expression]:
    listed = all_values(writer, schemas, MAX_LISTED)
    if listed is not None:
        return [literal(value) for value in listed]
    parts: list[Expression] = []
    for json_type in JSON_TYPES:
        # Several sets of one type may overlap: only the first is certainly disjoint from the rest.
        for typed in typed_sets(writer.algebra.values(schemas), json_type)[:1]:
            parts += _split(writer, typed, wanted, depth)
    return [part for part in parts if part != NEVER]


def _split(writer: GrammarWriter, typed: TypedSet, wanted: int, depth: int) -> list[Expression]:
    """Numbers by intervals, strings by length or first characters, arrays by length, objects by one property."""
    if typed.members is not None:
        return [literal(value) for value in typed.members]
    match typed:
        case NumberSet():
            return _intervals(writer, typed, max(wanted, MAX_PARTS))
        case StringSet(patterns=patterns, formats=formats, excluded=excluded, least=least, most=most):
            n_lengths = max(wanted, MAX_PARTS)
            if patterns or formats or excluded or (most is not None and most - least + 1 < wanted):
                return string_parts(writer.algebra, writer.builder, string_dfa(writer.algebra, typed), n_lengths)
            return _by_size(writer, typed, n_lengths)
        case ArraySet():
            return _by_size(writer, typed, max(wanted, 8))
        case ObjectSet():
            return _split_objects(writer, typed, wanted, depth)
    raise AssertionError("constants are listed")


def _by_size(writer: GrammarWriter, typed: StringSet | ArraySet, n: int) -> list[Expression]:
    longest = typed.least + n if typed.most is None else min(typed.most, typed.least + n)
    return [writer.value(replace(typed, least=size, most=size)) for size in range(typed.least, longest + 1)]


def _intervals(writer: GrammarWriter, numbers: NumberSet, wanted: int) -> list[Expression]:
    """Numbers by intervals, those of one number as this number."""
    step = common_multiple(numbers.multiples | {Fraction(1)} if numbers.integral else numbers.multiples)
    found: list[Expression] = []
    for start, end in pairwise(sorted(_edges(numbers, step, wanted))):
        if step and end - start == step:
            text = decimal(start) if has_number(numbers, start) else None
            found.append(NEVER if text is None else Text(text))
        elif part := writer.algebra.intersect_typed(numbers, NumberSet(low=(start, False), high=(end, True))):
            found.append(writer.value(part))
    return found


def _edges(numbers: NumberSet, step: Fraction, wanted: int) -> set[Fraction]:
    """Return the numbers at which the set is split: `wanted` equal parts between two bounds; otherwise steps from the
    one bound, or from 0."""
    low, high = (None if bound is None else bound[0] for bound in (numbers.low, numbers.high))
    if low is not None and high is not None:
        if not step:
            n = 10 ** len(str(wanted))  # so that the edges end where the bounds do
            return {low + (high - low) * k / n for k in range(n)} | {high + 1}
        first, last = -(-low // step), high // step
        n = min(wanted, last - first + 1)
        return {(first + (last - first + 1) * k // n) * step for k in range(n + 1)} if n > 0 else set()
    unit = step or Fraction(1)
    distances = [*range(wanted + 1), *(distance for distance in _FAR if distance > wanted)]
    bound = next((bound for bound in (low, high) if bound is not None), Fraction(0))
    start = bound // unit * unit
    above = set() if high is not None else {start + distance * unit for distance in distances}
    below = set() if low is not None else {start + unit - distance * unit for distance in distances}
    return above | below


def _split_objects(writer: GrammarWriter, objects: ObjectSet, wanted: int, depth: int) -> list[Expression]:
    """Split objects by the disjoint parts of one required property."""
    best: list[Expression] = []
    for name in objects.required if depth < MAX_NESTED else ():
        parts = _parts(writer, writer.algebra.property_schemas(objects, name), wanted, depth + 1)
        if len(parts) > max(1, len(best)):
            best = [object_expression(writer, objects, {name: part}) for part in parts]
        if len(best) >= max(wanted, MAX_PARTS):
            break
    return best or [object_expression(writer, objects)]
