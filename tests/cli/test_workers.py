"""`emberline drain`, `undrain`, `leave` and `join` against a fake server."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.console import emberline
from tests.cli.fake_server import FakeServer


def posted(fake_server: FakeServer) -> list[tuple[str, Any]]:
    return [(path, json.loads(raw)) for path, _, raw in fake_server.posts]


def test_drain_tells_what_still_runs_unless_it_waits(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("drain", "model-0", "--port", fake_server.port, home=tmp_path)
    assert done.stdout == "model-0 drains; 2 sequences are still running\n"
    done = emberline("drain", "model-0", "--wait", "--port", fake_server.port, home=tmp_path)
    assert done.stdout == "model-0 drains\n"
    assert posted(fake_server) == [("/api/workers/drain", {"name": "model-0"})] * 2


def test_leave_and_join(tmp_path: Path, fake_server: FakeServer) -> None:
    emberline("leave", "model-0", "--stop", "--port", fake_server.port, home=tmp_path)
    words = ("join", "gpu.2", "tcp://10.0.0.2:9000", "--kind", "emberline", "--model", "smollm2")
    done = emberline(*words, "--port", fake_server.port, home=tmp_path, EMBERLINE_ENDPOINTS_GPU_2_KEY="token")
    assert done.returncode == 0, done.stderr
    described = {"name": "gpu.2", "url": "tcp://10.0.0.2:9000", "kind": "emberline", "role": "both"}
    assert posted(fake_server) == [
        ("/api/workers/leave", {"name": "model-0", "stop": True}),
        ("/api/workers/join", {**described, "models": ["smollm2"], "key": "token"}),
    ]


@pytest.mark.parametrize("command", ["drain", "undrain", "leave", "join"])
def test_errors_are_one_line(tmp_path: Path, fake_server: FakeServer, command: str) -> None:
    fake_server.error = (404, "no worker is called x; there are model-0")
    url = ["tcp://h:1"] if command == "join" else []
    done = emberline(command, "x", *url, "--port", fake_server.port, home=tmp_path)
    assert (done.returncode, done.stderr) == (1, "emberline: no worker is called x; there are model-0\n")


def test_a_role_is_set(tmp_path: Path, fake_server: FakeServer) -> None:
    for wait in ((), ("--wait",)):
        done = emberline("cluster", "role", "model-0", "decode", *wait, "--port", fake_server.port, home=tmp_path)
        assert (done.returncode, done.stdout) == (0, "model-0 has the role decode\n")
    body = {"name": "model-0", "role": "decode"}
    assert posted(fake_server) == [("/api/workers/role", {**body, "wait_s": wait_s}) for wait_s in (0.0, 30.0)]
