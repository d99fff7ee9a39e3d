"""Admits requests and sends each to the endpoints that serve it best. Decisions only: no I/O, and the caller's clock.

A request is offered, waits if it must, is dispatched with a route and charged to its endpoints, begins with its first
token, and ends once. Every method takes the time, monotonic seconds, so a simulator runs the very same code.
"""

import logging
from hashlib import blake2b
from typing import Literal

from emberline.balancer.admission_queue import OUTPUT, Admission, QueuedRequest, Tenants, prompt_cost
from emberline.balancer.cost_model import DEFAULTS, Settings
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.ledger import Charge, InFlightLedger
from emberline.balancer.prefix_index import FleetPrefixIndex, Match
from emberline.balancer.route_request import Route, RouteRequest
from emberline.balancer.routing_policy import Need
from emberline.balancer.snapshot import Snapshot, describe
from emberline.balancer.worker import Worker
from emberline.balancer.worker_pool import Pool, WorkerPair
from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.errors import BadInput, DeadlineExceeded, EmberlineError, Overloaded, Unavailable
from emberline.protocol.frames import EngineLoad

OWN_S = 4.0  # a decision counts as cached for so long after the prompt should be computed, until the engine says so
BLIND_S = 300.0  # an endpoint that never says is believed to keep what it was given for one to two times as long
ORPHAN_S = 300.0  # without a first token
ORPHAN_RUNNING_S = 3600.0  # without an end
LOOK_S = 0.5  # between two looks at what only time changes
_SMOOTHING = 0.1

Outcome = Literal["finished", "cancelled", "client_error", "engine_failed"]

log = logging.getLogger("emberline.balancer")


class Balancer:
    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._settings = settings
        self._pools: dict[str, Pool] = {}
        self._workers: dict[str, Worker] = {}
        self._index = FleetPrefixIndex(settings.index_bytes)
        self._ledger = InFlightLedger()
        self._tenants = Tenants()
        self._waiting = Admission()
        self._tickets: dict[str, QueuedRequest] = {}  # by request id: waiting, or dispatched and not ended
        self._out: list[QueuedRequest] = []  # what the next dispatch hands out
        self._stirred: set[Worker] = set()  # endpoints that may have room for those who wait
        self._looked_s = float("-inf")
        self._rotated_s = float("-inf")

    # --- endpoints ---------------------------------------------------------------------------------------------------

    def join(self, endpoint: Endpoint, capacity: Capacity, now_s: float) -> None:
        """It is there: for the first time, again, or with other capacities. BadInput when the name is taken."""
        worker = self._workers.get(endpoint.name)
        if worker is not None and worker.connected and worker.endpoint.address != endpoint.address:
            raise BadInput(
                f"two endpoints are called {endpoint.name}: {worker.endpoint.address} and {endpoint.address}; "
                "give each a name of its own",
                param="name",
            )
        if worker is None:
            worker = Worker(endpoint, capacity, self._settings.cost, self._index.take_slot())
            self._workers[endpoint.name] = worker
        elif worker.endpoint.models != endpoint.models or worker.endpoint.role != endpoint.role:
            self._out_of_pools(worker)
        worker.endpoint, worker.capacity = endpoint, capacity
        worker.connected, worker.draining, worker.problem = True, False, ""
        for model in endpoint.models:
            if worker not in (pool := self._pool(model)).workers:
                pool.workers.append(worker)
        self._changed(worker)
        self._retry_all(now_s)

    def down(self, name: str, now_s: float, why: str = "") -> None:
        """Its connection is lost, and with it all that ran there. One failure, however many streams it had."""
        worker = self._workers.get(name)
        if worker is None or not worker.connected:
            return
        worker.connected, worker.problem = False, why
        worker.breaker.failed(now_s)
        self._empty(worker, now_s)

    def leave(self, name: str, now_s: float) -> None:
        """It is gone for good."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        worker.connected = False
        self._out_of_pools(worker)
        self._empty(worker, now_s)
        self._index.drop_slot(worker.slot)

    def drain(self, name: str, now_s: float) -> None:
        """It takes nothing new; what runs there goes on."""
        if (worker := self._workers.get(name)) is not None:
            worker.draining = True
            self._changed(worker)
            self._evacuate(worker, now_s)

    def report(self, name: str, load: EngineLoad, now_s: float) -> None:
        worker = self._workers.get(name)
        if worker is None:
            return
        worker.heard_s = now_s
        before, before_s = worker.witness.load, worker.witness.at_s
        if worker.witness.hear(load, worker.account, now_s):
            worker.learn_step(before, load, now_s - before_s)
        elif worker.witness.lies == 1 or worker.witness.lies % 1000 == 0:
            log.warning(
                "endpoint %s: its load is not believed: %s", name, worker.witness.problem, extra={"endpoint": name}
            )
        self._stir(worker)

    def failed(self, name: str, now_s: float) -> None:
        """It did something wrong outside of any request."""
        if (worker := self._workers.get(name)) is not None:
            worker.breaker.failed(now_s)
            self._changed(worker)

    # --- what the endpoints' caches hold -----------------------------------------------------------------------------

    def stored(self, name: str, keys: bytes, now_s: float) -> None:
        self._index.lapse(now_s)
        if (worker := self._workers.get(name)) is not None:
            self._index.stored(worker.slot, keys)

    def removed(self, name: str, keys: bytes, now_s: float) -> None:
        self._index.lapse(now_s)
        if (worker := self._workers.get(name)) is not None:
            self._index.removed(worker.slot, keys)

    def cleared(self, name: str, now_s: float) -> None:
        self._index.lapse(now_s)
        if (worker := self._workers.get(name)) is not None:
            self._forget(worker)

    def whole(self, name: str, keys: bytes, now_s: float) -> None:
        """All that it holds."""
        self.cleared(name, now_s)
        self.stored(name, keys, now_s)

    # --- requests ----------------------------------------------------------------------------------------------------

    def offer(self, ask: RouteRequest, now_s: float) -> QueuedRequest:
        """Take a request in; `dispatch` hands it out again, at once if there is room. Overloaded when too many wait, or
        when this one would and is not to; Unavailable when nothing is there. Who is open already moves: what it held is
        given back, those it lost are blamed, and it keeps its place."""
        self._look(now_s)
        before = self._tickets.get(ask.id)
        ticket = self._admit(ask, before, now_s)
        try:
            if ask.deadline_s is not None and ask.deadline_s <= 0:
                raise DeadlineExceeded("the deadline has passed before an engine was found")
            self._seat(ticket, now_s, new=before is None)
        except EmberlineError:
            self._close(ticket)
            raise
        return ticket

    def dispatch(self, now_s: float) -> list[QueuedRequest]:
        """Those that leave the queue now, each with its route or its error."""
        self._look(now_s)
        if len(self._waiting):
            for ticket, error in self._waiting.expired(now_s):
                self._refuse(ticket, error)
            for ticket in self._waiting.due(now_s):
                if ticket.held_on is not None:
                    self._stirred.add(ticket.held_on)
                self._try(ticket, now_s)
            while self._stirred:
                self._serve(self._stirred.pop(), now_s)
        self._stirred.clear()
        out, self._out = self._out, []
        return out

    def wake_s(self, now_s: float) -> float | None:
        """When to call `dispatch` even if nothing has happened; None while nobody waits."""
        at_s = self._waiting.wake_s()
        return None if at_s is None else max(at_s, now_s)

    def place(self, ask: RouteRequest, now_s: float) -> Route:
        """Queued work that was granted an endpoint goes there, and is charged as what makes room for others."""
        self._look(now_s)
        worker = self._workers.get(ask.engine)
        if worker is None or not worker.connected or worker.stalled:
            raise Unavailable(f"engine {ask.engine} is not there any more", retry_after_s=1)
        self._release(ask.id, ask.lost, now_s)
        pool = self._pool(ask.model)
        need = self._need(ask, pool, [worker])
        choice = pool.paired(worker, need, now_s)
        if choice is None:
            raise Unavailable(f"no prefill endpoint is there for engine {ask.engine}", retry_after_s=1)
        return self._charge(ask, choice, need, now_s, batch=True)

    def prefilled(self, request_id: str, now_s: float) -> None:
        """Its prompt is computed and handed on; the first token is another's."""
        if (charge := self._ledger.get(request_id)) is not None:
            charge.seen_s = now_s
            self._computed(charge, now_s)

    def began(self, request_id: str, now_s: float, cached_tokens: int | None = None) -> None:
        """Its first token is there; `cached_tokens`: as the engine that computed the prompt counted them."""
        charge = self._ledger.get(request_id)
        if charge is None or charge.began_s is not None:
            return
        charge.began_s = charge.seen_s = now_s
        self._computed(charge, now_s, cached_tokens)

    def progress(self, request_id: str, n_tokens: int, now_s: float) -> None:
        if (charge := self._ledger.get(request_id)) is not None and n_tokens > 0:
            charge.seen_s = now_s
            self._ledger.emitted(charge, n_tokens)
            self._count_output(request_id, n_tokens)

    def ended(
        self, request_id: str, now_s: float, outcome: Outcome, output_tokens: int = 0, blame: tuple[str, ...] = ()
    ) -> None:
        """It is over, wherever it was; all that it held is given back. `output_tokens` in all. `blame`: the endpoints
        that failed it; by default the one that drew its tokens."""
        charge = self._ledger.get(request_id)
        if charge is not None:
            self._count_output(request_id, max(0, output_tokens - charge.emitted))
            if outcome == "finished":
                self._learn(charge, output_tokens, now_s)
            elif outcome == "engine_failed":
                blame = blame or (charge.decode.name,)
            self._release(request_id, blame, now_s, finished=outcome == "finished")
        if (ticket := self._tickets.get(request_id)) is not None:
            self._close(ticket)

    @property
    def open_ids(self) -> set[str]:
        """Requests that wait, or hold something."""
        return self._ledger.ids() | set(self._tickets)

    def snapshot(self, now_s: float) -> Snapshot:
        return describe(self._workers.values(), self._waiting, self._tenants, self._index, len(self._ledger), now_s)

    # --- taking in ---------------------------------------------------------------------------------------------------

    def _admit(self, ask: RouteRequest, before: QueuedRequest | None, now_s: float) -> QueuedRequest:
        tenant = self._tenants.enter(ask.account)
        ticket = QueuedRequest(ask, tenant, now_s if before is None else before.arrived_s, now_s)
        if before is not None:
            self._close(before)
        if ask.lost and (charge := self._ledger.get(ask.id)) is not None:
            for worker in {charge.decode, charge.prefill}:
                self._index.unexpect(worker.slot, ask.keys)  # nobody brings it any more
        self._release(ask.id, ask.lost, now_s)
        self._tickets[ask.id] = ticket
        return ticket

    def _seat(self, ticket: QueuedRequest, now_s: float, new: bool) -> None:
        """Find it a place, or let it wait, if it may."""
        ask, pool = ticket.ask, self._pools.get(ticket.ask.model)
        decoders = pool.candidates((*ask.avoid, *ask.lost))[0] if pool is not None else []
        if not decoders and ask.wait_s <= 0:
            raise Unavailable(f"no engine of {ask.model} is connected", retry_after_s=2)
        if self._try(ticket, now_s):
            return
        if ask.reject_if_busy:
            after_s = self._waiting.retry_after_s(now_s)
            raise Overloaded(f"{ask.model} is busy, and the request is not to wait", retry_after_s=after_s)
        if new and len(self._waiting) > self._settings.max_waiting * max(1, len(decoders)):
            last = self._waiting.last_below(ticket)
            if last is None:
                raise self._waiting.overloaded(ticket, now_s)
            self._refuse(last, self._waiting.overloaded(last, now_s))

    def _try(self, ticket: QueuedRequest, now_s: float, called_by: Worker | None = None) -> bool:
        """Dispatch it if the best place for it has room, and nobody else stands there or it was called; else let it
        stand there."""
        ask, pool = ticket.ask, self._pool(ticket.ask.model)
        decoders, prefillers = pool.candidates((*ask.avoid, *ask.lost))
        if not decoders:
            self._waiting.hold(ticket, None, now_s)
            return False
        need = self._need(ask, pool, decoders)
        choice = pool.decide(decoders, prefillers, need, now_s)
        if ticket.rank_s is None:
            ticket.rank_s = ticket.arrived_s + need.prefill_s(choice.prefill)
        blocker = choice.blocker or _occupied(choice, ticket, called_by)
        if blocker is None and ask.reject_if_busy and choice.decode.queues(now_s):
            blocker = choice.decode
        if blocker is not None:
            self._waiting.hold(ticket, blocker, now_s)
            return False
        self._waiting.remove(ticket)
        self._waiting.depart(now_s)
        ticket.route = self._charge(ask, choice, need, now_s)
        ticket.tenant.counter += prompt_cost(need.tokens - ticket.route.cached_tokens, ticket.route.cached_tokens)
        self._out.append(ticket)
        return True

    def _serve(self, worker: Worker, now_s: float) -> None:
        """Those who wait for the endpoint, in order, while it has room."""
        while (ticket := self._waiting.first(worker)) is not None:
            self._try(ticket, now_s, called_by=worker)
            if ticket.held_on is worker:
                return

    def _need(self, ask: RouteRequest, pool: Pool, decoders: list[Worker]) -> Need:
        match = self._index.match(ask.keys)
        shared = _shared(match, decoders) if match else 0
        output_tokens = min(pool.output_tokens, ask.max_tokens) if ask.max_tokens else pool.output_tokens
        return Need(
            max(1, ask.input_tokens),
            ask.n,
            match,
            shared,
            _session64(ask, shared),
            output_tokens,
            self._settings.block_tokens,
            passes_flex=ask.priority in ("priority", "default"),
        )

    def _charge(self, ask: RouteRequest, choice: WorkerPair, need: Need, now_s: float, batch: bool = False) -> Route:
        decode, prefill = choice.decode, choice.prefill
        cached = need.cached(prefill)
        charge = Charge(ask.id, decode, prefill, need.tokens - cached, need.tokens, ask.n)
        charge.flex = ask.priority == "flex"
        work_us = int(self._settings.cost.work_s(charge.uncached_tokens, need.tokens) * 1e6)
        for worker in {decode, prefill}:
            until_s = now_s + OWN_S + prefill.wait_s(now_s) + work_us * 1e-6 * prefill.prefill_pace.scale
            self._expect(worker, ask.keys, need, until_s)
            worker.given(need.tokens, now_s)
            if worker.breaker.state != "closed":
                worker.breaker.sent()
                self._changed(worker)
        self._ledger.charge(charge, work_us, batch, now_s)
        name = "" if prefill is decode else prefill.name
        return Route(decode=decode.name, prefill=name, cached_tokens=cached)

    def _expect(self, worker: Worker, keys: bytes, need: Need, until_s: float) -> None:
        fresh = keys[need.depth(1 << worker.slot) * DIGEST_BYTES :]
        if worker.capacity.events:
            self._index.expect(worker.slot, fresh, until_s)
        else:
            self._index.stored(worker.slot, fresh)

    # --- giving back -------------------------------------------------------------------------------------------------

    def _computed(self, charge: Charge, now_s: float, cached_tokens: int | None = None) -> None:
        worker = charge.prefill
        share = worker.witness.share(worker.account.prefill_tokens)
        if not self._ledger.prefilled(charge):
            return
        cost, predicted_s = self._settings.cost, charge.work_us * 1e-6
        if cached_tokens is not None and 0 <= cached_tokens < charge.total_tokens:
            predicted_s = cost.work_s(charge.total_tokens - cached_tokens, charge.total_tokens)
        if charge.at_s >= worker.first_s:  # it did not come while another was computed
            predicted_s += cost.request_s
        if not charge.batch:
            worker.prefill_pace.add((now_s - max(charge.at_s, worker.first_s)) * share, predicted_s)
        worker.first_s = now_s
        worker.witness.prefilled(charge)
        self._stir(worker)

    def _release(self, request_id: str, blame: tuple[str, ...], now_s: float, finished: bool = False) -> None:
        charge = self._ledger.release(request_id)
        if charge is None:
            return
        for worker, incarnation in zip((charge.decode, charge.prefill), charge.incarnations):
            if worker.incarnation == incarnation:  # else its end was counted when its connection was lost
                was_ready = worker.ready
                if worker.name in blame:
                    worker.breaker.failed(now_s)
                elif finished:
                    worker.breaker.succeeded()
                else:
                    worker.breaker.undecided()
                if worker.ready != was_ready:
                    self._changed(worker)
                self._stir(worker)
            if charge.decode is charge.prefill:
                break

    def _refuse(self, ticket: QueuedRequest, error: EmberlineError) -> None:
        self._close(ticket)
        ticket.error = error
        self._out.append(ticket)

    def _close(self, ticket: QueuedRequest) -> None:
        """The ticket is history. What it was charged is another matter."""
        self._waiting.remove(ticket)
        if self._tickets.get(ticket.ask.id) is ticket:
            del self._tickets[ticket.ask.id]
            if ticket in self._out:
                self._out.remove(ticket)
        self._tenants.leave(ticket.tenant)

    def _count_output(self, request_id: str, n_tokens: int) -> None:
        if (ticket := self._tickets.get(request_id)) is not None:
            ticket.tenant.counter += OUTPUT * n_tokens

    def _learn(self, charge: Charge, output_tokens: int, now_s: float) -> None:
        worker = charge.decode
        worker.mean_s += _SMOOTHING * (now_s - charge.at_s - worker.mean_s)
        for model in worker.endpoint.models:
            self._pool(model).ended(output_tokens)

    # --- health ------------------------------------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        """What only the passing of time changes."""
        self._index.lapse(now_s)
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for worker in self._workers.values():
            if worker.look(now_s):
                self._changed(worker)
        for pool in self._pools.values():
            pool.relax(now_s)
        for request_id in self._ledger.overdue(now_s - ORPHAN_S, now_s - ORPHAN_RUNNING_S):
            log.warning("a request gave no sign of life and is written off", extra={"request_id": request_id})
            self.ended(request_id, now_s, "cancelled")
        if now_s - self._rotated_s >= BLIND_S:
            self._rotated_s = now_s
            self._rotate()

    def _rotate(self) -> None:
        for worker in self._workers.values():
            if not worker.capacity.events:
                if worker.old_slot is not None:
                    self._index.drop_slot(worker.old_slot)
                worker.move(self._index.take_slot(), worker.slot)

    def _changed(self, worker: Worker) -> None:
        for model in worker.endpoint.models:
            self._pool(model).refresh()
        self._stir(worker)

    def _stir(self, worker: Worker) -> None:
        if worker.held:
            self._stirred.add(worker)

    def _empty(self, worker: Worker, now_s: float) -> None:
        """Nothing is on it any more, nor in its cache."""
        self._ledger.void(worker)
        worker.witness.forget()
        self._forget(worker)
        self._changed(worker)
        self._evacuate(worker, now_s)

    def _forget(self, worker: Worker) -> None:
        for slot in (worker.slot, worker.old_slot):
            if slot is not None:
                self._index.drop_slot(slot)
        worker.move(self._index.take_slot(), None)

    def _evacuate(self, worker: Worker, now_s: float) -> None:
        for ticket in sorted(worker.held, key=lambda ticket: ticket.order):
            self._try(ticket, now_s)

    def _retry_all(self, now_s: float) -> None:
        """A new endpoint may be better for those who wait, above all for those who wait for any at all."""
        while (ticket := self._waiting.first(None)) is not None and self._pools[ticket.ask.model].candidates(())[0]:
            self._try(ticket, now_s)

    def _out_of_pools(self, worker: Worker) -> None:
        for pool in self._pools.values():
            if worker in pool.workers:
                pool.workers.remove(worker)
                pool.refresh()

    def _pool(self, model: str) -> Pool:
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = Pool(model, self._settings)
        return pool


def _occupied(choice: WorkerPair, ticket: QueuedRequest, called_by: Worker | None) -> Worker | None:
    """Whoever has others standing there, that a new one must not pass."""
    for worker in (choice.decode, choice.prefill):
        if worker is not called_by and worker.held and (len(worker.held) > 1 or ticket not in worker.held):
            return worker
    return None


def _shared(match: Match, workers: list[Worker]) -> int:
    """How many leading blocks more than half of the endpoints hold: what many conversations begin with."""
    bits = 0
    for worker in workers:
        bits |= worker.bits
    n_holders = 0
    for depth, mask in match:
        n_holders += (mask & bits).bit_count()
        if 2 * n_holders > len(workers):
            return depth
    return 0


def _session64(ask: RouteRequest, shared: int) -> int:
    """What the conversation is recognised by: its name; else its first block beyond those that most endpoints hold;
    else nothing but itself."""
    if ask.affinity is None and ask.keys:
        first = min(shared, len(ask.keys) // DIGEST_BYTES - 1) * DIGEST_BYTES
        return int.from_bytes(ask.keys[first : first + 8], "little")
    name = ask.id if ask.affinity is None else ask.affinity
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
