"""The queue's SQL, one text for both databases except where PostgreSQL needs row locks or arrays.

The table `lines` holds the jobs. Rows are locked in one order everywhere: lines, bodies, lanes, paces, batches,
holdings, events. States are literals in conditions, because PostgreSQL uses partial indexes only then.
"""

from emberline.jobs.batches.batch import COLUMNS as BATCH_COLUMNS
from emberline.store import Sql

# --- batches ---------------------------------------------------------------------------------------------------------

_N_ENDED = "completed + failed + cancelled + expired"
_VISIBLE = "status <> 'incoming' AND ended < 2"

INSERT_BATCH = """
    INSERT INTO batches (
        id, account, key_id, kind, endpoint, model, status, ended, total, n_released, completed, failed, cancelled,
        expired, n_bytes, input_tokens, output_tokens, loader, loader_until_us, metadata, attributes, errors,
        input_file_id, traceparent, input_blob, created_us, deadline_us
    ) VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ?, ?, ?, ?, '[]', ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO NOTHING RETURNING id
"""
BATCH = f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ? AND ended < 2"
VISIBLE_BATCH = f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ? AND account = ? AND {_VISIBLE}"


def batches_page(cursor: str, order: str) -> str:
    """A page of an account's batches of one kind; cursor: a condition on (created_us, id), or nothing."""
    return f"""
    SELECT {BATCH_COLUMNS} FROM batches WHERE account = ? AND kind = ? AND {_VISIBLE} {cursor}
    ORDER BY created_us {order}, id {order} LIMIT ?
    """


OPEN_BATCHES = f"""
    SELECT {BATCH_COLUMNS} FROM batches WHERE ended = 0 AND status <> 'incoming' AND kind <> 'response'
    ORDER BY deadline_us LIMIT ?
"""
_CLAIM_VALIDATING = f"""
    UPDATE batches SET loader = ?, loader_until_us = ? WHERE id IN (
        SELECT id FROM batches WHERE ended = 0 AND status = 'validating' AND loader_until_us < ?
        ORDER BY deadline_us LIMIT 1 {{lock}}
    ) RETURNING {BATCH_COLUMNS}
"""
CLAIM_VALIDATING = Sql(
    _CLAIM_VALIDATING.format(lock=""), postgres=_CLAIM_VALIDATING.format(lock="FOR UPDATE SKIP LOCKED")
)
# Fenced by the loader's name and the number of jobs it has loaded.
COUNT_LOADED = """
    UPDATE batches SET total = total + ?, failed = failed + ?, n_bytes = n_bytes + ?, loader_until_us = ?
    WHERE id = ? AND loader = ? AND total = ? AND status IN ('incoming', 'validating') RETURNING id
"""
START_BATCH = """
    UPDATE batches SET status = 'in_progress', in_progress_us = ?, loader = ''
    WHERE id = ? AND loader = ? AND status IN ('incoming', 'validating') RETURNING id
"""
SET_RELEASED = "UPDATE batches SET n_released = ? WHERE id = ? AND n_released = ? RETURNING id"
REJECT_BATCH = """
    UPDATE batches SET status = ?, ended = 1, errors = ?, failed_us = ?, expired_us = ?, cancelled_us = ?,
    expires_us = ?, loader = '', input_blob = NULL, total = 0, failed = 0
    WHERE id = ? AND status = 'validating' RETURNING id
"""
COUNT_ENDED = f"""
    UPDATE batches SET completed = completed + ?, failed = failed + ?, cancelled = cancelled + ?,
    expired = expired + ?, n_bytes = n_bytes + ?, input_tokens = input_tokens + ?, output_tokens = output_tokens + ?,
    cached_tokens = cached_tokens + ?, reasoning_tokens = reasoning_tokens + ?
    WHERE id = ? RETURNING total - ({_N_ENDED}), ended
"""
FINALIZE_BATCH = """
    UPDATE batches SET status = ?, ended = 1, finalizing_us = ?, completed_us = ?, failed_us = ?, expired_us = ?,
    cancelled_us = ?, expires_us = ? WHERE id = ? AND ended = 0 AND status IN ('in_progress', 'cancelling')
    RETURNING id
"""
SET_CANCELLING = """
    UPDATE batches SET status = 'cancelling', cancelling_us = ? WHERE id = ? AND status = 'in_progress' RETURNING id
"""
HIDE_BATCH = "UPDATE batches SET ended = 2 WHERE id = ? AND ended = ? AND status = ? RETURNING n_bytes, account"
UNRELEASED_BATCHES = """
    SELECT id FROM batches WHERE ended = 0 AND status IN ('in_progress', 'cancelling') AND n_released < total
"""
ABANDONED_BATCHES = "SELECT id FROM batches WHERE ended = 0 AND status = 'incoming' AND loader_until_us < ?"
CANCELLING_BATCHES = "SELECT id FROM batches WHERE ended = 0 AND status = 'cancelling'"
OVERDUE_BATCHES = "SELECT id, status FROM batches WHERE ended = 0 AND deadline_us <= ? AND status <> 'incoming'"
EXPIRED_BATCHES = "SELECT id, status FROM batches WHERE expires_us <= ? AND ended = 1 LIMIT 100"
HIDDEN_BATCHES = "SELECT id FROM batches WHERE ended = 2 LIMIT 100"
DELETE_BATCH = "DELETE FROM batches WHERE id = ? AND ended = 2"

# --- jobs ------------------------------------------------------------------------------------------------------------

_INSERT_COLUMNS = (
    "batch_id, number, account, custom_id, model, state, deadline_us, prefix, cost, created_us, ended_us, "
    "epoch, owner, attempts, kills, stopping, ready_us"
)
INSERT_JOB = Sql(
    f"INSERT INTO lines ({_INSERT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, '', 0, 0, 0, 0)",
    bulk=f"""
    INSERT INTO lines ({_INSERT_COLUMNS}) SELECT *, 0, '', 0, 0, 0, 0 FROM unnest(
        ?::text[], ?::bigint[], ?::text[], ?::text[], ?::text[], ?::text[], ?::bigint[], ?::bigint[], ?::bigint[],
        ?::bigint[], ?::bigint[]
    )
    """,
)
_BODY_COLUMNS = "(batch_id, number, kind, data, blob)"
_ON_CONFLICT = "ON CONFLICT (batch_id, number, kind) DO UPDATE SET data = excluded.data, blob = excluded.blob"
INSERT_BODY = Sql(
    f"INSERT INTO bodies {_BODY_COLUMNS} VALUES (?, ?, ?, ?, ?) {_ON_CONFLICT}",
    bulk=f"""
    INSERT INTO bodies {_BODY_COLUMNS}
    SELECT * FROM unnest(?::text[], ?::bigint[], ?::bigint[], ?::bytea[], ?::text[]) {_ON_CONFLICT}
    """,
)
DELETE_RESULT = "DELETE FROM bodies WHERE batch_id = ? AND number = ? AND kind = 1"
_REQUEST = "bodies.batch_id, bodies.number, bodies.data, bodies.blob, batches.key_id, batches.kind, batches.traceparent"
REQUESTS = Sql(
    f"""
    SELECT {_REQUEST} FROM bodies JOIN batches ON batches.id = bodies.batch_id
    WHERE bodies.batch_id = ? AND bodies.number = ? AND bodies.kind = 0
    """,
    bulk=f"""
    SELECT {_REQUEST} FROM unnest(?::text[], ?::bigint[]) AS wanted (batch_id, number)
    JOIN bodies ON bodies.batch_id = wanted.batch_id AND bodies.number = wanted.number AND bodies.kind = 0
    JOIN batches ON batches.id = bodies.batch_id
    """,
)
RELEASE_JOBS = """
    UPDATE lines SET state = 'queued' WHERE batch_id = ? AND number >= ? AND number < ? AND state = 'held'
    RETURNING model, cost
"""
JOB_COLUMNS = (
    "lines.batch_id, lines.number, custom_id, model, state, epoch, owner, attempts, kills, created_us, started_us, "
    "ended_us"
)
_JOBS_WITH_RESULTS = f"""
    SELECT {JOB_COLUMNS}, data, blob FROM lines LEFT JOIN bodies
    ON bodies.batch_id = lines.batch_id AND bodies.number = lines.number AND bodies.kind = 1
"""
DEAD_LETTERS = f"""
    {_JOBS_WITH_RESULTS} WHERE lines.state = 'dead' AND (lines.batch_id, lines.number) > (?, ?)
        AND (CAST(? AS TEXT) IS NULL OR lines.account = ?)
    ORDER BY lines.batch_id, lines.number LIMIT ?
"""


def jobs_page(n_states: int) -> str:
    """A page of a batch's jobs in one of so many states; 0: in any."""
    in_states = f"AND state IN ({', '.join('?' * n_states)})" if n_states else ""
    return f"""
    {_JOBS_WITH_RESULTS} WHERE lines.batch_id = ? AND lines.number > ? {in_states} ORDER BY lines.number LIMIT ?
    """


# --- the claim -------------------------------------------------------------------------------------------------------

_CLAIMED = "lines.batch_id, lines.number, epoch, account, model, deadline_us, attempts, kills, prefix, cost, created_us"
_LEASE = (
    "state = 'leased', owner = ?1, epoch = epoch + 1, attempts = attempts + 1, started_us = ?2, stopping = 0, "
    "ended_us = NULL"
)
_READY = """
    FROM lines WHERE state = 'queued' AND model = ?3 AND account = ?4 AND deadline_us > ?5 AND deadline_us < ?6
    AND ready_us <= ?7 AND kills < ?8 ORDER BY deadline_us, prefix, batch_id, number LIMIT ?9
"""
_QUARANTINED = """
    FROM lines WHERE state = 'queued' AND kills > 0 AND model = ?3 AND deadline_us > ?4 AND ready_us <= ?5
    AND kills >= ?6 ORDER BY deadline_us LIMIT 1
"""


def _claim(which: str) -> Sql:
    return Sql(
        f"UPDATE lines SET {_LEASE} WHERE rowid IN (SELECT rowid {which}) RETURNING {_CLAIMED}",
        postgres=f"""
        WITH taken AS MATERIALIZED (SELECT batch_id, number {which} FOR UPDATE SKIP LOCKED)
        UPDATE lines SET {_LEASE} FROM taken
        WHERE lines.batch_id = taken.batch_id AND lines.number = taken.number
        RETURNING {_CLAIMED}
        """,
    )


CLAIM = _claim(_READY)
CLAIM_QUARANTINED = _claim(_QUARANTINED)
LANES = """
    SELECT account, served, n_queued, queued_cost FROM lanes WHERE model = ? AND n_queued > 0 ORDER BY served LIMIT 256
"""
URGENT_ACCOUNTS = """
    SELECT account, MIN(deadline_us) FROM batches WHERE ended = 0 AND deadline_us < ?
    AND status IN ('in_progress', 'cancelling') GROUP BY account ORDER BY MIN(deadline_us) LIMIT 64
"""
_DEPTHS = """
    SELECT model, account, n_queued, n_leased, served,
        (SELECT created_us FROM lines WHERE state = 'queued' AND lines.model = lanes.model
            AND lines.account = lanes.account ORDER BY deadline_us, prefix, batch_id, number LIMIT 1),
        (SELECT COUNT(*) FROM lines{hint} WHERE state = 'queued' AND kills > 0 AND lines.model = lanes.model
            AND lines.account = lanes.account AND kills >= ?)
    FROM lanes WHERE n_queued > 0 OR n_leased > 0 ORDER BY model, account
"""
# Without the hint SQLite scans all queued jobs.
DEPTHS = Sql(_DEPTHS.format(hint=" INDEXED BY lines_suspect"), postgres=_DEPTHS.format(hint=""))

# --- the end of a job ----------------------------------------------------------------------------------------------

# A job that was asked to stop does not return to the queue. `owner` and `epoch` fence stale workers off.
FINISH_JOB = Sql(
    """
    UPDATE lines SET
        state = CASE WHEN ?1 <> 'queued' OR stopping = 0 THEN ?1 WHEN stopping = 1 THEN 'cancelled' ELSE 'expired' END,
        owner = '', ready_us = ?2, attempts = attempts + ?3, kills = kills + ?4,
        ended_us = CASE WHEN ?1 = 'queued' AND stopping = 0 THEN NULL ELSE ?5 END
    WHERE batch_id = ?6 AND number = ?7 AND epoch = ?8 AND owner = ?9 AND state = 'leased'
    RETURNING batch_id, number, state, model, account, cost, started_us
    """,
    # IS NOT DISTINCT FROM is an equality without the partial index on leased jobs: rows are found by their key.
    bulk="""
    UPDATE lines SET
        state = CASE WHEN outcome.state <> 'queued' OR stopping = 0 THEN outcome.state
            WHEN stopping = 1 THEN 'cancelled' ELSE 'expired' END,
        owner = '', ready_us = outcome.ready_us, attempts = lines.attempts + outcome.attempts,
        kills = lines.kills + outcome.kills,
        ended_us = CASE WHEN outcome.state = 'queued' AND stopping = 0 THEN NULL ELSE outcome.now_us END
    FROM unnest(
        ?::text[], ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[], ?::text[], ?::bigint[], ?::bigint[], ?::text[]
    ) AS outcome (state, ready_us, attempts, kills, now_us, batch_id, number, epoch, owner)
    WHERE lines.batch_id = outcome.batch_id AND lines.number = outcome.number AND lines.epoch = outcome.epoch
    AND lines.owner = outcome.owner AND lines.state IS NOT DISTINCT FROM 'leased'
    RETURNING lines.batch_id, lines.number, lines.state, lines.model, lines.account, lines.cost, lines.started_us
    """,
)
_RANGE = "batch_id = ? AND number >= ? AND number < ?"
_OPEN = f"SELECT 1 FROM lines WHERE {_RANGE} AND state IN ('held', 'queued', 'leased')"
LOCK_OPEN_JOBS = Sql(_OPEN, postgres=f"{_OPEN} ORDER BY number FOR UPDATE")
STOP_JOBS = f"UPDATE lines SET state = ?, ended_us = ? WHERE {_RANGE} AND state = ? RETURNING model, account, cost"
REQUEST_STOP = f"UPDATE lines SET stopping = ? WHERE {_RANGE} AND state = 'leased' AND stopping = 0"
REPLAY_JOB = """
    UPDATE lines SET state = 'queued', kills = 0, attempts = 0, ready_us = 0, deadline_us = ?, ended_us = NULL
    WHERE batch_id = ? AND number = ? AND state = 'dead' RETURNING model, account, cost
"""
LEASED_BY = "SELECT batch_id, number, epoch, stopping, started_us FROM lines WHERE state = 'leased' AND owner = ?"
STOP_REQUESTS = "SELECT 1 FROM lines WHERE state = 'leased' AND owner = ? AND stopping <> 0 LIMIT 1"
COUNT_DEAD_LETTERS = "SELECT COUNT(*) FROM lines WHERE state = 'dead' AND (CAST(? AS TEXT) IS NULL OR account = ?)"
LEASES_OF = "SELECT batch_id, number, epoch, kills FROM lines WHERE state = 'leased' AND owner = ? LIMIT ?"

# --- counters --------------------------------------------------------------------------------------------------------

# An account that was idle starts at the level of the others, without credit for that time.
ADD_TO_LANE = """
    INSERT INTO lanes (model, account, n_queued, n_leased, queued_cost, served) VALUES (?, ?, ?, 0, ?, (
        SELECT COALESCE(MIN(served), 0) FROM lanes WHERE model = ? AND n_queued > 0
    ))
    ON CONFLICT (model, account) DO UPDATE SET
        served = CASE WHEN lanes.n_queued = 0 AND excluded.served > lanes.served
            THEN excluded.served ELSE lanes.served END,
        n_queued = lanes.n_queued + excluded.n_queued,
        queued_cost = lanes.queued_cost + excluded.queued_cost
"""
UPDATE_LANE = """
    UPDATE lanes SET n_queued = n_queued + ?, n_leased = n_leased + ?, queued_cost = queued_cost + ?,
    served = served + ? WHERE model = ? AND account = ?
"""
COUNT_COMPLETIONS = """
    INSERT INTO paces (model, minute, n, busy_us) VALUES (?, ?, ?, ?)
    ON CONFLICT (model, minute) DO UPDATE SET n = paces.n + excluded.n, busy_us = paces.busy_us + excluded.busy_us
"""

# --- workers ---------------------------------------------------------------------------------------------------------

HEARTBEAT = """
    INSERT INTO workers (owner, until_us, started_us) VALUES (?, ?, ?)
    ON CONFLICT (owner) DO UPDATE SET until_us = excluded.until_us
"""
EXPIRED_OWNERS = """
    SELECT DISTINCT owner FROM lines WHERE state = 'leased'
    AND owner NOT IN (SELECT owner FROM workers WHERE until_us >= ?)
"""
DELETE_EXPIRED_WORKER = "DELETE FROM workers WHERE owner = ? AND until_us < ?"
DELETE_WORKER = "DELETE FROM workers WHERE owner = ?"
WORKER = "SELECT owner FROM workers WHERE owner = ?"
# A lease that ends later than is possible was granted before the clock was set back: it gets one full term.
SHORTEN_LEASES = "UPDATE workers SET until_us = ? WHERE until_us > ?"
DELETE_OLD_WORKERS = """
    DELETE FROM workers WHERE until_us < ? AND owner NOT IN (SELECT owner FROM lines WHERE state = 'leased')
"""

# --- retention -----------------------------------------------------------------------------------------------------

LAST_NUMBER = "SELECT MAX(number) FROM lines WHERE batch_id = ?"
DELETE_BODIES = f"DELETE FROM bodies WHERE {_RANGE}"
DELETE_JOBS = f"DELETE FROM lines WHERE {_RANGE}"
DELETE_OLD_PACES = "DELETE FROM paces WHERE minute < ?"
DELETE_OLD_KEYS = "DELETE FROM idempotency WHERE expires_us <= ?"
BLOB_REFERENCES = """
    SELECT 1 FROM files WHERE blob = ? UNION ALL SELECT 1 FROM batches WHERE input_blob = ?
    UNION ALL SELECT 1 FROM bodies WHERE blob = ? LIMIT 1
"""
