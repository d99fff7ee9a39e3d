"""Schema keywords that are not about one JSON type: type, enum, const, the applicators (allOf, if, …) and references.

A keyword's reader gives the values that satisfy the keyword, or, `negated`, values that certainly do not.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from emberline.text.grammar.json_schema.document import FALSE, TRUE, Conjunction, Node, negations
from emberline.text.grammar.json_schema.set_algebra import (
    JSON_TYPES,
    UNIVERSE,
    ArraySet,
    ConstantSet,
    ItemsConstraint,
    NumberSet,
    ObjectSet,
    SetAlgebra,
    StringSet,
    TypedSet,
    ValueSet,
    canonical,
    fraction,
    json_type_of,
    nothing,
    only,
    typed_sets,
    union,
)

MAX_EXCLUDED = 64
MAX_PAIRS = 24  # options of a oneOf up to which "two at once" is considered for its negation

Reader: TypeAlias = Callable[[SetAlgebra, Node, Any, bool], ValueSet]


def size_reader(json_type: str, keyword: str) -> Reader:
    """Make the reader of a size keyword such as minLength or maxItems."""
    kinds: dict[str, Callable[..., TypedSet]] = {"string": StringSet, "array": ArraySet, "object": ObjectSet}
    make = kinds[json_type]

    def read(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
        n = algebra.document.count(node, keyword, value)
        if keyword.startswith("min") != negated:
            sets: tuple[TypedSet, ...] = (make(least=n + negated),)
        else:
            sets = (make(most=n - negated),) if n >= negated else ()
        return only(json_type, *sets) if negated else {json_type: sets}

    return read


def read_type(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in {*JSON_TYPES, "integer", "any"} for name in names):
        algebra.document.fail(node, f"'type' must be a JSON type or a list of them, not {value!r}")
    if node.schema.get("nullable") is True:
        names = [*names, "null"]
    if "any" in names:
        return nothing() if negated else {}
    values: ValueSet = {each: () if (each in names) == negated else (UNIVERSE[each],) for each in JSON_TYPES}
    if "integer" in names and "number" not in names:
        values["number"] = (NumberSet(integral=not negated),)
    return values


def read_enum(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    if not isinstance(value, list):
        algebra.document.fail(node, "'enum' must be a list")
    algebra.document.spend(len(value))
    if negated:
        return _all_except(algebra, node, value)
    unique = {canonical(each): each for each in reversed(value)}
    values = nothing()
    for each in reversed(unique.values()):
        json_type = json_type_of(each)
        members = values[json_type][0].members if values[json_type] else ()
        values[json_type] = (replace(UNIVERSE[json_type], members=(*(members or ()), each)),)
    return values


def read_const(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    return read_enum(algebra, node, [value], negated)


def _all_except(algebra: SetAlgebra, node: Node, values: list[Any]) -> ValueSet:
    constants = [each for each in values if isinstance(each, bool) or each is None]
    left: ValueSet = {
        "null": () if None in constants else (UNIVERSE["null"],),
        "boolean": tuple(ConstantSet((each,)) for each in (True, False) if each not in constants),
        "number": (NumberSet(excluded=frozenset(fraction(v) for v in values if json_type_of(v) == "number")),),
        "string": (StringSet(excluded=frozenset(v for v in values if isinstance(v, str))),),
    }
    for value in values:
        if isinstance(value, list):
            left = algebra.intersect(left, {"array": _other_arrays(algebra, node, value)})
        elif isinstance(value, dict):
            left = algebra.intersect(left, {"object": _other_objects(algebra, node, value)})
    return left


def _other_arrays(algebra: SetAlgebra, node: Node, value: list[Any]) -> tuple[TypedSet, ...]:
    found: list[TypedSet] = [ArraySet(least=len(value) + 1)]
    if value:
        found.append(ArraySet(most=len(value) - 1))
    for index, item in enumerate(value[:MAX_EXCLUDED]):
        other = algebra.document.conjunction({"not": {"const": item}}, node)
        found.append(ArraySet((ItemsConstraint((TRUE,) * index + (other,), evaluates=False),), least=index + 1))
    return tuple(found)


def _other_objects(algebra: SetAlgebra, node: Node, value: dict[str, Any]) -> tuple[TypedSet, ...]:
    found: list[TypedSet] = [ObjectSet(least=len(value) + 1)]
    for name, item in list(value.items())[:MAX_EXCLUDED]:
        other = algebra.document.conjunction({"not": {"const": item}}, node)
        found += [ObjectSet.having(name, FALSE, required=False), ObjectSet.having(name, other)]
    return tuple(found)


# --- applicators -----------------------------------------------------------------------------------------------------


def _options(algebra: SetAlgebra, node: Node, keyword: str, value: Any) -> list[Conjunction]:
    if not isinstance(value, list) or not value:
        algebra.document.fail(node, f"{keyword!r} must be a list of at least one schema")
    return [algebra.document.conjunction(each, node, f"/{keyword}/{index}") for index, each in enumerate(value)]


def _none_of(algebra: SetAlgebra, options: list[Conjunction]) -> ValueSet:
    """Values that satisfy none of the options."""
    values: ValueSet = {}
    for schemas in options:
        negated = union([algebra.values(other) for other in negations(schemas)]) if schemas else nothing()
        values = algebra.intersect(values, negated)
    return values


def _all_of(algebra: SetAlgebra, options: list[Conjunction]) -> ValueSet:
    values: ValueSet = {}
    for schemas in options:
        values = algebra.intersect(values, algebra.values(schemas))
    return values


def read_all_of(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    options = _options(algebra, node, "allOf", value)
    return union([_none_of(algebra, [schemas]) for schemas in options]) if negated else _all_of(algebra, options)


def read_any_of(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    options = _options(algebra, node, "anyOf", value)
    return _none_of(algebra, options) if negated else union([algebra.values(schemas) for schemas in options])


def read_one_of(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    options = _options(algebra, node, "oneOf", value)
    if not negated:
        return union([_exactly_one(algebra, node, options, index) for index in range(len(options))])
    if len(options) > MAX_PAIRS:
        algebra.drop(node, "oneOf")
    two_at_once = [
        _all_of(algebra, [first, second])
        for index, first in enumerate(options[:MAX_PAIRS])
        for second in options[index + 1 : MAX_PAIRS]
    ]
    return union([_none_of(algebra, options), *two_at_once])


def _exactly_one(algebra: SetAlgebra, node: Node, options: list[Conjunction], index: int) -> ValueSet:
    """Values that satisfy one option and certainly none of the others."""
    values: ValueSet = {}
    others = [schemas for other, schemas in enumerate(options) if other != index]
    for json_type in JSON_TYPES:
        kept: list[TypedSet] = []
        for typed in typed_sets(algebra.values(options[index]), json_type):
            if any(typed in typed_sets(algebra.values(schemas), json_type) for schemas in others):
                continue  # all of it satisfies another option too
            rivals = [schemas for schemas in others if not _certainly_disjoint(algebra, typed, schemas, json_type)]
            if not rivals:
                kept.append(typed)
                continue
            left = algebra.intersect({json_type: (typed,)}, _not_evaluating(_none_of(algebra, rivals)))[json_type]
            if not left and any(algebra.is_inexact(other) for schemas in rivals for other in negations(schemas)):
                algebra.drop(node, "oneOf")
            kept.extend(left)
        values[json_type] = tuple(kept)
    return values


def _certainly_disjoint(algebra: SetAlgebra, typed: TypedSet, schemas: Conjunction, json_type: str) -> bool:
    if algebra.is_inexact(schemas):
        return False
    return all(algebra.disjoint_typed(typed, rival) for rival in typed_sets(algebra.values(schemas), json_type))


def _not_evaluating(values: ValueSet) -> ValueSet:
    """The same values: a negated schema evaluates no property or item for `unevaluated…`."""
    return {json_type: tuple(map(_typed_not_evaluating, sets)) for json_type, sets in values.items()}


def _typed_not_evaluating(typed: TypedSet) -> TypedSet:
    if isinstance(typed, ArraySet):
        return replace(
            typed,
            constraints=tuple(replace(constraint, evaluates=False) for constraint in typed.constraints),
            contains=tuple(replace(clause, evaluates=False) for clause in typed.contains),
        )
    if isinstance(typed, ObjectSet):
        constraints = (replace(constraint, evaluates=False, declares=False) for constraint in typed.constraints)
        return replace(typed, constraints=tuple(constraints))
    return typed


def read_not(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    schemas = algebra.document.conjunction(value, node, "/not")
    return _not_evaluating(algebra.values(schemas) if negated else _none_of(algebra, [schemas]))


def read_if(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    condition = algebra.document.conjunction(value, node, "/if")
    branches: list[ValueSet] = []
    for holds, keyword in (
        (algebra.values(condition), "then"),
        (_not_evaluating(_none_of(algebra, [condition])), "else"),
    ):
        branch = algebra.document.conjunction(node.schema.get(keyword, True), node, f"/{keyword}")
        values = _none_of(algebra, [branch]) if negated else algebra.values(branch)
        branches.append(algebra.intersect(holds, values))
    return union(branches)


def read_reference(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    if "$dynamicRef" in node.schema:
        schemas = algebra.document.resolve_dynamic(value, node)
    elif "$recursiveRef" in node.schema and "$ref" not in node.schema:
        algebra.document.refuse(node, "$recursiveRef")
    else:
        schemas = algebra.document.resolve(value, node, "$ref")
    return _none_of(algebra, [schemas]) if negated else algebra.values(schemas)
