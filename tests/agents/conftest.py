"""Real agents are a gigabyte of programs: `make agents` installs them and says where; else nothing here is run."""

import os
from pathlib import Path

import pytest

from tests.agents.workshop import Workshop

INSTALLED = os.environ.get("EMBERLINE_AGENTS", "")  # the folder with node_modules and a Python environment

if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def workshop(smollm2: Path, tmp_path: Path) -> Workshop:
    return Workshop(Path(INSTALLED).absolute(), smollm2, tmp_path)
