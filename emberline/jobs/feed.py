"""Reading events in order: what is there after a cursor, and waiting for more."""

import asyncio

from emberline.jobs.bell import Bell
from emberline.jobs.deliveries import EVENT_COLUMNS, event_from_row
from emberline.jobs.events import Event
from emberline.store import Database

MAX_PAGE = 100

_AFTER = f"SELECT {EVENT_COLUMNS} FROM events WHERE account = ? AND number > ? ORDER BY number LIMIT ?"
_LAST = "SELECT last FROM event_heads WHERE account = ?"


class Feed:
    def __init__(self, db: Database, bell: Bell) -> None:
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
