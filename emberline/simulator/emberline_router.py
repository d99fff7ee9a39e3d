"""The balancer itself, in front of modelled workers: the very classes that serve, with virtual time as their clock."""

from collections.abc import Sequence

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import Cost, Settings
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.route_request import RouteRequest
from emberline.protocol.errors import Overloaded
from emberline.protocol.frames import EngineLoad
from emberline.simulator.coefficients import Coefficients
from emberline.simulator.job import Job, Keys
from emberline.simulator.router import Send
from emberline.simulator.virtual_clock import Clock
from emberline.simulator.worker import Worker

MODEL = "simulated"


def cost_of(model: Coefficients, bytes_per_s: float) -> Cost:
    return Cost(
        request_s=model.step_s,
        token_s=model.token_s,
        attention_s=model.pair_s,
        step_s=model.step_s,
        stream_s=model.row_s,
        context_s=model.context_s,
        transfer_s=model.kv_bytes / bytes_per_s,
    )


class Ours:
    """One core. `delay_s`: how late it hears of the workers' load and caches."""

    def __init__(
        self,
        workers: Sequence[Worker],
        send: Send,
        clock: Clock,
        settings: Settings,
        keys: Keys,
        named: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        self.balancer = Balancer(settings)
        self._send, self._clock, self._keys = send, clock, keys
        self._named, self._delay_s = named, delay_s
        self._jobs: dict[str, Job] = {}
        self._n_refused = 0
        self._wakes_s = float("inf")
        for worker in workers:
            endpoint = Endpoint(name=worker.name, address="unix:/simulated", role=worker.role, models=(MODEL,))
            capacity = Capacity(max_running=worker.model.max_running, kv_tokens=worker.model.kv_tokens)
            self.balancer.join(endpoint, capacity, clock.now_s)

    def arrived(self, job: Job) -> None:
        self._jobs[job.id] = job
        n_blocks = (job.n_prompt - 1) // job.block_tokens
        request = RouteRequest(
            id=job.id,
            account=f"tenant-{job.tenant}",
            model=MODEL,
            model_version="",
            input_tokens=job.n_prompt,
            created_us=int(self._clock.now_s * 1e6),
            affinity=f"session-{job.session}" if self._named else None,
            keys=self._keys.of_prompt(job.path, job.lengths, n_blocks),
        )
        try:
            self.balancer.enqueue(request, self._clock.now_s)
        except Overloaded as error:
            self._n_refused += 1
            self._clock.at(self._clock.now_s + max(1.0, error.retry_after_s or 0.0), self.arrived, job)
            return
        self._dispatch()

    def prefilled(self, job: Job) -> None:
        self.balancer.prefilled(job.id, self._clock.now_s)
        self._dispatch()

    def began(self, job: Job) -> None:
        self.balancer.first_token(job.id, self._clock.now_s, job.cached_tokens)
        self._dispatch()

    def ended(self, job: Job) -> None:
        self.balancer.ended(job.id, self._clock.now_s, "finished", job.n_output)
        self._dispatch()

    def reported(self, worker: Worker) -> None:
        if self._delay_s:
            self._clock.at(self._clock.now_s + self._delay_s, self._report, worker.name, worker.load())
        else:
            self._report(worker.name, worker.load())

    def cached(self, worker: Worker, stored: bool, segment: int, start: int, end: int) -> None:
        keys = self._keys.of_run(segment, start, end)
        if keys and self._delay_s:
            self._clock.at(self._clock.now_s + self._delay_s, self._learn, worker.name, stored, keys)
        elif keys:
            self._learn(worker.name, stored, keys)

    def refused(self) -> int:
        return self._n_refused

    def _report(self, name: str, load: EngineLoad) -> None:
        self.balancer.report(name, load, self._clock.now_s)
        self._dispatch()

    def _learn(self, name: str, stored: bool, keys: bytes) -> None:
        learn = self.balancer.stored if stored else self.balancer.removed
        learn(name, keys, self._clock.now_s)

    def _dispatch(self) -> None:
        now_s = self._clock.now_s
        for record in self.balancer.dispatch(now_s):
            assert record.route is not None, f"{record.request.id}: {record.error}"
            self._send(self._jobs.pop(record.request.id), record.route.decode, record.route.prefill)
        wake_s = self.balancer.wake_s(now_s)
        if wake_s is not None and wake_s < self._wakes_s:
            self._wakes_s = max(wake_s, now_s)
            self._clock.at(self._wakes_s, self._wake, self._wakes_s)

    def _wake(self, asked_s: float) -> None:
        if asked_s == self._wakes_s:
            self._wakes_s = float("inf")
            self._dispatch()
