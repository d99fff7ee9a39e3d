"""Real agents are a gigabyte of programs: `make agents` installs them and says where; else nothing here is run."""

import os
from pathlib import Path

import pytest

from tests.agents.workshop import Workshop
from tests.e2e.clients.hermes import NAME, hermes

INSTALLED = os.environ.get("EMBERLINE_AGENTS", "")  # the folder with node_modules and a Python environment

if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(params=["smollm2", NAME])
def workshop(request: pytest.FixtureRequest, smollm2: Path, tmp_path: Path) -> Workshop:
    """With a model that has no tool format of its own, and with one that has one."""
    gguf = hermes(smollm2, tmp_path) if request.param == NAME else smollm2
    return Workshop(Path(INSTALLED).absolute(), gguf, tmp_path, request.param)
