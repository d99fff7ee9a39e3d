"""Claude Code, on the Messages API."""

from typing import Any

import pytest

from tests.agents.task import CONVERSATION, FINAL_ANSWER, PROMPT, STEPS, check, check_conversation, prepare
from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.hermes import NAME
from tests.e2e.clients.reply_script import ScriptedReply, reply_script, text_reply, tool_call

_FLAGS = ("-p", "--output-format", "stream-json", "--verbose")
_NO_NETWORK = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
}


def claude(workspace: AgentWorkspace, *arguments: str, path: str = "") -> list[dict[str, Any]]:
    where = workspace.settings("claude", path).environment
    return workspace.events("claude", *_FLAGS, *arguments, **{**where, **_NO_NETWORK})


def blocks(events: list[dict[str, Any]], role: str, kind: str) -> list[dict[str, Any]]:
    messages = [event["message"] for event in events if event["type"] == role]
    return [block for message in messages for block in message["content"] if block["type"] == kind]


def test_agent_runs_tools_over_several_turns(workspace: AgentWorkspace) -> None:
    prepare(workspace)
    bash = [tool_call("Bash", trigger=trigger, command=command, description="Next") for trigger, command in STEPS]
    with workspace.serving(reply_script(*bash, FINAL_ANSWER)):
        events = claude(workspace, PROMPT, "--allowedTools", "Bash")
        check(workspace)
    calls, results = blocks(events, "assistant", "tool_use"), blocks(events, "user", "tool_result")
    assert [call["input"]["command"] for call in calls] == [command for _, command in STEPS]
    assert [(result["tool_use_id"], result["is_error"]) for result in results] == [
        (call["id"], False) for call in calls
    ]
    assert events[-1]["result"] == FINAL_ANSWER.say
    assert events[-1]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("workspace", [NAME], indirect=True)  # SmolLM2 may call one at a time
def test_parallel_tool_calls_under_an_account(workspace: AgentWorkspace) -> None:
    first, second = workspace.write("first.txt", "left-half"), workspace.write("second.txt", "right-half")
    both = ScriptedReply(say="Both.", calls=tuple(("Read", {"file_path": str(path)}) for path in (first, second)))
    done = text_reply("Neither was empty.", trigger="right-half")
    with workspace.serving(reply_script(both, done)):
        account = "/client/v4/accounts/acme/ai"
        events = claude(workspace, "What is in the two files?", "--allowedTools", "Read", path=account)
    assert [call["input"]["file_path"] for call in blocks(events, "assistant", "tool_use")] == [str(first), str(second)]
    read = [str(result["content"]) for result in blocks(events, "user", "tool_result")]
    assert "left-half" in read[0]
    assert "right-half" in read[1]
    assert [block["text"] for block in blocks(events, "assistant", "text")] == ["Both.", done.say]


def test_agent_continues_a_conversation(workspace: AgentWorkspace) -> None:
    with workspace.serving(CONVERSATION):
        claude(workspace, "Say a word.")
        events = claude(workspace, "--continue", "Whose word was it?")
        check_conversation(workspace)
    assert events[-1]["result"] == "It was my word."
