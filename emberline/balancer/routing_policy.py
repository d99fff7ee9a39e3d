"""Which of several endpoints takes a request."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from emberline.balancer.cost_model import PolicyName, Settings
from emberline.balancer.prefix_index import Match
from emberline.balancer.worker import Worker
from emberline.protocol.block_hash import BLOCK_TOKENS

NEAR_S, NEAR = 0.01, 0.1  # costs that differ by less, in seconds or of the best, are as good as equal
LOST, LOST_S = 4.0, 1.0  # leaving a cache costs later turns too: so many times what is computed again, up to so much
BESIDE_S = 0.0145  # a step that takes prompts in beside streams lasts so long, or twice as long as theirs alone


class Need:
    """One request, as policies see it."""

    __slots__ = (
        "block_tokens",
        "match",
        "n",
        "output_tokens",
        "passes_flex",
        "session64",
        "shared",
        "there_s",
        "there_scale",
        "tokens",
    )

    def __init__(
        self,
        tokens: int,
        n: int = 1,
        match: Match | None = None,
        shared: int = 0,
        session64: int = 0,
        output_tokens: float = 0.0,
        block_tokens: int = BLOCK_TOKENS,
        passes_flex: bool = True,
    ) -> None:
        self.tokens = tokens
        self.n = n
        self.match = match or []  # leading blocks believed to be cached, and where
        self.shared = shared  # of them, those that most endpoints hold
        self.session64 = session64  # what it is recognised by
        self.output_tokens = output_tokens  # expected
        self.block_tokens = block_tokens
        self.passes_flex = passes_flex  # engines let it take the place of flex requests that run
        self.there_s = 0.0  # until a prefill endpoint has computed the prompt, where there is one
        self.there_scale = 0.0  # that one's pace

    def depth(self, bits: int) -> int:
        for depth, mask in self.match:
            if mask & bits:
                return depth
        return 0

    def cached(self, worker: Worker) -> int:
        """Tokens; the last one of a prompt is always computed."""
        return min(self.depth(worker.bits) * self.block_tokens, self.tokens - 1)

    def warm(self, candidates: Sequence[Worker]) -> list[Worker]:
        """Those that hold more of it than most do."""
        bits = 0
        for depth, mask in self.match:
            if depth <= self.shared:
                break
            bits |= mask
        return [worker for worker in candidates if worker.bits & bits] if bits else []

    def prefill_s(self, worker: Worker) -> float:
        return worker.prefill_pace.scale * worker.cost.prefill_s(self.tokens - self.cached(worker), self.tokens)


class Policy(Protocol):
    holds: bool  # requests are kept back while the chosen endpoint has enough to do

    def choose(self, candidates: Sequence[Worker], need: Need, now_s: float) -> Worker:
        """One of the candidates, of which there is at least one. A decision without effect: it may not be taken."""


class LowestCost:
    """The least seconds: waiting there, computing there what is not cached there, and what that costs others.

    Computing takes longer beside streams. And it costs those who live there: they wait, and their cache is pushed out.
    So it counts once more, times `others`, times how often its memory was asked for of late. In a fleet that has much
    to do this is *sticky until saturated*: a conversation leaves its home only when the wait there is several times the
    seconds of computing it again elsewhere, or where few live. What is computed again though another holds it counts
    more still, up to a limit: it keeps short conversations together, and long ones have reason enough in their own
    seconds. With `others` at 0 it is best for the request alone.
    """

    holds = True

    def __init__(self, others: float) -> None:
        self._others = others

    def choose(self, candidates: Sequence[Worker], need: Need, now_s: float) -> Worker:
        warm = need.warm(candidates)
        if warm:
            costs = self._costs(warm, need, now_s)
            if near(min(costs)) < self._least_s(candidates, need):
                return lightest(warm, costs, need, now_s)
        return lightest(candidates, self._costs(candidates, need, now_s), need, now_s)

    def _costs(self, candidates: Sequence[Worker], need: Need, now_s: float) -> list[float]:
        others = self._others
        caches = [need.cached(worker) for worker in candidates] if need.match else [0] * len(candidates)
        most = max(caches)
        cost = candidates[0].cost  # one for all: what differs is their pace
        seconds = {cached: cost.prefill_s(need.tokens - cached, need.tokens) for cached in set(caches)}
        costs = []
        for worker, cached in zip(candidates, caches):
            prompt_s = worker.prefill_pace.scale * seconds[cached]
            cost_s = worker.wait_s(now_s) + worker.slot_wait_s(need.n, need.tokens, now_s, need.passes_flex)
            cost_s += prompt_s * (1 + beside(worker, now_s) + others * worker.crowd(now_s))
            if others and cached < most:
                cost_s += min(LOST * (prompt_s - worker.prefill_pace.scale * seconds[most]), LOST_S)
            costs.append(cost_s)
        return costs

    def _least_s(self, candidates: Sequence[Worker], need: Need) -> float:
        """What the best of those that are not warm costs at least: it spares looking at them."""
        fastest = min(candidates, key=_scale)
        uncached = need.tokens - min(need.shared * need.block_tokens, need.tokens - 1)
        return fastest.prefill_pace.scale * fastest.cost.prefill_s(uncached, need.tokens)


class LeastInterference:
    """Where a stream is held up least by those that are there, and its prompt is there soonest: computed on the spot,
    or by the prefill endpoint and moved. What is not cached there pushes out what others have there, either way."""

    holds = True

    def __init__(self, others: float) -> None:
        self._others = others

    def choose(self, candidates: Sequence[Worker], need: Need, now_s: float) -> Worker:
        costs = [
            worker.slot_wait_s(need.n, need.tokens, now_s, need.passes_flex)
            + worker.streams_step_s * need.output_tokens
            + ready_s(worker, need, now_s)
            + self._others * worker.crowd(now_s) * need.prefill_s(worker)
            for worker in candidates
        ]
        return lightest(candidates, costs, need, now_s)


class SessionAffinity:
    """The session's home by rendezvous hashing; when that has no room, the next in the session's own order."""

    holds = True

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def choose(self, candidates: Sequence[Worker], need: Need, now_s: float) -> Worker:
        home = max(candidates, key=lambda worker: worker.weight(need.session64))
        if self._free(home, need, now_s):
            return home
        free = [worker for worker in candidates if self._free(worker, need, now_s)]
        return max(free, key=lambda worker: worker.weight(need.session64)) if free else home

    def _free(self, worker: Worker, need: Need, now_s: float) -> bool:
        return worker.wait_s(now_s) <= self._ahead_s and worker.fits(need.n, need.tokens, now_s, need.passes_flex)


class RoundRobin:
    """For comparison."""

    holds = False

    def __init__(self) -> None:
        self._turn = count()

    def choose(self, candidates: Sequence[Worker], need: Need, now_s: float) -> Worker:
        return candidates[next(self._turn) % len(candidates)]


class LeastLoaded:
    """The fewest sequences, for comparison."""

    holds = False

    def choose(self, candidates: Sequence[Worker], need: Need, now_s: float) -> Worker:
        return min(candidates, key=lambda worker: (worker.active(now_s), worker.crowd(now_s)))


def lightest(candidates: Sequence[Worker], costs: Sequence[float], need: Need, now_s: float) -> Worker:
    """Of those that cost nearly the least, two by the session's own order, and of these the one less used of late.

    So several cores that see the same loads do not all send to the same endpoint, and a session that nobody knows yet
    goes to the same two wherever it is asked for.
    """
    limit = near(min(costs))
    best = [worker for worker, cost in zip(candidates, costs) if cost <= limit]
    if len(best) == 1:
        return best[0]
    if len(best) > 2:
        best.sort(key=lambda worker: worker.weight(need.session64))
    return min(best[-2:], key=lambda worker: worker.crowd(now_s))


def beside(worker: Worker, now_s: float) -> float:
    """How much longer a prompt takes there than alone: steps are shared with the streams."""
    if not worker.active(now_s):
        return 0.0
    account = worker.account
    streams_s = worker.decode_pace.scale * worker.cost.decode_step_s(account.active, account.decode_tokens)
    return 1.0 if 2 * streams_s >= BESIDE_S else streams_s / (BESIDE_S - streams_s)


def ready_s(worker: Worker, need: Need, now_s: float) -> float:
    """Until a decode endpoint has the prompt, one way or the other."""
    there_s = need.there_s + moved_s(worker, need)
    return min(here_s(worker, need, now_s), there_s) if worker.endpoint.alone else there_s


def here_s(worker: Worker, need: Need, now_s: float) -> float:
    """Until a decode endpoint has computed the prompt itself, with what that takes from its streams: it is never idle
    for long."""
    # Its own pace is of short prompts, which tell little: nobody who decodes is taken to be faster than who prefills.
    slower = max(1.0, need.there_scale / worker.prefill_pace.scale)
    prompt_s = need.prefill_s(worker) * slower
    return worker.wait_s(now_s) + prompt_s * (1 + beside(worker, now_s) + max(1, worker.active(now_s)))


def moved_s(worker: Worker, need: Need) -> float:
    return (need.tokens - need.cached(worker)) * worker.cost.transfer_s


def near(cost_s: float) -> float:
    return cost_s + max(NEAR_S, NEAR * cost_s)


def _scale(worker: Worker) -> float:
    return worker.prefill_pace.scale


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
    """For endpoints that draw tokens while others compute the prompts."""
    return LeastInterference(settings.others) if settings.policy in ("sticky", "prefix") else make_policy(settings)
