"""The choice of the next jobs: those near their deadline, then a fair share per account, by deadline and prefix.

Fair queueing counts tokens: every account has a counter of what it was served per model, and the lowest goes first. An
account that was idle starts at the level of the others.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import sql
from emberline.store import BulkQuery, Query, Rows, Transaction
from emberline.store.database import Row

_NEVER_US = 1 << 62


class Lane(NamedTuple):
    """The queued jobs of one account for one model."""

    account: str
    served: int
    n_queued: int
    mean_cost: int


class ClaimedJob(NamedTuple):
    """A claimed row and its request, which is in `data` or in a blob."""

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
    created_us: int
    data: bytes | None
    blob: str | None
    key_id: str
    kind: str
    traceparent: str


def claim(
    owner: str, model: str, n: int, quarantined: bool, now_us: int, limits: QueueLimits
) -> Transaction[list[ClaimedJob]]:
    rows: Rows = []
    if quarantined:
        rows = yield Query(sql.CLAIM_QUARANTINED, (owner, now_us, model, now_us, now_us, limits.quarantine_kills))
    elif lanes := [_lane(row) for row in (yield Query(sql.LANES, (model,)))]:
        rows = yield from _claim_fairly(owner, model, n, lanes, now_us, limits)
    if not rows:
        return []
    requests = yield BulkQuery(sql.REQUESTS, [row[:2] for row in rows])
    yield Query(sql.HEARTBEAT, (owner, now_us + limits.lease_us, now_us))
    yield from _charge(rows)  # last: other claims wait for these rows until the commit
    request_of = {(row[0], row[1]): row[2:] for row in requests}
    missing = (None, None, "", "", "")  # only this job fails
    claimed = [ClaimedJob(*row, *request_of.get((row[0], row[1]), missing)) for row in rows]  # type: ignore[arg-type]
    return sorted(claimed, key=lambda job: (job.deadline_us, job.prefix, job.batch_id, job.number))


def _lane(row: Row) -> Lane:
    account, served, n_queued, cost = row
    return Lane(str(account), int(served or 0), int(n_queued or 0), max(1, int(cost or 0) // int(n_queued or 1)))


def _claim_fairly(
    owner: str, model: str, n: int, lanes: Sequence[Lane], now_us: int, limits: QueueLimits
) -> Transaction[Rows]:
    claimed: Rows = []

    def take(account: str, before_us: int, limit: int) -> Transaction[int]:
        which = (model, account, now_us, before_us, now_us, limits.quarantine_kills, limit)
        rows = yield Query(sql.CLAIM, (owner, now_us, *which))
        claimed.extend(rows)
        return len(rows)

    urgent_us = now_us + int(limits.urgent_s * 1e6)
    for account, _ in (yield Query(sql.URGENT_ACCOUNTS, (urgent_us,))):
        if len(claimed) < n:
            yield from take(str(account), urgent_us, n - len(claimed))
    urgent = Counter(str(row[3]) for row in claimed)
    rest = [lane._replace(n_queued=lane.n_queued - urgent[lane.account]) for lane in lanes]
    may_have_more: list[str] = []  # one that gave less has the rest in backoff, or another worker claimed it
    for account, share in fair_shares(rest, n - len(claimed)).items():
        if (yield from take(account, _NEVER_US, share)) == share:
            may_have_more.append(account)
    for account in may_have_more:
        if len(claimed) < n:
            yield from take(account, _NEVER_US, n - len(claimed))
    return claimed


def fair_shares(lanes: Sequence[Lane], n: int) -> Mapping[str, int]:
    """Divide `n` jobs among accounts so that those served least catch up first."""
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


def _charge(rows: Rows) -> Transaction[None]:
    n: Counter[tuple[str, str]] = Counter()
    cost: Counter[tuple[str, str]] = Counter()
    for row in rows:
        lane = (str(row[4]), str(row[3]))
        n[lane] += 1
        cost[lane] += int(row[9] or 0)
    for model, account in sorted(n):
        k, c = n[model, account], cost[model, account]
        yield Query(sql.UPDATE_LANE, (-k, k, -c, c, model, account))
