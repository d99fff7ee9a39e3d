"""The tables of events and their deliveries, as one step of the schema."""

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
