"""The schema as numbered migrations. One that has shipped is never edited; a change is a new one at the end.

The table `lines` holds the queue's jobs, `bodies` their requests and results, `lanes` the counters of fair queueing by
model and account, `paces` the jobs completed per minute, and `holdings` the bytes stored per account.
"""

import re
import sqlite3
from collections.abc import Iterator

from emberline.protocol.errors import Unavailable
from emberline.store.cluster_tables import (
    BLOB_TABLES,
    CLUSTER_TABLES,
    MEMBER_COLUMNS,
    PLANNER_TABLES,
    RATE_TABLES,
)
from emberline.store.database import Sql
from emberline.store.gateway_tables import GATEWAY_TABLES
from emberline.store.usage_tables import DEVICE_COLUMNS, METERING, PREDICTION_COLUMNS

EVENT_TABLES = (
    "CREATE TABLE event_heads (account TEXT PRIMARY KEY, last BIGINT NOT NULL)",
    """
    CREATE TABLE events (
        account TEXT NOT NULL,
        number BIGINT NOT NULL,
        token TEXT NOT NULL,
        type TEXT NOT NULL,
        subject TEXT NOT NULL,
        model TEXT NOT NULL,
        data TEXT NOT NULL,
        created_us BIGINT NOT NULL,
        PRIMARY KEY (account, number),
        UNIQUE (account, type, subject)
    )
    """,
    "CREATE INDEX events_by_age ON events (created_us)",
    """
    CREATE TABLE webhook_endpoints (
        id TEXT PRIMARY KEY,
        account TEXT NOT NULL,
        form TEXT NOT NULL,
        name TEXT NOT NULL,
        url TEXT NOT NULL,
        model TEXT NOT NULL,
        types TEXT NOT NULL,
        enabled BIGINT NOT NULL,
        disabled_reason TEXT NOT NULL,
        secret_version BIGINT NOT NULL,
        previous_until_us BIGINT NOT NULL,
        failing_since_us BIGINT,
        created_us BIGINT NOT NULL,
        modified_us BIGINT NOT NULL
    )
    """,
    "CREATE INDEX webhook_endpoints_by_account ON webhook_endpoints (account, created_us)",
    """
    CREATE TABLE deliveries (
        id TEXT PRIMARY KEY,
        endpoint_id TEXT NOT NULL,
        account TEXT NOT NULL,
        event_number BIGINT NOT NULL,
        state TEXT NOT NULL,
        attempts BIGINT NOT NULL,
        base BIGINT NOT NULL,
        ready_us BIGINT NOT NULL,
        created_us BIGINT NOT NULL,
        finished_us BIGINT,
        UNIQUE (endpoint_id, event_number)
    )
    """,
    "CREATE INDEX deliveries_ready ON deliveries (ready_us) WHERE state = 'pending'",
    "CREATE INDEX deliveries_of_endpoint ON deliveries (endpoint_id, ready_us) WHERE state = 'pending'",
    "CREATE INDEX deliveries_by_age ON deliveries (created_us)",
    """
    CREATE TABLE delivery_attempts (
        delivery_id TEXT NOT NULL,
        number BIGINT NOT NULL,
        started_us BIGINT NOT NULL,
        took_us BIGINT NOT NULL,
        status BIGINT,
        problem TEXT NOT NULL,
        PRIMARY KEY (delivery_id, number)
    )
    """,
)


# Usage details of a batch, and how long jobs ran, for the estimated time to completion.
QUEUE_DETAILS = (
    "ALTER TABLE batches ADD COLUMN cached_tokens BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE batches ADD COLUMN reasoning_tokens BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE paces ADD COLUMN busy_us BIGINT NOT NULL DEFAULT 0",
)
QUEUE_TABLES = (
    """
    CREATE TABLE batches (
        id TEXT PRIMARY KEY,
        account TEXT NOT NULL,
        key_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        model TEXT NOT NULL,
        status TEXT NOT NULL,
        ended BIGINT NOT NULL,
        total BIGINT NOT NULL,
        n_released BIGINT NOT NULL,
        completed BIGINT NOT NULL,
        failed BIGINT NOT NULL,
        cancelled BIGINT NOT NULL,
        expired BIGINT NOT NULL,
        n_bytes BIGINT NOT NULL,
        input_tokens BIGINT NOT NULL,
        output_tokens BIGINT NOT NULL,
        loader TEXT NOT NULL,
        loader_until_us BIGINT NOT NULL,
        metadata TEXT NOT NULL,
        attributes TEXT NOT NULL,
        errors TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        input_blob TEXT,
        created_us BIGINT NOT NULL,
        deadline_us BIGINT NOT NULL,
        in_progress_us BIGINT,
        finalizing_us BIGINT,
        completed_us BIGINT,
        failed_us BIGINT,
        expired_us BIGINT,
        cancelling_us BIGINT,
        cancelled_us BIGINT,
        expires_us BIGINT
    )
    """,
    "CREATE INDEX batches_by_account ON batches (account, kind, created_us, id)",
    "CREATE INDEX batches_open ON batches (deadline_us) WHERE ended = 0",
    "CREATE INDEX batches_open_by_account ON batches (account, deadline_us) WHERE ended = 0",
    "CREATE INDEX batches_by_expiry ON batches (expires_us) WHERE expires_us IS NOT NULL",
    "CREATE INDEX batches_by_blob ON batches (input_blob) WHERE input_blob IS NOT NULL",
    """
    CREATE TABLE lines (
        batch_id TEXT NOT NULL,
        number BIGINT NOT NULL,
        account TEXT NOT NULL,
        custom_id TEXT NOT NULL,
        model TEXT NOT NULL,
        state TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        owner TEXT NOT NULL,
        attempts BIGINT NOT NULL,
        kills BIGINT NOT NULL,
        stopping BIGINT NOT NULL,
        ready_us BIGINT NOT NULL,
        deadline_us BIGINT NOT NULL,
        prefix BIGINT NOT NULL,
        cost BIGINT NOT NULL,
        created_us BIGINT NOT NULL,
        started_us BIGINT,
        ended_us BIGINT,
        PRIMARY KEY (batch_id, number)
    )
    """,
    "CREATE INDEX lines_ready ON lines (model, account, deadline_us, prefix, batch_id, number) WHERE state = 'queued'",
    "CREATE INDEX lines_suspect ON lines (model) WHERE state = 'queued' AND kills > 0",
    "CREATE INDEX lines_leased ON lines (owner, batch_id) WHERE state = 'leased'",
    "CREATE INDEX lines_dead ON lines (batch_id, number) WHERE state = 'dead'",
    """
    CREATE TABLE bodies (
        batch_id TEXT NOT NULL,
        number BIGINT NOT NULL,
        kind BIGINT NOT NULL,
        data BLOB,
        blob TEXT,
        PRIMARY KEY (batch_id, number, kind)
    )
    """,
    "CREATE INDEX bodies_by_blob ON bodies (blob) WHERE blob IS NOT NULL",
    Sql("SELECT 1", postgres="ALTER TABLE bodies ALTER COLUMN data SET STORAGE EXTERNAL"),  # not compressed
    """
    CREATE TABLE lanes (
        model TEXT NOT NULL,
        account TEXT NOT NULL,
        n_queued BIGINT NOT NULL,
        n_leased BIGINT NOT NULL,
        queued_cost BIGINT NOT NULL,
        served BIGINT NOT NULL,
        PRIMARY KEY (model, account)
    )
    """,
    "CREATE TABLE workers (owner TEXT PRIMARY KEY, until_us BIGINT NOT NULL, started_us BIGINT NOT NULL)",
    "CREATE TABLE paces (model TEXT NOT NULL, minute BIGINT NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (model, minute))",
    "CREATE TABLE holdings (account TEXT PRIMARY KEY, n_bytes BIGINT NOT NULL)",
    """
    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        account TEXT NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        n_bytes BIGINT NOT NULL,
        blob TEXT NOT NULL,
        created_us BIGINT NOT NULL,
        expires_us BIGINT
    )
    """,
    "CREATE INDEX files_by_account ON files (account, created_us, id)",
    "CREATE INDEX files_by_blob ON files (blob)",
    "CREATE INDEX files_by_expiry ON files (expires_us) WHERE expires_us IS NOT NULL",
    """
    CREATE TABLE idempotency (
        account TEXT NOT NULL,
        key TEXT NOT NULL,
        digest BLOB NOT NULL,
        fresh_id TEXT NOT NULL,
        answer BLOB,
        until_us BIGINT NOT NULL,
        expires_us BIGINT NOT NULL,
        PRIMARY KEY (account, key)
    )
    """,
    "CREATE INDEX idempotency_by_expiry ON idempotency (expires_us)",
)

_LIMIT_COLUMNS = """
        requests_per_minute BIGINT,
        tokens_per_minute BIGINT,
        concurrency BIGINT,
        budget_pico BIGINT,
        budget_period TEXT NOT NULL,
"""
ACCOUNT_TABLES = (
    f"""
    CREATE TABLE accounts (
        {_LIMIT_COLUMNS}
        id TEXT PRIMARY KEY,
        disabled_us BIGINT,
        created_us BIGINT NOT NULL,
        version BIGINT NOT NULL
    )
    """,
    "CREATE INDEX accounts_by_version ON accounts (version, id)",
    f"""
    CREATE TABLE api_keys (
        {_LIMIT_COLUMNS}
        id TEXT PRIMARY KEY,
        account TEXT NOT NULL,
        name TEXT NOT NULL,
        role TEXT NOT NULL,
        models TEXT NOT NULL,
        apis TEXT NOT NULL,
        digest BLOB NOT NULL,
        hint TEXT NOT NULL,
        previous_digest BLOB,
        previous_until_us BIGINT,
        created_us BIGINT NOT NULL,
        expires_us BIGINT,
        revoked_us BIGINT,
        version BIGINT NOT NULL
    )
    """,
    "CREATE INDEX api_keys_by_version ON api_keys (version, id)",
    "CREATE INDEX api_keys_by_account ON api_keys (account, id)",
    """
    CREATE TABLE audit_log (
        number BIGINT PRIMARY KEY,
        at_us BIGINT NOT NULL,
        actor TEXT NOT NULL,
        source TEXT NOT NULL,
        act TEXT NOT NULL,
        target TEXT NOT NULL,
        details TEXT NOT NULL,
        digest BLOB NOT NULL
    )
    """,
    "CREATE TABLE audit_head (number BIGINT NOT NULL, digest BLOB NOT NULL)",  # one row: the log's last
    Sql(
        "INSERT INTO audit_head (number, digest) VALUES (0, x'')",
        postgres="INSERT INTO audit_head (number, digest) VALUES (0, '')",
    ),
)

BUDGET_TABLES = (  # see accounts/budget_leases.py
    "ALTER TABLE usage ADD COLUMN lease TEXT NOT NULL DEFAULT ''",
    """
    CREATE TABLE budgets (
        account TEXT NOT NULL,
        key_id TEXT NOT NULL,
        period TEXT NOT NULL,
        committed_pico BIGINT NOT NULL,
        cap_pico BIGINT NOT NULL,
        asked BIGINT NOT NULL,
        PRIMARY KEY (account, key_id, period)
    )
    """,
    """
    CREATE TABLE budget_leases (
        account TEXT NOT NULL,
        key_id TEXT NOT NULL,
        period TEXT NOT NULL,
        lease TEXT NOT NULL,
        granted_pico BIGINT NOT NULL,
        spent_pico BIGINT NOT NULL,
        opened_us BIGINT NOT NULL,
        until_us BIGINT NOT NULL,
        answered BIGINT NOT NULL,
        PRIMARY KEY (account, key_id, period, lease)
    )
    """,
    "CREATE INDEX budget_leases_by_lease ON budget_leases (lease)",
)


# A batch and its jobs belong to the trace of the request that submitted it.
TRACE_CONTEXT = ("ALTER TABLE batches ADD COLUMN traceparent TEXT NOT NULL DEFAULT ''",)

# No table changes. From here on sealed provider keys have a form that earlier releases cannot open; the number makes
# those releases refuse the store. `accounts.provider_keys` binds the keys: it has their secret.
BOUND_PROVIDER_KEYS = ("SELECT 1",)

# `folded_title` and `folded_text` (the messages) are for searches; `document` is what the page saved.
SAVED_CHATS = (
    """
    CREATE TABLE saved_chats (
        account TEXT NOT NULL,
        id TEXT NOT NULL,
        title TEXT NOT NULL,
        folded_title TEXT NOT NULL,
        updated_us BIGINT NOT NULL,
        n_bytes BIGINT NOT NULL,
        folded_text TEXT NOT NULL,
        document BLOB NOT NULL,
        PRIMARY KEY (account, id)
    )
    """,
    "CREATE INDEX saved_chats_by_time ON saved_chats (account, updated_us, id)",
)

# Migration n (1-based) takes a database from version n - 1 to n. One text serves both databases: on PostgreSQL BLOB
# becomes BYTEA; `Sql` has two texts where that is not enough.
Migrations = tuple[tuple[str, ...], ...]
MIGRATIONS: Migrations = (
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
    QUEUE_TABLES,
    EVENT_TABLES,
    QUEUE_DETAILS,
    ACCOUNT_TABLES,
    TRACE_CONTEXT,
    METERING,
    (
        """
        CREATE TABLE model_aliases (
            name TEXT PRIMARY KEY,
            alias TEXT NOT NULL,
            changed_us BIGINT NOT NULL
        )
        """,
    ),
    BUDGET_TABLES,
    (
        """
        CREATE TABLE provider_keys (
            account TEXT NOT NULL,
            provider TEXT NOT NULL,
            kind TEXT NOT NULL,
            url TEXT NOT NULL,
            sealed BLOB,
            created_us BIGINT NOT NULL,
            version BIGINT NOT NULL,
            PRIMARY KEY (account, provider)
        )
        """,
        "CREATE INDEX provider_keys_by_version ON provider_keys (version, provider)",
    ),
    GATEWAY_TABLES,
    CLUSTER_TABLES,
    BLOB_TABLES,
    RATE_TABLES,
    PLANNER_TABLES,
    MEMBER_COLUMNS,
    BOUND_PROVIDER_KEYS,
    SAVED_CHATS,
    PREDICTION_COLUMNS,
    DEVICE_COLUMNS,
)


def migrate(connection: sqlite3.Connection, migrations: Migrations = MIGRATIONS) -> None:
    """Bring a SQLite database up to date in one transaction; refuse one that a newer Emberline wrote."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        for statement in steps_after(version, migrations):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def steps_after(version: int, migrations: Migrations = MIGRATIONS) -> Iterator[str]:
    """The statements that a database of this version lacks."""
    if version > len(migrations):
        raise Unavailable(
            f"the database has schema version {version}, this Emberline knows up to {len(migrations)}: "
            "upgrade Emberline, restore a backup that this version has made, or choose another data folder"
        )
    return (statement for migration in migrations[version:] for statement in migration)


def for_postgres(statement: str) -> str:
    text = statement.postgres if isinstance(statement, Sql) else statement
    return re.sub(r"\bBLOB\b", "BYTEA", text)
