"""One listener of a channel for everybody in this process who waits for it."""

import asyncio
import contextlib
import logging

from emberline.protocol.errors import EmberlineError
from emberline.store import Database

_RETRY_S = 1.0

log = logging.getLogger("emberline.jobs")


class Bell:
    """Rings whenever something may be new; those who wait look for themselves."""

    def __init__(self, db: Database, channel: str, poll_s: float) -> None:
        self._db = db
        self._channel = channel
        self._poll_s = poll_s
        self._rung = asyncio.Event()
        self._task = asyncio.create_task(self._listen())

    def ring(self) -> None:
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    def watch(self) -> "Watch":
        """Take it, look, then wait on it: it hears every ring since it was taken."""
        return Watch(self._rung)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self._db.listen(self._channel, self._poll_s):
                    self.ring()
            except EmberlineError as error:
                log.warning("cannot listen for events: %s", error.message)
            await asyncio.sleep(_RETRY_S)
            self.ring()


class Watch:
    def __init__(self, rung: asyncio.Event) -> None:
        self._rung = rung

    async def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` may lose a cancellation that comes with the ring
                await self._rung.wait()
