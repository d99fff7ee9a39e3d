"""What `benchmarks.token_path` counts: the functions that a request calls, and their lines."""

import importlib
import json
import os
from pathlib import Path

import pytest

from benchmarks import token_path
from emberline.supervisor.process import inherited_environment


def test_engine_workers_inherit_the_recorder(tmp_path: Path) -> None:
    environment = token_path.recorder_environment(tmp_path)
    added = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    assert len(added) >= 3
    assert added.items() <= inherited_environment(environment).items()


@pytest.fixture(scope="module")
def gpu_runner() -> None:
    """Import torch and Triton, which takes seconds where no other test has done it."""
    pytest.importorskip("triton")
    importlib.import_module("benchmarks.draft_steps")


@pytest.mark.usefixtures("gpu_runner")
def test_a_decode_token_over_the_gpu_runner() -> None:
    ((_, calls),) = token_path.gpu_calls().items()
    lines = token_path.lines_by_file(calls)
    assert {"emberline/engine/core/step_loop.py", "emberline/engine/runners/gpu/runner.py"} <= lines.keys()
    assert "emberline/engine/core/limits.py" not in lines, "limits are read at start"
    assert 300 < sum(lines.values()) < 1500


def test_lines_of_the_functions_that_were_called() -> None:
    source = "import os\n\n\n@cache\ndef first():\n    return 1\n\n\nasync def second():\n    pass\n"
    assert token_path.function_spans(source) == {4: range(4, 7), 9: range(9, 11)}


@pytest.mark.slow
def test_a_server_and_its_engine_worker(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine worker's calls are recorded as the core's are, for a request and for a token alone."""
    monkeypatch.setenv("EMBERLINE_HOME", str(smollm2.parents[2]))
    token_path.main(["--part", "server", "--json"])
    found = json.loads(capsys.readouterr().out)
    request, token = found["one streamed chat request"], found["one token of it"]
    both = {"emberline/api/app.py", "emberline/engine/core/planner.py", "emberline/engine/worker/socket_server.py"}
    assert both <= request["by_file"].keys()
    assert "emberline/engine/core/step_loop.py" in token["by_file"]
    assert "emberline/service/engine_transport.py" in token["by_file"]
    assert token["lines"] < request["lines"] / 2
