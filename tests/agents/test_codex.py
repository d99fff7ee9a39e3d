"""Codex, on the Responses API."""

import json
from pathlib import Path
from typing import Any

from tests.agents.errand import ERRAND, FINDINGS, PROMPT, TALK, check, check_talk, prepare
from tests.agents.workshop import KEY, Workshop
from tests.e2e.clients.play import calling, play, saying

_FLAGS = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def codex(workshop: Workshop, *arguments: str) -> list[dict[str, Any]]:
    folder = workshop.home / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(
        f'model = "{workshop.model}"\nmodel_provider = "emberline"\ncheck_for_update_on_startup = false\n'
        "[analytics]\nenabled = false\n"
        f'[model_providers.emberline]\nname = "Emberline"\nbase_url = "{workshop.url}/v1"\n'
        'env_key = "EMBERLINE_KEY"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    return workshop.events("codex", "exec", *_FLAGS, *arguments, EMBERLINE_KEY=KEY)


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def test_it_works_through_an_errand(workshop: Workshop) -> None:
    prepare(workshop)
    shell = [calling("exec_command", cue=cue, cmd=command) for cue, command in ERRAND]
    with workshop.performing(play(*shell, FINDINGS)):
        events = codex(workshop, PROMPT)
        check(workshop)
    ran = items(events, "command_execution")
    assert [item["exit_code"] for item in ran] == [0] * len(ERRAND)
    assert [item["text"] for item in items(events, "agent_message")] == [FINDINGS.say]
    usage = next(event["usage"] for event in events if event["type"] == "turn.completed")
    assert usage["cached_input_tokens"] >= 0.9 * sum(request.input_tokens for request in workshop.requests()[1:])


def test_it_answers_in_a_shape_that_was_asked_for(workshop: Workshop, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"word": {"type": "string"}, "letters": {"type": "integer"}}}
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({**schema, "required": ["word", "letters"], "additionalProperties": False}))
    workshop.write("note.txt", "The word is quetzal.")
    lines = calling("exec_command", cmd="cat note.txt"), saying('{"word":"quetzal","letters":7}', cue="quetzal")
    with workshop.performing(play(*lines)):
        events = codex(workshop, "--output-schema", str(shape), "Which word is in note.txt?")
    (answer,) = items(events, "agent_message")
    assert json.loads(answer["text"]) == {"word": "quetzal", "letters": 7}


def test_it_goes_on_with_a_conversation(workshop: Workshop) -> None:
    with workshop.performing(TALK):
        codex(workshop, "Say a word.")
        events = codex(workshop, "resume", "--last", "Whose word was it?")
        check_talk(workshop)
    assert items(events, "agent_message")[-1]["text"] == "It was my word."
