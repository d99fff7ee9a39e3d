"""Rate limits of keys and accounts: requests and tokens a minute, and concurrent requests.

Limits per minute are token buckets: a full bucket holds one minute's worth and refills steadily, so that over any t
seconds at most `limit * (1 + t / 60)` is admitted. Tokens are taken for the worst case, the prompt and the longest
reply; what was not used is put back when the request ends, less what the bucket has regained meanwhile. The state is in
the core's memory: a new core begins with full buckets. Several cores also share buckets in the store
(`shared_rate_limits.py`).
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from emberline.protocol.errors import RateLimited
from emberline.protocol.rate_limits import LimitState, RateLimits

MINUTE_S = 60.0
CONCURRENCY_RETRY_S = 1.0  # nobody knows when a running request will end
_ROUNDING = 1e-6  # of a request or token
_LOOK_AT = 4  # scopes per request: more than a request can add


class RateLimit(msgspec.Struct, frozen=True):
    """The limits of one key or account. None: unlimited."""

    scope: str  # what is limited; unique
    name: str  # of it, in messages: "this API key", "account acme"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Taken(msgspec.Struct):
    """Amounts that one running request holds of its limits."""

    limits: Sequence[RateLimit]
    n_tokens: int
    at_s: float
    state: RateLimits | None  # of the limits, after it was taken
    n_requests: int = 1


class _Use:
    """Amount that a scope has used and not yet regained."""

    __slots__ = ("at_s", "n_requests", "n_running", "n_tokens")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s  # the counts below are as of then
        self.n_requests = 0.0
        self.n_tokens = 0.0
        self.n_running = 0

    def refill(self, limit: RateLimit, now_s: float) -> None:
        minutes = max(0.0, now_s - self.at_s) / MINUTE_S
        self.at_s = max(self.at_s, now_s)
        rpm, tpm = limit.requests_per_minute, limit.tokens_per_minute
        self.n_requests = 0.0 if rpm is None else max(0.0, self.n_requests - minutes * rpm)
        self.n_tokens = 0.0 if tpm is None else max(0.0, self.n_tokens - minutes * tpm)


class RateLimiter:
    """Constant time per request. Remembers a scope for as long as its buckets are not full or it has running requests:
    no more scopes than have made a request in the last minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: OrderedDict[str, tuple[_Use, RateLimit]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._uses)

    def take(self, limits: Sequence[RateLimit], input_tokens: int, output_tokens: int, n_requests: int = 1) -> Taken:
        """Let a request in that may use so many tokens, or raise RateLimited and take nothing. `n_requests` is 0 for
        another attempt at one that was counted.

        A request that may use more than a minute's worth needs the full bucket, so that it is not refused for ever; its
        prompt alone must fit.
        """
        now_s = self._clock()
        n_tokens, n_scopes = input_tokens + output_tokens, len(self._uses)
        uses = [self._use(limit, now_s) for limit in limits]
        for limit, use in zip(limits, uses, strict=True):
            self._check(limit, use, limits, input_tokens, n_tokens, n_requests)
        for use in uses:
            use.n_requests += n_requests
            use.n_tokens += n_tokens
            use.n_running += 1
        if len(self._uses) > n_scopes:
            self._forget_idle(now_s)
        return Taken(limits, n_tokens, now_s, _state(limits, uses), n_requests)

    def put_back(self, taken: Taken, n_tokens: int, ran: bool = True) -> None:
        """The request has ended and used so many tokens, which may be more than were taken. One that never ran does not
        count as a request."""
        now_s = self._clock()
        for limit in taken.limits:
            use = self._use(limit, now_s)
            use.n_running -= 1
            unused = float(taken.n_tokens - n_tokens)
            if unused > 0:  # the bucket has regained some of it by refilling
                refilled = (now_s - taken.at_s) / MINUTE_S * (limit.tokens_per_minute or 0)
                unused = max(0.0, unused - refilled)
            use.n_tokens = max(0.0, use.n_tokens - unused)
            if not ran:
                use.n_requests = max(0.0, use.n_requests - taken.n_requests)

    def state(self, limits: Sequence[RateLimit]) -> RateLimits | None:
        """None where neither requests nor tokens are limited."""
        now_s = self._clock()
        return _state(limits, [self._use(limit, now_s) for limit in limits])

    def _use(self, limit: RateLimit, now_s: float) -> _Use:
        known = self._uses.get(limit.scope)
        use = _Use(now_s) if known is None else known[0]
        use.refill(limit, now_s)
        self._uses[limit.scope] = use, limit
        self._uses.move_to_end(limit.scope)
        return use

    def _forget_idle(self, now_s: float) -> None:
        """Forget scopes that are as good as new, a few whenever others come. One that is not is looked at again after
        all others."""
        for _ in range(min(_LOOK_AT, len(self._uses))):
            scope, (use, limit) = next(iter(self._uses.items()))
            use.refill(limit, now_s)
            if use.n_running or use.n_requests or use.n_tokens:
                self._uses.move_to_end(scope)
            else:
                del self._uses[scope]

    def _check(
        self,
        limit: RateLimit,
        use: _Use,
        limits: Sequence[RateLimit],
        n_input: int,
        n_tokens: int,
        n_requests: int,
    ) -> None:
        if limit.concurrency is not None and use.n_running >= limit.concurrency:
            raise self._refusal(
                limits,
                f"{limit.name} has {use.n_running} requests running, as many as its limit on concurrent requests: "
                "retry when one has ended",
                CONCURRENCY_RETRY_S,
            )
        most = limit.requests_per_minute
        if most is not None and n_requests and use.n_requests + 1 > most + _ROUNDING:
            wait_s = (use.n_requests + 1 - most) * MINUTE_S / most
            raise self._refusal(
                limits, f"{limit.name} is limited to {most} requests a minute: retry in {_seconds(wait_s)}", wait_s
            )
        most = limit.tokens_per_minute
        if most is None:
            return
        if n_input > most:
            raise self._refusal(
                limits,
                f"the prompt has {n_input} tokens, and {limit.name} is limited to {most} tokens a minute: shorten it",
                MINUTE_S,
            )
        over = use.n_tokens + min(n_tokens, most) - most
        if over > _ROUNDING:
            wait_s = over * MINUTE_S / most
            raise self._refusal(
                limits,
                f"{limit.name} is limited to {most} tokens a minute, and this request may use {n_tokens} (its prompt "
                f"and the longest reply): retry in {_seconds(wait_s)}, or lower max_tokens",
                wait_s,
            )

    def _refusal(self, limits: Sequence[RateLimit], message: str, wait_s: float) -> RateLimited:
        return RateLimited(message, retry_after_s=wait_s, rate_limits=self.state(limits))


def _state(limits: Sequence[RateLimit], uses: Sequence[_Use]) -> RateLimits | None:
    requests: LimitState | None = None
    tokens: LimitState | None = None
    for limit, use in zip(limits, uses, strict=True):
        requests = _scarcer(requests, limit.requests_per_minute, use.n_requests)
        tokens = _scarcer(tokens, limit.tokens_per_minute, use.n_tokens)
    return None if requests is tokens is None else RateLimits(requests, tokens)


def _scarcer(other: LimitState | None, limit: int | None, used: float) -> LimitState | None:
    if limit is None:
        return other
    state = LimitState(limit, max(0, math.floor(limit - used)), used * MINUTE_S / limit)
    return state if other is None or state.remaining < other.remaining else other


def _seconds(wait_s: float) -> str:
    return f"{max(1, math.ceil(wait_s))} s"
