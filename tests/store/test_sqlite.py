import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from emberline.protocol.errors import Unavailable
from emberline.store import SqliteStore, sqlite


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(tmp_path / "folder" / "test.db")
    await store.write("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)")
    yield store
    await store.close()


async def test_a_write_that_returned_is_read(store: SqliteStore) -> None:
    assert await store.write("INSERT INTO t VALUES (?, ?) RETURNING a", (1, "x")) == [(1,)]
    assert await store.read("SELECT a, b FROM t") == [(1, "x")]


async def test_the_file_is_private_and_durable(store: SqliteStore) -> None:
    assert os.stat(store.path).st_mode & 0o777 == 0o600
    assert await store.read("PRAGMA journal_mode") == [("wal",)]
    assert await store.read("PRAGMA synchronous") == [(2,)]


async def test_concurrent_writes_share_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[str] = []
    connect = sqlite3.connect

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(executed.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    store = await SqliteStore.open(tmp_path / "t.db")
    await store.write("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)")
    executed.clear()
    await asyncio.gather(*(store.write("INSERT INTO t VALUES (?, ?)", (i, "x")) for i in range(1000)))
    groups = "\n".join(executed).split("COMMIT")[:-1]
    sizes = [group.count("INSERT INTO t") for group in groups]
    assert sum(sizes) == 1000
    assert len(sizes) < 100
    assert max(sizes) <= sqlite.MAX_GROUP
    assert await store.read("SELECT count(*) FROM t") == [(1000,)]
    await store.close()


async def test_an_invalid_statement_does_not_affect_its_group(store: SqliteStore) -> None:
    outcomes = await asyncio.gather(
        store.write("INSERT INTO t VALUES (1, 'first')"),
        store.write("INSERT INTO t VALUES (1, 'twice')"),
        store.write("INSERT INTO nowhere VALUES (1)"),
        store.write("INSERT INTO t VALUES (?, ?)", (1 << 70, "too big to bind")),
        store.write("INSERT INTO t VALUES (2, 'last')"),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [
        list,
        sqlite3.IntegrityError,
        sqlite3.OperationalError,
        OverflowError,
        list,
    ]
    assert await store.read("SELECT b FROM t ORDER BY a") == [("first",), ("last",)]


async def test_a_full_disk_is_reported_and_survived(store: SqliteStore) -> None:
    (pages,) = (await store.write("PRAGMA page_count"))[0]
    await store.write(f"PRAGMA max_page_count = {int(str(pages)) + 2}")
    outcomes = await asyncio.gather(
        *(store.write("INSERT INTO t VALUES (?, ?)", (i, "x" * 3000)) for i in range(20)), return_exceptions=True
    )
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert failed
    assert failed
    assert all(isinstance(outcome, Unavailable) and "disk is full" in outcome.message for outcome in failed)
    assert await store.read("SELECT count(*) FROM t") == [(20 - len(failed),)]
    await store.write("PRAGMA max_page_count = 100000")
    await store.write("INSERT INTO t VALUES (100, 'space again')")


async def test_a_lock_is_reported_and_survived(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "t.db", busy_timeout_s=0.05)
    other = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked by another process"):
        await store.write("CREATE TABLE t (a)")
    other.execute("ROLLBACK")
    await store.write("CREATE TABLE t (a)")
    other.close()
    await store.close()


async def test_the_reading_connection_cannot_write(store: SqliteStore) -> None:
    with pytest.raises(Unavailable, match="cannot be written"):
        await store.read("INSERT INTO t VALUES (1, 'x')")


async def test_a_cancelled_writer_still_writes(store: SqliteStore) -> None:
    task = asyncio.create_task(store.write("INSERT INTO t VALUES (1, 'x')"))
    await asyncio.sleep(0)
    task.cancel()
    await store.write("INSERT INTO t VALUES (2, 'y')")
    assert task.cancelled()
    assert await store.read("SELECT count(*) FROM t") == [(2,)]


async def test_close_commits_queued_writes_and_refuses_later_ones(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "t.db")
    await store.write("CREATE TABLE t (a)")
    writes = [asyncio.create_task(store.write("INSERT INTO t VALUES (?)", (i,))) for i in range(700)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    await store.close()
    for use in (store.write, store.read):
        with pytest.raises(Unavailable, match="closed"):
            await use("SELECT 1")
    again = await SqliteStore.open(tmp_path / "t.db")
    assert await again.read("SELECT count(*) FROM t") == [(700,)]
    await again.close()


async def test_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "t.db").write_bytes(b"this is a letter, not a database. " * 100)
    with pytest.raises(Unavailable, match="not a database"):
        await SqliteStore.open(tmp_path / "t.db")


async def test_an_unusable_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"cannot use .*file"):
        await SqliteStore.open(tmp_path / "file" / "t.db")


async def test_acknowledged_writes_survive_a_kill(tmp_path: Path) -> None:
    script = """
import asyncio, os, sys
from pathlib import Path
from typing import Any
from emberline.store import SqliteStore
async def main():
    store = await SqliteStore.open(Path(sys.argv[1]))
    await store.write("CREATE TABLE t (a)")
    await asyncio.gather(*(store.write("INSERT INTO t VALUES (?)", (i,)) for i in range(300)))
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script, str(tmp_path / "t.db")])
    assert done.returncode == -9
    store = await SqliteStore.open(tmp_path / "t.db")
    assert await store.read("SELECT count(*) FROM t") == [(300,)]
    await store.close()
