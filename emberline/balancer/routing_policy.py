"""Routing policies: which of several workers takes a request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from emberline.balancer.cost_model import PolicyName, Settings
from emberline.balancer.prefix_index import Match
from emberline.balancer.worker import Worker
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.route_request import RouteRequest

NEAR_S, NEAR = 0.01, 0.1  # costs that differ by less, in seconds or relative to the best, count as equal
# Leaving a cache costs later turns too: a multiple of the seconds computed again, up to a limit.
CACHE_LOSS, MAX_CACHE_LOSS_S = 4.0, 1.0
MIXED_STEP_S = 0.0145  # a step that mixes prefill and decode lasts so long, or twice as long as its decodes alone


@dataclass(slots=True, eq=False)
class RoutingInput:
    """One request, as policies see it. What only a policy asks for is left out where there is one candidate."""

    tokens: int
    n: int = 1
    match: Match = field(default_factory=list)  # leading blocks believed to be cached, and where
    shared: int = 0  # of them, those that most workers hold; for policies
    session64: int = 0  # identifies the conversation; for policies
    output_tokens: float = 0.0  # expected of each sequence; for policies
    reply_tokens: int = 0  # that KV is kept free for, of all sequences
    block_tokens: int = BLOCK_TOKENS
    passes_flex: bool = True  # engines preempt running flex requests for it
    is_job: bool = False  # it waits for the prompts of other jobs too
    prefill_ready_s: float = 0.0  # until the chosen prefill worker has computed the prompt, where there is one
    prefill_scale: float = 0.0  # that worker's speed
    fetch_token_s: float = 0.0  # the least that any tier takes for a token; 0: no worker has tiers
    request: RouteRequest | None = None

    @property
    def kv_tokens(self) -> int:
        return self.tokens + self.reply_tokens

    def depth(self, slot_bits: int) -> int:
        for depth, mask in self.match:
            if mask & slot_bits:
                return depth
        return 0

    def cached(self, worker: Worker) -> int:
        """Prompt tokens cached on the worker; the last one of a prompt is always computed."""
        return min(self.depth(worker.slot_bits) * self.block_tokens, self.tokens - 1)

    def available(self, worker: Worker) -> tuple[int, float]:
        """Return the prompt tokens that the worker need not compute: cached there, or fetched from the tier that saves
        most. And the seconds of the fetch."""
        if not self.match:
            return 0, 0.0
        cached = self.cached(worker)
        if not worker.fetch_costs:
            return cached, 0.0
        best, best_s, most_s = cached, 0.0, 0.0
        scale, cost = worker.prefill_speed.scale, worker.cost
        for slot_bits, token_s in worker.fetch_costs:
            held = min(self.depth(slot_bits) * self.block_tokens, self.tokens - 1)
            if held <= cached:
                continue
            fetch_s = (held - cached) * token_s
            computed = self.tokens - cached, self.tokens - held
            saved_s = scale * (cost.work_s(computed[0], self.tokens) - cost.work_s(computed[1], self.tokens)) - fetch_s
            if saved_s > most_s:
                best, best_s, most_s = held, fetch_s, saved_s
        return best, best_s

    def warm(self, candidates: Sequence[Worker]) -> list[Worker]:
        """The workers that hold more of the prompt than most do."""
        bits = 0
        for depth, mask in self.match:
            if depth <= self.shared:
                break
            bits |= mask
        return [worker for worker in candidates if worker.slot_bits & bits] if bits else []

    def wait_s(self, worker: Worker, now_s: float) -> float:
        """Return the seconds until the worker would begin this prompt."""
        jobs_s = worker.in_flight.job_work_us * 1e-6 * worker.prefill_speed.scale if self.is_job else 0.0
        return worker.wait_s(now_s) + jobs_s

    def prefill_s(self, worker: Worker) -> float:
        available, fetch_s = self.available(worker)
        return fetch_s + worker.prefill_speed.scale * worker.cost.prefill_s(self.tokens - available, self.tokens)


class Policy(Protocol):
    backpressure: bool  # requests wait in the admission queue while the chosen worker has enough to do

    def choose(self, candidates: Sequence[Worker], need: RoutingInput, now_s: float) -> Worker:
        """One of the candidates, of which there is at least one. Without side effects: the choice may be dropped."""


class LowestCost:
    """The lowest cost in seconds: waiting, fetching what tiers hold, computing the rest, and what that costs others.

    Prefill takes longer on a worker that decodes. And it delays that worker's conversations and evicts their cache: so
    it counts once more, times `others`, times the pressure on the cache. In a busy fleet this is *sticky until
    saturated*: a conversation leaves its cache only when the wait there is several times the seconds of computing it
    again elsewhere, or where few conversations live. What is computed again although another worker holds it counts
    more still, up to a limit: that keeps short conversations together; long ones stay by their own seconds. With
    `others` at 0 the choice is best for the request alone.
    """

    backpressure = True

    def __init__(self, others: float) -> None:
        self._others = others

    def choose(self, candidates: Sequence[Worker], need: RoutingInput, now_s: float) -> Worker:
        warm = need.warm(candidates)
        if warm:
            costs = self._costs(warm, need, now_s)
            if near(min(costs)) < self._lower_bound_s(candidates, need):
                return least_used(warm, costs, need, now_s)
        return least_used(candidates, self._costs(candidates, need, now_s), need, now_s)

    def _costs(self, candidates: Sequence[Worker], need: RoutingInput, now_s: float) -> list[float]:
        others = self._others
        caches: Sequence[int]
        fetches: Sequence[float] = ()
        if need.match and need.fetch_token_s:
            caches, fetches = zip(*map(need.available, candidates))
        else:
            caches = [need.cached(worker) for worker in candidates] if need.match else [0] * len(candidates)
        most = max(caches)
        cost = candidates[0].cost  # one cost model for all: workers differ by their speed
        seconds = {cached: cost.prefill_s(need.tokens - cached, need.tokens) for cached in set(caches)}
        costs = []
        for worker, cached in zip(candidates, caches):
            prompt_s = worker.prefill_speed.scale * seconds[cached]
            cost_s = need.wait_s(worker, now_s) + worker.slot_wait_s(need.n, need.kv_tokens, now_s, need.passes_flex)
            cost_s += worker.capacity.round_trip_s
            cost_s += prompt_s * (1 + interference(worker, now_s) + others * worker.cache_pressure(now_s))
            if others and cached < most:
                lost_s = prompt_s - worker.prefill_speed.scale * seconds[most]
                cost_s += min(CACHE_LOSS * lost_s, MAX_CACHE_LOSS_S)
            costs.append(cost_s)
        return [cost_s + fetch_s for cost_s, fetch_s in zip(costs, fetches)] if fetches else costs

    def _lower_bound_s(self, candidates: Sequence[Worker], need: RoutingInput) -> float:
        """A lower bound of the cost of any worker that is not warm: it mostly saves computing their costs."""
        fastest = min(candidates, key=lambda worker: worker.prefill_speed.scale)
        scale, cost, most = fastest.prefill_speed.scale, fastest.cost, need.tokens - 1
        shared = min(need.shared * need.block_tokens, most)
        computed_s = scale * cost.prefill_s(need.tokens - shared, need.tokens)
        if not need.fetch_token_s:
            return computed_s
        held = min(need.match[0][0] * need.block_tokens, most)  # the most that any tier can have
        fetched_s = (held - shared) * need.fetch_token_s + scale * cost.prefill_s(need.tokens - held, need.tokens)
        return min(computed_s, fetched_s)


class LeastInterference:
    """Policy for decode workers: prefer the worker whose running sequences slow the new one least and whose KV of the
    prompt is ready soonest, computed there or received from the prefill worker. Uncached tokens evict cached ones
    either way."""

    backpressure = True

    def __init__(self, others: float) -> None:
        self._others = others

    def choose(self, candidates: Sequence[Worker], need: RoutingInput, now_s: float) -> Worker:
        costs = [
            worker.slot_wait_s(need.n, need.kv_tokens, now_s, need.passes_flex)
            + worker.decode_load_s * need.output_tokens
            + ready_s(worker, need, now_s)
            + worker.capacity.round_trip_s
            + self._others * worker.cache_pressure(now_s) * need.prefill_s(worker)
            for worker in candidates
        ]
        return least_used(candidates, costs, need, now_s)


class SessionAffinity:
    """The session's home by rendezvous hashing; when that has no room, the next in the session's own order."""

    backpressure = True

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def choose(self, candidates: Sequence[Worker], need: RoutingInput, now_s: float) -> Worker:
        home = max(candidates, key=lambda worker: worker.rendezvous_weight(need.session64))
        if self._has_room(home, need, now_s):
            return home
        free = [worker for worker in candidates if self._has_room(worker, need, now_s)]
        return max(free, key=lambda worker: worker.rendezvous_weight(need.session64)) if free else home

    def _has_room(self, worker: Worker, need: RoutingInput, now_s: float) -> bool:
        return worker.wait_s(now_s) <= self._ahead_s and worker.fits(need.n, need.kv_tokens, now_s, need.passes_flex)


class RoundRobin:
    """Each worker in turn, for comparison."""

    backpressure = False

    def __init__(self) -> None:
        self._turn = count()

    def choose(self, candidates: Sequence[Worker], need: RoutingInput, now_s: float) -> Worker:
        return candidates[next(self._turn) % len(candidates)]


class LeastLoaded:
    """The fewest sequences; among equals the worker that was busy for the least share of recent time. For comparison,
    and for fleets in which one pool holds all caches."""

    backpressure = False

    def choose(self, candidates: Sequence[Worker], need: RoutingInput, now_s: float) -> Worker:
        def load(worker: Worker) -> tuple[int, float, float]:
            return worker.active(now_s), worker.busy_share(now_s), worker.cache_pressure(now_s)

        return min(candidates, key=load)


def least_used(candidates: Sequence[Worker], costs: Sequence[float], need: RoutingInput, now_s: float) -> Worker:
    """Return the less used of two workers, chosen by the session's own order among those that cost nearly the least.

    Several cores that see the same loads therefore do not all choose the same worker, and an unknown session goes to
    the same
    two workers from every core.
    """
    limit = near(min(costs))
    best = [worker for worker, cost in zip(candidates, costs) if cost <= limit]
    if len(best) == 1:
        return best[0]
    if len(best) > 2:
        best.sort(key=lambda worker: worker.rendezvous_weight(need.session64))
    return min(best[-2:], key=lambda worker: worker.cache_pressure(now_s))


def interference(worker: Worker, now_s: float) -> float:
    """Return the relative slowdown of a prefill by the decodes that share its steps; 0 on an idle worker."""
    if not worker.active(now_s):
        return 0.0
    in_flight = worker.in_flight
    decode_s = worker.decode_speed.scale * worker.cost.decode_step_s(in_flight.active, in_flight.decode_tokens)
    return 1.0 if 2 * decode_s >= MIXED_STEP_S else decode_s / (MIXED_STEP_S - decode_s)


def ready_s(worker: Worker, need: RoutingInput, now_s: float) -> float:
    """Seconds until a decode worker has the prompt's KV, computed there or transferred."""
    transferred_s = need.prefill_ready_s + transfer_s(worker, need)
    return min(local_prefill_s(worker, need, now_s), transferred_s) if worker.endpoint.alone else transferred_s


def local_prefill_s(worker: Worker, need: RoutingInput, now_s: float) -> float:
    """Seconds until a decode worker has computed the prompt itself, including the time that takes from its sequences:
    it is never idle for long."""
    # Its speed was measured on short prompts, which say little: no decode worker counts as faster than a prefill one.
    slower = max(1.0, need.prefill_scale / worker.prefill_speed.scale)
    prompt_s = need.prefill_s(worker) * slower
    return need.wait_s(worker, now_s) + prompt_s * (1 + interference(worker, now_s) + max(1, worker.active(now_s)))


def transfer_s(worker: Worker, need: RoutingInput) -> float:
    return (need.tokens - need.cached(worker)) * worker.cost.transfer_s


def near(cost_s: float) -> float:
    return cost_s + max(NEAR_S, NEAR * cost_s)


def make_policy(settings: Settings) -> Policy:
    makers: dict[PolicyName, Callable[[], Policy]] = {
        "sticky": lambda: LowestCost(settings.others),
        "prefix": lambda: LowestCost(0.0),
        "affinity": lambda: SessionAffinity(settings.ahead_s),
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
    }
    return makers[settings.policy]()


def make_decode_policy(settings: Settings) -> Policy:
    """The routing policy among decode workers, whose prompts prefill workers compute."""
    return LeastInterference(settings.others) if settings.policy in ("sticky", "prefix") else make_policy(settings)
