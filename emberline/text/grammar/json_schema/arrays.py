"""JSON arrays: their keywords, and expressions with items by position, bounded counts, `contains` and `uniqueItems`.

A context-free grammar cannot compare two values. For `uniqueItems` the values of an item are split into disjoint sets,
of which each gives at most one item, in a fixed order; arrays that cannot be written so are left out.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias

from emberline.protocol.grammar import Expression, Rule, Text
from emberline.text.grammar.expressions.builder import EMPTY, NEVER, choice, optional, repeat, separated, sequence
from emberline.text.grammar.json_schema.disjoint_parts import all_values, disjoint_parts
from emberline.text.grammar.json_schema.document import TRUE, Conjunction, Node, contradictory, negations
from emberline.text.grammar.json_schema.set_algebra import (
    ArraySet,
    ContainsConstraint,
    ItemsConstraint,
    SetAlgebra,
    TypedSet,
    ValueSet,
    canonical,
    nothing,
    only,
    typed_sets,
)
from emberline.text.grammar.json_schema.strings import COMMA, literal
from emberline.text.grammar.json_schema.writer import GrammarWriter

MAX_TRACKED = 64  # items up to which positions are counted one by one
MAX_STATES = 400
MAX_UNIQUE = 100  # items that must differ
MAX_PARTS = 128  # of an item's values, of which each array has some
MAX_LISTED = 256  # arrays that are listed one by one

State: TypeAlias = tuple[int, tuple[int, ...]]  # items written, matches so far of each `contains`

# --- keywords --------------------------------------------------------------------------------------------------------


def read_items(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    constraint = _items_constraint(algebra, node)
    if not negated:
        return {"array": (ArraySet((constraint,)),)}
    prefix = constraint.prefix
    found = [_with_item(index, other) for index, schemas in enumerate(prefix) for other in negations(schemas)]
    for other in negations(constraint.rest):
        if prefix:
            algebra.drop(node, "items")
            found.append(_with_item(len(prefix), other))
        else:
            found.append(ArraySet(contains=(ContainsConstraint(other, 1, None, evaluates=False),)))
    return only("array", *found)


def _with_item(index: int, schemas: Conjunction) -> ArraySet:
    return ArraySet((ItemsConstraint((TRUE,) * index + (schemas,), evaluates=False),), least=index + 1)


def _items_constraint(algebra: SetAlgebra, node: Node) -> ItemsConstraint:
    prefix, items, rest_keyword = node.schema.get("prefixItems", []), node.schema.get("items"), "items"
    if isinstance(items, list):  # before draft 2020-12
        prefix, items, rest_keyword = items, node.schema.get("additionalItems"), "additionalItems"
    if not isinstance(prefix, list):
        algebra.document.fail(node, "'prefixItems' must be a list of schemas")
    schemas = tuple(algebra.document.conjunction(each, node, "/prefixItems") for each in prefix)
    if items is None:
        return ItemsConstraint(schemas)
    return ItemsConstraint(schemas, algebra.document.conjunction(items, node, f"/{rest_keyword}"), explicit=True)


def read_unique_items(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    if not isinstance(value, bool):
        algebra.document.fail(node, "'uniqueItems' must be true or false")
    if negated:
        if value:
            algebra.drop(node, "uniqueItems")
        return nothing()
    return {"array": (ArraySet(unique=True),)} if value else {}


def read_contains(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    schemas = algebra.document.conjunction(value, node, "/contains")
    least = algebra.document.count(node, "minContains", node.schema.get("minContains", 1))
    most = node.schema.get("maxContains")
    most = None if most is None else algebra.document.count(node, "maxContains", most)
    if not negated:
        possible = most is None or least <= most
        return {"array": (ArraySet(contains=(ContainsConstraint(schemas, least, most),)),) if possible else ()}
    found: list[TypedSet] = []
    if least:
        found.append(ArraySet(contains=(ContainsConstraint(schemas, 0, least - 1, evaluates=False),)))
    if most is not None:
        found.append(ArraySet(contains=(ContainsConstraint(schemas, most + 1, None, evaluates=False),)))
    return only("array", *found)


def close_unevaluated(algebra: SetAlgebra, node: Node, values: ValueSet) -> ValueSet:
    """`unevaluatedItems`: constrains the items that no other keyword of this schema evaluates. Each branch is
    considered alone, which may lose arrays that are valid only by two branches at once."""
    schemas = algebra.document.conjunction(node.schema["unevaluatedItems"], node, "/unevaluatedItems")
    closed: list[TypedSet] = []
    algebra.mark_inexact()
    for arrays in typed_sets(values, "array"):
        assert isinstance(arrays, ArraySet)
        closed.extend(_closed(algebra, arrays, schemas))
    return {**values, "array": tuple(closed)}


def _closed(algebra: SetAlgebra, arrays: ArraySet, schemas: Conjunction) -> list[TypedSet]:
    evaluating = [constraint for constraint in arrays.constraints if constraint.evaluates]
    if any(constraint.explicit for constraint in evaluating):
        return [arrays]
    if arrays.members is not None:
        both = algebra.intersect_typed(arrays, ArraySet((ItemsConstraint((), schemas, True),)))
        return [] if both is None else [both]
    evaluated = (TRUE,) * max((len(constraint.prefix) for constraint in evaluating), default=0)
    # An item that `contains` has matched is evaluated.
    rests = [schemas, *(clause.schemas for clause in arrays.contains if clause.evaluates)]
    return [
        replace(arrays, constraints=(*arrays.constraints, ItemsConstraint(evaluated, each, True))) for each in rests
    ]


# --- expressions -----------------------------------------------------------------------------------------------------


def array_expression(writer: GrammarWriter, arrays: ArraySet) -> Expression:
    n_prefix, least, most = arrays.n_prefix, arrays.least, arrays.most
    limits = [] if most is None else [most]
    if n_prefix and not any(constraint.explicit for constraint in arrays.constraints):
        # Items behind the prefix are allowed, but the schema does not ask for them.
        limits.append(max([n_prefix, least, *(clause.least + n_prefix for clause in arrays.contains)]))
    if contradictory(arrays.rest):
        limits.append(n_prefix)
    limits += [index for index in range(n_prefix) if contradictory(arrays.item(index))]
    most = min(limits, default=None)
    if most is not None and least > most:
        return NEVER
    if arrays.unique and (most is None or most > 1):
        return _unique(writer, arrays, least, most)
    if arrays.contains:
        return _containing(writer, arrays, least, most)
    return _bracketed(_items(writer, arrays, least, most))


def _bracketed(body: Expression) -> Expression:
    return sequence(Text("["), body, Text("]"))


def _items(writer: GrammarWriter, arrays: ArraySet, least: int, most: int | None) -> Expression:
    n_prefix = arrays.n_prefix
    if n_prefix == 0:
        return separated(writer.nonterminal(arrays.rest), COMMA, least, most) if most != 0 else EMPTY
    body: Expression = EMPTY
    if most is None or most > n_prefix:
        more = sequence(COMMA, writer.nonterminal(arrays.rest))
        body = repeat(more, max(0, least - n_prefix), None if most is None else most - n_prefix)
    for index in reversed(range(n_prefix if most is None else min(most, n_prefix))):
        item = sequence(EMPTY if index == 0 else COMMA, writer.nonterminal(arrays.item(index)), body)
        body = item if index < least else optional(item)
    return body


def _containing(writer: GrammarWriter, arrays: ArraySet, least: int, most: int | None) -> Expression:
    """States count items and matches of `contains`; where too many are needed, longer arrays are left out."""
    n_tracked = max([arrays.n_prefix, least, most or 0, 1])
    if n_tracked > MAX_TRACKED:
        if max(arrays.n_prefix, least) > MAX_TRACKED:
            writer.document.unsupported("'contains' together with more than 64 items is not supported")
        most, n_tracked = MAX_TRACKED, MAX_TRACKED
    rules: dict[State, int] = {}
    waiting: list[State] = []

    def after(state: State) -> Expression:
        if state not in rules:
            if len(rules) > MAX_STATES:
                writer.document.unsupported("'contains' with counts as large as these is not supported")
            rules[state] = writer.builder.rule()
            waiting.append(state)
        return Rule(rules[state])

    start = after((0, (0,) * len(arrays.contains)))
    while waiting:
        state = waiting.pop()
        writer.builder.define(rules[state], _contains_step(writer, arrays, state, (least, most, n_tracked), after))
    return _bracketed(start)


def _contains_step(
    writer: GrammarWriter,
    arrays: ArraySet,
    state: State,
    bounds: tuple[int, int | None, int],
    after: Callable[[State], Expression],
) -> Expression:
    """The end of the array, or one more item: for each `contains` a match, or not."""
    (n_items, n_matches), (least, most, n_tracked) = state, bounds
    clauses = arrays.contains
    options: list[Expression] = []
    if n_items >= least and all(n >= clause.least for n, clause in zip(n_matches, clauses)):
        options.append(EMPTY)
    if most is not None and n_items >= most:
        return choice(options)
    for matched in product((True, False), repeat=len(clauses)):
        items: list[Conjunction] = [arrays.item(n_items)]
        counts: list[int] = []
        for matches, clause, n in zip(matched, clauses, n_matches):
            limit = clause.least if clause.most is None else clause.most + 1
            counts.append(min(n + 1, limit) if matches else n)
            if matches:
                items = [schemas | clause.schemas for schemas in items]
            elif clause.most is not None:
                items = [schemas | other for schemas in items for other in negations(clause.schemas)]
            if clause.most is not None and counts[-1] > clause.most:
                items = []
        following = (min(n_items + 1, n_tracked) if most is None else n_items + 1, tuple(counts))
        for schemas in items:
            item = writer.nonterminal(schemas)
            options.append(sequence(COMMA if n_items else EMPTY, item, after(following)))
    return choice(options)


# --- uniqueItems -----------------------------------------------------------------------------------------------------


def _unique(writer: GrammarWriter, arrays: ArraySet, least: int, most: int | None) -> Expression:
    n_prefix = arrays.n_prefix
    if not arrays.contains and not n_prefix:
        if least > MAX_UNIQUE:
            writer.document.unsupported(f"'uniqueItems' with more than {MAX_UNIQUE} items is not supported")
        parts, are_all = disjoint_parts(writer, arrays.rest, least)
        if len(parts) < least and not are_all:
            writer.document.dropped.append("'uniqueItems'")
        return _bracketed(_one_of_each(writer, parts[: max(2 * least, MAX_PARTS)], least, most))
    listed = _listed(writer, arrays, least, most)
    if listed is not None:
        return listed
    if n_prefix and not arrays.contains and _prefix_disjoint(writer, arrays):
        limit = n_prefix + 1 if most is None else min(most, n_prefix + 1)
        if least <= limit:
            return _bracketed(_items(writer, arrays, least, limit))
    if least <= 1 and sum(clause.least for clause in arrays.contains) <= 1:
        return array_expression(writer, ArraySet(arrays.constraints, least, 1, False, arrays.contains))
    writer.document.unsupported("'uniqueItems' together with these other constraints on an array is not supported")


def _prefix_disjoint(writer: GrammarWriter, arrays: ArraySet) -> bool:
    """True if no two of the prefix's items and the first item after the prefix can be equal."""
    items = [arrays.item(index) for index in range(arrays.n_prefix + 1)]
    return not any(writer.algebra.is_inexact(schemas) for schemas in items) and all(
        writer.algebra.disjoint(first, second) for index, first in enumerate(items) for second in items[index + 1 :]
    )


def _listed(writer: GrammarWriter, arrays: ArraySet, least: int, most: int | None) -> Expression | None:
    """The allowed arrays, listed one by one; None where there are too many."""
    n_prefix = arrays.n_prefix
    longest = n_prefix + 1 if most is None else min(most, n_prefix + 2)
    columns = [all_values(writer, arrays.item(index), 12) for index in range(longest)]
    found: list[Expression] = []
    total = 1
    for length in range(longest + 1):
        if length:
            column = columns[length - 1]
            total = total * len(column) if column is not None else MAX_LISTED + 1
        if total > MAX_LISTED:
            return choice(found) if found and length > max(least, 1) else None
        if length < least:
            continue
        for items in product(*(column or [] for column in columns[:length])):
            value = list(items)
            if len({canonical(item) for item in value}) == length and writer.algebra.is_member(arrays, value):
                found.append(literal(value))
    return choice(found)


def _one_of_each(writer: GrammarWriter, sets: list[Expression], least: int, most: int | None) -> Expression:
    """At most one item of each of these disjoint sets, in their order: no two can be equal."""
    limit = len(sets) if most is None else min(most, len(sets))
    if least > limit:
        return NEVER
    # Beyond `least`, items need counting only where there is a maximum.
    n_counted = limit if limit < len(sets) else max(least, 1)
    sets = [writer.builder.add(each) for each in sets]
    rules: dict[tuple[int, int], Expression] = {}

    def from_set(index: int, n_items: int) -> Expression:
        """Return what may follow after `n_items` items of the sets before `index`."""
        n_items = min(n_items, n_counted)
        key = (index, n_items)
        if len(sets) - index < least - n_items:
            return NEVER
        if key not in rules:
            writer.document.spend()
            options: list[Expression] = [EMPTY] if n_items >= least else []
            if index < len(sets) and (n_items < limit or limit == len(sets)):
                item = sequence(COMMA if n_items else EMPTY, sets[index], from_set(index + 1, n_items + 1))
                options += [item, from_set(index + 1, n_items)]
            rules[key] = writer.builder.add(choice(options))
        return rules[key]

    return from_set(0, 0)
