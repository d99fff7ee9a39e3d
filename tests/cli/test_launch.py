"""`emberline launch`: the settings of every agent, the model that is chosen, and a run of an agent."""

import json
import os
import shlex
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from emberline.catalog.model_card import describe_path
from emberline.cli.agents import AGENTS, Endpoint
from emberline.cli.launch import shell_commands
from tests.cli.console import emberline
from tests.cli.fake_server import FakeServer

TO = Endpoint(url="http://127.0.0.1:8686", model="qwen3:8b", context_window=40_960, key="sk-test")
LISTED = [
    ("@cf/test/talks", ["talks"], {}, "loaded"),
    ("@cf/test/disk", ["disk"], {"function_calling": True}, "on_disk"),
    ("@cf/test/sees", ["sees"], {"vision": True}, "loaded"),
    ("@cf/test/calls", ["calls"], {"function_calling": True}, "loaded"),
]


def models(server: FakeServer) -> None:
    server.answers["/v1/models"] = {"data": [row(*each) for each in LISTED]}


def row(model_id: str, names: list[str], can: dict[str, bool], state: str) -> dict[str, Any]:
    known = {"id": model_id, "root": model_id, "aliases": names, "context_window": 32_768}
    return known | {"capabilities": can, "state": state}


def program(folder: Path, name: str) -> Path:
    """A command of that name which prints its variables and arguments."""
    path = folder / name
    path.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL" "$@" >"$(dirname "$0")/seen"\nexit 3\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder / "seen"


@pytest.mark.parametrize("name", AGENTS)
def test_each_agent_is_told_address_model_and_key(name: str) -> None:
    settings = AGENTS[name].settings(TO)
    said = " ".join([*settings.environment.values(), *settings.arguments])
    assert TO.url in said
    assert TO.model in said
    assert TO.key in said


def test_codex_options_are_toml() -> None:
    arguments = AGENTS["codex"].settings(TO).arguments
    document = tomllib.loads("\n".join(arguments[1::2]))
    assert set(arguments[::2]) == {"-c"}
    assert document["model_providers"]["emberline"]["base_url"] == f"{TO.url}/v1"
    assert document["model_context_window"] == TO.context_window


def test_printed_commands_are_for_a_shell() -> None:
    *exports, command = shell_commands(AGENTS["opencode"], TO, ["run", "say it's done"]).splitlines()
    (export,) = exports
    word, variable = shlex.split(export)
    config = json.loads(variable.removeprefix("OPENCODE_CONFIG_CONTENT="))
    assert word == "export"
    assert config["provider"]["emberline"]["models"][TO.model]["limit"] == {"context": 40_960, "output": 8192}
    assert shlex.split(command) == ["opencode", "run", "say it's done"]


def test_opencode_is_told_which_model_sees(fake_server: FakeServer, tmp_path: Path) -> None:
    models(fake_server)
    path = str(Path(__file__).parents[1] / "models" / "seeing")
    card = describe_path(Path(path))
    fake_server.answers["/v1/models"]["data"].append(row(card.id, [], {"vision": True}, "loaded"))
    fake_server.answers["/api/tags"] = {"models": [{"digest": card.digest}]}
    for given, port, name, sees in (
        ("sees", fake_server.port, "sees", True),
        ("talks", fake_server.port, "talks", False),
        (path, fake_server.port, card.id, True),
        (path, "1", path, True),  # no server runs: the model's own card tells
    ):
        done = emberline("launch", "opencode", "--print", "--model", given, home=tmp_path, EMBERLINE_PORT=port)
        (export, _) = done.stdout.splitlines()
        config = json.loads(shlex.split(export)[1].removeprefix("OPENCODE_CONFIG_CONTENT="))
        modalities = config["provider"]["emberline"]["models"][name].get("modalities")
        assert modalities == ({"input": ["text", "image"], "output": ["text"]} if sees else None), name


def test_a_loaded_model_that_calls_tools_is_chosen(fake_server: FakeServer, tmp_path: Path) -> None:
    models(fake_server)
    done = emberline("launch", "claude", "--print", "--port", fake_server.port, home=tmp_path)
    assert "export ANTHROPIC_MODEL=@cf/test/calls\n" in done.stdout
    named = emberline("launch", "claude", "--print", "--model", "disk", "--port", fake_server.port, home=tmp_path)
    assert "export ANTHROPIC_MODEL=disk\n" in named.stdout
    lacking = emberline("launch", "claude", "--print", "--model", "other", "--port", fake_server.port, home=tmp_path)
    assert lacking.returncode == 1
    assert "has no model other; it has @cf/test/" in lacking.stderr


def test_without_a_server_the_settings_name_the_model_to_download(tmp_path: Path) -> None:
    done = emberline("launch", "aider", "--print", home=tmp_path, EMBERLINE_PORT="1")
    assert done.stdout.splitlines()[-1] == "aider --model openai/qwen2.5-coder --no-show-model-warnings"


def test_the_agent_runs_with_its_settings_and_its_status_is_returned(fake_server: FakeServer, tmp_path: Path) -> None:
    models(fake_server)
    seen = program(tmp_path, "claude")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ("launch", "claude", "--port", fake_server.port, "--", "-p", "hello")
    done = emberline(*words, home=tmp_path / "home", PATH=path)
    assert done.returncode == 3
    assert seen.read_text().splitlines() == [f"http://127.0.0.1:{fake_server.port} @cf/test/calls", "-p", "hello"]


def test_an_agent_that_is_missing_is_named_with_its_installation(tmp_path: Path) -> None:
    done = emberline("launch", "goose", home=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 1
    assert "Goose is not installed here: see https://" in done.stderr
