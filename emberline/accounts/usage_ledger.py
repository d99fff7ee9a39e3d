"""The usage ledger: one immutable row per accepted request, durable before its client sees the end.

While the store is away, rows are spooled to a local journal and forwarded once it is back. What running requests have
used is checkpointed there every few seconds, so that a killed process leaves rows for them too.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import msgspec

from emberline.accounts.budget_leases import insert_rows
from emberline.accounts.usage_journal import UsageJournal
from emberline.accounts.usage_row import COLUMNS, UsageRow, insert_usage
from emberline.net.periodic import every, stop
from emberline.protocol.errors import Unavailable
from emberline.store import Database

_SELECT = f"SELECT {COLUMNS} FROM usage WHERE id = ?"

log = logging.getLogger("emberline.usage")


class UsageTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a usage ledger, in seconds."""

    store_wait_s: float = 2.0  # for the store to take a row before it is spooled
    forward_s: float = 1.0  # between two attempts to forward spooled rows
    forward_wait_s: float = 30.0  # for the store to take a group of them
    checkpoint_s: float = 2.0  # between two checkpoints of what running requests have used


DEFAULTS = UsageTimings()


class UsageLedger:
    """Records usage rows. `start` it to checkpoint and to forward what an earlier process left. Without a journal it
    has only the store."""

    def __init__(self, store: Database, journal: UsageJournal | None = None, timings: UsageTimings = DEFAULTS) -> None:
        self.store = store
        self._journal = journal
        self._timings = timings
        self._running: dict[str, UsageRow] = {}  # what running requests had used when last heard of
        self.used_by = self._running.get  # returns the last checkpoint of a running request, by its id
        self._changed = False  # since the last checkpoint
        self._checkpoints: asyncio.Task[None] | None = None
        self._away = False  # the store: rows are spooled at once, so that no request waits for it
        self._forwarding: asyncio.Task[None] | None = None  # while rows are spooled
        self._adopting: asyncio.Task[None] | None = None

    def start(self, on_adopted: Callable[[Sequence[str]], Awaitable[None]] | None = None) -> None:
        """`on_adopted` is called with the names of dead processes' journals, once their rows are in the store."""
        if self._journal is not None:
            write = partial(self._write_checkpoint, self._journal)
            writing = every(self._timings.checkpoint_s, write, log, "what running requests have used is not written")
            self._checkpoints = asyncio.create_task(writing)
            self._forward(self._journal)
            if on_adopted is not None and self._journal.adopted:
                self._adopting = asyncio.create_task(self._tell_adopted(self._journal.adopted, on_adopted))

    @property
    def all_stored(self) -> bool:
        """True if no row waits in the journal."""
        return self._journal is None or not self._journal.has_rows

    async def close(self) -> None:
        """Before the store. Rows that it has not taken are forwarded by the next process."""
        await stop(self._checkpoints, self._forwarding, self._adopting)
        if self._journal is not None:
            await self._journal.close()

    async def record(self, row: UsageRow, is_late: bool = False) -> None:
        """Return once the row is durable. Recording a second row of the same id changes nothing. `is_late`: its
        budgets' lease may be gone."""
        if self._journal is None:
            await (self._insert_late([row]) if is_late else self.store.write(*insert_usage(row)))
        elif self._away or not await self._write(row, is_late):
            try:
                await self._journal.append(row)
            except Unavailable:
                self._away = False  # the store may be back: only it can take the next row
                raise
            self._forward(self._journal)
        self._changed |= self._running.pop(row.id, None) is not None

    def checkpoint(self, rows: Iterable[UsageRow]) -> None:
        """Record the usage of running requests so far; the record stands if they never end."""
        self._running.update((row.id, row) for row in rows)
        self._changed = True

    async def find(self, request_id: str) -> UsageRow | None:
        rows = await self.store.read(_SELECT, (request_id,))
        if not rows:
            return None
        fields = dict(zip(UsageRow.__struct_fields__, rows[0], strict=True))
        fields["cached_by_tier"] = msgspec.json.decode(str(fields["cached_by_tier"]))
        return msgspec.convert(fields, UsageRow)

    async def _insert_late(self, rows: Sequence[UsageRow]) -> None:
        """Rows that come some time after their requests have ended, when leases of budgets may be gone."""
        if any(row.lease for row in rows):
            await self.store.run(partial(insert_rows, rows))
        else:
            await self.store.transaction(list(insert_rows(rows)))

    async def _write(self, row: UsageRow, is_late: bool) -> bool:
        """False: the store is away or too slow. It may take the row later all the same."""
        try:
            async with asyncio.timeout(self._timings.store_wait_s):
                await (self._insert_late([row]) if is_late else self.store.write(*insert_usage(row)))
        except (Unavailable, TimeoutError) as error:
            if not self._away:
                log.warning("usage rows are spooled: %s", str(error) or "the store is slow")
            self._away = True
            return False
        return True

    def _forward(self, journal: UsageJournal) -> None:
        if self._forwarding is None and journal.has_rows:
            self._forwarding = asyncio.create_task(self._forward_rows(journal))

    async def _forward_rows(self, journal: UsageJournal) -> None:
        try:
            while journal.has_rows:
                rows, position = await journal.rows()
                try:
                    await self._insert(rows)
                except (Unavailable, TimeoutError):
                    await asyncio.sleep(self._timings.forward_s * random.uniform(0.75, 1.25))
                else:
                    journal.forwarded(position)
                    self._away = False
            log.info("all spooled usage rows are in the store")
        finally:
            self._forwarding = None

    async def _insert(self, rows: Sequence[UsageRow]) -> None:
        """Unavailable or TimeoutError: not now. A row that the store refuses for itself is logged and skipped."""
        if not rows:
            return
        async with asyncio.timeout(self._timings.forward_wait_s):
            try:
                await self._insert_late(rows)
            except Unavailable:
                raise
            except Exception:
                for row in rows:
                    try:
                        await self._insert_late([row])
                    except Unavailable:
                        raise
                    except Exception:
                        log.exception("a usage row is refused: %s", row)

    async def _tell_adopted(self, names: Sequence[str], on_adopted: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        while True:
            if self._forwarding is not None:
                await asyncio.wait([self._forwarding])
            try:
                return await on_adopted(names)
            except Unavailable:
                await asyncio.sleep(self._timings.forward_s * random.uniform(0.75, 1.25))

    async def _write_checkpoint(self, journal: UsageJournal) -> None:
        if self._changed:
            self._changed = False
            try:
                await journal.checkpoint(list(self._running.values()))
            except BaseException:
                self._changed = True  # the next round writes it
                raise
