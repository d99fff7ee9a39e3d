"""The production scaling policy over a simulated fleet: what it would be told, and its plans carried out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput
from emberline.simulator.baselines import SimRouter
from emberline.simulator.elastic_fleet import ElasticFleet, NodeSpec, SimNode
from emberline.simulator.virtual_clock import VirtualClock
from emberline.supervisor.cluster.replica_demand import ArrivalInterval, NodeOffer, Replica, ReplicaCapacity
from emberline.supervisor.cluster.scaling_plan import ScalingBounds, ScalingObservation, ScalingPlan
from emberline.supervisor.cluster.scaling_policy import ScalingPolicy

INTERVAL_S = 10.0  # of the history
RATE_TIME_S = 120.0  # over which reported rates are smoothed: those of single steps differ by a factor of three
MODEL = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSpec:
    bounds: ScalingBounds
    nodes: NodeSpec = field(default_factory=NodeSpec)
    tick_s: float = 5.0  # between two decisions
    history_s: float = 600.0
    itl_s: float = 0.025  # target of the inter-token latency, for the decode rate
    faults: tuple[tuple[float, str, float], ...] = ()  # (when, worker, seconds until it is back)

    def __post_init__(self) -> None:
        if self.tick_s <= 0 or self.history_s < INTERVAL_S or self.nodes.start_s < 0:
            raise BadInput("the planner decides after more than 0 s, and remembers 10 s or more", param="planner")


@dataclass(frozen=True, slots=True)
class FleetSize:
    """After a decision, or when a node has started or left."""

    at_s: float
    running: int  # of role both
    prefill: int
    decode: int
    starting: int
    draining: int


class SimPlanner:
    """Owns the policy and what it knows of the past. Ticks by itself until `end_s`."""

    def __init__(
        self,
        fleet: ElasticFleet,
        routers: Sequence[SimRouter],
        clock: VirtualClock,
        spec: PlannerSpec,
        end_s: float,
    ) -> None:
        self.policy = ScalingPolicy(MODEL, spec.bounds)
        self.plans: list[ScalingPlan] = []  # with decisions
        self.sizes: list[FleetSize] = []
        self.last_request_s = clock.now_s
        self._fleet, self._routers, self._clock = fleet, routers, clock
        self._spec, self._end_s = spec, end_s
        self._history: deque[ArrivalInterval] = deque(maxlen=int(spec.history_s / INTERVAL_S))
        self._interval_start_s = clock.now_s
        self._computed = self._output = self._cached = self._queued = self._kv_peak = 0
        self._prefill_rate = self._decode_rate = 0.0
        for at_s, name, down_s in spec.faults:
            clock.at(at_s, fleet.fail, name, down_s)
        clock.at(clock.now_s, self._tick)

    def _tick(self) -> None:
        now_s = self._clock.now_s
        plan = self.policy.decide(self._observe(), now_s)
        for decision in plan.decisions:
            match decision.action:
                case "start":
                    self._fleet.start(decision.role)
                case "drain":
                    self._fleet.drain(decision.replica)
                case "undrain":
                    self._fleet.undrain(decision.replica)
                case "flip":
                    self._fleet.flip(decision.replica, decision.role)
        self.policy.applied(plan)
        if plan.decisions:
            self.plans.append(plan)
        self._record_size()
        if now_s + self._spec.tick_s <= self._end_s:
            self._clock.at(now_s + self._spec.tick_s, self._tick)

    def _record_size(self) -> None:
        running = [node.role for node in self._fleet.present if node.state == "running"]
        size = FleetSize(
            self._clock.now_s,
            *(running.count("both"), running.count("prefill"), running.count("decode")),
            *(self._fleet.n("starting"), self._fleet.n("draining")),
        )
        if not self.sizes or _counts(self.sizes[-1]) != _counts(size):
            self.sizes.append(size)

    # --- what it is told ---------------------------------------------------------------------------------------------

    def _observe(self) -> ScalingObservation:
        nodes = [node for node in self._fleet.present if node.state != "lost"]
        held, queued, kv_tokens = self._measure(nodes)
        n_running = sum(node.state == "running" for node in nodes)
        capacity = ReplicaCapacity(
            prefill_rate=self._prefill_rate,
            decode_rate=self._decode_rate,
            kv_tokens=nodes[0].worker.model.kv_tokens if nodes else 0,
        )
        n_free = self._spec.bounds.max_replicas - len(nodes)
        return ScalingObservation(
            replicas=tuple(_replica(node, capacity) for node in nodes),
            offers=(NodeOffer(n_free=max(0, n_free), capacity=capacity),),
            queued_tokens=queued,
            held_requests=0 if n_running else held,
            kv_tokens=kv_tokens,
            history=tuple(self._history),
            start_s=self._spec.nodes.start_s,
            last_request_s=self.last_request_s,
        )

    def _measure(self, nodes: Sequence[SimNode]) -> tuple[int, int, int]:
        """Requests that no worker has, uncached tokens that wait, KV tokens in use. From totals, as workers report
        them: what arrived is what was computed and what the queues have grown by."""
        workers = [node.worker for node in self._fleet.nodes.values()]
        loads = [node.worker.load() for node in nodes]
        computed, output = sum(worker.computed for worker in workers), sum(worker.n_output for worker in workers)
        cached = sum(worker.cached for worker in workers)
        waiting = [router.n_waiting() for router in self._routers]
        held = sum(n for n, _ in waiting)
        uncached_share = (computed + 1) / (computed + cached + 1)
        queued = sum(load.waiting_tokens for load in loads) + int(uncached_share * sum(n for _, n in waiting))
        kv_tokens = sum(load.kv_used_blocks for load in loads) * BLOCK_TOKENS
        self._kv_peak = max(self._kv_peak, kv_tokens)
        itl_s = self._spec.itl_s
        self._smooth([n.worker.prefill_rate for n in nodes], [n.worker.decode_rate(itl_s) for n in nodes])
        elapsed_s = self._clock.now_s - self._interval_start_s
        if elapsed_s >= INTERVAL_S:
            arrived = max(0, computed - self._computed + queued - self._queued)
            self._history.append(
                ArrivalInterval(
                    seconds=elapsed_s,
                    uncached_tokens=arrived,
                    output_tokens=output - self._output,
                    kv_tokens=self._kv_peak,
                )
            )
            self._computed, self._output, self._queued, self._kv_peak = computed, output, queued, kv_tokens
            self._interval_start_s = self._clock.now_s
        return held, queued, kv_tokens

    def _smooth(self, prefill: Sequence[float], decode: Sequence[float]) -> None:
        gain = self._spec.tick_s / RATE_TIME_S
        self._prefill_rate = _smoothed(self._prefill_rate, prefill, gain)
        self._decode_rate = _smoothed(self._decode_rate, decode, gain)


def _smoothed(rate: float, reported: Sequence[float], gain: float) -> float:
    """All nodes have the same GPUs."""
    known = [each for each in reported if each > 0]
    if not known:
        return rate
    mean = sum(known) / len(known)
    return rate + gain * (mean - rate) if rate else mean


def _replica(node: SimNode, capacity: ReplicaCapacity) -> Replica:
    state = node.state
    assert state != "lost"
    assert state != "gone"
    return Replica(
        name=node.worker.name,
        role=node.role,
        state=state,
        since_s=node.since_s,
        capacity=capacity,
        in_flight=node.worker.n_present,
    )


def _counts(size: FleetSize) -> tuple[int, int, int, int, int]:
    return size.running, size.prefill, size.decode, size.starting, size.draining
