"""The embedded store: one SQLite file, a writer thread with group commit, and a connection for reading.

Group commit without a timer: the writer takes whatever is queued (at most MAX_GROUP), commits it with one fsync, and
takes what has arrived in the meantime. A lone write starts at once; concurrent ones share the next commit.
"""

import asyncio
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from emberline.protocol.errors import Unavailable
from emberline.store.clock import SteadyClock
from emberline.store.database import (
    BulkQuery,
    ProcessLock,
    Query,
    Rows,
    Statement,
    T,
    Transaction,
    Value,
    in_order,
    resolve_future,
    returns_rows,
)
from emberline.store.migrations import MIGRATIONS, Migrations, migrate
from emberline.store.notifications import Notifier, Subscription

MAX_GROUP = 256
BUSY_TIMEOUT_S = 5.0  # the longest wait for another process's lock

log = logging.getLogger("emberline.store")

# Result codes that concern the database as a whole, not one statement, and what the operator can do about them.
_DATABASE_ERRORS = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space in the data folder's file system",
    sqlite3.SQLITE_BUSY: "the database is locked by another process",
    sqlite3.SQLITE_LOCKED: "the database is locked",
    sqlite3.SQLITE_IOERR: "the disk reports an input/output error",
    sqlite3.SQLITE_READONLY: "the database cannot be written: check the data folder's permissions",
    sqlite3.SQLITE_CANTOPEN: "the database cannot be opened: check the data folder's permissions",
    sqlite3.SQLITE_CORRUPT: "the database file is damaged: move it away and start again, or restore a copy",
    sqlite3.SQLITE_NOTADB: "the file is not a database: move it away and start again",
    sqlite3.SQLITE_NOMEM: "out of memory",
}


class _Write(NamedTuple):
    work: Callable[[], Transaction[Any]]
    done: "asyncio.Future[Any]"


class SoleProcess:
    """A lock where one process has the database for itself."""

    async def try_hold(self) -> bool:
        return True

    async def is_held(self) -> bool:
        return True

    async def release(self) -> None:
        pass


class SqliteStore:
    """Owns the file. Methods belong to the event loop that opened it; the two connections belong to their threads."""

    is_shared = False

    def __init__(
        self, path: Path, loop: asyncio.AbstractEventLoop, migrations: Migrations, busy_timeout_s: float
    ) -> None:
        self.path = path
        self._loop = loop
        self._notifier = Notifier()
        self._clock = SteadyClock()
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._closed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its side files the same mode
            self._writer = _connect(path, busy_timeout_s)
            migrate(self._writer, migrations)
            self._reader = _connect(path, busy_timeout_s)
            self._reader.execute("PRAGMA query_only = 1")
        except sqlite3.Error as error:
            raise self._unavailable(error) from error
        except OSError as error:
            raise Unavailable(f"cannot use {path}: {error.strerror}") from error
        self._reads = ThreadPoolExecutor(1, "emberline-store-read")
        self._thread = threading.Thread(target=self._run, name="emberline-store-write", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls, path: Path, migrations: Migrations = MIGRATIONS, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> "SqliteStore":
        """Create or open the database and bring its schema up to date."""
        return await asyncio.to_thread(cls, path, asyncio.get_running_loop(), migrations, busy_timeout_s)

    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """An invalid statement raises sqlite3.Error; a database that cannot be used raises Unavailable."""
        (rows,) = await self.run(lambda: in_order([Query(sql, params)]))
        return rows

    def transaction(self, statements: Sequence[Statement]) -> Coroutine[Any, Any, list[Rows]]:
        return self.run(lambda: in_order(statements))

    async def run(self, work: Callable[[], Transaction[T]]) -> T:
        """Run a transaction on the writer thread, so that no other write of this process interleaves."""
        if self._closed:
            raise Unavailable("the store is closed")
        done: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Write(work, done))
        return await done

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        if self._closed:
            raise Unavailable("the store is closed")
        try:
            return await self._loop.run_in_executor(self._reads, lambda: self._reader.execute(sql, params).fetchall())
        except sqlite3.Error as error:
            if _code(error) in _DATABASE_ERRORS:
                raise self._unavailable(error) from error
            raise

    async def notify(self, channel: str, payload: str = "") -> None:
        """Wakes subscribers in this process; other processes poll."""
        self._notifier.publish(channel, payload)

    def listen(self, channel: str, poll_s: float = 5.0) -> Subscription:
        return self._notifier.subscribe(channel, poll_s)

    def lock(self, name: str) -> ProcessLock:
        return SoleProcess()

    def now_us(self) -> int:
        return self._clock.now_us()

    async def close(self) -> None:
        """Commit what is queued, then close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._close_connections)

    def _close_connections(self) -> None:
        self._thread.join()
        self._reads.shutdown()
        self._reader.close()
        self._writer.close()

    # --- the writer thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            group, closing = self._take()
            if group:
                self._resolve(group, self._commit(group))

    def _take(self) -> tuple[list[_Write], bool]:
        """Wait for one write, then take all that are queued. True: the store is closing and nothing follows."""
        group: list[_Write] = []
        get: Callable[[], _Write | None] = self._queue.get
        try:
            while len(group) < MAX_GROUP:
                write = get()
                if write is None:
                    return group, True
                group.append(write)
                get = self._queue.get_nowait
        except queue.Empty:
            pass
        return group, False

    def _commit(self, group: list[_Write]) -> list[Any]:
        """Each write's result, or the exception it failed with."""
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            outcomes = [self._execute(write.work) for write in group]
            self._writer.execute("COMMIT")
            return outcomes
        except sqlite3.Error as error:
            log.error("commit of %d writes failed: %s", len(group), error)
            self._roll_back()
            return [self._unavailable(error)] * len(group)

    def _execute(self, work: Callable[[], Transaction[Any]]) -> Any:
        """A write's own error is its outcome and does not affect the others; an error of the database is raised."""
        self._writer.execute("SAVEPOINT work")
        try:
            outcome = self._step_through(work())
        except Exception as error:
            database_error = isinstance(error, sqlite3.Error) and _code(error) in _DATABASE_ERRORS
            if database_error or not self._writer.in_transaction:
                raise
            self._writer.execute("ROLLBACK TO work")
            outcome = error
        self._writer.execute("RELEASE work")
        return outcome

    def _step_through(self, steps: Transaction[Any]) -> Any:
        try:
            statement = next(steps)
            while True:
                statement = steps.send(self._rows(statement))
        except StopIteration as stop:
            return stop.value

    def _rows(self, statement: Statement) -> Rows:
        if not isinstance(statement, BulkQuery):
            return self._writer.execute(*statement).fetchall()
        if returns_rows(statement.sql):
            return [row for params in statement.params for row in self._writer.execute(statement.sql, params)]
        self._writer.executemany(statement.sql, statement.params)
        return []

    def _roll_back(self) -> None:
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.error("rollback failed: %s", error)

    def _resolve(self, group: list[_Write], outcomes: list[Any]) -> None:
        def resolve() -> None:
            for write, outcome in zip(group, outcomes, strict=True):
                resolve_future(write.done, outcome)

        try:
            self._loop.call_soon_threadsafe(resolve)
        except RuntimeError:  # the loop is closed, so no caller waits for the outcome
            log.debug("%d writes finished after their event loop", len(group))

    def _unavailable(self, error: sqlite3.Error) -> Unavailable:
        reason = _DATABASE_ERRORS.get(_code(error), str(error))
        log.error("cannot use the store", extra={"path": str(self.path), "reason": reason})
        return Unavailable(f"the server's store cannot be used: {reason}", retry_after_s=5)


def _connect(path: Path, busy_timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = 1")
    connection.execute("PRAGMA wal_autocheckpoint = 4000")  # pages: fewer commits wait for the main file's flush
    return connection


def _code(error: sqlite3.Error) -> int:
    """The primary result code, or 0 where the error did not come from SQLite itself."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF
