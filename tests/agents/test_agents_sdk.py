"""OpenAI's Agents SDK on the Responses API, with stored responses."""

import json
from pathlib import Path

from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.play import calling, play, saying

PLAY = play(
    calling("weather", city="Bern", unit="celsius"),
    calling("weather", cue="report on Bern", city="Biel", unit="celsius"),
    saying("Clear in both.", cue="report on Biel"),
    saying("As I said.", cue="Clear in both."),  # the cue can only come from the stored response
)


def test_tools_stored_conversation_and_streaming(workspace: AgentWorkspace) -> None:
    script = Path(__file__).with_name("agents_sdk.py")
    with workspace.serving(PLAY):
        python = workspace.installed / "python" / "bin" / "python"
        got = json.loads(workspace.run(python, str(script), f"{workspace.url}/v1", workspace.model))
    assert got["asked"] == [["Bern", "celsius"], ["Biel", "celsius"]] * 2
    assert (got["whole"], got["streamed"], got["follow_up"]) == ("Clear in both.", "Clear in both.", "As I said.")
    kinds = got["kinds"]
    assert kinds.count("response.created") == kinds.count("response.completed") == 3
    assert kinds.count("response.function_call_arguments.delta") > 6
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.output_text.delta") > 1
