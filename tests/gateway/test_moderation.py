"""Guardrails that ask a model: what a classifier or a chat model calls unsafe is blocked or flagged."""

from array import array

import pytest

from emberline.catalog.model_card import TEXT_CLASSIFICATION, ModelCard, PathSource
from emberline.gateway.gateway_errors import PromptBlocked, ResponseBlocked
from emberline.gateway.guard_stage import GuardStage
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import ModelNotFound, Unavailable
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, Usage
from emberline.protocol.gateway import GatewaySettings, Guardrail
from emberline.protocol.request import EncodeRequest, GenerateRequest, Message, Principal
from emberline.service.work import TaskEvents, Work

LABELS = ("toxic", "spam", "fine")
CLASSIFIER, CHAT = "classifier", "moderator"
CALLER = Principal("alice", models=("only-this",))


class FakeModels:
    """A classifier with fixed scores and a chat model with a fixed verdict."""

    def __init__(self, scores: tuple[float, ...] = (0.0, 0.0, 1.0), verdict: str = "safe") -> None:
        self.scores = scores
        self.verdict = verdict
        self.asked: list[EncodeRequest | GenerateRequest] = []
        self.principals: list[Principal] = []

    def find(self, name: str, caller: str = "") -> ModelCard:
        if name not in (CLASSIFIER, CHAT):
            raise ModelNotFound(f"no model {name}")
        task = TEXT_CLASSIFICATION if name == CLASSIFIER else "text-generation"
        return ModelCard(
            id=name,
            aliases=(),
            description="",
            author="",
            context_window=256,
            source=PathSource(""),
            created_at="",
            task=task,
        )

    async def run(self, work: Work) -> TaskEvents:
        assert isinstance(work.task, EncodeRequest | GenerateRequest)
        assert work.card is not None
        self.asked.append(work.task)
        self.principals.append(work.principal)
        if isinstance(work.task, EncodeRequest):
            values = array("f", self.scores).tobytes()
            yield Completed(Usage(), result=Encoded(values=values, n_rows=1, usage=Usage(), labels=LABELS))
            return
        yield Started(Usage())
        yield TextDelta(0, self.verdict)
        yield ChoiceDone(0, "stop")
        yield Completed(Usage())


def moderator(models: FakeModels, *rules: Guardrail) -> GuardStage:
    return GuardStage(GatewaySettings(name="corp", guardrails=rules), models, models, CALLER, "r1")


@pytest.mark.parametrize(
    ("scores", "is_blocked"),
    [
        ((0.9, 0.0, 0.1), True),
        ((0.0, 0.8, 0.2), True),
        ((0.7, 0.0, 0.3), True),  # the threshold itself
        ((0.69, 0.0, 0.31), False),
        ((0.0, 0.0, 1.0), False),  # sure, but of a label that is safe
    ],
)
async def test_a_classifier_blocks_from_its_threshold_on(scores: tuple[float, ...], is_blocked: bool) -> None:
    # float32: 0.7 as the classifier gives it is a little below 0.7
    threshold = array("f", [0.7])[0]
    rule = Guardrail(name="tox", model=CLASSIFIER, labels=("toxic", "spam"), threshold=threshold)
    models = FakeModels(scores)
    checks = moderator(models, rule)
    if is_blocked:
        with pytest.raises(PromptBlocked, match=r"the prompt was blocked by the guardrail 'tox' of gateway corp"):
            await checks.check_texts(["one", "two"])
    else:
        await checks.check_texts(["one", "two"])
    assert checks.flags == (["tox"] if is_blocked else [])
    (asked,) = models.asked
    assert isinstance(asked, EncodeRequest)
    assert (asked.texts, asked.truncate) == (("one\ntwo",), True)
    assert models.principals[0].models == (), "the key's scope does not apply to the account's guardrail"


@pytest.mark.parametrize(
    ("verdict", "is_blocked"),
    [("unsafe", True), ("  Unsafe\nS1, S2", True), ("safe", False), ("not unsafe", False), ("", False)],
)
async def test_the_verdict_of_a_chat_model(verdict: str, is_blocked: bool) -> None:
    models = FakeModels(verdict=verdict)
    checks = moderator(models, Guardrail(name="guard", model=CHAT))
    request = GenerateRequest(id="r1", model="m", messages=(Message("user", "hello"),))
    if is_blocked:
        with pytest.raises(PromptBlocked, match="guard"):
            await checks.check_prompt(request)
        with pytest.raises(ResponseBlocked, match=r"the reply was blocked by the guardrail 'guard'"):
            await checks.check_reply("a reply")
    else:
        await checks.check_prompt(request)
        await checks.check_reply("a reply")
    assert [ask.id for ask in models.asked] == ["r1-guard-1", "r1-guard-2"]
    assert checks.flags == (["guard"] if is_blocked else [])


async def test_a_rule_that_flags_lets_the_next_one_block() -> None:
    models = FakeModels((0.9, 0.0, 0.1), verdict="unsafe")
    note = Guardrail(name="note", model=CLASSIFIER, labels=("toxic",), action="flag")
    checks = moderator(models, note, Guardrail(name="guard", model=CHAT))
    with pytest.raises(PromptBlocked, match="'guard'"):
        await checks.check_texts(["x"])
    assert checks.flags == ["note", "guard"]


@pytest.mark.parametrize("on", ["request", "response"])
async def test_a_rule_checks_only_its_side(on: str) -> None:
    models = FakeModels(verdict="unsafe")
    checks = moderator(models, Guardrail(name="guard", model=CHAT, on=on))  # type: ignore[arg-type]
    if on == "request":
        await checks.check_reply("x")
        with pytest.raises(PromptBlocked):
            await checks.check_texts(["x"])
    else:
        await checks.check_texts(["x"])
        with pytest.raises(ResponseBlocked):
            await checks.check_reply("x")
    assert len(models.asked) == 1


async def test_nothing_passes_a_model_that_fails() -> None:
    with pytest.raises(Unavailable, match="'guard' cannot be applied: its model nobody fails"):
        await moderator(FakeModels(), Guardrail(name="guard", model="nobody")).check_texts(["x"])
