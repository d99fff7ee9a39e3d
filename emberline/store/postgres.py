"""The store beyond one machine: PostgreSQL through asyncpg.

asyncpg, because it was made for asyncio, sends one statement for many rows without waiting in between, and needs no C
library on the host.

Group commit: a statement goes out at once while a lane (a connection that writes) is free; while all are busy, what
waits is gathered and committed together. Transactions that look before they write go one by one, so that no two of
them hold each other's rows: who calls `run` gathers its own rows.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from emberline.protocol.errors import BadInput, EmberlineError, Unavailable
from emberline.store import migrations
from emberline.store.clock import SteadyClock, uptime_us
from emberline.store.database import Many, Rows, Sql, Statement, Step, T, Value, Work, gives_rows, in_order
from emberline.store.notifications import Notifier, PostgresListener

_PIECE = re.compile(r"'(?:[^']|'')*'|\?(\d*)")


def numbered(sql: str) -> str:
    """The text for PostgreSQL: its own where there is one, and `$1`, `$2` for the `?` that are not in quotes.

    `?3` is the third parameter, as in SQLite; a text has either all of its placeholders numbered or none.
    """
    return _numbered(sql.postgres if isinstance(sql, Sql) else sql)


@lru_cache(512)
def _numbered(sql: str) -> str:
    n = 0

    def piece(match: re.Match[str]) -> str:
        nonlocal n
        if not match[0].startswith("?"):
            return match[0]
        n += 1
        return f"${match[1] or n}"

    return _PIECE.sub(piece, sql)


try:
    import asyncpg  # type: ignore[import-untyped]
except ImportError as missing:
    raise BadInput("a PostgreSQL store needs the driver: pip install 'emberline[postgres]'") from missing

LANES = 4  # connections that write
READERS = 4
MAX_BATCH = 128
CONNECT_S = 5.0
COMMAND_S = 120.0
CLOCK_S = 30.0  # between two looks at the server's clock
_BACKOFF_S = (0.1, 2.0)
_RETRIES = 5  # of a transaction that met another's locks
_MIGRATION_LOCK = 0x656D626572
_NOW_US = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
_VERSION_TABLE = "CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)"

# Every statement of ours finds its rows by an index. A plan that was made while the tables were small, or before they
# were ever analysed, must not say otherwise once they have grown.
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

_TROUBLE = (
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
_RETRY = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


class _Write(NamedTuple):
    step: Step
    done: "asyncio.Future[Rows]"


class _Run(NamedTuple):
    work: Callable[[], Work[Any]]
    done: "asyncio.Future[Any]"


class PostgresStore:
    """Owns the pool. Methods belong to the event loop that opened it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: Any = None
        self._signals = Notifier()
        self._listener = PostgresListener(lambda: _connect(url), self._signals)
        self._waiting: deque[_Write | _Run] = deque()
        self._lanes: set[asyncio.Task[None]] = set()
        self._closed = False
        self._down_until_s = 0.0
        self._backoff_s = _BACKOFF_S[0]
        self._ahead_us = 0  # the server's clock minus this machine's ticks
        self._clock: SteadyClock | None = None
        self._tending: asyncio.Task[None] | None = None
        self._said: set[tuple[str, str]] = set()
        self._saying: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, url: str) -> "PostgresStore":
        """Connect, and bring the schema up to date."""
        store = cls(url)
        try:
            store._pool = await asyncpg.create_pool(
                url,
                min_size=0,
                max_size=LANES + READERS,
                timeout=CONNECT_S,
                command_timeout=COMMAND_S,
                server_settings=_SETTINGS,
                init=_prepare,
            )
            await store._on_connection(_migrate)
            await store._look_at_clock()
        except Exception as error:
            if store._pool is not None:
                store._pool.terminate()
            if isinstance(error, EmberlineError):
                raise
            if isinstance(error, ValueError | asyncpg.InterfaceError):
                told = "the store's URL cannot be used: write postgresql://user:password@host:5432/name"
                raise BadInput(told, param="store.url") from error
            raise store._trouble(error) from error
        store._clock = SteadyClock(lambda: uptime_us() + store._ahead_us)
        store._tending = asyncio.create_task(store._tend())
        return store

    # --- the verbs ---------------------------------------------------------------------------------------------------

    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """A statement's own fault raises asyncpg.PostgresError; trouble with the database raises Unavailable."""
        done: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        self._put(_Write(Step(sql, params), done))
        return await done

    async def transaction(self, statements: Sequence[Statement]) -> list[Rows]:
        return await self.run(lambda: in_order(statements))

    async def run(self, work: Callable[[], Work[T]]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._put(_Run(work, done))
        return await done

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """Reading changes nothing, so a connection that turns out to be dead is answered by another try."""
        self._check_open()
        step = Step(sql, params)
        try:
            return await self._on_connection(lambda connection: _rows(connection, step))
        except Unavailable:
            if time.monotonic() < self._down_until_s:
                raise
            return await self._on_connection(lambda connection: _rows(connection, step))

    async def notify(self, channel: str, payload: str = "") -> None:
        """Gathered for a moment: a commit with a notification takes a lock that all of the server's share."""
        self._said.add((channel, payload))
        if self._saying is None and not self._closed:
            self._saying = asyncio.create_task(self._say())

    def listen(self, channel: str, poll_s: float = 5.0) -> AsyncIterator[str]:
        self._listener.want(channel)
        return self._signals.listen(channel, poll_s)

    def now_us(self) -> int:
        """The server's clock, carried on by this machine's ticks: doors on many machines agree."""
        assert self._clock is not None, "opened"
        return self._clock.now_us()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        while self._lanes:
            await asyncio.gather(*self._lanes, return_exceptions=True)
        for task in (self._tending, self._saying):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in (self._tending, self._saying) if t is not None), return_exceptions=True)
        await self._listener.close()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._pool.close()
        except (TimeoutError, *_TROUBLE):
            self._pool.terminate()

    # --- writing -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")

    def _put(self, op: _Write | _Run) -> None:
        self._check_open()
        self._waiting.append(op)
        if len(self._lanes) < LANES:
            lane = asyncio.create_task(self._drain())
            self._lanes.add(lane)
            lane.add_done_callback(self._lanes.discard)

    async def _drain(self) -> None:
        while self._waiting:
            op = self._waiting.popleft()
            if isinstance(op, _Run):
                await self._settle(op.done, self._transact(op.work))
                continue
            group = [op]
            while self._waiting and len(group) < MAX_BATCH and isinstance(self._waiting[0], _Write):
                group.append(self._waiting.popleft())  # type: ignore[arg-type]
            await self._commit(group)

    async def _commit(self, group: list[_Write]) -> None:
        """One alone is a commit of its own. When one of several is at fault, each goes alone after all."""
        if len(group) > 1:
            steps = [write.step for write in group]
            try:
                outcomes = await self._transact(lambda: in_order(steps))
            except Unavailable as error:
                for write in group:
                    _end(write.done, error)
                return
            except Exception:
                log.debug("a group of %d writes is split", len(group))
            else:
                for write, rows in zip(group, outcomes, strict=True):
                    _end(write.done, rows)
                return
        for write in group:
            await self._settle(write.done, self._alone(write.step))

    async def _alone(self, step: Step) -> Rows:
        return await self._on_connection(lambda connection: _rows(connection, step))

    async def _settle(self, done: "asyncio.Future[Any]", outcome: Awaitable[Any]) -> None:
        try:
            _end(done, await outcome)
        except Exception as error:
            _end(done, error)

    async def _transact(self, work: Callable[[], Work[T]]) -> T:
        for attempt in range(_RETRIES):
            try:
                return await self._on_connection(lambda connection: _drive(connection, work()))
            except _RETRY:
                log.info("a transaction met another's locks and begins again")
                await asyncio.sleep(random.uniform(0.0, 0.01 * 2**attempt))
        return await self._on_connection(lambda connection: _drive(connection, work()))

    # --- connections -------------------------------------------------------------------------------------------------

    async def _on_connection(self, use: Callable[[Any], Awaitable[T]]) -> T:
        if time.monotonic() < self._down_until_s:
            raise Unavailable("the database cannot be reached", retry_after_s=2)
        connection: Any = None
        try:
            async with self._pool.acquire(timeout=CONNECT_S) as connection:
                value = await use(connection)
        except _TROUBLE as error:
            raise self._trouble(error) from error
        except asyncpg.InterfaceError as error:
            if connection is not None and not connection.is_closed():
                raise  # a statement with too few parameters, say
            raise self._trouble(error) from error
        self._backoff_s = _BACKOFF_S[0]
        return value

    def _trouble(self, error: Exception) -> Unavailable:
        """While it lasts, callers are refused at once and only one now and then tries to connect."""
        reason = str(error) or type(error).__name__
        log.error("cannot use the store", extra={"reason": reason})
        if not isinstance(error, asyncpg.QueryCanceledError):
            self._down_until_s = time.monotonic() + random.uniform(0.5, 1.0) * self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])
        return Unavailable("the server's store cannot be used: the database is away or has no room", retry_after_s=5)

    async def _look_at_clock(self) -> None:
        began_us = uptime_us()
        ((server_us,),) = await self._on_connection(lambda connection: _rows(connection, Step(_NOW_US)))
        self._ahead_us = int(server_us or 0) - (began_us + uptime_us()) // 2

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_S * random.uniform(0.8, 1.2))
            with contextlib.suppress(Unavailable):
                await self._look_at_clock()

    async def _say(self) -> None:
        try:
            while self._said:
                await asyncio.sleep(0.005)
                said, self._said = list(self._said), set()
                await self._on_connection(lambda connection, said=said: _notify(connection, said))  # type: ignore[misc]
        except Unavailable:
            self._said.clear()  # listeners poll
        finally:
            self._saying = None


def _end(done: "asyncio.Future[Any]", outcome: Any) -> None:
    if done.done():  # its waiter was cancelled; the write stands
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


async def _connect(url: str) -> Any:
    return await asyncpg.connect(url, timeout=CONNECT_S, server_settings={"application_name": "emberline listener"})


async def _prepare(connection: Any) -> None:
    """Sums of BIGINT are numeric, which would come as Decimal."""
    await connection.set_type_codec("numeric", schema="pg_catalog", encoder=str, decoder=_number, format="text")


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


async def _rows(connection: Any, statement: Statement) -> Rows:
    if isinstance(statement, Many):
        if not statement.each:
            return []
        if isinstance(statement.sql, Sql) and statement.sql.bulk is not None:
            columns = zip(*statement.each, strict=True)
            return [tuple(row) for row in await connection.fetch(numbered(statement.sql.bulk), *columns)]
        text = numbered(statement.sql)
        if gives_rows(text):
            return [tuple(row) for row in await connection.fetchmany(text, statement.each)]
        await connection.executemany(text, statement.each)
        return []
    sql, params = statement
    return [tuple(row) for row in await connection.fetch(numbered(sql), *params)]


async def _drive(connection: Any, steps: Work[T]) -> T:
    async with connection.transaction():
        rows: Rows | None = None
        while True:
            try:
                statement = steps.send(rows) if rows is not None else next(steps)
            except StopIteration as stop:
                value: T = stop.value
                return value
            rows = await _rows(connection, statement)


async def _notify(connection: Any, said: list[tuple[str, str]]) -> None:
    for channel, payload in said:
        await connection.execute("SELECT pg_notify($1, $2)", f"emberline_{channel}", payload)


async def _migrate(connection: Any) -> None:
    """In one transaction, one process at a time."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
        await connection.execute(_VERSION_TABLE)
        version = await connection.fetchval("SELECT MAX(version) FROM schema_version") or 0
        for statement in migrations.steps_after(version):
            await connection.execute(migrations.for_postgres(statement))
        if version < len(migrations.MIGRATIONS):
            await connection.execute("DELETE FROM schema_version")
            await connection.execute("INSERT INTO schema_version VALUES ($1)", len(migrations.MIGRATIONS))
