"""The grammar of a whole reply: reasoning, then the output format or tool calls.

A `GrammarSpec` is plain data: it is hashed for the cache and sent to the compiler process.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, Free, Grammar, Text, Token
from emberline.protocol.request import OutputFormat, Tool
from emberline.text.grammar.expressions.builder import EMPTY, Builder, choice, optional, repeat, sequence
from emberline.text.grammar.expressions.ebnf import grammar_expression
from emberline.text.grammar.expressions.regex import regex_expression
from emberline.text.grammar.harmony_grammar import harmony_expression
from emberline.text.grammar.json_schema.compile import any_object_expression, schema_expression
from emberline.text.grammar.loose_grammar import text_or_calls
from emberline.text.grammar.tagged_grammar import spelled, tagged_expression
from emberline.text.tool_calls.formats import FORMATS_BY_FAMILY, ToolCallFormat, split_tokens


class ToolCallSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tool calls in the format of one model family."""

    tools: tuple[Tool, ...]
    mode: Literal["auto", "none", "required"]  # "none": text that contains no opening of a call
    parallel: bool
    family: str  # a key of `FORMATS_BY_FAMILY`
    token_ids: dict[str, int] = {}  # the format's markers that are special tokens of this model


class ReasoningSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """End marker of reasoning and, where the prompt has not begun it, the marker with which the reply may begin it."""

    end: str  # e.g. "</think>"
    end_id: int | None = None  # if the end is a special token; otherwise `end` is plain text
    after: tuple[str, ...] = ()  # optional texts between the end and the reply, e.g. "\n\n"
    start: str = ""  # empty: the prompt has begun it
    start_id: int | None = None  # if the start is a special token


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """At least one of `output` and `tools` is set. With both, the reply is one or the other."""

    output: OutputFormat | None = None
    tools: ToolCallSpec | None = None
    reasoning: ReasoningSpec | None = None
    channels: dict[str, int] = {}  # the special tokens of a reply in the Harmony format; empty: it has another


MAX_TOOL_CALLS = 32  # in one reply: ends a model that repeats itself
_UNCONSTRAINING = {"type", "properties", "required", "title", "description", "$schema"}
_DIGIT = Chars(((ord("0"), ord("9")),))


def reply_expression(builder: Builder, spec: GrammarSpec, output: Expression | None) -> Expression:
    """The whole reply. `output`: what its text must match; None: any text."""
    calls: Expression | None = None
    openings: tuple[str, ...] = ()
    arguments: dict[str, Expression] = {}
    if spec.tools is None:
        body = output if output is not None else Free()
        if spec.channels:
            return harmony_expression(builder, spec.channels, body, None)
    else:
        format = FORMATS_BY_FAMILY[spec.tools.family].at(spec.tools.token_ids)
        openings = tuple(opening for opening in format.openings if opening not in format.tokens)
        if spec.tools.mode != "none":
            arguments = {tool.name: builder.add(_arguments(builder, tool, format)) for tool in spec.tools.tools}
            calls = _calls(builder, arguments, format, _most_calls(spec.tools, format))
        if spec.channels:
            answer = None if spec.tools.mode == "required" else output or Free()
            return harmony_expression(builder, spec.channels, answer, calls)
        body = _body(builder, spec.tools, format, openings, arguments, calls, output)
        if format.alone:  # such calls begin like text, so reasoning cannot end in one
            calls, openings = None, ()
    return body if spec.reasoning is None else _reasoning(builder, spec.reasoning, openings, calls, body)


def _body(
    builder: Builder,
    tools: ToolCallSpec,
    format: ToolCallFormat,
    openings: tuple[str, ...],
    arguments: Mapping[str, Expression],
    calls: Expression | None,
    output: Expression | None,
) -> Expression:
    """The part after reasoning."""
    if calls is None:
        return output if output is not None else Free(openings)
    if tools.mode == "required":
        return calls
    if output is not None:
        return choice([output, calls])
    if format.alone:
        return choice([Free(openings), calls])
    if format.loose:
        return text_or_calls(builder, openings, arguments, calls, _most_calls(tools, format))
    return choice([Free(openings), sequence(Free(openings), calls)])


def _reasoning(
    builder: Builder, format: ReasoningSpec, openings: tuple[str, ...], calls: Expression | None, body: Expression
) -> Expression:
    """Reasoning, ended by its delimiter or by a call, and the part behind it."""
    gap = choice([*(Text(text) for text in format.after), EMPTY]) if format.after else EMPTY
    body = builder.add(body)
    ended = sequence(_delimiter(format.end, format.end_id), gap, body)
    forbidden = openings if format.end_id is not None else (format.end, *openings)
    thought = Free(forbidden)
    reasoning = choice(sequence(thought, end) for end in (ended, calls) if end is not None)
    return choice([sequence(_delimiter(format.start, format.start_id), reasoning), body]) if format.start else reasoning


def _most_calls(tools: ToolCallSpec, format: ToolCallFormat) -> int:
    return MAX_TOOL_CALLS if tools.parallel and format.parallel else 1


def _calls(builder: Builder, arguments: Mapping[str, Expression], format: ToolCallFormat, most: int) -> Expression:
    call = _call(arguments, format)
    more = repeat(sequence(spelled(format.between, format), builder.add(call)), 0, most - 1)
    # A model may end its turn after the line break that follows a call: the line break must not bind it to call again.
    ends_spaced = most > 1 and not format.close and format.between.isspace()
    end = optional(Text(format.between)) if ends_spaced else spelled(format.close, format)
    return sequence(_begin(format), call, more, end)


def _call(arguments: Mapping[str, Expression], format: ToolCallFormat) -> Expression:
    number = sequence(Text(format.number), repeat(_DIGIT, 1, 4)) if format.number else EMPTY
    before = sequence(number, spelled(format.arguments, format))
    named = [sequence(Text(name), before, value) for name, value in arguments.items()]
    return sequence(spelled(format.call, format), Text(format.prefix), choice(named), spelled(format.end, format))


def _arguments(builder: Builder, tool: Tool, format: ToolCallFormat) -> Expression:
    """The arguments that match the tool's schema. A keyword that JSON Schema does not define is an error of a strict
    tool only."""
    if format.tags is not None:
        return tagged_expression(builder, tool, format)
    if not tool.parameters:
        return any_object_expression(builder) if not tool.strict else Text("{}")
    if tool.parameters.get("properties") == {} and tool.parameters.keys() <= _UNCONSTRAINING:
        return Text("{}")  # it takes no arguments; the schema alone would allow any
    try:
        return schema_expression(builder, {"type": "object", **tool.parameters}, "tools", lenient=not tool.strict)
    except BadInput as error:
        raise BadInput(f"tool {tool.name}: {error.message}", param="tools") from None


def _begin(format: ToolCallFormat) -> Expression:
    """Models whose tokenizer puts a space behind special tokens may generate it."""
    pieces = split_tokens(format.begin, format.tokens)
    if len(pieces) == 2 and isinstance(pieces[0], int) and isinstance(pieces[1], str):
        return sequence(Token(pieces[0]), optional(Text(" ")), Text(pieces[1]))
    return spelled(format.begin, format)


def _delimiter(text: str, token_id: int | None) -> Expression:
    return Text(text) if token_id is None else Token(token_id)


MAX_CHOICES = 10_000
MAX_CHOICE_CHARACTERS = 256 << 10


def build(spec: GrammarSpec) -> Grammar:
    """Compiles a spec; BadInput says what is wrong with it."""
    builder = Builder()
    output = None if spec.output is None else output_expression(builder, spec.output)
    grammar = builder.finish(reply_expression(builder, spec, output))
    if grammar is None:
        raise BadInput("no reply can satisfy the requested format: its constraints contradict each other")
    return grammar


def output_expression(builder: Builder, output: OutputFormat) -> Expression:
    match output.kind:
        case "json_object":
            return any_object_expression(builder)
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
