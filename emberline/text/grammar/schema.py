"""JSON Schema to grammar. Every text of the grammar is valid; not every valid value need have a text.

A schema is read into shapes (`keywords`, `algebra`): for each JSON type the alternatives of what its values must be
like, with sub-schemas left as goals. A goal is a set of sub-schemas that hold at once, and becomes one rule.
"""

import json
from typing import Any

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Expression, Rule, Text
from emberline.text.grammar.algebra import Algebra
from emberline.text.grammar.arrays import array_expression
from emberline.text.grammar.blame import blaming
from emberline.text.grammar.builder import NEVER, Builder, choice, separated, sequence
from emberline.text.grammar.document import Document, UnsupportedSchema
from emberline.text.grammar.goals import Goal, impossible
from emberline.text.grammar.numbers import number_expression
from emberline.text.grammar.objects import object_shape_expression
from emberline.text.grammar.shapes import KINDS, Array, Number, Object, Plain, Shape, String, shapes
from emberline.text.grammar.strings import free_string, literal, string_expression

MAX_SCHEMA_BYTES = 256 << 10


def schema_expression(builder: Builder, schema: Any, where: str = "output") -> Expression:
    """What a JSON text must be to satisfy the schema: compact, keys in the schema's order."""
    _check_size(schema, where)
    writer = Writer(builder, Document(schema, where))
    try:
        with blaming(where):
            expression = writer.goal(writer.document.root)
    except RecursionError:
        raise BadInput("the schema is nested too deep: flatten it with $defs", param=where) from None
    if not builder.possible(expression):
        if writer.document.given_up:
            raise UnsupportedSchema(
                f"the schema keyword {writer.document.given_up[0]} is not supported in this combination", param=where
            )
        raise BadInput("no value satisfies the schema: its constraints contradict each other", param=where)
    return expression


def object_expression(builder: Builder) -> Expression:
    """Any JSON object."""
    free_value(builder)
    found = builder.known("object")
    assert found is not None
    return found


def _check_size(schema: Any, where: str) -> None:
    try:
        size = len(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError, UnicodeError):
        raise BadInput("the schema is not plain JSON, or nested too deep", param=where) from None
    if size > MAX_SCHEMA_BYTES:
        raise BadInput(f"the schema takes {size >> 10} KiB; the limit is {MAX_SCHEMA_BYTES >> 10}", param=where)
    if not isinstance(schema, dict | bool):
        raise BadInput("a schema must be an object or a boolean", param=where)


def free_value(builder: Builder) -> Expression:
    """Any JSON value."""
    if found := builder.known("value"):
        return found
    number = builder.reserve("value")
    value = Rule(number)
    string = free_string(builder)
    pair = sequence(string, Text(":"), value)
    builder.define(builder.reserve("object"), sequence(Text("{"), separated(pair, Text(",")), Text("}")))
    array = sequence(Text("["), separated(value, Text(",")), Text("]"))
    scalars = [number_expression(builder, Number()), Text("true"), Text("false"), Text("null")]
    found = builder.known("object")
    assert found is not None
    builder.define(number, choice([found, array, string, *scalars]))
    return value


class Writer:
    """Writes goals as rules, each once."""

    def __init__(self, builder: Builder, document: Document) -> None:
        self.builder = builder
        self.document = document
        self.algebra = Algebra(document)
        self._waiting: list[tuple[int, Goal]] = []
        self._writing = False

    def goal(self, goal: Goal) -> Expression:
        """The rule for a goal. Rules are written one after the other, not inside each other."""
        if not goal:
            return free_value(self.builder)
        if impossible(goal):
            return NEVER
        key = (self.document, goal)  # the document, not its id: that may come back for another one
        if found := self.builder.known(key):
            return found
        number = self.builder.reserve(key)
        self._waiting.append((number, goal))
        if not self._writing:
            self._writing = True
            while self._waiting:
                self.document.spend(4)
                number_, goal_ = self._waiting.pop()
                self.builder.define(number_, self._write(goal_))
            self._writing = False
        return Rule(number)

    def _write(self, goal: Goal) -> Expression:
        values = self.algebra.values(goal)
        if not values:
            return free_value(self.builder)
        options = [self.shape(shape) for kind in KINDS for shape in shapes(values, kind)]
        return choice(options)

    def shape(self, shape: Shape) -> Expression:
        match shape:
            case Plain():
                return choice(literal(value) for value in shape.among)
            case Number():
                key = shape
                known = self.builder.known(key)
                return known or self.builder.share(key, number_expression(self.builder, shape))
            case String():
                return string_expression(self.algebra, self.builder, shape)
            case Array():
                return array_expression(self, shape)
            case Object():
                return object_shape_expression(self, shape)
