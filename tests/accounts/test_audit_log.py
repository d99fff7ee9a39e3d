import asyncio
from collections.abc import AsyncIterator

import pytest

from emberline.accounts.audit_log import Actor, AuditLog
from emberline.accounts.secret import Secret
from emberline.protocol.errors import BadInput
from emberline.store import Database
from tests.databases import DatabaseLocation

SECRET = Secret("s" * 32)
ACTOR = Actor("key_1", "10.0.0.1")


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


async def fill(store: Database, n: int = 5) -> AuditLog:
    audit = AuditLog(store, SECRET)
    for number in range(n):
        await audit.record(ACTOR, "worker.drain", f"worker-{number}", {"n": number})
    return audit


async def test_entries_say_who_what_when_and_from_where(store: Database) -> None:
    audit = await fill(store)
    latest, *_ = entries = await audit.entries(limit=3)
    assert [entry.number for entry in entries] == [5, 4, 3]
    assert (latest.actor, latest.source, latest.act, latest.target) == ("key_1", "10.0.0.1", "worker.drain", "worker-4")
    assert latest.details == '{"n":4}'
    assert latest.at_us > 0
    assert [entry.number for entry in await audit.entries(before=3)] == [2, 1]


async def test_an_intact_log_verifies(store: Database) -> None:
    assert (await AuditLog(store, SECRET).verify()).problem == ""
    audit = await fill(store)
    found = await audit.verify()
    assert (found.n_entries, found.problem) == (5, "")
    await audit.record(ACTOR, "worker.drain", "x")
    assert (await audit.verify(found.head)).problem == ""
    with pytest.raises(BadInput):
        await audit.verify("nonsense")


@pytest.mark.parametrize(
    ("tampering", "problem"),
    [
        ("UPDATE audit_log SET actor = 'key_2' WHERE number = 3", "row 3 was changed"),
        ("UPDATE audit_log SET at_us = at_us + 1 WHERE number = 3", "row 3 was changed"),
        ("UPDATE audit_log SET details = '{}' WHERE number = 5", "row 5 was changed"),
        ("DELETE FROM audit_log WHERE number = 3", "row 3 is missing"),
        ("DELETE FROM audit_log WHERE number = 1", "row 1 is missing"),
        ("DELETE FROM audit_log WHERE number > 3", "ends at row 3"),
    ],
)
async def test_tampering_is_found(store: Database, tampering: str, problem: str) -> None:
    audit = await fill(store)
    await store.write(tampering)
    assert problem in (await audit.verify()).problem


async def test_cutting_the_end_off_is_found_by_a_noted_head(store: Database) -> None:
    audit = await fill(store)
    head = (await audit.verify()).head
    await store.write("DELETE FROM audit_log WHERE number > 3")
    await store.write("UPDATE audit_head SET number = 3, digest = (SELECT digest FROM audit_log WHERE number = 3)")
    assert (await audit.verify()).problem == "", "nothing inside the store can show it"
    assert "before the row that was noted" in (await audit.verify(head)).problem
    for _ in range(4):
        await audit.record(ACTOR, "worker.drain", "forged")
    assert "not the one" in (await audit.verify(head)).problem


async def test_a_chain_of_another_secret_does_not_verify(store: Database) -> None:
    await fill(store)
    assert (await AuditLog(store, Secret("t" * 32)).verify()).problem


async def test_concurrent_appends_make_one_chain(store: Database, database: DatabaseLocation) -> None:
    other = await database.open()
    logs = [AuditLog(store, SECRET), AuditLog(other, SECRET)]
    await asyncio.gather(*(logs[n % 2].record(ACTOR, "act", str(n)) for n in range(40)))
    found = await logs[0].verify()
    assert (found.n_entries, found.problem) == (40, "")
    await other.close()
