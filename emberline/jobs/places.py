"""Where a batch stands: how many lines go before its next one, and how long until it is done."""

import msgspec

from emberline.jobs.batch import Batch
from emberline.jobs.settling import MINUTE_US
from emberline.store import Database

_LOOK_BACK = 10  # minutes over which the pace is measured
_OWN_AHEAD = """
    SELECT SUM(total - completed - failed - cancelled - expired) FROM batches
    WHERE ended = 0 AND account = ? AND deadline_us < ? AND id <> ? AND status IN ('in_progress', 'cancelling')
"""
_OTHERS = "SELECT n_queued FROM lanes WHERE account <> ? AND n_queued > 0 AND (model = ? OR ? = '')"
_PACE = "SELECT SUM(n), MIN(minute) FROM paces WHERE minute > ? AND (model = ? OR ? = '')"


class Place(msgspec.Struct, frozen=True):
    position: int  # lines that are claimed before this batch's next one; 0: it is its turn, or it runs
    n_left: int
    rate_per_s: float | None  # lines of its model that end in a second; None: nothing ended lately
    eta_s: float | None


async def place(store: Database, batch: Batch) -> Place:
    """The account's own earlier deadlines go first; with other accounts it takes turns, line by line."""
    if batch.ended or not batch.counts.left:
        return Place(0, 0, None, 0.0)
    ((own,),) = await store.read(_OWN_AHEAD, (batch.account, batch.deadline_us, batch.id))
    ahead = int(own or 0)
    others = await store.read(_OTHERS, (batch.account, batch.model, batch.model))
    position = ahead + sum(min(int(n or 0), ahead) for (n,) in others)
    last = sum(min(int(n or 0), ahead + batch.counts.left) for (n,) in others)
    rate = await _rate(store, batch.model)
    n_before_end = ahead + batch.counts.left + last
    return Place(position, batch.counts.left, rate, n_before_end / rate if rate else None)


async def _rate(store: Database, model: str) -> float | None:
    now_us = store.now_us()
    since = now_us // MINUTE_US - _LOOK_BACK
    ((n, first),) = await store.read(_PACE, (since, model, model))
    if not n:
        return None
    began_us = max(int(first or 0) * MINUTE_US, now_us - _LOOK_BACK * MINUTE_US)
    return int(n) / max(1.0, (now_us - began_us) / 1e6)
