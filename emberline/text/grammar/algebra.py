"""And, or and not over shapes: what a goal's values are, kind by kind.

Everything here may leave values out (then `Document.give_up` notes why) and must never let one in.
"""

from dataclasses import replace
from typing import Any

from emberline.text.grammar import automaton, keywords
from emberline.text.grammar.automaton import Automaton
from emberline.text.grammar.document import Document, Node
from emberline.text.grammar.goals import Goal, impossible
from emberline.text.grammar.regex import parse
from emberline.text.grammar.shapes import (
    KINDS,
    Array,
    Bound,
    Contains,
    Number,
    Object,
    ObjectPart,
    Plain,
    Shape,
    String,
    Values,
    exact,
    fraction,
    kind_of,
    nothing,
    shapes,
    unique,
)

MAX_COMPARED_DEPTH = 4


class Algebra:
    def __init__(self, document: Document) -> None:
        self.document = document
        self._values: dict[Goal, Values] = {}
        self._nodes: dict[int, Values] = {}
        self._open: set[int] = set()
        self._frames: list[bool] = []  # of what is being read, whether it has lost values
        self._loose: set[Goal | int] = set()
        self._tagged: dict[Object, dict[str, frozenset[Any]]] = {}
        self._automata: dict[tuple[str, bool], Automaton] = {}

    # What a goal allows

    def values(self, goal: Goal) -> Values:
        found = self._values.get(goal)
        if found is None:
            self._frames.append(False)
            found = nothing() if impossible(goal) else {}
            for number in sorted(goal, key=abs):
                found = self.meet(found, self._node_values(number))
            self._values[goal] = found
            self._close_frame(goal)
        if goal in self._loose:
            self.loosen()
        return found

    def _node_values(self, number: int) -> Values:
        found = self._nodes.get(number)
        if found is None:
            node = self.document.node(number)
            if number in self._open:
                self.document.fail(node, "the schema refers to itself without end")
            self._open.add(number)
            self._frames.append(False)
            self.document.spend()
            found = keywords.read(self, node) if number > 0 else keywords.read_negated(self, node)
            self._open.discard(number)
            self._nodes[number] = found
            self._close_frame(number)
        if number in self._loose:
            self.loosen()
        return found

    def loosen(self) -> None:
        """What is being read now has lost values: nothing may be concluded from what it lacks."""
        if self._frames:
            self._frames[-1] = True

    def _close_frame(self, owner: Goal | int) -> None:
        if self._frames.pop():
            self._loose.add(owner)

    def give_up(self, node: Node, keyword: str) -> None:
        self.document.give_up(node, keyword)
        self.loosen()

    def is_loose(self, goal: Goal) -> bool:
        self.values(goal)
        return goal in self._loose

    def automaton(self, pattern: str, wide: bool) -> Automaton:
        """Of the texts in which the pattern is found."""
        key = (pattern, wide)
        if key not in self._automata:
            tree = parse(pattern, search=True, wide=wide, param=self.document.where)
            self._automata[key] = automaton.from_expression(tree)
            self.document.spend(len(self._automata[key].edges))
        return self._automata[key]

    def allows(self, goal: Goal, value: Any) -> bool:
        """Whether a value is among those that the goal is known to allow."""
        if impossible(goal):
            return False
        return any(self.admits(shape, value) for shape in shapes(self.values(goal), kind_of(value)))

    # And

    def meet(self, first: Values, second: Values) -> Values:
        result = dict(first)
        for kind, others in second.items():
            if kind not in first:
                result[kind] = others
                continue
            self.document.spend(len(first[kind]) * len(others))
            pairs = (self.meet_shapes(one, other) for one in first[kind] for other in others)
            result[kind] = unique(shape for shape in pairs if shape is not None)
        return result

    def meet_shapes(self, first: Shape, second: Shape) -> Shape | None:
        """Both at once; None where that is seen to be impossible."""
        for one, other in ((first, second), (second, first)):
            if one.among is not None:
                kept = tuple(value for value in one.among if self.admits(other, value))
                return replace(one, among=kept) if kept else None
        match first, second:
            case Number(), Number():
                return _meet_numbers(first, second)
            case String(), String():
                return _meet_strings(first, second)
            case Array(), Array():
                return _meet_arrays(first, second)
            case Object(), Object():
                return self._meet_objects(first, second)
        raise AssertionError("shapes of one kind meet")

    def _meet_objects(self, first: Object, second: Object) -> Object | None:
        required = tuple(dict.fromkeys(first.required + second.required))
        most = _least_of(first.most, second.most)
        parts = tuple(dict.fromkeys(first.parts + second.parts))
        self.document.spend(len(parts) * len(required) // 2 + len(parts) + len(required) + 2)
        met = Object(parts, required, max(first.least, second.least), most, first.names | second.names)
        if most is not None and max(met.least, len(required)) > most:
            return None
        if any(impossible(self.property_goal(met, name)) for name in required):
            return None
        return met

    def property_goal(self, shape: Object, name: str) -> Goal:
        """What the property of this name must satisfy."""
        goal: Goal = frozenset()
        for part in shape.parts:
            goal |= self._part_goal(part, name)
        return goal

    def _part_goal(self, part: ObjectPart, name: str) -> Goal:
        goal: Goal = frozenset()
        sure = False
        for known, inner in part.properties:
            if known == name:
                goal, sure = goal | inner, True
        for pattern, inner in part.patterns:
            if self.automaton(pattern, True).accepts(name):
                goal |= inner
                sure |= self.automaton(pattern, False).accepts(name)
        return goal if sure else goal | part.rest

    # Membership

    def admits(self, shape: Shape, value: Any) -> bool:
        if shape.among is not None and exact(value) not in [exact(each) for each in shape.among]:
            return False
        self.document.spend()
        match shape:
            case Plain():
                return True
            case Number():
                return _admits_number(shape, fraction(value))
            case String():
                return self._admits_string(shape, value)
            case Array():
                return self._admits_array(shape, value)
            case Object():
                return self._admits_object(shape, value)

    def _admits_string(self, shape: String, value: str) -> bool:
        from emberline.text.grammar.formats import PATTERNS

        if len(value) < shape.least or (shape.most is not None and len(value) > shape.most) or value in shape.without:
            return False
        for name in shape.formats:
            if name in PATTERNS and not self.automaton(f"^(?:{PATTERNS[name]})$", False).accepts(value):
                self.loosen()
                self.document.given_up.append(f"'format' {name!r}")
                return False
        for pattern, wanted in shape.patterns:
            narrow, wide = (self.automaton(pattern, each).accepts(value) for each in (False, True))
            if narrow != wide:
                self.loosen()
            if not (narrow if wanted else not wide):
                return False
        return True

    def _admits_array(self, shape: Array, value: list[Any]) -> bool:
        if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
            return False
        if shape.unique and len({exact(item) for item in value}) < len(value):
            return False
        for part in shape.parts:
            for index, item in enumerate(value):
                if not self.allows(part.prefix[index] if index < len(part.prefix) else part.rest, item):
                    return False
        for clause in shape.contains:
            n_sure = sum(self.allows(clause.goal, item) for item in value)
            n_not = sum(any(self.allows(frozenset((-n,)), item) for n in clause.goal) for item in value)
            if n_sure < clause.least or (clause.most is not None and len(value) - n_not > clause.most):
                return False
        return True

    def _admits_object(self, shape: Object, value: dict[str, Any]) -> bool:
        if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
            return False
        if not all(name in value for name in shape.required):
            return False
        return all(
            self.allows(shape.names, name) and self.allows(self.property_goal(shape, name), item)
            for name, item in value.items()
        )

    # Apart

    def apart(self, first: Goal, second: Goal, depth: int = 0) -> bool:
        """Whether it is certain that no value that is generated for the first satisfies the second."""
        both = first | second
        if impossible(both):
            return True
        if depth > MAX_COMPARED_DEPTH or any(
            abs(number) in self._open or -abs(number) in self._open for number in both
        ):
            return False
        one, other = self.values(first), self.values(second)
        if second in self._loose:
            return False
        return all(
            self.shapes_apart(left, right, depth)
            for kind in KINDS
            for left in shapes(one, kind)
            for right in shapes(other, kind)
        )

    def shapes_apart(self, first: Shape, second: Shape, depth: int = 0) -> bool:
        self.document.spend()
        if isinstance(first, String) and isinstance(second, String):
            first, second = replace(first, formats=frozenset()), replace(second, formats=frozenset())
            if (first.patterns or second.patterns) and first.among is None and second.among is None:
                return self._patterns_apart(first, second)
        if isinstance(first, Object) and isinstance(second, Object) and self._tagged_apart(first, second):
            return True
        met = self.meet_shapes(first, second)
        if met is None:
            return True
        if isinstance(met, Object) and isinstance(first, Object) and isinstance(second, Object):
            return met.among is None and any(
                self.apart(self.property_goal(first, name), self.property_goal(second, name), depth + 1)
                for name in met.required
            )
        if isinstance(met, Array) and isinstance(first, Array) and isinstance(second, Array):
            return met.among is None and any(
                self.apart(item_goal(first, index), item_goal(second, index), depth + 1)
                for index in range(min(met.least, 8))
            )
        return isinstance(met, Number) and met.among is None and _no_integer(met)

    def _tagged_apart(self, first: Object, second: Object) -> bool:
        """By a property that both must have, with fixed values that differ: how unions are usually told apart."""
        one, other = self._tags(first), self._tags(second)
        return any(name in other and one[name].isdisjoint(other[name]) for name in one)

    def _tags(self, shape: Object) -> dict[str, frozenset[Any]]:
        if shape.among is not None:
            return {}
        found = self._tagged.get(shape)
        if found is None:
            found = {}
            for name in shape.required:
                goal = self.property_goal(shape, name)
                if impossible(goal) or any(n in self._open or -n in self._open for n in goal) or self.is_loose(goal):
                    continue
                values = [each for kind in KINDS for each in shapes(self.values(goal), kind)]
                if all(each.among is not None for each in values):
                    found[name] = frozenset(exact(value) for each in values for value in each.among or ())
            self._tagged[shape] = found
        return found

    def _patterns_apart(self, first: String, second: String) -> bool:
        """By the widest reading of what must, the narrowest of what must not be found."""
        if _meet_strings(first, second) is None:
            return True
        found: Automaton | None = None
        for pattern, wanted in sorted(first.patterns | second.patterns):
            each = self.automaton(pattern, wanted)
            each = each if wanted else automaton.complement(each)
            found = each if found is None else automaton.intersect(found, each)
        return found is not None and found.shortest() is None


def item_goal(shape: Array, index: int) -> Goal:
    goal: Goal = frozenset()
    for part in shape.parts:
        goal |= part.prefix[index] if index < len(part.prefix) else part.rest
    return goal


def rest_goal(shape: Array) -> Goal:
    return item_goal(shape, max((len(part.prefix) for part in shape.parts), default=0))


def _least_of(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else min(first, second)


def _higher(first: Bound | None, second: Bound | None) -> Bound | None:
    return second if first is None else first if second is None else max(first, second)


def _lower(first: Bound | None, second: Bound | None) -> Bound | None:
    if first is None or second is None:
        return first or second
    return min(first, second, key=lambda bound: (bound[0], not bound[1]))


def _meet_numbers(first: Number, second: Number) -> Number | None:
    if first.integral is not None and second.integral is not None and first.integral != second.integral:
        return None
    low, high = _higher(first.low, second.low), _lower(first.high, second.high)
    if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    return Number(
        first.integral if second.integral is None else second.integral,
        low,
        high,
        first.multiples | second.multiples,
        first.not_multiples | second.not_multiples,
        first.without | second.without,
    )


def _no_integer(shape: Number) -> bool:
    if shape.integral is not True or shape.low is None or shape.high is None:
        return False
    first = -(-shape.low[0] // 1) + (shape.low[1] and shape.low[0].denominator == 1)
    last = shape.high[0] // 1 - (shape.high[1] and shape.high[0].denominator == 1)
    return first > last


def _admits_number(shape: Number, value: Any) -> bool:
    if shape.integral is not None and (value.denominator == 1) != shape.integral:
        return False
    if shape.low is not None and (value < shape.low[0] or (shape.low[1] and value == shape.low[0])):
        return False
    if shape.high is not None and (value > shape.high[0] or (shape.high[1] and value == shape.high[0])):
        return False
    return (
        value not in shape.without
        and all((value / each).denominator == 1 for each in shape.multiples)
        and not any((value / each).denominator == 1 for each in shape.not_multiples)
    )


def _meet_strings(first: String, second: String) -> String | None:
    least, most = max(first.least, second.least), _least_of(first.most, second.most)
    if most is not None and least > most:
        return None
    patterns = first.patterns | second.patterns
    if any((pattern, not wanted) in patterns for pattern, wanted in patterns):
        return None
    return String(least, most, patterns, first.formats | second.formats, first.without | second.without)


def _meet_arrays(first: Array, second: Array) -> Array | None:
    least, most = max(first.least, second.least), _least_of(first.most, second.most)
    contains: tuple[Contains, ...] = tuple(dict.fromkeys(first.contains + second.contains))
    met = Array(tuple(dict.fromkeys(first.parts + second.parts)), least, most, first.unique or second.unique, contains)
    least = max([least, *(clause.least for clause in contains)])
    if most is not None and least > most:
        return None
    if any(impossible(item_goal(met, index)) for index in range(min(least, 32))):
        return None
    return met
