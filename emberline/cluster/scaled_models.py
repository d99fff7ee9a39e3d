"""The scaled models as one core has them: their bounds, what it reports of them, and requests held for a first replica.

Reports are written every few seconds, and only while some model is scaled. A request of a scaled model that has no
replica waits for one, for a bounded time and in bounded number.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.grants import Grants
from emberline.balancer.model_load import ModelLoadMeter
from emberline.cluster.planner_table import PlannerTable
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.config import ScalingConfig
from emberline.net.periodic import every, stop
from emberline.protocol.errors import BadInput, NotFound, Unavailable
from emberline.protocol.scaling import ModelLoad
from emberline.store.notifications import Subscription

RETRY_AFTER_S = 10.0  # of a request that is not held

log = logging.getLogger("emberline.planner")


class ScaledModels:
    """Owned by the core process."""

    def __init__(
        self,
        core: str,
        table: PlannerTable,
        admission: AdmissionController,
        grants: Grants,
        model_id: Callable[[str], str | None],
        configured: Mapping[str, ScalingConfig],
        timings: Timings = DEFAULTS,
    ) -> None:
        """`core`: its name, unique in the cluster. `model_id` of a name, None: it is not served here. `configured`:
        bounds by the names of models, where no operator has set others."""
        self.table = table
        self._timings = timings
        self.bounds: dict[str, ScalingConfig] = {}  # by model id, in effect
        self.can_start = False  # whether this core's planner could start replicas
        self._core = core
        self._admission, self._grants = admission, grants
        self.model_id = model_id
        self._configured = configured
        self._meters: dict[str, ModelLoadMeter] = {}
        self._woken = asyncio.Event()  # a request is held, or bounds have changed
        self._n_held = 0  # at the last report
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        news = self.table.listen(self._timings.report_s)
        await self.refresh()
        problem = "what this core sees of its models could not be reported"
        reporting = every(self._timings.report_s, self._refresh_and_report, log, problem, wake=self._woken)
        self._tasks = [
            asyncio.create_task(reporting, name="load reports"),
            asyncio.create_task(self._listen(news), name="bounds"),
        ]

    async def _listen(self, news: Subscription) -> None:
        """Bounds that were set at another core hold here at once."""
        async for model in news:
            if model:
                self._woken.set()

    async def _refresh_and_report(self) -> None:
        await self.refresh()
        await self.report()

    async def close(self) -> None:
        await stop(*self._tasks)

    # --- requests ----------------------------------------------------------------------------------------------------

    def admitting(self, model: str, account: str = "", *, is_moved: bool = False) -> float:
        """Return the seconds that a request may wait for a first replica; 0 if the model is not scaled. Raises
        Unavailable if too many requests wait already, except for a request that has begun and moves from a lost
        worker."""
        bounds = self.bounds.get(model)
        if bounds is None:
            return 0.0
        balancer = self._admission.balancer
        if any(
            worker.available and worker.endpoint.account in ("", account) for worker in balancer.fleet.workers_of(model)
        ):
            return bounds.hold_s
        if not is_moved and len(balancer.waiting_of(model)) >= bounds.max_held:
            raise Unavailable(
                f"no replica of {model} runs yet, and {bounds.max_held} requests wait for one",
                retry_after_s=RETRY_AFTER_S,
            )
        self._woken.set()
        return bounds.hold_s

    @property
    def can_wake(self) -> bool:
        """True if a model has no replica on purpose, and gets one with the first request."""
        return any(not bounds.min_replicas for bounds in self.bounds.values())

    # --- bounds ------------------------------------------------------------------------------------------------------

    async def set_bounds(self, name: str, changes: dict[str, Any] | None) -> ScalingConfig | None:
        """Change some of a model's bounds, for all cores; None: those of the configuration count again. Returns what is
        in effect. NotFound, BadInput."""
        model = self._known(name)
        if changes is None:
            await self.table.set_bounds(model, None)
        else:
            before = msgspec.to_builtins(self.bounds.get(model, ScalingConfig()))
            try:
                bounds = msgspec.convert({**before, **changes}, ScalingConfig)
            except msgspec.ValidationError as error:
                raise BadInput(f"bounds of {model}: {error}", param="bounds") from None
            await self.table.set_bounds(model, bounds)
        await self.refresh()
        return self.bounds.get(model)

    def _known(self, name: str) -> str:
        model = self.model_id(name)
        if model is None:
            raise NotFound(f"{name[:100]} is not served here; `emberline ps` shows the models", param="model")
        return model

    async def plan(self, name: str = "", limit: int = 20) -> dict[str, Any]:
        """The last observations and actions of the planner, for one model or all, as plain data."""
        wanted = self._known(name) if name else ""
        now_us, plans = self.table.now_us(), {row.model: row for row in await self.table.plans()}
        models = []
        for model in sorted(self.bounds):
            if wanted and model != wanted:
                continue
            row = plans.get(model)
            decisions = await self.table.decisions(model, limit)
            models.append(
                {
                    "model": model,
                    "bounds": msgspec.to_builtins(self.bounds[model]),
                    "planner": None if row is None else {"core": row.core, "mode": row.mode},
                    "age_s": None if row is None else round((now_us - row.at_us) / 1e6, 1),
                    "plan": None if row is None else row.plan,
                    "observation": None if row is None else row.observation,
                    "decisions": [
                        {**msgspec.to_builtins(each), "age_s": round((now_us - each.at_us) / 1e6, 1)}
                        for each in decisions
                    ],
                }
            )
        if wanted and not models:
            raise NotFound(f"{wanted} is not scaled: give it bounds with `emberline cluster bounds`", param="model")
        return {"models": models}

    # --- reports -----------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Read the bounds that operators have set."""
        given = {**self._configured, **await self.table.bounds()}
        found = {model: bounds for name, bounds in given.items() if (model := self.model_id(name)) is not None}
        self._meters = {model: meter for model, meter in self._meters.items() if model in found}
        for model in found:
            if model not in self._meters:
                self._meters[model] = ModelLoadMeter(model, self._admission.balancer, self.table.now_us)
        self.bounds = found

    async def report(self) -> None:
        """Write what this core sees of its scaled models, for the planner."""
        if not self._meters:
            return
        loads = [self._read(model, meter) for model, meter in self._meters.items()]
        await self.table.report(self._core, loads)
        n_held, self._n_held = self._n_held, sum(load.held_requests for load in loads)
        if self._n_held and not n_held:
            await self.table.wake_planner()

    def _read(self, model: str, meter: ModelLoadMeter) -> ModelLoad:
        load = msgspec.structs.replace(meter.read(self._admission.now_s()), can_start=self.can_start)
        workers = self._admission.balancer.fleet.workers_of(model)
        is_served = any(each.connected and not each.endpoint.account for each in workers)  # dedicated ones run no jobs
        if is_served or self._grants.oldest_job_s(model) is None:
            return load
        return msgspec.structs.replace(load, held_requests=load.held_requests + 1, idle_s=0.0)  # queued jobs
