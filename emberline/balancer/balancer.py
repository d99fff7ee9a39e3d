"""Admission and routing: which request goes to which worker, and when. Decisions only: no I/O, and the caller's clock.

A request is enqueued, dispatched with a route, charged to its workers, reports its first token, and ends once. Every
method takes the time in monotonic seconds, so that the simulator runs the same code.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from emberline.balancer.admission_queue import AdmissionQueue, no_worker
from emberline.balancer.cost_model import DEFAULTS, Settings
from emberline.balancer.endpoint import Capacity, Endpoint, provider_pool
from emberline.balancer.ledger import (
    CACHED_TOKEN_COST,
    OUTPUT_TOKEN_COST,
    InFlightLedger,
    InFlightLoad,
    InFlightRequest,
    Tenants,
)
from emberline.balancer.prefix_index import FleetPrefixIndex, shared_blocks
from emberline.balancer.routing_policy import RoutingInput
from emberline.balancer.tier_index import TierIndex
from emberline.balancer.worker import Snapshot, Worker
from emberline.balancer.worker_pool import Candidates, WorkerPair, WorkerPool
from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.errors import BadInput, DeadlineExceeded, EmberlineError, Overloaded, Unavailable
from emberline.protocol.frames import EngineLoad
from emberline.protocol.route_request import Route, RouteRequest, session_hash

EXPECTED_S = 4.0  # a dispatched prompt counts as cached for so long after its prefill, until a KV event confirms it
NO_EVENTS_S = 300.0  # a worker without KV events is believed to cache what it was given for one to two times as long
HEALTH_CHECK_S = 0.5  # between two checks of what only time changes
_SMOOTHING = 0.1

Outcome = Literal["finished", "cancelled", "client_error", "engine_failed"]

log = logging.getLogger("emberline.balancer")


class Balancer:
    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.ledger = InFlightLedger()
        self.settings = settings
        self._pools: defaultdict[str, WorkerPool] = defaultdict(lambda: WorkerPool(settings))
        self._workers: dict[str, Worker] = {}
        self.workers: Mapping[str, Worker] = MappingProxyType(self._workers)  # by name, connected or not; read-only
        self.index = FleetPrefixIndex(settings.index_bytes)
        self._tiers = TierIndex(self.index)
        self.tenants = Tenants()
        self.queue = AdmissionQueue()
        self._decided: list[InFlightRequest] = []  # what the next `dispatch` hands out
        self._freed: set[Worker] = set()  # workers that may have room for requests in their queues
        self._checked_s = float("-inf")
        self._rotated_s = float("-inf")

    # --- workers -----------------------------------------------------------------------------------------------------

    def register(self, endpoint: Endpoint) -> None:
        """Add a configured worker that has not connected yet."""
        assert endpoint.name not in self._workers, "worker names are unique"
        worker = self._add(endpoint, Capacity())
        worker.connected, worker.problem = False, "not connected yet"

    def join(self, endpoint: Endpoint, capacity: Capacity, now_s: float) -> None:
        """A worker has connected: for the first time, again, or with other capacities. BadInput: its name is taken."""
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
        self._readiness_changed(worker)
        self._route_unroutable(now_s)

    def resize(self, name: str, capacity: Capacity) -> None:
        """The capacity of a connected worker has changed."""
        if (worker := self._workers.get(name)) is not None:
            worker.capacity = capacity
            self._has_freed(worker)

    def disconnected(self, name: str, now_s: float, why: str = "") -> None:
        """The connection is lost, and with it all that ran there. One failure, however many requests it had."""
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
        """A load report, straight from the worker."""
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
        self._has_freed(worker)

    def observed(self, name: str, load: EngineLoad, at_s: float, now_s: float) -> None:
        """A load report that an HTTP worker received on its own connection at `at_s`. Too old for routing, it shows
        progress, and whether the worker drains."""
        if (worker := self._workers.get(name)) is not None:
            self._observe(worker, load, at_s, now_s)

    def _observe(self, worker: Worker, load: EngineLoad, at_s: float, now_s: float) -> None:
        was_available = worker.available
        worker.reported(load, at_s)
        if load.tiers or worker.fetch_costs:
            self._tiers.update(worker, load.tiers)
        if worker.available != was_available:
            self._availability_changed(worker, now_s)

    def protocol_error(self, name: str, now_s: float) -> None:
        """The worker sent something invalid outside of any request."""
        if (worker := self._workers.get(name)) is not None:
            worker.breaker.failed(now_s)
            self._readiness_changed(worker)

    def pool_of(self, model: str) -> WorkerPool | None:
        return self._pools.get(self._pool_name(model))

    def workers_of(self, model: str) -> list[Worker]:
        pool = self._pools.get(self._pool_name(model))
        return [] if pool is None else pool.workers

    # --- KV events ---------------------------------------------------------------------------------------------------

    def stored(self, name: str, keys: bytes, now_s: float, tier: str = "") -> None:
        """The worker's cache has gained these blocks; or a tier below it."""
        self.index.expire(now_s)
        if (worker := self._workers.get(name)) is not None:
            self._tiers.stored(worker, tier, keys)

    def removed(self, name: str, keys: bytes, now_s: float, tier: str = "") -> None:
        self.index.expire(now_s)
        if (worker := self._workers.get(name)) is not None:
            self._tiers.removed(worker, tier, keys)

    def replaced(self, name: str, keys: bytes, now_s: float, tier: str = "") -> None:
        """The worker's cache holds these blocks and no others; or a tier below it."""
        self.index.expire(now_s)
        if (worker := self._workers.get(name)) is not None:
            if tier:
                self._tiers.replaced(worker, tier)
            else:
                self._forget_cache(worker)
            self._tiers.stored(worker, tier, keys)

    # --- requests ----------------------------------------------------------------------------------------------------

    def enqueue(self, request: RouteRequest, now_s: float) -> InFlightRequest:
        """Take a request in; `dispatch` hands it out again, at once if there is room. Overloaded: the queue is full, or
        it would wait and must not. Unavailable: no worker is connected.
        One that is in flight already moves: it lets go of what it holds, the workers that it lost are blamed, and it
        keeps its arrival time. Once it was dispatched, its record stays until `ended`, whatever is raised here."""
        self._check(now_s)
        record = self.ledger.get(request.id)
        is_new = record is None
        if record is None:
            tenant = self.tenants.enter(request.account)
            record = InFlightRequest(request, tenant, now_s, self._pool_name(request.model))
            self.ledger.add(record)
        else:
            self._withdraw(record, request, now_s)
        try:
            if request.deadline_s is not None and request.deadline_s <= 0:
                raise DeadlineExceeded("the deadline has passed before an engine was found")
            self._admit(record, now_s, is_new)
        except EmberlineError as error:
            self._refused(record, error)
            raise
        return record

    def claim(self, record: InFlightRequest) -> Route | None:
        """Take the route of the request that was enqueued last, so that `dispatch` does not hand it out. Returns None
        if the request waits."""
        return self._decided.pop().route if self._decided and self._decided[-1] is record else None

    def dispatch(self, now_s: float) -> list[InFlightRequest]:
        """Hand out the requests that leave the queue now, each with its route or its error."""
        self._check(now_s)
        if self.queue.n_waiting:
            for record, error in self.queue.expired(now_s):
                self._refused(record, error, hand_out=True)
            for record in self.queue.due(now_s):
                if (worker := self._workers.get(record.waits_for)) is not None:
                    self._freed.add(worker)
                self._route(record, now_s)
            while self._freed:
                self._serve_queue(self._freed.pop(), now_s)
        self._freed.clear()
        decided, self._decided = self._decided, []
        return decided

    def refuse_waiting(self, model: str, error: EmberlineError) -> None:
        """Requests that wait for this model cannot be served."""
        for record in self.queue.waiting_of(model):
            self._refused(record, error, hand_out=True)

    def waiting_of(self, model: str) -> list[InFlightRequest]:
        return self.queue.waiting_of(self._pool_name(model))

    def cached_tokens(self, request: RouteRequest) -> int:
        """Of its prompt, on the worker that has the most."""
        match = self.index.match(request.keys)
        return min(match[0][0] * self.settings.block_tokens, request.input_tokens) if match else 0

    def wake_s(self, now_s: float) -> float | None:
        """When to call `dispatch` even if nothing has happened; None while no request waits."""
        at_s = self.queue.wake_s()
        return None if at_s is None else max(at_s, now_s)

    def dispatch_job(self, request: RouteRequest, now_s: float) -> Route:
        """A job that was granted a worker goes straight there, charged as preemptible. Unavailable: it is gone."""
        self._check(now_s)
        worker = self._workers.get(request.engine)
        if worker is None or not worker.takes_granted:
            raise Unavailable(f"engine {request.engine} takes no requests any more", retry_after_s=1)
        pool = self._pools[self._pool_name(request.model)]
        need = self.routing_input(request, pool, [worker])
        pair = pool.pair_with(worker, need, now_s)
        if pair is None:
            raise Unavailable(f"no prefill worker is connected for engine {request.engine}", retry_after_s=1)
        record = InFlightRequest(request, None, now_s, self._pool_name(request.model))
        self.ledger.add(record)
        return self._charge(record, pair, need, now_s)

    def first_token(self, request_id: str, now_s: float, cached_tokens: int | None = None) -> None:
        """`cached_tokens`: of the prompt, as counted by the worker that computed it."""
        record = self.ledger.get(request_id)
        if record is None or record.decode is None or record.first_token_s is not None:
            return
        record.first_token_s = record.progress_s = now_s
        assert record.route is not None
        if (worker := self._workers.get(record.route.decode)) is not None:
            self.ledger.first_token(record, worker.reports.progress)
        self._prefill_done(record, now_s, cached_tokens)

    def ended(
        self, request_id: str, now_s: float, outcome: Outcome, output_tokens: int = 0, blame: tuple[str, ...] = ()
    ) -> None:
        """The request is over, in whichever phase: release all that it held. `output_tokens`: their total. `blame`: the
        workers that failed it; by default the decode worker. Ending twice changes nothing."""
        record = self.ledger.get(request_id)
        if record is None:
            return
        if record.decode is not None:
            assert record.route is not None
            record.charge_tenant(OUTPUT_TOKEN_COST * output_tokens)
            if outcome == "finished":
                self._measure(record, output_tokens, now_s)
            elif outcome == "engine_failed":
                blame = blame or (record.route.decode,)
        self._forget(record, blame, now_s, finished=outcome == "finished")

    def snapshot(self, now_s: float) -> Snapshot:
        return Snapshot(
            workers=[
                worker.snapshot(len(self.queue.waiting_for(name)), now_s) for name, worker in self._workers.items()
            ],
            waiting=dict(Counter(record.priority.name.lower() for record in self.queue)),
            dispatched=sum(record.decode is not None for record in self.ledger),
            index_blocks=len(self.index),
        )

    # --- admission and routing ---------------------------------------------------------------------------------------

    def _withdraw(self, record: InFlightRequest, request: RouteRequest, now_s: float) -> None:
        """Take a request off its workers, or out of the queue, before it asks again."""
        if request.lost and record.route is not None and record.decode is not None:
            for name in {record.route.decode, record.route.prefill} - {""}:
                if (worker := self._workers.get(name)) is not None:
                    self.index.unexpect(worker.slot, request.keys)  # no worker stores these blocks now
        self._release(record, request.lost, now_s)
        self._unqueue(record)
        record.requeue(request, now_s)

    def _admit(self, record: InFlightRequest, now_s: float, is_new: bool) -> None:
        """Route a request, or let it wait, if it may."""
        request, pool = record.request, self._pools.get(record.pool)
        found: Candidates = ([], [])
        if pool is not None:
            found = pool.candidates((*request.avoid, *request.lost), request.account)
        decoders = found[0]
        if not decoders and request.wait_s <= 0:
            raise no_worker(request.model)
        if self._route(record, now_s, candidates=found):
            return
        if request.reject_if_busy:
            after_s = self.queue.retry_after_s(record.pool, now_s)
            raise Overloaded(f"{request.model} is busy, and the request must not wait", retry_after_s=after_s)
        if is_new and self.queue.n_of(record.pool) > self.settings.max_waiting * max(1, len(decoders)):
            last = self.queue.last_below(record)
            if last is None:
                raise self.queue.overloaded(record, now_s)
            self._refused(last, self.queue.overloaded(last, now_s), hand_out=True)

    def _route(
        self,
        record: InFlightRequest,
        now_s: float,
        serving: Worker | None = None,
        candidates: Candidates | None = None,
    ) -> bool:
        """Dispatch a request if the best workers for it have room and no queue; else put it into the queue of the one
        that blocks it. `serving`: the worker whose queue is being served, and the request is first there. `candidates`:
        the workers that the request may go to, if they are known."""
        request, pool = record.request, self._pools[record.pool]
        if candidates is None:
            candidates = pool.candidates((*request.avoid, *request.lost), request.account)
        decoders, prefillers = candidates
        if not decoders:
            self.queue.hold(record, "", now_s)
            return False
        need = self.routing_input(request, pool, decoders)
        pair = pool.decide(decoders, prefillers, need, now_s)
        blocker, is_queued = pair.blocker, self.queue.n_waiting > 0
        if blocker is None and is_queued:
            blocker = self._queued_before(pair, record, serving)
        if blocker is None and request.reject_if_busy and pair.decode.has_queue(now_s):
            blocker = pair.decode
        if blocker is not None:
            if record.rank_s is None:
                record.rank_s = record.arrived_s + need.prefill_s(pair.prefill)
            self.queue.hold(record, blocker.name, now_s)
            return False
        if is_queued:
            self.queue.remove(record)
        self.queue.departed(record, now_s)
        route = self._charge(record, pair, need, now_s)
        cached = route.cached_tokens
        record.charge_tenant(need.tokens - cached + CACHED_TOKEN_COST * cached)
        self._decided.append(record)
        return True

    def _queued_before(self, pair: WorkerPair, record: InFlightRequest, serving: Worker | None) -> Worker | None:
        """The worker of the pair that has other requests in its queue, which a new one must not pass."""
        for worker in (pair.decode, pair.prefill):
            queue = self.queue.waiting_for(worker.name)
            if worker is not serving and any(other is not record and worker.may_dispatch(other) for other in queue):
                return worker
        return None

    def _serve_queue(self, worker: Worker, now_s: float) -> None:
        """Dispatch from the worker's queue, in order, while it has room."""
        only = worker.may_dispatch if worker.capacity.shared else None
        while (record := self.queue.first(worker.name, only)) is not None:
            if not self._route(record, now_s, serving=worker) and record.waits_for == worker.name:
                return

    def routing_input(self, request: RouteRequest, pool: WorkerPool, decoders: list[Worker]) -> RoutingInput:
        """Collect the facts about a request that its workers are chosen by."""
        compares = len(pool.workers) > 1  # else no policy is asked: only the worker's room and cache count
        match = self.index.match(request.keys) if request.keys else []
        shared = shared_blocks(match, [worker.slot_bits for worker in decoders]) if match and compares else 0
        return RoutingInput(
            max(1, request.input_tokens),
            request.n,
            match,
            shared,
            session_hash(request, shared) if compares else 0,
            pool.replies.expected(request.max_tokens) if compares else 0.0,
            request.n * pool.replies.predicted(request.max_tokens),
            self.settings.block_tokens,
            passes_flex=request.priority in ("priority", "default"),
            is_job=bool(request.engine),
            fetch_token_s=self._tiers.min_token_s,
            request=request,
        )

    def _charge(self, record: InFlightRequest, pair: WorkerPair, need: RoutingInput, now_s: float) -> Route:
        decode, prefill, keys = pair.decode, pair.prefill, record.request.keys
        cached, record.fetch_s = need.available(prefill)
        record.uncached_tokens, record.total_tokens = need.tokens - cached, need.tokens
        record.reply_tokens, record.n_slots = need.reply_tokens, decode.n_slots(record.request)
        record.work_us = int(self.settings.cost.work_s(record.uncached_tokens, need.tokens) * 1e6)
        if need.match:
            self.index.used(keys, need.match[0][0])
        for worker in {decode, prefill}:
            if new_keys := keys[need.depth(1 << worker.slot) * DIGEST_BYTES :] if need.match else keys:
                if worker.capacity.events:
                    prefill_s = prefill.wait_s(now_s) + record.work_us * 1e-6 * prefill.prefill_speed.scale
                    self.index.expect(worker.slot, new_keys, now_s + EXPECTED_S + prefill_s)
                else:
                    self.index.stored(worker.slot, new_keys)
            worker.dispatched(need.tokens, now_s)
            if worker.breaker.state != "closed":
                worker.breaker.sent()
                self._readiness_changed(worker)
        self.ledger.charge(record, decode.in_flight, prefill.in_flight, now_s)
        self._pools[record.pool].routed(record.uncached_tokens, now_s)
        name = "" if prefill is decode else prefill.name
        record.route = Route(decode=decode.name, prefill=name, cached_tokens=cached)
        return record.route

    # --- release -----------------------------------------------------------------------------------------------------

    def _prefill_done(self, record: InFlightRequest, now_s: float, cached_tokens: int | None = None) -> None:
        worker = self._prefill_worker(record)
        if worker is None or record.request.id not in worker.in_flight.pending:
            return
        in_flight, reports = worker.in_flight, worker.reports
        own_share = reports.own_share(in_flight.prefill_tokens)
        self.ledger.prefilled(record)
        cost, predicted_s = self.settings.cost, record.work_us * 1e-6
        if cached_tokens is not None and 0 <= cached_tokens < record.total_tokens:
            predicted_s = cost.work_s(record.total_tokens - cached_tokens, record.total_tokens)
        if record.dispatched_s >= worker.last_prefill_s:  # it was not batched with another prompt
            predicted_s += cost.request_s
        if not record.is_job and not record.fetch_s:  # the time of a fetch says nothing of the worker's speed
            took_s = (now_s - max(record.dispatched_s, worker.last_prefill_s)) * own_share
            worker.prefill_speed.add(took_s, predicted_s)
            self._pools[record.pool].measured(worker)
        worker.last_prefill_s = now_s
        reports.prefilled(record, record.n_on(in_flight))
        if self.queue.n_waiting:
            self._has_freed(worker)

    def _prefill_worker(self, record: InFlightRequest) -> Worker | None:
        """None: it has lost its connection since the request was dispatched."""
        if record.route is None:
            return None
        worker = self._workers.get(record.route.prefill or record.route.decode)
        return worker if worker is not None and worker.in_flight is record.prefill else None

    def _release(self, record: InFlightRequest, blame: tuple[str, ...], now_s: float, finished: bool = False) -> None:
        if record.decode is None:
            return
        assert record.route is not None
        route = record.route
        loads = {route.decode: record.decode, route.prefill or route.decode: record.prefill}
        self.ledger.release(record)
        for name, load in loads.items():
            worker = self._workers.get(name)
            if worker is None or worker.in_flight is not load:
                continue  # its failure was counted when its connection was lost
            breaker = worker.breaker
            was_allowed = breaker.state == "closed" or breaker.allows
            if name in blame:
                breaker.failed(now_s)
            elif finished:
                breaker.succeeded()
            else:
                breaker.inconclusive()
            if (breaker.state == "closed" or breaker.allows) != was_allowed:
                self._readiness_changed(worker)
            if self.queue.n_waiting:
                self._has_freed(worker)

    def _refused(self, record: InFlightRequest, error: EmberlineError, hand_out: bool = False) -> None:
        """Refuse a request. One that had a worker before stays on record until its owner ends it."""
        self._unqueue(record)
        record.error = error
        if not record.admitted:
            self._close(record)
        if hand_out:
            self._decided.append(record)

    def _forget(self, record: InFlightRequest, blame: tuple[str, ...], now_s: float, finished: bool = False) -> None:
        self._release(record, blame, now_s, finished)
        if self.queue.n_waiting or self._decided:
            self._unqueue(record)
        self._close(record)

    def _unqueue(self, record: InFlightRequest) -> None:
        if self.queue.n_waiting:
            self.queue.remove(record)
        if record in self._decided:
            self._decided.remove(record)

    def _close(self, record: InFlightRequest) -> None:
        self.ledger.remove(record)
        if record.tenant is not None:
            self.tenants.leave(record.tenant)

    def _measure(self, record: InFlightRequest, output_tokens: int, now_s: float) -> None:
        assert record.route is not None
        if (worker := self._workers.get(record.route.decode)) is not None:
            worker.mean_request_s += _SMOOTHING * (now_s - record.dispatched_s - worker.mean_request_s)
        self._pools[record.pool].replies.add(output_tokens // record.request.n)

    # --- health ------------------------------------------------------------------------------------------------------

    def _check(self, now_s: float) -> None:
        """Checks that depend on the time alone: stalled workers, orphaned requests."""
        self.index.expire(now_s)
        if now_s - self._checked_s < HEALTH_CHECK_S:
            return
        self._checked_s = now_s
        self.index.tidy()
        for worker in self._workers.values():
            if worker.check_health(now_s):
                self._readiness_changed(worker)
        for pool in self._pools.values():
            pool.fade_speeds(now_s)
        for record in self.ledger.orphans(now_s):  # its owner still ends it, with a usage row
            log.warning("request without progress written off", extra={"request_id": record.request.id})
            self._release(record, (), now_s)
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
        """It drains, or no longer does: requests in its queue go elsewhere, those in no queue may go there."""
        self._readiness_changed(worker)
        if worker.available:
            self._route_unroutable(now_s)
        else:
            self._reroute_queue(worker, now_s)

    def _readiness_changed(self, worker: Worker) -> None:
        for model in worker.endpoint.models:
            self._pools[model].refresh()
        self._has_freed(worker)

    def _has_freed(self, worker: Worker) -> None:
        """Note that capacity of the worker was freed: the next `dispatch` serves its queue."""
        if self.queue.n_waiting and self.queue.waiting_for(worker.name):
            self._freed.add(worker)

    def _reset(self, worker: Worker, now_s: float) -> None:
        """Nothing runs on it any more, and its cache is gone. Records on it stay until each request ends or moves."""
        worker.in_flight = InFlightLoad()
        worker.reports.reset()
        self._forget_cache(worker)
        self._tiers.forget(worker)
        self._readiness_changed(worker)
        self._reroute_queue(worker, now_s)

    def _forget_cache(self, worker: Worker) -> None:
        for slot in (worker.slot, worker.old_slot):
            if slot is not None:
                self.index.drop_slot(slot)
        worker.set_slots(self.index.take_slot(), None)

    def _reroute_queue(self, worker: Worker, now_s: float) -> None:
        for record in sorted(self.queue.waiting_for(worker.name), key=lambda record: record.order):
            self._route(record, now_s)

    def _route_unroutable(self, now_s: float) -> None:
        """A worker has connected: route the requests that waited for any worker of their model."""
        for record in sorted(self.queue.waiting_for(""), key=lambda record: record.order):
            if self._pools[record.pool].candidates((), record.request.account)[0]:
                self._route(record, now_s)

    def _add(self, endpoint: Endpoint, capacity: Capacity) -> Worker:
        worker = Worker(endpoint, capacity, self.settings.cost, self.index.take_slot())
        self._workers[endpoint.name] = worker
        self._add_to_pools(worker, endpoint)
        return worker

    def _add_to_pools(self, worker: Worker, endpoint: Endpoint) -> None:
        for model in endpoint.models:
            self._pools[model].workers.append(worker)

    def _remove_from_pools(self, worker: Worker) -> None:
        for name, pool in list(self._pools.items()):
            if worker in pool.workers:
                pool.workers.remove(worker)
                pool.refresh()
                if not pool.workers and name.endswith("/*"):  # of a model, what was learnt of its replies stays
                    del self._pools[name]
                    self.queue.forget(name)

    def _pool_name(self, model: str) -> str:
        """A worker that serves `name/*` computes every model of that provider."""
        if "/" not in model or (model in self._pools and self._pools[model].workers):
            return model
        of_provider = provider_pool(model.partition("/")[0])
        return of_provider if of_provider in self._pools else model
