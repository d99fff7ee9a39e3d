"""Ending lines before their time: of a batch that is cancelled, or whose time is over; or one alone."""

from emberline.jobs import statements as sql
from emberline.jobs.batch import Batch
from emberline.jobs.limits import Limits
from emberline.jobs.line import State
from emberline.jobs.settling import Ended, count
from emberline.store import Step, Work

CANCEL, EXPIRE = 1, 2  # why a running line is to stop


def stop(batch: Batch, first: int, end: int, state: State, now_us: int, limits: Limits) -> Work[None]:
    """Lines `first` up to `end`: those that wait end at once, the workers of those that run hear it by heartbeat.

    They are locked first: a line that is released, claimed or given back this moment is met after that, as it is then.
    """
    some = (batch.id, first, end)
    yield Step(sql.LOCK_OPEN, some)
    changes: list[Ended] = []
    for before in ("held", "queued"):
        for model, account, cost in (yield Step(sql.STOP_LINES, (state, now_us, *some, before))):
            changes.append(Ended(batch.id, str(account), str(model), before, state, int(cost or 0)))
    yield Step(sql.MARK_STOPPING, (CANCEL if state == "cancelled" else EXPIRE, *some))
    yield from count(changes, now_us, limits)
