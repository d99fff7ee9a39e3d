"""Uploaded files: a row with a reference to a blob; and the bytes each account has stored.

A batch references its input's blob itself, so deleting a file does not affect a batch.
"""

import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Literal

import msgspec

from emberline.jobs.batches.blobs import Blobs
from emberline.jobs.limits import QueueLimits
from emberline.protocol.errors import NotFound, TooLarge
from emberline.protocol.sizes import format_limit
from emberline.store import Database, Query, Transaction, Value
from emberline.store.database import decode_row


class File(msgspec.Struct, frozen=True):
    id: str
    account: str
    name: str
    purpose: str
    n_bytes: int
    blob: str
    created_us: int
    expires_us: int | None = None


_COLUMNS = ", ".join(File.__struct_fields__)
_LIVE = "(expires_us IS NULL OR expires_us > ?)"
_INSERT = f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_ONE = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND account = ? AND {_LIVE}"
_DELETE = "DELETE FROM files WHERE id = ? AND account = ? RETURNING n_bytes"
_EXPIRED = "SELECT id, account FROM files WHERE expires_us <= ? LIMIT 100"
_STORED = "SELECT n_bytes FROM holdings WHERE account = ?"
_ADD_STORED = """
    INSERT INTO holdings (account, n_bytes) VALUES (?, ?)
    ON CONFLICT (account) DO UPDATE SET n_bytes = holdings.n_bytes + excluded.n_bytes
"""


def add_stored_bytes(account: Value, n_bytes: int) -> Query:
    """Changes what the account has stored; belongs into the transaction that stores or removes the bytes."""
    return Query(_ADD_STORED, (account, n_bytes))


async def check_storage(store: Database, account: str, limits: QueueLimits, param: str | None = None) -> int:
    """The bytes that the account may still store; TooLarge if none."""
    rows = await store.read(_STORED, (account,))
    room = limits.max_account_bytes - (int(rows[0][0] or 0) if rows else 0)
    if room <= 0:
        raise TooLarge("the account's files and batches have used up its storage: delete some", param=param)
    return room


class FileStore:
    def __init__(self, store: Database, blobs: Blobs, limits: QueueLimits) -> None:
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
        room = await check_storage(self._store, account, self._limits, param="file")
        chunks = _one_chunk(content) if isinstance(content, bytes) else content
        blob, n_bytes = await self._blobs.put_stream(chunks, min(room, self._limits.max_file_bytes))
        now_us = self._store.now_us()
        expires_us = None if expires_s is None else now_us + int(expires_s * 1e6)
        file = File(f"file-{secrets.token_hex(12)}", account, name, purpose, n_bytes, blob, now_us, expires_us)
        insert = Query(_INSERT, msgspec.structs.astuple(file))
        await self._store.transaction([insert, add_stored_bytes(account, n_bytes)])
        return file

    async def get(self, account: str, file_id: str) -> File:
        rows = await self._store.read(_ONE, (file_id, account, self._store.now_us()))
        if not rows:
            raise NotFound(f"no file {file_id}", param="file_id")
        return decode_row(File, _COLUMNS, rows[0])

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
        query = f"SELECT {_COLUMNS} FROM files WHERE {conditions} ORDER BY created_us {order}, id {order} LIMIT ?"
        rows = await self._store.read(query, (*params, limit + 1))
        return [decode_row(File, _COLUMNS, row) for row in rows[:limit]], len(rows) > limit

    def content(self, file: File) -> AsyncGenerator[bytes, None]:
        return self._blobs.stream(file.blob)

    async def read(self, account: str, file_id: str, max_bytes: int) -> bytes:
        """The whole content of a file. Raises NotFound, or TooLarge if it has more bytes."""
        file = await self.get(account, file_id)
        if file.n_bytes > max_bytes:
            raise TooLarge(f"the file {file_id} is larger than {format_limit(max_bytes)}", param="file_id")
        return await self._blobs.get(file.blob)

    async def delete(self, account: str, file_id: str) -> bool:
        """Delete a file. Returns True if there was one. The blob is collected once nothing refers to it."""
        return await self._store.run(lambda: _delete(account, file_id))

    async def delete_expired(self) -> None:
        for file_id, account in await self._store.read(_EXPIRED, (self._store.now_us(),)):
            await self.delete(str(account), str(file_id))


def _delete(account: str, file_id: str) -> Transaction[bool]:
    rows = yield Query(_DELETE, (file_id, account))
    for (n_bytes,) in rows:
        yield add_stored_bytes(account, -int(n_bytes or 0))
    return bool(rows)


async def _one_chunk(content: bytes) -> AsyncIterator[bytes]:
    yield content
