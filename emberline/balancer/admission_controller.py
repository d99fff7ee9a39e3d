"""Runs the balancer in an event loop: gives it a clock, and wakes each waiting request when it is decided."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from emberline.balancer.balancer import Balancer, Outcome
from emberline.balancer.cost_model import Settings
from emberline.balancer.endpoint import Capacity, Endpoint, WorkerConnection
from emberline.balancer.ledger import InFlightRequest
from emberline.balancer.worker import Snapshot
from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.errors import BadInput, EmberlineError
from emberline.protocol.frames import EngineLoad, KVEvents
from emberline.protocol.route_request import Route, RouteRequest

KV_KEYS_AT_ONCE = 1024  # of KV events: a snapshot of a large cache must not hold up the event loop
REPORT_S = 0.05  # a load report is applied after so long, if nothing has needed it before

log = logging.getLogger("emberline.balancer")


class AdmissionController:
    """Lives in the core's event loop."""

    def __init__(self, balancer: Balancer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.balancer = balancer or Balancer(Settings())
        self.on_left: set[Callable[[str, str], None]] = set()  # called with a lost worker's name, and why
        self._watched: set[str] = set()  # workers that were not removed
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Route]] = {}  # by request id
        self._timer: asyncio.TimerHandle | None = None
        # To be applied: worker, tier, stored or removed, keys
        self._kv_events: deque[tuple[str, str, bool, memoryview]] = deque()
        self._kv_handle: asyncio.Handle | None = None
        self._reports: dict[str, tuple[EngineLoad, float]] = {}  # the last of each worker, if not applied yet
        self._reports_timer: asyncio.TimerHandle | None = None

    def watch(self, connection: WorkerConnection) -> None:
        """Register a worker, and follow its connection. Before the connection is started."""
        self.balancer.fleet.register(connection.endpoint)
        self._watched.add(connection.endpoint.name)
        connection.listener = self

    def drain(self, name: str) -> None:
        """Send nothing new to the worker."""
        self.balancer.fleet.drain(name, self._now())
        self._dispatch()

    def undrain(self, name: str) -> None:
        self.balancer.fleet.undrain(name, self._now())
        self._dispatch()

    def remove(self, name: str) -> None:
        self._watched.discard(name)
        self.balancer.fleet.remove(name, self._now())
        self._dispatch()

    def worker_names(self) -> list[str]:
        return list(self.balancer.fleet.workers)

    def in_flight_on(self, name: str) -> int:
        worker = self.balancer.fleet.workers.get(name)
        return worker.in_flight.total if worker is not None else 0

    def has_requests(self, name: str) -> bool:
        """True if a request runs on the worker, or waits for a model that the worker serves."""
        worker, queue = self.balancer.fleet.workers.get(name), self.balancer.queue
        if worker is None:
            return False
        return worker.in_flight.total > 0 or any(queue.n_of(model) for model in worker.endpoint.models)

    def requests_on(self, name: str) -> set[str]:
        """Ids of the requests that run on the worker: that it decodes, or whose prompt it still has to compute."""
        found: set[str] = set()
        for record in self.balancer.ledger:
            if record.decode is None or record.route is None:
                continue
            is_pending = record.prefill is not None and record.request.id in record.prefill.pending
            if name == record.route.decode or (name == record.route.prefill and is_pending):
                found.add(record.request.id)
        return found

    def waiting_s(self, model: str) -> float | None:
        """Return the age in seconds of the oldest request that waits for the model, or None if none waits."""
        since_s = min((record.arrived_s for record in self.balancer.waiting_of(model)), default=None)
        return None if since_s is None else self._clock() - since_s

    def refuse_waiting(self, model: str, error: EmberlineError) -> None:
        """The model cannot be loaded."""
        self.balancer.refuse_waiting(model, error)
        self._dispatch()

    async def admit(self, request: RouteRequest) -> Route:
        """Wait for a route; the request is in flight until `ended`. Raises Overloaded, Unavailable, DeadlineExceeded.
        A request that asks again is moved to other workers."""
        if request.engine:
            return self.balancer.dispatch_job(request, self._now())
        record = self.balancer.enqueue(request, self._now())
        if not self._waiting and (route := self.balancer.claim(record)) is not None:
            return route
        waiting: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = waiting
        self._dispatch()
        try:
            return await waiting
        except asyncio.CancelledError:
            self._waiting.pop(request.id, None)
            self.ended(request.id, "cancelled")
            raise

    def first_token(self, request_id: str, cached_tokens: int) -> None:
        self.balancer.first_token(request_id, self._now(), cached_tokens)
        if self._waiting:
            self._dispatch()

    def ended(self, request_id: str, outcome: Outcome, output_tokens: int = 0, blame: tuple[str, ...] = ()) -> float:
        """End a request. `blame`: the workers that failed it. Returns the device seconds that the request had."""
        device_s = self.balancer.ended(request_id, self._now(), outcome, output_tokens, blame)
        if self._waiting:
            self._dispatch()
        return device_s

    def find(self, request_id: str) -> InFlightRequest | None:
        return self.balancer.ledger.get(request_id)

    def now_s(self) -> float:
        """The time of the ledger's stamps."""
        return self._clock()

    def snapshot(self) -> Snapshot:
        return self.balancer.snapshot(self._now())

    def close(self) -> None:
        for handle in (self._timer, self._kv_handle, self._reports_timer):
            if handle is not None:
                handle.cancel()

    def _dispatch(self) -> None:
        """Wake the requests that are decided, and set the timer for the others."""
        now_s = self._now()
        for record in self.balancer.dispatch(now_s):
            waiting = self._waiting.pop(record.request.id, None)
            if waiting is None or waiting.done():  # its client has left meanwhile
                self.balancer.ended(record.request.id, now_s, "cancelled")
            elif record.error is not None:
                waiting.set_exception(record.error)
            else:
                assert record.route is not None
                waiting.set_result(record.route)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_s = self.balancer.wake_s(now_s)
        if wake_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, wake_s - now_s), self._dispatch)

    # --- events of the workers' connections --------------------------------------------------------------------------

    def joined(self, endpoint: Endpoint, capacity: Capacity, load: EngineLoad | None) -> None:
        if endpoint.name not in self._watched:
            return  # it was removed, and its connection is not closed yet
        now_s = self._now()
        try:
            self.balancer.fleet.join(endpoint, capacity, now_s)
        except BadInput as error:
            log.error("%s", error.message)
            return
        if load is not None:
            self.balancer.fleet.report(endpoint.name, load, now_s)
        self._dispatch()

    def resized(self, name: str, capacity: Capacity) -> None:
        self.balancer.fleet.resize(name, capacity)
        if self._waiting:
            self._dispatch()

    def reported(self, name: str, load: EngineLoad) -> None:
        """Note a load report. Engines send one with every step, and only the last one before a decision counts."""
        self._reports[name] = load, self._clock()
        if self._waiting:
            self._dispatch()
        elif self._reports_timer is None:
            self._reports_timer = asyncio.get_running_loop().call_later(REPORT_S, self._apply_reports)

    def _now(self) -> float:
        """The time of a decision, or of a change to what is in flight: load reports of before are applied first."""
        if self._reports:
            self._apply_reports()
        return self._clock()

    def _apply_reports(self) -> None:
        reports, self._reports = self._reports, {}
        for name, (load, at_s) in reports.items():
            self.balancer.fleet.report(name, load, at_s)
        if self._reports_timer is not None:
            self._reports_timer.cancel()
            self._reports_timer = None

    def observed(self, name: str, load: EngineLoad, age_s: float) -> None:
        """A load report that an HTTP worker received on its own connection, so long ago."""
        now_s = self._now()
        self.balancer.fleet.observed(name, load, now_s - age_s, now_s)
        if self._waiting:
            self._dispatch()

    def kv_events(self, name: str, events: KVEvents) -> None:
        now_s = self._clock()
        if len(events.stored) % DIGEST_BYTES or len(events.removed) % DIGEST_BYTES:
            self.balancer.fleet.protocol_error(name, now_s)
            return
        if events.whole:
            self._forget_kv_events(name, events.tier)
            self.balancer.fleet.replaced(name, b"", now_s, events.tier)
        else:
            self._kv_events.append((name, events.tier, False, memoryview(events.removed)))
        self._kv_events.append((name, events.tier, True, memoryview(events.stored)))
        if self._kv_handle is None:
            self._apply_kv_events()

    def _apply_kv_events(self) -> None:
        """Apply some, in order; the others in later iterations of the event loop."""
        now_s, n_left = self._clock(), KV_KEYS_AT_ONCE * DIGEST_BYTES
        while self._kv_events and n_left > 0:
            name, tier, stored, keys = self._kv_events.popleft()
            part = bytes(keys[:n_left])
            if len(part) < len(keys):
                self._kv_events.appendleft((name, tier, stored, keys[n_left:]))
            n_left -= len(part)
            if part:
                (self.balancer.fleet.stored if stored else self.balancer.fleet.removed)(name, part, now_s, tier)
        self._kv_handle = asyncio.get_running_loop().call_soon(self._apply_kv_events) if self._kv_events else None

    def _forget_kv_events(self, name: str, tier: str | None = None) -> None:
        """Drop the worker's queued KV events of one tier, or of every tier if `tier` is None."""
        if self._kv_events:
            self._kv_events = deque(
                event for event in self._kv_events if event[0] != name or tier not in (None, event[1])
            )

    def distrusted(self, name: str) -> None:
        """Open the circuit breaker of a worker that said what cannot be true."""
        self.balancer.fleet.distrusted(name, self._now())

    def left(self, name: str, why: str) -> None:
        self._forget_kv_events(name)
        self.balancer.fleet.disconnected(name, self._now(), why)
        self._dispatch()
        for tell in self.on_left:
            tell(name, why)
