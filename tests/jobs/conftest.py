"""Fixtures of the job tests, which run on both databases."""

from collections.abc import AsyncIterator

import pytest

from emberline.store import Database
from tests.databases import DatabaseLocation
from tests.jobs.webhooks.helpers import ShiftedClock


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
def db(store: Database) -> ShiftedClock:
    return ShiftedClock(store)
