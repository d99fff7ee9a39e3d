"""What a store is: a few verbs that SQLite and PostgreSQL offer alike. SQL is written once, with `?` placeholders.

A transaction that must look before it writes is a generator: `rows = yield Step(sql, params)`. SQLite drives it on its
writer's thread, PostgreSQL over a connection; both may drive it again from the beginning, so it has no side effects.
"""

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar

Value = str | bytes | int | float | None
Row = tuple[Value, ...]
Rows = list[Row]
T = TypeVar("T")


class Sql(str):
    """A statement that PostgreSQL is told in words of its own.

    bulk: its words for `Many`, with one array per parameter in place of many executions.
    """

    postgres: str
    bulk: str | None

    def __new__(cls, sqlite: str, *, postgres: str | None = None, bulk: str | None = None) -> "Sql":
        text = super().__new__(cls, sqlite)
        text.postgres = postgres or sqlite
        text.bulk = bulk
        return text


class Step(NamedTuple):
    sql: str
    params: Sequence[Value] = ()


class Many(NamedTuple):
    """One statement for many sets of parameters; their RETURNING rows come one after another."""

    sql: str
    each: Sequence[Sequence[Value]]


Statement = Step | Many | tuple[str, Sequence[Value]]
Work = Generator[Statement, Rows, T]


class Database(Protocol):
    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """Run one statement; return once it is durable, with its RETURNING rows. Neighbours share a commit."""

    async def transaction(self, statements: Sequence[Statement]) -> list[Rows]:
        """Run them all or none; return once they are durable."""

    async def run(self, work: Callable[[], Work[T]]) -> T:
        """Run a transaction that looks before it writes. What it raises undoes it."""

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """Run one query: it sees every write that has returned."""

    async def notify(self, channel: str, payload: str = "") -> None:
        """Wake whoever listens, best effort; after the commit that there is to tell of."""

    def listen(self, channel: str, poll_s: float = 5.0) -> AsyncIterator[str]:
        """Payloads as they come; "" when some may have been missed, and every `poll_s` or so: look for yourself."""

    def now_us(self) -> int:
        """Unix time by the clock that leases and deadlines go by: it never jumps."""

    async def close(self) -> None: ...


@lru_cache(256)
def gives_rows(sql: str) -> bool:
    """Whether the statement has rows to return."""
    return "RETURNING" in sql or sql.lstrip().startswith("SELECT")


def in_order(statements: Sequence[Statement]) -> Work[list[Rows]]:
    """The transaction that runs `statements` one after another."""
    found: list[Rows] = []
    for statement in statements:
        found.append((yield statement))
    return found
