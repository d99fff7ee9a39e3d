"""Notifications: wake-ups between tasks of one process, and PostgreSQL's LISTEN between processes."""

import asyncio
import contextlib
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakSet

_MAX_PENDING = 1024  # payloads per subscription; beyond, they are replaced by ""
_BACKOFF_S = (0.2, 5.0)
_PROBE_S = 30.0  # between two checks of an idle LISTEN connection
_jitter = random.Random()  # a generator of its own, which no one else seeds: processes must not poll in step

log = logging.getLogger("emberline.store")


class Subscription:
    """One consumer's notifications on one channel; an endless async iterator over payloads, each delivered once.

    It is active from its creation to its last reference, so a consumer that subscribes before it reads the store
    misses nothing. The payload "" means that notifications may have been lost: read the state again.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._pending: dict[str, None] = {}  # an ordered set
        self._arrived = asyncio.Event()

    def put(self, payload: str = "") -> None:
        if len(self._pending) >= _MAX_PENDING:
            self._pending.clear()
            payload = ""
        self._pending[payload] = None
        self._arrived.set()

    def skip(self) -> None:
        """Forget what has arrived: the consumer reads the whole state now."""
        self._pending.clear()

    def __aiter__(self) -> "Subscription":
        return self

    async def __anext__(self) -> str:
        if not self._pending:
            self._arrived.clear()
            try:
                # Not `wait_for`: in Python 3.11 it loses a cancellation that comes with the wake-up.
                async with asyncio.timeout(self._poll_s * _jitter.uniform(0.5, 1.5)):
                    await self._arrived.wait()
            except TimeoutError:
                return ""
        payload = next(iter(self._pending))
        del self._pending[payload]
        return payload


class Notifier:
    """The subscriptions of one event loop."""

    def __init__(self) -> None:
        self._subscriptions: defaultdict[str, WeakSet[Subscription]] = defaultdict(WeakSet)

    def subscribe(self, channel: str, poll_s: float) -> Subscription:
        subscription = Subscription(poll_s)
        self._subscriptions[channel].add(subscription)
        return subscription

    def publish(self, channel: str, payload: str = "") -> None:
        for subscription in self._subscriptions.get(channel, ()):
            subscription.put(payload)


class PostgresListener:
    """Passes PostgreSQL notifications on to a Notifier.

    Connects when the first channel is added and again whenever the connection is lost; then every channel gets a "".
    """

    def __init__(self, connect: Callable[[], Awaitable[Any]], notifier: Notifier) -> None:
        self._connect = connect
        self._notifier = notifier
        self._channels: set[str] = set()
        self._changed = asyncio.Event()  # a channel was added, or the connection was closed
        self._task: asyncio.Task[None] | None = None

    def add(self, channel: str) -> None:
        if channel in self._channels:
            return
        self._channels.add(channel)
        self._changed.set()
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
                await asyncio.sleep(backoff_s * _jitter.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
                continue
            backoff_s = _BACKOFF_S[0]
            try:
                await self._listen(connection)
            except Exception as error:
                log.warning("the listening connection to the database was lost: %s", error)
            finally:
                connection.terminate()

    async def _listen(self, connection: Any) -> None:
        """Listen until the connection fails. The probe notices a failure within half a minute, and a closed socket
        immediately."""
        active: set[str] = set()
        connection.add_termination_listener(lambda *_: self._changed.set())
        while not connection.is_closed():
            self._changed.clear()
            for channel in self._channels - active:
                await connection.add_listener(f"emberline_{channel}", self._publish)
                active.add(channel)
                self._notifier.publish(channel)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_S):
                    await self._changed.wait()
                continue
            await connection.execute("SELECT 1", timeout=_PROBE_S)

    def _publish(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        self._notifier.publish(channel.removeprefix("emberline_"), payload)
