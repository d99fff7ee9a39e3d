"""Reading the queue: batches, lines and their results, what waits."""

from collections.abc import Collection
from typing import Any

import msgspec

from emberline.jobs.batches.batch import Batch, batch_from_row
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.queue import sql
from emberline.jobs.queue.completion import MINUTE_US
from emberline.jobs.queue.job import Job, JobKey
from emberline.protocol.answer import Answer
from emberline.protocol.errors import ErrorInfo, NotFound
from emberline.store import Database, Sql, Value

_LINE_NAMES = [name.rpartition(".")[2] for name in sql.LINE_COLUMNS.split(", ")]
_DEAD_NUMBERS = "SELECT number FROM lines WHERE state = 'dead' AND batch_id = ? ORDER BY number LIMIT 1000"
_to_answer = msgspec.msgpack.Decoder(Answer).decode
_to_error = msgspec.msgpack.Decoder(ErrorInfo).decode
_WITHOUT_BODY = {
    "cancelled": ErrorInfo("cancelled", "the line was cancelled"),
    "expired": ErrorInfo("deadline_exceeded", "the batch's time ran out before the line was done"),
}


class QueueDepth(msgspec.Struct, frozen=True):
    """Who waits for what."""

    model: str
    account: str
    n_queued: int
    n_leased: int
    served: int  # tokens, by the counter that makes it fair
    oldest_us: int | None  # when the line that is next was submitted
    n_quarantined: int


class QueueReader:
    def __init__(self, store: Database, blobs: BlobStore) -> None:
        self._store = store
        self._blobs = blobs

    async def batch(self, account: str, batch_id: str) -> Batch:
        rows = await self._store.read(sql.BATCH_SHOWN, (batch_id, account))
        if not rows:
            raise NotFound(f"no batch {batch_id}", param="batch_id")
        return batch_from_row(rows[0])

    async def any_batch(self, batch_id: str) -> Batch:
        rows = await self._store.read(sql.BATCH, (batch_id,))
        if not rows:
            raise NotFound(f"no batch {batch_id}", param="batch_id")
        return batch_from_row(rows[0])

    async def batches(
        self, account: str, kind: str, after: str | None, before: str | None, limit: int
    ) -> tuple[list[Batch], bool]:
        params: tuple[Value, ...] = (account, kind)
        text = sql.BATCHES
        if cursor := after or before:
            text = sql.BATCHES_AFTER if after else sql.BATCHES_BEFORE
            params = (*params, (await self.batch(account, cursor)).created_us, cursor)
        rows = await self._store.read(text, (*params, limit + 1))
        page = [batch_from_row(row) for row in rows[:limit]]
        return page[::-1] if before and not after else page, len(rows) > limit

    async def lines(self, batch_id: str, after: int, limit: int, states: Collection[str], bodies: bool) -> list[Job]:
        if states:
            text = sql.lines_in(len(states), bodies)
            rows = await self._store.read(text, (batch_id, after, *states, limit))
        else:
            rows = await self._store.read(sql.LINES_WITH_BODIES if bodies else sql.LINES, (batch_id, after, limit))
        return [await self._line(row) for row in rows]

    async def dead(self, after: JobKey | None, limit: int) -> list[Job]:
        rows = await self._store.read(sql.DEAD, (*(after or ("", -1)), limit))
        return [await self._line(row) for row in rows]

    async def dead_numbers(self, batch_id: str) -> list[int]:
        return [int(number or 0) for (number,) in await self._store.read(_DEAD_NUMBERS, (batch_id,))]

    async def depths(self, quarantine_kills: int) -> list[QueueDepth]:
        rows = await self._store.read(sql.DEPTHS, (quarantine_kills,))
        return [msgspec.convert(dict(zip(QueueDepth.__struct_fields__, row, strict=True)), QueueDepth) for row in rows]

    async def _line(self, row: tuple[Value, ...]) -> Job:
        n = len(_LINE_NAMES)
        fields: dict[str, Any] = dict(zip(_LINE_NAMES, row[:n], strict=True))
        line = msgspec.convert(fields, Job)
        if row[n:] and line.state in ("succeeded", "failed", "dead"):
            data = await self._data(*row[n:])
            if data is not None and line.state == "succeeded":
                line.answer = _to_answer(data)
            elif data is not None:
                line.error = _to_error(data)
        elif line.state in _WITHOUT_BODY:
            line.error = _WITHOUT_BODY[line.state]
        return line

    async def _data(self, data: Value, blob: Value) -> bytes | None:
        if isinstance(blob, str):
            return await self._blobs.get(blob)
        return data if isinstance(data, bytes) else None


_LOOK_BACK = 10  # minutes over which it is measured how long a line takes
_OWN_AHEAD = """
    SELECT SUM(total - completed - failed - cancelled - expired) FROM batches
    WHERE ended = 0 AND account = ? AND deadline_us < ? AND id <> ? AND status IN ('in_progress', 'cancelling')
"""
_LANES = "SELECT account, n_queued, n_leased FROM lanes WHERE (n_queued > 0 OR n_leased > 0) AND (model = ? OR ? = '')"
_PACE = "SELECT SUM(n), SUM(busy_us) FROM paces WHERE minute > ? AND (model = ? OR ? = '')"
_RUNS = "SELECT 1 FROM lines{hint} WHERE state = 'leased' AND batch_id = ? LIMIT 1"
# SQLite would look at every line of the batch.
_RUNNING = Sql(_RUNS.format(hint=" INDEXED BY lines_leased"), postgres=_RUNS.format(hint=""))


class QueuePosition(msgspec.Struct, frozen=True):
    position: int  # lines that are claimed before this batch's next one; 0: it is its turn
    n_left: int
    running: bool  # one of its lines is with an engine
    rate_per_s: float | None  # lines of its model that end in a second; None: none has ended lately
    eta_s: float | None


async def place(store: Database, batch: Batch) -> QueuePosition:
    """The account's own earlier deadlines go first; with other accounts it takes turns, line by line."""
    if batch.ended or not batch.counts.left:
        return QueuePosition(0, 0, False, None, 0.0)
    ((own,),) = await store.read(_OWN_AHEAD, (batch.account, batch.deadline_us, batch.id))
    ahead, left = int(own or 0), batch.counts.left
    lanes = await store.read(_LANES, (batch.model, batch.model))
    others = [int(n_queued or 0) for account, n_queued, _ in lanes if account != batch.account]
    position = ahead + sum(min(n, ahead) for n in others)
    last = sum(min(n, ahead + left) for n in others)
    rate = await _rate(store, batch.model, sum(int(n_leased or 0) for *_, n_leased in lanes))
    running = bool(await store.read(_RUNNING, (batch.id,)))
    return QueuePosition(position, left, running, rate, (ahead + left + last) / rate if rate else None)


async def _rate(store: Database, model: str, n_running: int) -> float | None:
    """As many as run now, each for as long as lines took lately. What was idle before says nothing about now."""
    since = store.now_us() // MINUTE_US - _LOOK_BACK
    ((n, busy_us),) = await store.read(_PACE, (since, model, model))
    if not n or not busy_us:
        return None
    return max(1, n_running) / (int(busy_us) / int(n) / 1e6)
