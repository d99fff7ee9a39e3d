"""One real server with the real model, as a user would start it, for all tests here. It runs without torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

WITHOUT_TORCH = Path(__file__).parent.parent / "without_torch"  # its sitecustomize.py hides torch


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of `emberline serve` on SmolLM2."""
    home = tmp_path_factory.mktemp("e2e")
    (home / "models").mkdir()
    (home / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", "0", "--json", "--kv-bytes", "256M"]
    path = os.pathsep.join([str(WITHOUT_TORCH), os.environ["PYTHONPATH"]])
    process = subprocess.Popen(
        [*command, "--deterministic", "--threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EMBERLINE_HOME": str(home), "PYTHONPATH": path},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; its log is above"
    yield json.loads(line)["url"]
    process.terminate()
    assert process.wait(60) == 0
