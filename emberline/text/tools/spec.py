"""What a request asks of its reply's form, as the grammar room takes it."""

from emberline.protocol.request import GenerateRequest
from emberline.text.grammar.spec import GrammarSpec, ThinkingForm, ToolGrammar
from emberline.text.model import TextModel


def grammar_spec(model: TextModel, request: GenerateRequest, thinking: bool | None) -> GrammarSpec | None:
    """None: anything goes. `thinking` is what `thinking_begun` says of the prompt."""
    tools = _tools(model, request)
    if request.output is None and tools is None:
        return None
    return GrammarSpec(request.output, tools, None if thinking is False else _thinking(model, begun=bool(thinking)))


def _tools(model: TextModel, request: GenerateRequest) -> ToolGrammar | None:
    """Where no tool may be called, what opens a call may not be written."""
    choice = request.tool_choice
    if not request.tools:
        return None
    tools = tuple(tool for tool in request.tools if choice.name in (None, tool.name))
    return ToolGrammar(tools, choice.mode, request.parallel_tool_calls, model.tool_form.family, model.tool_form.tokens)


def _thinking(model: TextModel, *, begun: bool) -> ThinkingForm:
    form = model.think_form
    assert form is not None
    return ThinkingForm(
        form.end,
        form.tokens.get(form.end),
        ("\n\n", "\n"),
        "" if begun else form.start,
        None if begun else form.tokens.get(form.start),
    )
