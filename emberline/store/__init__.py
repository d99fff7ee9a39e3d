"""The durable store behind one narrow interface: SQLite embedded, PostgreSQL for more than one machine."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from emberline.protocol.errors import BadInput
from emberline.store.database import BulkQuery, Database, ProcessLock, Query, Rows, Sql, Statement, Transaction, Value
from emberline.store.migrations import MIGRATIONS, Migrations
from emberline.store.sqlite import SqliteStore

__all__ = [
    "BulkQuery",
    "Database",
    "ProcessLock",
    "Query",
    "Rows",
    "Sql",
    "SqliteStore",
    "Statement",
    "Transaction",
    "Value",
]


async def open_store(where: str | Path, migrations: Migrations = MIGRATIONS) -> Database:
    """Open the database at a path, a `sqlite:///…` or a `postgresql://…` URL and bring its schema up to date."""
    if isinstance(where, Path) or "://" not in where:
        return await SqliteStore.open(Path(where), migrations)
    parts = urlsplit(where)
    if parts.scheme in ("postgresql", "postgres"):
        from emberline.store.postgres import PostgresStore

        return await PostgresStore.open(where, migrations)
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.startswith("/"):
        # The URL itself is not repeated: it may contain a password.
        raise BadInput("a store's URL begins with postgresql:// or sqlite:/// and an absolute path", param="store.url")
    return await SqliteStore.open(Path(unquote(parts.path)), migrations)
