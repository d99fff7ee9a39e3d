"""Coding sessions of opencode with a real model, Qwen2.5-Coder-1.5B, which is downloaded once (1.1 GB).

One task names its three steps; the other only says what is wrong, and is done when the project's own check passes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agents.conftest import INSTALLED
from tests.agents.workspace import KEY, AgentWorkspace, json_lines
from tests.conftest import pulled

MODEL = "qwen2.5-coder"
LIMIT_S = 20 * 60
TOOLS = ("read", "edit", "write", "bash")
CALCULATOR = "def add(a, b):\n    return a - b\n"
CHECK = "from calculator import add\n\nassert add(2, 3) == 5\nprint('the check has passed')\n"
TASK = "python3 check.py fails. Find the bug in calculator.py and fix it, so that the check passes."
STEPS = (
    "calculator.py has a bug. Do these steps, one tool call each: 1. read calculator.py with the read tool."
    " 2. fix the bug with the edit tool, so that add returns the sum. 3. run `python3 check.py` with the bash tool."
    " Then say in one sentence what you have changed."
)
AGENT = (
    "You are a coding agent. Work with tools only, one call at a time, until the task is done. File paths are absolute."
)


def settings(url: str) -> dict[str, object]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Emberline",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY, "timeout": LIMIT_S * 1000},
        "models": {MODEL: {"name": MODEL, "tool_call": True, "limit": {"context": 32768, "output": 1024}}},
    }
    coder = {
        "mode": "primary",
        "prompt": AGENT,
        "temperature": 0,
        "tools": {"*": False, **dict.fromkeys(TOOLS, True)},
    }
    quiet = {"autoupdate": False, "share": "disabled", "snapshot": False}
    return {
        **quiet,
        "model": f"emberline/{MODEL}",
        "small_model": f"emberline/{MODEL}",
        "provider": {"emberline": provider},
        "agent": {"coder": coder},
        "permission": {"*": "allow"},
    }


@contextmanager
def serving(home: Path) -> Iterator[str]:
    """`emberline serve` as a user starts it."""
    command = [sys.executable, "-m", "emberline.cli.main", "serve", MODEL, "--port", "0", "--json"]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--token-budget", "128", "--data-dir", str(home), "--log-level", "warning"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)
            server.stdout.close()


@pytest.mark.timeout(LIMIT_S + 600)  # the download besides
@pytest.mark.parametrize("prompt", [STEPS, TASK], ids=["steps", "task"])
def test_a_coding_session_with_a_real_model(tmp_path: Path, prompt: str) -> None:
    gguf = pulled(MODEL)
    workspace = AgentWorkspace(Path(INSTALLED).absolute(), gguf, tmp_path, MODEL)
    source, _ = workspace.write("calculator.py", CALCULATOR), workspace.write("check.py", CHECK)
    server_home = tmp_path / "server"
    (server_home / "models").mkdir(parents=True)
    (server_home / "models" / gguf.parent.name).symlink_to(gguf.parent)
    began_s = time.monotonic()
    with serving(server_home) as url:
        config = tmp_path / "opencode.json"
        config.write_text(json.dumps(settings(url)))
        quiet: dict[str, str] = dict.fromkeys(("OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_AUTOUPDATE"), "1")
        quiet |= dict.fromkeys(("OPENCODE_DISABLE_LSP_DOWNLOAD", "OPENCODE_DISABLE_DEFAULT_PLUGINS"), "1")
        arguments = ("run", "--format", "json", "--agent", "coder", "--title", "fix", prompt)
        workspace.limit_s = LIMIT_S
        workspace.url = url
        events = json_lines(workspace.launch("opencode", *arguments, OPENCODE_CONFIG=str(config), **quiet))
    took_s = time.monotonic() - began_s
    calls = [event["part"] for event in events if event["type"] == "tool_use"]
    executed = [call for call in calls if call["state"]["status"] == "completed"]
    requests = workspace.requests()
    print(f"{len(executed)} of {len(calls)} tool calls executed in {took_s:.0f} s;")
    for request in requests:
        print(f"  {request.input_tokens} input tokens, {request.cached_tokens} of them cached")
    assert not [event for event in events if event["type"] == "error"]
    assert source.read_text() != CALCULATOR
    if prompt is STEPS:
        assert len(executed) >= 3
    else:
        subprocess.run([sys.executable, "check.py"], cwd=workspace.project, check=True)
    assert "ERROR" not in (server_home / "server.log").read_text()
    assert took_s <= LIMIT_S
