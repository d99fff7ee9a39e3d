"""Decides the number of a model's replicas and their roles, without processes, connections or clocks of its own.

Where replicas are too few, those that drain are taken back first; then one of the other role is flipped if its own can
spare it, which loads no weights; only then nodes are started, which takes minutes. Where they are too many, one at a
time is drained. Between the two lies a gap: replicas are too few above a load of 1, and one is drained only if the load
of the rest stays below `SHRINK_BELOW`. Too few must last for `grow_after_s`, too many for `shrink_after_s`.

Prefill and decode replicas are matched by rates: each role has what its own part of the same traffic needs, and where
there are not enough for both, the load of the busier role is made as small as possible. A flip takes a replica out of
work while it drains. A role that has gained one by a flip therefore gives none away for half of `shrink_after_s`;
otherwise replicas would go to and fro between two roles that are busy in turns.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from emberline.protocol.frames import WorkerRole
from emberline.supervisor.cluster.replica_demand import (
    Capacities,
    Demand,
    NodeOffer,
    Replica,
    backlog_at,
    expected,
    forecast,
    load_of,
)
from emberline.supervisor.cluster.scaling_plan import (
    Action,
    Cause,
    RoleState,
    ScalingBounds,
    ScalingDecision,
    ScalingObservation,
    ScalingPlan,
)

SHRINK_BELOW = 0.9  # load of those that stay
FLIP_BELOW = 0.9  # load of those that stay in the role that gives one
RATIO_GAIN = 0.9  # a flip between two busy roles must bring the load of the busier one below this part of it
KEEP_FLIPPED = 0.5  # of `shrink_after_s`: how long a role that has gained a replica by a flip gives none away
FULL = 1.0 + 1e-9


class _Seen(NamedTuple):
    at_s: float
    now: Demand
    soon: Demand  # that flipped replicas would meet
    later: Demand  # that started replicas would meet


class ScalingPolicy:
    """Scaling policy of one model. Owns the observations of the last minutes. Its owner carries plans out and reports
    them with `applied`, except in a dry run. A new policy drains nothing before it has watched for `shrink_after_s`."""

    def __init__(self, model: str, bounds: ScalingBounds) -> None:
        self.model, self.bounds = model, bounds
        self._seen: deque[_Seen] = deque()
        self._watched_from_s = math.inf
        self._settled_s = -math.inf
        self._gained_s: dict[WorkerRole, float] = {}  # by role: when a replica was last flipped to it

    def decide(self, observation: ScalingObservation, now_s: float) -> ScalingPlan:
        """`now_s` never runs backwards. Takes time in proportion to replicas × those that change."""
        bounds = self.bounds
        capacities = Capacities(observation.replicas, observation.offers)
        active = [each for each in observation.replicas if each.is_active]
        has_work = bool(
            observation.queued_tokens
            or observation.held_requests
            or any(each.in_flight for each in observation.replicas)
        )
        is_awake = has_work or now_s - observation.last_request_s < bounds.idle_s
        expectation = forecast(observation.history, observation.start_s) if is_awake else Demand()
        seen = _measure(observation, bounds, capacities, expectation, now_s)
        self._remember(seen)
        steady, peak = self._window(now_s)
        if not active:  # nothing to wait for
            steady = seen
        kept_s = KEEP_FLIPPED * bounds.shrink_after_s
        keeping = frozenset(role for role, at_s in self._gained_s.items() if now_s - at_s < kept_s)
        round_ = _Round(bounds, observation, capacities, steady, peak, keeping)
        plan = ScalingPlan(
            model=self.model,
            at_s=now_s,
            queued_tokens=observation.queued_tokens,
            demand=seen.now,
            forecast=expectation,
            roles=tuple(round_.state(role) for role in bounds.roles),
        )
        may_settle = now_s - self._settled_s >= bounds.settle_s
        if is_awake or bounds.min_replicas:
            round_.grow(may_settle)
        if not round_.decisions:
            watched = now_s - self._watched_from_s >= bounds.shrink_after_s
            round_.shrink(has_work, is_awake, may_settle and watched)
        return msgspec.structs.replace(plan, decisions=tuple(round_.decisions), held=tuple(round_.held))

    def applied(self, plan: ScalingPlan) -> None:
        if any(each.action in ("drain", "flip") for each in plan.decisions):
            self._settled_s = plan.at_s
        self._gained_s.update({each.role: plan.at_s for each in plan.decisions if each.action == "flip"})

    def _remember(self, seen: _Seen) -> None:
        seen_before, bounds = self._seen, self.bounds
        if not seen_before or seen.at_s - seen_before[-1].at_s > max(bounds.shrink_after_s, bounds.grow_after_s):
            seen_before.clear()
            self._watched_from_s = seen.at_s
        seen_before.append(seen)
        while seen_before[0].at_s < seen.at_s - max(bounds.shrink_after_s, bounds.grow_after_s):
            seen_before.popleft()

    def _window(self, now_s: float) -> tuple[_Seen, Demand]:
        """The demand that has lasted; and the highest that replicas that are started would have met: a queue that is
        gone by then is no reason to keep a replica."""
        last = self._seen[-1]
        now, soon, later = last.now, last.soon, last.later
        peak = later
        for each in self._seen:
            peak = peak.highest(each.later)
            if each.at_s >= now_s - self.bounds.grow_after_s:
                now, soon, later = now.lowest(each.now), soon.lowest(each.soon), later.lowest(each.later)
        return _Seen(now_s, now, soon, later), peak


def _measure(
    observation: ScalingObservation, bounds: ScalingBounds, capacities: Capacities, ahead: Demand, now_s: float
) -> _Seen:
    floor, start_s = expected(ahead), observation.start_s
    in_use = Demand(kv_tokens=observation.kv_tokens)
    queued = observation.queued_tokens
    queue = Demand(prefill_rate=queued / bounds.tolerated_s)
    queue_soon = Demand(prefill_rate=queued / (bounds.tolerated_s + bounds.settle_s))
    arrivals = ahead.prefill_rate
    rates = [
        (
            capacities.of(each).prefill_rate,
            max(0.0, each.since_s + start_s - now_s) if each.state == "starting" else 0.0,
        )
        for each in observation.replicas
        if each.is_active and each.role != "decode"
    ]
    left = backlog_at(queued, arrivals, start_s, rates)
    queue_later = Demand(prefill_rate=left / (bounds.tolerated_s + start_s))
    floor = floor.highest(in_use)
    return _Seen(now_s, floor.highest(queue), floor.highest(queue_soon), floor.highest(queue_later))


class _Round:
    """One decision in the making: a copy of the replicas to which each step is applied."""

    def __init__(
        self,
        bounds: ScalingBounds,
        observation: ScalingObservation,
        capacities: Capacities,
        steady: _Seen,
        peak: Demand,
        keeping: frozenset[WorkerRole],
    ) -> None:
        self._bounds, self._capacities = bounds, capacities
        self._keeping = keeping  # roles that have just gained a replica by a flip
        self._steady, self._soon, self._later, self._peak = steady.now, steady.soon, steady.later, peak
        self._start_s = observation.start_s
        self._replicas = {each.name: each for each in observation.replicas}
        self._free = {offer: offer.n_free for offer in observation.offers}
        self._n_started = 0
        self.decisions: list[ScalingDecision] = []
        self.held: list[str] = []

    def state(self, role: WorkerRole) -> RoleState:
        mine = [each for each in self._replicas.values() if each.role == role]
        load, later = (self._load(role, self._active(role), demand) for demand in (self._steady, self._later))
        return RoleState(
            role=role,
            running=sum(each.state == "running" for each in mine),
            starting=sum(each.state == "starting" for each in mine),
            draining=sum(each.state == "draining" for each in mine),
            load=load if math.isfinite(load) else None,
            load_at_start=later if math.isfinite(later) else None,
        )

    # --- too few -----------------------------------------------------------------------------------------------------

    def grow(self, may_flip: bool) -> None:
        roles = self._bounds.roles
        cause: Cause = "load" if self._n_active() else "wake"
        for role in sorted(roles, key=lambda role: -self._load(role, self._active(role), self._steady)):
            while self._is_short(role, self._steady) and self._undrain(role, cause):
                pass
            while self._is_short(role, self._soon) and (donor := self._spare_donor(role)):
                if not may_flip:
                    self.held.append(
                        f"{self._shortage(role, cause)}: {donor.name} is flipped once the last change has settled"
                    )
                    break
                self._flip(donor, role)
            else:
                while self._is_short(role, self._later) and self._start(role, cause):
                    pass
        while self._n_active() < self._bounds.min_replicas:
            role = max(roles, key=lambda role: (self._load(role, self._active(role), self._later), role))
            if not self._undrain(role, "minimum") and not self._start(role, "minimum"):
                break
        if may_flip and not self.decisions:
            self._match_rates()

    def _is_short(self, role: WorkerRole, demand: Demand) -> bool:
        mine = self._active(role)
        return not mine or self._load(role, mine, demand) > FULL

    def _undrain(self, role: WorkerRole, cause: Cause) -> bool:
        draining = [each for each in self._replicas.values() if each.role == role and not each.is_active]
        if not draining or self._n_active() >= self._bounds.max_replicas:
            return False
        best = max(draining, key=lambda each: (each.in_flight, each.name))
        why = f"{self._shortage(role, cause)}; {best.name} drains, and is at once there again"
        self._replicas[best.name] = msgspec.structs.replace(best, state="running")
        self._decide(action="undrain", role=role, replica=best.name, gpu=best.gpu, cause=cause, why=why)
        return True

    def _spare_donor(self, role: WorkerRole) -> Replica | None:
        """One of another role that helps in this one, and that its own can do without."""
        before = self._load(role, self._active(role), self._soon)
        for donor in self._donors(role):
            if self._load(role, [*self._active(role), donor], self._soon) < before and self._can_spare(donor, role):
                return donor
        return None

    def _can_spare(self, donor: Replica, role: WorkerRole) -> bool:
        rest, roles = self._without(donor), self._bounds.roles
        if not any(each.state == "running" for each in rest):
            others = [other for other in roles if other != role]
            return donor.role not in roles and all(self._runs(other) for other in others)
        return donor.role not in roles or self._load(donor.role, rest, self._soon) <= FLIP_BELOW

    def _flip(self, donor: Replica, role: WorkerRole) -> None:
        spare = "is not used by this model"
        if donor.role in self._bounds.roles:
            load = self._load(donor.role, self._without(donor), self._soon)
            spare = f"has load {_number(load)} without {donor.name}"
        why = f"{self._shortage(role, 'load')}; role {donor.role} {spare}, and a flip loads no weights"
        self._apply_flip(donor, role, "load", why)

    def _match_rates(self) -> None:
        """Between two roles of which one is short and cannot grow: as even as possible."""
        if not self._bounds.disaggregated:
            return
        loads = {role: self._load(role, self._active(role), self._soon) for role in self._bounds.roles}
        short, other = sorted(loads, key=lambda role: -loads[role])
        if loads[short] <= FULL:
            return
        for donor in self._donors(short):
            rest = self._without(donor)
            if donor.role != other or not any(each.state == "running" for each in rest):
                continue
            after = max(
                self._load(other, rest, self._soon),
                self._load(short, [*self._active(short), donor], self._soon),
            )
            if after < RATIO_GAIN * loads[short]:
                why = (
                    f"none can be added sooner; {short} has load {_number(loads[short])} and {other} "
                    f"{_number(loads[other])}: with {donor.name} flipped, the higher is {_number(after)}"
                )
                self._apply_flip(donor, short, "ratio", why)
                return

    def _donors(self, role: WorkerRole) -> list[Replica]:
        """List the replicas of other roles, the soonest drained first. A role without any replica may take one in any
        case."""
        keeping = self._keeping if self._active(role) else frozenset()
        running = [
            each
            for each in self._replicas.values()
            if each.state == "running" and each.role != role and each.role not in keeping
        ]
        return sorted(
            running, key=lambda each: (each.role in self._bounds.roles, each.drain_s, each.in_flight, each.name)
        )

    def _apply_flip(self, donor: Replica, role: WorkerRole, cause: Cause, why: str) -> None:
        self._replicas[donor.name] = msgspec.structs.replace(donor, role=role)
        self._decide(
            action="flip", role=role, from_role=donor.role, replica=donor.name, gpu=donor.gpu, cause=cause, why=why
        )

    def _start(self, role: WorkerRole, cause: Cause) -> bool:
        if len(self._replicas) >= self._bounds.max_replicas:
            reason = f"max_replicas is {self._bounds.max_replicas}"
        elif not (offer := self._cheapest(role)):
            reason = "no node that would help is free"
        else:
            why = f"{self._shortage(role, cause)}; ready in about {_number(self._start_s)} s"
            self._free[offer] -= 1
            self._n_started += 1
            name = f"\0{self._n_started}"  # no worker has such a name
            self._replicas[name] = Replica(name=name, role=role, state="starting", gpu=offer.gpu, cost=offer.cost)
            self._decide(action="start", role=role, gpu=offer.gpu, cause=cause, why=why)
            return True
        self.held.append(f"{self._shortage(role, cause)}, but {reason}")
        return False

    def _cheapest(self, role: WorkerRole) -> NodeOffer | None:
        """Return the cheapest offer that suffices alone; if none does, the one that does the most for its cost."""
        mine = self._active(role)
        before = self._load(role, mine, self._later)
        best: tuple[tuple[float, float], NodeOffer] | None = None
        for offer, n_free in self._free.items():
            if n_free <= 0:
                continue
            added = Replica(name="", role=role, gpu=offer.gpu)
            after = self._load(role, [*mine, added], self._later)
            if before > FULL and after >= before:
                continue
            suffices = after <= FULL
            gain = 1 / after - 1 / before if after > 0 else math.inf
            rank = (0.0, offer.cost) if suffices else (1.0, offer.cost / gain)
            if best is None or rank < best[0]:
                best = rank, offer
        return best[1] if best else None

    def _shortage(self, role: WorkerRole, cause: Cause) -> str:
        mine = self._active(role)
        if cause == "minimum":
            return f"{self._n_active()} of min_replicas {self._bounds.min_replicas}"
        if not mine:
            return f"there is no {_adjective(role)}replica, and requests are expected or wait"
        load = self._load(role, mine, self._steady)
        n_have = "1 {}replica has" if len(mine) == 1 else f"{len(mine)} {{}}replicas have"
        return f"{n_have.format(_adjective(role))} load {_number(load)} ({self._reason(role, mine)})"

    def _reason(self, role: WorkerRole, mine: list[Replica]) -> str:
        """Name the largest part of the demand."""
        demand = self._steady
        parts: list[tuple[float, str]] = [
            (
                self._load(role, mine, Demand(prefill_rate=demand.prefill_rate)),
                f"prefill: {_number(demand.prefill_rate)} uncached tokens/s wanted",
            ),
            (
                self._load(role, mine, Demand(decode_rate=demand.decode_rate)),
                f"decode: {_number(demand.decode_rate)} tokens/s wanted",
            ),
            (self._load(role, mine, Demand(kv_tokens=demand.kv_tokens)), f"KV: {_number(demand.kv_tokens)} tokens"),
        ]
        return max(parts)[1]

    # --- too many ----------------------------------------------------------------------------------------------------

    def shrink(self, has_work: bool, is_awake: bool, may_drain: bool) -> None:
        bounds, n_active = self._bounds, self._n_active()
        if n_active > bounds.max_replicas:
            why = f"{n_active} replicas, and max_replicas is {bounds.max_replicas}"
            self._drain_one(
                has_work, "maximum", lambda role, rest: why if len(rest) or role not in bounds.roles else ""
            )
            return
        if self.held:  # a role is short
            return
        if not may_drain:
            self.held.append(
                "nothing is drained until the load was watched for long enough, and the last change settled"
            )
            return
        if not is_awake and not bounds.min_replicas:
            why = f"no request for {_number(bounds.idle_s)} s, and min_replicas is 0"
            while self._drain_one(has_work, "idle", lambda role, rest: why):
                pass
            return
        if n_active <= bounds.min_replicas:
            self.held.append(f"no role is short, and min_replicas is {bounds.min_replicas}")
            return
        if any(each.state == "starting" for each in self._replicas.values()):
            self.held.append("nothing is drained while replicas start")
            return
        if not self._drain_one(has_work, "surplus", self._surplus):
            self.held.append(f"no role is short, and without one more its load would exceed {SHRINK_BELOW}")

    def _surplus(self, role: WorkerRole, rest: list[Replica]) -> str:
        if role not in self._bounds.roles or not rest:
            return ""
        load = self._load(role, rest, self._peak)
        if load > SHRINK_BELOW:
            return ""
        span = _number(self._bounds.shrink_after_s)
        return f"without it, the highest load of the last {span} s would be {_number(load)} on {len(rest)} of its role"

    def _drain_one(self, has_work: bool, cause: Cause, reason: Callable[[WorkerRole, list[Replica]], str]) -> bool:
        """The most expensive one that may go, the soonest drained of them. The last one that runs keeps its work."""
        running = [each for each in self._replicas.values() if each.state == "running"]
        for each in sorted(running, key=lambda each: (-each.cost, each.drain_s, each.in_flight, each.name)):
            rest = self._without(each)
            is_last = not any(other.state == "running" for other in rest)
            if is_last and (has_work or each.in_flight):
                continue
            if why := reason(each.role, rest):
                self._replicas[each.name] = msgspec.structs.replace(each, state="draining")
                self._decide(action="drain", role=each.role, replica=each.name, gpu=each.gpu, cause=cause, why=why)
                return True
        return False

    # --- replicas ----------------------------------------------------------------------------------------------------

    def _decide(
        self,
        *,
        action: Action,
        role: WorkerRole,
        cause: Cause,
        why: str,
        replica: str = "",
        gpu: str = "",
        from_role: WorkerRole | None = None,
    ) -> None:
        self.decisions.append(
            ScalingDecision(
                action=action, role=role, cause=cause, why=why, replica=replica, gpu=gpu, from_role=from_role
            )
        )

    def _n_active(self) -> int:
        return sum(each.is_active for each in self._replicas.values())

    def _active(self, role: WorkerRole) -> list[Replica]:
        return [each for each in self._replicas.values() if each.is_active and each.role == role]

    def _without(self, replica: Replica) -> list[Replica]:
        """The others of its role."""
        return [each for each in self._active(replica.role) if each.name != replica.name]

    def _runs(self, role: WorkerRole) -> bool:
        return any(each.state == "running" for each in self._active(role))

    def _load(self, role: WorkerRole, replicas: list[Replica], demand: Demand) -> float:
        if not replicas:
            return math.inf  # each role needs one
        return load_of(role, [self._capacities.of(each) for each in replicas], demand)


def _adjective(role: WorkerRole) -> str:
    return "" if role == "both" else f"{role} "


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
