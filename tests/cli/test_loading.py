"""`emberline load` and `stop` against a fake server, and what `ps` shows of models that are not loaded."""

import json
from pathlib import Path

from tests.cli.console import emberline
from tests.cli.fake_server import FakeServer


def test_load_and_stop(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("load", "model", "other", "--port", fake_server.port, home=tmp_path)
    assert done.stdout == "@cf/test/model is loaded\n@cf/test/model is loaded\n", done.stderr
    done = emberline("stop", "model", "--json", "--port", fake_server.port, home=tmp_path)
    assert json.loads(done.stdout)[0]["model"] == "@cf/test/model"
    assert [(path, json.loads(raw)) for path, _, raw in fake_server.posts] == [
        ("/api/models/load", {"model": "model"}),
        ("/api/models/load", {"model": "other"}),
        ("/api/models/unload", {"model": "model"}),
    ]


def test_ps_shows_models_that_are_not_loaded(tmp_path: Path, fake_server: FakeServer) -> None:
    fake_server.model_states = [
        {"id": "@cf/test/model", "state": "loaded", "memory_bytes": 1, "reason": ""},
        {"id": "@cf/test/other", "state": "on_disk", "memory_bytes": 3 << 30, "reason": ""},
        {"id": "@cf/test/broken", "state": "failed", "memory_bytes": 1 << 30, "reason": "no such file"},
    ]
    shown = emberline("ps", "--port", fake_server.port, home=tmp_path).stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["@cf/test/other", "on", "disk", "about", "3.0", "GiB"] in rows
    assert ["@cf/test/broken", "failed", "about", "1.0", "GiB", "no", "such", "file"] in rows
