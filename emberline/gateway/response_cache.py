"""The exact response cache: a request that was answered before gets the same reply, and costs nothing.

A reply is found by a digest of the canonical request and its account, so no account sees another's. It is kept as the
whole answer, from which the events of a stream can be made again: a streamed request and one that is not share it. The
least recently used replies are in memory, all of them in the store, where another process or a later one finds them.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from emberline.net.periodic import attempt, every, stop
from emberline.protocol.complete_response import Answer, Encoded
from emberline.protocol.errors import EmberlineError
from emberline.protocol.request import EncodeRequest, GenerateRequest, PredictRequest, Priority, Speculation
from emberline.store import BulkQuery, Database, Query
from emberline.store.database import Statement
from emberline.store.notifications import Subscription

MEMORY_BYTES = 64 << 20  # of replies, in each process
MAX_REPLY_BYTES = 1 << 20
ACCOUNT_BYTES = 256 << 20  # of one account's replies, in the store
FLUSH_S = 0.1
MAX_PENDING_BYTES = 16 << 20  # that wait to be written; further replies are only in memory
SWEEP_S = 60.0
_GET = "SELECT reply FROM gateway_cache WHERE account = ? AND digest = ? AND expires_us > ?"
_PUT = (
    "INSERT INTO gateway_cache (account, digest, expires_us, created_us, n_bytes, reply) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (account, digest) DO UPDATE SET expires_us = excluded.expires_us, created_us = excluded.created_us, "
    "n_bytes = excluded.n_bytes, reply = excluded.reply"
)
_EXPIRED = "DELETE FROM gateway_cache WHERE expires_us <= ?"
_SIZES = "SELECT account, SUM(n_bytes) FROM gateway_cache GROUP BY account"
_OLDEST = "SELECT created_us, n_bytes FROM gateway_cache WHERE account = ? ORDER BY created_us LIMIT 1000"
_EVICT = "DELETE FROM gateway_cache WHERE account = ? AND created_us <= ?"
_PURGE = "DELETE FROM gateway_cache WHERE account = ?"
_PURGE_ALL = "DELETE FROM gateway_cache WHERE account <> ''"
_COUNT = "SELECT COUNT(*) FROM gateway_cache WHERE account <> '' AND (CAST(? AS TEXT) IS NULL OR account = ?)"
# One row, of no account, tells every process when replies were purged last.
_MARK = ("", "purged")
_PURGED = "SELECT created_us FROM gateway_cache WHERE account = '' AND digest = 'purged'"
_NEVER_US = 1 << 62
CHANNEL = "gateway-cache"
POLL_S = 1.0  # for purges by other processes

log = logging.getLogger("emberline.gateway")


class CachedReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    answer: Answer | None = None
    encoded: Encoded | None = None
    prediction: bytes = b""  # a Prediction in JSON
    model: str  # that computed it,
    provider: str  # and where
    expires_us: int


_decoder = msgspec.msgpack.Decoder(CachedReply)
# What does not change a reply: who asks, when, how urgent it is, and how it is computed and cached.
_NEUTRAL: dict[str, Any] = {
    "id": "",
    "session": None,
    "priority": Priority.DEFAULT,
    "deadline_s": None,
    "reject_if_busy": False,
    "api": "",
}
_NEUTRAL_GENERATE: dict[str, Any] = _NEUTRAL | {
    "speculation": Speculation(),
    "cache_ttl_s": 0,
    "session_final": False,
}


def request_digest(
    account: str,
    gateway: str,
    models: Sequence[str],
    request: GenerateRequest | EncodeRequest | PredictRequest,
    custom_key: str | None = None,
    rules: bytes = b"",
) -> str:
    """The key under which a reply is kept. With the client's own key, requests of the same kind share a reply whatever
    they ask. `rules` identifies what chose and judged the reply: under other rules it is not found."""
    kind = type(request).__name__
    if custom_key is None:
        same = _NEUTRAL_GENERATE if isinstance(request, GenerateRequest) else _NEUTRAL
        neutral = msgspec.structs.replace(request, model="", **same)
        content = msgspec.json.encode(neutral, order="deterministic")
    else:
        content = custom_key.encode("utf-8", "surrogatepass")
    head = [account, gateway, kind, custom_key is not None, [] if custom_key is not None else [*models]]
    digest = blake2b(msgspec.json.encode(head), digest_size=32, person=b"emberline.cache2")
    for part in (rules, content):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


class ResponseCache:
    """`open` it to sweep and to write in the background. Without a store it has only its memory."""

    def __init__(self, store: Database | None, memory_bytes: int = MEMORY_BYTES) -> None:
        self._store = store
        self._memory: OrderedDict[tuple[str, str], tuple[int, bytes]] = OrderedDict()  # expiry, encoded reply
        self._memory_bytes = memory_bytes
        self._n_bytes = 0
        self._pending: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._n_pending_bytes = 0
        self._writing = asyncio.Lock()  # else a purge could be followed by a write of what it has removed
        self._purged: object = []  # when, as the store said last
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    async def open(self) -> None:
        if self._store is not None:
            subscription = self._store.listen(CHANNEL, POLL_S)
            self._purged = await self._store.read(_PURGED)
            sweeping = every(SWEEP_S, self.sweep, log, "cached replies were not swept")
            works = (self._write_behind(), sweeping, self._follow_purges(subscription))
            self._tasks = [asyncio.create_task(work) for work in works]

    async def close(self) -> None:
        """Write the replies that are still to be written, and stop."""
        await stop(*self._tasks)
        if self._store is not None:
            await self._flush()

    async def get(self, account: str, digest: str) -> CachedReply | None:
        key, now_us = (account, digest), time.time_ns() // 1000
        found = self._memory.get(key) or self._pending.get(key)
        if found is not None and found[0] <= now_us:
            self._forget(key)
            found = None
        if found is not None:
            if key in self._memory:
                self._memory.move_to_end(key)
            return _decoder.decode(found[1])
        if self._store is None:
            return None
        try:
            rows = await self._store.read(_GET, (account, digest, now_us))
        except EmberlineError:  # then the reply is computed again
            return None
        if not rows:
            return None
        encoded = rows[0][0]
        assert isinstance(encoded, bytes)
        try:
            reply = _decoder.decode(encoded)
        except msgspec.DecodeError:  # written by another version
            return None
        self._remember(key, reply.expires_us, encoded)
        return reply

    def put(self, account: str, digest: str, reply: CachedReply) -> bool:
        """False: it is too large to be kept. It is in the store a moment later."""
        encoded = msgspec.msgpack.encode(reply)
        if len(encoded) > MAX_REPLY_BYTES:
            return False
        key = (account, digest)
        self._remember(key, reply.expires_us, encoded)
        if self._store is not None and self._n_pending_bytes < MAX_PENDING_BYTES:
            self._pending[key] = (reply.expires_us, encoded)
            self._n_pending_bytes += len(encoded)
            self._wake.set()
        return True

    async def purge(self, account: str | None) -> int:
        """Forget all replies of an account, or (None) of all accounts. Returns how many, as far as they are stored.
        Other processes forget them within about a second."""
        self._forget_account(account)
        self._keep_pending({key: value for key, value in self._pending.items() if account not in (None, key[0])})
        if self._store is None:
            return 0
        async with self._writing:
            await self.check_purged()
            ((n_replies,),) = await self._store.report(_COUNT, (account, account))
            now_us = self._store.now_us()
            mark = (*_MARK, _NEVER_US, now_us, 0, b"")
            purge = Query(_PURGE_ALL) if account is None else Query(_PURGE, (account,))
            await self._store.transaction([purge, Query(_PUT, mark)])
            self._purged = [(now_us,)]
        self._forget_account(account)  # again: it may have been read meanwhile
        await self._store.notify(CHANNEL)
        return int(n_replies or 0)

    def _forget_account(self, account: str | None) -> None:
        for key in [key for key in self._memory if account in (None, key[0])]:
            self._forget(key)

    async def _follow_purges(self, subscription: Subscription) -> None:
        assert self._store is not None
        async for _ in subscription:
            await attempt(self.check_purged, log, "whether replies were purged is not known")

    async def check_purged(self) -> None:
        """Forget what is in memory and not yet written if another process has purged replies: the rest is in the
        store."""
        assert self._store is not None
        purged = await self._store.read(_PURGED)
        if purged != self._purged:
            self._purged = purged
            self._memory.clear()
            self._n_bytes = 0
            self._keep_pending({})

    def _remember(self, key: tuple[str, str], expires_us: int, encoded: bytes) -> None:
        self._forget(key)
        self._memory[key] = (expires_us, encoded)
        self._n_bytes += len(encoded)
        while self._n_bytes > self._memory_bytes:
            _, (_, evicted) = self._memory.popitem(last=False)
            self._n_bytes -= len(evicted)

    def _forget(self, key: tuple[str, str]) -> None:
        if (known := self._memory.pop(key, None)) is not None:
            self._n_bytes -= len(known[1])

    # --- the store ---------------------------------------------------------------------------------------------------

    async def _write_behind(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(FLUSH_S)
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        assert self._store is not None
        async with self._writing:
            await self._write_pending(self._store)

    async def _write_pending(self, store: Database) -> None:
        if not self._pending:
            return
        written: dict[tuple[str, str], tuple[int, bytes]] = {}
        try:
            await self.check_purged()
            written, now_us = dict(self._pending), time.time_ns() // 1000
            rows = [(*key, until_us, now_us, len(reply), reply) for key, (until_us, reply) in written.items()]
            await store.transaction([BulkQuery(_PUT, rows)])
        except EmberlineError as error:
            log.warning("cached replies were not stored: %s", error.message)
        except Exception:
            log.exception("cached replies were not stored")
        self._keep_pending({key: value for key, value in self._pending.items() if written.get(key) is not value})

    def _keep_pending(self, pending: dict[tuple[str, str], tuple[int, bytes]]) -> None:
        self._pending = pending
        self._n_pending_bytes = sum(len(reply) for _, reply in pending.values())

    async def sweep(self, account_bytes: int = ACCOUNT_BYTES) -> None:
        """Remove what has expired, and of an account with too many bytes the oldest."""
        assert self._store is not None
        await self._store.write(_EXPIRED, (time.time_ns() // 1000,))
        statements: list[Statement] = []
        for account, n_bytes in await self._store.report(_SIZES):
            assert isinstance(n_bytes, int | float)
            excess, last_us = float(n_bytes) - account_bytes, None
            if excess <= 0:
                continue
            for created_us, size in await self._store.read(_OLDEST, (account,)):
                assert isinstance(size, int)
                if excess <= 0:
                    break
                excess, last_us = excess - size, created_us
            if last_us is not None:
                statements.append(Query(_EVICT, (account, last_us)))
        if statements:
            await self._store.transaction(statements)
