"""Simulated workers behind routers, and the KV transfers between prefill and decode workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emberline.kv.retention import Retention
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import WorkerRole
from emberline.simulator.baselines import SimRouter
from emberline.simulator.coefficients import Coefficients, PrefillPolicy
from emberline.simulator.faults import Fault
from emberline.simulator.request import SimRequest, SimSequence
from emberline.simulator.tiers import RetentionName, SimTier, TierSpec, make_order
from emberline.simulator.virtual_clock import VirtualClock
from emberline.simulator.worker import SimWorker

OnFinish = Callable[[SimRequest], None]
OnStep = Callable[[SimWorker, float, int], None]


@dataclass(frozen=True, slots=True)
class LinkSpec:
    bytes_per_s: float = 50e9  # of a worker, out and in: a 400 Gbit/s network card
    latency_s: float = 0.001  # per push


class Network:
    """Each worker sends one push at a time and receives one at a time."""

    def __init__(self, clock: VirtualClock, link: LinkSpec) -> None:
        self.clock = clock
        self.n_bytes = 0
        self._link = link
        self._out_free_s: dict[str, float] = {}
        self._in_free_s: dict[str, float] = {}

    def send(self, source: str, target: SimWorker, n_tokens: int) -> float:
        """The time at which the KV of `n_tokens`, sent now, arrives."""
        n_bytes = n_tokens * target.model.kv_bytes
        start_s = max(self.clock.now_s, self._out_free_s.get(source, 0.0), self._in_free_s.get(target.name, 0.0))
        end_s = start_s + n_bytes / self._link.bytes_per_s
        self._out_free_s[source] = self._in_free_s[target.name] = end_s
        self.n_bytes += n_bytes
        return end_s + self._link.latency_s


class SimTransfer:
    """The KV of one request, pushed chunk by chunk while the next chunk is computed.

    Begins when the decode worker has admitted the sequence; ends when the last full block has arrived.
    """

    def __init__(self, network: Network, target: SimWorker, n_prompt: int) -> None:
        self._network, self._target = network, target
        self._n_total = (n_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self._seq: SimSequence | None = None  # on the decode worker, once admitted
        self._n_computed = 0
        self._n_sent = 0
        self._source = ""

    def admitted(self, seq: SimSequence) -> None:
        """The decode worker has reserved blocks; tokens that it has cached are not sent."""
        self._seq, self._n_sent = seq, seq.done
        self._push()

    def computed(self, source: str, n_tokens: int) -> None:
        self._source, self._n_computed = source, n_tokens
        self._push()

    def _push(self) -> None:
        if self._seq is None or not self._source:
            return
        upto = min(self._n_computed, self._n_total)
        n_tokens, self._n_sent = max(0, upto - self._n_sent), max(upto, self._n_sent)
        arrival_s = self._network.send(self._source, self._target, n_tokens)
        if self._n_computed >= self._n_total:
            seq, self._seq = self._seq, None
            self._network.clock.at(arrival_s, self._target.kv_arrived, seq)


def _pool(spec: TierSpec, n_workers: int, block_tokens: int, clock: VirtualClock) -> SimTier:
    """A tier that all workers share, each with its part; the pool's own eviction is least recently used."""
    capacity = n_workers * spec.tokens // block_tokens
    return SimTier(spec, capacity, clock, make_order("lru", capacity, Retention()))


class Fleet:
    """Carries requests from routers to workers and the workers' events back. Each balancer has one router."""

    def __init__(
        self,
        roles: Sequence[WorkerRole],
        model: Coefficients,
        prefill_policy: PrefillPolicy,
        clock: VirtualClock,
        block_tokens: int,
        link: LinkSpec,
        on_finish: OnFinish,
        on_step: OnStep,
        retention: RetentionName = "learned",
        tiers: Sequence[TierSpec] = (),
    ) -> None:
        self.routers: list[SimRouter] = []
        self.network = Network(clock, link)
        self._clock, self._on_finish, self._on_step = clock, on_finish, on_step
        self._transfers: dict[int, SimTransfer] = {}  # by request
        self._model, self._prefill_policy, self._block_tokens = model, prefill_policy, block_tokens
        self._retention: RetentionName = retention
        self._own_tiers = [spec for spec in tiers if not spec.shared]
        self._pools = [_pool(spec, len(roles), block_tokens, clock) for spec in tiers if spec.shared]
        self.workers: list[SimWorker] = []  # those that have left included
        self._by_name: dict[str, SimWorker] = {}
        for role in roles:
            self.add(role)

    def add(self, role: WorkerRole) -> SimWorker:
        """A worker that no router knows yet."""
        number = len(self.workers)
        worker = SimWorker(
            *(f"w{number:03}", self._model, self._prefill_policy, self._clock, self, self._block_tokens, role),
            *(self._kv_events_of(number), self._retention, self._own_tiers, self._pools),
        )
        self.workers.append(worker)
        self._by_name[worker.name] = worker
        return worker

    def worker(self, name: str) -> SimWorker:
        return self._by_name[name]

    def join(self, worker: SimWorker) -> None:
        """Let the worker take requests: for the first time, after it was lost, or in another role."""
        for router in self.routers:
            router.on_worker_joined(worker)

    def drain(self, worker: SimWorker) -> None:
        for router in self.routers:
            router.on_worker_drained(worker)

    def undrain(self, worker: SimWorker) -> None:
        for router in self.routers:
            router.on_worker_undrained(worker)

    def remove(self, worker: SimWorker) -> None:
        """Remove the worker for good. Its requests continue elsewhere."""
        moved = worker.die()
        for router in self.routers:
            router.on_worker_removed(worker, [request for request in moved if self._router(request) is router])

    def lose(self, worker: SimWorker) -> None:
        """Let the worker die; `join` brings it back with an empty cache."""
        lost = worker.die()
        for router in self.routers:
            router.on_worker_lost(worker, [request for request in lost if self._router(request) is router])

    def _kv_events_of(self, number: int) -> Callable[[bool, int, int, int], None]:
        def publish(stored: bool, segment: int, start: int, end: int) -> None:
            for router in self.routers:
                router.on_kv_event(self.workers[number], stored, segment, start, end)

        return publish

    def send(self, request: SimRequest, decode: str, prefill: str) -> None:
        """Called by a router with its decision."""
        request.decode_worker, request.prefill_worker = decode, prefill
        target = self._by_name[decode]
        if not prefill:
            target.submit(request, request.n_output)
            return
        self._transfers[request.number] = SimTransfer(self.network, target, request.n_prompt)
        target.submit(request, request.n_output, awaits_kv=True)
        self._by_name[prefill].submit(request, 0)

    def inject(self, fault: Fault) -> None:
        """Schedule a fault and the worker's return."""
        worker = self._by_name[fault.worker]
        self._clock.at(fault.at_s, self._fail, worker, fault)

    def _fail(self, worker: SimWorker, fault: Fault) -> None:
        if fault.kind == "hang":
            worker.hang()
            self._clock.at(fault.back_s, worker.resume)
            return
        self.lose(worker)
        self._clock.at(fault.back_s, self.join, worker)

    # --- events of the workers ---------------------------------------------------------------------------------------

    def on_prefill(self, worker: SimWorker, seq: SimSequence, n_tokens: int) -> None:
        transfer = self._transfers.get(seq.request.number)
        if transfer is None:
            return
        if seq.awaits_kv:
            if not n_tokens:
                transfer.admitted(seq)
        elif worker.name == seq.request.prefill_worker:
            transfer.computed(worker.name, seq.done)

    def on_first_token(self, worker: SimWorker, seq: SimSequence) -> None:
        if seq.request.first_token_s < 0:
            seq.request.first_token_s = self._clock.now_s
        self._transfers.pop(seq.request.number, None)
        self._router(seq.request).on_first_token(seq.request)

    def on_finish(self, worker: SimWorker, seq: SimSequence) -> None:
        if not seq.n_output:
            self._router(seq.request).on_prefill_done(seq.request)
            return
        seq.request.end_s = self._clock.now_s
        self._router(seq.request).on_finish(seq.request)
        self._on_finish(seq.request)

    def on_step(self, worker: SimWorker, seconds: float, n_tokens: int) -> None:
        self._on_step(worker, seconds, n_tokens)

    def on_change(self, worker: SimWorker) -> None:
        for router in self.routers:
            router.on_load_report(worker)

    def _router(self, request: SimRequest) -> SimRouter:
        return self.routers[request.session % len(self.routers)]
