from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients.sdk import Missing, Sdk, driven

CACHE = Path(__file__).parents[3] / ".cache" / "clients"


@pytest.fixture(scope="session")
def sdk() -> Iterator[Sdk]:
    try:
        with driven(CACHE) as sdk:
            yield sdk
    except Missing as reason:
        pytest.skip(str(reason))
