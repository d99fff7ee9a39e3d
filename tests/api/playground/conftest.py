from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.playground.browser import Stage, open_stage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests with a browser after the others here: its event loop runs in this thread until it is closed."""
    places = [at for at, item in enumerate(items) if item.path.is_relative_to(Path(__file__).parent)]
    ordered = sorted((items[at] for at in places), key=lambda item: "stage" in getattr(item, "fixturenames", ()))
    for at, item in zip(places, ordered):
        items[at] = item


@pytest.fixture(scope="package")
def stage() -> Iterator[Stage]:
    """Yield the browser of all tests here. A session's would outlive them: its event loop disturbs asyncio's tests."""
    with open_stage() as stage:
        yield stage
