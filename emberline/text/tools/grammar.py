"""Replies with calls and reasoning as grammar expressions: what the reply's automaton reads, and nothing else."""

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, Free, Text, Token
from emberline.protocol.request import Tool
from emberline.text.grammar.builder import EMPTY, Builder, choice, optional, repeat, sequence
from emberline.text.grammar.document import UnsupportedSchema
from emberline.text.grammar.schema import object_expression, schema_expression
from emberline.text.grammar.spec import GrammarSpec, ThinkingForm, ToolGrammar
from emberline.text.tools.families import FORMS
from emberline.text.tools.form import ToolForm, split_tokens

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
        return object_expression(builder) if not tool.strict else Text("{}")
    if tool.parameters.get("properties") == {} and tool.parameters.keys() <= _SAYS_NOTHING:
        return Text("{}")  # it takes none; a schema alone would allow any
    try:
        return schema_expression(builder, {"type": "object", **tool.parameters}, "tools")
    except UnsupportedSchema as error:
        if tool.strict:
            raise BadInput(f"tool {tool.name}: {error.message}", param="tools") from None
        return object_expression(builder)
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
