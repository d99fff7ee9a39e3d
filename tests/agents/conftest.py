"""Tests with real agents, which `make agents` installs; without EMBERLINE_AGENTS none is collected."""

import os
from pathlib import Path

import pytest

from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.hermes import NAME, hermes

INSTALLED = os.environ.get("EMBERLINE_AGENTS", "")  # the folder with node_modules and a Python environment

if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(params=["smollm2", NAME])
def workspace(request: pytest.FixtureRequest, smollm2: Path, tmp_path: Path) -> AgentWorkspace:
    """With a model without a tool-call format and with one that has one."""
    gguf = hermes(smollm2, tmp_path) if request.param == NAME else smollm2
    return AgentWorkspace(Path(INSTALLED).absolute(), gguf, tmp_path, request.param)
