"""Usage rows of a window of time, read beside a running server: `emberline tune` replays them.

SQLite's file is opened for reading alone, so neither its schema nor a writer's transaction is touched.
"""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput, Unavailable
from emberline.store import open_store
from emberline.store.snapshot import sqlite_path

MAX_ROWS = 50_000  # the newest of the window
BUSY_TIMEOUT_S = 5.0
_SELECT = """
    SELECT account, model, session, created_us, first_token_us, finished_us, input_tokens, cached_tokens, output_tokens
    FROM usage WHERE created_us >= ? AND status = 'finished' ORDER BY created_us DESC LIMIT ?
"""


class UsageRecord(msgspec.Struct, frozen=True):
    """Lengths and times of one finished request."""

    account: str
    model: str
    session: str  # digest; empty: the client named none
    created_us: int
    first_token_us: int | None
    finished_us: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


def recorded_usage(where: str | Path, since_us: int) -> list[UsageRecord]:
    """Read the newest rows since a Unix time. Raises BadInput if there is no store there, Unavailable if it is away."""
    path = sqlite_path(where)
    args = (since_us, MAX_ROWS)
    rows = asyncio.run(_read_store(str(where), args)) if path is None else _read_file(path, args)
    return [UsageRecord(*row) for row in rows]


def _read_file(path: Path, args: tuple[int, int]) -> list[Any]:
    if not path.is_file():
        raise BadInput(f"there is no store at {path}: name the server's data folder with --data-dir")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)) as store:
            return store.execute(_SELECT, args).fetchall()
    except sqlite3.Error as error:
        raise Unavailable(f"the usage in {path} cannot be read: {error}") from None


async def _read_store(url: str, args: tuple[int, int]) -> list[Any]:
    store = await open_store(url)
    try:
        return list(await store.read(_SELECT, args))
    finally:
        await store.close()
