"""The planner's wiring, with an injected clock, a launcher that starts nothing, and members in memory."""

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from emberline.config import ScalingConfig
from emberline.protocol.errors import Unavailable
from emberline.protocol.frames import WorkerRole
from emberline.protocol.member import Member
from emberline.protocol.scaling import (
    ArrivalPoint,
    DecisionRow,
    LoadRow,
    ModelLoad,
    PlanRow,
    ReplicaRow,
    WorkerView,
)
from emberline.supervisor.cluster import planner as planners
from emberline.supervisor.cluster.fleet_observation import ABSENT_S, FLAP_S, FLAPS, FRESH_S, N_INTERVALS, history
from emberline.supervisor.cluster.launcher import LaunchedReplica, ReplicaOrder
from emberline.supervisor.cluster.planner import Deployment, Planner
from emberline.supervisor.cluster.replica_demand import NodeOffer

MODEL = "@cf/a/m"
SECOND_US = 1_000_000
RATE = 1000.0  # uncached prompt tokens per second of a replica


class World:
    """A fleet in memory: the store's rows, the members, and what a launcher would run. Replicas join when told."""

    def __init__(self, n_free: int = 4) -> None:
        self.now_s = 1_000_000.0
        self.holder: object = None
        self.n_free = n_free
        self.load_rows: dict[str, LoadRow] = {}
        self.replica_rows: dict[str, ReplicaRow] = {}
        self.made: dict[tuple[int, int], DecisionRow] = {}
        self.plan: PlanRow | None = None
        self.fleet: dict[str, Member] = {}
        self.running: dict[str, LaunchedReplica] = {}
        self.orders: list[ReplicaOrder] = []
        self.changes: list[tuple[str, str]] = []
        self.start_error = ""

    # the store

    def now_us(self) -> int:
        return int(self.now_s * SECOND_US)

    async def loads(self) -> list[LoadRow]:
        return list(self.load_rows.values())

    async def replicas(self) -> list[Any]:
        return list(self.replica_rows.values())

    async def put_replica(self, row: ReplicaRow) -> None:
        self.replica_rows[row.name] = row

    async def drop_replica(self, name: str) -> None:
        self.replica_rows.pop(name, None)

    async def record(self, plan: PlanRow, decisions: list[DecisionRow]) -> None:
        msgspec.json.encode(plan)
        self.plan = plan
        self.made |= {(row.at_us, row.number): row for row in decisions}

    async def decisions(self, model: str, limit: int = 50) -> list[DecisionRow]:
        return sorted(self.made.values(), key=lambda row: (-row.at_us, row.number))[:limit]

    # the members

    async def all(self) -> list[Member]:
        return list(self.fleet.values())

    async def change(self, name: str, action: Literal["drain", "undrain", "leave"]) -> None:
        self.changes.append((action, name))
        if action == "leave":
            del self.fleet[name]
        else:
            state: Any = {"drain": "draining", "undrain": "joined"}[action]
            self.fleet[name] = msgspec.structs.replace(self.fleet[name], state=state)

    async def set_role(self, name: str, role: WorkerRole) -> None:
        self.changes.append((f"flip to {role}", name))
        self.fleet[name] = msgspec.structs.replace(self.fleet[name], role=role)

    async def forget(self, name: str) -> None:
        self.fleet.pop(name, None)

    # what happens

    def join(self, name: str, role: WorkerRole = "both", **more: Any) -> None:
        us = self.now_us()
        fields: dict[str, Any] = dict(region="", account="", node="n", device="cpu", version=1, is_tls=False, epoch=1)
        fields |= {
            "instance": "i",
            "state": "joined",
            "n_joins": 1,
            "ready_us": us,
            "joined_us": us,
            "seen_us": us,
            **more,
        }
        self.fleet[name] = Member(name=name, address="tcp:h:1", role=role, model=MODEL, fingerprint="f", **fields)

    def report(self, core: str = "a", busy: int = 0, away: tuple[str, ...] = (), **more: Any) -> None:
        """A core's report: it reaches the members that are not `away`."""
        views = [
            WorkerView(
                name=each.name,
                role=each.role,
                connected=each.name not in away,
                draining=each.state == "draining",
                in_flight=busy,
                running=busy,
                kv_tokens=10_000,
                prefill_rate=RATE,
                decode_rate=RATE,
            )
            for each in self.fleet.values()
        ]
        for each in self.fleet.values():
            if each.name not in away:
                self.fleet[each.name] = msgspec.structs.replace(each, seen_us=self.now_us())
        load = ModelLoad(model=MODEL, workers=(*views, *more.pop("workers", ())), **more)
        self.load_rows[core] = LoadRow(core=core, at_us=self.now_us(), load=load)


class FakeLauncher:
    def __init__(self, world: World) -> None:
        self.world = world

    async def offers(self) -> tuple[NodeOffer, ...]:
        running = sum(each.state != "lost" for each in self.world.running.values())
        return (NodeOffer(gpu="cpu", n_free=self.world.n_free - running),)

    async def start(self, order: ReplicaOrder) -> None:
        if self.world.start_error:
            raise Unavailable(self.world.start_error)
        self.world.orders.append(order)
        self.world.running[order.name] = LaunchedReplica(name=order.name, state="starting")

    async def stop(self, name: str) -> None:
        self.world.running.pop(name, None)

    async def replicas(self) -> tuple[LaunchedReplica, ...]:
        return tuple(self.world.running.values())


class FakeLock:
    def __init__(self, world: World) -> None:
        self.world = world

    async def try_hold(self) -> bool:
        self.world.holder = self.world.holder or self
        return self.world.holder is self

    async def is_held(self) -> bool:
        return self.world.holder is self

    async def release(self) -> None:
        if self.world.holder is self:
            self.world.holder = None


def make(
    world: World,
    mode: Literal["on", "dry-run"] = "on",
    name: str = "local",
    can_start: bool = True,
    launcher: FakeLauncher | None = None,
    **bounds: Any,
) -> Planner:
    given = {MODEL: ScalingConfig(**{"max_replicas": 3, "grow_after_s": 0.0, "settle_s": 0.0, **bounds})}
    deployment = Deployment(path=Path("/m.gguf"), region="eu")
    return Planner(
        "core",
        world,
        FakeLock(world),
        world,
        launcher or FakeLauncher(world),
        lambda: given,
        lambda model: deployment,
        mode,
        name,
        can_start,
    )


async def run(planner: Planner, world: World, seconds: float, **report: Any) -> None:
    end_s = world.now_s + seconds
    while world.now_s < end_s:
        world.now_s += 2.0
        world.report(**report)
        await planner.round()


def outcomes(world: World) -> list[tuple[str, str, str]]:
    return [(row.action, row.cause, row.outcome) for row in sorted(world.made.values(), key=lambda row: row.at_us)]


async def test_the_least_number_is_started_and_joins() -> None:
    world = World()
    planner = make(world, min_replicas=2)
    await planner.round()
    assert [(order.model, order.role, order.region) for order in world.orders] == [(MODEL, "both", "eu")] * 2
    assert {row.state for row in world.replica_rows.values()} == {"ordered"}
    await run(planner, world, 4.0)
    assert len(world.orders) == 2, "they are on their way"
    for order in world.orders:
        world.join(order.name)
    await run(planner, world, 2.0)
    assert {row.state for row in world.replica_rows.values()} == {"running"}
    assert outcomes(world) == [("start", "wake", "done"), ("start", "minimum", "done")]
    assert all(row.took_s == 6.0 for row in world.made.values())


async def test_load_starts_another_and_the_surplus_is_drained_and_stopped() -> None:
    world = World()
    planner = make(world, shrink_after_s=60.0)
    await planner.round()
    world.join(world.orders[0].name)
    await run(planner, world, 4.0, queued_tokens=8000)  # 1500 tokens/s are left when another could be there
    assert len(world.orders) == 2
    world.join(world.orders[1].name)
    await run(planner, world, 70.0, busy=1)
    ((action, drained),) = world.changes
    assert action == "drain"
    assert world.replica_rows[drained].state == "draining"
    await run(planner, world, 2.0, busy=1)
    assert world.replica_rows[drained].state == "draining", "it still has a request"
    await run(planner, world, 6.0)
    assert world.changes == [("drain", drained), ("leave", drained)]
    assert drained not in world.running
    assert drained not in world.replica_rows
    assert [row.action for row in world.made.values() if row.cause == "surplus"] == ["drain"]


async def test_a_model_that_is_idle_has_no_replica_until_a_request_waits() -> None:
    world = World()
    planner = make(world, min_replicas=0, idle_s=30.0, shrink_after_s=10.0)
    await run(planner, world, 10.0, idle_s=1e9)
    assert world.orders == []
    await run(planner, world, 2.0, held_requests=1, queued_tokens=10)
    (order,) = world.orders
    world.join(order.name)
    last_s = world.now_s
    while order.name in world.running:
        world.now_s += 2.0
        world.report(idle_s=world.now_s - last_s)
        await planner.round()
        assert world.now_s < last_s + 100
    assert world.now_s >= last_s + 30
    assert world.fleet == {}
    assert ("drain", "idle", "done") in outcomes(world)


async def test_a_dry_run_changes_nothing_and_says_it_once() -> None:
    world = World()
    planner = make(world, "dry-run", min_replicas=1)
    await run(planner, world, 10.0)
    assert (world.orders, world.replica_rows, outcomes(world)) == ([], {}, [("start", "wake", "dry run")])
    assert world.plan is not None
    assert world.plan.mode == "dry-run"
    assert [each["action"] for each in world.plan.plan["decisions"]] == ["start"]


async def test_what_operators_drain_is_left_alone() -> None:
    world = World()
    planner = make(world, min_replicas=1)
    world.join("mine", state="draining")
    await run(planner, world, 4.0)
    assert world.changes == []
    assert len(world.orders) == 1, "it does not count"
    assert world.plan is not None
    assert "mine does not count: an operator drains it" in world.plan.plan["held"]


async def test_a_replica_that_drains_is_undrained_before_another_is_started() -> None:
    world = World()
    planner = make(world, min_replicas=0, shrink_after_s=10.0, idle_s=10.0)
    world.join("w0")
    world.join("w1")
    await run(planner, world, 30.0, busy=0, idle_s=100.0)
    assert sorted(world.changes) == [("drain", "w0"), ("drain", "w1")]
    assert {row.launcher for row in world.replica_rows.values()} == {""}
    await run(planner, world, 2.0, held_requests=1, queued_tokens=10)
    assert world.changes[2:] == [("undrain", "w1")]
    assert world.orders == []
    assert set(world.replica_rows) == {"w0"}


async def test_a_member_that_is_away_for_a_moment_is_not_replaced() -> None:
    world = World()
    planner = make(world, min_replicas=1)
    world.join("w0")
    await run(planner, world, 4.0)
    await run(planner, world, ABSENT_S - 6, away=("w0",))
    assert world.orders == []
    await run(planner, world, 10.0, away=("w0",))
    assert len(world.orders) == 1
    await run(planner, world, 30.0, away=("w0",))
    assert len(world.orders) == 1


async def test_a_node_that_flaps_is_replaced_once() -> None:
    world = World()
    planner = make(world, min_replicas=1, shrink_after_s=20.0)
    world.join("w0")
    await run(planner, world, 4.0)
    for turn in range(20):
        world.join("w0", n_joins=turn + 1)
        await run(planner, world, 6.0)
        await run(planner, world, 6.0, away=("w0",))
        for order in world.orders:
            if order.name not in world.fleet:
                world.join(order.name)
    assert len(world.orders) == 1
    assert world.changes == []
    assert FLAPS < 20
    await run(planner, world, FLAP_S + 60)
    assert [action for action, _ in world.changes][:1] == ["drain"], "it has stayed: one is too many"
    assert len({name for _, name in world.changes}) == 1
    assert len(world.orders) == 1


async def test_a_start_that_fails_is_tried_again_later_and_later() -> None:
    world = World()
    world.start_error = "no room"
    planner = make(world, min_replicas=1)
    await run(planner, world, 100.0)
    tries_s = sorted(row.at_us / SECOND_US for row in world.made.values())
    assert [row.outcome for row in world.made.values()] == ["failed: no room"] * len(tries_s)
    gaps = [later - earlier for earlier, later in pairwise(tries_s)]
    assert 3 <= len(tries_s) <= 6
    assert gaps == sorted(gaps)
    assert world.replica_rows == {}


async def test_a_replica_that_never_joins_is_given_up() -> None:
    world = World()
    planner = make(world, min_replicas=1, start_s=10.0)
    await planner.round()
    name = world.orders[0].name
    world.running[name] = LaunchedReplica(name=name, state="lost", problem="out of memory")
    await run(planner, world, 2.0)
    assert [row.outcome for row in world.made.values()] == ["failed: out of memory"]
    assert name not in world.replica_rows
    assert len(world.orders) == 1, "not at once"
    await run(planner, world, 8.0)
    assert len(world.orders) == 2
    await run(planner, world, 130.0)
    assert world.orders[1].name not in world.running
    assert any("has not joined within 120 s" in row.outcome for row in world.made.values())


async def test_a_start_that_fails_late_is_tried_again_later_and_later_too() -> None:
    """What a start takes until it fails does not count as waiting."""
    world = World()
    planner = make(world, min_replicas=1, start_s=10.0)
    failed_s: list[float] = []
    gaps: list[float] = []
    while world.now_s < 1_000_000.0 + 3600:
        await run(planner, world, 2.0)
        for name in list(world.running):
            gaps += [world.now_s - failed_s[-1]] if failed_s else []
            await run(planner, world, 58.0)  # it loads
            world.running[name] = LaunchedReplica(name=name, state="lost", problem="out of memory")
            await run(planner, world, 2.0)
            failed_s.append(world.now_s)
    assert gaps[:3] == [6.0, 10.0, 20.0]
    assert gaps == sorted(gaps)
    assert gaps[-2:] == [planners.LAST_RETRY_S] * 2, "and it stays so"


async def test_a_start_without_an_answer_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may have begun it all the same."""
    world = World()
    planner = make(world, min_replicas=1)
    stop = FakeLauncher.stop

    async def start(self: FakeLauncher, order: ReplicaOrder) -> None:
        world.running[order.name] = LaunchedReplica(name=order.name, state="starting")
        raise Unavailable("no answer")

    async def no_stop(self: FakeLauncher, name: str) -> None:
        raise Unavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(FakeLauncher, "start", start)
        await run(planner, world, 2.0)
        assert (world.running, world.replica_rows) == ({}, {})
        patch.setattr(FakeLauncher, "stop", no_stop)
        await run(planner, world, 8.0)
        (name,) = world.running
        assert world.replica_rows[name].state == "ordered", "not forgotten"
    assert FakeLauncher.stop is stop
    world.running[name] = LaunchedReplica(name=name, state="running")
    world.join(name)
    await run(planner, world, 4.0)
    assert world.replica_rows[name].state == "running"
    assert outcomes(world)[-1] == ("start", "wake", "done")


async def test_replicas_that_all_flap_do_not_take_every_node() -> None:
    world = World(n_free=10)
    planner = make(world, min_replicas=1, max_replicas=2)
    for turn in range(30):
        for name in world.running:
            world.join(name, n_joins=turn + 1)
        await run(planner, world, 4.0)
    assert len(world.orders) == 2
    assert world.plan is not None
    assert "2 replicas join again and again: none is started in their place" in world.plan.plan["held"]


async def test_a_planner_that_dies_before_a_replica_is_told_to_leave_is_followed_up() -> None:
    world = World()
    planner = make(world, min_replicas=0, idle_s=4.0, shrink_after_s=4.0)
    world.report(held_requests=1)
    await planner.round()
    name = world.orders[0].name
    world.join(name)
    await run(planner, world, 4.0, held_requests=1)
    world.fleet[name] = msgspec.structs.replace(world.fleet[name], state="draining")
    world.replica_rows[name] = msgspec.structs.replace(world.replica_rows[name], state="leaving")
    await run(planner, world, 4.0, busy=1)
    assert world.changes == [], "it has work"
    await run(planner, world, 4.0, idle_s=60.0)
    assert world.changes == [("leave", name)]
    assert name not in world.running
    assert name not in world.replica_rows


async def test_after_a_restart_of_the_core_its_replicas_are_gone_at_once() -> None:
    world = World()
    await make(world, min_replicas=1).round()
    (order,) = world.orders
    world.join(order.name)
    await run(make(world, min_replicas=1), world, 2.0)
    world.holder = None
    world.running.clear()  # they ended with the core
    world.now_s += 5.0
    world.report(away=(order.name,))
    await make(world, min_replicas=1).round()
    assert len(world.orders) == 2
    assert order.name not in world.fleet


async def test_replicas_of_a_core_that_is_gone_are_replaced_before_they_would_be_lost() -> None:
    world = World()
    await make(world, name="local a", min_replicas=1).round()
    (order,) = world.orders
    world.join(order.name)
    await run(make(world, name="local a", min_replicas=1), world, 2.0)
    world.holder = None
    world.running.clear()
    other = make(world, name="local b", min_replicas=1)
    await run(other, world, FRESH_S - 3, core="b", away=(order.name,))
    assert len(world.orders) == 1, "the other core may still be there"
    await run(other, world, 6.0, core="b", away=(order.name,))
    assert len(world.orders) == 2


async def test_without_its_launcher_it_still_uses_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    planner = make(world, min_replicas=1)
    await planner.round()
    (order,) = world.orders
    world.join(order.name)

    async def replicas(self: FakeLauncher) -> None:
        raise Unavailable("Ray does not answer")

    monkeypatch.setattr(FakeLauncher, "replicas", replicas)
    await run(planner, world, 4.0)
    assert order.name in world.replica_rows
    assert world.plan is not None
    assert not world.plan.observation["offers"]


async def test_a_dedicated_member_does_not_count() -> None:
    world = World()
    world.join("acmes", account="acme")
    await make(world, min_replicas=1).round()
    assert len(world.orders) == 1


async def test_one_plans_and_another_goes_on_where_it_has_ended() -> None:
    world = World()
    first, second = make(world, shrink_after_s=20.0, settle_s=60.0), make(world, shrink_after_s=20.0, settle_s=60.0)
    for name in ("w0", "w1", "w2"):
        world.join(name)
    await run(first, world, 24.0)
    await second.round()
    assert (first.is_planning, second.is_planning) == (True, False)
    assert len(world.changes) == 1
    drained_s = world.now_s
    world.holder = None  # the first one's core was killed
    while len(world.changes) == 1:
        await run(second, world, 2.0)
        assert world.now_s < drained_s + 200
    assert world.now_s >= drained_s + 50, "the last change has to settle, whoever made it"
    assert world.changes[1][0] == "drain"
    assert len({name for _, name in world.changes}) == 2


async def test_workers_of_a_core_count_and_are_not_changed() -> None:
    world = World()
    planner = make(world, min_replicas=0, shrink_after_s=10.0, idle_s=5.0)
    own = WorkerView(name="own-0", connected=True, prefill_rate=RATE)
    await run(planner, world, 20.0, idle_s=100.0, workers=(own,))
    assert world.changes == []
    assert world.plan is not None
    assert any("drain of own-0 would help" in why for why in world.plan.plan["held"])


async def test_roles_are_flipped_before_one_is_started() -> None:
    world = World(n_free=0)
    planner = make(world, min_replicas=2, max_replicas=4, disaggregated=True)
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"), ("d2", "decode")):
        world.join(name, role)  # type: ignore[arg-type]
    await run(planner, world, 4.0, queued_tokens=int(RATE * 2 * 1.5))
    assert [action for action, _ in world.changes] == ["flip to prefill"]
    assert ("flip", "load", "done") in outcomes(world)


async def test_a_planner_that_takes_over_does_not_take_a_flip_back_at_once() -> None:
    world = World(n_free=0)
    bounds: dict[str, Any] = dict(min_replicas=2, max_replicas=4, disaggregated=True, shrink_after_s=200.0)
    first, second = make(world, **bounds), make(world, **bounds)
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"), ("d2", "decode")):
        world.join(name, role)  # type: ignore[arg-type]
    await run(first, world, 4.0, queued_tokens=int(RATE * 2 * 1.5))
    assert [action for action, _ in world.changes] == ["flip to prefill"]
    world.holder = None  # the first one's core was killed
    await run(second, world, 2.0)
    policy = second._policies[MODEL]
    assert policy._gained_s == first._policies[MODEL]._gained_s != {}
    assert policy._settled_s == first._policies[MODEL]._settled_s


async def test_a_change_that_fails_is_not_tried_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    planner = make(world, min_replicas=1, shrink_after_s=4.0)
    for name in ("w0", "w1"):
        world.join(name)

    async def change(self: World, name: str, action: str) -> None:
        raise Unavailable("it does not answer")

    monkeypatch.setattr(World, "change", change)
    await run(planner, world, 180.0)
    assert {row.outcome for row in world.made.values()} == {"failed: it does not answer"}
    assert len(world.made) == 3, "once a minute"
    assert world.plan is not None
    assert any("but has failed: it does not answer" in why for why in world.plan.plan["held"])


async def test_a_model_that_cannot_be_planned_does_not_keep_the_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    planner = make(world, min_replicas=1)
    bounds = planner._bounds()[MODEL]
    planner._bounds = lambda: {"@cf/a/odd": bounds, MODEL: bounds}
    decisions = World.decisions

    async def of(self: World, model: str, limit: int = 50) -> list[DecisionRow]:
        if model != MODEL:
            raise KeyError(model)
        return await decisions(self, model, limit)

    monkeypatch.setattr(World, "decisions", of)
    await planner.round()
    assert [order.model for order in world.orders] == [MODEL]


async def test_reports_of_several_cores_add_up_and_old_ones_do_not_count() -> None:
    world = World()
    planner = make(world, min_replicas=1)
    world.join("w0")
    for core, tokens in (("a", 100), ("b", 50)):
        world.report(core, queued_tokens=tokens, busy=1)
    await planner.round()
    assert world.plan is not None
    assert world.plan.plan["queued_tokens"] == 150
    assert [each["in_flight"] for each in world.plan.observation["replicas"]] == [2]
    world.now_s += FRESH_S + 1
    world.report("b", queued_tokens=50)
    await planner.round()
    assert world.plan.plan["queued_tokens"] == 50


async def test_one_that_leaves_in_this_round_is_not_undrained() -> None:
    """A request comes when the last one has just drained."""
    world = World()
    planner = make(world, min_replicas=0)
    world.join("w0", state="draining")
    row = ReplicaRow(
        name="w0", model=MODEL, role="both", gpu="", state="draining", since_us=world.now_us(), launcher="local"
    )
    world.replica_rows["w0"], world.running["w0"] = row, LaunchedReplica(name="w0", state="running")
    await run(planner, world, 2.0, held_requests=1)
    assert world.changes == [("leave", "w0")]
    assert outcomes(world) == [("start", "wake", "begun")]


class LosingLauncher(FakeLauncher):
    """The lock is lost while it is asked for something: another core plans by then."""

    def __init__(self, world: World, call: str, *, has_given_up: bool = False) -> None:
        super().__init__(world)
        self._call, self._has_given_up = call, has_given_up

    async def offers(self) -> tuple[NodeOffer, ...]:
        self._lose("offers")
        return await super().offers()

    async def start(self, order: ReplicaOrder) -> None:
        await super().start(order)
        self._lose("start")

    def _lose(self, call: str) -> None:
        if call == self._call:
            self.world.holder = "another core"
            if self._has_given_up:
                self.world.replica_rows.clear()


async def test_without_the_lock_nothing_is_done_by_what_was_seen_before() -> None:
    world = World()
    planner = make(world, min_replicas=2, launcher=LosingLauncher(world, "offers"))
    await planner.round()
    assert (world.orders, world.replica_rows, world.plan) == ([], {}, None)
    assert not planner.is_planning
    world.holder = None
    other = make(world, min_replicas=2)
    await other.round()
    assert len(world.orders) == 2


@pytest.mark.parametrize("action", ["drain", "flip", "leave"])
async def test_members_are_not_changed_without_the_lock(action: str) -> None:
    world = World(n_free=0)
    more: dict[str, Any] = {"disaggregated": True, "max_replicas": 2} if action == "flip" else {}
    planner = make(world, shrink_after_s=0.0, **{"max_replicas": 1, **more})
    for name in ("w0", "w1"):
        world.join(name)
    if action == "leave":
        world.join("w1", state="draining")
        row = ReplicaRow(
            name="w1", model=MODEL, role="both", gpu="", state="draining", since_us=world.now_us(), launcher="local"
        )
        world.replica_rows["w1"] = row
        world.running["w1"] = LaunchedReplica(name="w1", state="running")
    planner._launcher = LosingLauncher(world, "offers")
    await run(planner, world, 2.0)
    assert world.changes == []
    world.holder, planner._launcher = None, FakeLauncher(world)
    await run(planner, world, 20.0)
    assert world.changes, "with the lock it is done"


@pytest.mark.parametrize("has_given_up", [True, False])
async def test_a_start_that_the_lock_was_lost_in(has_given_up: bool) -> None:
    """The other planner has given it up, and would never stop it; or it knows of it, and goes on with it."""
    world = World()
    planner = make(world, min_replicas=2, launcher=LosingLauncher(world, "start", has_given_up=has_given_up))
    await planner.round()
    assert len(world.orders) == 1
    assert bool(world.running) == bool(world.replica_rows) == (not has_given_up)
    assert world.made == {}


async def test_a_core_that_can_start_nothing_lets_one_plan_that_can() -> None:
    world = World()
    idle = make(world, can_start=False)
    await idle.round()
    assert idle.is_planning, "there is no other one"
    world.report("b", can_start=True)
    await idle.round()
    assert not idle.is_planning
    assert world.holder is None
    able = make(world)
    await able.round()
    assert able.is_planning
    world.holder = None  # it is gone
    world.now_s += FRESH_S + 1.0
    await idle.round()
    assert idle.is_planning


async def test_a_round_without_bounds_lets_go_of_the_lock() -> None:
    world = World()
    planner = make(world)
    await planner.round()
    assert world.holder is not None
    planner._bounds = dict  # type: ignore[assignment]
    await planner.round()
    assert world.holder is None


def test_arrivals_of_all_cores_are_aligned_by_their_numbers() -> None:
    def row(core: str, *points: ArrivalPoint) -> LoadRow:
        return LoadRow(core=core, at_us=0, load=ModelLoad(model=MODEL, arrivals=points))

    rows = [
        row("a", ArrivalPoint(10, 1, 100, 5, 64), ArrivalPoint(12, 1, 50, 5, 32), ArrivalPoint(13, 9, 900, 9, 9)),
        row("b", ArrivalPoint(10, 1, 20, 7, 80)),
    ]
    found = history(rows, 13 * 10 * SECOND_US)
    assert [(each.uncached_tokens, each.output_tokens, each.kv_tokens) for each in found] == [
        (120, 12, 80),
        (0, 0, 0),
        (50, 5, 32),
    ]
    assert len(history([row("a", ArrivalPoint(1, 1, 1, 1, 1))], 1000 * 10 * SECOND_US)) == N_INTERVALS
    assert history([], 0) == ()


@pytest.mark.parametrize("model", ["@cf/a/M 1.5!", "x" * 100, "@cf/ü", "/"])
def test_replicas_have_names_that_members_may_have(model: str) -> None:
    from emberline.protocol.member import MemberName

    for role in ("both", "prefill"):
        msgspec.convert(planners.replica_name(model, role), MemberName)  # type: ignore[arg-type]
