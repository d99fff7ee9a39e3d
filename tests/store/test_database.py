"""The contract of both databases."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.protocol.errors import BadInput, Unavailable
from emberline.store import BulkQuery, Database, Query, SqliteStore, Transaction, open_store
from emberline.store.postgres import PostgresStore, numbered
from tests.databases import DatabaseLocation


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    await store.write("CREATE TABLE t (a BIGINT PRIMARY KEY, b TEXT)")
    yield store
    await store.close()


async def test_a_write_that_returned_is_read(store: Database) -> None:
    assert await store.write("INSERT INTO t VALUES (?, ?) RETURNING a", (1, "x?")) == [(1,)]
    assert await store.read("SELECT a, b FROM t WHERE b <> '?'") == [(1, "x?")]
    assert await store.read("SELECT SUM(a), COUNT(*), MAX(b) FROM t") == [(1, 1, "x?")]


# More work than a test has time for.
ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT COUNT(*) FROM c"


async def test_look_ups_do_not_wait_for_reports(store: Database) -> None:
    await store.write("INSERT INTO t VALUES (1, 'x')")
    reports = [asyncio.create_task(store.report(ENDLESS)) for _ in range(6)]
    for _ in range(20):
        assert await store.read("SELECT b FROM t WHERE a = ?", (1,)) == [("x",)]
    assert not any(report.done() for report in reports)
    for report in reports:
        report.cancel()
    await asyncio.wait(reports)
    assert await store.report("SELECT COUNT(*) FROM t") == [(1,)], "those that nobody waits for have ended"


async def test_a_report_that_takes_too_long_is_refused(database: DatabaseLocation) -> None:
    if database.kind == "sqlite":
        store: Database = await SqliteStore.open(Path(database.where), report_s=0.1)
    else:
        store = await PostgresStore.open(database.where, report_s=0.1)
    with pytest.raises(BadInput, match=r"takes longer than 0\.1 s"):
        await store.report(ENDLESS)
    assert await store.report("SELECT 1") == [(1,)]
    await store.close()


async def test_grouped_writes_are_independent(store: Database) -> None:
    writes = [store.write("INSERT INTO t VALUES (?, ?)", (i % 250, "x")) for i in range(300)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert sum(isinstance(outcome, list) for outcome in outcomes) == 250
    assert await store.read("SELECT COUNT(*) FROM t") == [(250,)]


async def test_a_transaction_is_atomic(store: Database) -> None:
    rows = await store.transaction(
        [
            Query("INSERT INTO t VALUES (?, ?)", (1, "a")),
            BulkQuery("INSERT INTO t VALUES (?, ?) RETURNING a", [(2, "b"), (3, "c")]),
            ("UPDATE t SET b = ? WHERE a > ? RETURNING b", ("z", 1)),
            BulkQuery("SELECT b FROM t WHERE a = ?", [(1,), (3,)]),
        ]
    )
    assert rows == [[], [(2,), (3,)], [("z",), ("z",)], [("a",), ("z",)]]
    with pytest.raises(Exception, match=r"(?i)unique"):
        await store.transaction([Query("INSERT INTO t VALUES (9, 'q')"), Query("INSERT INTO t VALUES (1, 'q')")])
    assert await store.read("SELECT MAX(a) FROM t") == [(3,)]


async def test_a_transaction_that_reads_before_it_writes(store: Database) -> None:
    def next_number(refuse: bool) -> Transaction[int]:
        ((highest,),) = yield Query("SELECT COALESCE(MAX(a), 0) FROM t")
        yield Query("INSERT INTO t VALUES (?, 'n')", (int(highest or 0) + 1,))
        if refuse:
            raise BadInput("changed my mind")
        return int(highest or 0) + 1

    assert await store.run(lambda: next_number(False)) == 1
    with pytest.raises(BadInput, match="changed my mind"):
        await store.run(lambda: next_number(True))
    assert await store.run(lambda: next_number(False)) == 2
    assert await store.read("SELECT COUNT(*) FROM t") == [(2,)]


async def test_deadlocked_transactions_are_retried(store: Database) -> None:
    """Opposite lock orders: in PostgreSQL these transactions deadlock."""
    await store.write("CREATE TABLE n (k TEXT PRIMARY KEY, v BIGINT)")
    await store.transaction([Query("INSERT INTO n VALUES (?, 0)", (k,)) for k in "ab"])
    add = "UPDATE n SET v = v + ? WHERE k = ?"
    pairs = [("a", "b") if i % 2 else ("b", "a") for i in range(12)]
    await asyncio.gather(*(store.transaction([Query(add, (1, k)) for k in pair]) for pair in pairs))
    assert await store.read("SELECT v FROM n") == [(12,), (12,)]


async def test_listeners_are_notified_and_poll(store: Database) -> None:
    heard: list[str] = []
    ready = asyncio.Event()

    async def listen() -> None:
        async for payload in store.listen("news", poll_s=0.2):
            heard.append(payload)
            ready.set()
            if "x" in heard and heard.count("") >= 2:
                return

    listener = asyncio.create_task(listen())
    await asyncio.wait_for(ready.wait(), 60)  # the first look
    await store.notify("other", "y")
    await store.notify("news", "x")
    await asyncio.wait_for(listener, 60)
    assert "y" not in heard


async def test_the_store_clock_advances(store: Database) -> None:
    first = store.now_us()
    await asyncio.sleep(0.05)
    assert 40_000 < store.now_us() - first < 60_000_000


async def test_close_keeps_queued_writes(database: DatabaseLocation) -> None:
    store = await database.open()
    writes = [asyncio.create_task(store.write("INSERT INTO holdings VALUES (?, 1)", (str(i),))) for i in range(300)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await store.read("SELECT 1")
    with pytest.raises(Unavailable, match="closed"):
        await store.write("SELECT 1")
    again = await database.open()
    assert await again.read("SELECT COUNT(*) FROM holdings") == [(300,)]
    await again.close()


async def test_concurrent_opens_migrate_once(database: DatabaseLocation) -> None:
    stores = await asyncio.gather(*(database.open() for _ in range(4)))
    for store in stores:
        assert await store.read("SELECT COUNT(*) FROM lines") == [(0,)]
        await store.close()


async def test_invalid_urls_and_errors_hide_passwords() -> None:
    for url in ("mysql://x", "sqlite://relative", "http://x"):
        with pytest.raises(BadInput, match="postgresql://"):
            await open_store(url)
    with pytest.raises(Unavailable) as refused:
        await open_store("postgresql://someone:secret@127.0.0.1:1/nowhere")
    assert "secret" not in refused.value.message


def test_placeholders_outside_of_quotes_are_numbered() -> None:
    assert numbered("SELECT '?', ? WHERE a = ? AND b = 'it''s ?'") == "SELECT '?', $1 WHERE a = $2 AND b = 'it''s ?'"
    assert numbered("SELECT ?2 WHERE a = ?1") == "SELECT $2 WHERE a = $1"
