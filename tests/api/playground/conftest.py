from collections.abc import Iterator

import pytest

from tests.api.playground.browser import Stage, open_stage


@pytest.fixture(scope="package")
def stage() -> Iterator[Stage]:
    """Yield the browser of all tests here. A session's would outlive them: its event loop disturbs asyncio's tests."""
    with open_stage() as stage:
        yield stage
