"""Other people's routing, as published, with their published defaults; written from their documentation's facts.

Both are compared with the real programs by `benchmarks/balancer_peers.py`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from emberline.simulator.job import Job
from emberline.simulator.router import Send
from emberline.simulator.worker import Worker


class RouterState:
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


class Plain:
    """Sends at once, and keeps a ledger. What others build on."""

    def __init__(self, workers: Sequence[Worker], send: Send) -> None:
        self.names = [worker.name for worker in workers]
        self.ledger = RouterState(self.names)
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


class SGLang(Plain):
    """sgl-router's cache_aware: it remembers what it sent where; no word from the workers.

    When loads differ by more than 64 requests and 1.5 times, the least loaded; else the worker that was sent the
    longest matching prefix, if that is more than 0.3 of the prompt; else the one that has been sent least.
    """

    THRESHOLD = 0.3
    ABSOLUTE, RELATIVE = 64, 1.5
    MAX_TREE_CHARS = 1 << 26
    CHARS_PER_TOKEN = 4  # its tree is one of text
    EVICTION_S = 60.0

    def __init__(self, workers: Sequence[Worker], send: Send) -> None:
        super().__init__(workers, send)
        self._trees: dict[str, OrderedDict[int, int]] = {name: OrderedDict() for name in self.names}
        self._blocks = dict.fromkeys(self.names, 0)
        self._holders: dict[int, dict[str, None]] = {}  # segment -> who was sent it, in order
        self._swept_s = 0.0

    def choose(self, job: Job) -> tuple[str, int]:
        self.sweep(job)
        name = self.best(job)[0]
        self.insert(job, name)
        return name, job.n_prompt

    def best(self, job: Job) -> list[str]:
        """Those it might take: several where nothing it knows tells them apart."""
        loads = self.ledger.jobs
        most, least = max(loads.values()), min(loads.values())
        if most - least > self.ABSOLUTE and most > self.RELATIVE * least:
            return [name for name in self.names if loads[name] == least]
        matched, holders = 0, list[str]()
        for segment, length in zip(job.path, job.lengths):
            if not self._holders.get(segment):
                break
            matched += length
            holders = list(self._holders[segment])
        if holders and matched * job.block_tokens > self.THRESHOLD * job.n_prompt:
            return holders
        smallest = min(self._blocks.values())
        return [name for name in self.names if self._blocks[name] == smallest]

    def insert(self, job: Job, name: str) -> None:
        tree = self._trees[name]
        for segment, length in zip(reversed(job.path), reversed(job.lengths)):
            if segment not in tree:
                self._blocks[name] += length
                tree[segment] = length
            tree.move_to_end(segment)
            self._holders.setdefault(segment, {})[name] = None

    def sweep(self, job: Job) -> None:
        if job.asked_s - self._swept_s < self.EVICTION_S:
            return
        self._swept_s = job.asked_s
        most = self.MAX_TREE_CHARS // (self.CHARS_PER_TOKEN * job.block_tokens)
        for name, tree in self._trees.items():
            while self._blocks[name] > most:
                segment, length = tree.popitem(last=False)
                self._blocks[name] -= length
                self._holders[segment].pop(name)


class Dynamo(Plain):
    """Dynamo's KV router: the least of prompt blocks to compute there plus blocks of active sequences, with KV events.

    Overlap credit 1, temperature 0, no queue; what was sent counts at once, prompts until their first token; active
    blocks that sequences share count once.
    """

    def __init__(self, workers: Sequence[Worker], send: Send, seed: int = 0) -> None:
        super().__init__(workers, send)
        self._there: dict[str, dict[int, int]] = {name: {} for name in self.names}  # segment -> blocks, by worker
        self._active: dict[str, dict[int, int]] = {name: {} for name in self.names}  # segment -> sequences
        self._n_active = dict.fromkeys(self.names, 0)  # blocks
        self._random = Random(seed)

    def choose(self, job: Job) -> tuple[str, int]:
        best = self.best(job)
        name = best[0] if len(best) == 1 else self._random.choice(best)
        return name, job.n_prompt - self._matched(job, name)

    def best(self, job: Job) -> list[str]:
        costs = {name: self._cost(job, name) for name in self.names}
        least = min(costs.values())
        return [name for name in self.names if costs[name] == least]

    def arrived(self, job: Job) -> None:
        super().arrived(job)
        self.activate(job, job.decode)

    def activate(self, job: Job, name: str) -> None:
        active = self._active[name]
        for segment, length in zip(job.path, job.lengths):
            if segment not in active:
                self._n_active[name] += length
            active[segment] = active.get(segment, 0) + 1

    def ended(self, job: Job) -> None:
        super().ended(job)
        active = self._active[job.decode]
        for segment, length in zip(job.path, job.lengths):
            active[segment] -= 1
            if not active[segment]:
                del active[segment]
                self._n_active[job.decode] -= length

    def cached(self, worker: Worker, stored: bool, segment: int, start: int, end: int) -> None:
        self.learn(worker.name, stored, segment, start, end)

    def learn(self, name: str, stored: bool, segment: int, start: int, end: int) -> None:
        there = self._there[name]
        if stored or start:
            there[segment] = end if stored else start
        else:
            there.pop(segment, None)

    def _cost(self, job: Job, name: str) -> float:
        """In blocks of the trace."""
        active = self._active[name]
        new = sum(length for segment, length in zip(job.path, job.lengths) if segment not in active)
        prefill = self.ledger.prefill_tokens[name] + job.n_prompt - self._matched(job, name)
        return prefill / job.block_tokens + self._n_active[name] + new

    def _matched(self, job: Job, name: str) -> int:
        there, n = self._there[name], 0
        for segment, length in zip(job.path, job.lengths):
            blocks = there.get(segment, 0)
            n += blocks
            if blocks < length:
                break
        return min(n * job.block_tokens, job.n_prompt - 1)
