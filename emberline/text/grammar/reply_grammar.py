"""A whole grammar from its spec: thinking, then the output or tool calls."""

from typing import Any, Literal

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, Free, Grammar, Text, Token
from emberline.protocol.request import OutputFormat, Tool
from emberline.text.grammar.builder import EMPTY, Builder, choice, optional, repeat, sequence
from emberline.text.grammar.ebnf import grammar_expression
from emberline.text.grammar.json_schema.compile import any_object_expression, schema_expression
from emberline.text.grammar.json_schema.document import UnsupportedSchema
from emberline.text.grammar.regex import regex_expression
from emberline.text.tool_calls.formats import FORMS, ToolForm, split_tokens


class ToolGrammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tool calls as one model family writes them."""

    tools: tuple[Tool, ...]
    mode: Literal["auto", "none", "required"]  # "none": text, and what opens a call never occurs in it
    parallel: bool
    form: str  # the family's name, as `text/tools` knows it
    token_ids: dict[str, int] = {}  # the form's special tokens that this model's vocabulary has, by their text


class ThinkingForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """How thinking ends, and, where the prompt leaves it to the reply to begin it, how it begins."""

    end: str  # e.g. "</think>"
    end_id: int | None = None  # where the end is a special token; else `end` is plain text
    after: tuple[str, ...] = ()  # what may stand between the end and the reply, e.g. "\n\n"; nothing may too
    start: str = ""  # empty: it has begun already
    start_id: int | None = None  # where the start is a special token


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """At least one of `output` and `tools` is set. With both, the reply is one or the other."""

    output: OutputFormat | None = None
    tools: ToolGrammar | None = None
    thinking: ThinkingForm | None = None


MAX_CALLS = 32  # in one reply; a model that repeats itself ends there
_SAYS_NOTHING = {"type", "properties", "required", "title", "description", "$schema"}
_DIGIT = Chars(((ord("0"), ord("9")),))


def reply_expression(builder: Builder, spec: GrammarSpec, output: Expression | None) -> Expression:
    """The whole reply. `output`: what its text must be, None: any text."""
    calls: Expression | None = None
    openings: tuple[str, ...] = ()
    if spec.tools is None:
        body = output if output is not None else Free()
    else:
        form = FORMS[spec.tools.form].at(spec.tools.token_ids)
        openings = tuple(opening for opening in form.openings if opening not in form.tokens)
        calls = None if spec.tools.mode == "none" else builder.add(_calls(builder, spec.tools, form))
        body = _body(spec.tools, form, openings, calls, output)
        if form.alone:  # such calls begin like text: in reasoning they are text
            calls, openings = None, ()
    return body if spec.thinking is None else _thinking(builder, spec.thinking, openings, calls, body)


def _body(
    tools: ToolGrammar,
    form: ToolForm,
    openings: tuple[str, ...],
    calls: Expression | None,
    output: Expression | None,
) -> Expression:
    """What follows reasoning."""
    if calls is None:
        return output if output is not None else Free(openings)
    if tools.mode == "required":
        return calls
    if output is not None:
        return choice([output, calls])
    return choice([Free(openings), calls]) if form.alone else sequence(Free(openings), optional(calls))


def _thinking(
    builder: Builder, form: ThinkingForm, openings: tuple[str, ...], calls: Expression | None, body: Expression
) -> Expression:
    """Reasoning, ended by its end or by a call, and the rest."""
    gap = choice([*(Text(text) for text in form.after), EMPTY]) if form.after else EMPTY
    body = builder.add(body)
    ended = sequence(_mark(form.end, form.end_id), gap, body)
    without = openings if form.end_id is not None else (form.end, *openings)
    thinking = sequence(Free(without), ended if calls is None else choice([ended, calls]))
    return choice([sequence(_mark(form.start, form.start_id), thinking), body]) if form.start else thinking


def _calls(builder: Builder, tools: ToolGrammar, form: ToolForm) -> Expression:
    call = builder.add(_call(builder, tools.tools, form))
    most = MAX_CALLS if tools.parallel and form.parallel else 1
    more = repeat(sequence(_spelled(form.between, form), call), 0, most - 1)
    return sequence(_begin(form), call, more, _spelled(form.close, form))


def _call(builder: Builder, tools: tuple[Tool, ...], form: ToolForm) -> Expression:
    number = sequence(Text(form.number), repeat(_DIGIT, 1, 4)) if form.number else EMPTY
    before = sequence(number, _spelled(form.arguments, form))
    named = [sequence(Text(tool.name), before, _arguments(builder, tool)) for tool in tools]
    return sequence(_spelled(form.call, form), Text(form.prefix), choice(named), _spelled(form.end, form))


def _arguments(builder: Builder, tool: Tool) -> Expression:
    """Bound to the tool's schema; to any object where that is beyond us and the tool is not strict about it."""
    if not tool.parameters:
        return any_object_expression(builder) if not tool.strict else Text("{}")
    if tool.parameters.get("properties") == {} and tool.parameters.keys() <= _SAYS_NOTHING:
        return Text("{}")  # it takes none; a schema alone would allow any
    try:
        return schema_expression(builder, {"type": "object", **tool.parameters}, "tools")
    except UnsupportedSchema as error:
        if tool.strict:
            raise BadInput(f"tool {tool.name}: {error.message}", param="tools") from None
        return any_object_expression(builder)
    except BadInput as error:
        raise BadInput(f"tool {tool.name}: {error.message}", param="tools") from None


def _spelled(text: str, form: ToolForm) -> Expression:
    pieces = split_tokens(text, form.tokens)
    return sequence(*(Token(piece) if isinstance(piece, int) else Text(piece) for piece in pieces))


def _begin(form: ToolForm) -> Expression:
    """Some tokenizers begin text behind a special token with a space: their models write it."""
    pieces = split_tokens(form.begin, form.tokens)
    if len(pieces) == 2 and isinstance(pieces[0], int) and isinstance(pieces[1], str):
        return sequence(Token(pieces[0]), optional(Text(" ")), Text(pieces[1]))
    return _spelled(form.begin, form)


def _mark(text: str, token_id: int | None) -> Expression:
    return Text(text) if token_id is None else Token(token_id)


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
