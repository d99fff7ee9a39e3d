"""The embedded store: one SQLite file, one writer thread that shares commits, reads on a connection of their own.

Group commit without a timer: the writer takes whatever is queued (at most MAX_BATCH), commits it with one fsync, and
takes what arrived meanwhile. A lone write starts at once; concurrent ones share the next commit.
"""

import asyncio
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from emberline.protocol.errors import Unavailable
from emberline.store.clock import SteadyClock
from emberline.store.database import Many, Rows, Statement, T, Value, Work, gives_rows, in_order
from emberline.store.migrations import migrate
from emberline.store.notifications import Notifier

MAX_BATCH = 256
BUSY_TIMEOUT_S = 5.0

log = logging.getLogger("emberline.store")

# Result codes that concern the database as a whole, not one statement, and what a person can do about them.
_TROUBLES = {
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
    sql: str
    params: Sequence[Value]
    done: "asyncio.Future[Rows]"


class _Run(NamedTuple):
    work: Callable[[], Work[Any]]
    done: "asyncio.Future[Any]"


_Op = _Write | _Run
_Outcome = Any  # what the operation gives, or the exception it ends with


class SqliteStore:
    """Owns the file. Methods belong to the event loop that opened it; the two connections belong to their threads."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self._loop = loop
        self._signals = Notifier()
        self._clock = SteadyClock()
        self._queue: queue.SimpleQueue[_Op | None] = queue.SimpleQueue()
        self._closed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its side files the same mode
            self._writer = _connect(path)
            migrate(self._writer)
            self._reader = _connect(path)
            self._reader.execute("PRAGMA query_only = 1")
        except sqlite3.Error as error:
            raise self._trouble(error) from error
        except OSError as error:
            raise Unavailable(f"cannot use {path}: {error.strerror}") from error
        self._reads = ThreadPoolExecutor(1, "emberline-store-read")
        self._thread = threading.Thread(target=self._run, name="emberline-store-write", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, path: Path) -> "SqliteStore":
        """Create or open the database and bring its schema up to date."""
        return await asyncio.to_thread(cls, path, asyncio.get_running_loop())

    async def write(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """Run one statement; return once it is durable, with its RETURNING rows. Shares a commit with its neighbours.

        A statement's own fault raises sqlite3.Error; trouble with the database raises Unavailable.
        """
        done: asyncio.Future[Rows] = self._loop.create_future()
        self._put(_Write(sql, params, done))
        return await done

    async def transaction(self, statements: Sequence[Statement]) -> list[Rows]:
        """Run them all or none; return once they are durable."""
        return await self.run(lambda: in_order(statements))

    async def run(self, work: Callable[[], Work[T]]) -> T:
        """Drive a transaction on the writer's thread, where nothing else is written meanwhile."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._put(_Run(work, done))
        return await done

    async def read(self, sql: str, params: Sequence[Value] = ()) -> Rows:
        """Run one query on the reading connection: it sees every write that has returned."""
        if self._closed:
            raise Unavailable("the store is closed")
        try:
            return await self._loop.run_in_executor(self._reads, self._query, sql, params)
        except sqlite3.Error as error:
            if _is_trouble(error):
                raise self._trouble(error) from error
            raise

    async def notify(self, channel: str, payload: str = "") -> None:
        """Wakes listeners of this process; those of others poll."""
        self._signals.say(channel, payload)

    def listen(self, channel: str, poll_s: float = 5.0) -> AsyncIterator[str]:
        return self._signals.listen(channel, poll_s)

    def now_us(self) -> int:
        return self._clock.now_us()

    async def close(self) -> None:
        """Commit what is queued, then close. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._shut)

    def _put(self, op: _Op) -> None:
        if self._closed:
            raise Unavailable("the store is closed")
        self._queue.put(op)

    def _shut(self) -> None:
        self._thread.join()
        self._reads.shutdown()
        self._reader.close()
        self._writer.close()

    def _query(self, sql: str, params: Sequence[Value]) -> Rows:
        return self._reader.execute(sql, params).fetchall()

    # --- the writer thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            batch, more = self._take()
            if batch:
                self._deliver(batch, self._commit(batch))
            if not more:
                return

    def _take(self) -> tuple[list[_Op], bool]:
        """Wait for one write, then take all that is queued. False: the store is closing and nothing follows."""
        batch: list[_Op] = []
        get: Callable[[], _Op | None] = self._queue.get
        try:
            while len(batch) < MAX_BATCH:
                op = get()
                if op is None:
                    return batch, False
                batch.append(op)
                get = self._queue.get_nowait
        except queue.Empty:
            pass
        return batch, True

    def _commit(self, batch: list[_Op]) -> list[_Outcome]:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            outcomes = [self._execute(op) for op in batch]
            self._writer.execute("COMMIT")
            return outcomes
        except sqlite3.Error as error:
            log.error("commit of %d writes failed: %s", len(batch), error)
            self._roll_back()
            return [self._trouble(error)] * len(batch)

    def _execute(self, op: _Op) -> _Outcome:
        """A statement's own fault is its outcome and leaves its neighbours alone; the database's trouble is raised."""
        try:
            if isinstance(op, _Run):
                return self._transact(op.work)
            return self._writer.execute(op.sql, op.params).fetchall()
        except sqlite3.Error as error:
            if _is_trouble(error) or not self._writer.in_transaction:
                raise
            return error
        except Exception as error:  # a parameter SQLite cannot bind, or what a transaction raised
            return error

    def _transact(self, work: Callable[[], Work[T]]) -> T:
        self._writer.execute("SAVEPOINT work")
        try:
            value = self._drive(work())
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK TO work")
                self._writer.execute("RELEASE work")
            raise
        self._writer.execute("RELEASE work")
        return value

    def _drive(self, steps: Work[T]) -> T:
        rows: Rows | None = None
        while True:
            try:
                statement = steps.send(rows) if rows is not None else next(steps)
            except StopIteration as stop:
                value: T = stop.value
                return value
            rows = self._rows(statement)

    def _rows(self, statement: Statement) -> Rows:
        if not isinstance(statement, Many):
            return self._writer.execute(*statement).fetchall()
        if gives_rows(statement.sql):
            return [row for params in statement.each for row in self._writer.execute(statement.sql, params)]
        self._writer.executemany(statement.sql, statement.each)
        return []

    def _roll_back(self) -> None:
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.error("rollback failed: %s", error)

    def _deliver(self, batch: list[_Op], outcomes: list[_Outcome]) -> None:
        def settle() -> None:
            for op, outcome in zip(batch, outcomes, strict=True):
                if op.done.done():  # its waiter was cancelled; the write stands
                    continue
                if isinstance(outcome, Exception):
                    op.done.set_exception(outcome)
                else:
                    op.done.set_result(outcome)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("%d writes finished after their event loop", len(batch))

    def _trouble(self, error: sqlite3.Error) -> Unavailable:
        reason = _TROUBLES.get(_code(error), str(error))
        log.error("cannot use the store", extra={"path": str(self.path), "reason": reason})
        return Unavailable(f"the server's store cannot be used: {reason}", retry_after_s=5)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = 1")
    connection.execute("PRAGMA wal_autocheckpoint = 4000")  # pages: fewer commits wait for the main file's flush
    return connection


def _code(error: sqlite3.Error) -> int:
    """The primary result code, or 0 where the error did not come from SQLite itself."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _is_trouble(error: sqlite3.Error) -> bool:
    return _code(error) in _TROUBLES
