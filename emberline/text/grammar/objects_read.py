"""Reads the keywords about objects."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from emberline.text.grammar import automaton
from emberline.text.grammar.automaton import Automaton
from emberline.text.grammar.document import Node
from emberline.text.grammar.goals import FALSE, TRUE, Goal, negate
from emberline.text.grammar.regex import parse
from emberline.text.grammar.scalars_read import constraint, count
from emberline.text.grammar.shapes import Object, ObjectPart, Shape, Values, nothing, only, shapes

if TYPE_CHECKING:
    from emberline.text.grammar.algebra import Algebra


def read_properties(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    part = _part(algebra, node)
    if not negated:
        return {"object": (Object((part,)),)}
    found: list[Shape] = []
    for name, goal in part.properties:
        for other in negate(goal):
            found.append(Object((constraint(name, other),), required=(name,)))
    for pattern, goal in part.patterns:
        found.extend(_witness(algebra, node, part, pattern, goal))
    found.extend(_witness(algebra, node, part, None, part.rest))
    return only("object", *found)


def _part(algebra: "Algebra", node: Node) -> ObjectPart:
    schema = node.schema
    maps: list[tuple[tuple[str, Goal], ...]] = []
    for keyword in ("properties", "patternProperties"):
        table = schema.get(keyword, {})
        if not isinstance(table, dict):
            algebra.document.fail(node, f"{keyword!r} must be an object")
        maps.append(
            tuple((name, algebra.document.goal(each, node, f"/{keyword}/{name}")) for name, each in table.items())
        )
    further = schema.get("additionalProperties")
    explicit = further is not None or bool(maps[1])
    rest = TRUE if further is None else algebra.document.goal(further, node, "/additionalProperties")
    return ObjectPart(maps[0], maps[1], rest, explicit)


def _witness(algebra: "Algebra", node: Node, part: ObjectPart, pattern: str | None, goal: Goal) -> list[Shape]:
    """Objects with one property, of a name found here, that violates the goal."""
    others = negate(goal)
    if not others:
        return []
    names = automaton.complement(automaton.of_words(name for name, _ in part.properties))
    if pattern is not None:
        names = algebra.automaton(pattern, False)
    else:
        for each, _ in part.patterns:
            names = automaton.intersect(names, automaton.complement(algebra.automaton(each, True)))
    name = _readable(names)
    algebra.give_up(node, "additionalProperties" if pattern is None else "patternProperties")
    return [] if name is None else [Object((constraint(name, other),), required=(name,)) for other in others]


def _readable(names: Automaton) -> str | None:
    named = automaton.intersect(names, automaton.from_expression(parse("[a-z][a-z0-9_]*", search=False)))
    found = named.shortest()
    return names.shortest() if found is None else found


def _names(algebra: "Algebra", node: Node, keyword: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        algebra.document.fail(node, f"{keyword!r} must be a list of strings")
    return tuple(dict.fromkeys(value))


def read_required(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    if isinstance(value, bool):  # draft 3 wrote it on the property; what it means here is unclear
        algebra.document.fail(node, "'required' must be a list of names beside 'properties'")
    names = _names(algebra, node, "required", value)
    if negated:
        return only("object", *(Object((constraint(name, FALSE),)) for name in names))
    return {"object": (Object(required=names),)} if names else {}


def read_min_properties(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    least = count(algebra, node, "minProperties", value)
    if negated:
        return only("object", Object(most=least - 1)) if least else nothing()
    return {"object": (Object(least=least),)}


def read_max_properties(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    most = count(algebra, node, "maxProperties", value)
    return only("object", Object(least=most + 1)) if negated else {"object": (Object(most=most),)}


def read_names(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    goal = algebra.document.goal(value, node, "/propertyNames")
    if not negated:
        return {"object": (Object(names=goal),)}
    from emberline.text.grammar.strings import text_automaton

    found: list[Shape] = []
    for other in negate(goal):
        name = _readable(text_automaton(algebra, other))
        algebra.give_up(node, "propertyNames")
        if name is not None:
            found.append(Object((constraint(name, TRUE),), required=(name,)))
    return only("object", *found)


def read_dependencies(algebra: "Algebra", node: Node, value: Any, negated: bool) -> Values:
    """dependentRequired, dependentSchemas, and draft 7's `dependencies`, which is both."""
    if not isinstance(value, dict):
        algebra.document.fail(node, "dependencies must be an object")
    values: Values = {}
    found: list[Shape] = []
    for name, needed in value.items():
        if isinstance(needed, str):
            needed = [needed]
        if isinstance(needed, list):
            names = _names(algebra, node, "dependentRequired", needed)
            having: Values = {"object": (Object(required=(name, *names)),)}
            lacking = [Object((constraint(each, FALSE),), required=(name,)) for each in names]
        else:
            goal = algebra.document.goal(needed, node, f"/{name}")
            having = algebra.meet({"object": (Object(required=(name,)),)}, algebra.values(goal))
            lacking = []
            for other in negate(goal) if negated else ():
                met = algebra.meet({"object": (Object(required=(name,)),)}, algebra.values(other))
                lacking += [shape for shape in met["object"] if isinstance(shape, Object)]
        found.extend(lacking)
        absent = Object((constraint(name, FALSE),))
        if not negated:
            values = algebra.meet(values, {"object": (*shapes(having, "object"), absent)})
    return only("object", *found) if negated else values


def close(algebra: "Algebra", node: Node, values: Values) -> Values:
    """`unevaluatedProperties`: names that nothing in this schema has spoken of. One branch is looked at at a time,
    which may leave objects out that are valid by two branches at once."""
    goal = algebra.document.goal(node.schema["unevaluatedProperties"], node, "/unevaluatedProperties")
    closed: list[Shape] = []
    algebra.loosen()
    for shape in shapes(values, "object"):
        assert isinstance(shape, Object)
        speaking = [part for part in shape.parts if part.evaluates]
        if any("additionalProperties" in node.schema or _speaks_of_all(part) for part in speaking):
            closed.append(shape)
            continue
        part = ObjectPart(
            tuple((name, TRUE) for each in speaking for name, _ in each.properties),
            tuple((pattern, TRUE) for each in speaking for pattern, _ in each.patterns),
            goal,
            explicit=True,
        )
        if shape.among is not None:
            met = algebra.meet_shapes(shape, Object((part,)))
            closed += [] if met is None else [met]
        else:
            closed.append(replace(shape, parts=(*shape.parts, part)))
    return {**values, "object": tuple(closed)}


def _speaks_of_all(part: ObjectPart) -> bool:
    return part.explicit and (part.rest != TRUE or not part.patterns)
