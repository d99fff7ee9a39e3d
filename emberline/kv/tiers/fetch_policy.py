"""Fetch a cached prefix from tiers, or compute it again: whichever is predicted to be done first. Pure functions.

The prefix is fetched up to some block, and the rest is computed behind it. While KV is fetched the device computes what
is queued before the request, and what else there is: a fetch costs no device time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MIN_TOKENS = 32  # of a fetch: fewer are computed sooner than a fetch is arranged
MIN_SLACK_S = 0.05  # that a fetch may be late in any case, where recomputing takes longer than that
UNRATED_S = 1.0  # slack of a fetch as long as the prefill rate is not known
MAX_CUTS = 8  # prefix lengths that are compared


@dataclass(slots=True, frozen=True)
class TierQueue:
    """Expected delay and rate of a fetch from one tier."""

    rate: float  # bytes per second, measured or assumed
    queued_bytes: int = 0  # of fetches before it
    latency_s: float = 0.0  # until the first block comes; of a tier that does not answer, for how long it has not

    def seconds(self, n_bytes: int) -> float:
        return self.latency_s + (self.queued_bytes + n_bytes) / max(self.rate, 1.0)


@dataclass(slots=True, frozen=True)
class TierRun:
    """Consecutive blocks of the prefix that come from one tier."""

    tier: str
    n_tokens: int
    n_bytes: int


@dataclass(slots=True, frozen=True)
class ComputeQueue:
    """Expected delay and rate of recomputing."""

    tokens_per_s: float  # of prompts; 0: not measured yet
    n_before: int = 0  # prompt tokens that are computed before the request's
    others_wait: bool = False  # for device time, behind the request or beside it

    def seconds(self, n_tokens: int) -> float:
        return n_tokens / self.tokens_per_s


@dataclass(slots=True, frozen=True)
class Fetch:
    """The decision to fetch the first n_tokens of the runs."""

    n_tokens: int
    fetch_s: float  # predicted
    deadline_s: float  # from now: then progress is reviewed
    limit_s: float  # from now: then recomputing begins in any case


def choose(
    runs: Sequence[TierRun],
    tiers: dict[str, TierQueue],
    mover: TierQueue,
    n_tail: int,
    compute: ComputeQueue,
    whole: bool = False,
) -> Fetch | None:
    """Choose the part of a prefix to fetch, given the runs that hold it and `n_tail` tokens after it to compute.
    Returns None for nothing.

    The first token is due after the longer of the fetch and the computing before it, and the uncached rest. Of the
    prefix lengths that are not slower than recomputing everything the soonest is taken; while others wait for the
    device, the one that leaves them the most time. `whole`: a shorter prefix is of no use, because of windows.
    """
    runs = _joined(runs)
    total = sum(run.n_tokens for run in runs)
    if total < MIN_TOKENS:
        return None
    best: Fetch | None = None
    best_s = float("inf")
    n_tokens, n_bytes = 0, 0
    by_tier: dict[str, int] = {}
    for run in runs:
        n_tokens += run.n_tokens
        n_bytes += run.n_bytes
        by_tier[run.tier] = by_tier.get(run.tier, 0) + run.n_bytes
        if n_tokens < (total if whole else MIN_TOKENS):
            continue
        read_s = max(tiers[tier].seconds(tier_bytes) for tier, tier_bytes in by_tier.items())
        fetch_s = max(read_s, mover.seconds(n_bytes))
        if not compute.tokens_per_s:
            best = Fetch(n_tokens, fetch_s, fetch_s + UNRATED_S, 4 * fetch_s + UNRATED_S)
            continue
        before_s = compute.seconds(compute.n_before)
        done_s = max(fetch_s, before_s) + compute.seconds(total - n_tokens + n_tail)
        recomputed_s = before_s + compute.seconds(total + n_tail)
        if done_s >= recomputed_s:
            continue
        cost_s = done_s - compute.seconds(n_tokens) * compute.others_wait
        if cost_s < best_s:
            best, best_s = Fetch(n_tokens, fetch_s, *_deadlines(fetch_s, done_s, recomputed_s)), cost_s
    return best


def _deadlines(fetch_s: float, done_s: float, recomputed_s: float) -> tuple[float, float]:
    """A late fetch may use up a quarter of what it was to save. Then it goes on only if it makes progress."""
    gain_s = recomputed_s - done_s
    slack_s = min(gain_s / 2, max(MIN_SLACK_S, fetch_s, gain_s / 4))
    return fetch_s + slack_s, fetch_s + gain_s


def extended(elapsed_s: float, n_arrived: int, n_left: int, limit_s: float, compute: ComputeQueue) -> float | None:
    """At a fetch's deadline, with n_left tokens missing: its next one, from its beginning; None: it has missed it.

    It goes on if the rest, at the rate of what has arrived, comes before it could be computed.
    """
    if not n_arrived or elapsed_s >= limit_s:
        return None
    left_s = elapsed_s / n_arrived * n_left
    if compute.tokens_per_s and left_s >= compute.seconds(n_left):
        return None
    return min(limit_s, elapsed_s + max(left_s * 1.5, MIN_SLACK_S / 5))


def _joined(runs: Sequence[TierRun]) -> list[TierRun]:
    """With neighbors of one tier as one run, and at most MAX_CUTS of them: the last ones count as one."""
    joined: list[TierRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and (last.tier == run.tier or len(joined) == MAX_CUTS):
            joined[-1] = TierRun(last.tier, last.n_tokens + run.n_tokens, last.n_bytes + run.n_bytes)
        else:
            joined.append(run)
    return joined
