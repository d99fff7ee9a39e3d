"""Counters for the limits of dynamic routes: requests and their cost, by window of time.

Each process counts in memory, adds what is new to the store twice a second, and learns there what the others have
counted. A limit is therefore kept to within half a second of traffic, and over a restart.
"""

import asyncio
import collections
import logging
import time

import msgspec

from emberline.gateway.routing import Counter
from emberline.net.periodic import attempt, stop
from emberline.protocol.gateway import MAX_COST_PICO
from emberline.store import BulkQuery, Database, Sql

SYNC_S = 0.5
IDLE_SYNC_S = 5.0  # where nothing was counted here
MAX_ACCOUNT_COUNTS = 100_000  # in memory; values of metadata beyond share a count of their rule
_ROWS_AT_ONCE = 1000  # taken over before other work gets its turn
_PRUNE_S = 30.0
_COLUMNS = "account, gateway, name, begin_us, until_us, amount"
_INSERT = f"INSERT INTO gateway_counters ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) "
_SUM = f"(gateway_counters.amount + excluded.amount, {2 * MAX_COST_PICO})"
_ON_CONFLICT = "ON CONFLICT (account, gateway, name, begin_us) DO UPDATE SET amount = "
_ADD = Sql(f"{_INSERT}{_ON_CONFLICT}MIN{_SUM}", postgres=f"{_INSERT}{_ON_CONFLICT}LEAST{_SUM}")
_CURRENT = f"SELECT {_COLUMNS} FROM gateway_counters WHERE until_us > ?"
_SWEEP = "DELETE FROM gateway_counters WHERE until_us <= ?"

log = logging.getLogger("emberline.gateway")
_Key = tuple[str, str, str, int]  # account, gateway, name, begin of the window
_OTHERS = "/…"  # ends the name of a count that stands for several


class _Count(msgspec.Struct):
    until_us: int
    stored: int = 0  # as the store said last
    new: int = 0  # not in the store yet


class CounterTable:
    def __init__(self, store: Database | None, max_counts: int = MAX_ACCOUNT_COUNTS) -> None:
        """`max_counts` of an account are kept apart."""
        self._store, self._max_counts = store, max_counts
        self._counts: dict[_Key, _Count] = {}
        self._n_of_account: collections.Counter[str] = collections.Counter()
        self._changed: set[_Key] = set()  # whose `new` is not 0
        self._pruned_s = time.monotonic()
        self._sync_lock = asyncio.Lock()  # else one could read the store before another one's counts are there
        self._syncing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._store is not None:
            await self.sync()
            self._syncing = asyncio.create_task(self._sync_often())

    async def close(self) -> None:
        if self._syncing is not None:
            await stop(self._syncing)
            await self._try_sync()

    def has_room(self, account: str, gateway: str, counter: Counter) -> bool:
        key, _ = self._shared(*_key(account, gateway, counter))
        count = self._counts.get(key)
        return count is None or count.stored + count.new < counter.limit

    def add(self, account: str, gateway: str, counter: Counter, amount: int) -> None:
        key, until_us = self._shared(*_key(account, gateway, counter))
        count = self._count(key, until_us)
        count.new = min(count.new + amount, MAX_COST_PICO)
        if count.new:
            self._changed.add(key)

    def _shared(self, key: _Key, until_us: int) -> tuple[_Key, int]:
        """The count that stands for those that are too many to keep."""
        account, gateway, name, begin_us = key
        if key not in self._counts and self._n_of_account[account] >= self._max_counts:
            rule, kind, *_ = name.split("/")
            key = account, gateway, f"{rule}/{kind}{_OTHERS}", begin_us
        return key, until_us

    def _count(self, key: _Key, until_us: int) -> _Count:
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = _Count(until_us)
            self._n_of_account[key[0]] += not _is_shared(key)
        return count

    async def _sync_often(self) -> None:
        idle_s = 0.0
        while True:
            await asyncio.sleep(SYNC_S)
            idle_s += SYNC_S
            if idle_s >= IDLE_SYNC_S or self._changed:
                await self._try_sync()
                idle_s = 0.0

    async def _try_sync(self) -> None:
        await attempt(self.sync, log, "the counts of dynamic routes were not stored")

    async def sync(self) -> None:
        """Add what is new to the store, and take over what is there."""
        assert self._store is not None
        async with self._sync_lock:
            await self._sync(self._store)

    async def _sync(self, store: Database) -> None:
        now_us = time.time_ns() // 1000
        sent = {key: self._counts[key].new for key in self._changed if key in self._counts}
        self._changed = set()
        if sent:
            rows = [(*key, self._counts[key].until_us, amount) for key, amount in sent.items()]
            try:
                await store.transaction([BulkQuery(_ADD, rows), (_SWEEP, (now_us,))])
            except BaseException:
                self._changed |= sent.keys()
                raise
        for key, added in sent.items():
            self._counts[key].new -= added
            self._counts[key].stored += added
        rows_there = await store.read(_CURRENT, (now_us,))
        for number, (account, gateway, name, begin_us, until_us, amount) in enumerate(rows_there):
            if number % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
                await asyncio.sleep(0)
            assert isinstance(begin_us, int)
            assert isinstance(name, str)
            assert isinstance(until_us, int)
            assert isinstance(amount, int)
            key = (str(account), str(gateway), name, begin_us)
            if key in self._counts or self._n_of_account[key[0]] < self._max_counts or _is_shared(key):
                self._count(key, until_us).stored = amount
        if time.monotonic() - self._pruned_s >= _PRUNE_S:
            self._pruned_s = time.monotonic()
            self._counts = {key: count for key, count in self._counts.items() if count.until_us > now_us}
            self._n_of_account = collections.Counter(key[0] for key in self._counts if not _is_shared(key))
            self._changed &= self._counts.keys()


def _is_shared(key: _Key) -> bool:
    """True for a counter outside MAX_ACCOUNT_COUNTS, so that all processes keep the same counters."""
    return key[2].endswith(_OTHERS)


def _key(account: str, gateway: str, counter: Counter) -> tuple[_Key, int]:
    per_us = counter.per_s * 1_000_000
    begin_us = time.time_ns() // 1000 // per_us * per_us
    return (account, gateway, counter.name, begin_us), begin_us + per_us
