"""Uploaded files: a row, and a blob that holds what is in them.

A batch holds its input's blob by itself, so deleting a file never harms a batch.
"""

import secrets
from collections.abc import AsyncIterable, AsyncIterator
from typing import Literal

import msgspec

from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import sql
from emberline.protocol.errors import NotFound, TooLarge
from emberline.store import Database, Rows, Step, Work

_COLUMNS = "id, account, name, purpose, n_bytes, blob, created_us, expires_us"
_LIVE = "(expires_us IS NULL OR expires_us > ?)"
_INSERT = f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_ONE = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND account = ? AND {_LIVE}"
_DELETE = "DELETE FROM files WHERE id = ? AND account = ? RETURNING n_bytes"
_EXPIRED = "SELECT id, account FROM files WHERE expires_us <= ? LIMIT 100"
_HELD = "SELECT n_bytes FROM holdings WHERE account = ?"


class File(msgspec.Struct, frozen=True):
    id: str
    account: str
    name: str
    purpose: str
    n_bytes: int
    blob: str
    created_us: int
    expires_us: int | None = None


class FileStore:
    def __init__(self, store: Database, blobs: BlobStore, limits: QueueLimits) -> None:
        self._store = store
        self._blobs = blobs
        self._limits = limits

    async def add(
        self,
        account: str,
        name: str,
        purpose: str,
        content: AsyncIterable[bytes] | bytes,
        expires_s: float | None = None,
    ) -> File:
        """Durable when it returns."""
        room = self._limits.max_account_bytes - await held_bytes(self._store, account)
        if room <= 0:
            raise TooLarge("the account's files and batches have used up its storage: delete some", param="file")
        chunks = _one(content) if isinstance(content, bytes) else content
        blob, n_bytes = await self._blobs.put_stream(chunks, min(room, self._limits.max_file_bytes))
        now_us = self._store.now_us()
        expires_us = None if expires_s is None else now_us + int(expires_s * 1e6)
        file = File(f"file-{secrets.token_hex(12)}", account, name, purpose, n_bytes, blob, now_us, expires_us)
        row = msgspec.structs.astuple(file)
        await self._store.transaction([Step(_INSERT, row), Step(sql.HOLD, (account, n_bytes))])
        return file

    async def get(self, account: str, file_id: str) -> File:
        rows = await self._store.read(_ONE, (file_id, account, self._store.now_us()))
        if not rows:
            raise NotFound(f"no file {file_id}", param="file_id")
        return _files(rows)[0]

    async def list(
        self,
        account: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> tuple[list[File], bool]:
        """A page, and whether there is more."""
        params: list[str | int] = [account, self._store.now_us()]
        conditions = f"account = ? AND {_LIVE}"
        if purpose is not None:
            conditions += " AND purpose = ?"
            params.append(purpose)
        if after is not None:
            last = await self.get(account, after)
            conditions += f" AND (created_us, id) {'>' if order == 'asc' else '<'} (?, ?)"
            params += [last.created_us, last.id]
        up = order.upper()
        query = f"SELECT {_COLUMNS} FROM files WHERE {conditions} ORDER BY created_us {up}, id {up} LIMIT ?"
        rows = await self._store.read(query, (*params, limit + 1))
        return _files(rows[:limit]), len(rows) > limit

    def content(self, file: File) -> AsyncIterator[bytes]:
        return self._blobs.stream(file.blob)

    async def delete(self, account: str, file_id: str) -> bool:
        """Whether there was one. Its blob goes when nothing refers to it any more."""
        return await self._store.run(lambda: _delete(account, file_id))

    async def drop_expired(self) -> None:
        for file_id, account in await self._store.read(_EXPIRED, (self._store.now_us(),)):
            await self.delete(str(account), str(file_id))


async def held_bytes(store: Database, account: str) -> int:
    rows = await store.read(_HELD, (account,))
    return int(rows[0][0] or 0) if rows else 0


def _delete(account: str, file_id: str) -> Work[bool]:
    rows = yield Step(_DELETE, (file_id, account))
    for (n_bytes,) in rows:
        yield Step(sql.HOLD, (account, -int(n_bytes or 0)))
    return bool(rows)


def _files(rows: Rows) -> list[File]:
    return [msgspec.convert(dict(zip(_COLUMNS.split(", "), row, strict=True)), File) for row in rows]


async def _one(content: bytes) -> AsyncIterator[bytes]:
    yield content
