"""The queue's tables: narrow lines beside their bodies, and counters, so that no status counts what waits."""

from emberline.store.database import Sql

# What a batch's usage says beside the sums, and how long lines ran, for the estimate of a wait.
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
    Sql("SELECT 1", postgres="ALTER TABLE bodies ALTER COLUMN data SET STORAGE EXTERNAL"),  # no time on compression
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
