"""Sets of JSON values and their algebra: union, intersection, membership and disjointness, one JSON type at a time.

A schema denotes a `ValueSet`: for each JSON type a union of typed sets, each a conjunction of constraints. Sub-schemas
of items and properties stay references (`Conjunction`), so recursive schemas are finite here.
Every operation may lose values (an under-approximation, which `SetAlgebra.mark_inexact` records) but never adds one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, TypeAlias

from emberline.text.grammar.expressions import character_dfa
from emberline.text.grammar.expressions.character_dfa import CharacterDfa
from emberline.text.grammar.expressions.regex import parse
from emberline.text.grammar.json_schema.document import TRUE, Conjunction, Document, Node, contradictory

JSON_TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
MAX_COMPARED_DEPTH = 4

Bound: TypeAlias = tuple[Fraction, bool]  # (value, whether the value itself is excluded)


@dataclass(frozen=True, slots=True)
class ConstantSet:
    """null and booleans."""

    members: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class NumberSet:
    integral: bool | None = None  # True: only integers; False: only others; None: both
    low: Bound | None = None
    high: Bound | None = None
    multiples: frozenset[Fraction] = frozenset()
    not_multiples: frozenset[Fraction] = frozenset()
    excluded: frozenset[Fraction] = frozenset()
    members: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class StringSet:
    least: int = 0
    most: int | None = None
    patterns: frozenset[tuple[str, bool]] = frozenset()  # (pattern, whether it must or must not be found)
    formats: frozenset[tuple[str, str]] = frozenset()  # (name, pattern of the whole string)
    excluded: frozenset[str] = frozenset()
    members: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class ItemsConstraint:
    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = TRUE
    explicit: bool = False  # the schema constrains the rest
    evaluates: bool = True  # counts for `unevaluatedItems`


@dataclass(frozen=True, slots=True)
class ContainsConstraint:
    schemas: Conjunction
    least: int
    most: int | None
    evaluates: bool = True


@dataclass(frozen=True, slots=True)
class ArraySet:
    constraints: tuple[ItemsConstraint, ...] = ()
    least: int = 0
    most: int | None = None
    unique: bool = False
    contains: tuple[ContainsConstraint, ...] = ()
    members: tuple[Any, ...] | None = None

    @property
    def n_prefix(self) -> int:
        return max((len(constraint.prefix) for constraint in self.constraints), default=0)

    @property
    def rest(self) -> Conjunction:
        """The sub-schemas of the items behind every prefix."""
        return self.item(self.n_prefix)

    def item(self, index: int) -> Conjunction:
        """The sub-schemas of one item."""
        return TRUE.union(*(c.prefix[index] if index < len(c.prefix) else c.rest for c in self.constraints))


@dataclass(frozen=True, slots=True)
class PropertiesConstraint:
    properties: tuple[tuple[str, Conjunction], ...] = ()
    patterns: tuple[tuple[str, Conjunction], ...] = ()
    rest: Conjunction = TRUE
    explicit: bool = False  # the schema constrains further properties
    evaluates: bool = True  # counts for `unevaluatedProperties`
    declares: bool = True  # the named properties are generated; otherwise they are only constrained


@dataclass(frozen=True, slots=True)
class ObjectSet:
    constraints: tuple[PropertiesConstraint, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: Conjunction = TRUE
    members: tuple[Any, ...] | None = None

    @staticmethod
    def having(name: str, schemas: Conjunction, required: bool = True) -> "ObjectSet":
        """Objects whose property `name`, if they have it, satisfies `schemas`: of a negation or a dependency."""
        constraint = PropertiesConstraint(((name, schemas),), evaluates=False, declares=False)
        return ObjectSet((constraint,), required=(name,) if required else ())


TypedSet: TypeAlias = ConstantSet | NumberSet | StringSet | ArraySet | ObjectSet

# Unions of typed sets by JSON type. A type that is missing is unconstrained; an empty tuple forbids the type.
ValueSet: TypeAlias = dict[str, tuple[TypedSet, ...]]

UNIVERSE: Final[dict[str, TypedSet]] = {
    "null": ConstantSet((None,)),
    "boolean": ConstantSet((True, False)),
    "number": NumberSet(),
    "string": StringSet(),
    "array": ArraySet(),
    "object": ObjectSet(),
}


def typed_sets(values: ValueSet, json_type: str) -> tuple[TypedSet, ...]:
    return values[json_type] if json_type in values else (UNIVERSE[json_type],)


def only(json_type: str, *sets: TypedSet) -> ValueSet:
    """Return a value set of these sets and no value of another type."""
    return {each: (sets if each == json_type else ()) for each in JSON_TYPES}


def nothing() -> ValueSet:
    return dict.fromkeys(JSON_TYPES, ())


def union(options: list[ValueSet]) -> ValueSet:
    return {each: _deduplicated(s for option in options for s in typed_sets(option, each)) for each in JSON_TYPES}


def _deduplicated(sets: Iterable[TypedSet]) -> tuple[TypedSet, ...]:
    """Members may be lists and objects, which only their canonical form makes hashable."""
    return tuple({(each if each.members is None else canonical(each.members)): each for each in sets}.values())


def json_type_of(value: Any) -> str:
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


def canonical(value: Any) -> Any:
    """A hashable form for which JSON's equality is Python's: 1 equals 1.0 and does not equal true."""
    match value:
        case None | bool() | str():
            return (json_type_of(value), value)
        case int() | float():
            return ("number", fraction(value))
        case list() | tuple():
            return ("array", tuple(canonical(item) for item in value))
        case _:
            return ("object", frozenset((key, canonical(item)) for key, item in value.items()))


def fraction(value: Any) -> Fraction:
    """A number as it is written in decimal."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


class SetAlgebra:
    """The algebra over one schema document. `read_schema` gives the values of one sub-schema, or of its negation."""

    def __init__(self, document: Document, read_schema: Callable[["SetAlgebra", Node, bool], ValueSet]) -> None:
        self.document = document
        self._read_schema = read_schema
        self._values: dict[Conjunction, ValueSet] = {}
        self._node_sets: dict[int, ValueSet] = {}
        self._open: set[int] = set()  # sub-schemas being read
        self._frames: list[bool] = []  # of what is being read, innermost last: whether it has lost values
        self._inexact: set[Conjunction | int] = set()
        self._tags: dict[ObjectSet, dict[str, frozenset[Any]]] = {}
        self._dfas: dict[tuple[str, bool], CharacterDfa] = {}

    def values(self, schemas: Conjunction) -> ValueSet:
        """The values that satisfy all of these sub-schemas."""
        found = self._values.get(schemas)
        if found is None:
            self._frames.append(False)
            found = nothing() if contradictory(schemas) else {}
            for number in sorted(schemas, key=abs):
                found = self.intersect(found, self._node_values(number))
            self._values[schemas] = found
            self._close_frame(schemas)
        if schemas in self._inexact:
            self.mark_inexact()
        return found

    def _node_values(self, number: int) -> ValueSet:
        found = self._node_sets.get(number)
        if found is None:
            node = self.document.node(number)
            if number in self._open:
                self.document.fail(node, "the schema refers to itself without end")
            self._open.add(number)
            self._frames.append(False)
            self.document.spend()
            found = self._read_schema(self, node, number < 0)
            self._open.discard(number)
            self._node_sets[number] = found
            self._close_frame(number)
        if number in self._inexact:
            self.mark_inexact()
        return found

    def mark_inexact(self) -> None:
        """Record that the value set being read has lost values, so that nothing may be concluded from a value's
        absence."""
        if self._frames:
            self._frames[-1] = True

    def _close_frame(self, owner: Conjunction | int) -> None:
        if self._frames.pop():
            self._inexact.add(owner)

    def drop(self, node: Node, keyword: str) -> None:
        """Some values that the keyword allows are not in its set."""
        self.document.note_dropped(node, keyword)
        self.mark_inexact()

    def is_inexact(self, schemas: Conjunction) -> bool:
        self.values(schemas)
        return schemas in self._inexact

    def dfa(self, pattern: str, wide: bool) -> CharacterDfa:
        """The DFA of the texts in which the pattern is found; see `regex` for the wide and the narrow reading."""
        key = (pattern, wide)
        if key not in self._dfas:
            tree = parse(pattern, search=True, wide=wide, param=self.document.param)
            self._dfas[key] = character_dfa.from_expression(tree)
            self.document.spend(len(self._dfas[key].edges))
        return self._dfas[key]

    def format_dfa(self, pattern: str) -> CharacterDfa:
        return self.dfa(f"^(?:{pattern})$", False)

    # --- intersection ------------------------------------------------------------------------------------------------

    def intersect(self, first: ValueSet, second: ValueSet) -> ValueSet:
        result = dict(first)
        for json_type, others in second.items():
            if json_type not in first:
                result[json_type] = others
                continue
            self.document.spend(len(first[json_type]) * len(others))
            pairs = (self.intersect_typed(one, other) for one in first[json_type] for other in others)
            result[json_type] = _deduplicated(each for each in pairs if each is not None)
        return result

    def intersect_typed(self, first: TypedSet, second: TypedSet) -> TypedSet | None:
        """The intersection of two sets of one type; None where it is known to be empty."""
        for one, other in ((first, second), (second, first)):
            if one.members is not None:
                kept = tuple(value for value in one.members if self.is_member(other, value))
                return replace(one, members=kept) if kept else None
        match first, second:
            case NumberSet(), NumberSet():
                return _intersect_numbers(first, second)
            case StringSet(), StringSet():
                return _intersect_strings(first, second)
            case ArraySet(), ArraySet():
                return _intersect_arrays(first, second)
            case ObjectSet(), ObjectSet():
                return self._intersect_objects(first, second)
        raise AssertionError("only sets of one type are intersected")

    def _intersect_objects(self, first: ObjectSet, second: ObjectSet) -> ObjectSet | None:
        required = tuple(dict.fromkeys(first.required + second.required))
        most = _smaller(first.most, second.most)
        constraints = tuple(dict.fromkeys(first.constraints + second.constraints))
        self.document.spend(len(constraints) * len(required) // 2 + len(constraints) + len(required) + 2)
        both = ObjectSet(constraints, required, max(first.least, second.least), most, first.names | second.names)
        if most is not None and max(both.least, len(required)) > most:
            return None
        return None if any(contradictory(self.property_schemas(both, name)) for name in required) else both

    def property_schemas(self, objects: ObjectSet, name: str) -> Conjunction:
        """The sub-schemas that the property of this name must satisfy."""
        return TRUE.union(*(self._constrained(constraint, name) for constraint in objects.constraints))

    def _constrained(self, constraint: PropertiesConstraint, name: str) -> Conjunction:
        schemas, declared = TRUE, False
        for known, inner in constraint.properties:
            if known == name:
                schemas, declared = schemas | inner, True
        for pattern, inner in constraint.patterns:
            if self.dfa(pattern, True).accepts(name):
                schemas |= inner
                declared |= self.dfa(pattern, False).accepts(name)
        return schemas if declared else schemas | constraint.rest

    # --- membership --------------------------------------------------------------------------------------------------

    def allows(self, schemas: Conjunction, value: Any) -> bool:
        """True if the sub-schemas are known to allow the value."""
        if contradictory(schemas):
            return False
        return any(self.is_member(each, value) for each in typed_sets(self.values(schemas), json_type_of(value)))

    def is_member(self, typed: TypedSet, value: Any) -> bool:
        if typed.members is not None and canonical(value) not in [canonical(each) for each in typed.members]:
            return False
        self.document.spend()
        match typed:
            case ConstantSet():
                return True
            case NumberSet():
                return has_number(typed, fraction(value))
            case StringSet():
                return self._has_string(typed, value)
            case ArraySet():
                return self._has_array(typed, value)
            case ObjectSet():
                return self._has_object(typed, value)

    def _has_string(self, strings: StringSet, value: str) -> bool:
        if not _within(strings, len(value)) or value in strings.excluded:
            return False
        for name, pattern in strings.formats:
            if not self.format_dfa(pattern).accepts(value):
                self.mark_inexact()
                self.document.dropped.append(f"'format' {name!r}")
                return False
        for pattern, wanted in strings.patterns:
            narrow, wide = (self.dfa(pattern, each).accepts(value) for each in (False, True))
            if narrow != wide:
                self.mark_inexact()
            if not (narrow if wanted else not wide):
                return False
        return True

    def _has_array(self, arrays: ArraySet, value: list[Any]) -> bool:
        if not _within(arrays, len(value)):
            return False
        if arrays.unique and len({canonical(item) for item in value}) < len(value):
            return False
        for constraint in arrays.constraints:
            for index, item in enumerate(value):
                prefix = constraint.prefix
                if not self.allows(prefix[index] if index < len(prefix) else constraint.rest, item):
                    return False
        for clause in arrays.contains:
            n_matching = sum(self.allows(clause.schemas, item) for item in value)
            n_failing = sum(any(self.allows(frozenset((-n,)), item) for n in clause.schemas) for item in value)
            if n_matching < clause.least or (clause.most is not None and len(value) - n_failing > clause.most):
                return False
        return True

    def _has_object(self, objects: ObjectSet, value: dict[str, Any]) -> bool:
        if not _within(objects, len(value)) or not all(name in value for name in objects.required):
            return False
        return all(
            self.allows(objects.names, name) and self.allows(self.property_schemas(objects, name), item)
            for name, item in value.items()
        )

    # --- disjointness ------------------------------------------------------------------------------------------------

    def disjoint(self, first: Conjunction, second: Conjunction, depth: int = 0) -> bool:
        """True if certainly no value generated for the first conjunction satisfies the second."""
        both = first | second
        if contradictory(both):
            return True
        if depth > MAX_COMPARED_DEPTH or self._being_read(both):
            return False
        one, other = self.values(first), self.values(second)
        return second not in self._inexact and all(
            self.disjoint_typed(left, right, depth)
            for json_type in JSON_TYPES
            for left in typed_sets(one, json_type)
            for right in typed_sets(other, json_type)
        )

    def _being_read(self, schemas: Conjunction) -> bool:
        return any(number in self._open or -number in self._open for number in schemas)

    def disjoint_typed(self, first: TypedSet, second: TypedSet, depth: int = 0) -> bool:
        self.document.spend()
        if isinstance(first, StringSet) and isinstance(second, StringSet):
            # A format may be a mere annotation: it proves nothing.
            first, second = replace(first, formats=frozenset()), replace(second, formats=frozenset())
            if (first.patterns or second.patterns) and first.members is None and second.members is None:
                return self._patterns_disjoint(first, second)
        if isinstance(first, ObjectSet) and isinstance(second, ObjectSet) and self._tags_disjoint(first, second):
            return True
        both = self.intersect_typed(first, second)
        if both is None:
            return True
        if both.members is not None:
            return False
        match first, second, both:
            case ObjectSet(), ObjectSet(), ObjectSet():
                return any(
                    self.disjoint(self.property_schemas(first, name), self.property_schemas(second, name), depth + 1)
                    for name in both.required
                )
            case ArraySet(), ArraySet(), ArraySet():
                indexes = range(min(both.least, 8))
                return any(self.disjoint(first.item(index), second.item(index), depth + 1) for index in indexes)
            case _, _, NumberSet():
                return _no_integer(both)
        return False

    def _tags_disjoint(self, first: ObjectSet, second: ObjectSet) -> bool:
        """True if a required property has different constant values in the two sets: the usual discriminator of tagged
        unions."""
        one, other = self._tags_of(first), self._tags_of(second)
        return any(name in other and one[name].isdisjoint(other[name]) for name in one)

    def _tags_of(self, objects: ObjectSet) -> dict[str, frozenset[Any]]:
        if objects.members is not None:
            return {}
        found = self._tags.get(objects)
        if found is None:
            found = {}
            for name in objects.required:
                schemas = self.property_schemas(objects, name)
                if contradictory(schemas) or self._being_read(schemas) or self.is_inexact(schemas):
                    continue
                sets = [each for json_type in JSON_TYPES for each in typed_sets(self.values(schemas), json_type)]
                if all(each.members is not None for each in sets):
                    found[name] = frozenset(canonical(value) for each in sets for value in each.members or ())
            self._tags[objects] = found
        return found

    def _patterns_disjoint(self, first: StringSet, second: StringSet) -> bool:
        """True if the patterns exclude each other. Patterns to be found are read widely, the others narrowly."""
        if _intersect_strings(first, second) is None:
            return True
        found: CharacterDfa | None = None
        for pattern, wanted in sorted(first.patterns | second.patterns):
            each = self.dfa(pattern, wanted)
            each = each if wanted else character_dfa.complement(each)
            found = each if found is None else character_dfa.intersect(found, each)
        return found is not None and found.shortest() is None


def _within(sized: StringSet | ArraySet | ObjectSet, n: int) -> bool:
    return n >= sized.least and (sized.most is None or n <= sized.most)


def _smaller(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else min(first, second)


def tightest_low(*bounds: Bound | None) -> Bound | None:
    return max((bound for bound in bounds if bound is not None), default=None)


def tightest_high(*bounds: Bound | None) -> Bound | None:
    given = (bound for bound in bounds if bound is not None)
    return min(given, key=lambda bound: (bound[0], not bound[1]), default=None)


def _intersect_numbers(first: NumberSet, second: NumberSet) -> NumberSet | None:
    if first.integral is not None and second.integral is not None and first.integral != second.integral:
        return None
    low, high = tightest_low(first.low, second.low), tightest_high(first.high, second.high)
    if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    return NumberSet(
        first.integral if second.integral is None else second.integral,
        low,
        high,
        first.multiples | second.multiples,
        first.not_multiples | second.not_multiples,
        first.excluded | second.excluded,
    )


def lowest_integer(bound: Bound) -> int:
    value = -(-bound[0] // 1)
    return value + 1 if bound[1] and value == bound[0] else value


def highest_integer(bound: Bound) -> int:
    value = bound[0] // 1
    return value - 1 if bound[1] and value == bound[0] else value


def _no_integer(numbers: NumberSet) -> bool:
    if numbers.integral is not True or numbers.low is None or numbers.high is None:
        return False
    return lowest_integer(numbers.low) > highest_integer(numbers.high)


def in_bounds(value: Fraction, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or value > low[0] or (value == low[0] and not low[1])
    return above and (high is None or value < high[0] or (value == high[0] and not high[1]))


def has_number(numbers: NumberSet, value: Fraction) -> bool:
    if numbers.integral is not None and (value.denominator == 1) != numbers.integral:
        return False
    return (
        in_bounds(value, numbers.low, numbers.high)
        and value not in numbers.excluded
        and all((value / step).denominator == 1 for step in numbers.multiples)
        and not any((value / step).denominator == 1 for step in numbers.not_multiples)
    )


def _intersect_strings(first: StringSet, second: StringSet) -> StringSet | None:
    least, most = max(first.least, second.least), _smaller(first.most, second.most)
    if most is not None and least > most:
        return None
    patterns = first.patterns | second.patterns
    if any((pattern, not wanted) in patterns for pattern, wanted in patterns):
        return None
    return StringSet(least, most, patterns, first.formats | second.formats, first.excluded | second.excluded)


def _intersect_arrays(first: ArraySet, second: ArraySet) -> ArraySet | None:
    least, most = max(first.least, second.least), _smaller(first.most, second.most)
    contains = tuple(dict.fromkeys(first.contains + second.contains))
    constraints = tuple(dict.fromkeys(first.constraints + second.constraints))
    both = ArraySet(constraints, least, most, first.unique or second.unique, contains)
    least = max([least, *(clause.least for clause in contains)])
    if most is not None and least > most:
        return None
    return None if any(contradictory(both.item(index)) for index in range(min(least, 32))) else both
