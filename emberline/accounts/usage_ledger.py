"""The usage ledger: one immutable row per accepted request, durable before its client sees the end.

While the store is away, rows are spooled to a local journal and forwarded once it is back. What running requests have
used is checkpointed there every few seconds, so that a killed process leaves rows for them too.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence

import msgspec

from emberline.accounts.usage_journal import UsageJournal
from emberline.accounts.usage_row import COLUMNS, UsageRow, insert_usage
from emberline.protocol.errors import Unavailable
from emberline.store import BulkQuery, Database

STORE_WAIT_S = 2.0  # for the store to take a row before it is spooled
FORWARD_S = 1.0  # between two attempts to forward spooled rows
FORWARD_WAIT_S = 30.0  # for the store to take a group of them
CHECKPOINT_S = 2.0  # between two checkpoints of what running requests have used
_SELECT = f"SELECT {COLUMNS} FROM usage WHERE id = ?"

log = logging.getLogger("emberline.usage")


class UsageLedger:
    """`start` it to checkpoint and to forward what an earlier process left. Without a journal it has only the store."""

    def __init__(self, store: Database, journal: UsageJournal | None = None) -> None:
        self._store = store
        self._journal = journal
        self._running: dict[str, UsageRow] = {}  # what running requests had used when last heard of
        self._changed = False  # since the last checkpoint
        self._checkpoints: asyncio.Task[None] | None = None
        self._away = False  # the store: rows are spooled at once, so that no request waits for it
        self._forwarding: asyncio.Task[None] | None = None  # while rows are spooled

    def start(self) -> None:
        if self._journal is not None:
            self._checkpoints = asyncio.create_task(self._write_checkpoints(self._journal))
            self._forward(self._journal)

    async def close(self) -> None:
        """Before the store. Rows that it has not taken are forwarded by the next process."""
        tasks = [task for task in (self._checkpoints, self._forwarding) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._journal is not None:
            await self._journal.close()

    async def record(self, row: UsageRow) -> None:
        """Return once the row is durable. Recording a second row of the same id changes nothing."""
        if self._journal is None:
            await self._store.write(*insert_usage(row))
        elif self._away or not await self._write(row):
            try:
                await self._journal.append(row)
            except Unavailable:
                self._away = False  # the store may be back: only it can take the next row
                raise
            self._forward(self._journal)
        self._changed |= self._running.pop(row.id, None) is not None

    def checkpoint(self, rows: Iterable[UsageRow]) -> None:
        """What running requests have used by now; it stands if they never end."""
        self._running.update((row.id, row) for row in rows)
        self._changed = True

    def used_by(self, request_id: str) -> UsageRow | None:
        """The last checkpoint of a running request."""
        return self._running.get(request_id)

    async def find(self, request_id: str) -> UsageRow | None:
        rows = await self._store.read(_SELECT, (request_id,))
        if not rows:
            return None
        fields = dict(zip(UsageRow.__struct_fields__, rows[0], strict=True))
        fields["cached_by_tier"] = msgspec.json.decode(str(fields["cached_by_tier"]))
        return msgspec.convert(fields, UsageRow)

    async def _write(self, row: UsageRow) -> bool:
        """False: the store is away or too slow. It may take the row later all the same."""
        try:
            async with asyncio.timeout(STORE_WAIT_S):
                await self._store.write(*insert_usage(row))
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
                    await asyncio.sleep(FORWARD_S * random.uniform(0.75, 1.25))
                else:
                    journal.forwarded(position)
                    self._away = False
            log.info("all spooled usage rows are in the store")
        finally:
            self._forwarding = None

    async def _insert(self, rows: Sequence[UsageRow]) -> None:
        """Unavailable or TimeoutError: not now. A row that the store refuses for itself is logged and skipped."""
        inserts = [insert_usage(row) for row in rows]
        if not inserts:
            return
        async with asyncio.timeout(FORWARD_WAIT_S):
            try:
                await self._store.transaction([BulkQuery(inserts[0].sql, [insert.params for insert in inserts])])
            except Unavailable:
                raise
            except Exception:
                for row, insert in zip(rows, inserts, strict=True):
                    try:
                        await self._store.write(*insert)
                    except Unavailable:
                        raise
                    except Exception:
                        log.exception("a usage row is refused: %s", row)

    async def _write_checkpoints(self, journal: UsageJournal) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            if self._changed:
                self._changed = False
                await journal.checkpoint(list(self._running.values()))
