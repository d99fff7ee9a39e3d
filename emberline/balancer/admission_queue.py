"""The bounded admission queue: in which order requests wait for workers, when they are re-routed, refused or expire."""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Set
from itertools import count

from emberline.balancer.ledger import InFlightRequest
from emberline.protocol.errors import DeadlineExceeded, EmberlineError, Overloaded, Unavailable

REROUTE_S = 0.2  # after which a waiting request is routed again: another worker may have become better
MAX_REROUTES = 16  # per dispatch
RATE_S = 10.0  # time constant over which departures are counted
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # bounds of retry-after


class AdmissionQueue:
    """One queue per worker: a waiting request is in the queue of the worker that its last routing decision chose.
    Each queue is ordered by `InFlightRequest.order`."""

    def __init__(self) -> None:
        self._waiting: dict[InFlightRequest, None] = {}
        self._queues: defaultdict[str, set[InFlightRequest]] = defaultdict(set)  # by worker; "": none is connected
        self._reroutes: deque[tuple[float, InFlightRequest]] = deque()  # when each was last routed
        self._expirations: list[tuple[float, int, InFlightRequest]] = []
        self._tie = count()
        self._departures = 0.0  # smoothed count
        self._departed_s = -math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter(self._waiting)

    def waiting_for(self, worker: str) -> Set[InFlightRequest]:
        """Requests in the queue of a worker; "": those that wait for any worker to connect."""
        return self._queues[worker]

    def hold(self, record: InFlightRequest, worker: str, now_s: float) -> None:
        """Put a request into the queue of a worker, whether it is new or comes from another queue."""
        if record not in self._waiting:
            self._waiting[record] = None
            ends = [] if record.deadline_s is None else [record.deadline_s]
            ends += [] if worker else [record.give_up_s]
            if ends:
                heapq.heappush(self._expirations, (min(ends), next(self._tie), record))
        else:
            self._queues[record.waits_for].discard(record)
        record.waits_for, record.checked_s = worker, now_s
        self._queues[worker].add(record)
        self._reroutes.append((now_s, record))

    def remove(self, record: InFlightRequest) -> None:
        if record in self._waiting:
            del self._waiting[record]
            self._queues[record.waits_for].discard(record)

    def departed(self, now_s: float) -> None:
        """A request was dispatched."""
        self._departures = self._departures * self._decay(now_s) + 1
        self._departed_s = now_s

    def first(self, worker: str) -> InFlightRequest | None:
        return min(self._queues[worker], key=_order, default=None)

    def last_below(self, record: InFlightRequest) -> InFlightRequest | None:
        """Which request a full queue sheds for this one: the last of a lower class."""
        last = max(self._waiting, key=_order, default=None)
        return last if last is not None and last.priority > record.priority else None

    def due(self, now_s: float) -> list[InFlightRequest]:
        """Requests that should be routed again."""
        due: list[InFlightRequest] = []
        while self._reroutes and self._reroutes[0][0] + REROUTE_S <= now_s and len(due) < MAX_REROUTES:
            checked_s, record = self._reroutes.popleft()
            if record in self._waiting and record.checked_s == checked_s:
                record.checked_s = now_s
                due.append(record)
        return due

    def expired(self, now_s: float) -> list[tuple[InFlightRequest, EmberlineError]]:
        expired: list[tuple[InFlightRequest, EmberlineError]] = []
        while self._expirations and self._expirations[0][0] <= now_s:
            _, _, record = heapq.heappop(self._expirations)
            if record not in self._waiting:
                continue
            if record.deadline_s is not None and record.deadline_s <= now_s:
                expired.append((record, DeadlineExceeded(f"not started within {record.request.deadline_s:g} s")))
            elif not record.waits_for and record.give_up_s <= now_s:  # else an entry from before its last failover
                error = Unavailable(f"no engine of {record.request.model} is connected", retry_after_s=2)
                expired.append((record, error))
        return expired

    def wake_s(self) -> float | None:
        """When the next request expires or is to be routed again; None while none waits."""
        if not self._waiting:
            return None
        while self._expirations and self._expirations[0][2] not in self._waiting:
            heapq.heappop(self._expirations)
        expires_s = self._expirations[0][0] if self._expirations else math.inf
        reroute_s = self._reroutes[0][0] + REROUTE_S if self._reroutes else math.inf
        return min(expires_s, reroute_s)

    def retry_after_s(self, now_s: float) -> float:
        """In how many seconds the queue will be empty, at the recent rate of departures."""
        rate = self._departures * self._decay(now_s) / RATE_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, len(self) / rate)) if rate > 0 else MAX_RETRY_S

    def overloaded(self, record: InFlightRequest, now_s: float) -> Overloaded:
        after_s = self.retry_after_s(now_s)
        return Overloaded(
            f"{len(self)} requests already wait for {record.request.model}; retry in {after_s:.0f} s",
            retry_after_s=after_s,
        )

    def _decay(self, now_s: float) -> float:
        return math.exp((self._departed_s - now_s) / RATE_S)


def _order(record: InFlightRequest) -> tuple[int, float, float, int]:
    return record.order
