"""Copies of a whole database while it is in use, and databases made from them.

A copy is consistent: SQLite's by its backup interface, in one step under one read transaction; PostgreSQL's by reading
every table in one snapshot. Neither makes writers wait.
"""

import asyncio
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from emberline.protocol.errors import BadInput, Conflict, Unavailable
from emberline.store import migrations

SQLITE_FILE = "store.db"
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_TABLES = """
    SELECT table_name FROM information_schema.tables
    WHERE table_schema = current_schema() AND table_type = 'BASE TABLE' ORDER BY table_name
"""
_COLUMNS = """
    SELECT column_name FROM information_schema.columns
    WHERE table_schema = current_schema() AND table_name = $1 ORDER BY ordinal_position
"""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a snapshot folder: `store.db` of SQLite, or one file in PostgreSQL's binary COPY format for each
    table."""

    kind: Literal["sqlite", "postgres"]
    schema_version: int
    columns: dict[str, list[str]] = {}  # of each table


def sqlite_path(where: str | Path) -> Path | None:
    """The file of a SQLite database; None: it is PostgreSQL's."""
    if isinstance(where, Path) or "://" not in where:
        return Path(where)
    parts = urlsplit(where)
    return Path(unquote(parts.path)) if parts.scheme == "sqlite" else None


async def take_snapshot(where: str | Path, folder: Path) -> Snapshot:
    """Copy the database at a path or URL into the folder."""
    path = sqlite_path(where)
    if path is not None:
        return await asyncio.to_thread(_copy_sqlite, path, folder / SQLITE_FILE)
    connection = await _connect(str(where))
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            version = await _postgres_version(connection)
            if version is None:
                raise BadInput("the PostgreSQL database has no store of Emberline")
            columns: dict[str, list[str]] = {}
            for (table,) in await connection.fetch(_TABLES):
                if table == "schema_version" or _NAME.fullmatch(table) is None:
                    continue
                columns[table] = [name for (name,) in await connection.fetch(_COLUMNS, table)]
                output = folder / f"{table}.copy"
                await connection.copy_from_table(table, columns=columns[table], output=str(output), format="binary")
            return Snapshot(kind="postgres", schema_version=version, columns=columns)
    finally:
        await connection.close()


async def load_snapshot(snapshot: Snapshot, folder: Path, where: str | Path, *, force: bool = False) -> None:
    """Make the database at a path or URL that of the snapshot. Conflict: it is not empty, and `force` is not given."""
    check_target(snapshot, where)
    if (path := sqlite_path(where)) is None:
        await _load_postgres(snapshot, folder, str(where), force)
    else:
        await asyncio.to_thread(_load_sqlite, folder / SQLITE_FILE, path, force)


def check_target(snapshot: Snapshot, where: str | Path) -> None:
    """BadInput if the snapshot cannot be loaded there."""
    if snapshot.schema_version > len(migrations.MIGRATIONS):
        raise BadInput("the backup was made by a newer Emberline: upgrade this one first")
    if (sqlite_path(where) is None) != (snapshot.kind == "postgres"):
        kinds = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
        raise BadInput(
            f"the backup is of {kinds[snapshot.kind]}, and [store] url names another kind of database; "
            "a backup is restored into the kind it was made from",
            param="store.url",
        )


def _copy_sqlite(path: Path, copy: Path) -> Snapshot:
    if not path.exists():
        raise BadInput(f"there is no database {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as source:
            copy.touch(0o600)
            with closing(sqlite3.connect(copy)) as target:
                source.backup(target)  # all pages in one step: it does not begin again when others write
                target.execute("PRAGMA journal_mode = DELETE")  # one file, whole by itself
                (problem,) = target.execute("PRAGMA quick_check(1)").fetchone()
                if problem != "ok":
                    raise Unavailable(f"the copy of {path} is damaged: {problem}")
                (version,) = target.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        raise Unavailable(f"cannot copy {path}: {error}") from error
    return Snapshot(kind="sqlite", schema_version=version)


def _load_sqlite(copy: Path, path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise Conflict(f"there is a database {path} already: --force replaces it")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for side in ("-wal", "-shm"):  # of the database that is replaced: they would be applied to the new one
        path.with_name(path.name + side).unlink(missing_ok=True)
    os.chmod(copy, 0o600)
    os.replace(copy, path)


async def _load_postgres(snapshot: Snapshot, folder: Path, url: str, force: bool) -> None:
    """Load the snapshot in one transaction: a restore that fails changes nothing."""
    connection = await _connect(url)
    try:
        async with connection.transaction():
            existing = [table for (table,) in await connection.fetch(_TABLES)]
            if await _postgres_version(connection) is not None and not force:
                raise Conflict("the PostgreSQL database has a store of Emberline already: --force replaces it")
            for table in existing:
                if table in snapshot.columns or table == "schema_version":
                    await connection.execute(f'DROP TABLE "{table}" CASCADE')
            await connection.execute("DROP FUNCTION IF EXISTS add_usage_to_day() CASCADE")
            for migration in migrations.MIGRATIONS[: snapshot.schema_version]:
                for statement in migration:
                    await connection.execute(migrations.for_postgres(statement))
            for table, columns in snapshot.columns.items():
                await connection.execute(f'ALTER TABLE "{table}" DISABLE TRIGGER USER')  # sums are copied, too
                await connection.execute(f'DELETE FROM "{table}"')  # what migrations put there
                source = str(folder / f"{table}.copy")
                await connection.copy_to_table(table, columns=columns, source=source, format="binary")
                await connection.execute(f'ALTER TABLE "{table}" ENABLE TRIGGER USER')
            await connection.execute("CREATE TABLE schema_version (version BIGINT NOT NULL)")
            await connection.execute("INSERT INTO schema_version VALUES ($1)", snapshot.schema_version)
    finally:
        await connection.close()


async def _postgres_version(connection: Any) -> int | None:
    if await connection.fetchval("SELECT to_regclass('schema_version')") is None:
        return None
    version: int | None = await connection.fetchval("SELECT MAX(version) FROM schema_version")
    return version


async def _connect(url: str) -> Any:
    try:
        import asyncpg  # type: ignore[import-untyped]

        return await asyncpg.connect(url, timeout=30, server_settings={"application_name": "emberline backup"})
    except ImportError:
        raise BadInput("PostgreSQL needs asyncpg: install emberline[postgres]") from None
    except Exception as error:  # the message must not show the URL, which may contain a password
        raise Unavailable(f"cannot connect to the PostgreSQL database: {type(error).__name__}") from None
