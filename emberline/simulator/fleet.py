"""Modelled workers behind a router: jobs in, first tokens and ends out."""

from collections.abc import Callable, Sequence

from emberline.protocol.frames import WorkerRole
from emberline.simulator.coefficients import Chunking, Coefficients
from emberline.simulator.job import Job, Seq
from emberline.simulator.router import Router
from emberline.simulator.transfer import Links, Transfer, Wire
from emberline.simulator.virtual_clock import Clock
from emberline.simulator.worker import Worker

Ended = Callable[[Job], None]
Stepped = Callable[[Worker, float, int], None]


class Fleet:
    """Carries jobs from routers to workers and what happens there back. One router per core; jobs know their own."""

    def __init__(
        self,
        roles: Sequence[WorkerRole],
        model: Coefficients,
        chunking: Chunking,
        clock: Clock,
        block_tokens: int,
        wire: Wire,
        ended: Ended,
        stepped: Stepped,
    ) -> None:
        self.routers: list[Router] = []
        self.links = Links(clock, wire)
        self._clock, self._ended, self._stepped = clock, ended, stepped
        self._model = model
        self._transfers: dict[int, Transfer] = {}  # by job
        self.workers = [self._worker(n, role, chunking, block_tokens) for n, role in enumerate(roles)]
        self._by_name = {worker.name: worker for worker in self.workers}

    def _worker(self, number: int, role: WorkerRole, chunking: Chunking, block_tokens: int) -> Worker:
        def changed(stored: bool, segment: int, start: int, end: int) -> None:
            for router in self.routers:
                router.cached(self.workers[number], stored, segment, start, end)

        name = f"w{number:03}"
        return Worker(name, self._model, chunking, self._clock, self, block_tokens, role, changed)

    def send(self, job: Job, decode: str, prefill: str) -> None:
        """What a router calls."""
        job.decode, job.prefill = decode, prefill
        target = self._by_name[decode]
        if not prefill:
            target.submit(job, job.n_output)
            return
        self._transfers[job.number] = Transfer(self.links, target, job.n_prompt)
        target.submit(job, job.n_output, awaits=True)
        self._by_name[prefill].submit(job, 0)

    # --- what workers tell -------------------------------------------------------------------------------------------

    def chunk(self, worker: Worker, seq: Seq, n_tokens: int) -> None:
        transfer = self._transfers.get(seq.job.number)
        if transfer is None:
            return
        if seq.awaits:
            if not n_tokens:
                transfer.granted(seq)
        elif worker.name == seq.job.prefill:
            transfer.computed(worker.name, seq.done)

    def first(self, worker: Worker, seq: Seq) -> None:
        seq.job.first_s = self._clock.now_s
        self._transfers.pop(seq.job.number, None)
        self._router(seq.job).began(seq.job)

    def ended(self, worker: Worker, seq: Seq) -> None:
        if not seq.n_output:
            self._router(seq.job).prefilled(seq.job)
            return
        seq.job.ended_s = self._clock.now_s
        self._router(seq.job).ended(seq.job)
        self._ended(seq.job)

    def stepped(self, worker: Worker, seconds: float, n_tokens: int) -> None:
        self._stepped(worker, seconds, n_tokens)

    def changed(self, worker: Worker) -> None:
        for router in self.routers:
            router.reported(worker)

    def _router(self, job: Job) -> Router:
        return self.routers[job.session % len(self.routers)]
