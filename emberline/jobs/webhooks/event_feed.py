"""Reading events in order: what is there after a cursor, and waiting for more."""

import asyncio
import contextlib
import logging

from emberline.jobs.webhooks.deliveries import EVENT_COLUMNS, event_from_row
from emberline.jobs.webhooks.events import Event
from emberline.protocol.errors import EmberlineError
from emberline.store import Database

_RETRY_S = 1.0

log = logging.getLogger("emberline.jobs")


class ChannelListener:
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


MAX_PAGE = 100

_AFTER = f"SELECT {EVENT_COLUMNS} FROM events WHERE account = ? AND number > ? ORDER BY number LIMIT ?"
_LAST = "SELECT last FROM event_heads WHERE account = ?"


class EventFeed:
    def __init__(self, db: Database, bell: ChannelListener) -> None:
        self.ended = False  # the process stops: nobody waits any longer
        self._db = db
        self._bell = bell

    def end(self) -> None:
        self.ended = True
        self._bell.ring()

    async def last_number(self, account: str) -> int:
        """The cursor of whoever wants only what comes from now on."""
        rows = await self._db.read(_LAST, (account,))
        return int(rows[0][0] or 0) if rows else 0

    async def page(self, account: str, after: int, limit: int = MAX_PAGE) -> list[Event]:
        return [event_from_row(row) for row in await self._db.read(_AFTER, (account, after, limit))]

    async def wait(self, account: str, after: int, wait_s: float, limit: int = MAX_PAGE) -> list[Event]:
        """What comes after the cursor, as soon as there is something; empty after `wait_s`, or at the end."""
        give_up_s = asyncio.get_running_loop().time() + wait_s
        while True:
            watch = self._bell.watch()
            if events := await self.page(account, after, limit):
                return events
            left_s = give_up_s - asyncio.get_running_loop().time()
            if left_s <= 0 or self.ended:
                return []
            await watch.wait(left_s)
