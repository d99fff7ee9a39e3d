"""Ending lines that nobody runs yet: of a batch that is cancelled, or whose time is over."""

from emberline.jobs import statements as sql
from emberline.jobs.batch import Batch
from emberline.jobs.limits import RELEASE, Limits
from emberline.jobs.line import State
from emberline.jobs.settling import Ended, count
from emberline.store import Many, Step, Work

CANCEL, EXPIRE = 1, 2  # why a running line is to stop
TRIES = 3  # a line may be released, begin or cease to run between looking and acting


def stop_waiting(batch: Batch, after: int, state: State, now_us: int, limits: Limits) -> Work[int | None]:
    """End the next waiting lines; the number of the last one looked at, None when there were no more."""
    rows = yield Step(sql.WAITING_LINES, (batch.id, after, RELEASE))
    if not rows:
        return None
    yield from _stop(batch, [(int(number or 0), str(before)) for number, before in rows], state, now_us, limits)
    return int(rows[-1][0] or 0)


def stop_line(batch: Batch, number: int, now_us: int, limits: Limits) -> Work[None]:
    """At once where it waits; where it runs, its worker is told by the next heartbeat."""
    for _ in range(TRIES):
        rows = yield Step(sql.WAITING_LINES, (batch.id, number - 1, 1))
        if rows and rows[0][0] == number:
            if (yield from _stop(batch, [(number, str(rows[0][1]))], "cancelled", now_us, limits)):
                return
        elif (yield Step(sql.MARK_LINE_STOPPING, (batch.id, number))):
            return


def _stop(batch: Batch, lines: list[tuple[int, str]], state: State, now_us: int, limits: Limits) -> Work[int]:
    before = dict(lines)
    each = [(state, now_us, batch.id, number, was) for number, was in lines]
    stopped = yield Many(sql.STOP_LINE, each)
    changes = [
        Ended(batch.id, str(account), str(model), before[int(number or 0)], state, int(cost or 0))
        for number, model, account, cost in stopped
    ]
    yield from count(changes, now_us, limits)
    return len(changes)
