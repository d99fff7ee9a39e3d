import asyncio

import pytest

from emberline.jobs.batches.idempotency_keys import FirstUse, IdempotencyKeys, StoredAnswer
from emberline.jobs.limits import QueueLimits
from emberline.protocol.errors import BadInput, Conflict, IdempotencyMismatch
from emberline.store import Database
from tests.jobs.queue.helpers import ManualClock


@pytest.fixture
def keys(store: Database) -> IdempotencyKeys:
    return IdempotencyKeys(store, QueueLimits())


async def test_a_repeated_request_gets_the_stored_answer(keys: IdempotencyKeys) -> None:
    assert await keys.begin("a", "k", b"body", "id1") == FirstUse("id1")
    with pytest.raises(Conflict, match="still running") as conflict:
        await keys.begin("a", "k", b"body", "id2")
    assert conflict.value.retry_after_s
    await keys.finish("a", "k", b"answer")
    assert await keys.begin("a", "k", b"body", "id3") == StoredAnswer(b"answer")
    with pytest.raises(IdempotencyMismatch, match="another request"):
        await keys.begin("a", "k", b"another body", "id4")
    assert await keys.begin("b", "k", b"another body", "id5") == FirstUse("id5")


async def test_a_failed_or_dead_request_is_repeated_under_its_id(keys: IdempotencyKeys, store: Database) -> None:
    time = ManualClock(store)
    assert await keys.begin("a", "k", b"body", "id1") == FirstUse("id1")
    time.advance(61)
    assert await keys.begin("a", "k", b"body", "id2") == FirstUse("id1")
    await keys.abandon("a", "k")
    assert await keys.begin("a", "k", b"body", "id3") == FirstUse("id1")
    time.advance(-3600)  # the clock was set back: the key does not stay locked for an hour
    assert await keys.begin("a", "k", b"body", "id3") == FirstUse("id1")
    time.advance(30 * 3600)
    assert await keys.begin("a", "k", b"new", "id4") == FirstUse("id4")


async def test_one_of_many_concurrent_requests_executes(keys: IdempotencyKeys) -> None:
    tries = (keys.begin("a", "k", b"body", f"id{i}") for i in range(20))
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(outcome, FirstUse) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 19


@pytest.mark.parametrize("key", ["", "x" * 256, "line\nbreak", "nul\0"])
async def test_invalid_keys(keys: IdempotencyKeys, key: str) -> None:
    with pytest.raises(BadInput, match="Idempotency-Key"):
        await keys.begin("a", key, b"", "id")
