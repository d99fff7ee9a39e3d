"""The bounded queue in front of the endpoints: who waits for which, who goes next, who is refused and until when."""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from itertools import count

from emberline.balancer.route_request import Route, RouteRequest
from emberline.balancer.worker import Worker
from emberline.protocol.errors import DeadlineExceeded, EmberlineError, Overloaded, Unavailable
from emberline.protocol.request import Priority

CACHED = 0.1  # of a cached prompt token, against one that is computed
OUTPUT = 2.0  # of a token drawn
_MOST_IDLE = 10_000  # accounts remembered although they have nothing open


class Tenant:
    __slots__ = ("account", "counter", "n_open")

    def __init__(self, account: str) -> None:
        self.account = account
        self.counter = 0.0  # virtual tokens
        self.n_open = 0  # requests that wait or run


class Tenants:
    """The one with the lowest counter goes first. Who comes back from idleness brings no claim on the time it was away:
    its counter is lifted to the lowest of those who are there, or to that of the last who left."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._there: set[Tenant] = set()
        self._last = 0.0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def enter(self, account: str) -> Tenant:
        tenant = self._tenants.get(account)
        if tenant is None:
            self._trim()
            tenant = self._tenants[account] = Tenant(account)
        if tenant.n_open == 0:
            floor = min((other.counter for other in self._there), default=self._last)
            tenant.counter = max(tenant.counter, floor)
            self._there.add(tenant)
        tenant.n_open += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        tenant.n_open -= 1
        assert tenant.n_open >= 0
        if tenant.n_open == 0:
            self._there.discard(tenant)
            self._last = max(self._last, tenant.counter)

    def _trim(self) -> None:
        if len(self._tenants) - len(self._there) > _MOST_IDLE:
            self._tenants = {tenant.account: tenant for tenant in self._there}


def prompt_cost(uncached_tokens: int, cached_tokens: int) -> float:
    return uncached_tokens + CACHED * cached_tokens


_numbers = count()


class QueuedRequest:
    """Handed out once by `dispatch`: with a route, or with the error that ends it."""

    __slots__ = (
        "arrived_s",
        "ask",
        "checked_s",
        "deadline_s",
        "error",
        "give_up_s",
        "held_on",
        "number",
        "priority",
        "rank_s",
        "route",
        "tenant",
        "waiting",
    )

    def __init__(self, ask: RouteRequest, tenant: Tenant, arrived_s: float, now_s: float) -> None:
        self.number = next(_numbers)
        self.ask = ask
        self.tenant = tenant
        self.priority = Priority[ask.priority.upper()]
        self.arrived_s = arrived_s
        self.deadline_s = None if ask.deadline_s is None else now_s + ask.deadline_s
        self.give_up_s = now_s + ask.wait_s  # where no endpoint is connected
        self.rank_s: float | None = (
            None  # its arrival, plus the seconds of its prompt: for so long a shorter one passes
        )
        self.held_on: Worker | None = None  # the endpoint it waits for; None while it waits for any at all
        self.waiting = True
        self.checked_s = now_s
        self.route: Route | None = None
        self.error: EmberlineError | None = None

    @property
    def order(self) -> tuple[int, float, float, int]:
        return self.priority, self.tenant.counter, self.rank_s or self.arrived_s, self.number


RECHECK_S = 0.2  # after so long, one who waits for an endpoint looks whether another would be better by now
MOST_RECHECKS = 16  # in one go
RATE_S = 10.0  # over which departures are counted
SOONEST_S, LATEST_S = 1.0, 60.0  # to be told to come back


class Admission:
    """Waiting tickets stand at the endpoint they wait for. Order: class, then the tenant that has had the least, then
    arrival plus the seconds its prompt takes."""

    def __init__(self) -> None:
        self._anywhere: set[QueuedRequest] = set()  # while no endpoint is there
        self._waiting: dict[QueuedRequest, None] = {}
        self._rechecks: deque[tuple[float, QueuedRequest]] = deque()
        self._ends: list[tuple[float, int, QueuedRequest]] = []  # when a ticket gives up
        self._tie = count()
        self._departed = 0.0  # smoothed count
        self._departed_s = -math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._waiting)

    def hold(self, ticket: QueuedRequest, worker: Worker | None, now_s: float) -> None:
        """Let it stand at the endpoint, whether it is new or stood elsewhere before."""
        if ticket not in self._waiting:
            self._waiting[ticket] = None
            ends = [] if ticket.deadline_s is None else [ticket.deadline_s]
            ends += [ticket.give_up_s] if worker is None else []
            if ends:
                heapq.heappush(self._ends, (min(ends), next(self._tie), ticket))
        else:
            self._at(ticket).discard(ticket)
        ticket.held_on, ticket.checked_s = worker, now_s
        self._at(ticket).add(ticket)
        self._rechecks.append((now_s, ticket))

    def remove(self, ticket: QueuedRequest) -> None:
        if ticket in self._waiting:
            del self._waiting[ticket]
            self._at(ticket).discard(ticket)
            ticket.held_on = None

    def depart(self, now_s: float) -> None:
        """One got its place."""
        self._departed = self._departed * self._faded(now_s) + 1
        self._departed_s = now_s

    def first(self, worker: Worker | None) -> QueuedRequest | None:
        return min(worker.held if worker is not None else self._anywhere, key=_order, default=None)

    def last_below(self, ticket: QueuedRequest) -> QueuedRequest | None:
        """Who makes room in a full queue: the last of a worse class."""
        last = max(self._waiting, key=_order, default=None)
        return last if last is not None and last.priority > ticket.priority else None

    def due(self, now_s: float) -> list[QueuedRequest]:
        """Tickets that should look around again."""
        due: list[QueuedRequest] = []
        while self._rechecks and self._rechecks[0][0] + RECHECK_S <= now_s and len(due) < MOST_RECHECKS:
            checked_s, ticket = self._rechecks.popleft()
            if ticket in self._waiting and ticket.checked_s == checked_s:
                ticket.checked_s = now_s
                due.append(ticket)
        return due

    def expired(self, now_s: float) -> list[tuple[QueuedRequest, EmberlineError]]:
        over: list[tuple[QueuedRequest, EmberlineError]] = []
        while self._ends and self._ends[0][0] <= now_s:
            _, _, ticket = heapq.heappop(self._ends)
            if ticket not in self._waiting:
                continue
            if ticket.deadline_s is not None and ticket.deadline_s <= now_s:
                over.append((ticket, DeadlineExceeded(f"not started within {ticket.ask.deadline_s:g} s")))
            elif ticket.held_on is None:
                error = Unavailable(f"no engine of {ticket.ask.model} is connected", retry_after_s=2)
                over.append((ticket, error))
        return over

    def wake_s(self) -> float | None:
        if not self._waiting:
            return None
        while self._ends and self._ends[0][2] not in self._waiting:
            heapq.heappop(self._ends)
        ends_s = self._ends[0][0] if self._ends else math.inf
        recheck_s = self._rechecks[0][0] + RECHECK_S if self._rechecks else math.inf
        return min(ends_s, recheck_s)

    def retry_after_s(self, now_s: float) -> float:
        """When those who wait now will be gone, at the rate at which they have been going."""
        rate = self._departed * self._faded(now_s) / RATE_S
        return min(LATEST_S, max(SOONEST_S, len(self) / rate)) if rate > 0 else LATEST_S

    def overloaded(self, ticket: QueuedRequest, now_s: float) -> Overloaded:
        after_s = self.retry_after_s(now_s)
        return Overloaded(
            f"{len(self)} requests already wait for {ticket.ask.model}; come back in {after_s:.0f} s",
            retry_after_s=after_s,
        )

    def _faded(self, now_s: float) -> float:
        return math.exp((self._departed_s - now_s) / RATE_S)

    def _at(self, ticket: QueuedRequest) -> set[QueuedRequest]:
        return self._anywhere if ticket.held_on is None else ticket.held_on.held


def _order(ticket: QueuedRequest) -> tuple[int, float, float, int]:
    return ticket.order
