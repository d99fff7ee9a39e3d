"""opencode, a coding agent: a session of three commands, each of which depends on the one before it."""

from pathlib import Path

import pytest

from tests.agents.task import FINAL_ANSWER, PROMPT, STEPS, check, prepare
from tests.agents.test_opencode import opencode
from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.reply_script import reply_script, text_reply, tool_call


def test_a_coding_session(installed: Path, smollm2: Path, tmp_path: Path) -> None:
    if not list((installed / "node_modules").glob("opencode-*-*")):
        pytest.skip("opencode has no binary for this machine")
    workspace = AgentWorkspace(installed, smollm2, tmp_path, "smollm2")
    prepare(workspace)
    bash = [tool_call("bash", trigger=trigger, command=command) for trigger, command in STEPS]
    title = text_reply("Following notes", trigger="You are a title generator")
    with workspace.serving(reply_script(*bash, FINAL_ANSWER, title)):
        printed = opencode(workspace, PROMPT)
        check(workspace)
    assert FINAL_ANSWER.say in printed
