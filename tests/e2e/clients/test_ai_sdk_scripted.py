"""The Vercel AI SDK's tool loop, with a scripted model."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients.hermes import NAME, hermes
from tests.e2e.clients.reply_script import ScriptedReply, reply_script, text_reply, tool_call
from tests.e2e.clients.scripted_server import scripted_server
from tests.e2e.clients.sdk import Sdk

BLOCK = 16  # tokens of the prefix cache
ATTEMPTS = 8
ODD = 'Zür"ich\\ \n\t🌤'  # arguments that must survive being JSON in a string in JSON, in pieces
SCRIPT = reply_script(
    text_reply("I have no reply for this."),
    ScriptedReply(trigger="weather in two cities", say="Let me look.", calls=(("weather", {"city": "Bern"}),)),
    tool_call("weather", trigger='"report":1', city=ODD),
    text_reply("It is clear in both.", trigger='"report":2'),
    ScriptedReply(trigger="weather and the time", calls=(("weather", {"city": "Biel"}), ("clock", {"zone": "CET"}))),
    text_reply("Clear, at 12:34.", trigger="12:34"),
)


Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=["smollm2", NAME])
def ask(
    request: pytest.FixtureRequest, smollm2: Path, sdk: Sdk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ask]:
    """Asks a model without a tool format of its own, and one that has one."""
    folder = tmp_path_factory.mktemp("stage")
    gguf = hermes(smollm2, folder) if request.param == NAME else smollm2
    with scripted_server(SCRIPT, gguf, folder / "home") as url:
        yield lambda task, prompt: sdk.ask(task, url, prompt, model=request.param)


@pytest.mark.parametrize("task", ["generateAgent", "streamAgent"])
def test_a_loop_of_three_steps(ask: Ask, task: str) -> None:
    got = ask(task, "Tell me the weather in two cities.")
    assert got["ran"] == [["weather", {"city": "Bern"}], ["weather", {"city": ODD}]]
    assert [step["text"] for step in got["steps"]] == ["Let me look.", "", "It is clear in both."]
    assert [step["finishReason"] for step in got["steps"]] == ["tool-calls", "tool-calls", "stop"]
    for before, after in pairwise(step["usage"] for step in got["steps"]):  # what was said is in the cache
        assert after["cached"] >= (before["input"] + before["output"]) // BLOCK * BLOCK - BLOCK


@pytest.mark.parametrize("ask", [NAME], indirect=True)  # SmolLM2 would only repeat itself, and may call once
@pytest.mark.parametrize("task", ["generateAgent", "streamAgent"])
def test_two_calls_at_once(ask: Ask, task: str) -> None:
    got = ask(task, "Tell me the weather and the time.")
    assert got["ran"] == [["weather", {"city": "Biel"}], ["clock", {"zone": "CET"}]]
    assert [step["finishReason"] for step in got["steps"]] == ["tool-calls", "stop"]
    assert [step["text"] for step in got["steps"]] == ["", "Clear, at 12:34."]


def test_arguments_come_as_they_are_written(ask: Ask) -> None:
    """A busy machine may send tokens that were written one by one together, but not every time."""
    for _ in range(ATTEMPTS):
        got = ask("streamAgent", "Tell me the weather in two cities.")
        calls = [call for step in got["steps"] for call in step["calls"]]
        assert set(got["written"]) == {call["id"] for call in calls}
        for call in calls:
            assert json.loads("".join(got["written"][call["id"]])) == call["input"]
        if all(len(pieces) > 3 for pieces in got["written"].values()):
            return
    pytest.fail(f"arguments came in few pieces {ATTEMPTS} times: {got['written']}")
