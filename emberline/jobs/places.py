"""Where a batch stands: how many lines go before its next one, and how long until it is done."""

import msgspec

from emberline.jobs.batch import Batch
from emberline.jobs.settling import MINUTE_US
from emberline.store import Database, Sql

_LOOK_BACK = 10  # minutes over which it is measured how long a line takes
_OWN_AHEAD = """
    SELECT SUM(total - completed - failed - cancelled - expired) FROM batches
    WHERE ended = 0 AND account = ? AND deadline_us < ? AND id <> ? AND status IN ('in_progress', 'cancelling')
"""
_LANES = "SELECT account, n_queued, n_leased FROM lanes WHERE (n_queued > 0 OR n_leased > 0) AND (model = ? OR ? = '')"
_PACE = "SELECT SUM(n), SUM(busy_us) FROM paces WHERE minute > ? AND (model = ? OR ? = '')"
_RUNS = "SELECT 1 FROM lines{hint} WHERE state = 'leased' AND batch_id = ? LIMIT 1"
# SQLite would look at every line of the batch.
_RUNNING = Sql(_RUNS.format(hint=" INDEXED BY lines_leased"), postgres=_RUNS.format(hint=""))


class Place(msgspec.Struct, frozen=True):
    position: int  # lines that are claimed before this batch's next one; 0: it is its turn
    n_left: int
    running: bool  # one of its lines is with an engine
    rate_per_s: float | None  # lines of its model that end in a second; None: none has ended lately
    eta_s: float | None


async def place(store: Database, batch: Batch) -> Place:
    """The account's own earlier deadlines go first; with other accounts it takes turns, line by line."""
    if batch.ended or not batch.counts.left:
        return Place(0, 0, False, None, 0.0)
    ((own,),) = await store.read(_OWN_AHEAD, (batch.account, batch.deadline_us, batch.id))
    ahead, left = int(own or 0), batch.counts.left
    lanes = await store.read(_LANES, (batch.model, batch.model))
    others = [int(n_queued or 0) for account, n_queued, _ in lanes if account != batch.account]
    position = ahead + sum(min(n, ahead) for n in others)
    last = sum(min(n, ahead + left) for n in others)
    rate = await _rate(store, batch.model, sum(int(n_leased or 0) for *_, n_leased in lanes))
    running = bool(await store.read(_RUNNING, (batch.id,)))
    return Place(position, left, running, rate, (ahead + left + last) / rate if rate else None)


async def _rate(store: Database, model: str, n_running: int) -> float | None:
    """As many as run now, each for as long as lines took lately. What was idle before says nothing about now."""
    since = store.now_us() // MINUTE_US - _LOOK_BACK
    ((n, busy_us),) = await store.read(_PACE, (since, model, model))
    if not n or not busy_us:
        return None
    return max(1, n_running) / (int(busy_us) / int(n) / 1e6)
