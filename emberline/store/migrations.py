"""The schema, as numbered steps. A step that has shipped is never edited; a change is a new step at the end."""

import sqlite3

from emberline.protocol.errors import Unavailable

# Step n (1-based) takes a database from user_version n - 1 to n. Statements are kept portable to PostgreSQL.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE usage (
            id TEXT PRIMARY KEY,
            account TEXT NOT NULL,
            key_id TEXT NOT NULL,
            model TEXT NOT NULL,
            model_version TEXT NOT NULL,
            class TEXT NOT NULL,
            input_tokens INTEGER NOT NULL,
            cached_by_tier TEXT NOT NULL,
            output_tokens INTEGER NOT NULL,
            reasoning_tokens INTEGER NOT NULL,
            status TEXT NOT NULL,
            created_us BIGINT NOT NULL,
            first_token_us BIGINT,
            finished_us BIGINT NOT NULL,
            price_version TEXT NOT NULL
        )
        """,
        "CREATE INDEX usage_by_account ON usage (account, created_us)",
    ),
    (
        """
        CREATE TABLE responses (
            id TEXT PRIMARY KEY,
            account TEXT NOT NULL,
            parent TEXT,
            depth INTEGER NOT NULL,
            created_us BIGINT NOT NULL,
            expires_us BIGINT NOT NULL,
            n_bytes BIGINT NOT NULL,
            input TEXT NOT NULL,
            body TEXT NOT NULL
        )
        """,
        "CREATE INDEX responses_by_parent ON responses (parent)",
        "CREATE INDEX responses_by_expiry ON responses (expires_us)",
        "CREATE INDEX responses_by_account ON responses (account, created_us)",
    ),
)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a database up to date, in one transaction; refuse one that a newer Emberline wrote."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise Unavailable(
                f"the database has schema version {version}, this Emberline knows up to {len(MIGRATIONS)}: "
                "upgrade Emberline, or choose another data folder"
            )
        for step in MIGRATIONS[version:]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
