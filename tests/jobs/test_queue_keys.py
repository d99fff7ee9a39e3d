import asyncio
from collections.abc import AsyncIterator

import pytest

from emberline.jobs.batches.idempotency_keys import FirstUse, IdempotencyKeys, StoredAnswer
from emberline.jobs.limits import QueueLimits
from emberline.protocol.errors import BadInput, Conflict, IdempotencyMismatch
from emberline.store import Database
from tests.databases import Place
from tests.jobs.queues import Time


@pytest.fixture
async def store(database: Place) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
def keys(store: Database) -> IdempotencyKeys:
    return IdempotencyKeys(store, QueueLimits())


async def test_the_same_again_is_answered_again(keys: IdempotencyKeys) -> None:
    assert await keys.begin("a", "k", b"body", "id1") == FirstUse("id1")
    with pytest.raises(Conflict, match="still running") as conflict:
        await keys.begin("a", "k", b"body", "id2")
    assert conflict.value.retry_after_s
    await keys.finish("a", "k", b"answer")
    assert await keys.begin("a", "k", b"body", "id3") == StoredAnswer(b"answer")
    with pytest.raises(IdempotencyMismatch, match="another request"):
        await keys.begin("a", "k", b"another body", "id4")
    assert await keys.begin("b", "k", b"another body", "id5") == FirstUse("id5")


async def test_a_try_that_died_or_failed_is_gone_on_with_under_its_id(keys: IdempotencyKeys, store: Database) -> None:
    time = Time(store)
    assert await keys.begin("a", "k", b"body", "id1") == FirstUse("id1")
    time.pass_s(61)
    assert await keys.begin("a", "k", b"body", "id2") == FirstUse("id1")
    await keys.abandon("a", "k")
    assert await keys.begin("a", "k", b"body", "id3") == FirstUse("id1")
    time.pass_s(-3600)  # the clock was set back: nobody waits an hour
    assert await keys.begin("a", "k", b"body", "id3") == FirstUse("id1")
    time.pass_s(30 * 3600)
    assert await keys.begin("a", "k", b"new", "id4") == FirstUse("id4")


async def test_of_many_at_once_one_is_first(keys: IdempotencyKeys) -> None:
    tries = (keys.begin("a", "k", b"body", f"id{i}") for i in range(20))
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(outcome, FirstUse) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 19


@pytest.mark.parametrize("key", ["", "x" * 256, "line\nbreak", "nul\0"])
async def test_bad_keys(keys: IdempotencyKeys, key: str) -> None:
    with pytest.raises(BadInput, match="Idempotency-Key"):
        await keys.begin("a", key, b"", "id")
