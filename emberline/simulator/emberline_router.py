"""The production balancer in front of simulated workers, with virtual time as its clock."""

from collections.abc import Sequence

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import Cost, Settings
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.route_request import RouteRequest
from emberline.protocol.errors import Overloaded
from emberline.protocol.frames import EngineLoad
from emberline.simulator.baselines import Send
from emberline.simulator.coefficients import Coefficients
from emberline.simulator.request import BlockKeys, SimRequest
from emberline.simulator.virtual_clock import VirtualClock
from emberline.simulator.worker import SimWorker

MODEL = "simulated"


def cost_model_of(model: Coefficients, bytes_per_s: float) -> Cost:
    return Cost(
        request_s=model.step_s,
        token_s=model.token_s,
        attention_s=model.pair_s,
        step_s=model.step_s,
        stream_s=model.row_s,
        context_s=model.context_s,
        transfer_s=model.kv_bytes / bytes_per_s,
    )


class EmberlineRouter:
    """One balancer. `report_delay_s`: latency of the workers' load reports and KV events."""

    def __init__(
        self,
        workers: Sequence[SimWorker],
        send: Send,
        clock: VirtualClock,
        settings: Settings,
        keys: BlockKeys,
        session_affinity: bool = False,
        report_delay_s: float = 0.0,
    ) -> None:
        self.balancer = Balancer(settings)
        self._send, self._clock, self._keys = send, clock, keys
        self._session_affinity, self._report_delay_s = session_affinity, report_delay_s
        self._requests: dict[str, SimRequest] = {}
        self._n_rejected = 0
        self._wakeup_s = float("inf")
        for worker in workers:
            endpoint = Endpoint(name=worker.name, address="unix:/simulated", role=worker.role, models=(MODEL,))
            capacity = Capacity(max_running=worker.model.max_running, kv_tokens=worker.model.kv_tokens)
            self.balancer.join(endpoint, capacity, clock.now_s)

    def on_request(self, request: SimRequest) -> None:
        self._requests[request.id] = request
        n_blocks = (request.n_prompt - 1) // request.block_tokens
        route_request = RouteRequest(
            id=request.id,
            account=f"tenant-{request.tenant}",
            model=MODEL,
            model_version="",
            input_tokens=request.n_prompt,
            created_us=int(self._clock.now_s * 1e6),
            affinity=f"session-{request.session}" if self._session_affinity else None,
            keys=self._keys.of_prompt(request.path, request.lengths, n_blocks),
        )
        try:
            self.balancer.enqueue(route_request, self._clock.now_s)
        except Overloaded as error:
            self._n_rejected += 1
            self._clock.at(self._clock.now_s + max(1.0, error.retry_after_s or 0.0), self.on_request, request)
            return
        self._dispatch()

    def on_prefill_done(self, request: SimRequest) -> None:
        """Production learns of it only by the first token."""

    def on_first_token(self, request: SimRequest) -> None:
        self.balancer.first_token(request.id, self._clock.now_s, request.cached_tokens)
        self._dispatch()

    def on_finish(self, request: SimRequest) -> None:
        self.balancer.ended(request.id, self._clock.now_s, "finished", request.n_output)
        self._dispatch()

    def on_load_report(self, worker: SimWorker) -> None:
        if self._report_delay_s:
            self._clock.at(
                self._clock.now_s + self._report_delay_s, self._apply_load_report, worker.name, worker.load()
            )
        else:
            self._apply_load_report(worker.name, worker.load())

    def on_kv_event(self, worker: SimWorker, stored: bool, segment: int, start: int, end: int) -> None:
        keys = self._keys.of_run(segment, start, end)
        if keys and self._report_delay_s:
            self._clock.at(self._clock.now_s + self._report_delay_s, self._apply_kv_event, worker.name, stored, keys)
        elif keys:
            self._apply_kv_event(worker.name, stored, keys)

    def n_rejected(self) -> int:
        return self._n_rejected

    def _apply_load_report(self, name: str, load: EngineLoad) -> None:
        self.balancer.report(name, load, self._clock.now_s)
        self._dispatch()

    def _apply_kv_event(self, name: str, stored: bool, keys: bytes) -> None:
        apply = self.balancer.stored if stored else self.balancer.removed
        apply(name, keys, self._clock.now_s)

    def _dispatch(self) -> None:
        now_s = self._clock.now_s
        for record in self.balancer.dispatch(now_s):
            assert record.route is not None, f"{record.request.id}: {record.error}"
            self._send(self._requests.pop(record.request.id), record.route.decode, record.route.prefill)
        wake_s = self.balancer.wake_s(now_s)
        if wake_s is not None and wake_s < self._wakeup_s:
            self._wakeup_s = max(wake_s, now_s)
            self._clock.at(self._wakeup_s, self._wake, self._wakeup_s)

    def _wake(self, asked_s: float) -> None:
        if asked_s == self._wakeup_s:
            self._wakeup_s = float("inf")
            self._dispatch()
