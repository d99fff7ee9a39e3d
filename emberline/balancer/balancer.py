"""Admission and routing: which request goes to which worker, and when. Decisions only: no I/O, and the caller's clock.

A request is enqueued, dispatched with a route, charged to its workers, reports its first token, and ends once. Every
method takes the time in monotonic seconds, so that the simulator runs the same code.
"""

import logging
from collections import Counter
from typing import Literal

from emberline.balancer.admission_queue import AdmissionQueue, no_worker
from emberline.balancer.cost_model import DEFAULTS, Settings
from emberline.balancer.fleet import Fleet
from emberline.balancer.ledger import (
    CACHED_TOKEN_COST,
    OUTPUT_TOKEN_COST,
    InFlightLedger,
    InFlightRequest,
    Tenants,
)
from emberline.balancer.prefix_index import shared_blocks
from emberline.balancer.routing_policy import RoutingInput
from emberline.balancer.worker import Snapshot, Worker
from emberline.balancer.worker_pool import Candidates, WorkerPair, WorkerPool
from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.errors import DeadlineExceeded, EmberlineError, Overloaded, Unavailable
from emberline.protocol.route_request import Route, RouteRequest, session_hash

EXPECTED_S = 4.0  # a dispatched prompt counts as cached for so long after its prefill, until a KV event confirms it
HEALTH_CHECK_S = 0.5  # between two checks of what only time changes
_SMOOTHING = 0.1

Outcome = Literal["finished", "cancelled", "client_error", "engine_failed"]

log = logging.getLogger("emberline.balancer")


class Balancer:
    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.ledger = InFlightLedger()
        self.settings = settings
        self.fleet = Fleet(settings, self)
        self._index, self._workers, self._pools = self.fleet.index, self.fleet.workers, self.fleet.pools
        self.tenants = Tenants()
        self.queue = AdmissionQueue()
        self._decided: list[InFlightRequest] = []  # what the next `dispatch` hands out
        self._freed: set[Worker] = set()  # workers that may have room for requests in their queues
        self._checked_s = float("-inf")

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
            record = InFlightRequest(request, tenant, now_s, self.fleet.pool_name(request.model))
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
        return self.queue.waiting_of(self.fleet.pool_name(model))

    def cached_tokens(self, request: RouteRequest) -> int:
        """Return the largest number of the request's prompt tokens that any single worker has cached."""
        match = self._index.match(request.keys)
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
        pool = self._pools[self.fleet.pool_name(request.model)]
        need = self.routing_input(request, pool, [worker])
        pair = pool.pair_with(worker, need, now_s)
        if pair is None:
            raise Unavailable(f"no prefill worker is connected for engine {request.engine}", retry_after_s=1)
        record = InFlightRequest(request, None, now_s, self.fleet.pool_name(request.model))
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
    ) -> float:
        """End a request, in whichever phase: release all that it held. `output_tokens`: their total. `blame`: the
        workers that failed it; by default the decode worker. Ending twice changes nothing.

        Returns the device seconds that the request had."""
        record = self.ledger.get(request_id)
        if record is None:
            return 0.0
        if record.decode is not None:
            assert record.route is not None
            record.charge_tenant(OUTPUT_TOKEN_COST * output_tokens)
            if outcome == "finished":
                self._measure(record, output_tokens, now_s)
            elif outcome == "engine_failed":
                blame = blame or (record.route.decode,)
        self._forget(record, blame, now_s, finished=outcome == "finished")
        return record.device_s

    def snapshot(self, now_s: float) -> Snapshot:
        return Snapshot(
            workers=[
                worker.snapshot(len(self.queue.waiting_for(name)), now_s) for name, worker in self._workers.items()
            ],
            waiting=dict(Counter(record.priority.name.lower() for record in self.queue)),
            dispatched=sum(record.decode is not None for record in self.ledger),
            index_blocks=len(self._index),
        )

    # --- admission and routing ---------------------------------------------------------------------------------------

    def _withdraw(self, record: InFlightRequest, request: RouteRequest, now_s: float) -> None:
        """Take a request off its workers, or out of the queue, before it asks again."""
        if request.lost and record.route is not None and record.decode is not None:
            for name in {record.route.decode, record.route.prefill} - {""}:
                if (worker := self._workers.get(name)) is not None:
                    self._index.unexpect(worker.slot, request.keys)  # no worker stores these blocks now
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
        match = self._index.match(request.keys) if request.keys else []
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
            fetch_token_s=self.fleet.tiers.min_token_s,
            request=request,
        )

    def _charge(self, record: InFlightRequest, pair: WorkerPair, need: RoutingInput, now_s: float) -> Route:
        decode, prefill, keys = pair.decode, pair.prefill, record.request.keys
        cached, record.fetch_s = need.available(prefill)
        record.uncached_tokens, record.total_tokens = need.tokens - cached, need.tokens
        record.reply_tokens, record.n_slots = need.reply_tokens, decode.n_slots(record.request)
        record.work_us = int(self.settings.cost.work_s(record.uncached_tokens, need.tokens) * 1e6)
        if need.match:
            self._index.used(keys, need.match[0][0])
        for worker in {decode, prefill}:
            if new_keys := keys[need.depth(1 << worker.slot) * DIGEST_BYTES :] if need.match else keys:
                if worker.capacity.events:
                    prefill_s = prefill.wait_s(now_s) + record.work_us * 1e-6 * prefill.prefill_speed.scale
                    self._index.expect(worker.slot, new_keys, now_s + EXPECTED_S + prefill_s)
                else:
                    self._index.stored(worker.slot, new_keys)
            worker.dispatched(need.tokens, now_s)
            if worker.breaker.state != "closed":
                worker.breaker.sent()
                self.fleet.readiness_changed(worker)
        if decode.capacity.n_devices:
            record.decode_share_s = decode.share_s(now_s)
        if prefill is not decode and prefill.capacity.n_devices:
            record.prefill_share_s = prefill.share_s(now_s)
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
        if record.prefill is not record.decode:
            self._count_prefill_time(record, now_s)
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
            self.has_room(worker)

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
        decode = self._workers.get(route.decode)
        if decode is not None and decode.capacity.n_devices and decode.in_flight is record.decode:
            share_s = decode.share_s(now_s) - record.decode_share_s
            record.device_s += share_s * record.request.n * decode.capacity.n_devices
        if record.prefill is not record.decode:
            self._count_prefill_time(record, now_s)
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
                self.fleet.readiness_changed(worker)
            if self.queue.n_waiting:
                self.has_room(worker)

    def _count_prefill_time(self, record: InFlightRequest, now_s: float) -> None:
        """Add the record's part of the time of a worker that has only its prompt."""
        worker = self._prefill_worker(record)
        if worker is not None and record.request.id in worker.in_flight.pending:
            record.device_s += (worker.share_s(now_s) - record.prefill_share_s) * worker.capacity.n_devices

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

    def _check(self, now_s: float) -> None:
        """Make the checks that depend on the time alone: of the workers, and for orphaned requests."""
        self._index.expire(now_s)
        if now_s - self._checked_s < HEALTH_CHECK_S:
            return
        self._checked_s = now_s
        self.fleet.check(now_s)
        for record in self.ledger.orphans(now_s):  # its owner still ends it, with a usage row
            log.warning("request without progress written off", extra={"request_id": record.request.id})
            self._release(record, (), now_s)

    # --- changes of the fleet ----------------------------------------------------------------------------------------

    def has_room(self, worker: Worker) -> None:
        """Note that the worker may have room: the next `dispatch` serves its queue."""
        if self.queue.n_waiting and self.queue.waiting_for(worker.name):
            self._freed.add(worker)

    def now_available(self, now_s: float) -> None:
        """Route the requests that wait for any worker of their model."""
        for record in sorted(self.queue.waiting_for(""), key=lambda record: record.order):
            if self._pools[record.pool].candidates((), record.request.account)[0]:
                self._route(record, now_s)

    def now_unavailable(self, worker: Worker, now_s: float) -> None:
        """Route the requests in the worker's queue elsewhere."""
        for record in sorted(self.queue.waiting_for(worker.name), key=lambda record: record.order):
            self._route(record, now_s)

    def pool_removed(self, pool: str) -> None:
        """Forget what the queue knows of a provider's requests."""
        self.queue.forget(pool)
