import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Reasoning, Tool
from emberline.protocol.token_ids import unpack
from emberline.text.prompt import reasoning_limit
from emberline.text.tool_calls.reasoning import budget, template_kwargs
from tests.text.chats import FAMILIES, family
from tests.text.tool_calls.models import model


def request(reasoning: Reasoning, **fields: object) -> GenerateRequest:
    return GenerateRequest(id="r", model="m", prompt="", reasoning=reasoning, **fields)  # type: ignore[arg-type]


def test_which_models_think() -> None:
    thinking = {name for name in FAMILIES if family(name).reasoning_format is not None}
    assert thinking == {"chatml", "reasoning", "plain"}  # they have the tokens
    assert model("generic").reasoning_format is None


@pytest.mark.parametrize(
    ("reasoning", "variables", "kwargs"),
    [
        (Reasoning(), {"enable_thinking", "thinking"}, {}),
        (Reasoning(enabled=False), {"enable_thinking"}, {"enable_thinking": False}),
        (Reasoning(enabled=True), {"thinking", "messages"}, {"thinking": True}),
        (Reasoning(enabled=False), {"messages"}, {}),
        (Reasoning(effort="high"), {"reasoning_effort"}, {"reasoning_effort": "high"}),
        (Reasoning(effort="max"), {"reasoning_effort"}, {"reasoning_effort": "high"}),
        (Reasoning(effort="high"), {"thinking"}, {}),
        (Reasoning(effort="none"), {"thinking"}, {"thinking": False}),
        (Reasoning(budget_tokens=0), {"thinking"}, {"thinking": False}),
    ],
)
def test_template_arguments(reasoning: Reasoning, variables: set[str], kwargs: dict[str, object]) -> None:
    assert template_kwargs(reasoning, variables) == kwargs


@pytest.mark.parametrize(
    ("reasoning", "most"),
    [
        (Reasoning(), None),
        (Reasoning(effort="low"), 200),
        (Reasoning(effort="medium"), 500),
        (Reasoning(effort="high"), 800),
        (Reasoning(effort="max"), None),
        (Reasoning(effort="low", budget_tokens=7), 7),
        (Reasoning(enabled=False), 0),
    ],
)
def test_the_most_tokens_of_reasoning(reasoning: Reasoning, most: int | None) -> None:
    assert budget(reasoning, frozenset(), 1000) == most


def test_a_template_that_knows_efforts_needs_no_bound() -> None:
    assert budget(Reasoning(effort="low"), {"reasoning_effort"}, 1000) is None


def test_the_engines_bound() -> None:
    kimi = model("kimi")
    limit = reasoning_limit(kimi, request(Reasoning(budget_tokens=9), tools=(Tool("f"),)), 100)
    special = kimi.tokenizer.special
    assert limit is not None
    assert (limit.most, unpack(limit.ids)) == (9, [special["</think>"]])
    assert limit.end_ids == tuple(
        special[mark] for mark in ("</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    )
    qwen = reasoning_limit(model("qwen"), request(Reasoning(budget_tokens=9)), 100)
    assert qwen is not None
    assert model("qwen").decode(unpack(qwen.ids)) == "\n</think>\n\n"


def test_no_bound_where_there_is_nothing_to_bound() -> None:
    assert reasoning_limit(model("kimi"), request(Reasoning()), 100) is None
    assert reasoning_limit(model("kimi"), request(Reasoning(budget_tokens=100)), 100) is None


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    """Its end of reasoning is ordinary text, several tokens of it."""
    with pytest.raises(BadInput, match="</think> is not a single token") as caught:
        reasoning_limit(model("hermes-text"), request(Reasoning(budget_tokens=9)), 100)
    assert caught.value.param == "reasoning"
    assert reasoning_limit(model("hermes-text"), request(Reasoning(budget_tokens=100)), 100) is None  # kept anyway
    assert reasoning_limit(model("hermes-text"), request(Reasoning(effort="low")), 100) is None
