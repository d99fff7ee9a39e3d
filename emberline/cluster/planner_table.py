"""The planner's rows in the store: what cores see of scaled models, bounds, replicas, plans and decisions.

Any core reads and writes them; only the one that holds the lock plans. A core that takes over goes on from here.
"""

import msgspec

from emberline.config import ScalingConfig
from emberline.protocol.errors import NotFound
from emberline.protocol.scaling import DecisionRow, LoadRow, ModelLoad, PlanRow, ReplicaRow
from emberline.store import Database, ProcessLock, Query
from emberline.store.notifications import Subscription

CHANNEL = "scaling"
KEEP_LOADS_S = 600.0  # rows of cores that are gone: their arrivals count for minutes
KEEP_DECISIONS_S = 30 * 86400.0
_SECOND_US = 1_000_000

_DECISION = DecisionRow.__struct_fields__
_REPLICA = ReplicaRow.__struct_fields__
_REPORT = (
    "INSERT INTO model_loads (core, model, at_us, load) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (core, model) DO UPDATE SET at_us = excluded.at_us, load = excluded.load"
)
_SET_BOUNDS = (
    "INSERT INTO scaling_bounds (model, bounds) VALUES (?, ?) ON CONFLICT (model) "
    "DO UPDATE SET bounds = excluded.bounds"
)
_PUT_REPLICA = (
    f"INSERT INTO replicas ({', '.join(_REPLICA)}) VALUES ({', '.join('?' * len(_REPLICA))}) ON CONFLICT (name) DO "
    "UPDATE SET role = excluded.role, state = excluded.state, since_us = excluded.since_us"
)
_DECIDE = (
    f"INSERT INTO scaling_decisions ({', '.join(_DECISION)}) VALUES ({', '.join('?' * len(_DECISION))}) ON CONFLICT "
    "(model, at_us, number) DO UPDATE SET outcome = excluded.outcome, took_s = excluded.took_s"
)
_EXPIRE_DECISIONS = "DELETE FROM scaling_decisions WHERE model = ? AND at_us < ?"
_PLAN = (
    "INSERT INTO scaling_plans (model, at_us, core, mode, plan, observation) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT "
    "(model) DO UPDATE SET at_us = excluded.at_us, core = excluded.core, mode = excluded.mode, plan = excluded.plan, "
    "observation = excluded.observation"
)


class PlannerTable:
    def __init__(self, store: Database) -> None:
        self._store = store

    def now_us(self) -> int:
        return self._store.now_us()

    def lock(self) -> ProcessLock:
        """The lock that the one core which plans holds."""
        return self._store.lock("planner")

    def listen(self, poll_s: float) -> Subscription:
        """To what the planner should look at before its next round."""
        return self._store.listen(CHANNEL, poll_s)

    async def wake_planner(self) -> None:
        await self._store.notify(CHANNEL)

    # --- what cores see ----------------------------------------------------------------------------------------------

    async def report(self, core: str, loads: list[ModelLoad]) -> None:
        """Replaces what this core has reported before."""
        now_us = self.now_us()
        rows = [Query(_REPORT, (core, each.model, now_us, msgspec.json.encode(each).decode())) for each in loads]
        old = Query("DELETE FROM model_loads WHERE at_us < ?", (now_us - int(KEEP_LOADS_S * _SECOND_US),))
        await self._store.transaction([*rows, old])

    async def loads(self) -> list[LoadRow]:
        rows = await self._store.read("SELECT core, at_us, load FROM model_loads ORDER BY core, model")
        return [
            LoadRow(core=str(core), at_us=int(at_us or 0), load=msgspec.json.decode(str(load), type=ModelLoad))
            for core, at_us, load in rows
        ]

    # --- bounds ------------------------------------------------------------------------------------------------------

    async def bounds(self) -> dict[str, ScalingConfig]:
        """Scaling bounds that operators have set, by model."""
        rows = await self._store.read("SELECT model, bounds FROM scaling_bounds ORDER BY model")
        return {str(model): msgspec.json.decode(str(text), type=ScalingConfig) for model, text in rows}

    async def set_bounds(self, model: str, bounds: ScalingConfig | None) -> None:
        """None: those of the configuration count again. NotFound: none were set."""
        if bounds is not None:
            await self._store.write(_SET_BOUNDS, (model, msgspec.json.encode(bounds).decode()))
        elif not await self._store.write("DELETE FROM scaling_bounds WHERE model = ? RETURNING model", (model,)):
            raise NotFound(f"no bounds of {model} were set with `emberline cluster bounds`", param="model")
        await self._store.notify(CHANNEL, model)

    # --- the planner's own -------------------------------------------------------------------------------------------

    async def replicas(self) -> list[ReplicaRow]:
        rows = await self._store.read(f"SELECT {', '.join(_REPLICA)} FROM replicas ORDER BY name")
        return [msgspec.convert(dict(zip(_REPLICA, row, strict=True)), ReplicaRow) for row in rows]

    async def put_replica(self, row: ReplicaRow) -> None:
        await self._store.write(_PUT_REPLICA, [getattr(row, name) for name in _REPLICA])

    async def drop_replica(self, name: str) -> None:
        await self._store.write("DELETE FROM replicas WHERE name = ?", (name,))

    async def record(self, plan: PlanRow, decisions: list[DecisionRow]) -> None:
        """The last plan of the model, and decisions: new ones, or the same with another outcome."""
        seen = [msgspec.json.encode(each).decode() for each in (plan.plan, plan.observation)]
        statements = [Query(_PLAN, (plan.model, plan.at_us, plan.core, plan.mode, *seen))]
        statements += [Query(_DECIDE, [getattr(each, name) for name in _DECISION]) for each in decisions]
        if decisions:
            old_us = plan.at_us - int(KEEP_DECISIONS_S * _SECOND_US)
            statements.append(Query(_EXPIRE_DECISIONS, (plan.model, old_us)))
        await self._store.transaction(statements)

    async def decisions(self, model: str, limit: int = 50) -> list[DecisionRow]:
        """The last ones, newest first."""
        rows = await self._store.read(
            f"SELECT {', '.join(_DECISION)} FROM scaling_decisions WHERE model = ? ORDER BY at_us DESC, number LIMIT ?",
            (model, limit),
        )
        return [msgspec.convert(dict(zip(_DECISION, row, strict=True)), DecisionRow) for row in rows]

    async def plans(self) -> list[PlanRow]:
        rows = await self._store.read("SELECT model, at_us, core, mode, plan, observation FROM scaling_plans")
        return [
            PlanRow(
                model=str(model),
                at_us=int(at_us or 0),
                core=str(core),
                mode=str(mode),
                plan=msgspec.json.decode(str(plan)),
                observation=msgspec.json.decode(str(observation)),
            )
            for model, at_us, core, mode, plan, observation in rows
        ]
