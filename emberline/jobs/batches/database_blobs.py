"""Blobs in rows of PostgreSQL, where every core of a cluster reads them.

A blob is written in parts, under the id of its upload, and gets its name, a hash of its content, when it is complete.
What was stored in the data folder before there were such rows is read from there.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterable
from hashlib import blake2b

from emberline.jobs.batches.blobs import BlobStore, too_large
from emberline.protocol.errors import Unavailable
from emberline.store import Database, Query, Transaction

PART_BYTES = 1 << 20
_SECOND_US = 1_000_000

_INSERT_PART = "INSERT INTO blob_parts (upload, number, data, stored_us) VALUES (?, ?, ?, ?)"
_PUBLISH = (
    "INSERT INTO blobs (name, upload, n_parts, stored_us) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (name) DO UPDATE SET stored_us = excluded.stored_us RETURNING upload"
)
_RENEW = "UPDATE blobs SET stored_us = ? WHERE name = ? RETURNING upload"
_DELETE_PARTS = "DELETE FROM blob_parts WHERE upload = ?"
_ABANDONED = (
    "DELETE FROM blob_parts WHERE stored_us < ? "
    "AND NOT EXISTS (SELECT 1 FROM blobs WHERE blobs.upload = blob_parts.upload) "
    "AND NOT EXISTS (SELECT 1 FROM blob_parts AS newer WHERE newer.upload = blob_parts.upload AND newer.stored_us >= ?)"
)


class DatabaseBlobs:
    """Implements Blobs."""

    def __init__(self, store: Database, folder: BlobStore, part_bytes: int = PART_BYTES) -> None:
        """`folder` has what this core stored before. A blob is stored in rows of `part_bytes`."""
        self._store = store
        self._part_bytes = part_bytes
        self._folder = folder

    async def put(self, data: bytes) -> str:
        name = await asyncio.to_thread(lambda: blake2b(data, digest_size=32).hexdigest())
        if await self._store.write(_RENEW, (self._store.now_us(), name)):
            return name
        upload = secrets.token_hex(16)
        size = self._part_bytes
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        for number, part in enumerate(parts):
            await self._write_part(upload, number, part)
        await self._publish(name, upload, len(parts))
        return name

    async def put_stream(self, chunks: AsyncIterable[bytes], max_bytes: int) -> tuple[str, int]:
        digest, n_bytes, n_parts = blake2b(digest_size=32), 0, 0
        upload, pending = secrets.token_hex(16), bytearray()
        try:
            async for chunk in chunks:
                n_bytes += len(chunk)
                if n_bytes > max_bytes:
                    raise too_large(max_bytes)
                digest.update(chunk)
                pending += chunk
                while len(pending) >= self._part_bytes:
                    await self._write_part(upload, n_parts, bytes(pending[: self._part_bytes]))
                    del pending[: self._part_bytes]
                    n_parts += 1
            if pending:
                await self._write_part(upload, n_parts, bytes(pending))
                n_parts += 1
        except BaseException:
            if n_parts:
                await self._store.write(_DELETE_PARTS, (upload,))
            raise
        name = digest.hexdigest()
        await self._publish(name, upload, n_parts)
        return name, n_bytes

    async def get(self, name: str) -> bytes:
        return b"".join([part async for part in self.stream(name)])

    async def stream(self, name: str) -> AsyncGenerator[bytes, None]:
        rows = await self._store.read("SELECT upload, n_parts FROM blobs WHERE name = ?", (name,))
        if not rows:
            async for chunk in self._folder.stream(name):
                yield chunk
            return
        ((upload, n_parts),) = rows
        assert isinstance(n_parts, int)
        for number in range(n_parts):
            parts = await self._store.read(
                "SELECT data FROM blob_parts WHERE upload = ? AND number = ?", (upload, number)
            )
            if not parts:
                raise Unavailable("a stored file was removed while it was read")
            data = parts[0][0]
            assert isinstance(data, bytes)
            yield data

    async def unused_since(self, grace_s: float) -> list[str]:
        before_us = self._store.now_us() - int(grace_s * _SECOND_US)
        await self._store.write(_ABANDONED, (before_us, before_us))
        rows = await self._store.report("SELECT name FROM blobs WHERE stored_us < ?", (before_us,))
        return [*(str(name) for (name,) in rows), *await self._folder.unused_since(grace_s)]

    async def discard(self, name: str, grace_s: float) -> None:
        before_us = self._store.now_us() - int(grace_s * _SECOND_US)
        await self._store.run(lambda: _discard(name, before_us))
        await self._folder.discard(name, grace_s)

    async def _write_part(self, upload: str, number: int, data: bytes) -> None:
        await self._store.write(_INSERT_PART, (upload, number, data, self._store.now_us()))

    async def _publish(self, name: str, upload: str, n_parts: int) -> None:
        now_us = self._store.now_us()
        ((kept,),) = await self._store.write(_PUBLISH, (name, upload, n_parts, now_us))
        if kept != upload:  # it was stored before, or meanwhile
            await self._store.write(_DELETE_PARTS, (upload,))


def _discard(name: str, before_us: int) -> Transaction[None]:
    rows = yield Query("DELETE FROM blobs WHERE name = ? AND stored_us < ? RETURNING upload", (name, before_us))
    for (upload,) in rows:
        yield Query(_DELETE_PARTS, (upload,))
