"""OpenAI's Agents SDK on the Responses API, with stored responses."""

import json
from pathlib import Path

from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.reply_script import reply_script, text_reply, tool_call

SCRIPT = reply_script(
    tool_call("weather", city="Bern", unit="celsius"),
    tool_call("weather", trigger="report on Bern", city="Biel", unit="celsius"),
    text_reply("Clear in both.", trigger="report on Biel"),
    text_reply("As I said.", trigger="Clear in both."),  # the trigger can only come from the stored response
)


def test_tools_stored_conversation_and_streaming(workspace: AgentWorkspace) -> None:
    script = Path(__file__).with_name("agents_sdk.py")
    with workspace.serving(SCRIPT):
        python = workspace.installed / "python" / "bin" / "python"
        got = json.loads(workspace.run(python, str(script), f"{workspace.url}/v1", workspace.model))
    assert got["asked"] == [["Bern", "celsius"], ["Biel", "celsius"]] * 2
    assert (got["whole"], got["streamed"], got["follow_up"]) == ("Clear in both.", "Clear in both.", "As I said.")
    kinds = got["kinds"]
    assert kinds.count("response.created") == kinds.count("response.completed") == 3
    assert kinds.count("response.function_call_arguments.delta") > 6
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.output_text.delta") > 1
