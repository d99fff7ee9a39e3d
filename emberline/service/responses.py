"""Stored responses, which a later request can continue by id.

A record holds only what its own turn added, and the id of the response that it continues; a conversation is read by
walking from its end to its beginning. A response that is deleted or has expired is hidden at once; its row is removed
when no stored response continues it any more.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from emberline.net.periodic import every, stop
from emberline.protocol.complete_response import MAX_HISTORY_BYTES, StoredResponse
from emberline.protocol.errors import TooLarge
from emberline.protocol.sizes import format_limit
from emberline.store import Database

RETENTION_DAYS = 30
MAX_BYTES = 4 << 30  # of all responses; beyond it the account that stores most loses its oldest
CLEANUP_INTERVAL_S = 3600.0
_BATCH = 64  # rows removed together: they share a commit
_DAY_US = 86_400 * 1_000_000

log = logging.getLogger("emberline.responses")


class ResponseStore(Protocol):
    async def put(self, record: StoredResponse) -> bool:
        """Return once the record is durable. False: its parent is gone, and nothing was stored."""

    async def get(self, account: str, response_id: str, whole: bool = False) -> list[StoredResponse]:
        """The response, and with `whole` before it all that it continues, oldest first. Empty: there is none."""

    async def delete(self, account: str, response_id: str) -> bool:
        """False: there is none."""


_COLUMNS = "id, account, parent, depth, created_us, input, body"
_INSERT = f"""
    INSERT INTO responses ({_COLUMNS}, expires_us, n_bytes) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?
    WHERE ? = 0 OR EXISTS (SELECT 1 FROM responses WHERE id = ? AND account = ?)
    RETURNING id
"""
_ONE = f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND account = ? AND expires_us > ?"
# The ids first, the texts by a join at the end: a walk carries no bodies.
_WALK = """
    WITH RECURSIVE walk (id, parent, step) AS (
        SELECT id, parent, 0 FROM responses WHERE id = ? AND account = ? AND expires_us > ?
        UNION ALL
        SELECT earlier.id, earlier.parent, walk.step + 1 FROM responses AS earlier JOIN walk ON earlier.id = walk.parent
    )
"""
_WALK_BYTES = f"{_WALK} SELECT SUM(n_bytes) FROM walk JOIN responses ON responses.id = walk.id"
_WALK_ROWS = f"""
    {_WALK} SELECT {", ".join(f"responses.{name}" for name in _COLUMNS.split(", "))}
    FROM walk JOIN responses ON responses.id = walk.id ORDER BY walk.step DESC
"""
_HIDE = "UPDATE responses SET expires_us = 0 WHERE id = ? AND account = ? AND expires_us > ? RETURNING id"
_CHILDLESS = "NOT EXISTS (SELECT 1 FROM responses AS later WHERE later.parent = responses.id)"
_REMOVE = f"DELETE FROM responses WHERE id = ? AND expires_us <= ? AND {_CHILDLESS} RETURNING account, parent, n_bytes"
_EXPIRED = f"SELECT id FROM responses WHERE expires_us <= ? AND {_CHILDLESS} LIMIT {_BATCH}"
_OLDEST = f"SELECT id FROM responses WHERE account = ? AND {_CHILDLESS} ORDER BY created_us LIMIT {_BATCH}"


class DatabaseResponses:
    """The responses in the core's database."""

    def __init__(
        self,
        store: Database,
        retention_days: int = RETENTION_DAYS,
        max_bytes: int = MAX_BYTES,
        max_history_bytes: int = MAX_HISTORY_BYTES,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """`max_bytes` bounds all responses together, `max_history_bytes` one conversation."""
        self._max_history_bytes = max_history_bytes
        self._now_us = now_us
        self.n_bytes: Counter[str] = Counter()  # by account
        self._store = store
        self._retention_us = retention_days * _DAY_US
        self._max_bytes = max_bytes
        self._full = asyncio.Event()
        self._cleaning: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read how much is stored, and clean up from now on."""
        for account, n_bytes in await self._store.read("SELECT account, SUM(n_bytes) FROM responses GROUP BY account"):
            self.n_bytes[str(account)] = int(n_bytes or 0)
        problem = "old responses were not removed"
        cleaning = every(CLEANUP_INTERVAL_S, self.clean_up, log, problem, at_once=True, wake=self._full)
        self._cleaning = asyncio.create_task(cleaning)

    async def close(self) -> None:
        await stop(self._cleaning)

    async def put(self, record: StoredResponse) -> bool:
        own = (record.id, record.account, record.parent, record.depth, record.created_us, record.input, record.body)
        bounds = (record.created_us + self._retention_us, record.n_bytes)
        parent = (int(record.parent is not None), record.parent, record.account)
        if not await self._store.write(_INSERT, (*own, *bounds, *parent)):
            return False
        self.n_bytes[record.account] += record.n_bytes
        if self.n_bytes.total() > self._max_bytes:
            self._full.set()
        return True

    async def get(self, account: str, response_id: str, whole: bool = False) -> list[StoredResponse]:
        wanted = (response_id, account, self._now_us())
        if not whole:
            rows = await self._store.read(_ONE, wanted)
        else:
            ((n_bytes,),) = await self._store.read(_WALK_BYTES, wanted)
            if int(n_bytes or 0) > (most := self._max_history_bytes):
                raise TooLarge(
                    f"the conversation behind {response_id} is larger than {format_limit(most)}: start anew",
                    param="previous_response_id",
                )
            rows = await self._store.read(_WALK_ROWS, wanted)
        return [msgspec.convert(dict(zip(_COLUMNS.split(", "), row, strict=True)), StoredResponse) for row in rows]

    async def delete(self, account: str, response_id: str) -> bool:
        if not await self._store.write(_HIDE, (response_id, account, self._now_us())):
            return False
        await self._remove(response_id, self._now_us())
        return True

    async def clean_up(self) -> None:
        """Remove expired responses; then, while too much is stored, the oldest ends of conversations."""
        now_us = self._now_us()
        while rows := await self._store.read(_EXPIRED, (now_us,)):
            await asyncio.gather(*(self._remove(str(row[0]), now_us) for row in rows))
        while self.n_bytes.total() > self._max_bytes:
            ((account, _),) = self.n_bytes.most_common(1)
            rows = await self._store.read(_OLDEST, (account,))
            for (response_id,) in rows:
                await self._store.write(_HIDE, (response_id, account, 0))
                await self._remove(str(response_id), self._now_us())
                if self.n_bytes.total() <= self._max_bytes:
                    return
            if not rows:  # our count was wrong: the table counts
                del self.n_bytes[account]

    async def _remove(self, response_id: str, now_us: int) -> None:
        """The row, if it has expired and none continues it; then likewise the one that it continued."""
        next_id: str | None = response_id
        while next_id is not None and (rows := await self._store.write(_REMOVE, (next_id, now_us))):
            ((account, parent, n_bytes),) = rows
            self.n_bytes[str(account)] -= int(n_bytes or 0)
            next_id = None if parent is None else str(parent)
