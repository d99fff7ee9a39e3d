"""What values of one JSON type must be like: conjunctions of constraints. A union of them describes any schema."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, TypeAlias

from emberline.text.grammar.goals import TRUE, Goal

KINDS: Final = ("null", "boolean", "number", "string", "array", "object")

Bound: TypeAlias = tuple[Fraction, bool]  # (value, whether the value itself is excluded)


@dataclass(frozen=True, slots=True)
class Plain:
    """null and booleans."""

    among: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Number:
    integral: bool | None = None  # only integers, only others, both
    low: Bound | None = None
    high: Bound | None = None
    multiples: frozenset[Fraction] = frozenset()
    not_multiples: frozenset[Fraction] = frozenset()
    without: frozenset[Fraction] = frozenset()
    among: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class String:
    least: int = 0
    most: int | None = None
    patterns: frozenset[tuple[str, bool]] = frozenset()  # (pattern, whether it must or must not be found)
    formats: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    among: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class ArrayPart:
    prefix: tuple[Goal, ...] = ()
    rest: Goal = TRUE
    explicit: bool = False  # the schema itself speaks of the rest
    evaluates: bool = True


@dataclass(frozen=True, slots=True)
class Contains:
    goal: Goal
    least: int
    most: int | None
    evaluates: bool = True


@dataclass(frozen=True, slots=True)
class Array:
    parts: tuple[ArrayPart, ...] = ()
    least: int = 0
    most: int | None = None
    unique: bool = False
    contains: tuple[Contains, ...] = ()
    among: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class ObjectPart:
    properties: tuple[tuple[str, Goal], ...] = ()
    patterns: tuple[tuple[str, Goal], ...] = ()
    rest: Goal = TRUE
    explicit: bool = False  # the schema itself speaks of further properties
    evaluates: bool = True
    declares: bool = True  # names here are meant to be written; else they only constrain


@dataclass(frozen=True, slots=True)
class Object:
    parts: tuple[ObjectPart, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: Goal = TRUE
    among: tuple[Any, ...] | None = None


Shape: TypeAlias = Plain | Number | String | Array | Object

# Shapes by kind, any of which will do. A kind that is missing is not constrained; an empty tuple forbids it.
Values: TypeAlias = dict[str, tuple[Shape, ...]]

TOPS: Final[dict[str, Shape]] = {
    "null": Plain((None,)),
    "boolean": Plain((True, False)),
    "number": Number(),
    "string": String(),
    "array": Array(),
    "object": Object(),
}


def shapes(values: Values, kind: str) -> tuple[Shape, ...]:
    return values[kind] if kind in values else (TOPS[kind],)


def only(kind: str, *allowed: Shape) -> Values:
    """These and nothing of another kind."""
    return {each: (allowed if each == kind else ()) for each in KINDS}


def nothing() -> Values:
    return dict.fromkeys(KINDS, ())


def join(options: list[Values]) -> Values:
    return {kind: unique(s for option in options for s in shapes(option, kind)) for kind in KINDS}


def unique(found: Iterable[Shape]) -> tuple[Shape, ...]:
    """Without repetition. Fixed values may hold lists and objects, which only `exact` makes comparable."""
    return tuple({(each if each.among is None else exact(each.among)): each for each in found}.values())


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def exact(value: Any) -> Any:
    """A value in a form in which JSON's equality is Python's: 1 is 1.0 and is not true."""
    match value:
        case None | bool() | str():
            return (kind_of(value), value)
        case int() | float():
            return ("number", fraction(value))
        case list() | tuple():
            return ("array", tuple(exact(item) for item in value))
        case _:
            return ("object", frozenset((key, exact(item)) for key, item in value.items()))


def fraction(value: Any) -> Fraction:
    """A number as it is written in decimal."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
