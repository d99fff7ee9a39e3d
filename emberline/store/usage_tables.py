"""The migration that adds prices, what requests cost, and their sums by day.

A trigger keeps the sums, so they are right whoever inserts a row, and a row that is there already counts once. On
PostgreSQL connections add to sums of their own (`shard`): they would wait for each other's commits otherwise. Some may
share a shard, and wait at its lock: two that add to the same sums in different order would block each other.
"""

from emberline.store.database import Sql

_DAILY_KEY = "day, account, key_id, model, class, shard"
_DAILY_SUMS = (
    "n_requests, n_failed, n_cancelled, n_unpriced, input_tokens, cached_tokens, output_tokens, reasoning_tokens, "
    "images, audio_ms, cost_pico, discount_pico, session_cached_tokens, session_discount_pico"
)
_DAILY_VALUES = """
    {row}created_us / 86400000000, {row}account, {row}key_id, {row}model, {row}class, {shard}, 1,
    CASE {row}status WHEN 'failed' THEN 1 ELSE 0 END, CASE {row}status WHEN 'cancelled' THEN 1 ELSE 0 END,
    CASE WHEN {row}cost_pico IS NULL THEN 1 ELSE 0 END, {row}input_tokens, {row}cached_tokens, {row}output_tokens,
    {row}reasoning_tokens, {row}images, {row}audio_ms, COALESCE({row}cost_pico, 0), {row}discount_pico,
    CASE {row}session WHEN '' THEN 0 ELSE {row}cached_tokens END,
    CASE {row}session WHEN '' THEN 0 ELSE {row}discount_pico END
"""


def _add_to_day(further: tuple[str, ...] = ()) -> str:
    """The statement that adds a row to the sums of its day; `further` are sums that later migrations have added."""
    sums = ", ".join((_DAILY_SUMS, *further))
    values = ", ".join((_DAILY_VALUES, *(f"{{row}}{name}" for name in further)))
    add = ", ".join(f"{name} = usage_daily.{name} + excluded.{name}" for name in sums.split(", "))
    return f"""
    INSERT INTO usage_daily ({_DAILY_KEY}, {sums}) VALUES ({values})
    ON CONFLICT ({_DAILY_KEY}) DO UPDATE SET {add}
"""


_ADD_TO_DAY = _add_to_day()
_SHARD_LOCKS = 1_852_403_301  # one number for all of Emberline, so that other applications' locks are others
_COLUMN = "ALTER TABLE usage ADD COLUMN"
METERING = (
    """
    CREATE TABLE prices (
        model TEXT NOT NULL,
        number BIGINT NOT NULL,
        valid_from_us BIGINT NOT NULL,
        source TEXT NOT NULL,
        created_us BIGINT NOT NULL,
        created_by TEXT NOT NULL,
        price TEXT,
        PRIMARY KEY (model, number)
    )
    """,
    f"{_COLUMN} cached_tokens BIGINT NOT NULL DEFAULT 0",
    f"{_COLUMN} images BIGINT NOT NULL DEFAULT 0",
    f"{_COLUMN} audio_ms BIGINT NOT NULL DEFAULT 0",
    f"{_COLUMN} api TEXT NOT NULL DEFAULT ''",
    f"{_COLUMN} session TEXT NOT NULL DEFAULT ''",
    f"{_COLUMN} cost_pico BIGINT",
    f"{_COLUMN} discount_pico BIGINT NOT NULL DEFAULT 0",
    Sql(
        "UPDATE usage SET cached_tokens = (SELECT COALESCE(SUM(value), 0) FROM json_each(cached_by_tier))",
        postgres="UPDATE usage SET cached_tokens = "
        "(SELECT COALESCE(SUM(value::bigint), 0) FROM json_each_text(cached_by_tier::json))",
    ),
    "CREATE INDEX usage_by_time ON usage (created_us)",
    f"""
    CREATE TABLE usage_daily (
        day BIGINT NOT NULL,
        account TEXT NOT NULL,
        key_id TEXT NOT NULL,
        model TEXT NOT NULL,
        class TEXT NOT NULL,
        shard BIGINT NOT NULL,
        {", ".join(f"{name} BIGINT NOT NULL" for name in _DAILY_SUMS.split(", "))},
        PRIMARY KEY ({_DAILY_KEY})
    )
    """,
    "CREATE INDEX usage_daily_by_account ON usage_daily (account, day)",
    f"""
    WITH recorded ({_DAILY_KEY}, {_DAILY_SUMS}) AS (SELECT {_DAILY_VALUES.format(row="", shard="0")} FROM usage)
    INSERT INTO usage_daily ({_DAILY_KEY}, {_DAILY_SUMS})
    SELECT {_DAILY_KEY}, {", ".join(f"SUM({name})" for name in _DAILY_SUMS.split(", "))} FROM recorded
    GROUP BY {_DAILY_KEY}
    """,
    Sql(
        f"CREATE TRIGGER usage_by_day AFTER INSERT ON usage BEGIN {_ADD_TO_DAY.format(row='NEW.', shard='0')}; END",
        postgres=f"""
        CREATE FUNCTION add_usage_to_day() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_advisory_xact_lock({_SHARD_LOCKS}, pg_backend_pid() % 16);
            {_ADD_TO_DAY.format(row="NEW.", shard="pg_backend_pid() % 16")};
            RETURN NULL;
        END $$
        """,
    ),
    Sql(
        "SELECT 1",
        postgres="CREATE TRIGGER usage_by_day AFTER INSERT ON usage FOR EACH ROW EXECUTE FUNCTION add_usage_to_day()",
    ),
)


def _new_sums(added: tuple[str, ...], before: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The statements that add columns to the rows and to the sums of their days, and let the trigger add them up."""
    add = _add_to_day((*before, *added))
    return (
        *(
            f"ALTER TABLE {table} ADD COLUMN {name} BIGINT NOT NULL DEFAULT 0"
            for table in ("usage", "usage_daily")
            for name in added
        ),
        Sql("DROP TRIGGER usage_by_day", postgres="SELECT 1"),
        Sql(
            f"CREATE TRIGGER usage_by_day AFTER INSERT ON usage BEGIN {add.format(row='NEW.', shard='0')}; END",
            postgres=f"""
            CREATE OR REPLACE FUNCTION add_usage_to_day() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                PERFORM pg_advisory_xact_lock({_SHARD_LOCKS}, pg_backend_pid() % 16);
                {add.format(row="NEW.", shard="pg_backend_pid() % 16")};
                RETURN NULL;
            END $$
            """,
        ),
    )


# Predictors: how long they computed, and how many predictions they made.
_PREDICTIONS = ("compute_ms", "predictions")
PREDICTION_COLUMNS = _new_sums(_PREDICTIONS)
# The part of a worker's time that a request had, times the worker's devices.
DEVICE_COLUMNS = _new_sums(("device_ms",), _PREDICTIONS)
