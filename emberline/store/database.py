"""The interface that SQLite and PostgreSQL implement. SQL is written once, with `?` placeholders.

A transaction that reads before it writes is a generator: `rows = yield Query(sql, params)`. SQLite runs it on the
writer thread, PostgreSQL over a connection. Either may run it again from the start, so it must have no side effects.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from emberline.protocol.errors import BadInput
from emberline.store.notifications import Subscription

Value = str | bytes | int | float | None
Row = tuple[Value, ...]
Rows = list[Row]
T = TypeVar("T")


REPORT_S = 60.0  # the longest time of a report
SEARCH_S = 3.0  # the same of a search by a client's words


class Sql(str):
    """A statement with a different text for PostgreSQL.

    bulk: PostgreSQL's text for a BulkQuery, with one array per parameter instead of one execution per row.
    """

    postgres: str
    bulk: str | None

    def __new__(cls, sqlite: str, *, postgres: str | None = None, bulk: str | None = None) -> "Sql":
        text = super().__new__(cls, sqlite)
        text.postgres = postgres or sqlite
        text.bulk = bulk
        return text


class Query(NamedTuple):
    sql: str
    params: Sequence[Value] = ()


class BulkQuery(NamedTuple):
    """One statement for many sets of parameters; the RETURNING rows of all of them are concatenated."""

    sql: str
    params: Sequence[Sequence[Value]]


Statement = Query | BulkQuery | tuple[str, Sequence[Value]]
Transaction = Generator[Statement, Rows, T]


class ProcessLock(Protocol):
    """Held by one process at a time, of all that use the database, until it lets go of it or dies."""

    async def try_hold(self) -> bool:
        """Take the lock, or return False if another process has it or the database cannot be reached. Trying again is
        cheap, and is how a holder learns that it has lost the lock."""

    async def is_held(self) -> bool:
        """Ask the database whether this process has held the lock ever since `try_hold` took it, without taking it
        again. A holder asks before it does what only one process may do."""

    async def release(self) -> None: ...


class Database(Protocol):
    @property
    def is_shared(self) -> bool:
        """True if cores of other machines may use the same database."""

    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """Run one statement; return its RETURNING rows once it is durable. Concurrent writes share a commit."""

    async def transaction(self, statements: Sequence[Statement]) -> list[Rows]:
        """Run all statements or none; return once they are durable."""

    async def run(self, work: Callable[[], Transaction[T]]) -> T:
        """Run a transaction that reads before it writes. An exception in it rolls it back."""

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """Run one quick query, which finds its rows by an index. It sees every write that has returned."""

    async def report(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """Run one query whose time grows with the table: a search, a sum. It never makes `read` wait.

        Raises BadInput if it takes longer than REPORT_S."""

    async def notify(self, channel: str, payload: str = "") -> None:
        """Wake the channel's subscribers, best effort; call it after the commit it announces."""

    def listen(self, channel: str, poll_s: float = 5.0) -> Subscription:
        """Subscribe to a channel; about every `poll_s` without a notification the payload "" is delivered."""

    def lock(self, name: str) -> ProcessLock:
        """Not held yet."""

    def now_us(self) -> int:
        """Unix time by the clock that leases and deadlines are compared with: it never jumps."""

    async def close(self) -> None: ...


@lru_cache(256)
def returns_rows(sql: str) -> bool:
    return "RETURNING" in sql or sql.lstrip().startswith("SELECT")


def in_order(statements: Sequence[Statement]) -> Transaction[list[Rows]]:
    """The transaction that runs `statements` one after another."""
    results: list[Rows] = []
    for statement in statements:
        results.append((yield statement))
    return results


def decode_row(kind: type[T], columns: str, row: Row) -> T:
    """The msgspec struct whose fields are the row's columns ("id, account, …")."""
    return msgspec.convert(dict(zip(columns.split(", "), row, strict=True)), kind)


async def search_rows(store: Database, sql: str, params: Sequence[Value], limit_s: float = SEARCH_S) -> Rows:
    """Run a report that looks for a client's words, who may choose words and texts that take long to compare.

    Raises BadInput if it takes longer than `limit_s`, the wait for other reports included."""
    try:
        async with asyncio.timeout(limit_s):
            return await store.report(sql, params)
    except TimeoutError:
        message = f"the search took more than {limit_s:g} s and was stopped: search for fewer or other words"
        raise BadInput(message) from None


def report_too_slow(limit_s: float) -> BadInput:
    """The error of a report that was stopped."""
    return BadInput(f"the query takes longer than {limit_s:g} s: ask for a shorter time or fewer rows")


def resolve_future(done: "asyncio.Future[Any]", outcome: Any) -> None:
    """Hand a result or an exception to the waiter; if it was cancelled, the write stands nevertheless."""
    if done.done():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)
