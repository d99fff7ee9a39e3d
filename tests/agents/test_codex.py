"""Codex, on the Responses API."""

import json
from pathlib import Path
from typing import Any

from tests.agents.task import CONVERSATION, FINAL_ANSWER, PROMPT, STEPS, check, check_conversation, prepare
from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.reply_script import reply_script, text_reply, tool_call

_FLAGS = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_RETRIES = ("request_max_retries", "stream_max_retries")
_OPTIONS = (
    "check_for_update_on_startup=false",
    "analytics.enabled=false",
    *(f"model_providers.emberline.{name}=0" for name in _RETRIES),
)
_QUIET = tuple(word for option in _OPTIONS for word in ("-c", option))


def codex(workspace: AgentWorkspace, *arguments: str) -> list[dict[str, Any]]:
    settings = workspace.settings("codex")
    return workspace.events("codex", *settings.arguments, *_QUIET, "exec", *_FLAGS, *arguments, **settings.environment)


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def test_agent_runs_tools_over_several_turns(workspace: AgentWorkspace) -> None:
    prepare(workspace)
    shell = [tool_call("exec_command", trigger=trigger, cmd=command) for trigger, command in STEPS]
    with workspace.serving(reply_script(*shell, FINAL_ANSWER)):
        events = codex(workspace, PROMPT)
        check(workspace)
    ran = items(events, "command_execution")
    assert [item["exit_code"] for item in ran] == [0] * len(STEPS)
    assert [item["text"] for item in items(events, "agent_message")] == [FINAL_ANSWER.say]
    usage = next(event["usage"] for event in events if event["type"] == "turn.completed")
    assert usage["cached_input_tokens"] >= 0.9 * sum(request.input_tokens for request in workspace.requests()[1:])


def test_structured_output(workspace: AgentWorkspace, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"word": {"type": "string"}, "letters": {"type": "integer"}}}
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({**schema, "required": ["word", "letters"], "additionalProperties": False}))
    workspace.write("note.txt", "The word is quetzal.")
    replies = (
        tool_call("exec_command", cmd="cat note.txt"),
        text_reply('{"word":"quetzal","letters":7}', trigger="quetzal"),
    )
    with workspace.serving(reply_script(*replies)):
        events = codex(workspace, "--output-schema", str(shape), "Which word is in note.txt?")
    (answer,) = items(events, "agent_message")
    assert json.loads(answer["text"]) == {"word": "quetzal", "letters": 7}


def test_agent_continues_a_conversation(workspace: AgentWorkspace) -> None:
    with workspace.serving(CONVERSATION):
        codex(workspace, "Say a word.")
        events = codex(workspace, "resume", "--last", "Whose word was it?")
        check_conversation(workspace)
    assert items(events, "agent_message")[-1]["text"] == "It was my word."
