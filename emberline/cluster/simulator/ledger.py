"""What a router knows of its own: what it has sent where, and what has become of it."""

from emberline.cluster.simulator.job import Job


class Ledger:
    """Per worker: jobs in flight, prompt tokens sent and not yet answered by a first token, and contexts of streams."""

    def __init__(self, names: list[str]) -> None:
        self.jobs = dict.fromkeys(names, 0)
        self.prefill_tokens = dict.fromkeys(names, 0)
        self.decode_tokens = dict.fromkeys(names, 0)
        self._charged: dict[int, tuple[str, int]] = {}  # job -> (worker, prefill tokens still charged)

    def sent(self, job: Job, name: str, uncached: int) -> None:
        self.jobs[name] += 1
        self.prefill_tokens[name] += uncached
        self.decode_tokens[name] += job.n_prompt
        self._charged[job.number] = (name, uncached)

    def began(self, job: Job) -> None:
        name, uncached = self._charged[job.number]
        self.prefill_tokens[name] -= uncached
        self._charged[job.number] = (name, 0)

    def ended(self, job: Job) -> None:
        self.began(job)
        name, _ = self._charged.pop(job.number)
        self.jobs[name] -= 1
        self.decode_tokens[name] -= job.n_prompt
