"""Replies with calls and reasoning as grammar expressions: what the reply's automaton reads, and nothing else."""

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Expression, Free, Text, Token
from emberline.protocol.request import GenerateRequest, ThinkingLimit, Tool
from emberline.protocol.token_ids import unpack
from emberline.text.grammar.builder import EMPTY, Builder, choice, optional, repeat, sequence
from emberline.text.grammar.document import UnsupportedSchema
from emberline.text.grammar.schema import object_expression, schema_expression
from emberline.text.grammar.spec import GrammarSpec, ThinkingForm, ToolGrammar
from emberline.text.text_model import TextModel
from emberline.text.tool_calls import reasoning as thinking
from emberline.text.tool_calls.families import FORMS
from emberline.text.tool_calls.formats import ToolForm, split_tokens

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


def grammar_spec(model: TextModel, request: GenerateRequest, thinking: bool | None) -> GrammarSpec | None:
    """None: anything goes. `thinking` is what `thinking_begun` says of the prompt."""
    tools = _tools(model, request)
    if request.output is None and tools is None:
        return None
    return GrammarSpec(
        request.output, tools, None if thinking is False else _spec_thinking(model, begun=bool(thinking))
    )


def _tools(model: TextModel, request: GenerateRequest) -> ToolGrammar | None:
    """Where no tool may be called, what opens a call may not be written."""
    choice = request.tool_choice
    if not request.tools:
        return None
    tools = tuple(tool for tool in request.tools if choice.name in (None, tool.name))
    return ToolGrammar(tools, choice.mode, request.parallel_tool_calls, model.tool_form.family, model.tool_form.tokens)


def _spec_thinking(model: TextModel, *, begun: bool) -> ThinkingForm:
    form = model.think_form
    assert form is not None
    return ThinkingForm(
        form.end,
        form.tokens.get(form.end),
        ("\n\n", "\n"),
        "" if begun else form.start,
        None if begun else form.tokens.get(form.start),
    )


def thinking_limit(model: TextModel, request: GenerateRequest, max_tokens: int) -> ThinkingLimit | None:
    """For a reply whose prompt has begun reasoning; None: no bound.

    Engines know the end of reasoning by its token. Where it is several, a budget is refused; an effort, which is a wish
    and no bound, is left to the model.
    """
    form = model.think_form
    assert form is not None
    most = thinking.budget(request.reasoning, model.template.variables, max_tokens)
    if most is None or most >= max_tokens:
        return None
    end_ids = unpack(model.encode(form.end, special=True))
    if len(end_ids) != 1:
        if request.reasoning.budget_tokens is None:
            return None
        message = f"this model's reasoning can have no budget, as its end {form.end} is no single token: leave it out"
        raise BadInput(message, param="reasoning")
    openings = (unpack(model.encode(opening, special=True)) for opening in model.tool_form.openings)
    calls = [ids[0] for ids in openings if len(ids) == 1] if request.tools else []
    ids = model.encode(form.before_end + form.end + form.after_end, special=True)
    return ThinkingLimit(most, (*end_ids, *calls), ids)
