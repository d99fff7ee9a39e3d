"""One worker as the balancer sees it: its load, in flight and as reported, its speed, its cache and its health."""

import math
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from emberline.balancer.circuit_breaker import CircuitBreaker
from emberline.balancer.cost_model import Cost, SpeedEstimate
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.ledger import STALLED_S, InFlightLoad, InFlightRequest
from emberline.balancer.load_reports import LoadReports
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import EngineLoad
from emberline.protocol.route_request import RouteRequest

RECENT_S = 120.0  # time constant over which prompts count as recent
BUSY_S = 600.0  # time constant of the share of busy time
DEFAULT_KV_TOKENS = 1 << 20  # where a worker does not say
ACCOUNT_SHARE = 3  # slots of a provider that an account may hold for each one that stays free
SPEED_FADES_S = 30.0  # without a first token, after which its measured speed counts less and less


class FetchCost(NamedTuple):
    """Cost of fetching KV from a tier below the device: the tier's slot in the prefix index, and seconds per token."""

    slot_bits: int
    token_s: float


KV_FULL = 0.95  # of the KV tokens: more sequences would evict each other
_MASK64 = (1 << 64) - 1


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as plain data, for health, `ps` and the metrics."""

    name: str
    role: str
    models: tuple[str, ...]
    state: str  # ready | down | draining | stalled | open | half_open (the last two are the circuit breaker's)
    problem: str  # why, in words
    stalled: bool
    healthy: bool  # connected, and tokens move
    load: EngineLoad  # as last reported
    prefill_tokens: int  # uncached, in flight
    decode_tokens: int
    in_flight: int  # sequences of ours, and prompts that are computed for other workers
    active: int  # of them, the sequences
    batch_active: int
    foreign_active: int  # sequences of other cores that are not preemptible
    waiting: int  # requests in its queue
    wait_s: float  # until a prompt sent now would be started
    rejected_reports: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All workers and the admission queue as plain data, for health, `ps` and the metrics."""

    workers: list[WorkerSnapshot]
    waiting: dict[str, int]  # requests in the admission queue, by class
    dispatched: int  # requests on workers
    index_blocks: int


@dataclass(slots=True, eq=False)
class Worker:
    endpoint: Endpoint
    capacity: Capacity
    cost: Cost
    slot: int  # in the prefix index
    old_slot: int | None = None  # of a worker without KV events: what it was given some minutes ago
    connected: bool = True
    drained: bool = False  # an operator has asked for it; stays so over reconnects
    stalled: bool = False  # as of the last health check
    ejected: bool = False  # it fails requests, and enough others do not; decided by its pool
    problem: str = ""  # why it is not connected
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    in_flight: InFlightLoad = field(default_factory=InFlightLoad)
    reports: LoadReports = field(default_factory=LoadReports)
    load: EngineLoad = field(default_factory=EngineLoad)  # the newest report, accepted or not
    progress_s: float | None = None  # when `load` was computed; None: this worker does not report
    busy_since_s: float = 0.0  # when work last arrived at the idle worker
    last_prefill_s: float = 0.0  # when a prompt was last finished
    prefill_speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    decode_speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    mean_request_s: float = 1.0  # smoothed
    _share_s: float = 0.0  # see `share_s`
    _share_at_s: float = 0.0
    fetch_costs: tuple[FetchCost, ...] = ()  # of its tiers, the pool included, as far as they work
    _recent_tokens: float = 0.0
    _recent_at_s: float = 0.0
    _busy_share: float = 0.0  # at the last report
    name: str = field(init=False)
    hash64: int = field(init=False)
    slot_bits: int = field(init=False)  # of `slot` and `old_slot`

    def __post_init__(self) -> None:
        self.name = self.endpoint.name
        self.hash64 = int.from_bytes(blake2b(self.name.encode(), digest_size=8).digest(), "little")
        self.set_slots(self.slot, self.old_slot)

    def set_slots(self, slot: int, old_slot: int | None) -> None:
        self.slot, self.old_slot = slot, old_slot
        self.slot_bits = 1 << slot | (0 if old_slot is None else 1 << old_slot)

    def share_s(self, now_s: float) -> float:
        """The part that a sequence would have had of this worker's time until now, had it been there all along: every
        second goes in equal parts to the sequences that are there. Called before their number changes."""
        if n := self.in_flight.active + self.in_flight.pushes:
            self._share_s += (now_s - self._share_at_s) / n
        self._share_at_s = now_s
        return self._share_s

    # --- health ------------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """True if the worker only finishes what it has, because an operator drains it or because it shuts down."""
        return self.drained or self.load.draining

    @property
    def available(self) -> bool:
        """True if the worker accepts requests, even if it is slow."""
        return self.connected and not self.draining and not self.stalled

    @property
    def takes_granted(self) -> bool:
        """True if a job that was granted room on this worker may still go there, even if an operator has drained it
        since."""
        return self.connected and not self.load.draining and not self.stalled

    @property
    def ready(self) -> bool:
        return self.available and not self.ejected

    def is_stalled(self, now_s: float) -> bool:
        """Work is in flight there, and no token has moved for too long. Never of a worker that does not report, nor of
        one that sends heartbeats: its connection is dropped when it hangs."""
        if self.progress_s is None or self.capacity.heartbeats or not (self.in_flight.active or self.in_flight.pending):
            return False
        return now_s - max(self.busy_since_s, self.last_prefill_s, self.progress_s) > STALLED_S

    def is_ready(self, now_s: float) -> bool:
        return self.ready and not self.is_stalled(now_s)

    def check_health(self, now_s: float) -> bool:
        """Update what changes with time alone. Returns True if it changed, so that the pool must decide anew."""
        before = self.available, self.breaker.allows
        self.breaker.check(now_s)
        self.stalled = self.is_stalled(now_s)
        return (self.available, self.breaker.allows) != before

    def reported(self, load: EngineLoad, at_s: float) -> None:
        if self.progress_s is None or at_s >= self.progress_s:
            self.load, self.progress_s = load, at_s

    # --- load --------------------------------------------------------------------------------------------------------

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the worker has computed the prompts that it holds."""
        in_flight, reports = self.in_flight, self.reports
        if not in_flight.work_us and not reports.foreign_tokens:
            return 0.0
        own_s = in_flight.work_us * 1e-6
        if reports.done_tokens and in_flight.prefill_tokens:
            own_s *= max(0.0, 1 - reports.done_tokens / in_flight.prefill_tokens)
        scale = self.prefill_speed.scale
        return own_s * scale + reports.foreign_s(now_s, scale * self.cost.token_s)

    def active(self, now_s: float, passes_flex: bool = False) -> int:
        """Sequences that are not preemptible: ours, and those of other cores. `passes_flex`: flex ones are, too."""
        in_flight = self.in_flight
        n_own = in_flight.active - in_flight.batch_active - in_flight.flex_active * passes_flex
        return n_own + self.reports.foreign_active(now_s)

    def slot_wait_s(self, n: int, kv_tokens: int, now_s: float, passes_flex: bool = False) -> float:
        """Return the seconds until `n` more sequences, which together need `kv_tokens` of KV, can run."""
        capacity = self.capacity
        over = self.active(now_s, passes_flex) + n - capacity.max_running
        if over <= 0 and self.has_memory(kv_tokens, now_s, passes_flex):
            return 0.0
        return self.mean_request_s * max(1, over) / capacity.max_running

    def fits(self, n: int, kv_tokens: int, now_s: float, passes_flex: bool = False, spare: int = 0) -> bool:
        """True if `n` more sequences can run, by count and by memory. `spare` is the number of sequences allowed to
        wait in the worker. A worker with nothing but preemptible sequences always takes one, since no other may ever
        have more room."""
        active = self.active(now_s, passes_flex)
        if active == 0:
            return True
        return active + n <= self.capacity.max_running + spare and self.has_memory(kv_tokens, now_s, passes_flex)

    def n_slots(self, request: RouteRequest) -> int:
        """Number of slots that a request takes: one for each sequence. Of a provider's, one request takes no more than
        an account may hold, so that one with more sequences runs, and leaves room for others."""
        capacity = self.capacity
        if not capacity.shared:
            return request.n
        most = capacity.max_running
        return min(request.n, most if request.slots else max(1, most * ACCOUNT_SHARE // (ACCOUNT_SHARE + 1)))

    def has_slot(self, request: RouteRequest) -> bool:
        """True if the request may have slots of a provider. Each address of an account's own has as many slots as the
        provider. Of the provider's, an account that holds some gets more only while others can still have a share:
        it never holds more than `ACCOUNT_SHARE` times as many as stay free."""
        in_flight, n = self.in_flight, self.n_slots(request)
        own = in_flight.held.get((request.slots, request.account), 0)
        if request.slots:
            return own + n <= self.capacity.max_running
        free = self.capacity.max_running - in_flight.shared_slots
        return free >= n if own == 0 else own + n <= ACCOUNT_SHARE * (free - n)

    def may_dispatch(self, record: InFlightRequest) -> bool:
        """True unless the account of a waiting request holds its share of this worker's slots: others may pass it."""
        return not self.capacity.shared or self.has_slot(record.request)

    def has_memory(self, kv_tokens: int, now_s: float, passes_flex: bool = False) -> bool:
        """True if `kv_tokens` more tokens of KV will fit after the growth of the running sequences. The worker's own
        report counts, since sequences may share most of their KV; without a report, this core's own sum does."""
        in_flight, reports, load = self.in_flight, self.reports, self.reports.load
        if not load.kv_total_blocks or not reports.is_fresh(now_s):
            return not self.capacity.kv_tokens or in_flight.kv_tokens + kv_tokens <= KV_FULL * self.capacity.kv_tokens
        held: float = load.kv_used_blocks * BLOCK_TOKENS
        if n_preemptible := load.running_batch + in_flight.flex_active * passes_flex:
            held *= 1 - min(1.0, n_preemptible / max(1, load.running))
        growth = in_flight.growth_tokens(reports.progress)
        growth_of_all = growth * self.active(now_s, passes_flex) / max(1, in_flight.sync_active)
        pending = max(0, in_flight.prefill_tokens - in_flight.batch_prefill_tokens - reports.done_tokens)
        needed = held + growth_of_all + pending + reports.foreign_tokens + kv_tokens
        return needed <= KV_FULL * load.kv_total_blocks * BLOCK_TOKENS

    @property
    def decode_load_s(self) -> float:
        """By which the sequences that are there lengthen a step."""
        in_flight, cost = self.in_flight, self.cost
        return (cost.stream_s * in_flight.active + cost.context_s * in_flight.decode_tokens) * self.decode_speed.scale

    def has_queue(self, now_s: float) -> bool:
        """True if a request would wait behind others in the worker, which is possible even below its `max_running`."""
        load = self.reports.load
        fresh = self.reports.foreign_active(now_s) or self.in_flight.sync_active
        return bool(fresh) and load.waiting > load.waiting_batch

    # --- speed and cache ---------------------------------------------------------------------------------------------

    def fade_speed(self, prefill_scale: float, decode_scale: float, now_s: float) -> None:
        """While nothing is measured, the worker is taken to be as fast as the others of its model."""
        if self.prefill_speed.n == 0 or now_s - self.last_prefill_s > SPEED_FADES_S:
            self.prefill_speed.fade(prefill_scale)
            self.decode_speed.fade(decode_scale)

    def measure(self, before: EngineLoad, load: EngineLoad, elapsed_s: float) -> None:
        """Update the busy share and, if the worker did steps in between, the step time from two successive reports."""
        self._busy_share = _faded(self._busy_share, before.running > 0, elapsed_s)
        n_steps = load.steps - before.steps
        if n_steps > 0 and 0 < elapsed_s < 2.0 and before.running and load.running:
            tokens = load.kv_used_blocks * BLOCK_TOKENS
            self.decode_speed.add(elapsed_s / n_steps, self.cost.decode_step_s(load.running, tokens))

    def busy_share(self, now_s: float) -> float:
        """Return the share of recent time in which the worker ran sequences of any core."""
        return _faded(self._busy_share, self.reports.load.running > 0, now_s - self.reports.at_s)

    def dispatched(self, tokens: int, now_s: float) -> None:
        """A prompt of so many tokens is on its way."""
        if self.in_flight.active == 0 and not self.in_flight.pending:
            self.busy_since_s = now_s
        self._recent_tokens = self._recent(now_s) + tokens
        self._recent_at_s = now_s

    def cache_pressure(self, now_s: float) -> float:
        """Recent prompt tokens, cached or not, over the KV tokens: how many conversations share this cache."""
        return self._recent(now_s) / (self.capacity.kv_tokens or DEFAULT_KV_TOKENS)

    def _recent(self, now_s: float) -> float:
        return self._recent_tokens * math.exp((self._recent_at_s - now_s) / RECENT_S)

    def rendezvous_weight(self, session64: int) -> int:
        """Rendezvous hashing: every core finds the same order of workers for a session."""
        mixed = ((session64 ^ self.hash64) * 0x9E3779B97F4A7C15) & _MASK64
        mixed ^= mixed >> 32
        return (mixed * 0xD6E8FEB86659FD93) & _MASK64

    def snapshot(self, n_waiting: int, now_s: float) -> WorkerSnapshot:
        stalled = self.is_stalled(now_s)
        if not self.connected:
            state = "down"
        elif self.draining or stalled:
            state = "draining" if self.draining else "stalled"
        else:
            state = "ready" if self.breaker.state == "closed" else self.breaker.state
        return WorkerSnapshot(
            name=self.name,
            role=self.endpoint.role,
            models=self.endpoint.models,
            state=state,
            problem=self.problem or (self.reports.problem if self.reports.rejecting(now_s) else ""),
            stalled=stalled,
            healthy=self.connected and not stalled,
            load=self.load,
            prefill_tokens=self.in_flight.prefill_tokens,
            decode_tokens=self.in_flight.decode_tokens,
            in_flight=self.in_flight.total,
            active=self.in_flight.active,
            batch_active=self.in_flight.batch_active,
            foreign_active=self.reports.foreign_active(now_s),
            waiting=n_waiting,
            wait_s=self.wait_s(now_s),
            rejected_reports=self.reports.n_rejected,
        )


def _faded(share: float, is_busy: bool, elapsed_s: float) -> float:
    """The share of busy time, after as many seconds more."""
    kept = math.exp(-max(0.0, elapsed_s) / BUSY_S)
    return share * kept + (1 - kept) * is_busy
