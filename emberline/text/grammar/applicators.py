"""Reads the keywords that combine schemas: and, or, exactly one, not, if, and references."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from emberline.text.grammar.document import Node
from emberline.text.grammar.goals import Goal, negate
from emberline.text.grammar.shapes import KINDS, Array, Object, Shape, Values, join, nothing, shapes

if TYPE_CHECKING:
    from emberline.text.grammar.algebra import Algebra

MAX_PAIRS = 24  # options of a oneOf up to which "two at once" is looked at for its negation


def _goals(algebra: "Algebra", node: Node, keyword: str, value: Any) -> list[Goal]:
    if not isinstance(value, list) or not value:
        algebra.document.fail(node, f"{keyword!r} must be a list of at least one schema")
    return [algebra.document.goal(each, node, f"/{keyword}/{index}") for index, each in enumerate(value)]


def none_of(algebra: "Algebra", goals: list[Goal]) -> Values:
    """Values that satisfy none of the goals."""
    values: Values = {}
    for goal in goals:
        values = algebra.meet(values, join([algebra.values(other) for other in negate(goal)]) if goal else nothing())
    return values


def all_of(algebra: "Algebra", goals: list[Goal]) -> Values:
    values: Values = {}
    for goal in goals:
        values = algebra.meet(values, algebra.values(goal))
    return values


def read_all(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    goals = _goals(algebra, node, "allOf", value)
    return join([none_of(algebra, [goal]) for goal in goals]) if negated else all_of(algebra, goals)


def read_any(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    goals = _goals(algebra, node, "anyOf", value)
    return none_of(algebra, goals) if negated else join([algebra.values(goal) for goal in goals])


def read_one(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    goals = _goals(algebra, node, "oneOf", value)
    if negated:
        if len(goals) > MAX_PAIRS:
            algebra.give_up(node, "oneOf")
        two = [
            all_of(algebra, [first, second])
            for index, first in enumerate(goals[:MAX_PAIRS])
            for second in goals[index + 1 : MAX_PAIRS]
        ]
        return join([none_of(algebra, goals), *two])
    return join([_alone(algebra, node, goals, index) for index in range(len(goals))])


def _alone(algebra: "Algebra", node: Node, goals: list[Goal], index: int) -> Values:
    """What satisfies one option and surely none of the others."""
    values: Values = {}
    for kind in KINDS:
        kept: list[Shape] = []
        for shape in shapes(algebra.values(goals[index]), kind):
            others = [goal for other, goal in enumerate(goals) if other != index]
            if any(shape in shapes(algebra.values(goal), kind) for goal in others):
                continue  # all of it is another option's too
            rivals = [goal for goal in others if not _apart(algebra, shape, goal, kind)]
            if not rivals:
                kept.append(shape)
                continue
            left = algebra.meet({kind: (shape,)}, _silent(none_of(algebra, rivals)))[kind]
            if not left and any(algebra.is_loose(other) for goal in rivals for other in negate(goal)):
                algebra.give_up(node, "oneOf")
            kept.extend(left)
        values[kind] = tuple(kept)
    return values


def _apart(algebra: "Algebra", shape: Shape, goal: Goal, kind: str) -> bool:
    """Whether no value of the shape can satisfy the goal."""
    if algebra.is_loose(goal):
        return False
    return all(algebra.shapes_apart(shape, rival) for rival in shapes(algebra.values(goal), kind))


def _silent(values: Values) -> Values:
    """A negation speaks of no property or item, as far as `unevaluated…` is concerned."""
    return {kind: tuple(_silenced(shape) for shape in each) for kind, each in values.items()}


def _silenced(shape: Shape) -> Shape:
    if isinstance(shape, Array):
        return replace(
            shape,
            parts=tuple(replace(part, evaluates=False) for part in shape.parts),
            contains=tuple(replace(clause, evaluates=False) for clause in shape.contains),
        )
    if isinstance(shape, Object):
        return replace(shape, parts=tuple(replace(part, evaluates=False, declares=False) for part in shape.parts))
    return shape


def read_not(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    goal = algebra.document.goal(value, node, "/not")
    if negated:
        return _silent(algebra.values(goal))
    return _silent(none_of(algebra, [goal]))


def read_if(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    condition = algebra.document.goal(value, node, "/if")
    then = algebra.document.goal(node.schema.get("then", True), node, "/then")
    otherwise = algebra.document.goal(node.schema.get("else", True), node, "/else")
    unless = _silent(none_of(algebra, [condition]))
    if negated:
        met = algebra.meet(algebra.values(condition), none_of(algebra, [then]))
        return join([met, algebra.meet(unless, none_of(algebra, [otherwise]))])
    met = algebra.meet(algebra.values(condition), algebra.values(then))
    return join([met, algebra.meet(unless, algebra.values(otherwise))])


def read_reference(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    if "$dynamicRef" in node.schema:
        goal = algebra.document.resolve_dynamic(value, node)
    elif "$recursiveRef" in node.schema and "$ref" not in node.schema:
        algebra.document.refuse(node, "$recursiveRef")
    else:
        goal = algebra.document.resolve(value, node, "$ref")
    return none_of(algebra, [goal]) if negated else algebra.values(goal)
