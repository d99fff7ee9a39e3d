"""opencode, on chat completions; it reaches them through the Vercel AI SDK."""

import json

from tests.agents.errand import ERRAND, FINDINGS, PROMPT, TALK, check, check_talk, prepare
from tests.agents.workshop import KEY, Workshop
from tests.e2e.clients.play import calling, play, saying

_QUIET = {
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


def opencode(workshop: Workshop, *arguments: str) -> str:
    config = workshop.folder / "opencode.json"
    config.write_text(json.dumps(settings(workshop.url, workshop.model)))
    return workshop.run("opencode", "run", *arguments, OPENCODE_CONFIG=str(config), **_QUIET)


def test_it_works_through_an_errand(workshop: Workshop) -> None:
    prepare(workshop)
    bash = [calling("bash", cue=cue, command=command) for cue, command in ERRAND]
    title = saying("Following notes", cue="You are a title generator")
    with workshop.performing(play(*bash, FINDINGS, title)):
        printed = opencode(workshop, PROMPT)
        check(workshop)
    assert FINDINGS.say in printed


def test_it_goes_on_with_a_conversation(workshop: Workshop) -> None:
    with workshop.performing(TALK):
        opencode(workshop, "Say a word.")
        printed = opencode(workshop, "--continue", "Whose word was it?")
        check_talk(workshop)
    assert "It was my word." in printed
