"""A bound on reasoning, as an engine keeps it."""

from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, ThinkingLimit
from emberline.protocol.tokens import unpack
from emberline.text.model import TextModel
from emberline.text.tools import thinking


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
