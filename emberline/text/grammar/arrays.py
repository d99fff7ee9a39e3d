"""JSON arrays: items in their places, so many of them, some that must be found, none twice."""

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from emberline.protocol.grammar import Expression, Rule, Text
from emberline.text.grammar.algebra import item_goal, rest_goal
from emberline.text.grammar.builder import EMPTY, NEVER, choice, optional, repeat, separated, sequence
from emberline.text.grammar.distinct import classes, finite
from emberline.text.grammar.goals import Goal, impossible, negate
from emberline.text.grammar.shapes import Array, exact
from emberline.text.grammar.strings import literal

if TYPE_CHECKING:
    from emberline.text.grammar.schema import Writer

MAX_TRACKED = 64  # items up to which places are counted one by one
MAX_STATES = 400
MAX_LISTED = 256
_COMMA = Text(",")

State: TypeAlias = tuple[int, tuple[int, ...]]  # items so far, found so far for each `contains`


def array_expression(writer: "Writer", shape: Array) -> Expression:
    if shape.among is not None:
        return choice(literal(value) for value in shape.among)
    n_prefix = max((len(part.prefix) for part in shape.parts), default=0)
    least, most = shape.least, shape.most
    if n_prefix and not any(part.explicit for part in shape.parts):  # further items are allowed, not asked for
        needed = max([n_prefix, least, *(clause.least + n_prefix for clause in shape.contains)])
        most = needed if most is None else min(most, needed)
    if impossible(rest_goal(shape)):
        most = n_prefix if most is None else min(most, n_prefix)
    for index in range(n_prefix):
        if impossible(item_goal(shape, index)):
            most = index if most is None else min(most, index)
            break
    if most is not None and least > most:
        return NEVER
    if shape.unique and (most is None or most > 1):
        return _unique(writer, shape, n_prefix, least, most)
    if shape.contains:
        return _containing(writer, shape, n_prefix, least, most)
    return _bracketed(_items(writer, shape, n_prefix, least, most))


def _bracketed(body: Expression) -> Expression:
    return sequence(Text("["), body, Text("]"))


def _items(writer: "Writer", shape: Array, n_prefix: int, least: int, most: int | None) -> Expression:
    if n_prefix == 0:
        return separated(writer.goal(rest_goal(shape)), _COMMA, least, most) if most != 0 else EMPTY
    body: Expression = EMPTY
    if most is None or most > n_prefix:
        more = sequence(_COMMA, writer.goal(rest_goal(shape)))
        body = repeat(more, max(0, least - n_prefix), None if most is None else most - n_prefix)
    for index in reversed(range(n_prefix)):
        if most is not None and index >= most:
            continue
        item = sequence(EMPTY if index == 0 else _COMMA, writer.goal(item_goal(shape, index)), body)
        body = item if index < least else optional(item)
    return body


def _containing(writer: "Writer", shape: Array, n_prefix: int, least: int, most: int | None) -> Expression:
    """States count items and finds; where too many would be needed, longer arrays are left out."""
    clauses = shape.contains
    places = max([n_prefix, least, most or 0, 1])
    if places > MAX_TRACKED:
        if max(n_prefix, least) > MAX_TRACKED:
            writer.document.unsupported("'contains' beside more than 64 items is not supported")
        most, places = MAX_TRACKED, MAX_TRACKED
    rules: dict[State, int] = {}
    waiting: list[State] = []

    def after(state: State) -> Expression:
        if state not in rules:
            if len(rules) > MAX_STATES:
                writer.document.unsupported("'contains' with counts as large as these is not supported")
            rules[state] = writer.builder.rule()
            waiting.append(state)
        return Rule(rules[state])

    start = after((0, (0,) * len(clauses)))
    while waiting:
        state = waiting.pop()
        writer.builder.define(rules[state], _step(writer, shape, state, (least, most, places), after))
    return _bracketed(start)


def _step(
    writer: "Writer",
    shape: Array,
    state: State,
    bounds: tuple[int, int | None, int],
    after: Callable[[State], Expression],
) -> Expression:
    (n_items, found), (least, most, places) = state, bounds
    clauses = shape.contains
    options: list[Expression] = []
    if n_items >= least and all(n >= clause.least for n, clause in zip(found, clauses)):
        options.append(EMPTY)
    if most is not None and n_items >= most:
        return choice(options)
    for picks in product((True, False), repeat=len(clauses)):
        goals: list[Goal] = [item_goal(shape, n_items)]
        counts: list[int] = []
        for picked, clause, n in zip(picks, clauses, found):
            limit = clause.least if clause.most is None else clause.most + 1
            counts.append(min(n + 1, limit) if picked else n)
            if picked:
                goals = [goal | clause.goal for goal in goals]
            elif clause.most is not None:
                goals = [goal | other for goal in goals for other in negate(clause.goal)]
            if clause.most is not None and counts[-1] > clause.most:
                goals = []
        for goal in goals:
            item = writer.goal(goal)
            following = after((min(n_items + 1, places) if most is None else n_items + 1, tuple(counts)))
            options.append(sequence(_COMMA if n_items else EMPTY, item, following))
    return choice(options)


def _unique(writer: "Writer", shape: Array, n_prefix: int, least: int, most: int | None) -> Expression:
    if shape.contains or n_prefix:
        listed = _listed(writer, shape, least, most)
        if listed is not None:
            return listed
        if n_prefix and not shape.contains and _all_apart(writer, shape, n_prefix):
            limit = n_prefix + 1 if most is None else min(most, n_prefix + 1)
            if least <= limit:
                return _bracketed(_items(writer, shape, n_prefix, least, limit))
        if least <= 1 and sum(clause.least for clause in shape.contains) <= 1:
            only_one = Array(shape.parts, least, 1, False, shape.contains)
            return array_expression(writer, only_one)
        writer.document.unsupported("'uniqueItems' beside these other constraints on an array is not supported")
    return _bracketed(_ascending(writer, classes(writer, rest_goal(shape)), least, most))


def _all_apart(writer: "Writer", shape: Array, n_prefix: int) -> bool:
    goals = [item_goal(shape, index) for index in range(n_prefix + 1)]
    return all(
        not any(writer.algebra.is_loose(goal) for goal in goals) and writer.algebra.apart(first, second)
        for index, first in enumerate(goals)
        for second in goals[index + 1 :]
    )


def _listed(writer: "Writer", shape: Array, least: int, most: int | None) -> Expression | None:
    """Each array by itself, where there are few."""
    n_prefix = max((len(part.prefix) for part in shape.parts), default=0)
    longest = n_prefix + 1 if most is None else min(most, n_prefix + 2)
    columns = [finite(writer, item_goal(shape, index), 12) for index in range(longest)]
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
            if len({exact(item) for item in value}) == length and writer.algebra.admits(shape, value):
                found.append(literal(value))
    return choice(found)


def _ascending(writer: "Writer", sets: list[Expression], least: int, most: int | None) -> Expression:
    """At most one item of each of these sets, in their order: no two can be equal."""
    limit = len(sets) if most is None else min(most, len(sets))
    if least > limit:
        return NEVER
    # Beyond `least`, items need counting only where there is a most.
    n_counted = limit if limit < len(sets) else max(least, 1)
    sets = [writer.builder.add(each) for each in sets]
    rules: dict[tuple[int, int], Expression] = {}

    def from_set(index: int, n_items: int) -> Expression:
        """What may follow when `n_items` were written and sets before `index` are used up."""
        n_items = min(n_items, n_counted)
        key = (index, n_items)
        if key not in rules:
            writer.document.spend()
            options: list[Expression] = [EMPTY] if n_items >= least else []
            if index < len(sets) and (n_items < limit or limit == len(sets)):
                item = sequence(_COMMA if n_items else EMPTY, sets[index], from_set(index + 1, n_items + 1))
                options.append(item)
                options.append(from_set(index + 1, n_items))
            rules[key] = writer.builder.add(choice(options))
        return rules[key]

    return from_set(0, 0)
