"""Concurrent calls made into one: what arrives while the last group is being written is the next group."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MAX_GROUP = 256


class Gatherer(Generic[K, V]):
    """`write` gets a group and says which of its keys took; a key that comes twice in a group is its first."""

    def __init__(self, write: Callable[[list[V]], Awaitable[set[K]]]) -> None:
        self._write = write
        self._waiting: list[tuple[K, V, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, key: K, value: V) -> bool:
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, value, done))
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return await done

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await self._flush()
        finally:
            self._task = None

    async def _flush(self) -> None:
        """One group. What cannot go in because its key is there already waits for the next."""
        group: dict[K, tuple[V, asyncio.Future[bool]]] = {}
        later: list[tuple[K, V, asyncio.Future[bool]]] = []
        for key, value, done in self._waiting:
            if key in group or len(group) >= MAX_GROUP:
                later.append((key, value, done))
            else:
                group[key] = (value, done)
        self._waiting = later
        try:
            took = await self._write([value for value, _ in group.values()])
        except Exception as error:
            for _, done in group.values():
                if not done.done():
                    done.set_exception(error)
            return
        for key, (_, done) in group.items():
            if not done.done():
                done.set_result(key in took)
