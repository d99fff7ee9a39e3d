"""Which database: by its URL or path."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from emberline.protocol.errors import BadInput
from emberline.store.database import Database
from emberline.store.sqlite import SqliteStore

POSTGRES = ("postgresql", "postgres")


async def open_store(where: str | Path) -> Database:
    """Open the database at a path, a `sqlite:///…` or a `postgresql://…` URL, its schema brought up to date."""
    if isinstance(where, Path) or "://" not in where:
        return await SqliteStore.open(Path(where))
    scheme = check_url(where)
    if scheme in POSTGRES:
        from emberline.store.postgres import PostgresStore

        return await PostgresStore.open(where)
    return await SqliteStore.open(Path(unquote(urlsplit(where).path)))


def check_url(url: str) -> str:
    """The URL's scheme. The message names no more of a URL than that: it may hold a password."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and parts.path.startswith("/") and not parts.netloc:
        return parts.scheme
    if parts.scheme not in POSTGRES:
        raise BadInput("a store's URL begins with postgresql:// or sqlite:/// and an absolute path", param="store.url")
    return parts.scheme
