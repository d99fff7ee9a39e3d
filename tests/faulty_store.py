"""A database that can be away, hang, be slow, or have another time: pass it where a store is taken."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from emberline.protocol.errors import Unavailable
from emberline.store import Database, Rows, Statement, Transaction, Value

T = TypeVar("T")
Hook = Callable[[str, Any], Awaitable[None]]


class FaultyStore:
    """Passes everything on to a real store, except while a fault is set. Reads work while the store is away: tests
    read what was written."""

    def __init__(self, store: Database, now_us: Callable[[], int] | None = None, after: Hook | None = None) -> None:
        self.store = store
        self._now_us = now_us or store.now_us
        self.away = False  # writes raise Unavailable
        self.hangs = False  # writes never end
        self.mute = False  # notifications are lost
        self.later_us = 0  # by which its clock is ahead
        self.before: Hook | None = None  # awaited before each write, transaction, run and read: the name, what is asked
        self.after = after  # awaited after each read, before its rows are returned
        self.refused = 0  # writes that failed or hang

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        await self._fault("write", params)
        return await self.store.write(sql, params)

    async def transaction(self, statements: Sequence[Statement]) -> list[Rows]:
        await self._fault("transaction", statements)
        return await self.store.transaction(statements)

    async def run(self, work: Callable[[], Transaction[T]]) -> T:
        await self._fault("run", work)
        return await self.store.run(work)

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        if self.before is not None:
            await self.before("read", (sql, params))
        rows = await self.store.read(sql, params)
        if self.after is not None:
            await self.after("read", (sql, params))
        return rows

    async def notify(self, channel: str, payload: str = "") -> None:
        if not self.mute:
            await self.store.notify(channel, payload)

    def now_us(self) -> int:
        return self._now_us() + self.later_us

    async def _fault(self, name: str, asked: Any) -> None:
        if self.before is not None:
            await self.before(name, asked)
        if self.away or self.hangs:
            self.refused += 1
        if self.away:
            raise Unavailable("the database is away")
        if self.hangs:
            await asyncio.Event().wait()
