"""opencode, on chat completions; it reaches them through the Vercel AI SDK."""

import json

from tests.agents.task import CONVERSATION, FINAL_ANSWER, PROMPT, STEPS, check, check_conversation, prepare
from tests.agents.workspace import KEY, AgentWorkspace
from tests.e2e.clients.reply_script import reply_script, text_reply, tool_call

_NO_NETWORK = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
}


def settings(url: str, model: str) -> dict[str, object]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Emberline",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {model: {"name": model, "tool_call": True, "limit": {"context": 131072, "output": 4096}}},
    }
    quiet = {"autoupdate": False, "share": "disabled", "snapshot": False}
    return {**quiet, "model": f"emberline/{model}", "provider": {"emberline": provider}, "permission": {"*": "allow"}}


def opencode(workspace: AgentWorkspace, *arguments: str) -> str:
    config = workspace.folder / "opencode.json"
    config.write_text(json.dumps(settings(workspace.url, workspace.model)))
    return workspace.run("opencode", "run", *arguments, OPENCODE_CONFIG=str(config), **_NO_NETWORK)


def test_agent_runs_tools_over_several_turns(workspace: AgentWorkspace) -> None:
    prepare(workspace)
    bash = [tool_call("bash", trigger=trigger, command=command) for trigger, command in STEPS]
    title = text_reply("Following notes", trigger="You are a title generator")
    with workspace.serving(reply_script(*bash, FINAL_ANSWER, title)):
        printed = opencode(workspace, PROMPT)
        check(workspace)
    assert FINAL_ANSWER.say in printed


def test_agent_continues_a_conversation(workspace: AgentWorkspace) -> None:
    with workspace.serving(CONVERSATION):
        opencode(workspace, "Say a word.")
        printed = opencode(workspace, "--continue", "Whose word was it?")
        check_conversation(workspace)
    assert "It was my word." in printed
