"""The examples and the first requests of the documentation, run as they stand against the real server."""

import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RUNNERS = {".sh": "bash", ".mjs": "node"}
OTHER_MODELS = {"embeddings.py"}  # run by tests of their own
EXAMPLES = sorted(
    path for path in (ROOT / "examples").iterdir() if path.suffix in {".py", *RUNNERS} and path.name not in OTHER_MODELS
)


def run(command: list[str], server: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "EMBERLINE_URL": server}, check=False
    )
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(
    server: str, example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if example.suffix == ".py":  # in this process, which has imported the clients already
        monkeypatch.setenv("EMBERLINE_URL", server)
        runpy.run_path(str(example), run_name="__main__")
        assert capsys.readouterr().out.strip()
        return
    runner = RUNNERS[example.suffix]
    if shutil.which(runner) is None:
        pytest.skip(f"{runner} is not installed")
    assert run([runner, str(example)], server).strip()


def test_the_readme_has_a_request_that_works(server: str) -> None:
    """Word for word but for the address and the model, which is small here."""
    commands = re.findall(r"```sh\n(curl .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(commands) == 1
    command = commands[0].replace("http://127.0.0.1:8686", server).replace("qwen2.5-coder", "smollm2")
    assert json.loads(run(["bash", "-c", command], server))["usage"]["completion_tokens"] > 0


def test_the_first_requests_are_answered_as_the_page_says(server: str) -> None:
    """Word for word but for the address, in the form and numbers that it shows."""
    page = (ROOT / "docs" / "api.md").read_text()
    commands = re.findall(r"```sh\n(curl .*?)```\n\n```json\n(.*?)```", page, re.DOTALL)
    assert len(commands) == 3
    for command, shown in commands:
        answer = json.loads(run(["bash", "-c", command.replace("http://127.0.0.1:8686", server)], server))
        promised = json.loads(shown)
        assert answer.keys() == promised.keys()
        got, want = (whole.get("result", whole) for whole in (answer, promised))
        assert got.keys() == want.keys()
        assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
        if "response" in want:  # finds the prompt of the one before it
            assert got["usage"]["prompt_tokens_details"] == want["usage"]["prompt_tokens_details"]
        if "response_format" in command:
            form, shown_form = (json.loads(whole["choices"][0]["message"]["content"]) for whole in (got, want))
            assert form.keys() == shown_form.keys()
            assert form["continent"] in ("Africa", "Asia", "Europe")
