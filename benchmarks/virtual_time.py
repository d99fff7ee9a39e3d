"""An event loop in virtual time: its clock jumps to the next timer, except while real work runs on threads."""

import asyncio
import selectors
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from emberline.store import Database, Rows, Statement, Transaction, Value
from emberline.store.notifications import Subscription

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 1_000_000.0
        self.n_real = 0  # running operations that take real time
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._loop.n_real:
            return super().select(None if timeout is None or timeout > 0 else 0)
        found = super().select(0)
        if not found and timeout:
            self._loop.now_s += timeout
        return found


class RealTimeStore:
    """A store whose clock is virtual and whose operations take real time."""

    def __init__(self, store: Database, loop: VirtualLoop) -> None:
        self._store = store
        self._loop = loop

    async def _real(self, work: Any) -> Any:
        self._loop.n_real += 1
        try:
            return await work
        finally:
            self._loop.n_real -= 1

    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        return await self._real(self._store.write(sql, params))  # type: ignore[no-any-return]

    async def transaction(self, statements: Sequence[Statement]) -> list[Rows]:
        return await self._real(self._store.transaction(statements))  # type: ignore[no-any-return]

    async def run(self, work: Callable[[], Transaction[T]]) -> T:
        return await self._real(self._store.run(work))  # type: ignore[no-any-return]

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        return await self._real(self._store.read(sql, params))  # type: ignore[no-any-return]

    async def notify(self, channel: str, payload: str = "") -> None:
        await self._store.notify(channel, payload)

    def listen(self, channel: str, poll_s: float = 5.0) -> Subscription:
        return self._store.listen(channel, poll_s)

    def now_us(self) -> int:
        return int(self._loop.now_s * 1e6)

    async def close(self) -> None:
        await self._real(self._store.close())
