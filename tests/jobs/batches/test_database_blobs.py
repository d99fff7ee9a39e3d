"""Blobs in rows, in both databases."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.batches.database_blobs import DatabaseBlobs
from emberline.protocol.errors import TooLarge, Unavailable
from emberline.store import Database
from tests.databases import DatabaseLocation


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


async def chunks(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def blobs_in(store: Database, folder: Path) -> DatabaseBlobs:
    """Blobs in small parts."""
    return DatabaseBlobs(store, BlobStore(folder), part_bytes=1000)


async def add_part(store: Database, upload: str, number: int, stored_us: int) -> None:
    """Write a part of an upload that has not ended."""
    insert = "INSERT INTO blob_parts (upload, number, data, stored_us) VALUES (?, ?, ?, ?)"
    await store.write(insert, (upload, number, b"x", stored_us))


async def n_parts(store: Database) -> int:
    ((n,),) = await store.read("SELECT count(*) FROM blob_parts")
    assert isinstance(n, int)
    return n


async def test_what_one_core_stores_another_reads(store: Database, tmp_path: Path) -> None:
    first, second = (blobs_in(store, tmp_path / name) for name in "ab")
    data = os.urandom(2500)
    name = await first.put(data)
    assert await second.get(name) == data
    assert await first.put_stream(chunks(data, 700), 2500) == (name, 2500)
    assert await n_parts(store) == 3, "stored once"
    assert [len(part) async for part in second.stream(name)] == [1000, 1000, 500]
    empty = await first.put(b"")
    assert await second.get(empty) == b""
    assert await asyncio.gather(*(first.put(b"same" * 999) for _ in range(5))) == [await second.put(b"same" * 999)] * 5
    assert await n_parts(store) == 7


async def test_a_stream_that_is_too_large_leaves_nothing(store: Database, tmp_path: Path) -> None:
    blobs = blobs_in(store, tmp_path)
    with pytest.raises(TooLarge, match="2,000"):
        await blobs.put_stream(chunks(bytes(5000), 900), 2000)
    assert await n_parts(store) == 0
    with pytest.raises(Unavailable):
        await blobs.get("0" * 64)


async def test_what_was_stored_in_the_folder_is_still_read(store: Database, tmp_path: Path) -> None:
    folder = BlobStore(tmp_path)
    name = await folder.put(b"before")
    assert await DatabaseBlobs(store, folder).get(name) == b"before"


async def test_unused_blobs_are_removed_unless_renewed(store: Database, tmp_path: Path) -> None:
    blobs = blobs_in(store, tmp_path)
    name = await blobs.put(bytes(1500))
    assert await blobs.unused_since(60) == []
    assert await blobs.unused_since(-1) == [name]
    await blobs.discard(name, 60)
    assert await blobs.get(name) == bytes(1500)
    await blobs.discard(name, -1)
    assert await n_parts(store) == 0
    await add_part(store, "abandoned", 0, store.now_us())
    assert await n_parts(store) == 1
    await blobs.unused_since(-1)
    assert await n_parts(store) == 0


async def test_the_parts_of_an_upload_that_goes_on_are_kept(store: Database, tmp_path: Path) -> None:
    blobs = blobs_in(store, tmp_path)
    await add_part(store, "slow", 0, 0)
    await add_part(store, "slow", 1, store.now_us())
    await blobs.unused_since(3600)
    assert await n_parts(store) == 2
