"""Tables of a cluster: members, used challenges, one row about the cluster itself, blobs, shared rate limits, and those
of the planner."""

from emberline.store.database import Sql

BLOB_TABLES = (
    # `n_parts` of the upload in `blob_parts`; `name` is a hash of the content.
    """
    CREATE TABLE blobs (
        name TEXT PRIMARY KEY,
        upload TEXT NOT NULL,
        n_parts BIGINT NOT NULL,
        stored_us BIGINT NOT NULL
    )
    """,
    "CREATE INDEX blobs_by_age ON blobs (stored_us)",
    "CREATE INDEX blobs_by_upload ON blobs (upload)",
    """
    CREATE TABLE blob_parts (
        upload TEXT NOT NULL,
        number BIGINT NOT NULL,
        data BLOB NOT NULL,
        stored_us BIGINT NOT NULL,
        PRIMARY KEY (upload, number)
    )
    """,
    "CREATE INDEX blob_parts_by_age ON blob_parts (stored_us)",
    Sql("SELECT 1", postgres="ALTER TABLE blob_parts ALTER COLUMN data SET STORAGE EXTERNAL"),  # not compressed
)
RATE_TABLES = (  # see accounts/shared_rate_limits.py
    """
    CREATE TABLE rate_buckets (
        scope TEXT PRIMARY KEY,
        n_requests DOUBLE PRECISION NOT NULL,
        n_tokens DOUBLE PRECISION NOT NULL,
        at_us BIGINT NOT NULL
    )
    """,
    """
    CREATE TABLE rate_slots (
        scope TEXT NOT NULL,
        core TEXT NOT NULL,
        n BIGINT NOT NULL,
        until_us BIGINT NOT NULL,
        PRIMARY KEY (scope, core)
    )
    """,
)
MEMBER_COLUMNS = (  # added since; cores of the release before do not write them
    "ALTER TABLE members ADD COLUMN first_role TEXT NOT NULL DEFAULT 'both'",
    "ALTER TABLE members ADD COLUMN release TEXT NOT NULL DEFAULT ''",
    "UPDATE members SET first_role = role",
)
CLUSTER_TABLES = (
    # One row. `id` is derived from the root secret of the cores; `epoch` is that of the last worker that joined.
    "CREATE TABLE cluster (id TEXT NOT NULL, epoch BIGINT NOT NULL)",
    "INSERT INTO cluster (id, epoch) VALUES ('', 0)",
    """
    CREATE TABLE members (
        name TEXT PRIMARY KEY,
        address TEXT NOT NULL,
        role TEXT NOT NULL,
        model TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        region TEXT NOT NULL,
        account TEXT NOT NULL,
        node TEXT NOT NULL,
        device TEXT NOT NULL,
        version BIGINT NOT NULL,
        is_tls BIGINT NOT NULL,
        epoch BIGINT NOT NULL,
        instance TEXT NOT NULL,
        state TEXT NOT NULL,
        n_joins BIGINT NOT NULL,
        ready_us BIGINT NOT NULL,
        joined_us BIGINT NOT NULL,
        seen_us BIGINT NOT NULL
    )
    """,
    "CREATE TABLE join_challenges (challenge TEXT PRIMARY KEY, until_us BIGINT NOT NULL)",
)
PLANNER_TABLES = (  # see protocol/scaling.py
    """
    CREATE TABLE model_loads (
        core TEXT NOT NULL,
        model TEXT NOT NULL,
        at_us BIGINT NOT NULL,
        load TEXT NOT NULL,
        PRIMARY KEY (core, model)
    )
    """,
    "CREATE INDEX model_loads_by_age ON model_loads (at_us)",
    "CREATE TABLE scaling_bounds (model TEXT PRIMARY KEY, bounds TEXT NOT NULL)",
    """
    CREATE TABLE replicas (
        name TEXT PRIMARY KEY,
        model TEXT NOT NULL,
        role TEXT NOT NULL,
        gpu TEXT NOT NULL,
        state TEXT NOT NULL,
        since_us BIGINT NOT NULL,
        launcher TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE scaling_decisions (
        model TEXT NOT NULL,
        at_us BIGINT NOT NULL,
        number BIGINT NOT NULL,
        core TEXT NOT NULL,
        action TEXT NOT NULL,
        role TEXT NOT NULL,
        replica TEXT NOT NULL,
        gpu TEXT NOT NULL,
        cause TEXT NOT NULL,
        why TEXT NOT NULL,
        outcome TEXT NOT NULL,
        took_s DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (model, at_us, number)
    )
    """,
    """
    CREATE TABLE scaling_plans (
        model TEXT PRIMARY KEY,
        at_us BIGINT NOT NULL,
        core TEXT NOT NULL,
        mode TEXT NOT NULL,
        plan TEXT NOT NULL,
        observation TEXT NOT NULL
    )
    """,
)
