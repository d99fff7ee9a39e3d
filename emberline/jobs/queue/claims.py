"""Which lines run next: those near their deadline, then a fair share for every account, then by deadline and prefix.

Fairness is by tokens: every account has a counter of what it was served, and the lowest goes first. Who was idle
enters at the level of the others.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import sql
from emberline.store import Many, Rows, Step, Value, Work

_FOREVER_US = 1 << 62


class Lane(NamedTuple):
    account: str
    served: int
    n_queued: int
    mean_cost: int


class Claimed(NamedTuple):
    """A row that was claimed, and its request's body."""

    batch_id: str
    number: int
    epoch: int
    account: str
    model: str
    deadline_us: int
    attempts: int
    kills: int
    prefix: int
    cost: int
    data: bytes | None
    blob: str | None
    key_id: str
    kind: str


def claim(owner: str, model: str, n: int, alone: bool, now_us: int, limits: QueueLimits) -> Work[list[Claimed]]:
    rows: Rows = []
    if alone:
        rows = yield Step(sql.CLAIM_ALONE, (owner, now_us, model, now_us, now_us, limits.quarantine_kills))
    elif lanes := [_lane(row) for row in (yield Step(sql.LANES, (model,)))]:
        rows = yield from _pick(owner, model, n, lanes, now_us, limits)
    if not rows:
        return []
    bodies = yield Many(sql.REQUEST_OF, [row[:2] for row in rows])
    yield Step(sql.ALIVE, (owner, now_us + limits.lease_us, now_us))
    yield from _charge(rows)  # last: other claims wait for these rows until the commit
    found = {(row[0], row[1]): row[2:] for row in bodies}
    claimed = [Claimed(*row, *found[row[0], row[1]]) for row in rows]  # type: ignore[arg-type]
    return sorted(claimed, key=lambda line: (line.deadline_us, line.prefix, line.batch_id, line.number))


def _lane(row: tuple[Value, ...]) -> Lane:
    account, served, n_queued, cost = row
    return Lane(str(account), int(served or 0), int(n_queued or 0), max(1, int(cost or 0) // int(n_queued or 1)))


def _pick(owner: str, model: str, n: int, lanes: Sequence[Lane], now_us: int, limits: QueueLimits) -> Work[Rows]:
    taken: Rows = []

    def take(account: str, before_us: int, most: int) -> Work[int]:
        which = (model, account, now_us, before_us, now_us, limits.quarantine_kills, most)
        rows = yield Step(sql.CLAIM, (owner, now_us, *which))
        taken.extend(rows)
        return len(rows)

    urgent_us = now_us + int(limits.urgent_s * 1e6)
    for account, _ in (yield Step(sql.URGENT, (urgent_us,))):
        if len(taken) < n:
            yield from take(str(account), urgent_us, n - len(taken))
    gone = Counter(str(row[3]) for row in taken)
    shares = fair_shares([lane._replace(n_queued=lane.n_queued - gone[lane.account]) for lane in lanes], n - len(taken))
    may_have_more: list[str] = []  # those that gave less than asked have the rest in backoff, or another took it
    for account, share in shares.items():
        if (yield from take(account, _FOREVER_US, share)) == share:
            may_have_more.append(account)
    for account in may_have_more:
        if len(taken) < n:
            yield from take(account, _FOREVER_US, n - len(taken))
    return taken


def fair_shares(lanes: Sequence[Lane], n: int) -> Mapping[str, int]:
    """So many lines for each account that those served least catch up first."""
    heap = [(lane.served, lane.account, lane.n_queued, lane.mean_cost) for lane in lanes if lane.n_queued > 0]
    heapq.heapify(heap)
    shares: Counter[str] = Counter()
    while heap and n > 0:
        served, account, left, cost = heapq.heappop(heap)
        shares[account] += 1
        n -= 1
        if left > 1:
            heapq.heappush(heap, (served + cost, account, left - 1, cost))
    return shares


def _charge(rows: Rows) -> Work[None]:
    n: Counter[tuple[str, str]] = Counter()
    cost: Counter[tuple[str, str]] = Counter()
    for row in rows:
        lane = (str(row[4]), str(row[3]))
        n[lane] += 1
        cost[lane] += int(row[9] or 0)
    for model, account in sorted(n):
        k, c = n[model, account], cost[model, account]
        yield Step(sql.MOVE_LANE, (-k, k, -c, c, model, account))
