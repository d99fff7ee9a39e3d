"""Reads the keywords about types, fixed values, numbers and strings."""

from fractions import Fraction
from math import isfinite
from typing import TYPE_CHECKING, Any

from emberline.text.grammar.document import Node
from emberline.text.grammar.goals import FALSE
from emberline.text.grammar.shapes import (
    KINDS,
    TOPS,
    Array,
    ArrayPart,
    Number,
    Object,
    ObjectPart,
    Plain,
    Shape,
    String,
    Values,
    exact,
    fraction,
    join,
    kind_of,
    nothing,
    only,
)

if TYPE_CHECKING:
    from emberline.text.grammar.algebra import Algebra

MAX_EXCLUDED = 64


def read_type(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in {*KINDS, "integer", "any"} for name in names):
        algebra.document.fail(node, f"'type' must be a JSON type or a list of them, not {value!r}")
    if node.schema.get("nullable") is True:
        names = [*names, "null"]
    if "any" in names:
        return nothing() if negated else {}
    whole = "integer" in names and "number" not in names
    values: Values = {kind: () if (kind in names) == negated else (TOPS[kind],) for kind in KINDS}
    if whole:
        values["number"] = (Number(integral=not negated),)
    return values


def read_enum(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    if not isinstance(value, list):
        algebra.document.fail(node, "'enum' must be a list")
    algebra.document.spend(len(value))
    if negated:
        return without(algebra, node, value)
    unique = {exact(each): each for each in reversed(value)}
    values = nothing()
    for each in reversed(unique.values()):
        kind = kind_of(each)
        held = values[kind][0].among if values[kind] else ()
        values[kind] = (_among(kind, (*(held or ()), each)),)
    return values


def read_const(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    return read_enum(algebra, node, [value], negated)


def _among(kind: str, values: tuple[Any, ...]) -> Shape:
    match kind:
        case "number":
            return Number(among=values)
        case "string":
            return String(among=values)
        case "array":
            return Array(among=values)
        case "object":
            return Object(among=values)
    return Plain(values)


def without(algebra: "Algebra", node: Node, values: list[Any]) -> Values:
    """Everything but these."""
    plain = [each for each in values if isinstance(each, bool) or each is None]
    left: Values = {
        "null": () if None in plain else (TOPS["null"],),
        "boolean": tuple(Plain((each,)) for each in (True, False) if each not in plain),
        "number": (Number(without=frozenset(fraction(v) for v in values if kind_of(v) == "number")),),
        "string": (String(without=frozenset(v for v in values if isinstance(v, str))),),
    }
    for value in values:
        if isinstance(value, list):
            left = algebra.meet(left, {"array": _other_arrays(algebra, node, value)})
        elif isinstance(value, dict):
            left = algebra.meet(left, {"object": _other_objects(algebra, node, value)})
    return left


def _other_arrays(algebra: "Algebra", node: Node, value: list[Any]) -> tuple[Shape, ...]:
    found: list[Shape] = [Array(least=len(value) + 1)]
    if value:
        found.append(Array(most=len(value) - 1))
    for index, item in enumerate(value[:MAX_EXCLUDED]):
        goal = algebra.document.goal({"not": {"const": item}}, node)
        found.append(Array((ArrayPart((frozenset(),) * index + (goal,), evaluates=False),), least=index + 1))
    return tuple(found)


def _other_objects(algebra: "Algebra", node: Node, value: dict[str, Any]) -> tuple[Shape, ...]:
    found: list[Shape] = [Object(least=len(value) + 1)]
    for name, item in list(value.items())[:MAX_EXCLUDED]:
        goal = algebra.document.goal({"not": {"const": item}}, node)
        found.append(Object((constraint(name, FALSE),)))
        found.append(Object((constraint(name, goal),), required=(name,)))
    return tuple(found)


def constraint(name: str, goal: frozenset[int]) -> ObjectPart:
    """What a negation or a dependency says of one property."""
    return ObjectPart(((name, goal),), evaluates=False, declares=False)


def _number(algebra: "Algebra", node: Node, keyword: str, value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        algebra.document.fail(node, f"{keyword!r} must be a number")
    return fraction(value)


def read_minimum(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    return _bounded(algebra, node, "minimum", "exclusiveMinimum", negated)


def read_maximum(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    return _bounded(algebra, node, "maximum", "exclusiveMaximum", negated)


def _bounded(algebra: "Algebra", node: Node, keyword: str, exclusive: str, negated: bool) -> Values:
    bounds: list[tuple[Fraction, bool]] = []
    strict = node.schema.get(exclusive, False)
    if keyword in node.schema:
        bounds.append((_number(algebra, node, keyword, node.schema[keyword]), strict is True))
    if not isinstance(strict, bool):
        bounds.append((_number(algebra, node, exclusive, strict), True))
    is_low = keyword == "minimum"
    values: Values = {}
    found: list[Values] = []
    for bound, is_open in bounds:
        if negated:
            other = (bound, not is_open)
            found.append(only("number", Number(high=other) if is_low else Number(low=other)))
        else:
            shape = Number(low=(bound, is_open)) if is_low else Number(high=(bound, is_open))
            values = algebra.meet(values, {"number": (shape,)})
    return join(found) if negated else values


def read_multiple(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    step = _number(algebra, node, "multipleOf", value)
    if step <= 0:
        algebra.document.fail(node, "'multipleOf' must be above 0")
    if negated:
        return only("number", Number(not_multiples=frozenset((step,))))
    return {"number": (Number(multiples=frozenset((step,))),)}


def count(algebra: "Algebra", node: Node, keyword: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
        algebra.document.fail(node, f"{keyword!r} must be a whole number, 0 or more")
    return int(value)


def read_min_length(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    least = count(algebra, node, "minLength", value)
    if negated:
        return only("string", String(most=least - 1)) if least else nothing()
    return {"string": (String(least=least),)}


def read_max_length(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    most = count(algebra, node, "maxLength", value)
    return only("string", String(least=most + 1)) if negated else {"string": (String(most=most),)}


def read_pattern(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    if not isinstance(value, str):
        algebra.document.fail(node, "'pattern' must be a string")
    pattern = String(patterns=frozenset(((value, not negated),)))
    return only("string", pattern) if negated else {"string": (pattern,)}


def read_format(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    """A format may be an assertion or a mere annotation: what holds for both is generated."""
    if not isinstance(value, str):
        algebra.document.fail(node, "'format' must be a string")
    if negated:
        algebra.give_up(node, "format")
        return nothing()
    return {"string": (String(formats=frozenset((value,))),)}
