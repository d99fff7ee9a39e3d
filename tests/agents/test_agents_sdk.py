"""OpenAI's Agents SDK, on the Responses API with what the server stores."""

import json
from pathlib import Path

from tests.agents.workshop import Workshop
from tests.e2e.clients.play import calling, play, saying

PLAY = play(
    calling("weather", city="Bern", unit="celsius"),
    calling("weather", cue="report on Bern", city="Biel", unit="celsius"),
    saying("Clear in both.", cue="report on Biel"),
    saying("As I said.", cue="Clear in both."),  # only what the server has stored can bring this cue
)


def test_tools_a_stored_conversation_and_streaming(workshop: Workshop) -> None:
    script = Path(__file__).with_name("agents_sdk.py")
    with workshop.performing(PLAY):
        python = workshop.installed / "python" / "bin" / "python"
        got = json.loads(workshop.run(python, str(script), f"{workshop.url}/v1", workshop.model))
    assert got["asked"] == [["Bern", "celsius"], ["Biel", "celsius"]] * 2
    assert (got["whole"], got["streamed"], got["follow_up"]) == ("Clear in both.", "Clear in both.", "As I said.")
    kinds = got["kinds"]
    assert kinds.count("response.created") == kinds.count("response.completed") == 3
    assert kinds.count("response.function_call_arguments.delta") > 6
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.output_text.delta") > 1
