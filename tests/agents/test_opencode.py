"""opencode, on chat completions; it reaches them through the Vercel AI SDK."""

import json
from pathlib import Path

from tests.agents.conftest import INSTALLED
from tests.agents.task import CONVERSATION, FINAL_ANSWER, PROMPT, STEPS, check, check_conversation, prepare
from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.reply_script import reply_script, text_reply, tool_call
from tests.e2e.clients.scripted_server import CONTEXT_LEN

_NO_NETWORK = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
}


_QUIET = {"autoupdate": False, "share": "disabled", "snapshot": False, "permission": {"*": "allow"}}


def opencode(workspace: AgentWorkspace, *arguments: str) -> str:
    config = workspace.folder / "opencode.json"  # merged with the settings of the agent
    config.write_text(json.dumps(_QUIET))
    environment = workspace.settings("opencode").environment
    return workspace.run("opencode", "run", *arguments, OPENCODE_CONFIG=str(config), **environment, **_NO_NETWORK)


def test_agent_runs_tools_over_several_turns(workspace: AgentWorkspace) -> None:
    prepare(workspace)
    bash = [tool_call("bash", trigger=trigger, command=command) for trigger, command in STEPS]
    title = text_reply("Following notes", trigger="You are a title generator")
    with workspace.serving(reply_script(*bash, FINAL_ANSWER, title)):
        printed = opencode(workspace, PROMPT)
        check(workspace)
    assert FINAL_ANSWER.say in printed


def test_launch_gives_it_its_settings(smollm2: Path, tmp_path: Path) -> None:
    """`emberline launch opencode -- run …`, as a person types it, with the real program."""
    workspace = AgentWorkspace(Path(INSTALLED).absolute(), smollm2, tmp_path, "smollm2")
    prepare(workspace)
    cards = workspace.folder / "server" / "cards"
    cards.mkdir(parents=True)
    card = f'id = "@cf/huggingfacetb/smollm2-135m-instruct"\ncontext_window = {CONTEXT_LEN}\n'  # as the script has it
    (cards / "smollm2.toml").write_text(card)
    config = workspace.folder / "opencode.json"
    config.write_text(json.dumps(_QUIET))
    bash = [tool_call("bash", trigger=trigger, command=command) for trigger, command in STEPS]
    title = text_reply("Following notes", trigger="You are a title generator")
    workspace.limit_s = 300  # two programs start
    with workspace.serving(reply_script(*bash, FINAL_ANSWER, title)):
        printed = workspace.launch("opencode", "run", PROMPT, OPENCODE_CONFIG=str(config), **_NO_NETWORK)
        check(workspace)
    assert FINAL_ANSWER.say in printed


def test_agent_continues_a_conversation(workspace: AgentWorkspace) -> None:
    with workspace.serving(CONVERSATION):
        opencode(workspace, "Say a word.")
        printed = opencode(workspace, "--continue", "Whose word was it?")
        check_conversation(workspace)
    assert "It was my word." in printed
