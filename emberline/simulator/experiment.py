"""The configuration of a simulation and its measured result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp
from typing import Any, get_args

from emberline.balancer.cost_model import PolicyName, Settings
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import WorkerRole
from emberline.simulator.baselines import DynamoKnobs, SGLangKnobs
from emberline.simulator.coefficients import Coefficients, LatencyTargetBudget, PrefillPolicy
from emberline.simulator.elastic_fleet import NodeSpec
from emberline.simulator.fleet import LinkSpec
from emberline.simulator.planner import FleetSize, PlannerSpec
from emberline.simulator.request import SimRequest
from emberline.simulator.tiers import RetentionName, TierSpec
from emberline.simulator.trace import LoadProfile
from emberline.supervisor.cluster.scaling_plan import ScalingPlan

EMBERLINE_POLICIES: tuple[str, ...] = get_args(PolicyName)
BASELINE_POLICIES = ("plain_round_robin", "plain_least_loaded", "sglang", "dynamo")
POLICIES = (*EMBERLINE_POLICIES, *BASELINE_POLICIES)
MAX_WORKERS = 256
LOG_BINS = 50  # histogram bins per unit of the natural logarithm: 2 % each
SLO_TTFT_S, SLO_TPOT_S = 2.0, 0.025
# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    model: Coefficients
    load: float  # copies of a trace with recorded arrivals; session starts per second of others
    workers: int = 8  # of role "both"
    prefill_workers: int = 0  # with `decode_workers`, instead of `workers`
    decode_workers: int = 0
    policy: str = "sticky"
    settings: Settings = field(default_factory=Settings)
    prefill_policy: PrefillPolicy = field(default_factory=LatencyTargetBudget)
    link: LinkSpec = field(default_factory=LinkSpec)
    seed: int = 1
    history_s: float = 0.0  # before time 0: what sessions sent then is cached, without simulating it; 0: all begin cold
    warmup_s: float = 600.0  # not measured
    measured_s: float = 1800.0
    drain_s: float = 300.0  # for measured requests to finish after the end
    balancers: int = 1  # Emberline balancers that share the fleet
    report_delay_s: float = 0.0  # latency of load reports and KV events
    session_affinity: bool = False  # clients send their session's name
    upstream: bool = False  # the workers are other servers: no KV events, load reports only when probed
    unstreamed: float = 0.0  # share of requests whose first token is not known before their end
    faults: int = 0  # of workers, in the measured period
    knobs: SGLangKnobs | DynamoKnobs | None = None  # of the compared policies; None: their defaults
    retention: RetentionName = "learned"  # the engine's; "lru", or "oracle", which knows when each block is used next
    tiers: tuple[TierSpec, ...] = ()  # behind the device's KV cache, fastest first
    tenants: int = 8
    profile: LoadProfile | None = None  # of the load over time; None: all of it at all times
    planner: PlannerSpec | None = None  # changes the fleet; the workers above are those at the beginning
    schedule: tuple[int, ...] = ()  # workers by minute of a fleet that changes as was known in advance
    nodes: NodeSpec = field(default_factory=NodeSpec)  # of that schedule
    key_tokens: int = 256  # per key of the fleet's prefix index; at least a block of the trace

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput(f"there is no policy {self.policy!r}: one of {', '.join(POLICIES)}", param="policy")
        if bool(self.prefill_workers) != bool(self.decode_workers):
            raise BadInput("prefill and decode workers need each other: give both numbers", param="prefill_workers")
        if self.prefill_workers and self.policy in BASELINE_POLICIES:
            raise BadInput(f"the policy {self.policy} does not support disaggregation here", param="policy")
        if not 1 <= len(self.roles) <= MAX_WORKERS:
            raise BadInput(f"a fleet has 1 to {MAX_WORKERS} workers, not {len(self.roles)}", param="workers")
        if self.load <= 0:
            raise BadInput("the load must be above 0", param="load")
        if (self.faults or self.upstream or self.unstreamed) and self.policy in BASELINE_POLICIES:
            raise BadInput("faults and other servers are simulated for Emberline's own policies only", param="faults")
        if self.faults and self.prefill_workers:
            raise BadInput("faults are simulated for workers of role both only", param="faults")
        if not 0 <= self.unstreamed <= 1 or self.faults < 0:
            raise BadInput("--unstreamed is a share from 0 to 1, --faults a number", param="unstreamed")
        if self.history_s and (self.prefill_workers or self.policy in BASELINE_POLICIES):
            raise BadInput(
                "history is simulated for Emberline's own policies and workers of role both", param="history"
            )
        if self.tiers and (self.faults or self.prefill_workers):
            raise BadInput("tiers are simulated for workers of role both, without faults", param="tiers")
        if self.planner or self.schedule:
            if self.policy in BASELINE_POLICIES or self.upstream or self.faults or self.tiers:
                raise BadInput(
                    "fleets that change are simulated for Emberline's own policies and engines, without tiers, and "
                    "with the planner's own faults",
                    param="planner",
                )
            if (self.planner and self.schedule) or (self.schedule and self.prefill_workers):
                raise BadInput("a fleet has a planner, or a schedule of workers of role both", param="planner")
            if self.planner and self.planner.bounds.disaggregated != bool(self.prefill_workers):
                raise BadInput("the planner's bounds and the first workers disagree on roles", param="planner")
        if self.balancers < 1 or (self.balancers > 1 and self.policy in BASELINE_POLICIES):
            raise BadInput("several balancers are simulated for Emberline's own policies only", param="balancers")

    @property
    def roles(self) -> list[WorkerRole]:
        counts: list[tuple[WorkerRole, int]] = [("prefill", self.prefill_workers), ("decode", self.decode_workers)]
        if not self.prefill_workers:
            counts = [("both", self.workers)]
        return [role for role, n in counts for _ in range(n)]

    @property
    def measured_from_s(self) -> float:
        """On the simulation's clock, on which time 0 of the sessions' starts is `history_s`."""
        return self.history_s + self.warmup_s

    @property
    def end_s(self) -> float:
        return self.measured_from_s + self.measured_s


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    config: SimulationConfig
    trace: str
    requests: list[SimRequest]  # that arrived in the measured period
    busy_s: list[float]  # by worker, in the measured period; so the next two
    prompt_tokens: list[int]
    output_tokens: list[int]
    preemptions: int
    rejected: int
    failovers: int
    transferred_bytes: int
    intervals: dict[int, int]  # output tokens by bin of the logarithm of their inter-token latency
    now_s: float
    worker_s: list[float]  # that each was part of the fleet, in the measured period
    gpu_s: float  # of one GPU a worker, with those that start or drain
    plans: list[ScalingPlan]  # of the planner, with decisions
    sizes: list[FleetSize]

    def missed(self, tolerated_s: float = SLO_TTFT_S, tpot_s: float = SLO_TPOT_S) -> list[bool]:
        """By request: its TTFT was longer than what its own prefill takes on an idle worker that has all that any had,
        and `tolerated_s`; or its time per output token was too long; or it has not ended."""
        return [
            request.end_s < 0 or ttft_s > least_s + tolerated_s or request.time_per_token_s > tpot_s
            for request, ttft_s, least_s in zip(self.requests, self.ttft_s(), self.min_ttft_s())
        ]

    def ttft_s(self) -> list[float]:
        """Time to first token of every request, in order. For one without a first token, how long it has waited."""
        return [(r.first_token_s if r.first_token_s >= 0 else self.now_s) - r.arrival_s for r in self.requests]

    def min_ttft_s(self) -> list[float]:
        """A lower bound for any router: no queueing, and only tokens that no request had before are computed."""
        model = self.config.model
        return [model.prefill_s(r.n_prompt - r.known_tokens, r.known_tokens) for r in self.requests]

    def time_per_token_s(self) -> list[float]:
        return [request.time_per_token_s for request in self.requests if request.end_s >= 0 and request.n_output > 1]

    @property
    def busy(self) -> float:
        """Mean utilization of the workers."""
        return _ratio(sum(self.busy_s), sum(self.worker_s))

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens found in a cache."""
        return _ratio(sum(r.cached_tokens for r in self.requests), sum(r.n_prompt for r in self._started()))

    @property
    def ideal_hit_ratio(self) -> float:
        """The hit ratio of an unbounded shared cache."""
        started = self._started()
        return _ratio(sum(r.known_tokens for r in started), sum(r.n_prompt for r in started))

    def hits_by_tier(self) -> dict[str, float]:
        """The share of prompt tokens that came from each tier."""
        n_prompt = sum(request.n_prompt for request in self._started())
        found = {spec.name: 0 for spec in self.config.tiers}
        for request in self.requests:
            for tier, n_tokens in (request.fetched or {}).items():
                found[tier] += n_tokens
        return {tier: _ratio(n_tokens, n_prompt) for tier, n_tokens in found.items()}

    def _started(self) -> list[SimRequest]:
        return [request for request in self.requests if request.first_token_s >= 0]

    def fairness(self) -> float:
        """Jain's index over the tenants' mean TTFT: 1 when all are equal."""
        by_tenant: dict[int, list[float]] = {}
        for request, ttft_s in zip(self.requests, self.ttft_s()):
            by_tenant.setdefault(request.tenant, []).append(ttft_s)
        means = [sum(values) / len(values) for values in by_tenant.values()]
        return _ratio(sum(means) ** 2, len(means) * sum(mean * mean for mean in means))

    def within_slo(self) -> float:
        """The share of requests whose TTFT and time per output token meet the SLO."""
        good = sum(
            request.first_token_s >= 0
            and request.first_token_s - request.arrival_s <= SLO_TTFT_S
            and request.end_s >= 0
            and request.time_per_token_s <= SLO_TPOT_S
            for request in self.requests
        )
        return _ratio(good, len(self.requests))

    def figures(self) -> dict[str, Any]:
        ttft, tpot = sorted(self.ttft_s()), sorted(self.time_per_token_s())
        mean_busy = sum(self.busy_s) / len(self.busy_s)
        measured_s = self.config.measured_s
        return {
            "trace": self.trace,
            "policy": self.config.policy,
            "workers": len(self.busy_s),
            "load": round(self.config.load, 6),
            "requests": len(self.requests),
            "unfinished": sum(request.end_s < 0 for request in self.requests),
            "requests_per_s": round(len(self.requests) / measured_s, 4),
            **{f"ttft_p{q}_s": round(percentile(ttft, q), 4) for q in (50, 90, 99)},
            "ttft_least_p90_s": round(percentile(sorted(self.min_ttft_s()), 90), 4),
            **{f"token_p{q}_ms": round(1e3 * percentile(tpot, q), 3) for q in (50, 90, 99)},
            **{f"interval_p{q}_ms": round(1e3 * self._interval_s(q), 3) for q in (50, 90, 99)},
            "hit_ratio": round(self.hit_ratio, 4),
            "ideal_hit_ratio": round(self.ideal_hit_ratio, 4),
            **{f"hit_{tier}": round(share, 4) for tier, share in self.hits_by_tier().items()},
            "busy": round(self.busy, 4),
            "busiest_over_mean": round(max(self.busy_s) / mean_busy, 4) if mean_busy else 0.0,
            "fairness": round(self.fairness(), 4),
            "within_slo": round(self.within_slo(), 4),
            "in_target": round(1 - _ratio(sum(self.missed()), len(self.requests)), 4),
            "gpu_hours": round(self.gpu_s / 3600, 3),
            "prompt_tokens_per_s": round(sum(self.prompt_tokens) / measured_s, 1),
            "output_tokens_per_s": round(sum(self.output_tokens) / measured_s, 1),
            "preemptions": self.preemptions,
            "refused": self.rejected,
            "failovers": self.failovers,
            "transferred_gb": round(self.transferred_bytes / 1e9, 2),
        }

    def _interval_s(self, q: float) -> float:
        """A percentile of the inter-token latency."""
        total = sum(self.intervals.values())
        seen = 0
        for place in sorted(self.intervals):
            seen += self.intervals[place]
            if seen * 100 >= q * total:
                return exp((place + 0.5) / LOG_BINS)
        return 0.0


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and half the width of its 95 % confidence interval (Student's t)."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, float("inf")
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, (T_95[n - 2] if n - 2 < len(T_95) else 1.96) * (variance / n) ** 0.5


def percentile(ordered: Sequence[float], q: float) -> float:
    """Nearest rank in sorted values; 0 if there are none."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(len(ordered) * q / 100) - 1)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
