"""Decides which models to load and to unload, without processes or clocks of its own.

A model is loaded when a request or a queued job wants it. Where there is no room, idle models make way, the least
recently used first. A busy one makes way once a request has waited for `switch_after_s` and the busy model has had a
turn as long: it takes no new requests, those that run finish, and only then is it unloaded. Its own new requests wait
meanwhile, and have their turn by the same rule. So with one place for two models, a request waits at most for a turn,
and for the running requests of both and their loading; with more models, for the turns of those that waited before it.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import msgspec

ModelState = Literal["on_disk", "loading", "loaded", "unloading", "failed"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    memory_bytes: int  # for the weights and KV caches of all models
    max_loaded: int = 0  # 0: as many as there is memory for
    keep_alive_s: float = 300.0  # idle models that are not pinned are unloaded after
    switch_after_s: float = 10.0
    batch_switch_after_s: float = 60.0  # the same for queued jobs, which are grouped by loaded model meanwhile


class Demand(NamedTuple):
    """Demand for one model now."""

    in_flight: int = 0  # requests and jobs that run on its workers, or have been sent there
    waiting_s: float | None = None  # how long the oldest waiting request has waited; None: none waits
    jobs_s: float | None = None  # the same of queued jobs

    @property
    def idle(self) -> bool:
        return not self.in_flight and self.waiting_s is None and self.jobs_s is None


class ManagedModel(msgspec.Struct, kw_only=True):
    """A model that this machine can load."""

    id: str
    memory_bytes: int  # estimated: weights, KV cache and process
    pinned: bool = False  # never unloaded, except on request
    keep_alive_s: float | None = None  # that a client asked for, until it is unloaded; None: the server's
    state: ModelState = "on_disk"
    since_s: float = -math.inf  # when it became that
    used_s: float = -math.inf  # when it was last in use
    closed: bool = False  # takes no new requests, until it is unloaded or opened again
    asked: Literal["", "load", "unload"] = ""  # by an operator, not done yet
    asked_s: float = 0.0
    reason: str = ""  # why it could not be loaded
    retry_s: float = 0.0  # when loading may be tried again
    n_failures: int = 0  # in a row

    @property
    def takes_memory(self) -> bool:
        return self.state in ("loading", "loaded", "unloading")


class Decision(NamedTuple):
    load: list[str]
    close: list[str]  # take no new requests
    reopen: list[str]
    unload: list[str]  # idle, or closed and drained


class ModelSwitching:
    """Owns what is known of each model; its owner carries the decisions out and reports their results."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.models: dict[str, ManagedModel] = {}

    def add(self, models: Iterable[ManagedModel]) -> None:
        self.models |= {model.id: model for model in models}

    def set_state(self, model: str, state: ModelState, now_s: float) -> None:
        found = self.models[model]
        found.state, found.since_s = state, now_s
        if state != "loaded":
            found.closed = False
            if state == "on_disk":
                found.keep_alive_s = None
        else:
            found.used_s, found.reason, found.n_failures = now_s, "", 0
        if state in {"load": ("loaded", "failed"), "unload": ("on_disk", "failed"), "": ()}[found.asked]:
            found.asked = ""

    def room_problem(self, model: str) -> str:
        """Why a model can never be loaded beside those that stay; empty if it can."""
        wanted, limits = self.models[model], self.limits
        pinned = [found for found in self.models.values() if found.pinned and found is not wanted]
        if limits.max_loaded and len(pinned) >= limits.max_loaded:
            return f"[models] max_loaded is {limits.max_loaded}, and as many models stay loaded"
        free = limits.memory_bytes - sum(found.memory_bytes for found in pinned)
        if wanted.memory_bytes > free:
            return (
                f"it needs about {_mib(wanted.memory_bytes)} with its KV cache, and models may use "
                f"{_mib(max(0, free))} beside those that stay loaded: raise [models] memory_bytes or lower "
                "[engine] kv_bytes"
            )
        return ""

    def keep_alive(self, model: str, seconds: float) -> None:
        """Keep a model loaded for so long once it is idle, or for ever (below 0). A model that was named at start no
        longer stays loaded."""
        found = self.models[model]
        found.keep_alive_s = math.inf if seconds < 0 else seconds
        found.pinned &= seconds < 0

    def keep_alive_s(self, model: ManagedModel) -> float:
        """Return the seconds that the model stays loaded once it is idle."""
        if model.pinned:
            return math.inf
        return self.limits.keep_alive_s if model.keep_alive_s is None else model.keep_alive_s

    def decide(self, demand_of: Callable[[str], Demand], now_s: float) -> Decision:
        demands = {name: demand_of(name) for name in self.models}
        for name, demand in demands.items():
            if not demand.idle:
                self.models[name].used_s = now_s
        decision = Decision([], [], [], [])
        victims = self._make_room(demands, decision, now_s)
        for name, model in self.models.items():
            if model.state != "loaded":
                continue
            leaves = name in victims or model.asked == "unload" or self._expired(model, demands[name], now_s)
            if leaves != model.closed:
                model.closed = leaves
                (decision.close if leaves else decision.reopen).append(name)
            if not leaves and model.asked == "load":
                model.asked = ""  # it was about to leave, and stays
            if leaves and not demands[name].in_flight:
                decision.unload.append(name)
        return decision

    def _make_room(self, demands: dict[str, Demand], decision: Decision, now_s: float) -> set[str]:
        """Load what fits, the longest overdue first; returns the loaded models that have to make way for others."""
        victims: set[str] = set()
        present = [model for model in self.models.values() if model.takes_memory]
        staying = [model for model in present if model.state != "unloading"]
        wanted = [
            (self._overdue_s(model, demands[name], now_s), name)
            for name, model in self.models.items()
            if self._is_wanted(model, demands[name], now_s)
        ]
        for overdue_s, name in sorted(wanted, reverse=True):
            model = self.models[name]
            if self._fits([*present, model]) and self._fits([*staying, model]):
                decision.load.append(name)
                present.append(model)
            else:
                left = staying
                for victim in self._candidates(staying, demands, overdue_s, now_s):
                    if self._fits([*left, model]):
                        break
                    left = [other for other in left if other is not victim]
                if self._fits([*left, model]):
                    victims.update(other.id for other in staying if other not in left)
                    staying = left
            staying.append(model)  # what comes after it must not take its room
        return victims

    def _candidates(
        self, staying: list[ManagedModel], demands: dict[str, Demand], overdue_s: float, now_s: float
    ) -> list[ManagedModel]:
        """Models that may make way for one that is overdue by so much: those that do already, idle ones, busy ones."""
        loaded = [model for model in staying if model.state == "loaded" and not model.pinned]
        patience_s = 0.0 if overdue_s >= -self.limits.switch_after_s else self.limits.switch_after_s
        idle = [
            model
            for model in loaded
            if not model.closed and demands[model.id].idle and now_s - model.used_s >= patience_s
        ]
        busy = [
            model
            for model in loaded
            if not model.closed
            and not demands[model.id].idle
            and overdue_s >= 0
            and now_s - model.since_s >= self.limits.switch_after_s
        ]
        return [
            *(model for model in loaded if model.closed),
            *sorted(idle, key=lambda model: model.used_s),
            *sorted(busy, key=lambda model: model.since_s),
        ]

    def _is_wanted(self, model: ManagedModel, demand: Demand, now_s: float) -> bool:
        if model.state == "failed" and now_s < model.retry_s:
            return False
        wanted = demand.waiting_s is not None or demand.jobs_s is not None or model.asked == "load"
        return wanted and model.state in ("on_disk", "failed") and not self.room_problem(model.id)

    def _overdue_s(self, model: ManagedModel, demand: Demand, now_s: float) -> float:
        """Since when busy models should have made way for it, in seconds; negative: not yet. A queued job alone is
        further from it than any request, so that idle models that were just used stay loaded for a while."""
        limits, unloaded_s = self.limits, now_s - model.since_s  # while it was loaded, it had its turn
        overdue_s = [-math.inf]
        if demand.waiting_s is not None:
            overdue_s.append(min(demand.waiting_s, unloaded_s) - limits.switch_after_s)
        if model.asked == "load":
            overdue_s.append(now_s - model.asked_s - limits.switch_after_s)
        if demand.jobs_s is not None:
            job_s = min(demand.jobs_s, unloaded_s) - limits.batch_switch_after_s
            overdue_s.append(job_s if job_s >= 0 else min(job_s, -limits.switch_after_s - 1))
        return max(overdue_s)

    def _expired(self, model: ManagedModel, demand: Demand, now_s: float) -> bool:
        keep_alive_s = self.keep_alive_s(model)
        return keep_alive_s < math.inf and demand.idle and now_s - model.used_s >= keep_alive_s

    def _fits(self, models: list[ManagedModel]) -> bool:
        n_most = self.limits.max_loaded or len(models)
        return len(models) <= n_most and sum(model.memory_bytes for model in models) <= self.limits.memory_bytes


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):,.0f} MiB"
