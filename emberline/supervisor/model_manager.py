"""Loads and unloads the models of this machine, as requests and queued jobs want them.

Requests for a model that is not loaded wait in the admission queue like any others: their deadlines, the queue's limit
and leaving clients are its business. The manager looks at who waits for what, follows the rule of `model_switching.py`,
starts and ends engine workers, and makes them known. It lives in the core's event loop.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.endpoint import Endpoint
from emberline.balancer.grants import Grants
from emberline.protocol.errors import EmberlineError, NotFound, Unavailable
from emberline.supervisor.model_switching import Demand, Limits, ManagedModel, ModelSwitching

POLL_S = 0.05  # while requests wait for models, or models drain
IDLE_POLL_S = 0.5  # otherwise: for models that have been idle long enough, and queued jobs
LOAD_WAIT_S = 600.0  # that a request waits for its model, turns of others included
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0  # after a failure to load

log = logging.getLogger("emberline.models")


class LoadableModel(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    path: Path
    memory_bytes: int  # estimated, of all its workers
    kv_bytes: int = 0  # of each worker, where the configuration leaves it open


class ModelWorkers(Protocol):
    """The processes: `EngineWorkers`."""

    async def load(self, model: str, path: Path, kv_bytes: int) -> Sequence[Endpoint]:
        """Returns when they are ready; raises what is wrong."""

    async def unload(self, model: str) -> None: ...


class Attachment(Protocol):
    """Makes workers known to the core and to the HTTP workers."""

    async def attach(self, endpoints: Sequence[Endpoint]) -> bool:
        """Connect to the endpoints. Returns True if all could be reached."""

    async def detach(self, names: Sequence[str]) -> None: ...

    def show_states(self, states: Mapping[str, str], problems: Mapping[str, str]) -> None:
        """Tell the states of models, and why a model could not be loaded or its worker ended."""


class ModelMetrics(Collector):
    """States of models, and how often and how long they were loaded."""

    def __init__(self, states: Callable[[], Mapping[str, str]]) -> None:
        self._states = states
        self._loads: Counter[tuple[str, str]] = Counter()
        self._load_s: dict[str, float] = {}

    def loaded(self, model: str, seconds: float) -> None:
        self._loads[model, "loaded"] += 1
        self._load_s[model] = self._load_s.get(model, 0.0) + seconds

    def failed(self, model: str) -> None:
        self._loads[model, "failed"] += 1

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("emberline_model_state", "1 for the state that it is in.", labels=["model", "state"])
        for model, now in self._states().items():
            state.add_metric([model, now], 1)
        loads = CounterMetricFamily("emberline_model_loads", "Models loaded on demand.", labels=["model", "outcome"])
        for (model, outcome), n in sorted(self._loads.items()):
            loads.add_metric([model, outcome], n)
        seconds = CounterMetricFamily("emberline_model_load_seconds", "Time spent loading.", labels=["model"])
        for model, spent_s in sorted(self._load_s.items()):
            seconds.add_metric([model], spent_s)
        yield from (state, loads, seconds)


class ModelManager:
    """Carries out the decisions of `ModelSwitching`. `start` it when the service runs, `close` it before the service
    does."""

    def __init__(
        self,
        limits: Limits,
        workers: ModelWorkers,
        attachment: Attachment,
        admission: AdmissionController,
        grants: Grants,
        check: Callable[[str], None] = lambda model: None,
        problem: Callable[[str], str] = lambda model: "",
        clock: Callable[[], float] = time.monotonic,
        idle_poll_s: float = IDLE_POLL_S,
    ) -> None:
        """`check` is called in a thread before a model is loaded, and raises what is wrong with its files. `problem`
        tells why a worker of a loaded model ended, if one did."""
        self.switching = ModelSwitching(limits)
        self._workers = workers
        self._attachment = attachment
        self._admission = admission
        self._grants = grants
        self._check = check
        self._problem = problem
        self._problems: dict[str, str] = {}  # as they were shown last
        self._clock = clock
        self._idle_poll_s = idle_poll_s
        self._files: dict[str, LoadableModel] = {}
        self._offered: frozenset[str] = frozenset()
        self._names: dict[str, list[str]] = {}  # of the workers of models that are loaded
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None
        self.metrics = ModelMetrics(self._states)

    # --- which models there are --------------------------------------------------------------------------------------

    def add_loaded(self, model: LoadableModel, workers: Sequence[Endpoint]) -> None:
        """A model whose workers run already: it stays loaded until an operator unloads it."""
        self._files[model.id] = model
        self._names[model.id] = [endpoint.name for endpoint in workers]
        managed = ManagedModel(id=model.id, memory_bytes=model.memory_bytes, pinned=True)
        self.switching.add([managed])
        self.switching.set_state(model.id, "loaded", self._clock())

    def offer(self, models: Iterable[LoadableModel]) -> None:
        """The models that may be loaded on demand. One that is gone is unloaded when it is idle."""
        offered = {model.id: model for model in models}
        known = self.switching.models
        self._offered = frozenset(offered)
        for name in list(known):
            self._forget_removed(name)
        for name, model in offered.items():
            self._replace(name, model)
            self._files[name] = model
            if name not in known:
                self.switching.add([ManagedModel(id=name, memory_bytes=model.memory_bytes)])
        self._show()

    def _replace(self, name: str, model: LoadableModel) -> None:
        """Unload a model whose files are others now, once its requests have ended: the next one gets the new files."""
        known, before = self.switching.models.get(name), self._files.get(name)
        if known is None or before is None or before.path == model.path or known.asked:
            return
        if known.state in ("loaded", "loading"):
            known.pinned = False
            known.asked, known.asked_s = "unload", self._clock()
            self._wake.set()
        elif known.state == "failed":
            known.retry_s = 0.0

    def _forget_removed(self, model: str) -> None:
        if model not in self._offered and self.switching.models[model].state in ("on_disk", "failed"):
            self.switching.models[model].asked = ""
            del self.switching.models[model], self._files[model]

    # --- for the core ------------------------------------------------------------------------------------------------

    def admitting(self, model: str, keep_alive_s: float | None = None) -> float:
        """Return the seconds that a request may wait for this model to be loaded; 0 if the model is not loaded on
        demand. The request is about to enter the admission queue, and asks to keep the model loaded for `keep_alive_s`.
        Raises Unavailable if the model cannot be loaded, or could not a moment ago."""
        found = self.switching.models.get(model)
        if found is None:
            return 0.0
        found.used_s = self._clock()  # the request may have ended before the next look
        if keep_alive_s is not None:
            self.switching.keep_alive(model, keep_alive_s)
        if found.pinned:
            return 0.0
        if found.state == "loaded" and not found.closed:
            return LOAD_WAIT_S
        if found.state == "failed" and (left_s := found.retry_s - self._clock()) > 0:
            raise self._failure(found, left_s)
        if found.state in ("on_disk", "failed") and (problem := self.switching.room_problem(model)):
            raise Unavailable(f"{model} cannot be loaded: {problem}")
        self._wake.set()
        return LOAD_WAIT_S

    def statuses(self) -> list[dict[str, Any]]:
        """The models that this machine loads and unloads, as plain data for people and `ps`."""
        now_s = self._clock()
        return [
            {
                "id": model.id,
                "state": _shown_state(model),
                "pinned": model.pinned,
                "memory_bytes": model.memory_bytes,
                "reason": model.reason or self._problem(model.id),
                "unload_in_s": self._unload_in_s(model, now_s),
            }
            for model in self.switching.models.values()
        ]

    async def ask(self, model: str, action: Literal["load", "unload"], keep_alive_s: float | None = None) -> None:
        """Load or unload a model for an operator; return when it is done.

        Raises NotFound or Unavailable, which say why it cannot be."""
        found = self.switching.models.get(model)
        if found is None:
            raise NotFound(f"{model[:100]} is not a model that this machine can load; `emberline ls` shows them")
        if keep_alive_s is not None and action == "load":
            self.switching.keep_alive(model, keep_alive_s)
        wanted = "loaded" if action == "load" else "on_disk"
        if found.state == wanted and not found.closed and not found.asked:
            return
        if action == "load" and (problem := self.switching.room_problem(model)):
            raise Unavailable(f"{model} cannot be loaded: {problem}")
        if action == "unload":
            if found.state == "failed":
                return
            found.pinned = False
        elif found.state == "failed":
            found.retry_s = 0.0
        found.asked, found.asked_s = action, self._clock()
        self._wake.set()
        async with self._changed:
            await self._changed.wait_for(lambda: not found.asked)
        if action == "load" and self.switching.models.get(model) is not found:
            raise NotFound(f"{model[:100]} was removed from this machine before it could be loaded")
        if action == "load" and found.state == "failed":
            raise self._failure(found, max(0.0, found.retry_s - self._clock()))

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._show()
        self._loop = asyncio.create_task(self._run(), name="model manager")

    async def close(self) -> None:
        """Workers that run go on: their owner ends them."""
        tasks = [*self._tasks, *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                self._step()
            except Exception:  # a bug: models that are loaded go on, and the next look may succeed
                log.exception("the model manager failed")
            await self._notify()  # what an operator asked for may need no work any more
            busy = any(model.closed or model.asked or not self._settled(model.id) for model in self._models())
            try:
                async with asyncio.timeout(POLL_S if busy else self._idle_poll_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    def _step(self) -> None:
        self._notice_gone()
        decision = self.switching.decide(self._demand, self._clock())
        for name in decision.close:
            for worker in self._names[name]:
                self._admission.drain(worker)
        for name in decision.reopen:
            for worker in self._names[name]:
                self._admission.undrain(worker)
        for name in decision.unload:
            self._set_state(name, "unloading")
            self._spawn(self._unload(name))
        for name in decision.load:
            self._set_state(name, "loading")
            self._spawn(self._load(name))
        if decision.close or decision.reopen or self._find_problems() != self._problems:
            self._show()

    def _demand(self, model: str) -> Demand:
        names = self._names.get(model, ())
        in_flight = sum(self._admission.in_flight_on(name) + self._grants.granted_on(name) for name in names)
        return Demand(in_flight, self._admission.waiting_s(model), self._grants.oldest_job_s(model))

    def _settled(self, model: str) -> bool:
        return self.switching.models[model].state == "loaded" or self._admission.waiting_s(model) is None

    def _notice_gone(self) -> None:
        """An operator may have removed all workers of a model."""
        known = set(self._admission.worker_names())
        for model in self._models():
            if model.state == "loaded" and not known.intersection(self._names[model.id]):
                model.pinned = False
                self._names.pop(model.id)
                self._set_state(model.id, "on_disk")

    async def _load(self, model: str) -> None:
        began_s, files = self._clock(), self._files[model]
        log.info("loading %s", model, extra={"memory_bytes": files.memory_bytes})
        try:
            await asyncio.to_thread(self._check, model)
            endpoints = await self._workers.load(model, files.path, files.kv_bytes)
            self._names[model] = [endpoint.name for endpoint in endpoints]
            try:
                if not await self._attachment.attach(endpoints):
                    raise Unavailable("its workers refuse the connection; their log lines say why")
            except Exception:
                await self._end_workers(model)
                raise
        except Exception as error:
            self._failed(model, error)
        else:
            self._set_state(model, "loaded")
            took_s = self._clock() - began_s
            self.metrics.loaded(model, took_s)
            log.info("loaded %s", model, extra={"seconds": round(took_s, 2)})
            self._grants.notify_room()
        await self._notify()

    async def _end_workers(self, model: str) -> None:
        """End the workers of a model, also if they cannot be detached."""
        try:
            await self._attachment.detach(self._names.pop(model))
        finally:
            await self._workers.unload(model)

    def _failed(self, model: str, error: Exception) -> None:
        expected = isinstance(error, EmberlineError | OSError)
        found = self.switching.models[model]
        self.metrics.failed(model)
        found.n_failures += 1
        wait_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(found.n_failures - 1, 10))
        found.reason = str(error) if expected else "internal error; the log has it"
        found.retry_s = self._clock() + wait_s
        log.error("%s could not be loaded: %s", model, found.reason, exc_info=None if expected else error)
        self._set_state(model, "failed")
        self._admission.refuse_waiting(model, self._failure(found, wait_s))

    async def _unload(self, model: str) -> None:
        try:
            await self._end_workers(model)
        finally:
            self._set_state(model, "on_disk")
            self._forget_removed(model)
            log.info("unloaded %s", model)
            await self._notify()

    def _failure(self, model: ManagedModel, left_s: float) -> Unavailable:
        return Unavailable(
            f"{model.id} could not be loaded: {model.reason}; it can be tried again in {left_s:.0f} s",
            retry_after_s=max(1.0, left_s),
        )

    def _set_state(self, model: str, state: Literal["on_disk", "loading", "loaded", "unloading", "failed"]) -> None:
        self.switching.set_state(model, state, self._clock())
        self._wake.set()
        self._show()

    def _show(self) -> None:
        self._problems = self._find_problems()
        self._attachment.show_states(self._states(), self._problems)

    def _find_problems(self) -> dict[str, str]:
        found = {model.id: model.reason or self._problem(model.id) for model in self._models()}
        return {model: problem for model, problem in found.items() if problem}

    def _states(self) -> dict[str, str]:
        return {model.id: _shown_state(model) for model in self._models()}

    def _models(self) -> list[ManagedModel]:
        return list(self.switching.models.values())

    def _unload_in_s(self, model: ManagedModel, now_s: float) -> float | None:
        keep_alive_s = self.switching.keep_alive_s(model)
        if model.state != "loaded" or keep_alive_s == math.inf:
            return None
        used_s = model.used_s if self._demand(model.id).idle else now_s
        return round(max(0.0, used_s + keep_alive_s - now_s), 1)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _shown_state(model: ManagedModel) -> str:
    """A loaded model that takes no new requests is about to be unloaded."""
    return "unloading" if model.closed else model.state
