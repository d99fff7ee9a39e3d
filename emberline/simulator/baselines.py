"""The router interface of the simulation, and other projects' routing policies to compare with.

The policies follow the published documentation with the published defaults; `benchmarks/balancer_peers.py` compares
the SGLang and Dynamo ones with the real programs.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from emberline.simulator.request import SimRequest
from emberline.simulator.worker import SimWorker

# request, decode worker, prefill worker ("": the same)
Send = Callable[[SimRequest, str, str], None]


class SimRouter(Protocol):
    """Receives every event that a router in front of real engines would see, when it would see it."""

    def on_history(self, request: SimRequest, worker: SimWorker) -> None:
        """The worker answered it before the simulation began. KV events say what of it is still there."""

    def on_request(self, request: SimRequest) -> None:
        """Send it now or later."""

    def on_prefill_done(self, request: SimRequest) -> None: ...
    def on_first_token(self, request: SimRequest) -> None: ...
    def on_finish(self, request: SimRequest) -> None: ...
    def on_load_report(self, worker: SimWorker) -> None: ...
    def on_kv_event(self, worker: SimWorker, stored: bool, segment: int, start: int, end: int) -> None: ...
    def on_worker_lost(self, worker: SimWorker, requests: list[SimRequest]) -> None:
        """Handle a lost connection to the worker. The router sends these requests again."""

    def on_worker_joined(self, worker: SimWorker) -> None: ...
    def on_worker_drained(self, worker: SimWorker) -> None: ...
    def on_worker_undrained(self, worker: SimWorker) -> None: ...
    def on_worker_removed(self, worker: SimWorker, requests: list[SimRequest]) -> None:
        """Handle a worker that has left for good; these requests continue elsewhere."""

    def n_waiting(self) -> tuple[int, int]:
        """Requests that no worker has yet, and the tokens of their prompts."""

    def n_rejected(self) -> int: ...


class InFlightLoad:
    """Per worker: requests in flight, uncached prompt tokens before their first token, tokens of active contexts."""

    def __init__(self, names: list[str]) -> None:
        self.requests = dict.fromkeys(names, 0)
        self.prefill_tokens = dict.fromkeys(names, 0)
        self.decode_tokens = dict.fromkeys(names, 0)
        self._charged: dict[int, tuple[str, int]] = {}  # request -> (worker, prefill tokens still charged)

    def sent(self, request: SimRequest, name: str, uncached: int) -> None:
        self.requests[name] += 1
        self.prefill_tokens[name] += uncached
        self.decode_tokens[name] += request.n_prompt
        self._charged[request.number] = (name, uncached)

    def first_token(self, request: SimRequest) -> None:
        name, uncached = self._charged[request.number]
        self.prefill_tokens[name] -= uncached
        self._charged[request.number] = (name, 0)

    def finished(self, request: SimRequest) -> None:
        self.first_token(request)
        name, _ = self._charged.pop(request.number)
        self.requests[name] -= 1
        self.decode_tokens[name] -= request.n_prompt


class BaselineRouter:
    """Sends each request at once to the worker that `choose` names."""

    def __init__(self, workers: Sequence[SimWorker], send: Send) -> None:
        self.names = [worker.name for worker in workers]
        self.load = InFlightLoad(self.names)
        self._send = send

    def choose(self, request: SimRequest) -> tuple[str, int]:
        """(worker, prompt tokens it is estimated to compute)"""
        raise NotImplementedError

    def on_history(self, request: SimRequest, worker: SimWorker) -> None:
        raise NotImplementedError("history is simulated for Emberline's own policies only")

    def on_request(self, request: SimRequest) -> None:
        name, uncached = self.choose(request)
        self.load.sent(request, name, uncached)
        self._send(request, name, "")

    def on_prefill_done(self, request: SimRequest) -> None: ...

    def on_first_token(self, request: SimRequest) -> None:
        self.load.first_token(request)

    def on_finish(self, request: SimRequest) -> None:
        self.load.finished(request)

    def on_load_report(self, worker: SimWorker) -> None: ...

    def on_kv_event(self, worker: SimWorker, stored: bool, segment: int, start: int, end: int) -> None: ...

    def on_worker_lost(self, worker: SimWorker, requests: list[SimRequest]) -> None:
        raise NotImplementedError("faults are simulated for Emberline's own policies only")

    def on_worker_joined(self, worker: SimWorker) -> None: ...

    def on_worker_drained(self, worker: SimWorker) -> None:
        raise NotImplementedError("fleets that change are simulated for Emberline's own policies only")

    def on_worker_undrained(self, worker: SimWorker) -> None: ...

    def on_worker_removed(self, worker: SimWorker, requests: list[SimRequest]) -> None: ...

    def n_waiting(self) -> tuple[int, int]:
        return 0, 0

    def n_rejected(self) -> int:
        return 0


class RoundRobinRouter(BaselineRouter):
    def choose(self, request: SimRequest) -> tuple[str, int]:
        return self.names[request.number % len(self.names)], request.n_prompt


class LeastLoadedRouter(BaselineRouter):
    """The fewest requests in flight; among equals the fewest tokens."""

    def choose(self, request: SimRequest) -> tuple[str, int]:
        load = self.load
        return min(self.names, key=lambda name: (load.requests[name], load.decode_tokens[name])), request.n_prompt


@dataclass(frozen=True, slots=True)
class SGLangKnobs:
    """The published defaults."""

    cache_threshold: float = 0.3
    balance_absolute: int = 64
    balance_relative: float = 1.5


@dataclass(frozen=True, slots=True)
class DynamoKnobs:
    overlap_weight: float = 1.0  # of the prompt blocks to compute


SGLANG_DEFAULTS, DYNAMO_DEFAULTS = SGLangKnobs(), DynamoKnobs()


class SGLangRouter(BaselineRouter):
    """sgl-router's cache_aware policy: a radix tree of what was sent where, without reports from the workers.

    When loads differ by more than `balance_absolute` requests and `balance_relative` times, the least loaded worker;
    else the one with the longest matching prefix, if that is more than `cache_threshold` of the prompt; else the one
    with the smallest tree.
    """

    MAX_TREE_CHARS = 1 << 26
    CHARS_PER_TOKEN = 4  # its tree holds text
    EVICTION_INTERVAL_S = 60.0

    def __init__(self, workers: Sequence[SimWorker], send: Send, knobs: SGLangKnobs = SGLANG_DEFAULTS) -> None:
        super().__init__(workers, send)
        self._knobs = knobs
        self._trees: dict[str, OrderedDict[int, int]] = {name: OrderedDict() for name in self.names}
        self._tree_blocks = dict.fromkeys(self.names, 0)
        self._holders: dict[int, dict[str, None]] = {}  # segment -> workers that were sent it, in order
        self._evicted_s = 0.0

    def choose(self, request: SimRequest) -> tuple[str, int]:
        self._evict(request)
        name = self.candidates(request)[0]
        self.insert(request, name)
        return name, request.n_prompt

    def candidates(self, request: SimRequest) -> list[str]:
        """The workers it may choose: several if it has no reason to prefer one."""
        loads = self.load.requests
        most, least = max(loads.values()), min(loads.values())
        if most - least > self._knobs.balance_absolute and most > self._knobs.balance_relative * least:
            return [name for name in self.names if loads[name] == least]
        matched, holders = 0, list[str]()
        for segment, length in zip(request.path, request.lengths):
            if not self._holders.get(segment):
                break
            matched += length
            holders = list(self._holders[segment])
        if holders and matched * request.block_tokens > self._knobs.cache_threshold * request.n_prompt:
            return holders
        smallest = min(self._tree_blocks.values())
        return [name for name in self.names if self._tree_blocks[name] == smallest]

    def insert(self, request: SimRequest, name: str) -> None:
        tree = self._trees[name]
        for segment, length in zip(reversed(request.path), reversed(request.lengths)):
            if segment not in tree:
                self._tree_blocks[name] += length
                tree[segment] = length
            tree.move_to_end(segment)
            self._holders.setdefault(segment, {})[name] = None

    def _evict(self, request: SimRequest) -> None:
        if request.arrival_s - self._evicted_s < self.EVICTION_INTERVAL_S:
            return
        self._evicted_s = request.arrival_s
        max_blocks = self.MAX_TREE_CHARS // (self.CHARS_PER_TOKEN * request.block_tokens)
        for name, tree in self._trees.items():
            while self._tree_blocks[name] > max_blocks:
                segment, length = tree.popitem(last=False)
                self._tree_blocks[name] -= length
                self._holders[segment].pop(name)


class DynamoRouter(BaselineRouter):
    """Dynamo's KV router: the lowest sum of prompt blocks to compute and blocks of active sequences, from KV events.

    Temperature 0, no queue; a request counts as soon as it is sent, its prompt until its first token;
    blocks that active sequences share count once.
    """

    def __init__(
        self, workers: Sequence[SimWorker], send: Send, seed: int = 0, knobs: DynamoKnobs = DYNAMO_DEFAULTS
    ) -> None:
        super().__init__(workers, send)
        self._knobs = knobs
        self._cached: dict[str, dict[int, int]] = {name: {} for name in self.names}  # segment -> blocks, by worker
        self._active: dict[str, dict[int, int]] = {name: {} for name in self.names}  # segment -> sequences
        self._active_blocks = dict.fromkeys(self.names, 0)
        self._random = Random(seed)

    def choose(self, request: SimRequest) -> tuple[str, int]:
        candidates = self.candidates(request)
        name = candidates[0] if len(candidates) == 1 else self._random.choice(candidates)
        return name, request.n_prompt - self._cached_tokens(request, name)

    def candidates(self, request: SimRequest) -> list[str]:
        """The workers of lowest cost."""
        costs = {name: self._cost(request, name) for name in self.names}
        lowest = min(costs.values())
        return [name for name in self.names if costs[name] == lowest]

    def on_request(self, request: SimRequest) -> None:
        super().on_request(request)
        self.activate(request, request.decode_worker)

    def activate(self, request: SimRequest, name: str) -> None:
        active = self._active[name]
        for segment, length in zip(request.path, request.lengths):
            if segment not in active:
                self._active_blocks[name] += length
            active[segment] = active.get(segment, 0) + 1

    def on_finish(self, request: SimRequest) -> None:
        super().on_finish(request)
        active = self._active[request.decode_worker]
        for segment, length in zip(request.path, request.lengths):
            active[segment] -= 1
            if not active[segment]:
                del active[segment]
                self._active_blocks[request.decode_worker] -= length

    def on_kv_event(self, worker: SimWorker, stored: bool, segment: int, start: int, end: int) -> None:
        self.apply_kv_event(worker.name, stored, segment, start, end)

    def apply_kv_event(self, name: str, stored: bool, segment: int, start: int, end: int) -> None:
        cached = self._cached[name]
        if stored or start:
            cached[segment] = end if stored else start
        else:
            cached.pop(segment, None)

    def _cost(self, request: SimRequest, name: str) -> float:
        """The cost of the worker, in blocks of the trace."""
        active = self._active[name]
        new = sum(length for segment, length in zip(request.path, request.lengths) if segment not in active)
        prefill = self.load.prefill_tokens[name] + request.n_prompt - self._cached_tokens(request, name)
        return self._knobs.overlap_weight * prefill / request.block_tokens + self._active_blocks[name] + new

    def _cached_tokens(self, request: SimRequest, name: str) -> int:
        cached, n = self._cached[name], 0
        for segment, length in zip(request.path, request.lengths):
            blocks = cached.get(segment, 0)
            n += blocks
            if blocks < length:
                break
        return min(n * request.block_tokens, request.n_prompt - 1)
