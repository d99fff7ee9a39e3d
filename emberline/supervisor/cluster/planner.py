"""The planner: looks at the fleet every few seconds, lets each model's policy decide, and carries the decisions out.

One core plans at a time, the one that holds the lock. What it decides from and what it has begun is in the store, so
another core goes on when it dies. Before each change it asks whether it still has the lock: one that was cut off or
stopped for a while changes nothing by what it had seen before. Requests never wait for it.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from emberline.config import ScalingConfig
from emberline.protocol.errors import EmberlineError, Unavailable
from emberline.protocol.frames import WorkerRole
from emberline.protocol.member import Member
from emberline.protocol.parallel_layout import Layout
from emberline.protocol.scaling import DecisionRow, LoadRow, PlanRow, ReplicaRow
from emberline.supervisor.cluster.fleet_observation import FRESH_S, Fleet, Sight, observe
from emberline.supervisor.cluster.launcher import Launcher, ReplicaOrder
from emberline.supervisor.cluster.replica_demand import Demand
from emberline.supervisor.cluster.scaling_plan import ScalingBounds, ScalingDecision, ScalingObservation, ScalingPlan
from emberline.supervisor.cluster.scaling_policy import ScalingPolicy

ROUND_S = 2.0
MIN_WATCHED_ROUNDS = 5  # before something is drained
N_STARTS = 5  # the last ones, of whose times the mean is expected
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0  # after a start that failed; it doubles with each
CHANGE_RETRY_S = 60.0  # after a drain, an undrain or a flip that failed
FAILED_S = 600.0  # a failure so long before the next start, or before now, does not count

Mode = Literal["on", "dry-run"]
log = logging.getLogger("emberline.planner")


class Lock(Protocol):
    async def try_hold(self) -> bool: ...

    async def is_held(self) -> bool: ...

    async def release(self) -> None: ...


class PlannerStore(Protocol):
    """The rows that cores and planners share."""

    def now_us(self) -> int: ...

    async def loads(self) -> list[LoadRow]: ...

    async def replicas(self) -> list[ReplicaRow]: ...

    async def put_replica(self, row: ReplicaRow) -> None: ...

    async def drop_replica(self, name: str) -> None: ...

    async def record(self, plan: PlanRow, decisions: list[DecisionRow]) -> None: ...

    async def decisions(self, model: str, limit: int = 50) -> list[DecisionRow]: ...


class Members(Protocol):
    """The member table, as any core changes it."""

    async def all(self) -> list[Member]: ...

    async def change(self, name: str, action: Literal["drain", "undrain", "leave"]) -> None: ...

    async def set_role(self, name: str, role: WorkerRole) -> None: ...

    async def forget(self, name: str) -> None:
        """One that is gone for good."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which this core would start replicas of a model."""

    path: Path
    layout: Layout = Layout()
    region: str = ""


class LockLostError(Exception):
    """The planner lost its lock in the middle of a round, so another core may plan already."""


class Planner:
    """Planner of one core. It is idle while another core holds the lock."""

    def __init__(
        self,
        core: str,
        store: PlannerStore,
        lock: Lock,
        members: Members,
        launcher: Launcher,
        bounds: Callable[[], Mapping[str, ScalingConfig]],
        deployment: Callable[[str], Deployment | None],
        mode: Mode = "on",
        launcher_name: str = "local",
        can_start: bool = True,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
        round_s: float = ROUND_S,
    ) -> None:
        """`bounds` of the scaled models; `deployment` of a model, None: it cannot be started from here.
        `launcher_name`: the same at another core if, and only if, that one knows the same replicas. `can_start`:
        whether the launcher starts anything at all. `wait`: for the next round, or until there is news."""
        self._can_start = can_start
        self._launcher_name, self._wait = launcher_name, wait
        self._round_s = round_s
        self._core, self._store, self._lock = core, store, lock
        self._members, self._launcher = members, launcher
        self._bounds, self._deployment = bounds, deployment
        self._mode = mode
        self._policies: dict[str, ScalingPolicy] = {}
        self.is_planning = False  # as of the last round

    async def run(self) -> None:
        """Plan in rounds until cancelled."""
        try:
            while True:
                try:
                    await self.round()
                except EmberlineError as error:
                    log.warning("the planner could not look at the fleet: %s", error.message)
                except Exception:  # a bug: replicas that run go on, and the next round may succeed
                    log.exception("the planner failed")
                await self._wait(self._round_s)
        finally:
            await self._lock.release()

    async def round(self) -> None:
        bounds = dict(self._bounds())
        if not bounds or not await self._may_plan():
            if self.is_planning:
                log.info("another core plans now" if bounds else "no model is scaled any more")
            return await self._stand_by()
        if not self.is_planning:
            log.info("this core plans", extra={"mode": self._mode})
        self.is_planning = True
        self._policies = {model: policy for model, policy in self._policies.items() if model in bounds}
        for model, its in bounds.items():
            try:
                await self._plan(model, its)
            except LockLostError:
                log.warning("this core has lost the planner's lock, and drops what it had decided")
                return await self._stand_by()
            except EmberlineError as error:
                log.warning("%s could not be planned: %s", model, error.message)
            except Exception:  # a bug: the other models are planned all the same
                log.exception("%s could not be planned", model)

    async def _may_plan(self) -> bool:
        """True if this core holds the planner's lock. A core that can start nothing leaves the lock to one that can."""
        if not self._can_start:
            since_us = self._store.now_us() - int(FRESH_S * 1e6)
            loads = await self._store.loads()
            if any(row.load.can_start and row.at_us >= since_us for row in loads):
                return False
        return await self._lock.try_hold()

    async def _stand_by(self) -> None:
        if self.is_planning:
            await self._lock.release()
        self.is_planning = False
        self._policies.clear()

    async def _check_lock(self) -> None:
        """Before each change. LockLostError."""
        if not await self._lock.is_held():
            raise LockLostError

    async def _fleet(self) -> Fleet:
        launcher = self._launcher_name
        try:
            launched, offers = await self._launcher.replicas(), await self._launcher.offers()
        except EmberlineError as error:  # what needs no launcher is done meanwhile
            log.warning("no replica can be started: %s", error.message)
            launcher, launched, offers = "", (), ()
        return Fleet(
            loads=await self._store.loads(),
            members=await self._members.all(),
            rows=await self._store.replicas(),
            launcher=launcher,
            launched={each.name: each for each in launched},
            offers=offers,
            now_us=self._store.now_us(),
        )

    async def _plan(self, model: str, bounds: ScalingConfig) -> None:
        """One model; each sees what those before it have left."""
        fleet, past = await self._fleet(), await self._store.decisions(model)
        start_s = expected_start_s(past, bounds.start_s)
        sight = observe(model, fleet, start_s)
        changed = await self._settle(sight, past, fleet.now_us)
        if self._mode == "on" and sight.has_news:  # one that has just been told to leave is not to be undrained
            fleet = await self._fleet()
            sight = observe(model, fleet, start_s)
        notes = list(sight.notes)
        observation = sight.observation
        if wait_s := retry_in_s([*changed, *past], fleet.now_us):
            observation = msgspec.structs.replace(observation, offers=())
            notes.append(f"a start has failed: none is tried for {wait_s:.0f} s")
        elif len(sight.flapping) >= bounds.max_replicas:
            observation = msgspec.structs.replace(observation, offers=())
            notes.append(f"{len(sight.flapping)} replicas join again and again: none is started in their place")
        elif self._deployment(model) is None:
            observation = msgspec.structs.replace(observation, offers=())
            notes.append("its weights are not on the machine of the core that plans: `emberline pull` it there")
        policy = self._policy(model, bounds, past)
        plan = policy.decide(observation, fleet.now_us / 1e6)
        plan = _without_failed(_without_fixed(plan, sight.fixed), past, fleet.now_us)
        made = await self._carry_out(plan, fleet, past)
        if self._mode == "on":
            kept = [each for each, row in zip(plan.decisions, made) if not row.outcome.startswith("failed")]
            policy.applied(msgspec.structs.replace(plan, decisions=tuple(kept)))
        plan = msgspec.structs.replace(plan, held=(*plan.held, *notes))
        row = PlanRow(
            model=model,
            at_us=fleet.now_us,
            core=self._core,
            mode=self._mode,
            plan=msgspec.to_builtins(plan),
            observation=to_plain(observation),
        )
        await self._store.record(row, [*changed, *made])

    def _policy(self, model: str, bounds: ScalingConfig, past: Sequence[DecisionRow]) -> ScalingPolicy:
        wanted = bounds_of(bounds, self._round_s)
        policy = self._policies.get(model)
        if policy is None:
            policy = self._policies[model] = ScalingPolicy(model, wanted)
            for row in reversed(past):  # newest last: another core may have changed something a moment ago
                if row.action in ("drain", "flip") and row.outcome == "done":
                    policy.applied(_settled_plan(row))
        policy.bounds = wanted
        return policy

    # --- what became of earlier decisions -----------------------------------------------------------------------------

    async def _settle(self, sight: Sight, past: Sequence[DecisionRow], now_us: int) -> list[DecisionRow]:
        """Follow up on replicas that have come, gone, failed or finished. Returns decisions with their outcome."""
        if self._mode != "on":
            return []
        changed: list[DecisionRow] = []
        starts = {row.replica: row for row in past if row.action == "start"}
        for row in sight.joined:
            took_s = (now_us - row.since_us) / 1e6
            await self._put(row, "running", now_us)
            if row.name in starts:
                changed.append(msgspec.structs.replace(starts[row.name], outcome="done", took_s=took_s))
            log.info("replica %s of %s has joined", row.name, row.model, extra={"seconds": round(took_s, 1)})
        for row, problem in sight.failed:
            await self._stop(row)
            if row.name in starts:
                took_s = (now_us - row.since_us) / 1e6
                changed.append(msgspec.structs.replace(starts[row.name], outcome=f"failed: {problem}", took_s=took_s))
            log.error("replica %s of %s did not start: %s", row.name, row.model, problem)
        for row in sight.resumed:
            await self._put(row, "running", now_us)
        for row in sight.idle:
            if row.launcher:
                await self._put(row, "leaving", now_us)
                await self._change(row.name, "leave")
        for row in sight.ended:
            await self._stop(row)
            log.info("replica %s of %s is gone", row.name, row.model)
        return changed

    async def _put(self, row: ReplicaRow, state: Any, now_us: int) -> None:
        await self._check_lock()
        await self._store.put_replica(msgspec.structs.replace(row, state=state, since_us=now_us))

    async def _change(self, name: str, action: Literal["drain", "undrain", "leave"]) -> None:
        await self._check_lock()
        await self._members.change(name, action)

    async def _stop(self, row: ReplicaRow) -> None:
        await self._check_lock()
        if row.launcher == self._launcher_name:
            await self._launcher.stop(row.name)
        if row.launcher:
            await self._members.forget(row.name)
        await self._store.drop_replica(row.name)

    # --- decisions ---------------------------------------------------------------------------------------------------

    async def _carry_out(self, plan: ScalingPlan, fleet: Fleet, past: Sequence[DecisionRow]) -> list[DecisionRow]:
        made: list[DecisionRow] = []
        for number, decision in enumerate(plan.decisions):
            name = decision.replica
            if decision.action == "start":
                name = replica_name(plan.model, decision.role)
            outcome = "dry run"
            if self._mode == "on":
                try:
                    outcome = await self._do(plan.model, name, decision, fleet)
                except EmberlineError as error:
                    outcome = f"failed: {error.message}"
                log.info("%s %s: %s", decision.action, name, decision.why, extra={"outcome": outcome})
            elif _was_said(decision, past):
                continue
            made.append(
                DecisionRow(
                    model=plan.model,
                    at_us=fleet.now_us,
                    number=number,
                    core=self._core,
                    action=decision.action,
                    role=decision.role,
                    replica=name if self._mode == "on" else decision.replica,
                    gpu=decision.gpu,
                    cause=decision.cause,
                    why=decision.why,
                    outcome=outcome,
                    took_s=0.0,
                )
            )
        return made

    async def _do(self, model: str, name: str, decision: ScalingDecision, fleet: Fleet) -> str:
        row = next((row for row in fleet.rows if row.name == name), None) or ReplicaRow(
            name=name,
            model=model,
            role=decision.role,
            gpu=decision.gpu,
            state="running",
            since_us=fleet.now_us,
            launcher=self._launcher_name if decision.action == "start" else "",
        )
        if decision.action == "start":
            deployment = self._deployment(model)
            if deployment is None:
                raise Unavailable(f"the weights of {model} are not on this machine")
            order = ReplicaOrder(
                name=name,
                model=model,
                path=deployment.path,
                role=decision.role,
                gpu=decision.gpu,
                region=deployment.region,
                layout=deployment.layout,
            )
            await self._start(row, order, fleet.now_us)
            return "begun"
        if decision.action == "flip":
            await self._check_lock()
            await self._members.set_role(name, decision.role)
            if row in fleet.rows:
                await self._store.put_replica(msgspec.structs.replace(row, role=decision.role))
            return "done"
        if decision.action == "drain":
            await self._put(row, "draining", fleet.now_us)  # first: what operators drain is not undrained
            await self._change(name, "drain")
            return "done"
        await self._change(name, "undrain")
        if row.launcher:
            await self._put(row, "running", fleet.now_us)
        else:
            await self._store.drop_replica(name)
        return "done"

    async def _start(self, row: ReplicaRow, order: ReplicaOrder, now_us: int) -> None:
        await self._put(row, "ordered", now_us)  # first, so that a planner that takes over knows of it
        try:
            await self._check_lock()
            await self._launcher.start(order)
            await self._check_lock()  # this process may have been stopped between the question and the start
        except LockLostError:
            await self._withdraw(row.name)
            raise
        except Exception:
            await self._stop(row)  # it may have begun all the same; where this fails, too, its row is followed up
            raise

    async def _withdraw(self, name: str) -> None:
        """A start, without the lock: if another planner has given it up meanwhile, none would ever stop it."""
        try:
            is_known = any(row.name == name for row in await self._store.replicas())
        except EmberlineError:  # the store may be out of reach, and that is why the lock is
            is_known = False
        if not is_known:
            await self._launcher.stop(name)


def bounds_of(config: ScalingConfig, round_s: float = ROUND_S) -> ScalingBounds:
    """Bounds for the policy. It judges what it has seen over a time, which cannot be shorter than some rounds."""
    bounds = ScalingBounds(**{name: getattr(config, name) for name in ScalingBounds.__struct_fields__})
    return msgspec.structs.replace(bounds, shrink_after_s=max(bounds.shrink_after_s, MIN_WATCHED_ROUNDS * round_s))


def expected_start_s(past: Sequence[DecisionRow], default_s: float) -> float:
    """Return the mean time from a replica's order to its first connection, over the last starts."""
    took = [row.took_s for row in past if row.outcome == "done" and row.took_s > 0][:N_STARTS]
    return math.fsum(took) / len(took) if took else default_s


def retry_in_s(past: Sequence[DecisionRow], now_us: int) -> float:
    """Return the seconds for which no replica is to be started because the last starts have failed; 0 if one may
    start."""
    n_failed, last_us, before_us = 0, 0, now_us
    for row in sorted((row for row in past if row.action == "start"), key=lambda row: -row.at_us):
        failed_us = row.at_us + int(row.took_s * 1e6)
        if row.outcome == "done" or before_us - failed_us > FAILED_S * 1e6:
            break
        if not row.outcome.startswith("failed"):
            continue
        last_us = max(last_us, failed_us)
        n_failed += row.at_us < before_us  # those of one round count once
        before_us = row.at_us
    if not n_failed:
        return 0.0
    wait_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(n_failed - 1, 10))
    return max(0.0, wait_s - (now_us - last_us) / 1e6)


def replica_name(model: str, role: WorkerRole) -> str:
    """New, and a member's name: see `protocol.member.MemberName`."""
    short = "".join(char if char.isalnum() else "-" for char in model.rstrip("/").rpartition("/")[2].lower())
    short = short.encode("ascii", "ignore").decode().strip("-")[:40] or "model"
    return f"{short}{'' if role == 'both' else f'-{role}'}-{secrets.token_hex(3)}"


def to_plain(observation: ScalingObservation) -> dict[str, Any]:
    """Return the observation as JSON can represent it, without infinities."""
    if not math.isfinite(observation.last_request_s):
        observation = msgspec.structs.replace(observation, last_request_s=0.0)
    return dict(msgspec.to_builtins(observation))


def _without_fixed(plan: ScalingPlan, fixed: frozenset[str]) -> ScalingPlan:
    mine = tuple(each for each in plan.decisions if each.replica not in fixed)
    others = tuple(
        f"{each.action} of {each.replica} would help ({each.why}), but a core has started it itself: it is not changed"
        for each in plan.decisions
        if each.replica in fixed
    )
    return msgspec.structs.replace(plan, decisions=mine, held=(*plan.held, *others))


def _without_failed(plan: ScalingPlan, past: Sequence[DecisionRow], now_us: int) -> ScalingPlan:
    """A change of a replica that has just failed would fail in every round."""
    failed = {
        (row.action, row.replica, row.role): row.outcome
        for row in reversed(past)
        if row.outcome.startswith("failed") and now_us - row.at_us < CHANGE_RETRY_S * 1e6
    }
    left, held = [], list(plan.held)
    for each in plan.decisions:
        if each.action != "start" and (outcome := failed.get((each.action, each.replica, each.role))):
            held.append(f"{each.action} of {each.replica} would help ({each.why}), but has {outcome}")
        else:
            left.append(each)
    return msgspec.structs.replace(plan, decisions=tuple(left), held=tuple(held))


def _settled_plan(row: DecisionRow) -> ScalingPlan:
    role: WorkerRole = msgspec.convert(row.role, WorkerRole)
    done = ScalingDecision(action="flip" if row.action == "flip" else "drain", role=role, cause="load", why=row.why)
    return ScalingPlan(
        model=row.model,
        at_s=row.at_us / 1e6,
        queued_tokens=0,
        demand=Demand(),
        forecast=Demand(),
        roles=(),
        decisions=(done,),
    )


def _was_said(decision: ScalingDecision, past: Sequence[DecisionRow]) -> bool:
    """A dry run decides the same in every round."""
    last = [row for row in past if row.outcome == "dry run"][:8]
    key = (decision.action, decision.role, decision.replica, decision.cause)
    return any((row.action, row.role, row.replica, row.cause) == key for row in last)
