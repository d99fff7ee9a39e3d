"""What tests of several rooms share."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads fight over two cores; ours do not mind

import pytest

from emberline.catalog.pull import pull
from emberline.catalog.shelf import Shelf


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF, pulled once per machine."""
    cache = os.environ.get("EMBERLINE_TEST_CACHE") or "~/.cache/emberline-tests"
    return pull("smollm2", Shelf(Path(cache).expanduser())).path
