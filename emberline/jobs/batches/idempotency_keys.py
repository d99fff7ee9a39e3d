"""Idempotency keys: a repeated submission gets the stored answer instead of being executed again.

From its first use a key holds the id that the submission's batch will have. When the server dies before the answer is
stored, the next try gets the same id, and submitting under it finds the batch that already exists.
"""

import msgspec

from emberline.jobs.limits import QueueLimits
from emberline.protocol.errors import BadInput, Conflict, IdempotencyMismatch
from emberline.store import Database, Query, Transaction

MAX_CHARS = 255
RUNNING_S = 60.0  # a request without an answer after so long counts as dead

_FIND = "SELECT digest, fresh_id, answer, until_us, expires_us FROM idempotency WHERE account = ? AND key = ?"
_INSERT = """
    INSERT INTO idempotency (account, key, digest, fresh_id, answer, until_us, expires_us)
    VALUES (?, ?, ?, ?, NULL, ?, ?) ON CONFLICT (account, key) DO NOTHING RETURNING key
"""
_FORGET = "DELETE FROM idempotency WHERE account = ? AND key = ? AND expires_us <= ?"
_TAKE = """
    UPDATE idempotency SET until_us = ? WHERE account = ? AND key = ? AND until_us = ? AND answer IS NULL RETURNING key
"""
_FINISH = "UPDATE idempotency SET answer = ? WHERE account = ? AND key = ?"
_ABANDON = "UPDATE idempotency SET until_us = 0 WHERE account = ? AND key = ? AND answer IS NULL"


class FirstUse(msgspec.Struct, frozen=True):
    """Execute the request under this id."""

    id: str


class StoredAnswer(msgspec.Struct, frozen=True):
    """The request was executed; this was the answer."""

    answer: bytes


class IdempotencyKeys:
    def __init__(self, store: Database, limits: QueueLimits) -> None:
        self._store = store
        self._limits = limits

    async def begin(self, account: str, key: str, digest: bytes, fresh_id: str) -> FirstUse | StoredAnswer:
        """Raises IdempotencyMismatch if the key came with another request's digest, Conflict while it still runs."""
        if not key or len(key) > MAX_CHARS or not key.isprintable():
            raise BadInput(f"an Idempotency-Key has 1 to {MAX_CHARS} printable characters", param="Idempotency-Key")
        now_us = self._store.now_us()
        until_us = now_us + int(RUNNING_S * 1e6)
        expires_us = now_us + int(self._limits.key_hours * 3600e6)
        row = (account, key, digest, fresh_id, until_us, expires_us)
        return await self._store.run(lambda: _begin(row, now_us))

    async def finish(self, account: str, key: str, answer: bytes) -> None:
        await self._store.write(_FINISH, (answer, account, key))

    async def abandon(self, account: str, key: str) -> None:
        """The request failed with a transient error: let the next one execute."""
        await self._store.write(_ABANDON, (account, key))


def _begin(row: tuple[str, str, bytes, str, int, int], now_us: int) -> Transaction[FirstUse | StoredAnswer]:
    account, key, digest, fresh_id, until_us, _ = row
    yield Query(_FORGET, (account, key, now_us))
    if (yield Query(_INSERT, row)):
        return FirstUse(fresh_id)
    ((known, known_id, answer, running_until_us, _),) = yield Query(_FIND, (account, key))
    if known != digest:
        raise IdempotencyMismatch("this Idempotency-Key was used for another request: use a new one for a new request")
    if isinstance(answer, bytes):
        return StoredAnswer(answer)
    running_us = int(running_until_us or 0)
    clock_set_back = running_us - until_us > until_us - now_us  # no request runs so long: the clock was ahead then
    stale = running_us <= now_us or clock_set_back
    if stale and (yield Query(_TAKE, (until_us, account, key, running_us))):
        return FirstUse(str(known_id))
    raise Conflict("the request with this Idempotency-Key is still running: ask again in a moment", retry_after_s=1)
