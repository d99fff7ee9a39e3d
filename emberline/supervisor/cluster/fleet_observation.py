"""Turns the rows of cores, members and replicas into the scaling policy's observation of a model. Pure: no clock, no
store.

A worker that is away for a moment counts as one that starts, so no other is started in its place. A worker that joins
again and again does not count until it has stayed for a while, so it is replaced once, and not each time it leaves.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from emberline.protocol.member import Member
from emberline.protocol.scaling import STEP_S, LoadRow, ReplicaRow, WorkerView
from emberline.supervisor.cluster.launcher import LOCAL, LaunchedReplica
from emberline.supervisor.cluster.replica_demand import (
    ArrivalInterval,
    NodeOffer,
    Replica,
    ReplicaCapacity,
    ReplicaState,
)
from emberline.supervisor.cluster.scaling_plan import ScalingObservation

FRESH_S = 15.0  # a core that has reported within it is there
ABSENT_S = 60.0  # a member that is away for less is expected back
FLAPS = 3  # a member that has joined more often than this in quick succession
FLAP_S = 120.0  # does not count before it has stayed for so long
START_LIMIT = 4.0  # a start that takes so many times as long as expected has failed,
MIN_START_LIMIT_S = 120.0  # but not before
N_INTERVALS = 30  # that the forecast rests on
DAY_S = 86400.0


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of all models: cores, members and replicas."""

    now_us: int  # the store's clock
    loads: Sequence[LoadRow] = ()
    members: Sequence[Member] = ()
    rows: Sequence[ReplicaRow] = ()
    launcher: str = ""  # the planner's own; empty: it does not answer
    launched: Mapping[str, LaunchedReplica] = {}  # by it
    offers: tuple[NodeOffer, ...] = ()


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the planner sees it."""

    observation: ScalingObservation
    fixed: frozenset[str] = frozenset()  # workers that are no members: they count, and are not the planner's to change
    joined: tuple[ReplicaRow, ...] = ()  # replicas that were ordered, and are there now
    failed: tuple[tuple[ReplicaRow, str], ...] = ()  # that were ordered, and will not come: why
    idle: tuple[ReplicaRow, ...] = ()  # that drain, and have nothing left to do
    ended: tuple[ReplicaRow, ...] = ()  # that left, or are gone for good
    resumed: tuple[ReplicaRow, ...] = ()  # that an operator has undrained
    flapping: tuple[ReplicaRow, ...] = ()  # that do not count, since they join again and again
    notes: tuple[str, ...] = ()  # about replicas that do not count

    @property
    def has_news(self) -> bool:
        """True if the planner acts on this observation, so that the fleet changes."""
        idle = [row for row in self.idle if row.launcher]
        return bool(self.joined or self.failed or idle or self.ended or self.resumed)


class _Observer:
    """Builds the observation of one model."""

    def __init__(self, model: str, fleet: Fleet, start_s: float) -> None:
        self.model, self.fleet, self.start_s = model, fleet, start_s
        self.now_us = fleet.now_us
        rows = [row for row in fleet.loads if row.load.model == model]
        self.fresh = [row for row in rows if self._age_s(row.at_us) <= FRESH_S]
        self.all_loads = rows
        self.cores = {row.core for row in fleet.loads if self._age_s(row.at_us) <= FRESH_S}
        self.views = _merged([view for row in self.fresh for view in row.load.workers])
        self.rows = {row.name: row for row in fleet.rows if row.model == model}
        self.members = {each.name: each for each in fleet.members if each.model == model and not each.account}
        self.replicas: list[Replica] = []
        self.notes: list[str] = []
        self.found: dict[str, list[ReplicaRow]] = defaultdict(list)
        self.failed: list[tuple[ReplicaRow, str]] = []

    def _age_s(self, at_us: int) -> float:
        return (self.now_us - at_us) / 1e6

    def member(self, member: Member) -> None:
        row, view = self.rows.get(member.name), self.views.get(member.name)
        here = view is not None and view.connected
        if member.state == "leaving":
            return
        if row is not None and not here and self._is_gone(row):
            self.found["ended"].append(row)
            return
        if member.n_joins > FLAPS and self._age_s(member.joined_us) < FLAP_S:
            self.notes.append(f"{member.name} does not count: it has joined {member.n_joins} times in quick succession")
            if row is not None and row.launcher:
                self.found["flapping"].append(row)
            return
        if member.state == "draining":
            if row is None or row.state not in ("draining", "leaving"):
                self.notes.append(f"{member.name} does not count: an operator drains it")
            elif not here and self._age_s(member.seen_us) > ABSENT_S:
                self.found["ended"].append(row)
            else:
                if row.state == "draining":
                    self._add(member.name, member.role, "draining", row.since_us, row)
                if here and view is not None and not view.in_flight and not view.running:
                    self.found["idle"].append(row)
            return
        if row is not None and row.state == "draining" and here:
            self.found["resumed"].append(row)
        if here:
            if row is not None and row.state == "ordered":
                self.found["joined"].append(row)
            self._add(member.name, member.role, "running", member.joined_us, row, member.device)
        elif self._age_s(member.seen_us) < ABSENT_S:
            self._add(member.name, member.role, "starting", member.seen_us, row, member.device)
        else:
            self.notes.append(f"{member.name} does not count: no core reaches it")

    def _is_gone(self, row: ReplicaRow) -> bool:
        """True if the replica's launcher has lost it or does not know it, or was a core that is gone. Called only for
        replicas that no core reaches."""
        launched = self.fleet.launched.get(row.name)
        if row.launcher and row.launcher == self.fleet.launcher:
            return launched is None or launched.state == "lost"
        return row.launcher.startswith(LOCAL) and row.launcher.removeprefix(LOCAL) not in self.cores

    def ordered(self, row: ReplicaRow) -> None:
        """A row without a member."""
        launched = self.fleet.launched.get(row.name)
        age_s = self._age_s(row.since_us)
        if row.state == "leaving" or (row.state == "draining" and age_s > ABSENT_S):
            self.found["ended"].append(row)
        elif row.state == "ordered":
            limit_s = max(MIN_START_LIMIT_S, START_LIMIT * self.start_s)
            if self._is_gone(row):
                self.failed.append((row, launched.problem if launched is not None else "its process is gone"))
            elif age_s > limit_s:
                self.failed.append((row, f"it has not joined within {limit_s:.0f} s"))
            else:
                self._add(row.name, row.role, "starting", row.since_us, row)
        elif row.state == "running":
            if age_s < ABSENT_S and not self._is_gone(row):
                self._add(row.name, row.role, "starting", row.since_us, row)
            else:
                self.found["ended"].append(row)

    def own_worker(self, view: WorkerView) -> None:
        """One that a core has started, or that is configured there."""
        if view.connected and not view.draining:
            self._add(view.name, view.role, "running", 0, None)

    def _add(
        self, name: str, role: str, state: ReplicaState, since_us: int, row: ReplicaRow | None, gpu: str = ""
    ) -> None:
        view = self.views.get(name, WorkerView(name=name))
        capacity = ReplicaCapacity(
            prefill_rate=view.prefill_rate, decode_rate=view.decode_rate, kv_tokens=view.kv_tokens
        )
        self.replicas.append(
            Replica(
                name=name,
                role=role,  # type: ignore[arg-type]
                state=state,
                since_s=since_us / 1e6,
                gpu=gpu if row is None else row.gpu,
                cost=self._cost(row),
                capacity=capacity,
                in_flight=view.in_flight,
                drain_s=view.drain_s if name in self.members else DAY_S,  # others are not drained
            )
        )

    def _cost(self, row: ReplicaRow | None) -> float:
        if row is None:
            return 1.0
        return next((offer.cost for offer in self.fleet.offers if offer.gpu == row.gpu), 1.0)

    def observation(self) -> ScalingObservation:
        workers = [self.views[each.name] for each in self.replicas if each.name in self.views]
        loads = [row.load for row in self.fresh]
        last_s = max((row.at_us / 1e6 - row.load.idle_s for row in self.all_loads), default=-math.inf)
        return ScalingObservation(
            replicas=tuple(sorted(self.replicas, key=lambda each: each.name)),
            offers=self.fleet.offers,
            queued_tokens=sum(load.queued_tokens for load in loads),
            held_requests=sum(load.held_requests for load in loads),
            kv_tokens=sum(view.kv_used_tokens for view in workers),
            history=history(self.all_loads, self.now_us),
            start_s=self.start_s,
            last_request_s=last_s,
        )


def observe(model: str, fleet: Fleet, start_s: float) -> Sight:
    """`start_s`: what a replica takes to start, as measured."""
    observer = _Observer(model, fleet, start_s)
    known = {member.name for member in fleet.members}
    for member in observer.members.values():
        observer.member(member)
    for row in observer.rows.values():
        if row.name not in known:
            observer.ordered(row)
    fixed = [view for name, view in observer.views.items() if name not in known and name not in observer.rows]
    for view in fixed:
        observer.own_worker(view)
    found = observer.found
    return Sight(
        observation=observer.observation(),
        fixed=frozenset(view.name for view in fixed),
        joined=tuple(found["joined"]),
        failed=tuple(observer.failed),
        idle=tuple(found["idle"]),
        ended=tuple(found["ended"]),
        resumed=tuple(found["resumed"]),
        flapping=tuple(found["flapping"]),
        notes=tuple(observer.notes),
    )


def history(rows: Sequence[LoadRow], now_us: int) -> tuple[ArrivalInterval, ...]:
    """Sum the arrivals of all cores by interval, without the last interval, which is not over."""
    now = now_us // (STEP_S * 1_000_000)
    sums: dict[int, list[int]] = {}
    for row in rows:
        for point in row.load.arrivals:
            if point.number < now:
                total = sums.setdefault(point.number, [0, 0, 0])
                total[0] += point.uncached_tokens
                total[1] += point.output_tokens
                total[2] = max(total[2], point.kv_tokens)  # each core sees that of all
    if not sums:
        return ()
    return tuple(
        ArrivalInterval(seconds=float(STEP_S), uncached_tokens=tokens, output_tokens=output, kv_tokens=kv)
        for tokens, output, kv in (
            sums.get(number, (0, 0, 0)) for number in range(max(min(sums), now - N_INTERVALS), now)
        )
    )


def _merged(views: Sequence[WorkerView]) -> dict[str, WorkerView]:
    """Each worker, as all cores together see it."""
    merged: dict[str, WorkerView] = {}
    for view in views:
        known = merged.get(view.name)
        if known is None:
            merged[view.name] = view
            continue
        one, other = (known, view) if known.connected else (view, known)
        merged[view.name] = msgspec.structs.replace(
            one,
            in_flight=one.in_flight + other.in_flight,
            running=max(one.running, other.running),
            kv_used_tokens=max(one.kv_used_tokens, other.kv_used_tokens),
            kv_tokens=max(one.kv_tokens, other.kv_tokens),
            prefill_rate=_known_mean(one.prefill_rate, other.prefill_rate),
            decode_rate=_known_mean(one.decode_rate, other.decode_rate),
            drain_s=max(one.drain_s, other.drain_s),
        )
    return merged


def _known_mean(one: float, other: float) -> float:
    return (one + other) / 2 if one and other else one or other
