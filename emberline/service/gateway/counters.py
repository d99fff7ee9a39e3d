"""What the limits of dynamic routes have counted: requests, and what they cost, by window of time.

Each process counts in memory, adds what is new to the store twice a second, and learns there what the others have
counted. A limit is therefore kept to within half a second of traffic, and over a restart.
"""

import asyncio
import logging
import time

import msgspec

from emberline.protocol.errors import EmberlineError
from emberline.protocol.gateway import MAX_COST_PICO
from emberline.store import BulkQuery, Database, Sql
from emberline.upstream.gateway.routing import Counter

SYNC_S = 0.5
IDLE_SYNC_S = 5.0  # where nothing was counted here
_COLUMNS = "account, gateway, name, begin_us, until_us, amount"
_INSERT = f"INSERT INTO gateway_counters ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) "
_SUM = f"(gateway_counters.amount + excluded.amount, {2 * MAX_COST_PICO})"
_ON_CONFLICT = "ON CONFLICT (account, gateway, name, begin_us) DO UPDATE SET amount = "
_ADD = Sql(f"{_INSERT}{_ON_CONFLICT}MIN{_SUM}", postgres=f"{_INSERT}{_ON_CONFLICT}LEAST{_SUM}")
_CURRENT = f"SELECT {_COLUMNS} FROM gateway_counters WHERE until_us > ?"
_SWEEP = "DELETE FROM gateway_counters WHERE until_us <= ?"

log = logging.getLogger("emberline.gateway")
_Key = tuple[str, str, str, int]  # account, gateway, name, begin of the window


class _Count(msgspec.Struct):
    until_us: int
    stored: int = 0  # as the store said last
    new: int = 0  # not in the store yet


class CounterTable:
    def __init__(self, store: Database | None) -> None:
        self._store = store
        self._counts: dict[_Key, _Count] = {}
        self._syncing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._store is not None:
            await self.sync()
            self._syncing = asyncio.create_task(self._sync_often())

    async def close(self) -> None:
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.gather(self._syncing, return_exceptions=True)
            await self._try_sync()

    def has_room(self, account: str, gateway: str, counter: Counter) -> bool:
        count = self._counts.get(_key(account, gateway, counter)[0])
        return count is None or count.stored + count.new < counter.limit

    def add(self, account: str, gateway: str, counter: Counter, amount: int) -> None:
        key, until_us = _key(account, gateway, counter)
        count = self._counts.setdefault(key, _Count(until_us))
        count.new = min(count.new + amount, MAX_COST_PICO)

    async def _sync_often(self) -> None:
        idle_s = 0.0
        while True:
            await asyncio.sleep(SYNC_S)
            idle_s += SYNC_S
            if idle_s >= IDLE_SYNC_S or any(count.new for count in self._counts.values()):
                await self._try_sync()
                idle_s = 0.0

    async def _try_sync(self) -> None:
        try:
            await self.sync()
        except EmberlineError as error:
            log.warning("the counts of dynamic routes were not stored: %s", error.message)
        except Exception:
            log.exception("the counts of dynamic routes were not stored")

    async def sync(self) -> None:
        """Add what is new to the store, and take over what is there."""
        assert self._store is not None
        now_us = time.time_ns() // 1000
        sent = {key: count.new for key, count in self._counts.items() if count.new}
        if sent:
            rows = [(*key, self._counts[key].until_us, amount) for key, amount in sent.items()]
            await self._store.transaction([BulkQuery(_ADD, rows), (_SWEEP, (now_us,))])
        for key, added in sent.items():
            self._counts[key].new -= added
            self._counts[key].stored += added
        for account, gateway, name, begin_us, until_us, amount in await self._store.read(_CURRENT, (now_us,)):
            assert isinstance(begin_us, int)
            assert isinstance(until_us, int)
            assert isinstance(amount, int)
            count = self._counts.setdefault((str(account), str(gateway), str(name), begin_us), _Count(until_us))
            count.stored = amount
        self._counts = {key: count for key, count in self._counts.items() if count.until_us > now_us}


def _key(account: str, gateway: str, counter: Counter) -> tuple[_Key, int]:
    per_us = counter.per_s * 1_000_000
    begin_us = time.time_ns() // 1000 // per_us * per_us
    return (account, gateway, counter.name, begin_us), begin_us + per_us
