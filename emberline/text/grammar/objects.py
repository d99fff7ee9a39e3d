"""JSON objects: declared properties in their order, then others where the schema asks for them."""

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from emberline.protocol.grammar import Expression, Text
from emberline.text.grammar import automaton
from emberline.text.grammar.automaton import Automaton
from emberline.text.grammar.builder import EMPTY, NEVER, choice, optional, repeat, separated, sequence
from emberline.text.grammar.goals import TRUE, Goal, impossible
from emberline.text.grammar.shapes import Object
from emberline.text.grammar.strings import QUOTE, free_string, in_json, literal, not_among, text_automaton

if TYPE_CHECKING:
    from emberline.text.grammar.schema import Writer

MAX_PATTERNS = 4  # name patterns up to which every combination is looked at
MAX_COUNTED = 64
_COMMA, _COLON = Text(","), Text(":")


@dataclass(slots=True)
class Entry:
    pair: Expression  # "name":value
    required: bool


@dataclass(slots=True)
class Others:
    """Names that are not declared, of one class, and what their values must be."""

    names: Automaton | None  # None: every name that is not declared
    goal: Goal


def object_shape_expression(writer: "Writer", shape: Object, given: dict[str, Expression] | None = None) -> Expression:
    """`given`: for some properties what to write instead of all that their goal allows."""
    if shape.among is not None:
        return choice(literal(value) for value in shape.among)
    names = _declared(shape)
    entries: list[Entry] = []
    for name in names:
        goal = writer.algebra.property_goal(shape, name)
        required = name in shape.required
        if impossible(goal) or not writer.algebra.allows(shape.names, name):
            if required:
                return NEVER
            continue
        value = (given or {}).get(name)
        entries.append(Entry(sequence(literal(name), _COLON, writer.goal(goal) if value is None else value), required))
    n_required = sum(entry.required for entry in entries)
    others: list[Others] = []
    if _asks_for_others(shape) or shape.least > len(entries):
        others = _others(writer, shape, names)
    return sequence(Text("{"), _body(writer, shape, entries, others, names, n_required), Text("}"))


def _declared(shape: Object) -> list[str]:
    """Names with a meaning of their own, in the schema's order. Of those that only negations know, the required."""
    names: dict[str, None] = {}
    for part in shape.parts:
        names.update((name, None) for name, _ in part.properties if part.declares)
    names.update((name, None) for name in shape.required)
    for part in shape.parts:
        names.update((name, None) for name, _ in part.properties)
    return list(names)


def _asks_for_others(shape: Object) -> bool:
    """Unless the schema speaks of further properties, an object that has some declared keeps to them."""
    declares = any(part.properties and part.declares for part in shape.parts)
    return any(part.explicit for part in shape.parts) or not (declares or shape.required)


def _others(writer: "Writer", shape: Object, names: list[str]) -> list[Others]:
    patterns = list(dict.fromkeys(pattern for part in shape.parts for pattern, _ in part.patterns))
    if not patterns and shape.names == TRUE:
        goal = _rest(shape, frozenset())
        return [] if impossible(goal) else [Others(None, goal)]
    base = automaton.complement(automaton.of_words(names))
    if shape.names != TRUE:
        base = automaton.intersect(base, text_automaton(writer.algebra, shape.names))
    found: list[Others] = []
    for subset in _subsets(patterns):
        writer.document.spend(10)
        goal = _rest(shape, subset)
        if impossible(goal):
            continue
        each = base
        for pattern in patterns:
            inside = pattern in subset
            matching = writer.algebra.automaton(pattern, not inside)
            each = automaton.intersect(each, matching if inside else automaton.complement(matching))
        if each.shortest() is not None:
            found.append(Others(each, goal))
    return found


def _subsets(patterns: list[str]) -> list[frozenset[str]]:
    if len(patterns) > MAX_PATTERNS:
        return [frozenset(), *(frozenset((pattern,)) for pattern in patterns)]
    picks = product((True, False), repeat=len(patterns))
    return [frozenset(p for p, picked in zip(patterns, row) if picked) for row in picks]


def _rest(shape: Object, matched: frozenset[str]) -> Goal:
    goal: Goal = TRUE
    for part in shape.parts:
        inner = [each for pattern, each in part.patterns if pattern in matched]
        goal = goal.union(*inner) if inner else goal | part.rest
    return goal


def _pair(writer: "Writer", other: Others, names: list[str]) -> Expression:
    if other.names is not None:
        key = sequence(QUOTE, automaton.to_expression(other.names, writer.builder, in_json), QUOTE)
    elif names:
        key = sequence(QUOTE, in_json(not_among(frozenset(names))), QUOTE)
    else:
        key = free_string(writer.builder)
    return sequence(key, _COLON, writer.goal(other.goal))


def _body(
    writer: "Writer", shape: Object, entries: list[Entry], others: list[Others], names: list[str], n_required: int
) -> Expression:
    further = writer.builder.add(choice([_pair(writer, other, names) for other in others])) if others else NEVER
    n_most = None if others else len(entries)
    most_fits = shape.most is None or (n_most is not None and n_most <= shape.most)
    if most_fits and (shape.least <= n_required or shape.least == 1):
        return _ordered(writer, entries, further, empty=shape.least == 0)
    return _counted(writer, shape, entries, others, further, names)


def _ordered(writer: "Writer", entries: list[Entry], further: Expression, empty: bool) -> Expression:
    """Each entry once or not at all, in order; the first to be written has no comma before it."""
    tail: Expression = repeat(sequence(_COMMA, further)) if further != NEVER else EMPTY
    first_required = next((index for index, entry in enumerate(entries) if entry.required), len(entries))
    starts: list[Expression] = []
    if first_required == len(entries):
        if further != NEVER:
            starts.append(separated(further, _COMMA, 1))
        if empty:
            starts.append(EMPTY)
    for index in reversed(range(len(entries))):
        entry = entries[index]
        if index <= first_required:
            starts.append(sequence(entry.pair, tail))
        following = sequence(_COMMA, entry.pair)
        tail = sequence(following if entry.required else optional(following), tail)
        if 0 < index <= first_required:
            tail = writer.builder.add(tail)
    return choice(reversed(starts))


def _counted(
    writer: "Writer", shape: Object, entries: list[Entry], others: list[Others], further: Expression, names: list[str]
) -> Expression:
    """As `_ordered`, with the number of properties between bounds: a rule for each place and number."""
    most = len(entries) + MAX_COUNTED if shape.most is None else shape.most
    rules: dict[tuple[int, int], Expression] = {}

    def from_entry(index: int, n_written: int) -> Expression:
        key = (index, n_written)
        if key in rules:
            return rules[key]
        writer.document.spend()
        if index == len(entries):
            return _rest_of(writer, shape, others, further, names, n_written)
        entry = entries[index]
        options: list[Expression] = []
        if n_written < most:
            pair = sequence(_COMMA if n_written else EMPTY, entry.pair)
            options.append(sequence(pair, from_entry(index + 1, n_written + 1)))
        if not entry.required:
            options.append(from_entry(index + 1, n_written))
        rules[key] = writer.builder.add(choice(options))
        return rules[key]

    return from_entry(0, 0)


def _rest_of(
    writer: "Writer", shape: Object, others: list[Others], further: Expression, names: list[str], n_written: int
) -> Expression:
    """Names that are not declared, as many as are missing; those that count must differ."""
    needed = max(0, shape.least - n_written)
    most = None if shape.most is None else shape.most - n_written
    if most is not None and needed > most:
        return NEVER
    if not needed:
        if most == 0 or further == NEVER:
            return EMPTY
        more = repeat(sequence(_COMMA, further), 0, None if most is None else most - (0 if n_written else 1))
        return more if n_written else optional(sequence(further, more))
    if needed == 1 and further != NEVER:
        counted = further
    else:
        pairs = _different(writer, others, names, needed)
        if len(pairs) < needed:
            return NEVER
        counted = sequence(pairs[0], *(sequence(_COMMA, pair) for pair in pairs[1:]))
    spare = None if most is None else most - needed
    more = repeat(sequence(_COMMA, further), 0, spare) if spare != 0 and further != NEVER else EMPTY
    return sequence(_COMMA if n_written else EMPTY, counted, more)


def _different(writer: "Writer", others: list[Others], names: list[str], needed: int) -> list[Expression]:
    """So many pairs whose names have different lengths."""
    found: list[Expression] = []
    taken: set[str] = set()
    for other in others:
        whole = other.names or automaton.complement(automaton.of_words(names))
        words = whole.words(4 * needed)
        value = writer.goal(other.goal)
        if words is not None:
            for word in words:
                if word not in taken and len(found) < needed:
                    taken.add(word)
                    found.append(sequence(literal(word), _COLON, value))
            continue
        if taken or found:  # words of this class could repeat those of another
            continue
        for length in range(1, MAX_COUNTED + 1):
            if len(found) == needed:
                break
            exactly = automaton.of_length(whole, length, length)
            if exactly.shortest() is not None:
                key = automaton.to_expression(exactly, writer.builder, in_json)
                found.append(sequence(QUOTE, key, QUOTE, _COLON, value))
    return found
