"""The production balancer in front of simulated workers, with virtual time as its clock.

Settings and calls are those of production: the default cost model, whose scale the balancer measures at each worker;
`enqueue`, `dispatch`, `first_token` and `ended` for a request; `join`, `report`, KV events and `disconnected` for a
worker.
"""

from collections.abc import Callable, Sequence

import msgspec

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import Settings
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.protocol.errors import EmberlineError, Overloaded, Unavailable
from emberline.protocol.frames import EngineLoad
from emberline.protocol.route_request import RouteRequest
from emberline.simulator.baselines import Send
from emberline.simulator.request import BlockKeys, SimRequest
from emberline.simulator.virtual_clock import VirtualClock
from emberline.simulator.worker import SimWorker

MODEL = "simulated"
PROBE_S = 2.0  # between two load reports of an upstream server
MAX_FAILOVERS = 3  # of one request; as in production, where it then ends with an error
RESTART_WAIT_S = 60.0  # that a failover waits for a worker


class EmberlineRouter:
    """One balancer. `report_delay_s`: latency of the workers' load reports and KV events. `upstream`: the workers are
    other servers, which publish no KV events and report their load when they are probed. `hold_s`: how long requests
    wait for a first worker."""

    def __init__(
        self,
        workers: Sequence[SimWorker],
        send: Send,
        clock: VirtualClock,
        settings: Settings,
        keys: BlockKeys,
        session_affinity: bool = False,
        report_delay_s: float = 0.0,
        upstream: bool = False,
        hold_s: float = 0.0,
    ) -> None:
        self.balancer = Balancer(settings)
        self._send, self._clock, self._keys = send, clock, keys
        self._session_affinity, self._report_delay_s, self._upstream = session_affinity, report_delay_s, upstream
        self._hold_s = hold_s
        self._requests: dict[str, SimRequest] = {}  # that no worker has yet
        self._asked: dict[str, RouteRequest] = {}  # of requests in flight
        self._down: set[str] = set()
        self._n_rejected = 0
        self._wakeup_s = float("inf")
        for worker in workers:
            self.on_worker_joined(worker)
            if upstream:
                self._probe(worker)

    # --- requests ----------------------------------------------------------------------------------------------------

    def on_history(self, request: SimRequest, worker: SimWorker) -> None:
        self._keys.of_prompt(request.path, request.lengths, sum(request.lengths))

    def on_request(self, request: SimRequest) -> None:
        n_blocks = (request.n_prompt - 1) // request.block_tokens
        self._enqueue(
            request,
            RouteRequest(
                id=request.id,
                account=f"tenant-{request.tenant}",
                model=MODEL,
                model_version="",
                input_tokens=request.n_prompt,
                created_us=int(self._clock.now_s * 1e6),
                wait_s=self._hold_s,
                affinity=f"session-{request.session}" if self._session_affinity else None,
                keys=self._keys.of_prompt(request.path, request.lengths, n_blocks),
            ),
        )

    def on_prefill_done(self, request: SimRequest) -> None:
        """Production learns of it only by the first token."""

    def on_first_token(self, request: SimRequest) -> None:
        if request.streamed:
            self.balancer.first_token(request.id, self._clock.now_s, self._cached_tokens(request))
            self._dispatch()

    def on_finish(self, request: SimRequest) -> None:
        now_s = self._clock.now_s
        self.balancer.first_token(request.id, now_s, self._cached_tokens(request))  # of a request that is not streamed
        self.balancer.ended(request.id, now_s, "finished", request.n_output)
        del self._asked[request.id]
        self._dispatch()

    def n_waiting(self) -> tuple[int, int]:
        return len(self._requests), sum(request.n_prompt for request in self._requests.values())

    def n_rejected(self) -> int:
        return self._n_rejected

    def _cached_tokens(self, request: SimRequest) -> int:
        if not self._upstream:
            return request.cached_tokens
        record = self.balancer.ledger.get(request.id)
        assert record is not None
        assert record.route is not None
        return record.route.cached_tokens  # other servers tell at the end, if at all

    def _enqueue(self, request: SimRequest, asked: RouteRequest) -> None:
        self._requests[request.id] = request
        self._asked[request.id] = asked
        try:
            self.balancer.enqueue(asked, self._clock.now_s)
        except (Overloaded, Unavailable) as error:
            self._refused(request, error)
        self._dispatch()

    def _refused(self, request: SimRequest, error: EmberlineError) -> None:
        """The client tries again, from the beginning."""
        self._n_rejected += 1
        self.balancer.ended(request.id, self._clock.now_s, "cancelled")
        self._requests.pop(request.id, None)
        del self._asked[request.id]
        request.n_written = 0
        self._clock.at(self._clock.now_s + max(1.0, error.retry_after_s or 0.0), self.on_request, request)

    def _dispatch(self) -> None:
        now_s = self._clock.now_s
        for record in self.balancer.dispatch(now_s):
            request = self._requests.pop(record.request.id)
            if record.error is not None:
                self._refused(request, record.error)
                continue
            assert record.route is not None
            self._send(request, record.route.decode, record.route.prefill)
        wake_s = self.balancer.wake_s(now_s)
        if wake_s is not None and wake_s < self._wakeup_s:
            self._wakeup_s = max(wake_s, now_s)
            self._clock.at(self._wakeup_s, self._wake, self._wakeup_s)

    def _wake(self, asked_s: float) -> None:
        if asked_s == self._wakeup_s:
            self._wakeup_s = float("inf")
            self._dispatch()

    # --- workers -----------------------------------------------------------------------------------------------------

    def on_worker_joined(self, worker: SimWorker) -> None:
        endpoint = Endpoint(name=worker.name, address="unix:/simulated", role=worker.role, models=(MODEL,))
        capacity = Capacity(
            max_running=worker.model.max_running, kv_tokens=worker.model.kv_tokens, events=not self._upstream
        )
        self._down.discard(worker.name)
        self.balancer.fleet.join(endpoint, capacity, self._clock.now_s)
        self._dispatch()

    def on_worker_lost(self, worker: SimWorker, requests: list[SimRequest]) -> None:
        """Move the worker's requests to others, which continue after the tokens that the client has."""
        self._down.add(worker.name)
        self.balancer.fleet.disconnected(worker.name, self._clock.now_s, "the connection was lost")
        for request in requests:
            request.n_failovers += 1
            if request.n_failovers > MAX_FAILOVERS:
                self._refused(request, Unavailable(f"worker {worker.name} was lost"))
                continue
            asked = self._asked[request.id]
            lost, avoid = (worker.name,), tuple({*asked.avoid, worker.name})
            self._enqueue(
                request, msgspec.structs.replace(asked, lost=lost, avoid=avoid, wait_s=RESTART_WAIT_S + self._hold_s)
            )
        self._dispatch()

    def on_worker_drained(self, worker: SimWorker) -> None:
        self.balancer.fleet.drain(worker.name, self._clock.now_s)
        self._dispatch()

    def on_worker_undrained(self, worker: SimWorker) -> None:
        self.balancer.fleet.undrain(worker.name, self._clock.now_s)
        self._dispatch()

    def on_worker_removed(self, worker: SimWorker, requests: list[SimRequest]) -> None:
        for request in requests:
            request.n_failovers += 1
            asked = self._asked[request.id]
            avoid = tuple({*asked.avoid, worker.name})
            self._enqueue(request, msgspec.structs.replace(asked, avoid=avoid, wait_s=RESTART_WAIT_S + self._hold_s))
        self.balancer.fleet.remove(worker.name, self._clock.now_s)
        self._dispatch()

    def on_load_report(self, worker: SimWorker) -> None:
        if not self._upstream:
            self._later(self._apply_load_report, worker.name, worker.load())

    def on_kv_event(self, worker: SimWorker, stored: bool, segment: int, start: int, end: int) -> None:
        if not self._upstream and (keys := self._keys.of_run(segment, start, end)):
            self._later(self._apply_kv_event, worker.name, stored, keys)

    def _probe(self, worker: SimWorker) -> None:
        if worker.name not in self._down and not worker.is_hung:
            self._later(self._apply_load_report, worker.name, worker.load())
        self._clock.at(self._clock.now_s + PROBE_S, self._probe, worker)

    def _later(self, apply: Callable[..., None], *args: object) -> None:
        if self._report_delay_s:
            self._clock.at(self._clock.now_s + self._report_delay_s, apply, *args)
        else:
            apply(*args)

    def _apply_load_report(self, name: str, load: EngineLoad) -> None:
        self.balancer.fleet.report(name, load, self._clock.now_s)
        self._dispatch()

    def _apply_kv_event(self, name: str, stored: bool, keys: bytes) -> None:
        apply = self.balancer.fleet.stored if stored else self.balancer.fleet.removed
        apply(name, keys, self._clock.now_s)
