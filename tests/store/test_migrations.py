import sqlite3
from pathlib import Path

import pytest

from emberline.accounts.usage_report import ReportQuery, UsageReports
from emberline.protocol.errors import Unavailable
from emberline.store import SqliteStore, migrations

RELEASE_0_1 = 1  # the schema version of release 0.1.0


async def test_a_new_database_is_up_to_date_and_opens_again(tmp_path: Path) -> None:
    for _ in range(2):
        store = await SqliteStore.open(tmp_path / "t.db")
        assert await store.read("PRAGMA user_version") == [(len(migrations.MIGRATIONS),)]
        assert await store.read("SELECT count(*) FROM usage") == [(0,)]
        await store.close()


async def test_an_old_database_keeps_its_rows(tmp_path: Path) -> None:
    first = ("CREATE TABLE t (a INTEGER)", "INSERT INTO t VALUES (7)")
    await (await SqliteStore.open(tmp_path / "t.db", (first,))).close()
    store = await SqliteStore.open(tmp_path / "t.db", (first, ("ALTER TABLE t ADD COLUMN b INTEGER DEFAULT 1",)))
    assert await store.read("SELECT a, b FROM t") == [(7, 1)]
    await store.close()


@pytest.mark.parametrize("version", [RELEASE_0_1, len(migrations.MIGRATIONS) - 1])
async def test_a_database_of_the_version_before_keeps_what_it_has_recorded(tmp_path: Path, version: int) -> None:
    """A data folder opens with the release that follows, and its usage is reported."""
    old = await SqliteStore.open(tmp_path / "t.db", migrations.MIGRATIONS[:version])
    columns = {row[1] for row in await old.read("PRAGMA table_info(usage)")}
    known = {"id": "r", "account": "a", "model": "m", "model_version": "v", "class": "default", "status": "finished"}
    counts = {"created_us": 7, "finished_us": 9, "input_tokens": 5, "output_tokens": 3, "reasoning_tokens": 0}
    row = {**known, **counts, "key_id": "", "cached_by_tier": "{}", "price_version": ""}
    row = {name: value for name, value in row.items() if name in columns}
    places = ", ".join("?" * len(row))
    await old.write(f"INSERT INTO usage ({', '.join(row)}) VALUES ({places})", tuple(row.values()))
    await old.close()
    store = await SqliteStore.open(tmp_path / "t.db")
    (found,) = await UsageReports(store).report(ReportQuery(by=("account", "session"), since=0, until=1))
    assert (found.n_requests, found.input_tokens, found.device_ms) == (1, 5, 0)
    assert await UsageReports(store).report(ReportQuery(by=("account",), since=0, until=1)) != []
    await store.close()


async def test_a_newer_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    await (await SqliteStore.open(tmp_path / "t.db")).close()
    with sqlite3.connect(tmp_path / "t.db") as newer:
        newer.execute("PRAGMA user_version = 999")
    with pytest.raises(Unavailable, match=r"schema version 999.*upgrade Emberline"):
        await SqliteStore.open(tmp_path / "t.db")
    assert sqlite3.connect(tmp_path / "t.db").execute("PRAGMA user_version").fetchone() == (999,)


async def test_a_failed_migration_is_rolled_back(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await SqliteStore.open(tmp_path / "t.db", (("CREATE TABLE t (a)", "NONSENSE"),))
    found = sqlite3.connect(tmp_path / "t.db").execute("SELECT count(*) FROM sqlite_master").fetchone()
    assert found == (0,)
