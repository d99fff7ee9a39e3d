"""The store for more than one machine: PostgreSQL through asyncpg.

asyncpg was made for asyncio, pipelines one statement over many rows, and needs no C library on the host.

Group commit: a statement is sent at once while one of the WRITERS connections is free; while all are busy, queued
statements are committed together. Transactions passed to `run` are not grouped, so that they do not hold each other's
row locks; their callers group rows themselves.

Readers have connections of their own: slow reads delay neither writes nor the clock, and are no sign of an outage.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from emberline.protocol.errors import BadInput, EmberlineError, Unavailable
from emberline.store.clock import SteadyClock, uptime_us
from emberline.store.database import (
    REPORT_S,
    BulkQuery,
    ProcessLock,
    Query,
    Rows,
    Sql,
    Statement,
    T,
    Transaction,
    Value,
    in_order,
    report_too_slow,
    resolve_future,
    returns_rows,
)
from emberline.store.migrations import MIGRATIONS, Migrations, for_postgres, steps_after
from emberline.store.notifications import Notifier, PostgresListener, Subscription

try:
    import asyncpg  # type: ignore[import-untyped]

    from emberline.store.advisory_lock import AdvisoryLock
except ImportError as missing:
    raise BadInput("a PostgreSQL store needs the driver: pip install 'emberline[postgres]'") from missing

WRITERS = 4  # connections for writing
READERS = 4  # for look-ups
REPORTERS = 2  # for reports
MAX_GROUP = 128
CONNECT_S = 5.0
COMMAND_S = 120.0
CLOCK_SYNC_S = 30.0  # between two readings of the server's clock
_BACKOFF_S = (0.1, 2.0)
_MAX_RETRIES = 5  # of a transaction that was aborted by a deadlock or serialization failure
_MIGRATION_LOCK = 0x656D626572
_NOW_US = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
_VERSION_TABLE = "CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)"
_PLACEHOLDER = re.compile(r"'(?:[^']|'')*'|\?(\d*)")  # or a string literal, which is left alone

# Every statement finds its rows by an index. The planner must not choose otherwise from statistics that were taken
# while the tables were small, or never.
_SETTINGS = {
    "application_name": "emberline",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}

log = logging.getLogger("emberline.store")

_CONNECTION_ERRORS = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InternalClientError,
)
_RETRYABLE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


class _Write(NamedTuple):
    query: Query
    done: "asyncio.Future[Rows]"


class _Run(NamedTuple):
    work: Callable[[], Transaction[Any]]
    done: "asyncio.Future[Any]"


class _ConnectionPool:
    """Connections for one purpose. A database that cannot be reached is not asked for a moment; a busy one is asked."""

    def __init__(self, url: str, size: int, acquire_s: float, settings: Mapping[str, str] = _SETTINGS) -> None:
        self._size, self._acquire_s = size, acquire_s
        self._down_until_s = 0.0
        self._backoff_s = _BACKOFF_S[0]
        self._pool: Any = asyncpg.create_pool(  # connects on demand
            url,
            min_size=0,
            max_size=size,
            timeout=CONNECT_S,
            command_timeout=COMMAND_S,
            server_settings=dict(settings),
            init=_set_codecs,
        )

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self._down_until_s

    async def open(self) -> None:
        await self._pool

    async def use(self, work: Callable[[Any], Awaitable[T]]) -> T:
        if self.is_down:
            raise Unavailable("the database cannot be reached", retry_after_s=2)
        connection: Any = None
        try:
            async with self._pool.acquire(timeout=self._acquire_s) as connection:
                value = await work(connection)
        except TimeoutError as error:
            if connection is None and self._pool.get_size() < self._size:
                raise self.unavailable(error) from error  # it could not connect
            log.warning("the database is slow: %d of %d connections are busy", self._pool.get_size(), self._size)
            raise Unavailable("the database is too slow", retry_after_s=5) from error
        except _CONNECTION_ERRORS as error:
            raise self.unavailable(error) from error
        except asyncpg.InterfaceError as error:
            if connection is not None and not connection.is_closed():
                raise  # an error of the caller, such as a missing parameter
            raise self.unavailable(error) from error
        self._backoff_s = _BACKOFF_S[0]
        return value

    def unavailable(self, error: Exception) -> Unavailable:
        """Starts a backoff: until it ends calls are refused without a connection attempt."""
        reason = str(error) or type(error).__name__
        log.error("cannot use the store", extra={"reason": reason})
        if not isinstance(error, asyncpg.QueryCanceledError):
            self._down_until_s = time.monotonic() + random.uniform(0.5, 1.0) * self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])
        return Unavailable("the server's store cannot be used: the database is away or has no room", retry_after_s=5)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._pool.close()
        except (TimeoutError, *_CONNECTION_ERRORS):
            self._pool.terminate()

    def terminate(self) -> None:
        self._pool.terminate()


class PostgresStore:
    """Owns the connections. Methods belong to the event loop that opened it."""

    is_shared = True

    def __init__(self, url: str, acquire_s: float = CONNECT_S, report_s: float = REPORT_S) -> None:
        self._writing = _ConnectionPool(url, WRITERS + 2, acquire_s)  # two for notifications and the clock
        self._reading = _ConnectionPool(url, READERS, acquire_s)
        settings = _SETTINGS | {"statement_timeout": str(int(report_s * 1000))}
        self._reporting = _ConnectionPool(url, REPORTERS, acquire_s + report_s, settings)
        self._report_s = report_s
        self._url = url
        self._notifier = Notifier()
        self._listener = PostgresListener(lambda: _connect(url), self._notifier)
        self._queue: deque[_Write | _Run] = deque()
        self._writers: set[asyncio.Task[None]] = set()
        self._closed = False
        self._clock_offset_us = 0  # the server's clock minus this machine's uptime
        self._clock: SteadyClock | None = None
        self._clock_sync: asyncio.Task[None] | None = None
        self._notifications: set[tuple[str, str]] = set()  # not sent yet: channel, payload
        self._notifying: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        migrations: Migrations = MIGRATIONS,
        acquire_s: float = CONNECT_S,
        report_s: float = REPORT_S,
    ) -> "PostgresStore":
        """Connect, and bring the schema up to date. `acquire_s` is the longest wait for a connection that is free,
        `report_s` the longest time of a report."""
        text = "the store's URL cannot be used: write postgresql://user:password@host:5432/name"
        try:
            store = cls(url, acquire_s, report_s)
        except ValueError as error:
            raise BadInput(text, param="store.url") from error
        try:
            await store._writing.open()
            await store._reading.open()
            await store._reporting.open()
            await store._writing.use(lambda connection: _migrate(connection, migrations))
            await store._read_clock()
        except Exception as error:
            store._writing.terminate()
            store._reading.terminate()
            store._reporting.terminate()
            if isinstance(error, EmberlineError):
                raise
            if isinstance(error, ValueError | asyncpg.InterfaceError):
                raise BadInput(text, param="store.url") from error
            raise store._writing.unavailable(error) from error
        store._clock = SteadyClock(lambda: uptime_us() + store._clock_offset_us)
        store._clock_sync = asyncio.create_task(store._sync_clock())
        return store

    # --- the interface -----------------------------------------------------------------------------------------------

    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """An invalid statement raises asyncpg.PostgresError; a database that cannot be used raises Unavailable."""
        done: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        self._submit(_Write(Query(sql, params), done))
        return await done

    async def transaction(self, statements: Sequence[Statement]) -> list[Rows]:
        return await self.run(lambda: in_order(statements))

    async def run(self, work: Callable[[], Transaction[T]]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._submit(_Run(work, done))
        return await done

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        return await self._read(self._reading, lambda connection: _rows(connection, Query(sql, params)))

    async def report(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        async def rows(connection: Any) -> Rows:
            try:
                return await _rows(connection, Query(sql, params))
            except asyncpg.QueryCanceledError as error:
                raise report_too_slow(self._report_s) from error

        return await self._read(self._reporting, rows)

    async def _read(self, pool: _ConnectionPool, work: Callable[[Any], Awaitable[Rows]]) -> Rows:
        """Run a query, which changes nothing: it is repeated once when its connection turns out to be dead."""
        self._check_open()
        try:
            return await pool.use(work)
        except Unavailable as error:
            if pool.is_down or isinstance(error.__cause__, TimeoutError):
                raise
            return await pool.use(work)

    async def notify(self, channel: str, payload: str = "") -> None:
        """Collected for a moment: committing a notification takes a lock that the whole server shares."""
        self._notifications.add((channel, payload))
        if self._notifying is None and not self._closed:
            self._notifying = asyncio.create_task(self._send_notifications())

    def listen(self, channel: str, poll_s: float = 5.0) -> Subscription:
        self._listener.add(channel)
        return self._notifier.subscribe(channel, poll_s)

    def lock(self, name: str) -> ProcessLock:
        return AdvisoryLock(self._url, name)

    def now_us(self) -> int:
        """The server's clock, continued by this machine's uptime: processes on many machines agree."""
        assert self._clock is not None, "opened"
        return self._clock.now_us()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        while self._writers:
            await asyncio.gather(*self._writers, return_exceptions=True)
        background = [task for task in (self._clock_sync, self._notifying) if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._listener.close()
        await asyncio.gather(self._writing.close(), self._reading.close(), self._reporting.close())

    # --- writing -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")

    def _submit(self, op: _Write | _Run) -> None:
        self._check_open()
        self._queue.append(op)
        if len(self._writers) < WRITERS:
            writer = asyncio.create_task(self._drain())
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)

    async def _drain(self) -> None:
        while self._queue:
            op = self._queue.popleft()
            if isinstance(op, _Run):
                await _resolve(op.done, self._transact(op.work))
                continue
            group = [op]
            while self._queue and len(group) < MAX_GROUP and isinstance(self._queue[0], _Write):
                group.append(self._queue.popleft())  # type: ignore[arg-type]
            await self._commit(group)

    async def _commit(self, group: list[_Write]) -> None:
        """Commit the statements in one transaction; when one of them fails, each is committed on its own instead."""
        if len(group) > 1:
            queries = [write.query for write in group]
            try:
                outcomes = await self._transact(lambda: in_order(queries))
            except Unavailable as error:
                for write in group:
                    resolve_future(write.done, error)
                return
            except Exception:
                log.debug("a group of %d writes is split", len(group))
            else:
                for write, rows in zip(group, outcomes, strict=True):
                    resolve_future(write.done, rows)
                return
        for write in group:
            await _resolve(write.done, self._execute(write.query))

    async def _execute(self, query: Query) -> Rows:
        return await self._writing.use(lambda connection: _rows(connection, query))

    async def _transact(self, work: Callable[[], Transaction[T]]) -> T:
        for attempt in range(_MAX_RETRIES):
            try:
                return await self._writing.use(lambda connection: _step_through(connection, work()))
            except _RETRYABLE:
                log.info("a transaction met another's locks and is repeated")
                await asyncio.sleep(random.uniform(0.0, 0.01 * 2**attempt))
        return await self._writing.use(lambda connection: _step_through(connection, work()))

    # --- background --------------------------------------------------------------------------------------------------

    async def _read_clock(self) -> None:
        began_us = uptime_us()
        ((server_us,),) = await self._execute(Query(_NOW_US))
        self._clock_offset_us = int(server_us or 0) - (began_us + uptime_us()) // 2

    async def _sync_clock(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_SYNC_S * random.uniform(0.8, 1.2))
            with contextlib.suppress(Unavailable):
                await self._read_clock()

    async def _send_notifications(self) -> None:
        try:
            while self._notifications:
                await asyncio.sleep(0.005)
                batch, self._notifications = list(self._notifications), set()
                await self._writing.use(lambda connection, batch=batch: _notify(connection, batch))  # type: ignore[misc]
        except Unavailable:
            self._notifications.clear()  # listeners poll
        finally:
            self._notifying = None


async def _resolve(done: "asyncio.Future[Any]", outcome: Awaitable[Any]) -> None:
    try:
        resolve_future(done, await outcome)
    except Exception as error:
        resolve_future(done, error)


async def _connect(url: str) -> Any:
    return await asyncpg.connect(url, timeout=CONNECT_S, server_settings={"application_name": "emberline listener"})


async def _set_codecs(connection: Any) -> None:
    """Sums of BIGINT are numeric, which asyncpg would return as Decimal."""
    await connection.set_type_codec("numeric", schema="pg_catalog", encoder=str, decoder=_number, format="text")


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def numbered(sql: str) -> str:
    """PostgreSQL's text of a statement, with `$1`, `$2` for its `?` placeholders.

    `?3` is the third parameter, as in SQLite; a text has either all of its placeholders numbered or none.
    """
    return _numbered(sql.postgres if isinstance(sql, Sql) else sql)


@lru_cache(512)
def _numbered(sql: str) -> str:
    n = 0

    def number(match: re.Match[str]) -> str:
        nonlocal n
        if not match[0].startswith("?"):
            return match[0]
        n += 1
        return f"${match[1] or n}"

    return _PLACEHOLDER.sub(number, sql)


async def _rows(connection: Any, statement: Statement) -> Rows:
    if not isinstance(statement, BulkQuery):
        sql, params = statement
        return [tuple(row) for row in await connection.fetch(numbered(sql), *params)]
    if not statement.params:
        return []
    if isinstance(statement.sql, Sql) and statement.sql.bulk is not None:
        columns = zip(*statement.params, strict=True)
        return [tuple(row) for row in await connection.fetch(numbered(statement.sql.bulk), *columns)]
    text = numbered(statement.sql)
    if returns_rows(text):
        return [tuple(row) for row in await connection.fetchmany(text, statement.params)]
    await connection.executemany(text, statement.params)
    return []


async def _step_through(connection: Any, steps: Transaction[T]) -> T:
    async with connection.transaction():
        try:
            statement = next(steps)
            while True:
                statement = steps.send(await _rows(connection, statement))
        except StopIteration as stop:
            value: T = stop.value
            return value


async def _notify(connection: Any, notifications: list[tuple[str, str]]) -> None:
    for channel, payload in notifications:
        await connection.execute("SELECT pg_notify($1, $2)", f"emberline_{channel}", payload)


async def _migrate(connection: Any, migrations: Migrations) -> None:
    """Bring the schema up to date in one transaction, under a lock that admits one process at a time."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
        await connection.execute(_VERSION_TABLE)
        version = await connection.fetchval("SELECT MAX(version) FROM schema_version") or 0
        for statement in steps_after(version, migrations):
            await connection.execute(for_postgres(statement))
        if version < len(migrations):
            await connection.execute("DELETE FROM schema_version")
            await connection.execute("INSERT INTO schema_version VALUES ($1)", len(migrations))
