"""JSON objects: their keywords, and expressions with declared properties in schema order, then others where the schema
asks for them."""

from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from emberline.protocol.grammar import Expression, Text
from emberline.text.grammar.expressions import character_dfa
from emberline.text.grammar.expressions.builder import EMPTY, NEVER, choice, optional, repeat, separated, sequence
from emberline.text.grammar.expressions.character_dfa import CharacterDfa
from emberline.text.grammar.expressions.regex import parse
from emberline.text.grammar.json_schema.document import FALSE, TRUE, Conjunction, Node, contradictory, negations
from emberline.text.grammar.json_schema.set_algebra import (
    ObjectSet,
    PropertiesConstraint,
    SetAlgebra,
    TypedSet,
    ValueSet,
    only,
    typed_sets,
)
from emberline.text.grammar.json_schema.strings import (
    COLON,
    COMMA,
    QUOTE,
    conjunction_dfa,
    escape,
    free_string,
    literal,
    none_of_words,
    quoted_dfa,
    string_parts,
)
from emberline.text.grammar.json_schema.writer import GrammarWriter

MAX_PATTERNS = 4  # patternProperties up to which every combination of matches is considered
MAX_COUNTED = 64

# --- keywords --------------------------------------------------------------------------------------------------------


def read_properties(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    constraint = _properties_constraint(algebra, node)
    if not negated:
        return {"object": (ObjectSet((constraint,)),)}
    found = [ObjectSet.having(name, other) for name, schemas in constraint.properties for other in negations(schemas)]
    for pattern, schemas in constraint.patterns:
        found += _counterexamples(algebra, node, constraint, pattern, schemas)
    found += _counterexamples(algebra, node, constraint, None, constraint.rest)
    return only("object", *found)


def _properties_constraint(algebra: SetAlgebra, node: Node) -> PropertiesConstraint:
    tables: list[tuple[tuple[str, Conjunction], ...]] = []
    for keyword in ("properties", "patternProperties"):
        table = node.schema.get(keyword, {})
        if not isinstance(table, dict):
            algebra.document.fail(node, f"{keyword!r} must be an object")
        rows = ((name, algebra.document.conjunction(each, node, f"/{keyword}/{name}")) for name, each in table.items())
        tables.append(tuple(rows))
    further = node.schema.get("additionalProperties")
    explicit = further is not None or bool(tables[1])
    rest = TRUE if further is None else algebra.document.conjunction(further, node, "/additionalProperties")
    return PropertiesConstraint(tables[0], tables[1], rest, explicit)


def _counterexamples(
    algebra: SetAlgebra, node: Node, constraint: PropertiesConstraint, pattern: str | None, schemas: Conjunction
) -> list[ObjectSet]:
    """Objects with a property that violates `schemas`, of one fixed name that matches the pattern (None: none)."""
    others = negations(schemas)
    if not others:
        return []
    if pattern is not None:
        names = algebra.dfa(pattern, False)
    else:
        names = character_dfa.complement(character_dfa.of_words(name for name, _ in constraint.properties))
        for each, _ in constraint.patterns:
            names = character_dfa.intersect(names, character_dfa.complement(algebra.dfa(each, True)))
    name = _readable_name(names)
    algebra.drop(node, "additionalProperties" if pattern is None else "patternProperties")
    return [] if name is None else [ObjectSet.having(name, other) for other in others]


def _readable_name(names: CharacterDfa) -> str | None:
    identifiers = character_dfa.from_expression(parse("[a-z][a-z0-9_]*", search=False))
    found = character_dfa.intersect(names, identifiers).shortest()
    return names.shortest() if found is None else found


def _names(algebra: SetAlgebra, node: Node, keyword: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        algebra.document.fail(node, f"{keyword!r} must be a list of strings")
    return tuple(dict.fromkeys(value))


def read_required(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    if isinstance(value, bool):  # draft 3 has it on the property; here its meaning is unclear
        algebra.document.fail(node, "'required' must be a list of names, next to 'properties'")
    names = _names(algebra, node, "required", value)
    if negated:
        return only("object", *(ObjectSet.having(name, FALSE, required=False) for name in names))
    return {"object": (ObjectSet(required=names),)} if names else {}


def read_property_names(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    schemas = algebra.document.conjunction(value, node, "/propertyNames")
    if not negated:
        return {"object": (ObjectSet(names=schemas),)}
    found: list[TypedSet] = []
    for other in negations(schemas):
        name = _readable_name(conjunction_dfa(algebra, other))
        algebra.drop(node, "propertyNames")
        if name is not None:
            found.append(ObjectSet.having(name, TRUE))
    return only("object", *found)


def read_dependencies(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    """dependentRequired, dependentSchemas, and draft 7's `dependencies`, which is both."""
    if not isinstance(value, dict):
        algebra.document.fail(node, "dependencies must be an object")
    values: ValueSet = {}
    violations: list[TypedSet] = []
    for name, needed in value.items():
        present: ValueSet = {"object": (ObjectSet(required=(name,)),)}
        if isinstance(needed, list | str):
            names = _names(algebra, node, "dependentRequired", [needed] if isinstance(needed, str) else needed)
            satisfied: ValueSet = {"object": (ObjectSet(required=(name, *names)),)}
            lacking = (ObjectSet.having(each, FALSE, required=False) for each in names)
            violations += (replace(each, required=(name,)) for each in lacking)
        else:
            schemas = algebra.document.conjunction(needed, node, f"/{name}")
            satisfied = algebra.intersect(present, algebra.values(schemas))
            for other in negations(schemas) if negated else ():
                violations += algebra.intersect(present, algebra.values(other))["object"]
        if not negated:
            absent = ObjectSet.having(name, FALSE, required=False)
            values = algebra.intersect(values, {"object": (*typed_sets(satisfied, "object"), absent)})
    return only("object", *violations) if negated else values


def close_unevaluated(algebra: SetAlgebra, node: Node, values: ValueSet) -> ValueSet:
    """`unevaluatedProperties`: constrains the names that no other keyword of this schema evaluates. Each branch is
    considered alone, which may lose objects that are valid only by two branches at once."""
    schemas = algebra.document.conjunction(node.schema["unevaluatedProperties"], node, "/unevaluatedProperties")
    closed: list[TypedSet] = []
    algebra.mark_inexact()
    for objects in typed_sets(values, "object"):
        assert isinstance(objects, ObjectSet)
        evaluating = [constraint for constraint in objects.constraints if constraint.evaluates]
        if evaluating and ("additionalProperties" in node.schema or any(map(_evaluates_all, evaluating))):
            closed.append(objects)
            continue
        constraint = PropertiesConstraint(
            tuple((name, TRUE) for each in evaluating for name, _ in each.properties),
            tuple((pattern, TRUE) for each in evaluating for pattern, _ in each.patterns),
            schemas,
            explicit=True,
        )
        if objects.members is not None:
            both = algebra.intersect_typed(objects, ObjectSet((constraint,)))
            closed += [] if both is None else [both]
        else:
            closed.append(replace(objects, constraints=(*objects.constraints, constraint)))
    return {**values, "object": tuple(closed)}


def _evaluates_all(constraint: PropertiesConstraint) -> bool:
    return constraint.explicit and (constraint.rest != TRUE or not constraint.patterns)


# --- expressions -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Property:
    pair: Expression  # "name": value
    required: bool


@dataclass(slots=True)
class _OtherNames:
    """A class of names that are not declared, and the sub-schemas of their values."""

    names: CharacterDfa | None  # None: every name that is not declared
    schemas: Conjunction


def object_expression(
    writer: GrammarWriter, objects: ObjectSet, given: dict[str, Expression] | None = None
) -> Expression:
    """`given`: for some properties the value to write instead of all that the schema allows."""
    names = _declared_names(objects)
    properties: list[_Property] = []
    for name in names:
        schemas = writer.algebra.property_schemas(objects, name)
        required = name in objects.required
        if contradictory(schemas) or not writer.algebra.allows(objects.names, name):
            if required:
                return NEVER
            continue
        value = given[name] if given and name in given else writer.nonterminal(schemas)
        properties.append(_Property(sequence(literal(name), COLON, value), required))
    others: list[_OtherNames] = []
    if _wants_others(objects) or objects.least > len(properties):
        others = _other_names(writer, objects, names)
    return sequence(Text("{"), _Body(writer, objects, properties, others, names).expression(), Text("}"))


def _declared_names(objects: ObjectSet) -> list[str]:
    """The declared property names in schema order; names that only negations mention come last."""
    declared = [name for each in objects.constraints if each.declares for name, _ in each.properties]
    mentioned = [name for each in objects.constraints for name, _ in each.properties]
    return list(dict.fromkeys([*declared, *objects.required, *mentioned]))


def _wants_others(objects: ObjectSet) -> bool:
    """An object with declared properties has no others unless the schema mentions further properties."""
    declares = any(each.properties and each.declares for each in objects.constraints)
    return any(each.explicit for each in objects.constraints) or not (declares or objects.required)


def _other_names(writer: GrammarWriter, objects: ObjectSet, names: list[str]) -> list[_OtherNames]:
    """Classes of undeclared names, by which of the patternProperties they match."""
    patterns = list(dict.fromkeys(pattern for each in objects.constraints for pattern, _ in each.patterns))
    if not patterns and objects.names == TRUE:
        schemas = _rest(objects, frozenset())
        return [] if contradictory(schemas) else [_OtherNames(None, schemas)]
    base = character_dfa.complement(character_dfa.of_words(names))
    if objects.names != TRUE:
        base = character_dfa.intersect(base, conjunction_dfa(writer.algebra, objects.names))
    found: list[_OtherNames] = []
    for matched in _pattern_subsets(patterns):
        writer.document.spend(10)
        schemas = _rest(objects, matched)
        if contradictory(schemas):
            continue
        each = base
        for pattern in patterns:
            matching = writer.algebra.dfa(pattern, pattern not in matched)
            each = character_dfa.intersect(each, matching if pattern in matched else character_dfa.complement(matching))
        if each.shortest() is not None:
            found.append(_OtherNames(each, schemas))
    return found


def _pattern_subsets(patterns: list[str]) -> list[frozenset[str]]:
    if len(patterns) > MAX_PATTERNS:
        return [frozenset(), *(frozenset((pattern,)) for pattern in patterns)]
    picks = product((True, False), repeat=len(patterns))
    return [frozenset(p for p, picked in zip(patterns, row) if picked) for row in picks]


def _rest(objects: ObjectSet, matched: frozenset[str]) -> Conjunction:
    """The sub-schemas of a property that is not declared and matches these patterns."""
    schemas = TRUE
    for constraint in objects.constraints:
        inner = [each for pattern, each in constraint.patterns if pattern in matched]
        schemas = schemas.union(*inner) if inner else schemas | constraint.rest
    return schemas


class _Body:
    """Writes the text between the braces of one object set."""

    def __init__(
        self,
        writer: GrammarWriter,
        objects: ObjectSet,
        properties: list[_Property],
        others: list[_OtherNames],
        names: list[str],
    ) -> None:
        self._writer, self._builder = writer, writer.builder
        self._objects, self._properties, self._others, self._names = objects, properties, others, names
        self._other = self._builder.add(choice([self._other_pair(each) for each in others])) if others else NEVER

    def expression(self) -> Expression:
        objects, n_required = self._objects, sum(each.required for each in self._properties)
        most_holds = objects.most is None or (not self._others and len(self._properties) <= objects.most)
        if most_holds and (objects.least <= n_required or objects.least == 1):
            return self._in_order(may_be_empty=objects.least == 0)
        return self._counted()

    def _other_pair(self, other: _OtherNames) -> Expression:
        if other.names is not None:
            key = quoted_dfa(other.names, self._builder)
        elif self._names:
            key = sequence(QUOTE, escape(none_of_words(frozenset(self._names))), QUOTE)
        else:
            key = free_string(self._builder)
        return sequence(key, COLON, self._writer.nonterminal(other.schemas))

    def _in_order(self, may_be_empty: bool) -> Expression:
        """Each property once or, if optional, not at all; the first that is written has no comma before it."""
        properties, other = self._properties, self._other
        tail: Expression = repeat(sequence(COMMA, other)) if other != NEVER else EMPTY
        first_required = next((index for index, each in enumerate(properties) if each.required), len(properties))
        starts: list[Expression] = []
        if first_required == len(properties):
            if other != NEVER:
                starts.append(separated(other, COMMA, 1))
            if may_be_empty:
                starts.append(EMPTY)
        for index in reversed(range(len(properties))):
            each = properties[index]
            if index <= first_required:
                starts.append(sequence(each.pair, tail))
            following = sequence(COMMA, each.pair)
            tail = sequence(following if each.required else optional(following), tail)
            if 0 < index <= first_required:
                tail = self._builder.add(tail)
        return choice(reversed(starts))

    def _counted(self) -> Expression:
        """Like `_in_order`, with bounds on the number of properties: one rule for each position and count."""
        properties = self._properties
        most = len(properties) + MAX_COUNTED if self._objects.most is None else self._objects.most
        rules: dict[tuple[int, int], Expression] = {}

        def from_property(index: int, n_written: int) -> Expression:
            key = (index, n_written)
            if key in rules:
                return rules[key]
            self._writer.document.spend()
            if index == len(properties):
                return self._counted_others(n_written)
            options: list[Expression] = []
            if n_written < most:
                pair = sequence(COMMA if n_written else EMPTY, properties[index].pair)
                options.append(sequence(pair, from_property(index + 1, n_written + 1)))
            if not properties[index].required:
                options.append(from_property(index + 1, n_written))
            rules[key] = self._builder.add(choice(options))
            return rules[key]

        return from_property(0, 0)

    def _counted_others(self, n_written: int) -> Expression:
        """Names that are not declared, as many as `least` still needs; those that count must differ."""
        other = self._other
        needed = max(0, self._objects.least - n_written)
        most = None if self._objects.most is None else self._objects.most - n_written
        if most is not None and needed > most:
            return NEVER
        if not needed:
            if most == 0 or other == NEVER:
                return EMPTY
            more = repeat(sequence(COMMA, other), 0, None if most is None else most - (0 if n_written else 1))
            return more if n_written else optional(sequence(other, more))
        pairs, finite = ([other], False) if needed == 1 and other != NEVER else self._distinct_pairs(needed)
        if len(pairs) < needed:
            if not finite:
                self._writer.document.dropped.append("'minProperties'")
            return NEVER
        counted = sequence(pairs[0], *(sequence(COMMA, pair) for pair in pairs[1:]))
        spare = None if most is None else most - needed
        more = repeat(sequence(COMMA, other), 0, spare) if spare != 0 and other != NEVER else EMPTY
        return sequence(COMMA if n_written else EMPTY, counted, more)

    def _distinct_pairs(self, needed: int) -> tuple[list[Expression], bool]:
        """Pairs whose names differ, and whether these are all. A small class of names is listed, another is split by
        length or by first characters."""
        found: list[Expression] = []
        taken: set[str] = set()
        finite = True
        for other in self._others:
            dfa = other.names or character_dfa.complement(character_dfa.of_words(self._names))
            words = dfa.words(4 * needed)
            value = self._writer.nonterminal(other.schemas)
            if words is not None:
                for word in words:
                    if word not in taken and len(found) < needed:
                        taken.add(word)
                        found.append(sequence(literal(word), COLON, value))
                continue
            finite = False
            if found:  # names of this class could repeat those of another
                continue
            found = [sequence(names, COLON, value) for names in self._disjoint_names(dfa, needed)]
        return found, finite

    def _disjoint_names(self, names: CharacterDfa, needed: int) -> list[Expression]:
        lengths = (character_dfa.of_length(names, length, length) for length in range(1, MAX_COUNTED + 1))
        possible = (each for each in lengths if each.shortest() is not None)
        parts = [quoted_dfa(each, self._builder) for each in islice(possible, needed)]
        if len(parts) < needed:
            parts = string_parts(self._writer.algebra, self._builder, names, needed)[:needed]
        return parts
