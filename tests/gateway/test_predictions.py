"""Gateways and predictions: texts and files that guardrails must see, and values that no log has."""

from typing import Any

import msgspec
import pytest

from emberline.catalog.model_card import CogSource, ModelCard
from emberline.gateway.guard_stage import GuardStage
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, TextEvent, Usage
from emberline.protocol.gateway import GatewaySettings, Guardrail
from emberline.protocol.prediction import Prediction, loggable
from emberline.protocol.request import PredictRequest, Principal
from emberline.service.work import TaskEvents, Work

FILE = "data:text/plain;base64,Zm9yYmlkZGVu"
SETTINGS = GatewaySettings(name="strict", guardrails=(Guardrail(name="words", pattern=r"forbidden|\d{16}", on="both"),))
SECRET = {"type": "string", "format": "password", "x-cog-secret": True}
SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "key": SECRET,
        "keys": {"type": "array", "items": SECRET},
        "either": {"anyOf": [{"type": "integer"}, SECRET]},
        "account": {"type": "object", "properties": {"user": {"type": "string"}, "password": SECRET}},
        "file": {"type": "string", "format": "uri"},
    }
}


class Predictors:
    """Every name is a predictor's, which takes and returns anything."""

    def find(self, name: str, caller: str = "") -> ModelCard:
        return ModelCard(
            id=name,
            aliases=(),
            description="",
            author="",
            context_window=0,
            source=CogSource(version=1, digest="", input=SCHEMA, output={}),
            created_at="",
        )

    def run(self, work: Work) -> TaskEvents:
        raise AssertionError("no model is asked")


async def guarded(given: dict[str, Any], *events: TextEvent) -> list[TextEvent]:
    """Pass a prediction through the gateway's guardrails. Returns the events that the client gets."""
    models, caller = Predictors(), Principal("alice")
    work = Work(PredictRequest(id="a", model="@me/x", input=given), caller)
    await GuardStage(SETTINGS, models, models, caller, "a").begin(work)
    passed = list(events)
    for tap in work.taps:
        passed = [each for event in passed for each in await tap(event)]
    return passed


def whole(output: Any, logs: str = "") -> Completed:
    return Completed(Usage(), result=Prediction(output=msgspec.Raw(msgspec.json.encode(output)), logs=logs))


@pytest.mark.parametrize(
    "given",
    [
        {"text": "forbidden"},
        {"any": [{"forbidden": 1}]},
        {"any": 4111111111111111},
        {"any": [FILE]},
        {"any": " DATA:text/plain;base64,Zm9yYmlkZGVu"},
        {"file": "https://files.example/a.txt"},
    ],
)
async def test_an_input_that_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(EmberlineError, match=r"blocked by the guardrail|takes texts"):
        await guarded(given)


@pytest.mark.parametrize(
    "events",
    [
        [whole("forbidden")],
        [whole(["for", "bidden"])],
        [whole({"card": 4111111111111111})],
        [whole("fine", logs="forbidden")],
        [whole(FILE)],
        [whole({"pictures": [{"png": FILE}]})],
        [Started(Usage()), TextDelta(0, "for"), TextDelta(0, "bidden"), ChoiceDone(0, "stop"), whole(None)],
        [Started(Usage()), TextDelta(0, FILE), ChoiceDone(0, "stop"), whole(None)],
        [Started(Usage()), TextDelta(0, f'{{"png":"{FILE}"}}'), ChoiceDone(0, "stop"), whole(None)],
    ],
)
async def test_an_output_that_is_held_back(events: list[TextEvent]) -> None:
    with pytest.raises(EmberlineError, match=r"blocked by the guardrail|return text, not files"):
        await guarded({"text": "fine"}, *events)


async def test_a_prediction_that_passes() -> None:
    events = [Started(Usage()), TextDelta(0, "[0.5]"), ChoiceDone(0, "stop"), whole([0.12345678901234567, "a"])]
    assert await guarded({"text": "fine", "n": 3, "file": None}, *events) == events


def test_what_a_log_has_of_an_input() -> None:
    hidden = {"key": "hush", "keys": ["hush"], "either": "hush", "account": {"password": "hush"}, "file": FILE}
    shown = loggable({"text": "hello", **hidden, "kye": "hush", "n": None}, SCHEMA)
    assert shown == {"text": "hello", **dict.fromkeys([*hidden, "kye"], "**********"), "n": None}
