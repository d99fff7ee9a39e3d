"""Writes the values of conjunctions of sub-schemas as nonterminals of a grammar, each conjunction once."""

from collections.abc import Callable
from typing import TypeAlias

from emberline.protocol.grammar import Expression, Rule, Text
from emberline.text.grammar.expressions.builder import NEVER, Builder, choice, separated, sequence
from emberline.text.grammar.json_schema.document import Conjunction, contradictory
from emberline.text.grammar.json_schema.numbers import number_expression
from emberline.text.grammar.json_schema.set_algebra import (
    JSON_TYPES,
    ArraySet,
    ConstantSet,
    NumberSet,
    ObjectSet,
    SetAlgebra,
    StringSet,
    TypedSet,
    typed_sets,
)
from emberline.text.grammar.json_schema.strings import COLON, COMMA, free_string, literal, string_expression

ContainerExpression: TypeAlias = Callable[["GrammarWriter", ArraySet | ObjectSet], Expression]


def free_value(builder: Builder) -> Expression:
    """Any JSON value."""
    if found := builder.known("value"):
        return found
    number = builder.reserve("value")
    value = Rule(number)
    string = free_string(builder)
    pair = sequence(string, COLON, value)
    free_object = builder.share("object", sequence(Text("{"), separated(pair, COMMA), Text("}")))
    array = sequence(Text("["), separated(value, COMMA), Text("]"))
    scalars = [number_expression(builder, NumberSet()), Text("true"), Text("false"), Text("null")]
    builder.define(number, choice([free_object, array, string, *scalars]))
    return value


class GrammarWriter:
    """`container_expression` writes arrays and objects, which refer back to the writer for their items."""

    def __init__(self, builder: Builder, algebra: SetAlgebra, container_expression: ContainerExpression) -> None:
        self.builder = builder
        self.algebra = algebra
        self.document = algebra.document
        self._container_expression = container_expression
        self._waiting: list[tuple[int, Conjunction]] = []
        self._writing = False

    def nonterminal(self, schemas: Conjunction) -> Expression:
        """The values that satisfy the sub-schemas. Rules are defined one after the other, not recursively."""
        if not schemas:
            return free_value(self.builder)
        if contradictory(schemas):
            return NEVER
        key = (self.document, schemas)  # not the document's id, which may be reused
        if found := self.builder.known(key):
            return found
        number = self.builder.reserve(key)
        self._waiting.append((number, schemas))
        if not self._writing:
            self._writing = True
            while self._waiting:
                self.document.spend(4)
                waiting, its_schemas = self._waiting.pop()
                self.builder.define(waiting, self._production(its_schemas))
            self._writing = False
        return Rule(number)

    def _production(self, schemas: Conjunction) -> Expression:
        values = self.algebra.values(schemas)
        if not values:
            return free_value(self.builder)
        return choice([self.value(typed) for json_type in JSON_TYPES for typed in typed_sets(values, json_type)])

    def value(self, typed: TypedSet) -> Expression:
        """The values of one typed set."""
        if typed.members is not None:
            return choice(literal(value) for value in typed.members)
        match typed:
            case NumberSet():
                return self.builder.known(typed) or self.builder.share(typed, number_expression(self.builder, typed))
            case StringSet():
                return string_expression(self.algebra, self.builder, typed)
            case ArraySet() | ObjectSet():
                return self._container_expression(self, typed)
            case ConstantSet():
                raise AssertionError("constants are listed")
