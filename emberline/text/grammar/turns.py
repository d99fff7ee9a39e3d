"""Whose turn it is at the few processes that make grammars.

How long one takes is not known before; its size is a fair guess. The small go first, and waiting makes up for size. The
large never hold the last process, so what is small waits for what is small only.
"""

import asyncio
import time
from bisect import insort
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, Generic, NamedTuple, TypeVar

from emberline.protocol.errors import Overloaded

MAX_WAITING: Final = 64
SMALL_BYTES: Final = 8 << 10
S_PER_BYTE: Final = 1e-3  # what a byte costs, in seconds of waiting
MAX_COST_S: Final = 30.0  # nobody lets those pass who come later than this
RETRY_AFTER_S: Final = 5.0

T = TypeVar("T")


class _Waiting(NamedTuple, Generic[T]):
    rank: float
    number: int  # of equals, who came first
    large: bool
    turn: asyncio.Future[T]


class Turns(Generic[T]):
    def __init__(self, things: Iterable[T]) -> None:
        self._free = list(things)  # the last is taken first: the same one, mostly
        self._most_large = max(1, len(self._free) - 1)
        self._n_large = 0
        self._n_came = 0
        self._waiting: list[_Waiting[T]] = []  # sorted

    @asynccontextmanager
    async def take(self, n_bytes: int) -> AsyncIterator[T]:
        """One of the things, for something of that size. Overloaded: too many others wait who go before."""
        large = n_bytes > SMALL_BYTES
        thing = await self._wait(n_bytes, large)
        try:
            yield thing
        finally:
            self._give_back(thing, large)

    async def _wait(self, n_bytes: int, large: bool) -> T:
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._n_came += 1
        rank = time.monotonic() + min(n_bytes * S_PER_BYTE, MAX_COST_S)
        insort(self._waiting, _Waiting(rank, self._n_came, large, turn))
        self._pass_on()
        if len(self._waiting) > MAX_WAITING:
            message = "too many new formats are being compiled: try again in a moment, or use one that was used before"
            self._waiting.pop().turn.set_exception(Overloaded(message, retry_after_s=RETRY_AFTER_S))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result(), large)
            raise

    def _give_back(self, thing: T, large: bool) -> None:
        self._free.append(thing)
        self._n_large -= large
        self._pass_on()

    def _pass_on(self) -> None:
        """What is free, to the first who may have it. Who was cancelled no longer waits."""
        self._waiting = [each for each in self._waiting if not each.turn.done()]
        while self._free:
            full = self._n_large >= self._most_large
            first = next((each for each in self._waiting if not (each.large and full)), None)
            if first is None:
                return
            self._waiting.remove(first)
            self._n_large += first.large
            first.turn.set_result(self._free.pop())
