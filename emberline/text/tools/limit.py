"""A bound on reasoning, as an engine keeps it."""

from emberline.protocol.request import GenerateRequest, ThinkingLimit
from emberline.protocol.tokens import unpack
from emberline.text.model import TextModel
from emberline.text.tools import thinking


def thinking_limit(model: TextModel, request: GenerateRequest, max_tokens: int) -> ThinkingLimit | None:
    """For a reply whose prompt has begun reasoning. None: no bound, or a model whose end of reasoning is no token."""
    form = model.think_form
    assert form is not None
    most = thinking.budget(request.reasoning, model.template.variables, max_tokens)
    end_ids = unpack(model.encode(form.end, special=True))
    if most is None or most >= max_tokens or len(end_ids) != 1:
        return None
    openings = (unpack(model.encode(opening, special=True)) for opening in model.tool_form.openings)
    calls = [ids[0] for ids in openings if len(ids) == 1] if request.tools else []
    ids = model.encode(form.before_end + form.end + form.after_end, special=True)
    return ThinkingLimit(most, (*end_ids, *calls), ids)
