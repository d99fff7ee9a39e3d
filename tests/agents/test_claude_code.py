"""Claude Code, on the Messages API."""

from typing import Any

import pytest

from tests.agents.errand import ERRAND, FINDINGS, PROMPT, TALK, check, check_talk, prepare
from tests.agents.workshop import KEY, Workshop
from tests.e2e.clients.hermes import NAME
from tests.e2e.clients.play import Line, calling, play, saying

_FLAGS = ("-p", "--output-format", "stream-json", "--verbose")
_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
}


def claude(workshop: Workshop, *arguments: str, path: str = "") -> list[dict[str, Any]]:
    where = {"ANTHROPIC_BASE_URL": workshop.url + path, "ANTHROPIC_AUTH_TOKEN": KEY}
    return workshop.events("claude", *_FLAGS, "--model", workshop.model, *arguments, **where, **_QUIET)


def blocks(events: list[dict[str, Any]], role: str, kind: str) -> list[dict[str, Any]]:
    messages = [event["message"] for event in events if event["type"] == role]
    return [block for message in messages for block in message["content"] if block["type"] == kind]


def test_it_works_through_an_errand(workshop: Workshop) -> None:
    prepare(workshop)
    bash = [calling("Bash", cue=cue, command=command, description="Next") for cue, command in ERRAND]
    with workshop.performing(play(*bash, FINDINGS)):
        events = claude(workshop, PROMPT, "--allowedTools", "Bash")
        check(workshop)
    calls, results = blocks(events, "assistant", "tool_use"), blocks(events, "user", "tool_result")
    assert [call["input"]["command"] for call in calls] == [command for _, command in ERRAND]
    assert [(result["tool_use_id"], result["is_error"]) for result in results] == [
        (call["id"], False) for call in calls
    ]
    assert events[-1]["result"] == FINDINGS.say
    assert events[-1]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("workshop", [NAME], indirect=True)  # SmolLM2 may call one at a time
def test_it_calls_two_tools_at_once_under_an_account(workshop: Workshop) -> None:
    first, second = workshop.write("first.txt", "left-half"), workshop.write("second.txt", "right-half")
    both = Line(say="Both.", calls=tuple(("Read", {"file_path": str(path)}) for path in (first, second)))
    done = saying("Neither was empty.", cue="right-half")
    with workshop.performing(play(both, done)):
        account = "/client/v4/accounts/acme/ai"
        events = claude(workshop, "What is in the two files?", "--allowedTools", "Read", path=account)
    assert [call["input"]["file_path"] for call in blocks(events, "assistant", "tool_use")] == [str(first), str(second)]
    read = [str(result["content"]) for result in blocks(events, "user", "tool_result")]
    assert "left-half" in read[0]
    assert "right-half" in read[1]
    assert [block["text"] for block in blocks(events, "assistant", "text")] == ["Both.", done.say]


def test_it_goes_on_with_a_conversation(workshop: Workshop) -> None:
    with workshop.performing(TALK):
        claude(workshop, "Say a word.")
        events = claude(workshop, "--continue", "Whose word was it?")
        check_talk(workshop)
    assert events[-1]["result"] == "It was my word."
