"""The one record of every request in flight: where it waits or runs, what it costs there, when it last progressed.

A request gets its record when it asks for a worker and keeps it until it ends: through queueing, prefill, decode and
failover. Everything that needs to know what is in flight reads it here: routing, health, metrics, job grants.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from emberline.protocol.errors import EmberlineError
from emberline.protocol.request import Priority
from emberline.protocol.route_request import Route, RouteRequest

# Progress is measured by tokens, not by answered probes. With work in flight and no progress for so long,
STALLED_S = 30.0  # a worker without heartbeats is unhealthy: it gets no requests,
ORPHAN_S = 300.0  # and a request that was dispatched counts as load no longer,
ORPHAN_RUNNING_S = 3600.0  # or after its first token, when nothing but its end is reported any more.
CACHED_TOKEN_COST = 0.1  # fair-share cost of a cached prompt token; a computed one costs 1
OUTPUT_TOKEN_COST = 2.0  # of a generated token
PROGRESS_UNIT = 1000  # of a token
_MAX_IDLE_TENANTS = 10_000

Phase = Literal["waiting", "prefill", "decode"]
_numbers = count()


@dataclass(slots=True, eq=False)
class Tenant:
    account: str
    virtual_tokens: float = 0.0  # service received, weighted by the costs above
    n_open: int = 0  # requests that wait or run


class Tenants:
    """Fair queueing by virtual token counters: the tenant with the lowest counter goes first.

    A tenant that returns from idleness must not claim the service it did not use: its counter is lifted to the lowest
    of the active tenants, or to that of the last one that became idle.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._active: set[Tenant] = set()
        self._last_idle = 0.0  # counter of the last tenant that became idle

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def enter(self, account: str) -> Tenant:
        tenant = self._tenants.get(account)
        if tenant is None:
            if len(self._tenants) - len(self._active) > _MAX_IDLE_TENANTS:
                self._tenants = {tenant.account: tenant for tenant in self._active}
            tenant = self._tenants[account] = Tenant(account)
        if tenant.n_open == 0:
            floor = min(other.virtual_tokens for other in self._active) if self._active else self._last_idle
            tenant.virtual_tokens = max(tenant.virtual_tokens, floor)
            self._active.add(tenant)
        tenant.n_open += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        tenant.n_open -= 1
        assert tenant.n_open >= 0
        if tenant.n_open == 0:
            self._active.discard(tenant)
            self._last_idle = max(self._last_idle, tenant.virtual_tokens)


@dataclass(slots=True)
class InFlightLoad:
    """The sum of the records on one worker. A worker that reconnects gets a new one; records from before keep the old.

    Work is in whole microseconds of the cost model, so that sums return to zero.
    """

    pending: dict[str, "InFlightRequest"] = field(default_factory=dict)  # prompts not computed yet, in dispatch order
    prefill_tokens: int = 0  # of the pending prompts, uncached
    batch_prefill_tokens: int = 0  # of them, those of jobs
    work_us: int = 0  # of the pending prompts that are no jobs: jobs are preempted by all others
    job_work_us: int = 0  # of the pending prompts of jobs
    pushes: int = 0  # pending prompts that are computed for another worker
    active: int = 0  # sequences
    batch_active: int = 0  # of them, jobs
    flex_active: int = 0  # of the others, those of the flex class
    decode_tokens: int = 0  # of the prompts of all sequences
    kv_tokens: int = 0  # of the requests that are no jobs: prompts and predicted replies
    reply_tokens: int = 0  # of them, the replies
    decoding: int = 0  # sequences of these requests that have their first token,
    started: int = 0  # and the sum of `LoadReports.progress` when they had
    held: dict[tuple[str, str], int] = field(default_factory=dict)  # slots, by account's own address and account
    shared_slots: int = 0  # of them, those at no account's own address

    @property
    def total(self) -> int:
        """Sequences, and prompts for other workers."""
        return self.active + self.pushes

    @property
    def sync_active(self) -> int:
        return self.active - self.batch_active

    def hold(self, request: RouteRequest, n: int) -> None:
        """Count `n` more slots, or fewer if negative, for the account of the request."""
        holder = request.slots, request.account
        if left := self.held.get(holder, 0) + n:
            self.held[holder] = left
        else:
            del self.held[holder]
        self.shared_slots += 0 if request.slots else n

    def growth_tokens(self, progress: int) -> int:
        """By which the replies will still grow. At least half of what was predicted: lengths are skewed, and a reply
        that is longer than predicted may go on for as long again."""
        generated = (self.decoding * progress - self.started) // PROGRESS_UNIT
        return self.reply_tokens - min(generated, self.reply_tokens // 2)


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request's record. `dispatch` hands it out once per admission: with a route, or with an error."""

    request: RouteRequest
    tenant: Tenant | None  # None: a job, which the durable queue has ordered already
    arrived_s: float
    pool: str = ""  # of workers, and the queue in which it waits; empty: its model's
    number: int = field(default_factory=_numbers.__next__)
    admitted: bool = False  # dispatched at least once: from then on only its end removes the record
    progress_s: float = 0.0  # when it was last seen to progress
    # While it waits:
    deadline_s: float | None = None
    give_up_s: float = 0.0  # while no worker is connected
    rank_s: float | None = None  # arrival plus the seconds of its prompt: until then a shorter one may pass
    checked_s: float = 0.0  # when it was last routed
    waits_for: str = ""  # the worker in whose queue it is; empty: any
    # Once it is decided:
    route: Route | None = None
    error: EmberlineError | None = None
    # While it is on workers:
    decode: InFlightLoad | None = None  # the loads that it is charged to; None while it is on no worker
    prefill: InFlightLoad | None = None  # the same as `decode` where that worker computes the prompt
    uncached_tokens: int = 0  # of the prompt
    total_tokens: int = 0
    work_us: int = 0  # of its prefill
    n_slots: int = 0  # that its account holds for it
    fetch_s: float = 0.0  # expected, of a part of the prompt from a tier
    reply_tokens: int = 0  # predicted, of all its sequences
    started: int | None = None  # what it adds to `InFlightLoad.started`
    dispatched_s: float = 0.0
    decode_share_s: float = 0.0  # `Worker.share_s` of its workers when it was dispatched
    prefill_share_s: float = 0.0
    device_s: float = 0.0  # its part of the time of workers that it has left
    first_token_s: float | None = None
    mixed: bool = False  # jobs ran on the decode worker when this was dispatched
    priority: Priority = field(init=False)
    is_job: bool = field(init=False)

    def __post_init__(self) -> None:
        self.priority = Priority[self.request.priority.upper()]
        self.is_job = self.tenant is None
        self.pool = self.pool or self.request.model
        self.progress_s = self.checked_s = self.arrived_s
        if self.request.deadline_s is not None:
            self.deadline_s = self.arrived_s + self.request.deadline_s

    def requeue(self, request: RouteRequest, now_s: float) -> None:
        """Ask for workers again, after a failure."""
        self.request = request
        self.progress_s = self.checked_s = now_s
        self.deadline_s = None if request.deadline_s is None else now_s + request.deadline_s
        self.rank_s, self.waits_for, self.route, self.error = None, "", None, None

    @property
    def phase(self) -> Phase:
        if self.decode is None:
            return "waiting"
        return "prefill" if self.first_token_s is None else "decode"

    @property
    def order(self) -> tuple[int, float, float, int]:
        """Among waiting requests: class, then the tenant that has had the least, then arrival and prompt length."""
        assert self.tenant is not None, "jobs do not wait here"
        return self.priority, self.tenant.virtual_tokens, self.rank_s or self.arrived_s, self.number

    def n_on(self, load: InFlightLoad) -> int:
        """Sequences of the request on the worker with this load."""
        return self.request.n if self.decode is load else 1

    def charge_tenant(self, virtual_tokens: float) -> None:
        if self.tenant is not None:
            self.tenant.virtual_tokens += virtual_tokens


class InFlightLedger:
    """All records by request id, and the loads of the workers as the sums over them."""

    def __init__(self) -> None:
        self._records: dict[str, InFlightRequest] = {}
        self.get = self._records.get  # finds the record of a request id

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter(self._records.values())

    def add(self, record: InFlightRequest) -> None:
        assert record.request.id not in self._records, f"{record.request.id} is in flight already"
        self._records[record.request.id] = record

    def remove(self, record: InFlightRequest) -> None:
        assert record.decode is None, "release it first"
        del self._records[record.request.id]

    def charge(self, record: InFlightRequest, decode: InFlightLoad, prefill: InFlightLoad, now_s: float) -> None:
        """Add a dispatched request to the loads of its workers."""
        assert record.decode is None, f"{record.request.id} is charged already"
        n = record.request.n
        record.decode, record.prefill = decode, prefill
        record.admitted, record.first_token_s, record.started = True, None, None
        record.dispatched_s = record.progress_s = now_s
        record.mixed = record.is_job or decode.batch_active > 0
        prefill.pending[record.request.id] = record
        prefill.prefill_tokens += record.uncached_tokens
        prefill.batch_prefill_tokens += record.uncached_tokens if record.is_job else 0
        prefill.work_us += 0 if record.is_job else record.work_us
        prefill.job_work_us += record.work_us if record.is_job else 0
        prefill.pushes += prefill is not decode
        decode.active += n
        decode.batch_active += n if record.is_job else 0
        decode.flex_active += n if record.priority is Priority.FLEX else 0
        decode.decode_tokens += record.total_tokens * n
        if not record.is_job:
            decode.kv_tokens += record.total_tokens + record.reply_tokens
            decode.reply_tokens += record.reply_tokens
            decode.hold(record.request, record.n_slots)

    def prefilled(self, record: InFlightRequest) -> bool:
        """The prompt is computed. False: that was known."""
        prefill = record.prefill
        if prefill is None or prefill.pending.pop(record.request.id, None) is None:
            return False
        prefill.prefill_tokens -= record.uncached_tokens
        prefill.batch_prefill_tokens -= record.uncached_tokens if record.is_job else 0
        prefill.work_us -= 0 if record.is_job else record.work_us
        prefill.job_work_us -= record.work_us if record.is_job else 0
        prefill.pushes -= prefill is not record.decode
        return True

    def first_token(self, record: InFlightRequest, progress: int) -> None:
        """Count the request as decoding. `progress` is `LoadReports.progress` of its decode worker."""
        if record.decode is not None and record.started is None and not record.is_job:
            record.started = record.request.n * progress
            record.decode.decoding += record.request.n
            record.decode.started += record.started

    def release(self, record: InFlightRequest) -> None:
        """Remove the request from the loads of its workers."""
        self.prefilled(record)
        decode, n = record.decode, record.request.n
        assert decode is not None
        decode.active -= n
        decode.batch_active -= n if record.is_job else 0
        decode.flex_active -= n if record.priority is Priority.FLEX else 0
        decode.decode_tokens -= record.total_tokens * n
        if not record.is_job:
            decode.kv_tokens -= record.total_tokens + record.reply_tokens
            decode.reply_tokens -= record.reply_tokens
            decode.hold(record.request, -record.n_slots)
        if record.started is not None:
            decode.decoding -= n
            decode.started -= record.started
        record.decode = record.prefill = None

    def orphans(self, now_s: float) -> list[InFlightRequest]:
        """Requests on workers without progress for too long; those that wait are bounded by their own deadlines."""
        return [
            record
            for record in self._records.values()
            if record.decode is not None
            and now_s - record.progress_s > (ORPHAN_S if record.first_token_s is None else ORPHAN_RUNNING_S)
        ]
