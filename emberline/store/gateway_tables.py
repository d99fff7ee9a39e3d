"""The tables of gateways: settings, logs, cached replies, and what the limits of dynamic routes have counted."""

GATEWAY_TABLES = (
    """
    CREATE TABLE gateways (
        account TEXT NOT NULL,
        name TEXT NOT NULL,
        settings TEXT NOT NULL,
        created_us BIGINT NOT NULL,
        changed_us BIGINT NOT NULL,
        PRIMARY KEY (account, name)
    )
    """,
    """
    CREATE TABLE gateway_logs (
        id TEXT PRIMARY KEY,
        account TEXT NOT NULL,
        gateway TEXT NOT NULL,
        created_us BIGINT NOT NULL,
        key_id TEXT NOT NULL,
        api TEXT NOT NULL,
        requested TEXT NOT NULL,
        model TEXT NOT NULL,
        provider TEXT NOT NULL,
        step BIGINT NOT NULL,
        status TEXT NOT NULL,
        error TEXT NOT NULL,
        message TEXT NOT NULL,
        cache_status TEXT NOT NULL,
        input_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        output_tokens BIGINT NOT NULL,
        cost_pico BIGINT,
        duration_us BIGINT NOT NULL,
        ttft_us BIGINT,
        event_id TEXT NOT NULL,
        metadata TEXT NOT NULL,
        attempts TEXT NOT NULL,
        flags TEXT NOT NULL,
        request TEXT NOT NULL,
        response TEXT NOT NULL
    )
    """,
    "CREATE INDEX gateway_logs_by_time ON gateway_logs (account, gateway, created_us, id)",
    """
    CREATE TABLE gateway_cache (
        account TEXT NOT NULL,
        digest TEXT NOT NULL,
        expires_us BIGINT NOT NULL,
        created_us BIGINT NOT NULL,
        n_bytes BIGINT NOT NULL,
        reply BLOB NOT NULL,
        PRIMARY KEY (account, digest)
    )
    """,
    "CREATE INDEX gateway_cache_by_expiry ON gateway_cache (expires_us)",
    "CREATE INDEX gateway_cache_by_age ON gateway_cache (account, created_us, n_bytes)",
    """
    CREATE TABLE gateway_counters (
        account TEXT NOT NULL,
        gateway TEXT NOT NULL,
        name TEXT NOT NULL,
        begin_us BIGINT NOT NULL,
        until_us BIGINT NOT NULL,
        amount BIGINT NOT NULL,
        PRIMARY KEY (account, gateway, name, begin_us)
    )
    """,
    "CREATE INDEX gateway_counters_by_end ON gateway_counters (until_us)",
)
