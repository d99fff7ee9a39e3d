import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.batches.files import FileStore
from emberline.jobs.limits import QueueLimits
from emberline.protocol.errors import NotFound, TooLarge, Unavailable
from emberline.store import Database
from tests.databases import DatabaseLocation
from tests.jobs.queue.helpers import ManualClock, audit


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await audit(store)
    await store.close()


@pytest.fixture
def files(store: Database, tmp_path: Path) -> FileStore:
    return FileStore(store, BlobStore(tmp_path / "blobs"), QueueLimits(max_file_bytes=1000, max_account_bytes=2500))


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_file_round_trip(files: FileStore) -> None:
    file = await files.add("a", "in.jsonl", "batch", pieces(b"one\n", b"two\n"))
    assert (file.name, file.purpose, file.n_bytes) == ("in.jsonl", "batch", 8)
    assert await files.get("a", file.id) == file
    assert b"".join([chunk async for chunk in files.content(file)]) == b"one\ntwo\n"
    for account, file_id in (("b", file.id), ("a", "file-nothing")):
        with pytest.raises(NotFound):
            await files.get(account, file_id)
        assert not await files.delete(account, file_id)
    assert await files.delete("a", file.id)
    with pytest.raises(NotFound):
        await files.get("a", file.id)


async def test_file_pagination(files: FileStore, store: Database) -> None:
    time = ManualClock(store)
    made = []
    for i in range(5):
        made.append(await files.add("a", f"{i}", "batch" if i % 2 else "other", b"x"))
        time.advance(1)
    page, more = await files.list("a", limit=2)
    assert ([file.name for file in page], more) == (["4", "3"], True)
    page, more = await files.list("a", after=made[3].id, limit=5)
    assert ([file.name for file in page], more) == (["2", "1", "0"], False)
    page, _ = await files.list("a", purpose="batch", order="asc")
    assert [file.name for file in page] == ["1", "3"]
    assert await files.list("b") == ([], False)


async def test_file_size_limits_and_expiry(files: FileStore, store: Database, tmp_path: Path) -> None:
    time = ManualClock(store)
    with pytest.raises(TooLarge, match="1,000 bytes"):
        await files.add("a", "f", "batch", pieces(b"x" * 600, b"x" * 600))
    for i in range(3):
        await files.add("a", "f", "batch", bytes([i]) * 833, expires_s=10)
    with pytest.raises(TooLarge):
        await files.add("a", "f", "batch", b"y" * 10)
    time.advance(11)
    assert await files.list("a") == ([], False)
    await files.delete_expired()
    assert await store.read("SELECT COUNT(*) FROM files") == [(0,)]
    await files.add("a", "f", "batch", b"y")


async def test_blobs_are_deduplicated_and_survive_a_partial_write(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    assert await blobs.put(b"same") == await blobs.put(b"same")
    (tmp_path / ".part-dead").write_bytes(b"half")
    os.utime(tmp_path / ".part-dead", (1, 1))
    name = await blobs.put(b"old")
    os.utime(blobs.path_of(name), (1, 1))
    assert list(blobs.old(60)) == [name]
    assert not (tmp_path / ".part-dead").exists()
    await blobs.put(b"old")  # put again just before it would have been collected
    assert not blobs.remove(name, 60)
    assert await blobs.get(name) == b"old"
    os.utime(blobs.path_of(name), (1, 1))
    assert blobs.remove(name, 60)
    with pytest.raises(Unavailable, match="cannot read"):
        await blobs.get(name)


async def test_concurrent_collection_loses_no_blob(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    name = await blobs.put(b"x" * 100)

    def collect() -> None:
        for _ in range(200):
            blobs.remove(name, -1.0)  # however young

    task = asyncio.create_task(asyncio.to_thread(collect))
    for _ in range(50):
        assert await blobs.put(b"x" * 100) == name
    await task
    assert await blobs.put(b"x" * 100) == name
    assert await blobs.get(name) == b"x" * 100
