"""Reads the keywords about arrays."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from emberline.text.grammar.document import Node
from emberline.text.grammar.goals import TRUE, Goal, negate
from emberline.text.grammar.scalars_read import count
from emberline.text.grammar.shapes import Array, ArrayPart, Contains, Shape, Values, nothing, only, shapes

if TYPE_CHECKING:
    from emberline.text.grammar.algebra import Algebra


def read_items(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    prefix, rest, explicit = _items(algebra, node)
    if not negated:
        return {"array": (Array((ArrayPart(prefix, rest, explicit),)),)}
    found: list[Shape] = []
    for index, goal in enumerate(prefix):
        for other in negate(goal):
            found.append(Array((ArrayPart((TRUE,) * index + (other,), evaluates=False),), least=index + 1))
    for other in negate(rest):
        if prefix:
            algebra.give_up(node, "items")
            found.append(Array((ArrayPart((TRUE,) * len(prefix) + (other,), evaluates=False),), least=len(prefix) + 1))
        else:
            found.append(Array(contains=(Contains(other, 1, None, evaluates=False),)))
    return only("array", *found)


def _items(algebra: "Algebra", node: Node) -> tuple[tuple[Goal, ...], Goal, bool]:
    """The goals of the first items, of all others, and whether the schema speaks of those."""
    schema = node.schema
    prefix, items = schema.get("prefixItems", []), schema.get("items")
    rest_key = "items"
    if isinstance(items, list):
        prefix, items, rest_key = items, schema.get("additionalItems"), "additionalItems"
    if not isinstance(prefix, list):
        algebra.document.fail(node, "'prefixItems' must be a list of schemas")
    goals = tuple(algebra.document.goal(each, node, "/prefixItems") for each in prefix)
    if items is None:
        return goals, TRUE, False
    return goals, algebra.document.goal(items, node, f"/{rest_key}"), True


def read_min_items(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    least = count(algebra, node, "minItems", value)
    if negated:
        return only("array", Array(most=least - 1)) if least else nothing()
    return {"array": (Array(least=least),)}


def read_max_items(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    most = count(algebra, node, "maxItems", value)
    return only("array", Array(least=most + 1)) if negated else {"array": (Array(most=most),)}


def read_unique(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    if not isinstance(value, bool):
        algebra.document.fail(node, "'uniqueItems' must be true or false")
    if negated:
        if value:
            algebra.give_up(node, "uniqueItems")
        return nothing()
    return {"array": (Array(unique=True),)} if value else {}


def read_contains(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    goal = algebra.document.goal(value, node, "/contains")
    least = count(algebra, node, "minContains", node.schema.get("minContains", 1))
    most = node.schema.get("maxContains")
    most = None if most is None else count(algebra, node, "maxContains", most)
    if not negated:
        return (
            {"array": (Array(contains=(Contains(goal, least, most),)),)}
            if (most is None or least <= most)
            else {"array": ()}
        )
    found: list[Shape] = []
    if least:
        found.append(Array(contains=(Contains(goal, 0, least - 1, evaluates=False),)))
    if most is not None:
        found.append(Array(contains=(Contains(goal, most + 1, None, evaluates=False),)))
    return only("array", *found)


def close(algebra: "Algebra", node: Node, values: Values) -> Values:
    """`unevaluatedItems`: items that nothing in this schema has spoken of. One branch is looked at at a time, which
    may leave arrays out that are valid by two branches at once."""
    goal = algebra.document.goal(node.schema["unevaluatedItems"], node, "/unevaluatedItems")
    closed: list[Shape] = []
    algebra.loosen()
    for shape in shapes(values, "array"):
        assert isinstance(shape, Array)
        closed.extend(_closed(algebra, shape, goal))
    return {**values, "array": tuple(closed)}


def _closed(algebra: "Algebra", shape: Array, goal: Goal) -> list[Shape]:
    speaking = [part for part in shape.parts if part.evaluates]
    if any(part.explicit for part in speaking):
        return [shape]
    if shape.among is not None:
        part = ArrayPart((), goal, True, evaluates=True)
        met = algebra.meet_shapes(shape, Array((part,)))
        return [] if met is None else [met]
    n_known = max((len(part.prefix) for part in speaking), default=0)
    part = ArrayPart((TRUE,) * n_known, goal, True)
    options: list[Shape] = [replace(shape, parts=(*shape.parts, part))]
    for clause in shape.contains:
        if clause.evaluates:  # an item that `contains` has found is evaluated
            other = ArrayPart((TRUE,) * n_known, clause.goal, True)
            options.append(replace(shape, parts=(*shape.parts, other)))
    return options
