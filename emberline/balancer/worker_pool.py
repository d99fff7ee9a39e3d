"""The workers of one model: which are candidates, and which pair of decode and prefill worker takes a request."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from emberline.balancer.cost_model import Settings
from emberline.balancer.routing_policy import (
    RoutingInput,
    local_prefill_s,
    make_decode_policy,
    make_policy,
    transfer_s,
)
from emberline.balancer.worker import Worker

MAX_EJECTED = 0.5  # of a model's workers: if more of them fail, it is not they who are outliers
OUTPUT_TOKENS = 200  # expected of a reply before any has ended
N_REPLIES = 256  # that predictions rest on
QUANTILE = 0.75  # of reply lengths, that KV is kept free for: above the mean, since a few replies are very long
_SMOOTHING = 0.05


class ReplyLengths:
    """Lengths, in tokens, of a model's recent replies."""

    def __init__(self) -> None:
        self.mean = float(OUTPUT_TOKENS)  # smoothed
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    def add(self, n_tokens: int) -> None:
        self.mean += _SMOOTHING * (n_tokens - self.mean)
        self._recent.append(n_tokens)
        insort(self._ordered, n_tokens)
        if len(self._recent) > N_REPLIES:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]

    def expected(self, max_tokens: int) -> float:
        return min(self.mean, max_tokens or self.mean)

    def predicted(self, max_tokens: int) -> int:
        """Predict the length of a reply: a high quantile of recent replies, at most its `max_tokens` (0 means
        unknown)."""
        known = self._ordered
        most = known[int(QUANTILE * len(known))] if known else OUTPUT_TOKENS
        return min(most, max_tokens or most)


class WorkerPair(NamedTuple):
    decode: Worker
    prefill: Worker  # the same where the decode worker computes the prompt
    blocker: Worker | None  # the one of them that has no room yet


Candidates = tuple[list[Worker], list[Worker]]  # for decode, and for prefill only


class WorkerPool:
    def __init__(self, settings: Settings) -> None:
        self.workers: list[Worker] = []
        self.replies = ReplyLengths()
        self.n_routed = 0  # requests, in total; one that moves counts again
        self.routed_tokens = 0  # of their prompts, those that were to be computed
        self.routed_s = -math.inf  # when the last one was
        self._settings = settings
        self._policy = make_policy(settings)  # where the decode worker computes the prompt
        self._prefill_policy = make_policy(settings)
        self._decode_policy = make_decode_policy(settings)
        self._ready: list[Worker] = []
        self._ready_by_stage: tuple[list[Worker], list[Worker]] = ([], [])
        self._has_dedicated = False  # some workers are reserved for accounts
        self._has_regions = False  # some workers are in another region than this core

    def routed(self, uncached_tokens: int, now_s: float) -> None:
        self.n_routed += 1
        self.routed_tokens += uncached_tokens
        self.routed_s = now_s

    def refresh(self) -> None:
        """The health of a worker has changed. Those whose circuit breaker is open are ejected, the first ones first."""
        available = [worker for worker in self.workers if worker.available]
        failing = sorted((w for w in available if not w.breaker.allows), key=lambda w: w.breaker.opened_s)
        for worker in self.workers:
            worker.ejected = False
        for worker in failing[: int(MAX_EJECTED * len(available))]:
            worker.ejected = True
        self._ready = [worker for worker in available if worker.ready]
        self._ready_by_stage = _by_stage(self._ready)
        self._has_dedicated = any(worker.endpoint.account for worker in self.workers)
        self._has_regions = any(self._region(worker) for worker in self.workers)

    def candidates(self, avoid: Sequence[str], account: str = "") -> Candidates:
        """The workers that the account's requests may go to. Workers that are to be avoided, are stalled or
        ejected come in only when there is no other. An account with workers of its own uses no others while one of
        them is connected; nobody else uses those."""
        if self._has_dedicated:
            connected = [worker for worker in self.workers if worker.connected and not worker.draining]
            own = [worker for worker in connected if worker.endpoint.account == account] if account else []
            allowed = own if _by_stage(own)[0] else [worker for worker in connected if not worker.endpoint.account]
            return self._healthy([worker for worker in allowed if worker.ready], allowed, avoid)
        decoders, prefillers = self._ready_by_stage
        if decoders and not avoid:
            return decoders, prefillers
        connected = [worker for worker in self.workers if worker.connected and not worker.draining]
        return self._healthy(self._ready, connected, avoid)

    def _healthy(self, ready: list[Worker], connected: list[Worker], avoid: Sequence[str]) -> Candidates:
        for workers in (ready, connected):
            decoders, prefillers = _by_stage([worker for worker in workers if worker.name not in avoid])
            if decoders:
                return decoders, prefillers
        return _by_stage(connected)

    def decide(self, decoders: list[Worker], prefillers: list[Worker], need: RoutingInput, now_s: float) -> WorkerPair:
        """Another region than the core's takes a request only when this one has no room for it, or when the
        conversation's cache is there and it pays. KV is not sent from region to region."""
        if not self._has_regions:
            return self._decide(decoders, prefillers, need, now_s)
        groups: dict[str, tuple[list[Worker], list[Worker]]] = {}
        for stage, workers in enumerate((decoders, prefillers)):
            for worker in workers:
                groups.setdefault(self._region(worker), ([], []))[stage].append(worker)
        pairs = {
            region: self._decide(*_by_stage([*own, *own_prefillers]), need, now_s)
            for region, (own, own_prefillers) in groups.items()
            if _by_stage([*own, *own_prefillers])[0]
        }
        if not pairs:  # decode workers that need the prefill workers of another region
            return self._decide(decoders, prefillers, need, now_s)
        home = pairs.get("")
        if home is not None and home.blocker is None:
            pairs = {region: pair for region, pair in pairs.items() if pair is home or need.warm([*groups[region][0]])}
        free = [pair for pair in pairs.values() if pair.blocker is None]
        if home is not None and not free:
            return home
        return min(free or pairs.values(), key=lambda pair: (self._region_cost(pair, need, now_s), pair is not home))

    def _region(self, worker: Worker) -> str:
        """Empty: the core's own, or unknown."""
        region, own = worker.endpoint.region, self._settings.region
        return region if own and region != own else ""

    def _region_cost(self, pair: WorkerPair, need: RoutingInput, now_s: float) -> float:
        first_s = need.wait_s(pair.prefill, now_s) + need.prefill_s(pair.prefill)
        return first_s + pair.decode.capacity.round_trip_s

    def _decide(self, decoders: list[Worker], prefillers: list[Worker], need: RoutingInput, now_s: float) -> WorkerPair:
        if not prefillers:
            decode = decoders[0] if len(decoders) == 1 else self._policy.choose(decoders, need, now_s)
            return WorkerPair(decode, decode, None if self._has_room(decode, need, now_s, prefills=True) else decode)
        prefill = self._choose_prefill(prefillers, need, now_s)
        decode = self._decode_policy.choose(decoders, need, now_s)
        if self._prefills_locally(decode, need, now_s):
            prefill = decode
        if not self._has_room(decode, need, now_s, prefills=prefill is decode):
            return WorkerPair(decode, prefill, decode)
        if prefill is not decode and self._backed_up(prefill, now_s):
            return WorkerPair(decode, prefill, prefill)
        return WorkerPair(decode, prefill, None)

    def pair_with(self, decode: Worker, need: RoutingInput, now_s: float) -> WorkerPair | None:
        """The pair of a given decode worker. None: it needs a prefill worker, and none is connected."""
        prefillers = self.candidates((), decode.endpoint.account)[1]
        if self._has_regions:
            region = self._region(decode)
            prefillers = [prefill for prefill in prefillers if self._region(prefill) == region]
        if not prefillers:
            return WorkerPair(decode, decode, None) if decode.endpoint.alone else None
        prefill = self._choose_prefill(prefillers, need, now_s)
        return WorkerPair(decode, decode if self._prefills_locally(decode, need, now_s) else prefill, None)

    def _choose_prefill(self, prefillers: list[Worker], need: RoutingInput, now_s: float) -> Worker:
        prefill = self._prefill_policy.choose(prefillers, need, now_s)
        need.prefill_ready_s = need.wait_s(prefill, now_s) + need.prefill_s(prefill)
        need.prefill_scale = prefill.prefill_speed.scale
        return prefill

    def measured(self, worker: Worker) -> None:
        """Workers that have computed no prompt yet are taken to be as fast as this one: they must get one, too."""
        for other in self.workers:
            if not other.prefill_speed.n:
                other.prefill_speed.fade(worker.prefill_speed.scale)

    def fade_speeds(self, now_s: float) -> None:
        prefill = [worker.prefill_speed.scale for worker in self.workers if worker.prefill_speed.n]
        decode = [worker.decode_speed.scale for worker in self.workers if worker.decode_speed.n]
        for worker in self.workers if prefill else ():
            worker.fade_speed(median_low(prefill), median_low(decode) if decode else 1.0, now_s)

    def _prefills_locally(self, decode: Worker, need: RoutingInput, now_s: float) -> bool:
        """True if the decode worker should compute the prompt itself: when little of the prompt is uncached, or when
        that takes less time than prefill elsewhere plus the transfer, including the delay of its running sequences. It
        often does: a conversation's cache is on the worker that decodes it, and prefill workers may have evicted it."""
        if not decode.endpoint.alone:
            return False
        if need.tokens - need.available(decode)[0] <= self._settings.local_tokens:
            return True
        return local_prefill_s(decode, need, now_s) < need.prefill_ready_s + transfer_s(decode, need)

    def _has_room(self, worker: Worker, need: RoutingInput, now_s: float, prefills: bool) -> bool:
        if worker.capacity.shared:  # how long a provider's prompts take is not known
            return need.request is None or worker.has_slot(need.request)
        if not self._policy.backpressure:
            return worker.fits(need.n, need.kv_tokens, now_s, need.passes_flex, spare=self._settings.max_waiting)
        return worker.fits(need.n, need.kv_tokens, now_s, need.passes_flex) and not (
            prefills and self._backed_up(worker, now_s)
        )

    def _backed_up(self, worker: Worker, now_s: float) -> bool:
        return self._prefill_policy.backpressure and worker.wait_s(now_s) > self._settings.ahead_s


def _by_stage(workers: list[Worker]) -> Candidates:
    """Workers that can decode, given the others, and those that only prefill."""
    prefillers = [worker for worker in workers if worker.endpoint.role == "prefill"]
    decoders = [worker for worker in workers if worker.endpoint.role != "prefill"]
    return decoders if prefillers else [worker for worker in decoders if worker.endpoint.alone], prefillers
