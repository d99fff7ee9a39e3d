"""Wake-ups within a process: who listens to a channel hears what is said on it."""

import asyncio
import contextlib
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

_MAX_HELD = 1024  # payloads a slow listener has waiting; beyond, it is told to look for itself


class _Ear:
    """One listener's mailbox."""

    def __init__(self) -> None:
        self.heard: dict[str, None] = {}  # a set that keeps its order: saying it twice is hearing it once
        self.stirred = asyncio.Event()

    def hear(self, payload: str) -> None:
        if len(self.heard) >= _MAX_HELD:
            self.heard.clear()
            payload = ""
        self.heard[payload] = None
        self.stirred.set()


class Notifier:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._ears: defaultdict[str, set[_Ear]] = defaultdict(set)

    def say(self, channel: str, payload: str = "") -> None:
        for ear in self._ears.get(channel, ()):
            ear.hear(payload)

    def stir(self) -> None:
        """Something may have been missed on every channel."""
        for channel in self._ears:
            self.say(channel)

    async def listen(self, channel: str, poll_s: float) -> AsyncIterator[str]:
        ear = _Ear()
        self._ears[channel].add(ear)
        try:
            while True:
                try:
                    # Not `wait_for`: in Python 3.11 it loses a cancellation that comes with the wake-up.
                    async with asyncio.timeout(poll_s * random.uniform(0.5, 1.5)):
                        await ear.stirred.wait()
                except TimeoutError:
                    ear.heard[""] = None
                heard, ear.heard = ear.heard, {}
                ear.stirred.clear()
                for payload in heard:
                    yield payload
        finally:
            self._ears[channel].discard(ear)


_BACKOFF_S = (0.2, 5.0)
_ALIVE_S = 30.0  # between two signs of life

log = logging.getLogger("emberline.store")


class PostgresListener:
    """Connects when the first channel is wanted, and again whenever it is cut; then everyone is told to look."""

    def __init__(self, connect: Callable[[], Awaitable[Any]], signals: Notifier) -> None:
        self._connect = connect
        self._signals = signals
        self._channels: set[str] = set()
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def want(self, channel: str) -> None:
        if channel in self._channels:
            return
        self._channels.add(channel)
        self._stirred.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff_s = _BACKOFF_S[0]
        while True:
            try:
                connection = await self._connect()
            except Exception as error:
                log.warning("cannot listen to the database: %s", error)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
                continue
            backoff_s = _BACKOFF_S[0]
            try:
                await self._hear(connection)
            except Exception as error:
                log.warning("listening to the database was cut: %s", error)
            finally:
                connection.terminate()

    async def _hear(self, connection: Any) -> None:
        """Until the connection fails: a sign of life finds out within half a minute, a closed socket at once."""
        heard: set[str] = set()
        connection.add_termination_listener(lambda *_: self._stirred.set())
        while not connection.is_closed():
            self._stirred.clear()
            for channel in self._channels - heard:
                await connection.add_listener(f"emberline_{channel}", self._pass_on)
                heard.add(channel)
                self._signals.say(channel)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ALIVE_S):  # not `wait_for`, for the reason in signals.py
                    await self._stirred.wait()
                continue
            await connection.execute("SELECT 1", timeout=_ALIVE_S)

    def _pass_on(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        self._signals.say(channel.removeprefix("emberline_"), payload)
