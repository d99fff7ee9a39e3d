"""The bounded admission queue: in which order requests wait for workers, when they are re-routed, refused or expire."""

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Set
from itertools import chain, count

from emberline.balancer.ledger import InFlightRequest
from emberline.protocol.errors import DeadlineExceeded, EmberlineError, Overloaded, Unavailable

WORKER_WAIT_S = 60.0  # for a worker to connect again, of a request that lost its last one while it waited
REROUTE_S = 0.2  # after which a waiting request is routed again: another worker may have become better
MAX_REROUTES = 16  # per dispatch
RATE_S = 10.0  # time constant over which departures are counted
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # bounds of retry-after


class PoolQueue:
    """The waiting requests of one pool of workers (a model's, or a provider's), and how fast they leave: limits and
    retry-after are of the pool alone."""

    __slots__ = ("_departed_s", "_departures", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[InFlightRequest, None] = {}
        self._departures = 0.0  # smoothed count
        self._departed_s = -math.inf

    def departed(self, now_s: float) -> None:
        self._departures = self._departures * math.exp((self._departed_s - now_s) / RATE_S) + 1
        self._departed_s = now_s

    def retry_after_s(self, now_s: float) -> float:
        """Estimate the seconds until the queue is empty from the recent rate of departures."""
        rate = self._departures * math.exp((self._departed_s - now_s) / RATE_S) / RATE_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, len(self.waiting) / rate)) if rate > 0 else MAX_RETRY_S


class AdmissionQueue:
    """One queue per worker: a waiting request is in the queue of the worker that its last routing decision chose.
    Each queue is ordered by `InFlightRequest.order`."""

    def __init__(self) -> None:
        self._pools: defaultdict[str, PoolQueue] = defaultdict(PoolQueue)
        self._queues: dict[str, set[InFlightRequest]] = {}  # by worker, not empty; "": none is connected
        self._reroutes: deque[tuple[float, InFlightRequest]] = deque()  # when each was last routed
        self._expirations: list[tuple[float, int, InFlightRequest]] = []
        self._tie = count()
        self.n_waiting = 0  # requests, in all queues; changed here alone

    def __len__(self) -> int:
        return self.n_waiting

    def __iter__(self) -> Iterator[InFlightRequest]:
        return chain.from_iterable(queue.waiting for queue in self._pools.values())

    def n_of(self, pool: str) -> int:
        """Number of requests that wait for the pool."""
        return len(self._pools[pool].waiting) if pool in self._pools else 0

    def waiting_of(self, pool: str) -> list[InFlightRequest]:
        return list(self._pools[pool].waiting) if pool in self._pools else []

    def n_ahead(self, record: InFlightRequest) -> int | None:
        """Number of requests for the same pool that wait before this one. Returns None if this one does not wait."""
        waiting = self.waiting_of(record.pool)
        return sum(other.order < record.order for other in waiting) if record in waiting else None

    def waiting_for(self, worker: str) -> Set[InFlightRequest]:
        """Requests in the queue of a worker; "": those that wait for any worker to connect."""
        return self._queues.get(worker, frozenset())

    def hold(self, record: InFlightRequest, worker: str, now_s: float) -> None:
        """Put a request into the queue of a worker, whether it is new or comes from another queue."""
        was_waiting = self._is_waiting(record)
        if not was_waiting:
            self._pools[record.pool].waiting[record] = None
            self.n_waiting += 1
            if record.deadline_s is not None:
                self._expire_at(record.deadline_s, record)
        else:
            self._leave_queue(record)
        if not worker and (not was_waiting or record.waits_for):
            wait_s = max(record.request.wait_s, WORKER_WAIT_S) if was_waiting else record.request.wait_s
            record.give_up_s = now_s + wait_s
            self._expire_at(record.give_up_s, record)
        record.waits_for, record.checked_s = worker, now_s
        self._queues.setdefault(worker, set()).add(record)
        self._reroutes.append((now_s, record))

    def remove(self, record: InFlightRequest) -> None:
        if self._is_waiting(record):
            del self._pools[record.pool].waiting[record]
            self.n_waiting -= 1
            self._leave_queue(record)

    def forget(self, pool: str) -> None:
        """Remove what is kept of a pool that has lost its last worker, unless requests wait for it."""
        if not self.n_of(pool):
            self._pools.pop(pool, None)

    def departed(self, record: InFlightRequest, now_s: float) -> None:
        """A request was dispatched."""
        self._pools[record.pool].departed(now_s)

    def first(self, worker: str, only: Callable[[InFlightRequest], bool] | None = None) -> InFlightRequest | None:
        """The first request in the queue of a worker, of all or of those that `only` accepts."""
        queue = self.waiting_for(worker)
        return min(queue if only is None else filter(only, queue), key=_order, default=None)

    def last_below(self, record: InFlightRequest) -> InFlightRequest | None:
        """Return the request that a full queue sheds for this one, never one of a better class: the last of a lower
        class, or else the last, in the same class, of the account that has the most requests there. Returns None if
        that is this one's account: so no account can fill the queue for the others."""
        waiting = self._pools[record.pool].waiting
        last = max(waiting, key=_order, default=None)
        if last is None or last.priority > record.priority:
            return last
        peers = [other for other in waiting if other.priority == record.priority]
        n_waiting = Counter(other.request.account for other in peers)
        account = max(n_waiting, key=n_waiting.__getitem__)
        if n_waiting[account] <= n_waiting[record.request.account]:
            return None
        return max((other for other in peers if other.request.account == account), key=_order)

    def due(self, now_s: float) -> list[InFlightRequest]:
        """Requests that should be routed again."""
        due: list[InFlightRequest] = []
        while self._reroutes and self._reroutes[0][0] + REROUTE_S <= now_s and len(due) < MAX_REROUTES:
            checked_s, record = self._reroutes.popleft()
            if self._is_waiting(record) and record.checked_s == checked_s:
                record.checked_s = now_s
                due.append(record)
        return due

    def expired(self, now_s: float) -> list[tuple[InFlightRequest, EmberlineError]]:
        expired: list[tuple[InFlightRequest, EmberlineError]] = []
        while self._expirations and self._expirations[0][0] <= now_s:
            _, _, record = heapq.heappop(self._expirations)
            if not self._is_waiting(record):
                continue
            if record.deadline_s is not None and record.deadline_s <= now_s:
                expired.append((record, DeadlineExceeded(f"not started within {record.request.deadline_s:g} s")))
            elif not record.waits_for and record.give_up_s <= now_s:  # else a worker has connected since
                expired.append((record, no_worker(record.request.model)))
        return expired

    def wake_s(self) -> float | None:
        """When the next request expires or is to be routed again. Returns None if no request waits."""
        if not self.n_waiting:
            return None
        while self._expirations and not self._is_waiting(self._expirations[0][2]):
            heapq.heappop(self._expirations)
        expires_s = self._expirations[0][0] if self._expirations else math.inf
        reroute_s = self._reroutes[0][0] + REROUTE_S if self._reroutes else math.inf
        return min(expires_s, reroute_s)

    def retry_after_s(self, pool: str, now_s: float) -> float:
        return self._pools[pool].retry_after_s(now_s)

    def overloaded(self, record: InFlightRequest, now_s: float) -> Overloaded:
        """The error of a waiting request that is one too many."""
        n_others, after_s = self.n_of(record.pool) - 1, self.retry_after_s(record.pool, now_s)
        message = f"{n_others} requests already wait for {record.request.model}; retry in {after_s:.0f} s"
        return Overloaded(message, retry_after_s=after_s)

    def _leave_queue(self, record: InFlightRequest) -> None:
        """Remove a request from its worker's queue, and the queue with its last request."""
        queue = self._queues[record.waits_for]
        queue.discard(record)
        if not queue:
            del self._queues[record.waits_for]

    def _is_waiting(self, record: InFlightRequest) -> bool:
        return record in self._pools[record.pool].waiting

    def _expire_at(self, at_s: float, record: InFlightRequest) -> None:
        heapq.heappush(self._expirations, (at_s, next(self._tie), record))


def no_worker(model: str) -> Unavailable:
    return Unavailable(f"no engine of {model} takes requests; it may be starting again, or drained", retry_after_s=2)


def _order(record: InFlightRequest) -> tuple[int, float, float, int]:
    return record.order
