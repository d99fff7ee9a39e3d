"""The queue's SQL. One text for both databases; the claim has two, because only PostgreSQL has rows to skip.

Rows are locked in one order everywhere: lines, bodies, lanes, paces, batches, holdings, events. Literal states in
conditions are what lets PostgreSQL use the partial indexes.
"""

import re
from itertools import count

from emberline.jobs.batches.batch import COLUMNS as BATCH_COLUMNS
from emberline.store import Sql

# --- batches ---------------------------------------------------------------------------------------------------------

_ENDED_LINES = "completed + failed + cancelled + expired"
_VISIBLE = "status <> 'incoming' AND ended < 2"

INSERT_BATCH = """
    INSERT INTO batches (
        id, account, key_id, kind, endpoint, model, status, ended, total, n_released, completed, failed, cancelled,
        expired, n_bytes, input_tokens, output_tokens, loader, loader_until_us, metadata, attributes, errors,
        input_file_id, input_blob, created_us, deadline_us
    ) VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ?, ?, ?, ?, '[]', ?, ?, ?, ?)
    ON CONFLICT (id) DO NOTHING RETURNING id
"""
BATCH = f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ? AND ended < 2"
BATCH_SHOWN = f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ? AND account = ? AND {_VISIBLE}"
BATCHES = f"""
    SELECT {BATCH_COLUMNS} FROM batches WHERE account = ? AND kind = ? AND {_VISIBLE}
    ORDER BY created_us DESC, id DESC LIMIT ?
"""
BATCHES_AFTER = f"""
    SELECT {BATCH_COLUMNS} FROM batches WHERE account = ? AND kind = ? AND {_VISIBLE} AND (created_us, id) < (?, ?)
    ORDER BY created_us DESC, id DESC LIMIT ?
"""
BATCHES_BEFORE = f"""
    SELECT {BATCH_COLUMNS} FROM batches WHERE account = ? AND kind = ? AND {_VISIBLE} AND (created_us, id) > (?, ?)
    ORDER BY created_us, id LIMIT ?
"""
TAKE_LOAD = Sql(
    f"""
    UPDATE batches SET loader = ?, loader_until_us = ? WHERE id IN (
        SELECT id FROM batches WHERE ended = 0 AND status = 'validating' AND loader_until_us < ?
        ORDER BY deadline_us LIMIT 1
    ) RETURNING {BATCH_COLUMNS}
    """,
    postgres=f"""
    UPDATE batches SET loader = ?, loader_until_us = ? WHERE id IN (
        SELECT id FROM batches WHERE ended = 0 AND status = 'validating' AND loader_until_us < ?
        ORDER BY deadline_us LIMIT 1 FOR UPDATE SKIP LOCKED
    ) RETURNING {BATCH_COLUMNS}
    """,
)
# The loader's fence: it still loads, and the batch has as many lines as it thinks.
LOADED = """
    UPDATE batches SET total = total + ?, failed = failed + ?, n_bytes = n_bytes + ?, loader_until_us = ?
    WHERE id = ? AND loader = ? AND total = ? AND status IN ('incoming', 'validating') RETURNING id
"""
START = """
    UPDATE batches SET status = 'in_progress', in_progress_us = ?, loader = ''
    WHERE id = ? AND loader = ? AND status IN ('incoming', 'validating') RETURNING id
"""
RELEASED = "UPDATE batches SET n_released = ? WHERE id = ? AND n_released = ? RETURNING id"
REJECT = """
    UPDATE batches SET status = ?, ended = 1, errors = ?, failed_us = ?, expired_us = ?, cancelled_us = ?,
    expires_us = ?, loader = '', input_blob = NULL, total = 0, failed = 0
    WHERE id = ? AND status = 'validating' RETURNING id
"""
COUNT = f"""
    UPDATE batches SET completed = completed + ?, failed = failed + ?, cancelled = cancelled + ?,
    expired = expired + ?, n_bytes = n_bytes + ?, input_tokens = input_tokens + ?, output_tokens = output_tokens + ?,
    cached_tokens = cached_tokens + ?, reasoning_tokens = reasoning_tokens + ?
    WHERE id = ? RETURNING total - ({_ENDED_LINES}), ended
"""
FINISH = """
    UPDATE batches SET status = ?, ended = 1, finalizing_us = ?, completed_us = ?, failed_us = ?, expired_us = ?,
    cancelled_us = ?, expires_us = ? WHERE id = ? AND ended = 0 AND status IN ('in_progress', 'cancelling')
    RETURNING id
"""
CANCELLING = """
    UPDATE batches SET status = 'cancelling', cancelling_us = ? WHERE id = ? AND status = 'in_progress' RETURNING id
"""
GONE = "UPDATE batches SET ended = 2 WHERE id = ? AND ended = ? AND status = ? RETURNING n_bytes, account"
UNRELEASED = """
    SELECT id FROM batches WHERE ended = 0 AND status IN ('in_progress', 'cancelling') AND n_released < total
"""
ABANDONED = "SELECT id FROM batches WHERE ended = 0 AND status = 'incoming' AND loader_until_us < ?"
CANCELLING_NOW = "SELECT id FROM batches WHERE ended = 0 AND status = 'cancelling'"
OVERDUE = "SELECT id, status FROM batches WHERE ended = 0 AND deadline_us <= ? AND status <> 'incoming'"
OUTDATED = "SELECT id, status FROM batches WHERE expires_us <= ? AND ended = 1 LIMIT 100"
DELETED = "SELECT id FROM batches WHERE ended = 2 LIMIT 100"
DELETE_BATCH = "DELETE FROM batches WHERE id = ? AND ended = 2"

# --- lines -----------------------------------------------------------------------------------------------------------

_LINE_COLUMNS_IN = (
    "batch_id, number, account, custom_id, model, state, deadline_us, prefix, cost, created_us, ended_us, "
    "epoch, owner, attempts, kills, stopping, ready_us"
)
INSERT_LINE = Sql(
    f"INSERT INTO lines ({_LINE_COLUMNS_IN}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, '', 0, 0, 0, 0)",
    bulk=f"""
    INSERT INTO lines ({_LINE_COLUMNS_IN}) SELECT *, 0, '', 0, 0, 0, 0 FROM unnest(
        ?::text[], ?::bigint[], ?::text[], ?::text[], ?::text[], ?::text[], ?::bigint[], ?::bigint[], ?::bigint[],
        ?::bigint[], ?::bigint[]
    )
    """,
)
_BODY_COLUMNS = "(batch_id, number, kind, data, blob)"
_BODY_AGAIN = "ON CONFLICT (batch_id, number, kind) DO UPDATE SET data = excluded.data, blob = excluded.blob"
INSERT_BODY = Sql(
    f"INSERT INTO bodies {_BODY_COLUMNS} VALUES (?, ?, ?, ?, ?) {_BODY_AGAIN}",
    bulk=f"""
    INSERT INTO bodies {_BODY_COLUMNS}
    SELECT * FROM unnest(?::text[], ?::bigint[], ?::bigint[], ?::bytea[], ?::text[]) {_BODY_AGAIN}
    """,
)
DROP_BODY = "DELETE FROM bodies WHERE batch_id = ? AND number = ? AND kind = 1"
_REQUEST = "bodies.batch_id, bodies.number, bodies.data, bodies.blob, batches.key_id, batches.kind"
REQUEST_OF = Sql(
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
RELEASE_LINES = """
    UPDATE lines SET state = 'queued' WHERE batch_id = ? AND number >= ? AND number < ? AND state = 'held'
    RETURNING model, cost
"""
LINE_COLUMNS = (
    "lines.batch_id, lines.number, custom_id, model, state, epoch, owner, attempts, kills, created_us, started_us, "
    "ended_us"
)
LINES = f"SELECT {LINE_COLUMNS} FROM lines WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?"
LINES_WITH_BODIES = f"""
    SELECT {LINE_COLUMNS}, data, blob FROM lines LEFT JOIN bodies
    ON bodies.batch_id = lines.batch_id AND bodies.number = lines.number AND bodies.kind = 1
    WHERE lines.batch_id = ? AND lines.number > ? ORDER BY lines.number LIMIT ?
"""
DEAD = f"""
    SELECT {LINE_COLUMNS}, data, blob FROM lines LEFT JOIN bodies
    ON bodies.batch_id = lines.batch_id AND bodies.number = lines.number AND bodies.kind = 1
    WHERE lines.state = 'dead' AND (lines.batch_id, lines.number) > (?, ?)
    ORDER BY lines.batch_id, lines.number LIMIT ?
"""


def lines_in(states: int, bodies: bool) -> str:
    """The page of lines that are in one of so many states."""
    base = LINES_WITH_BODIES if bodies else LINES
    condition = f"number > ? AND state IN ({', '.join('?' * states)}) ORDER"
    return base.replace("number > ? ORDER", condition)


# --- the claim -------------------------------------------------------------------------------------------------------

_CLAIMED = "lines.batch_id, lines.number, epoch, account, model, deadline_us, attempts, kills, prefix, cost"
_TAKE = (
    "state = 'leased', owner = ?, epoch = epoch + 1, attempts = attempts + 1, started_us = ?, stopping = 0, "
    "ended_us = NULL"
)
_READY = """
    FROM lines WHERE state = 'queued' AND model = ? AND account = ? AND deadline_us > ? AND deadline_us < ?
    AND ready_us <= ? AND kills < ? ORDER BY deadline_us, prefix, batch_id, number LIMIT ?
"""
_SUSPECT = """
    FROM lines WHERE state = 'queued' AND kills > 0 AND model = ? AND deadline_us > ? AND ready_us <= ?
    AND kills >= ?
    ORDER BY deadline_us LIMIT 1
"""


def _claim(which: str) -> Sql:
    later = count(3)
    which_numbered = re.sub(r"\?", lambda _: f"?{next(later)}", which)
    take_numbered = _TAKE.replace("?", "?1", 1).replace("= ?,", "= ?2,", 1)
    return Sql(
        f"UPDATE lines SET {_TAKE} WHERE rowid IN (SELECT rowid {which}) RETURNING {_CLAIMED}".replace("lines.b", "b"),
        postgres=f"""
        WITH taken AS MATERIALIZED (SELECT batch_id, number {which_numbered} FOR UPDATE SKIP LOCKED)
        UPDATE lines SET {take_numbered} FROM taken
        WHERE lines.batch_id = taken.batch_id AND lines.number = taken.number
        RETURNING {_CLAIMED}
        """,
    )


CLAIM = _claim(_READY)
CLAIM_ALONE = _claim(_SUSPECT)
LANES = """
    SELECT account, served, n_queued, queued_cost FROM lanes WHERE model = ? AND n_queued > 0 ORDER BY served LIMIT 256
"""
URGENT = """
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
# SQLite would count the suspects among all that waits.
DEPTHS = Sql(_DEPTHS.format(hint=" INDEXED BY lines_suspect"), postgres=_DEPTHS.format(hint=""))

# --- what becomes of a line ------------------------------------------------------------------------------------------

# A line that was told to stop does not go back to the queue. `owner` and `epoch` are the fence.
_SETTLED = "lines.batch_id, lines.number, lines.state, lines.model, lines.account, lines.cost, lines.started_us"
SETTLE = Sql(
    """
    UPDATE lines SET
        state = CASE WHEN ?1 <> 'queued' OR stopping = 0 THEN ?1 WHEN stopping = 1 THEN 'cancelled' ELSE 'expired' END,
        owner = '', ready_us = ?2, attempts = attempts + ?3, kills = kills + ?4,
        ended_us = CASE WHEN ?1 = 'queued' AND stopping = 0 THEN NULL ELSE ?5 END
    WHERE batch_id = ?6 AND number = ?7 AND epoch = ?8 AND owner = ?9 AND state = 'leased'
    RETURNING batch_id, number, state, model, account, cost, started_us
    """,
    # NOT DISTINCT is equality that no partial index answers: a line is found by its key, not among all that run.
    bulk=f"""
    UPDATE lines SET
        state = CASE WHEN told.state <> 'queued' OR stopping = 0 THEN told.state
            WHEN stopping = 1 THEN 'cancelled' ELSE 'expired' END,
        owner = '', ready_us = told.ready_us, attempts = lines.attempts + told.attempts,
        kills = lines.kills + told.kills,
        ended_us = CASE WHEN told.state = 'queued' AND stopping = 0 THEN NULL ELSE told.now_us END
    FROM unnest(
        ?::text[], ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[], ?::text[], ?::bigint[], ?::bigint[], ?::text[]
    ) AS told (state, ready_us, attempts, kills, now_us, batch_id, number, epoch, owner)
    WHERE lines.batch_id = told.batch_id AND lines.number = told.number AND lines.epoch = told.epoch
    AND lines.owner = told.owner AND lines.state IS NOT DISTINCT FROM 'leased'
    RETURNING {_SETTLED}
    """,
)
_SOME = "batch_id = ? AND number >= ? AND number < ?"
_OPEN = f"SELECT 1 FROM lines WHERE {_SOME} AND state IN ('held', 'queued', 'leased')"
LOCK_OPEN = Sql(_OPEN, postgres=f"{_OPEN} ORDER BY number FOR UPDATE")
STOP_LINES = f"UPDATE lines SET state = ?, ended_us = ? WHERE {_SOME} AND state = ? RETURNING model, account, cost"
MARK_STOPPING = f"UPDATE lines SET stopping = ? WHERE {_SOME} AND state = 'leased' AND stopping = 0"
REPLAY_LINE = """
    UPDATE lines SET state = 'queued', kills = 0, attempts = 0, ready_us = 0, deadline_us = ?, ended_us = NULL
    WHERE batch_id = ? AND number = ? AND state = 'dead' RETURNING model, account, cost
"""
LEASED_BY = "SELECT batch_id, number, epoch, stopping, started_us FROM lines WHERE state = 'leased' AND owner = ?"
STOPPING_OF = "SELECT 1 FROM lines WHERE state = 'leased' AND owner = ? AND stopping <> 0 LIMIT 1"
COUNT_DEAD = "SELECT COUNT(*) FROM lines WHERE state = 'dead'"
HELD_BY = "SELECT batch_id, number, epoch, kills FROM lines WHERE state = 'leased' AND owner = ? LIMIT ?"

# --- counters --------------------------------------------------------------------------------------------------------

# Who was idle begins where the others are, not with credit for the time it asked for nothing.
ENTER_LANE = """
    INSERT INTO lanes (model, account, n_queued, n_leased, queued_cost, served) VALUES (?, ?, ?, 0, ?, (
        SELECT COALESCE(MIN(served), 0) FROM lanes WHERE model = ? AND n_queued > 0
    ))
    ON CONFLICT (model, account) DO UPDATE SET
        served = CASE WHEN lanes.n_queued = 0 AND excluded.served > lanes.served
            THEN excluded.served ELSE lanes.served END,
        n_queued = lanes.n_queued + excluded.n_queued,
        queued_cost = lanes.queued_cost + excluded.queued_cost
"""
MOVE_LANE = """
    UPDATE lanes SET n_queued = n_queued + ?, n_leased = n_leased + ?, queued_cost = queued_cost + ?,
    served = served + ? WHERE model = ? AND account = ?
"""
PACE = """
    INSERT INTO paces (model, minute, n, busy_us) VALUES (?, ?, ?, ?)
    ON CONFLICT (model, minute) DO UPDATE SET n = paces.n + excluded.n, busy_us = paces.busy_us + excluded.busy_us
"""
HOLD = """
    INSERT INTO holdings (account, n_bytes) VALUES (?, ?)
    ON CONFLICT (account) DO UPDATE SET n_bytes = holdings.n_bytes + excluded.n_bytes
"""

# --- workers ---------------------------------------------------------------------------------------------------------

ALIVE = """
    INSERT INTO workers (owner, until_us, started_us) VALUES (?, ?, ?)
    ON CONFLICT (owner) DO UPDATE SET until_us = excluded.until_us
"""
OWNERS_GONE = """
    SELECT DISTINCT owner FROM lines WHERE state = 'leased'
    AND owner NOT IN (SELECT owner FROM workers WHERE until_us >= ?)
"""
BURY = "DELETE FROM workers WHERE owner = ? AND until_us < ?"
FORGET_WORKER = "DELETE FROM workers WHERE owner = ?"
LIVES = "SELECT owner FROM workers WHERE owner = ?"
# A lease that ends later than any can was given before the clock was set back: it has one whole term from now.
CUT_LEASES = "UPDATE workers SET until_us = ? WHERE until_us > ?"
FORGET_WORKERS = """
    DELETE FROM workers WHERE until_us < ? AND owner NOT IN (SELECT owner FROM lines WHERE state = 'leased')
"""

# --- the end of what is no longer needed -----------------------------------------------------------------------------

LAST_NUMBER = "SELECT MAX(number) FROM lines WHERE batch_id = ?"
DELETE_BODIES = "DELETE FROM bodies WHERE batch_id = ? AND number >= ? AND number < ?"
DELETE_LINES = "DELETE FROM lines WHERE batch_id = ? AND number >= ? AND number < ?"
FORGET_PACES = "DELETE FROM paces WHERE minute < ?"
FORGET_KEYS = "DELETE FROM idempotency WHERE expires_us <= ?"
BLOB_USED = """
    SELECT 1 FROM files WHERE blob = ? UNION ALL SELECT 1 FROM batches WHERE input_blob = ?
    UNION ALL SELECT 1 FROM bodies WHERE blob = ? LIMIT 1
"""
