"""The Vercel AI SDK against a server with the real model: text, objects, tools that it must call."""

import json
import time
import urllib.request

import pytest

from tests.e2e.clients.sdk import Failed, Sdk

QUESTION = "Name three primary colours and say what each of them reminds you of."
PERSON = "Make up a person: a name, an age, and the languages that they speak."


def is_person(thing: dict[str, object]) -> bool:
    name, age, languages = thing["name"], thing["age"], thing["languages"]
    assert list(thing) == ["name", "age", "languages"]
    assert isinstance(name, str)
    assert isinstance(age, int)
    assert isinstance(languages, list)
    return len(name) <= 40 and 0 <= age <= 150 and 1 <= len(languages) <= 3 and set(languages) <= {"de", "en", "fr"}


def test_text_streamed_is_text_whole(server: str, sdk: Sdk) -> None:
    streamed = sdk.ask("streamText", server, QUESTION, maxOutputTokens=12)
    whole = sdk.ask("generateText", server, QUESTION, maxOutputTokens=12)  # whose drafts are those of the first reply
    assert "".join(streamed["pieces"]) == streamed["text"] == whole["text"]
    assert len(streamed["pieces"]) > 4
    assert streamed["finishReason"] == whole["finishReason"] == "length"
    assert streamed["usage"]["output"] == whole["usage"]["output"] == 12
    assert whole["usage"]["cached"] > 0


def test_an_object_streamed_is_the_object_whole(server: str, sdk: Sdk) -> None:
    streamed = sdk.ask("streamObject", server, PERSON)
    whole = sdk.ask("generateObject", server, PERSON)
    assert is_person(whole["object"])
    assert whole["finishReason"] == "stop"
    assert streamed["object"] == streamed["partials"][-1] == whole["object"]
    assert len(streamed["partials"]) > 3


def test_an_object_ends_within_its_budget(server: str, sdk: Sdk) -> None:
    """With greedy sampling this model would count far beyond the limit."""
    numbers = {"type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "number"}}}}
    schema = {**numbers, "required": ["numbers"], "additionalProperties": False}
    got = sdk.ask("generateWith", server, "Count: 1, 2, 3, 4, 5, 6, 7, 8,", schema=schema, maxOutputTokens=30)
    assert all(isinstance(number, int | float) for number in got["object"]["numbers"])


@pytest.mark.parametrize("task", ["generateAgent", "streamAgent"])
def test_a_required_tool_is_called_at_every_step(server: str, sdk: Sdk, task: str) -> None:
    got = sdk.ask(task, server, "What is the weather in Bern?", toolChoice="required", steps=2)
    assert [step["finishReason"] for step in got["steps"]] == ["tool-calls", "tool-calls"]
    calls = [call for step in got["steps"] for call in step["calls"]]
    assert calls
    assert [[call["name"], call["input"]] for call in calls] == got["ran"]
    for name, given in got["ran"]:
        assert (list(given) == ["city"]) if name == "weather" else (given["zone"] in ("UTC", "CET"))
    assert len({call["id"] for call in calls}) == len(calls)


def test_a_named_tool_is_the_one_called(server: str, sdk: Sdk) -> None:
    chosen = {"type": "tool", "toolName": "clock"}
    got = sdk.ask("generateAgent", server, "What is the weather in Bern?", toolChoice=chosen, steps=1)
    assert {name for name, _ in got["ran"]} == {"clock"}


def test_no_tool_is_called_where_none_may_be(server: str, sdk: Sdk) -> None:
    got = sdk.ask("generateAgent", server, "What is the weather in Bern?", toolChoice="none", maxOutputTokens=16)
    assert got["ran"] == []
    assert len(got["steps"]) == 1


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"type": "string", "startsWith": "A"}, "startsWith"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "no value"),
    ],
)
def test_a_schema_that_cannot_be_met_is_a_bad_request_that_says_why(
    server: str, sdk: Sdk, field: dict[str, object], reason: str
) -> None:
    schema = {"type": "object", "properties": {"a": field}, "required": ["a"]}
    with pytest.raises(Failed, match=reason) as refused:
        sdk.ask("generateWith", server, PERSON, schema=schema)
    assert refused.value.status == 400
    assert is_person(sdk.ask("generateObject", server, PERSON)["object"])


def test_a_client_that_leaves_within_a_call_stops_its_work(server: str, sdk: Sdk) -> None:
    def running() -> int:
        with urllib.request.urlopen(f"{server}/health") as answer:
            load: dict[str, int] = json.load(answer)["detail"]["engines"][0]["load"]
        return load["running"]

    sdk.ask("leave", server, "What is the weather in Bern?", toolChoice="required", maxOutputTokens=2000)
    deadline = time.monotonic() + 60
    while running() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running() == 0
