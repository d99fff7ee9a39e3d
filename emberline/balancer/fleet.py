"""The workers that a core knows: who has joined, which models each serves, what each caches, who takes requests.

Decides nothing about requests: the `FleetListener` hears where requests can go now, and where they no longer can.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from emberline.balancer.cost_model import Settings
from emberline.balancer.endpoint import Capacity, Endpoint, provider_pool
from emberline.balancer.ledger import InFlightLoad
from emberline.balancer.prefix_index import FleetPrefixIndex
from emberline.balancer.tier_index import TierIndex
from emberline.balancer.worker import Worker
from emberline.balancer.worker_pool import WorkerPool
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import EngineLoad

NO_EVENTS_S = 300.0  # a worker without KV events is believed to cache what it was given for one to two times as long

log = logging.getLogger("emberline.balancer")


class FleetListener(Protocol):
    def has_room(self, worker: Worker) -> None:
        """The worker may have room for requests that wait for it."""

    def now_available(self, now_s: float) -> None:
        """A worker takes requests: those that no worker could serve may go to it."""

    def now_unavailable(self, worker: Worker, now_s: float) -> None:
        """The worker takes no requests: those that wait for it must go elsewhere."""

    def pool_removed(self, pool: str) -> None:
        """The last worker of a provider is gone."""


class Fleet:
    def __init__(self, settings: Settings, listener: FleetListener) -> None:
        self._settings = settings
        self._listener = listener
        self.pools: defaultdict[str, WorkerPool] = defaultdict(lambda: WorkerPool(settings))  # by model
        self._workers: dict[str, Worker] = {}
        self.workers: Mapping[str, Worker] = MappingProxyType(self._workers)  # by name, connected or not; read-only
        self.index = FleetPrefixIndex(settings.index_bytes)
        self.tiers = TierIndex(self.index)
        self._rotated_s = float("-inf")

    def register(self, endpoint: Endpoint) -> None:
        """Add a configured worker that has not connected yet."""
        assert endpoint.name not in self._workers, "worker names are unique"
        worker = self._add(endpoint, Capacity())
        worker.connected, worker.problem = False, "not connected yet"

    def join(self, endpoint: Endpoint, capacity: Capacity, now_s: float) -> None:
        """Take in a worker that has connected: for the first time, again, or with other capacities. Raises BadInput if
        a worker of that name is connected from another address."""
        worker = self._workers.get(endpoint.name)
        if worker is not None and worker.connected and worker.endpoint.address != endpoint.address:
            raise BadInput(
                f"two endpoints are called {endpoint.name}: {worker.endpoint.address} and {endpoint.address}; "
                "give each a name of its own",
                param="name",
            )
        if worker is None:
            worker = self._add(endpoint, capacity)
        elif worker.endpoint.models != endpoint.models:
            self._remove_from_pools(worker)
            self._add_to_pools(worker, endpoint)
        worker.endpoint, worker.capacity = endpoint, capacity
        worker.connected, worker.problem = True, ""
        self.readiness_changed(worker)
        self._listener.now_available(now_s)

    def resize(self, name: str, capacity: Capacity) -> None:
        """Change the capacity of a connected worker."""
        if (worker := self._workers.get(name)) is not None:
            worker.capacity = capacity
            self._listener.has_room(worker)

    def disconnected(self, name: str, now_s: float, why: str = "") -> None:
        """Handle a lost connection, and with it all that ran there: one failure, however many requests it had."""
        worker = self._workers.get(name)
        if worker is None or not worker.connected:
            return
        worker.connected, worker.problem = False, why
        worker.breaker.failed(now_s)
        self._reset(worker, now_s)

    def remove(self, name: str, now_s: float) -> None:
        """Remove a worker for good: it is not expected to reconnect."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        worker.connected = False
        self._remove_from_pools(worker)
        self._reset(worker, now_s)
        self.index.drop_slot(worker.slot)

    def drain(self, name: str, now_s: float) -> None:
        """Send nothing new to the worker; requests that run there continue."""
        if (worker := self._workers.get(name)) is not None:
            worker.drained = True
            self._availability_changed(worker, now_s)

    def undrain(self, name: str, now_s: float) -> None:
        if (worker := self._workers.get(name)) is not None:
            worker.drained = False
            self._availability_changed(worker, now_s)

    def report(self, name: str, load: EngineLoad, now_s: float) -> None:
        """Apply a load report that came straight from the worker."""
        worker = self._workers.get(name)
        if worker is None:
            return
        self._observe(worker, load, now_s, now_s)
        reports = worker.reports
        before, before_s = reports.load, reports.at_s
        if reports.accept(load, worker.in_flight, now_s):
            worker.measure(before, load, now_s - before_s)
        elif reports.n_rejected == 1 or reports.n_rejected % 1000 == 0:
            log.warning("worker %s: load report rejected: %s", name, reports.problem, extra={"endpoint": name})
        self._listener.has_room(worker)

    def observed(self, name: str, load: EngineLoad, at_s: float, now_s: float) -> None:
        """Apply a load report that an HTTP worker received on its own connection at `at_s`. Too old for routing, it
        shows progress, and whether the worker drains."""
        if (worker := self._workers.get(name)) is not None:
            self._observe(worker, load, at_s, now_s)

    def _observe(self, worker: Worker, load: EngineLoad, at_s: float, now_s: float) -> None:
        was_available = worker.available
        worker.reported(load, at_s)
        if load.tiers or worker.fetch_costs:
            self.tiers.update(worker, load.tiers)
        if worker.available != was_available:
            self._availability_changed(worker, now_s)

    def protocol_error(self, name: str, now_s: float) -> None:
        """Count a failure of a worker that sent something invalid outside of any request."""
        if (worker := self._workers.get(name)) is not None:
            worker.breaker.failed(now_s)
            self.readiness_changed(worker)

    def distrusted(self, name: str, now_s: float) -> None:
        """Open the circuit breaker of a worker: it said what cannot be true."""
        if (worker := self._workers.get(name)) is not None:
            worker.breaker.open(now_s)
            self.readiness_changed(worker)

    def pool_of(self, model: str) -> WorkerPool | None:
        return self.pools.get(self.pool_name(model))

    def workers_of(self, model: str) -> list[Worker]:
        pool = self.pools.get(self.pool_name(model))
        return [] if pool is None else pool.workers

    # --- KV events ---------------------------------------------------------------------------------------------------

    def stored(self, name: str, keys: bytes, now_s: float, tier: str = "") -> None:
        """Add blocks that the worker's cache has gained, or a tier below it."""
        self.index.expire(now_s)
        if (worker := self._workers.get(name)) is not None:
            self.tiers.stored(worker, tier, keys)

    def removed(self, name: str, keys: bytes, now_s: float, tier: str = "") -> None:
        self.index.expire(now_s)
        if (worker := self._workers.get(name)) is not None:
            self.tiers.removed(worker, tier, keys)

    def replaced(self, name: str, keys: bytes, now_s: float, tier: str = "") -> None:
        """Replace all blocks known of the worker's cache, or of a tier below it."""
        self.index.expire(now_s)
        if (worker := self._workers.get(name)) is not None:
            if tier:
                self.tiers.replaced(worker, tier)
            else:
                self._forget_cache(worker)
            self.tiers.stored(worker, tier, keys)

    # --- health ------------------------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Find what only time changes: stalled workers, speeds measured long ago, blocks given long ago."""
        self.index.tidy()
        for worker in self._workers.values():
            if worker.check_health(now_s):
                self.readiness_changed(worker)
        for pool in self.pools.values():
            pool.fade_speeds(now_s)
        if now_s - self._rotated_s >= NO_EVENTS_S:
            self._rotated_s = now_s
            self._rotate_slots()

    def _rotate_slots(self) -> None:
        """Forget what workers without KV events were given before the last rotation."""
        for worker in self._workers.values():
            if not worker.capacity.events:
                if worker.old_slot is not None:
                    self.index.drop_slot(worker.old_slot)
                worker.set_slots(self.index.take_slot(), worker.slot)

    def _availability_changed(self, worker: Worker, now_s: float) -> None:
        """Tell the listener that the worker has started or stopped draining."""
        self.readiness_changed(worker)
        if worker.available:
            self._listener.now_available(now_s)
        else:
            self._listener.now_unavailable(worker, now_s)

    def readiness_changed(self, worker: Worker) -> None:
        """Choose anew which workers of its models are ready, after its health or its circuit breaker has changed."""
        for model in worker.endpoint.models:
            self.pools[model].refresh()
        self._listener.has_room(worker)

    def _reset(self, worker: Worker, now_s: float) -> None:
        """Forget what a lost worker ran and cached. Records on it stay until each request ends or moves."""
        worker.in_flight = InFlightLoad()
        worker.reports.reset()
        self._forget_cache(worker)
        self.tiers.forget(worker)
        self.readiness_changed(worker)
        self._listener.now_unavailable(worker, now_s)

    def _forget_cache(self, worker: Worker) -> None:
        for slot in (worker.slot, worker.old_slot):
            if slot is not None:
                self.index.drop_slot(slot)
        worker.set_slots(self.index.take_slot(), None)

    def _add(self, endpoint: Endpoint, capacity: Capacity) -> Worker:
        worker = Worker(endpoint, capacity, self._settings.cost, self.index.take_slot())
        self._workers[endpoint.name] = worker
        self._add_to_pools(worker, endpoint)
        return worker

    def _add_to_pools(self, worker: Worker, endpoint: Endpoint) -> None:
        for model in endpoint.models:
            self.pools[model].workers.append(worker)

    def _remove_from_pools(self, worker: Worker) -> None:
        for name, pool in list(self.pools.items()):
            if worker in pool.workers:
                pool.workers.remove(worker)
                pool.refresh()
                if not pool.workers and name.endswith("/*"):  # of a model, what was learnt of its replies stays
                    del self.pools[name]
                    self._listener.pool_removed(name)

    def pool_name(self, model: str) -> str:
        """Name of the model's pool: a worker that serves `name/*` computes every model of that provider."""
        if "/" not in model or (model in self.pools and self.pools[model].workers):
            return model
        of_provider = provider_pool(model.partition("/")[0])
        return of_provider if of_provider in self.pools else model
