"""The embedded store: one SQLite file, a writer thread with group commit, and two bounded groups of readers.

Look-ups by key never wait for reports, which have readers of their own and a time limit: a long read also keeps SQLite
from reusing its write-ahead log.

Group commit without a timer: the writer takes whatever is queued (at most MAX_GROUP), commits it with one fsync, and
takes what has arrived in the meantime. A lone write starts at once; concurrent ones share the next commit.
"""

import asyncio
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from emberline.protocol.errors import Unavailable
from emberline.store.clock import SteadyClock
from emberline.store.database import (
    REPORT_S,
    BulkQuery,
    ProcessLock,
    Query,
    Rows,
    Statement,
    T,
    Transaction,
    Value,
    in_order,
    report_too_slow,
    resolve_future,
    returns_rows,
)
from emberline.store.migrations import MIGRATIONS, Migrations, migrate
from emberline.store.notifications import Notifier, Subscription

READERS = 3  # connections for look-ups, each with a thread
REPORTERS = 2  # connections for reports
MAX_GROUP = 256
BUSY_TIMEOUT_S = 5.0  # the longest wait for another process's lock
_CHECK_STEPS = 10_000  # of SQLite's virtual machine, between two looks at the time of a report

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
    is_single: bool = False  # one statement, which undoes itself if it fails


class SoleProcess:
    """A lock where one process has the database for itself."""

    async def try_hold(self) -> bool:
        return True

    async def is_held(self) -> bool:
        return True

    async def release(self) -> None:
        pass


class _Readers:
    """Read-only connections, opened when they are needed. Each is used by one thread at a time."""

    def __init__(self, path: Path, most: int, busy_timeout_s: float, name: str) -> None:
        self._path, self._busy_timeout_s = path, busy_timeout_s
        self._threads = ThreadPoolExecutor(most, name)
        self._idle: list[sqlite3.Connection] = []  # the one used last at the end: its pages are cached
        self._closing = False

    def open(self) -> None:
        """Open the first connection, so that a file that cannot be read is noticed at the start."""
        self._idle.append(self._connect())

    async def rows(self, sql: str, params: Sequence[Value]) -> Rows:
        """Run one query."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, sql, params, None)

    async def rows_within(self, limit_s: float, sql: str, params: Sequence[Value]) -> Rows:
        """Run one query, which ends with SQLITE_INTERRUPT after limit_s, or when nobody waits for it any more."""
        cancelled, until_s = threading.Event(), time.monotonic() + limit_s

        def is_over() -> bool:
            return self._closing or cancelled.is_set() or time.monotonic() > until_s

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, sql, params, is_over)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def close(self) -> None:
        self._closing = True
        self._threads.shutdown()
        for connection in self._idle:
            connection.close()

    def _run(self, sql: str, params: Sequence[Value], is_over: Callable[[], bool] | None) -> Rows:
        connection = self._idle.pop() if self._idle else self._connect()
        try:
            connection.set_progress_handler(is_over, _CHECK_STEPS)
            return connection.execute(sql, params).fetchall()
        finally:
            self._idle.append(connection)

    def _connect(self) -> sqlite3.Connection:
        connection = _connect(self._path, self._busy_timeout_s)
        connection.execute("PRAGMA query_only = 1")
        return connection


class SqliteStore:
    """Owns the file. Methods belong to the event loop that opened it; every connection belongs to one thread."""

    is_shared = False

    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        migrations: Migrations,
        busy_timeout_s: float,
        report_s: float,
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
            self._readers = _Readers(path, READERS, busy_timeout_s, "emberline-store-read")
            self._readers.open()
        except sqlite3.Error as error:
            raise self._unavailable(error) from error
        except OSError as error:
            raise Unavailable(f"cannot use {path}: {error.strerror}") from error
        self._reporters = _Readers(path, REPORTERS, busy_timeout_s, "emberline-store-report")
        self._report_s = report_s
        self._thread = threading.Thread(target=self._run, name="emberline-store-write", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls,
        path: Path,
        migrations: Migrations = MIGRATIONS,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        report_s: float = REPORT_S,
    ) -> "SqliteStore":
        """Create or open the database and bring its schema up to date. `report_s` is the longest time of a report."""
        return await asyncio.to_thread(cls, path, asyncio.get_running_loop(), migrations, busy_timeout_s, report_s)

    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """An invalid statement raises sqlite3.Error; a database that cannot be used raises Unavailable."""
        (rows,) = await self._run_on_thread(lambda: in_order([Query(sql, params)]), is_single=True)
        return rows

    def transaction(self, statements: Sequence[Statement]) -> Coroutine[Any, Any, list[Rows]]:
        return self.run(lambda: in_order(statements))

    def run(self, work: Callable[[], Transaction[T]]) -> Coroutine[Any, Any, T]:
        """Run a transaction on the writer thread, so that no other write of this process interleaves."""
        return self._run_on_thread(work)

    async def _run_on_thread(self, work: Callable[[], Transaction[T]], is_single: bool = False) -> T:
        if self._closed:
            raise Unavailable("the store is closed")
        done: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Write(work, done, is_single))
        return await done

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        return await self._read(self._readers.rows(sql, params))

    async def report(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        return await self._read(self._reporters.rows_within(self._report_s, sql, params))

    async def _read(self, rows: Coroutine[Any, Any, Rows]) -> Rows:
        if self._closed:
            rows.close()
            raise Unavailable("the store is closed")
        try:
            return await rows
        except sqlite3.Error as error:
            if _code(error) == sqlite3.SQLITE_INTERRUPT:
                raise report_too_slow(self._report_s) from error
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
        self._readers.close()
        self._reporters.close()
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
            outcomes = [self._execute(write) for write in group]
            self._writer.execute("COMMIT")
            return outcomes
        except sqlite3.Error as error:
            log.error("commit of %d writes failed: %s", len(group), error)
            self._roll_back()
            return [self._unavailable(error)] * len(group)

    def _execute(self, write: _Write) -> Any:
        """A write's own error is its outcome and does not affect the others; an error of the database is raised."""
        if not write.is_single:
            self._writer.execute("SAVEPOINT work")
        try:
            outcome = self._step_through(write.work())
        except Exception as error:
            database_error = isinstance(error, sqlite3.Error) and _code(error) in _DATABASE_ERRORS
            if database_error or not self._writer.in_transaction:
                raise
            if not write.is_single:
                self._writer.execute("ROLLBACK TO work")
            outcome = error
        if not write.is_single:
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
