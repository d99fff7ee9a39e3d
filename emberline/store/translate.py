"""One text of SQL for two databases."""

import re
from functools import lru_cache

from emberline.store.database import Sql

_PIECE = re.compile(r"'(?:[^']|'')*'|\?(\d*)")


def numbered(sql: str) -> str:
    """The text for PostgreSQL: its own where there is one, and `$1`, `$2` for the `?` that are not in quotes.

    `?3` is the third parameter, as in SQLite; a text has either all of its placeholders numbered or none.
    """
    return _numbered(sql.postgres if isinstance(sql, Sql) else sql)


@lru_cache(512)
def _numbered(sql: str) -> str:
    n = 0

    def piece(match: re.Match[str]) -> str:
        nonlocal n
        if not match[0].startswith("?"):
            return match[0]
        n += 1
        return f"${match[1] or n}"

    return _PIECE.sub(piece, sql)
