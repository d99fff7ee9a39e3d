from collections.abc import Iterator

import pytest

from tests.api.playground.browser import Stage, open_stage


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Not for the whole session: Playwright's event loop would be in the way of asyncio's tests."""
    with open_stage() as stage:
        yield stage
