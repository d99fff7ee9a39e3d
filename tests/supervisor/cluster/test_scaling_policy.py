"""The rule by which a model's replicas grow, shrink and change roles, in virtual time."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.errors import BadInput
from emberline.protocol.frames import WorkerRole
from emberline.supervisor.cluster.replica_demand import (
    RATE_TARGET,
    ArrivalInterval,
    NodeOffer,
    Replica,
    ReplicaCapacity,
)
from emberline.supervisor.cluster.scaling_plan import ScalingBounds, ScalingObservation, ScalingPlan
from emberline.supervisor.cluster.scaling_policy import KEEP_FLIPPED, ScalingPolicy

TICK_S = 5.0
SIZE = ReplicaCapacity(prefill_rate=1000, decode_rate=200, kv_tokens=10_000)
BIG = ReplicaCapacity(prefill_rate=3000, decode_rate=600, kv_tokens=30_000)
OFFERS = (NodeOffer(n_free=100, capacity=SIZE),)


def replicas(n: int, role: WorkerRole = "both", *, in_flight: int = 1, first: int = 0) -> tuple[Replica, ...]:
    return tuple(
        Replica(name=f"{role}{i}", role=role, capacity=SIZE, in_flight=in_flight) for i in range(first, first + n)
    )


def traffic(prefill: float, decode: float = 0.0, kv: int = 0) -> tuple[ArrivalInterval, ...]:
    one = ArrivalInterval(
        seconds=10, uncached_tokens=round(prefill * 10), output_tokens=round(decode * 10), kv_tokens=kv
    )
    return (one,) * 12


@dataclass
class Cluster:
    """Carries plans out: nodes start and drain in a fixed time, and the traffic does not react."""

    policy: ScalingPolicy
    observation: ScalingObservation
    now_s: float = 0.0
    plans: list[ScalingPlan] = field(default_factory=list)
    n_started: int = 0

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.tick()

    def tick(self) -> ScalingPlan:
        self.now_s += TICK_S
        found = {each.name: self._progress(each) for each in self.observation.replicas}
        present = {name: each for name, each in found.items() if each is not None}
        observation = msgspec.structs.replace(self.observation, replicas=tuple(present.values()))
        plan = self.policy.decide(observation, self.now_s)
        self.policy.applied(plan)
        for each in plan.decisions:
            if each.action == "start":
                self.n_started += 1
                name = f"new{self.n_started}"
                present[name] = Replica(
                    name=name, role=each.role, gpu=each.gpu, state="starting", since_s=self.now_s, capacity=SIZE
                )
                continue
            old = present[each.replica]
            if each.action == "flip":
                assert each.from_role == old.role != each.role
                present[each.replica] = msgspec.structs.replace(old, role=each.role)
            else:
                assert old.state == ("running" if each.action == "drain" else "draining")
                state = "draining" if each.action == "drain" else "running"
                present[each.replica] = msgspec.structs.replace(old, state=state, since_s=self.now_s)
        self.plans.append(plan)
        self.observation = msgspec.structs.replace(observation, replicas=tuple(present.values()))
        return plan

    def _progress(self, replica: Replica) -> Replica | None:
        if replica.state == "starting" and self.now_s - replica.since_s >= self.observation.start_s:
            return msgspec.structs.replace(replica, state="running", since_s=self.now_s)
        if replica.state == "draining" and self.now_s - replica.since_s >= 60:
            return None
        return replica

    def n(self, role: WorkerRole = "both") -> int:
        return sum(each.is_active and each.role == role for each in self.observation.replicas)

    @property
    def actions(self) -> list[str]:
        return [each.action for plan in self.plans for each in plan.decisions]


def decide(bounds: ScalingBounds, observation: ScalingObservation) -> ScalingPlan:
    return ScalingPolicy("m", bounds).decide(observation, 0.0)


def busy(**fields: object) -> ScalingObservation:
    """With requests at all times."""
    return msgspec.structs.replace(ScalingObservation(offers=OFFERS, last_request_s=math.inf), **fields)


def test_a_queue_takes_the_number_of_the_formula_where_replicas_start_at_once() -> None:
    plan = decide(
        ScalingBounds(max_replicas=20, tolerated_s=2),
        busy(replicas=replicas(1), queued_tokens=9_500, start_s=0.0),
    )
    assert [each.action for each in plan.decisions] == ["start"] * 4  # ⌈9500 ÷ 1000 ÷ 2⌉ = 5
    assert "1 replica has load 4.75 (prefill: 4,750 uncached tokens/s wanted)" in plan.decisions[0].why


def test_a_queue_that_is_gone_before_a_node_is_ready_starts_none() -> None:
    bounds = ScalingBounds(max_replicas=20, tolerated_s=2)
    assert not decide(bounds, busy(replicas=replicas(1), queued_tokens=9_500, start_s=180.0)).decisions
    slow = busy(replicas=replicas(1), queued_tokens=950_000, start_s=180.0)
    assert [each.action for each in decide(bounds, slow).decisions] == ["start"] * 4  # 770,000 are left, for 182 s


def test_kv_in_use_and_the_forecast_are_floors() -> None:
    bounds = ScalingBounds(max_replicas=20)
    by_kv = decide(bounds, busy(replicas=replicas(1), kv_tokens=30_000))
    assert len(by_kv.decisions) == 3  # ⌈30,000 ÷ 8,000⌉ = 4
    assert "KV" in by_kv.decisions[0].why
    by_forecast = decide(bounds, busy(replicas=replicas(1), history=traffic(1700)))
    assert len(by_forecast.decisions) == 2  # 1700 ÷ 0.75 tokens/s


def test_a_short_burst_starts_nothing() -> None:
    cluster = Cluster(ScalingPolicy("m", ScalingBounds(max_replicas=9, grow_after_s=10)), busy(replicas=replicas(1)))
    cluster.run(60)
    cluster.observation = msgspec.structs.replace(cluster.observation, kv_tokens=50_000)
    cluster.tick()
    assert not cluster.actions
    cluster.run(15)
    assert "start" in cluster.actions


def test_the_cheapest_gpus_that_suffice_are_started() -> None:
    offers = (
        NodeOffer(gpu="small", n_free=2, cost=1.0, capacity=SIZE),
        NodeOffer(gpu="big", n_free=1, cost=2.0, capacity=BIG),
    )
    bounds = ScalingBounds(max_replicas=20)

    def started(kv_tokens: int) -> list[str]:
        plan = decide(bounds, busy(replicas=replicas(1), offers=offers, kv_tokens=kv_tokens))
        return [each.gpu for each in plan.decisions]

    assert started(15_000) == ["small"]
    assert started(30_000) == ["big"]
    assert started(40_000) == ["big", "small"]
    assert started(400_000) == ["big", "small", "small"]


def test_draining_replicas_are_taken_back_before_others_start() -> None:
    drains = Replica(name="d", state="draining", capacity=SIZE)
    plan = decide(ScalingBounds(max_replicas=2), busy(replicas=(*replicas(1), drains), kv_tokens=15_000))
    assert [(each.action, each.replica) for each in plan.decisions] == [("undrain", "d")]


def test_a_spare_replica_is_flipped_before_any_starts() -> None:
    bounds = ScalingBounds(max_replicas=20, disaggregated=True)
    fleet = (*replicas(3, "prefill"), *replicas(1, "decode"))
    plan = decide(bounds, busy(replicas=fleet, history=traffic(500, 250)))
    assert [(each.action, each.role, each.from_role) for each in plan.decisions] == [("flip", "decode", "prefill")]
    assert "loads no weights" in plan.decisions[0].why
    plan = decide(bounds, busy(replicas=fleet, history=traffic(2200, 250)))
    assert [(each.action, each.role) for each in plan.decisions] == [("start", "decode")]


def test_a_flip_that_has_to_settle_is_waited_for() -> None:
    cluster = Cluster(
        ScalingPolicy("m", ScalingBounds(max_replicas=20, disaggregated=True, grow_after_s=0)),
        busy(replicas=(*replicas(4, "prefill"), *replicas(1, "decode")), history=traffic(400, 250)),
    )
    cluster.tick()
    cluster.observation = msgspec.structs.replace(cluster.observation, history=traffic(400, 400))
    assert "flipped once" in cluster.tick().held[0]
    cluster.run(40)
    assert cluster.actions == ["flip", "flip"]


def test_the_roles_of_a_full_cluster_follow_the_traffic() -> None:
    bounds = ScalingBounds(max_replicas=8, disaggregated=True)
    fleet = (*replicas(4, "prefill"), *replicas(4, "decode"))
    cluster = Cluster(ScalingPolicy("m", bounds), busy(replicas=fleet, history=traffic(9000, 600)))
    cluster.run(300)
    assert (cluster.n("prefill"), cluster.n("decode")) == (6, 2)  # 9 : 3 by rates
    cluster.observation = msgspec.structs.replace(cluster.observation, history=traffic(3000, 1800))
    cluster.run(300)
    assert (cluster.n("prefill"), cluster.n("decode")) == (2, 6)
    assert {*cluster.actions} == {"flip"}
    n_actions = len(cluster.actions)
    cluster.run(1800)
    assert len(cluster.actions) == n_actions


def test_roles_that_are_short_in_turns_exchange_few_replicas() -> None:
    """Every minute, the other one of two roles has the higher load."""
    bounds = ScalingBounds(max_replicas=8, disaggregated=True)
    fleet = (*replicas(4, "prefill"), *replicas(4, "decode"))
    cluster = Cluster(ScalingPolicy("m", bounds), busy(replicas=fleet))
    for _ in range(10):
        for history in (traffic(5000, 600), traffic(3000, 1000)):
            cluster.observation = msgspec.structs.replace(cluster.observation, history=history)
            cluster.run(60)
    assert {*cluster.actions} == {"flip"}
    changed = [plan for plan in cluster.plans if plan.decisions]
    for before, after in pairwise(changed):
        if before.decisions[-1].role != after.decisions[0].role:
            assert after.at_s - before.at_s >= KEEP_FLIPPED * bounds.shrink_after_s


def test_a_role_that_has_just_gained_a_replica_gives_it_to_one_that_has_none() -> None:
    bounds = ScalingBounds(max_replicas=3, disaggregated=True)
    policy = ScalingPolicy("m", bounds)
    cluster = Cluster(policy, busy(replicas=(*replicas(2, "prefill"), *replicas(1, "decode")), history=traffic(100)))
    cluster.observation = msgspec.structs.replace(cluster.observation, history=traffic(100, 250))
    cluster.run(20)
    assert cluster.actions == ["flip"]
    left = tuple(each for each in cluster.observation.replicas if each.role == "decode")
    cluster.observation = msgspec.structs.replace(cluster.observation, replicas=left, offers=())
    cluster.run(60)
    assert cluster.actions == ["flip", "flip"]
    assert cluster.n("prefill") == 1


def test_a_queue_that_is_gone_before_a_donor_has_drained_flips_nothing() -> None:
    bounds = ScalingBounds(max_replicas=8, disaggregated=True)
    fleet = (*replicas(4, "prefill"), *replicas(4, "decode"))
    history = traffic(1500, 300)
    one_moment = busy(replicas=fleet, history=history, queued_tokens=20_000)  # 5 s of work; 2 s are tolerated
    assert not [each for each in decide(bounds, one_moment).decisions if each.action == "flip"]
    long = busy(replicas=fleet, history=history, queued_tokens=200_000)
    assert [each.role for each in decide(bounds, long).decisions if each.action == "flip"]


def test_scales_to_zero_and_wakes_up() -> None:
    bounds = ScalingBounds(min_replicas=0, max_replicas=4, idle_s=600)
    cluster = Cluster(
        ScalingPolicy("m", bounds), busy(replicas=replicas(2, in_flight=0), last_request_s=0.0, history=traffic(10))
    )
    cluster.run(595)
    assert cluster.n() == 1  # the surplus
    cluster.run(100)
    assert not cluster.observation.replicas
    cluster.run(1000)
    assert cluster.actions == ["drain", "drain"]
    cluster.observation = msgspec.structs.replace(cluster.observation, held_requests=1, queued_tokens=100)
    [decision] = cluster.tick().decisions
    assert (decision.action, decision.cause) == ("start", "wake")
    cluster.run(60)
    assert cluster.n() == 1


def test_a_replica_with_work_is_not_the_last_to_go() -> None:
    bounds = ScalingBounds(min_replicas=0, max_replicas=4, idle_s=0)
    cluster = Cluster(ScalingPolicy("m", bounds), busy(replicas=replicas(3), last_request_s=-1e9))
    cluster.run(3600)
    assert cluster.n() == 1


def test_a_new_planner_watches_before_it_drains() -> None:
    bounds = ScalingBounds(max_replicas=4, shrink_after_s=300)
    cluster = Cluster(ScalingPolicy("m", bounds), busy(replicas=replicas(3)))
    cluster.run(300)
    assert not cluster.actions
    assert "watched" in cluster.plans[0].held[0]
    cluster.run(10)
    assert cluster.actions == ["drain"]


def test_a_dry_run_repeats_its_plan() -> None:
    policy = ScalingPolicy("m", ScalingBounds(max_replicas=4, shrink_after_s=0))
    first, second = (policy.decide(busy(replicas=replicas(3)), at_s) for at_s in (0.0, 5.0))
    assert first.decisions == second.decisions != ()


def test_a_queue_that_came_and_went_keeps_no_replica() -> None:
    bounds = ScalingBounds(max_replicas=4, shrink_after_s=300)
    cluster = Cluster(ScalingPolicy("m", bounds), busy(replicas=replicas(3), history=traffic(300)))
    cluster.run(200)
    cluster.observation = msgspec.structs.replace(cluster.observation, queued_tokens=9_000)
    cluster.run(10)
    cluster.observation = msgspec.structs.replace(cluster.observation, queued_tokens=0)
    cluster.run(100)
    assert cluster.actions == ["drain"]


def test_a_lowered_maximum_is_kept_to_at_once() -> None:
    plan = decide(ScalingBounds(max_replicas=2), busy(replicas=replicas(3), kv_tokens=100_000))
    assert [(each.action, each.cause) for each in plan.decisions] == [("drain", "maximum")]
    assert "but max_replicas is 2" in plan.held[0]


def test_a_lowered_maximum_waits_for_a_replica_that_runs() -> None:
    starting = tuple(Replica(name=f"s{i}", state="starting", capacity=SIZE) for i in range(2))
    bounds = ScalingBounds(max_replicas=2)
    assert not decide(bounds, busy(replicas=(*replicas(1), *starting))).decisions
    running = msgspec.structs.replace(starting[0], state="running")
    [decision] = decide(bounds, busy(replicas=(*replicas(1), running, starting[1]))).decisions
    assert (decision.action, decision.replica) == ("drain", "s0")  # the one without requests


def test_the_last_replica_for_both_serves_until_both_roles_run() -> None:
    bounds = ScalingBounds(max_replicas=4, disaggregated=True)
    cluster = Cluster(ScalingPolicy("m", bounds), busy(replicas=replicas(1), history=traffic(100, 20)))
    assert [each.action for each in cluster.tick().decisions] == ["start", "start"]


def test_a_plan_is_data() -> None:
    plan = decide(ScalingBounds(max_replicas=3), busy(replicas=replicas(1), kv_tokens=15_000))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=ScalingPlan) == plan


@pytest.mark.parametrize(
    "fields",
    [
        {"min_replicas": -1},
        {"max_replicas": 0},
        {"min_replicas": 3, "max_replicas": 2},
        {"disaggregated": True, "max_replicas": 1},
        {"tolerated_s": 0.0},
        {"idle_s": math.nan},
    ],
)
def test_bounds_that_make_no_sense_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="use"):
        msgspec.structs.replace(ScalingBounds(max_replicas=2), **fields)


# --- invariants ------------------------------------------------------------------------------------------------------

capacities = st.sampled_from([SIZE, BIG, ReplicaCapacity()])


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Replica, ...]:
    n = draw(st.integers(0, 8))
    return tuple(
        Replica(
            name=f"r{i}",
            role=draw(st.sampled_from(["prefill", "decode", "both"])),
            state=draw(st.sampled_from(["running", "running", "starting", "draining"])),
            gpu=draw(st.sampled_from(["a", "b"])),
            cost=draw(st.sampled_from([1.0, 2.5])),
            capacity=draw(capacities),
            in_flight=draw(st.integers(0, 3)),
            drain_s=draw(st.sampled_from([0.0, 30.0])),
        )
        for i in range(n)
    )


@st.composite
def bounds_of(draw: st.DrawFn) -> ScalingBounds:
    low = draw(st.integers(0, 4))
    return ScalingBounds(
        min_replicas=low,
        max_replicas=draw(st.integers(max(low, 2), 10)),
        disaggregated=draw(st.booleans()),
        shrink_after_s=draw(st.sampled_from([0.0, 60.0])),
        settle_s=draw(st.sampled_from([0.0, 30.0])),
        idle_s=60.0,
    )


@st.composite
def observations(draw: st.DrawFn) -> ScalingObservation:
    offers = tuple(
        NodeOffer(gpu=gpu, n_free=draw(st.integers(0, 12)), cost=cost, capacity=draw(capacities))
        for gpu, cost in (("a", 1.0), ("b", 2.5))
    )
    return ScalingObservation(
        replicas=draw(fleets()),
        offers=offers,
        queued_tokens=draw(st.sampled_from([0, 0, 1_000, 100_000, 10_000_000])),
        kv_tokens=draw(st.sampled_from([0, 5_000, 50_000])),
        history=traffic(draw(st.integers(0, 8000)), draw(st.integers(0, 2000)), draw(st.integers(0, 50_000))),
        start_s=draw(st.sampled_from([0.0, 20.0, 180.0])),
        last_request_s=draw(st.sampled_from([0.0, math.inf])),
    )


@given(bounds_of(), observations())
def test_bounds_hold_work_is_never_left_alone_and_a_constant_load_settles(
    bounds: ScalingBounds, observation: ScalingObservation
) -> None:
    cluster = Cluster(ScalingPolicy("m", bounds), observation)
    for _ in range(160):
        before = cluster.observation.replicas
        plan = cluster.tick()
        after = cluster.observation.replicas
        assert len(after) <= max(bounds.max_replicas, len(before))
        n_active = [sum(each.is_active for each in fleet) for fleet in (before, after)]
        drained = [each for each in plan.decisions if each.action == "drain"]
        if drained and drained[0].cause != "maximum":
            assert n_active[1] >= bounds.min_replicas
        has_work = observation.queued_tokens or any(each.in_flight for each in before)
        for each in drained:
            left = [r for r in after if r.role == each.role and r.state == "running"]
            assert left or not has_work
        assert all(each.why for each in plan.decisions)
        assert plan.decisions or plan.held or not before
    assert not any(plan.decisions for plan in cluster.plans[-20:])


@given(st.integers(1, 12), st.integers(0, 12_000), st.integers(0, 2000), st.integers(0, 90_000), st.booleans())
def test_a_constant_load_grows_or_shrinks_and_never_turns(
    n: int, prefill: int, decode: int, kv: int, disaggregated: bool
) -> None:
    fleet = (*replicas(n, "prefill"), *replicas(n, "decode")) if disaggregated else replicas(n)
    bounds = ScalingBounds(max_replicas=60, disaggregated=disaggregated, shrink_after_s=0, settle_s=0)
    observation = busy(replicas=fleet, history=traffic(prefill, decode, kv), kv_tokens=kv)
    cluster = Cluster(ScalingPolicy("m", bounds), observation)
    cluster.run(600)
    actions = cluster.actions
    assert "undrain" not in actions
    if "drain" in actions:
        assert {*actions[actions.index("drain") :]} == {"drain"}
    assert not any(plan.decisions for plan in cluster.plans[-20:])


@given(st.integers(1, 6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5), st.floats(1, 5))
def test_more_load_never_takes_fewer_replicas(n: int, queued: int, prefill: int, kv: int, factor: float) -> None:
    bounds = ScalingBounds(max_replicas=50, shrink_after_s=0)

    def replicas_at(scale: float) -> int:
        observation = busy(
            replicas=replicas(n),
            queued_tokens=int(queued * scale),
            kv_tokens=int(kv * scale),
            history=traffic(prefill * scale / 100),
        )
        changes = {"start": 1, "drain": -1}
        return n + sum(changes[each.action] for each in decide(bounds, observation).decisions)

    assert replicas_at(factor) >= replicas_at(1.0)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6000), st.integers(0, 1200))
def test_nothing_starts_while_the_other_role_can_spare_one(
    n_prefill: int, n_decode: int, prefill: int, decode: int
) -> None:
    bounds = ScalingBounds(max_replicas=50, disaggregated=True)
    fleet = (*replicas(n_prefill, "prefill"), *replicas(n_decode, "decode"))
    plan = decide(bounds, busy(replicas=fleet, history=traffic(prefill, decode)))
    flipped = {each.from_role: 0 for each in plan.decisions if each.action == "flip"}
    for each in plan.decisions:
        if each.action == "flip":
            flipped[each.from_role] += 1
    for each in plan.decisions:
        if each.action != "start":
            continue
        if each.role == "decode":
            left = n_prefill - flipped.get("prefill", 0) - 1
            assert left < 1 or prefill / RATE_TARGET / 1000 / left > 0.9
        else:
            left = n_decode - flipped.get("decode", 0) - 1
            assert left < 1 or decode / RATE_TARGET / 200 / left > 0.9
