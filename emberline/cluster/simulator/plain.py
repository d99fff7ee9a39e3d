"""Routers that know nothing of caches: the floor that every other must beat."""

from collections.abc import Sequence

from emberline.cluster.simulator.job import Job
from emberline.cluster.simulator.ledger import Ledger
from emberline.cluster.simulator.router import Send
from emberline.cluster.simulator.worker import Worker


class Plain:
    """Sends at once, and keeps a ledger. What others build on."""

    def __init__(self, workers: Sequence[Worker], send: Send) -> None:
        self.names = [worker.name for worker in workers]
        self.ledger = Ledger(self.names)
        self._send = send

    def choose(self, job: Job) -> tuple[str, int]:
        """(worker, prompt tokens it is believed to have to compute)"""
        raise NotImplementedError

    def arrived(self, job: Job) -> None:
        name, uncached = self.choose(job)
        self.ledger.sent(job, name, uncached)
        self._send(job, name, "")

    def prefilled(self, job: Job) -> None: ...

    def began(self, job: Job) -> None:
        self.ledger.began(job)

    def ended(self, job: Job) -> None:
        self.ledger.ended(job)

    def reported(self, worker: Worker) -> None: ...

    def cached(self, worker: Worker, stored: bool, segment: int, start: int, end: int) -> None: ...

    def refused(self) -> int:
        return 0


class RoundRobin(Plain):
    def choose(self, job: Job) -> tuple[str, int]:
        return self.names[job.number % len(self.names)], job.n_prompt


class LeastLoaded(Plain):
    """The fewest jobs in flight; among equals the fewest tokens."""

    def choose(self, job: Job) -> tuple[str, int]:
        ledger = self.ledger
        return min(self.names, key=lambda name: (ledger.jobs[name], ledger.decode_tokens[name])), job.n_prompt
