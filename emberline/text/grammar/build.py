"""A whole grammar from its spec: thinking, then the output or tool calls."""

from typing import Any

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Expression, Grammar, Text
from emberline.protocol.request import OutputFormat
from emberline.text.grammar.builder import Builder, choice
from emberline.text.grammar.ebnf import grammar_expression
from emberline.text.grammar.regex import regex_expression
from emberline.text.grammar.schema import object_expression, schema_expression
from emberline.text.grammar.spec import GrammarSpec
from emberline.text.tool_calls.grammar import reply_expression

MAX_CHOICES = 10_000
MAX_CHOICE_CHARACTERS = 256 << 10


def build(spec: GrammarSpec) -> Grammar:
    """Raises BadInput where the spec is at fault."""
    builder = Builder()
    output = None if spec.output is None else output_expression(builder, spec.output)
    grammar = builder.finish(reply_expression(builder, spec, output))
    if grammar is None:
        raise BadInput("no reply can satisfy the demanded format: its constraints contradict each other")
    return grammar


def output_expression(builder: Builder, output: OutputFormat) -> Expression:
    match output.kind:
        case "json_object":
            return object_expression(builder)
        case "json_schema":
            return schema_expression(builder, output.value)
        case "regex":
            return regex_expression(builder, output.value)
        case "choice":
            return choice_expression(output.value)
        case "grammar":
            return grammar_expression(builder, output.value)


def choice_expression(values: Any) -> Expression:
    if not isinstance(values, list | tuple) or not values or not all(isinstance(value, str) for value in values):
        raise BadInput("a choice must be a list of at least one string", param="output")
    if len(values) > MAX_CHOICES or sum(map(len, values)) > MAX_CHOICE_CHARACTERS:
        raise BadInput(
            f"a choice may have {MAX_CHOICES} strings of {MAX_CHOICE_CHARACTERS} characters together, not more",
            param="output",
        )
    if any(not value for value in values):
        raise BadInput("a choice must not contain an empty string", param="output")
    return choice(Text(value) for value in values)
