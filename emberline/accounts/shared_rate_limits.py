"""Rate limits that several cores share: token buckets in the store, of which each core takes a little ahead.

What a core takes counts as used at once, so all cores together admit no more than the limits. It keeps what it does not
use for a second at most, and large buckets are a second's worth smaller than the limit, which makes up for that. Of
concurrent requests each core has a lease on a number of slots, of which it keeps as many as were in use since it looked
last: those of a core that died are free when the lease expires. While the store is away, each core limits what it
admits itself.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from emberline.accounts.rate_limits import CONCURRENCY_RETRY_S, MINUTE_S, RateLimit, RateLimiter, Taken
from emberline.net.periodic import every, stop
from emberline.protocol.errors import RateLimited, Unavailable
from emberline.protocol.rate_limits import LimitState, RateLimits
from emberline.store import Database, Query, Transaction, Value
from emberline.store.database import Sql

KEEP_S = 0.5  # what is taken and not used, before it is given back
LEASE_S = 30.0  # of slots
AWAY_S = 2.0  # before a store that did not answer is asked again
AHEAD_S = 1.0  # so much of a large limit is taken at once
LARGE = 600  # requests a minute, from which on they are taken ahead; of tokens a thousand times as many
_SECOND_US = 1_000_000

_CREATE = (
    "INSERT INTO rate_buckets (scope, n_requests, n_tokens, at_us) VALUES (?, 0, 0, ?) ON CONFLICT (scope) DO NOTHING"
)
_SELECT = "SELECT n_requests, n_tokens, at_us FROM rate_buckets WHERE scope = ?"
_LOCK = Sql(_SELECT, postgres=f"{_SELECT} FOR UPDATE")
_SET = "UPDATE rate_buckets SET n_requests = ?, n_tokens = ?, at_us = ? WHERE scope = ?"
_SLOTS = "SELECT CAST(COALESCE(SUM(n), 0) AS BIGINT) FROM rate_slots WHERE scope = ? AND core <> ? AND until_us > ?"
_SET_SLOTS = (
    "INSERT INTO rate_slots (scope, core, n, until_us) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (scope, core) DO UPDATE SET n = excluded.n, until_us = excluded.until_us"
)
_FORGET = ("DELETE FROM rate_slots WHERE until_us < ? OR n = 0", "DELETE FROM rate_buckets WHERE at_us < ?")

log = logging.getLogger("emberline.limits")


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Amount that a core wants to hold of a scope, including what it holds already and does not use."""

    requests: float = 0.0
    tokens: float = 0.0
    returned_requests: float = 0.0
    returned_tokens: float = 0.0
    ahead_requests: float = 0.0  # beyond that, if there is as much
    ahead_tokens: float = 0.0
    slots: int = 0  # in all
    takes: bool = False  # else it only gives back


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """`wait_s` is None: it has what it wanted. Else what it lacks, and when to ask again."""

    requests: float = 0.0
    tokens: float = 0.0
    used_requests: float = 0.0  # of the bucket, by all cores
    used_tokens: float = 0.0
    lacks: str = ""
    wait_s: float | None = None
    leases_slots: bool = False  # the lease on slots begins again


class _Share:
    """Tokens and slots of one scope that this core holds."""

    def __init__(self, limit: RateLimit, now_s: float) -> None:
        self.limit = limit
        self.requests = 0.0
        self.tokens = 0.0  # negative: requests have used more than they took
        self.at_s = now_s  # when these were taken
        self.slots = 0
        self.n_running = 0
        self.n_peak = 0  # the most that ran since the last look for unused slots
        self.n_reserving = 0  # requests that wait for the store, which will run under this share
        self.used_s = now_s
        self.renewed_s = now_s  # when the lease on slots began
        self.granted = Granted()
        self.lock = asyncio.Lock()

    def has(self, n_requests: int, n_tokens: float) -> bool:
        limit = self.limit
        return (
            (limit.requests_per_minute is None or self.requests >= n_requests)
            and (limit.tokens_per_minute is None or self.tokens >= n_tokens)
            and (limit.concurrency is None or self.n_running < self.slots)
        )

    def add(self, requests: float, tokens: float) -> None:
        if self.limit.requests_per_minute is not None:
            self.requests += requests
        if self.limit.tokens_per_minute is not None:
            self.tokens += tokens

    def regained(self, amount: float, per_minute: int | None, now_s: float) -> float:
        """Amount to return to the bucket: what was taken, minus what the bucket has refilled since."""
        return max(0.0, amount - (now_s - self.at_s) / MINUTE_S * (per_minute or 0))


class SharedRateLimiter:
    """A rate limiter shared by several cores. Checks this core's own limits first, then the buckets in the store."""

    def __init__(
        self,
        store: Database,
        core: str = "",
        clock: Callable[[], float] = time.monotonic,
        ask_s: float = 5.0,
    ) -> None:
        """`ask_s` is the time that the store has to answer."""
        self._ask_s = ask_s
        self._store = store
        self._core = core or secrets.token_hex(8)
        self._clock = clock
        self._own = RateLimiter(clock)
        self._shares: dict[str, _Share] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_away = False
        self._away_until_s = -math.inf  # the store is not asked before
        self._forgot_s = -math.inf

    def start(self) -> None:
        self._task = asyncio.create_task(every(KEEP_S, self.give_back, log, "rate limits could not be given back"))

    async def close(self) -> None:
        await stop(self._task)
        for share in self._shares.values():
            share.used_s = -math.inf
        await self.give_back()

    async def take(
        self, limits: Sequence[RateLimit], input_tokens: int, output_tokens: int, n_requests: int = 1
    ) -> Taken:
        taken = self._own.take(limits, input_tokens, output_tokens, n_requests)
        reserved: list[RateLimit] = []
        try:
            for limit in limits:
                await self._reserve(limit, n_requests, taken.n_tokens)
                reserved.append(limit)
        except BaseException:
            self._own.put_back(taken, 0, ran=False)
            for limit in reserved:
                self._release(limit, n_requests, taken.n_tokens, taken.n_tokens, 0.0)
            raise
        taken.state = self._seen(taken.state, limits)
        return taken

    def put_back(self, taken: Taken, n_tokens: int, ran: bool = True) -> None:
        elapsed_s = self._clock() - taken.at_s
        self._own.put_back(taken, n_tokens, ran)
        for limit in taken.limits:
            self._release(limit, 0 if ran else taken.n_requests, taken.n_tokens, taken.n_tokens - n_tokens, elapsed_s)

    # --- what this core holds ----------------------------------------------------------------------------------------

    async def _reserve(self, limit: RateLimit, n_requests: int, n_tokens: int) -> None:
        share = self._share(limit)
        share.n_reserving += 1
        try:
            await self._reserve_of(share, limit, n_requests, n_tokens)
        finally:
            share.n_reserving -= 1

    async def _reserve_of(self, share: _Share, limit: RateLimit, n_requests: int, n_tokens: int) -> None:
        wanted = float(min(n_tokens, _capacity(limit.tokens_per_minute, 1000 * LARGE)))
        while not share.has(n_requests, wanted):
            # Shielded: what the store grants is this core's, also if this request is gone by then.
            granted = await asyncio.shield(asyncio.ensure_future(self._extend(share, n_requests, wanted)))
            if granted is None:
                break  # the store is away
            if granted.wait_s is not None:
                raise RateLimited(
                    f"{limit.name} is limited to {granted.lacks}, over all cores: retry in "
                    f"{max(1, math.ceil(granted.wait_s))} s",
                    retry_after_s=granted.wait_s,
                    rate_limits=self._seen(self._own.state([limit]), [limit]),
                )
        share.add(-n_requests, -wanted)
        share.n_running += 1
        share.n_peak = max(share.n_peak, share.n_running)
        share.used_s = self._clock()

    def _release(self, limit: RateLimit, n_requests: int, n_taken: int, n_unused: int, elapsed_s: float) -> None:
        share = self._share(limit)
        share.n_running -= 1
        most = _capacity(limit.tokens_per_minute, 1000 * LARGE)
        unused = float(min(n_taken, most) - (n_taken - n_unused))
        if unused > 0:
            unused = max(0.0, unused - elapsed_s / MINUTE_S * (limit.tokens_per_minute or 0))
        share.add(n_requests, unused)
        share.used_s = self._clock()

    def _share(self, limit: RateLimit) -> _Share:
        share = self._shares.get(limit.scope)
        if share is None:
            share = self._shares[limit.scope] = _Share(limit, self._clock())
        share.limit = limit
        if limit.concurrency is None:
            share.slots = 0
        return share

    def _seen(self, own: RateLimits | None, limits: Sequence[RateLimit]) -> RateLimits | None:
        """With what the other cores have used, as far as it is known."""
        if own is None:
            return None
        requests, tokens = own.requests, own.tokens
        for limit in limits:
            granted, share = self._share(limit).granted, self._share(limit)
            requests = _less(requests, limit.requests_per_minute, granted.used_requests - share.requests)
            tokens = _less(tokens, limit.tokens_per_minute, granted.used_tokens - share.tokens)
        return RateLimits(requests, tokens)

    # --- the store ---------------------------------------------------------------------------------------------------

    async def _extend(self, share: _Share, n_requests: int, n_tokens: float) -> Granted | None:
        async with share.lock:
            if share.has(n_requests, n_tokens):
                return Granted()
            limit = share.limit
            want = self._returning(share)
            want = msgspec.structs.replace(
                want,
                requests=0.0 if limit.requests_per_minute is None else float(n_requests),
                tokens=0.0 if limit.tokens_per_minute is None else n_tokens,
                ahead_requests=_ahead(limit.requests_per_minute, LARGE),
                ahead_tokens=_ahead(limit.tokens_per_minute, 1000 * LARGE),
                slots=max(share.slots, share.n_running + 1),
                takes=True,
            )
            granted = await self._exchange(share, want)
            if granted is not None and granted.wait_s is None and limit.concurrency is not None:
                share.slots = max(share.slots, want.slots)
            return granted

    def _returning(self, share: _Share) -> Want:
        now_s, limit = self._clock(), share.limit
        returned = (
            share.requests if share.requests < 0 else share.regained(share.requests, limit.requests_per_minute, now_s),
            share.tokens if share.tokens < 0 else share.regained(share.tokens, limit.tokens_per_minute, now_s),
        )
        slots = max(share.slots, share.n_running)  # more run than it has slots for if the store was away
        return Want(returned_requests=returned[0], returned_tokens=returned[1], slots=slots)

    async def _exchange(self, share: _Share, want: Want) -> Granted | None:
        """Give back what this core holds, which nobody uses meanwhile, and take what it wants. None: the store is
        away."""
        if self._clock() < self._away_until_s:
            return None
        now_us, limit, held = self._store.now_us(), share.limit, (share.requests, share.tokens)
        share.add(-held[0], -held[1])
        try:
            async with asyncio.timeout(self._ask_s):
                granted = await self._store.run(lambda: _take(limit, self._core, want, now_us))
        except BaseException as error:
            share.add(*held)
            if not isinstance(error, Unavailable | TimeoutError):
                raise
            if not self._is_away:
                log.warning(
                    "the store is away: each core limits its own requests alone (%s)", str(error) or "no answer"
                )
            self._is_away, self._away_until_s = True, self._clock() + AWAY_S
            return None
        self._is_away = False
        share.add(granted.requests, granted.tokens)
        share.at_s = self._clock()
        if granted.leases_slots:
            share.renewed_s = share.at_s
        share.granted = granted
        return granted

    async def give_back(self) -> None:
        """Give back what this core does not use, and renew its leases on slots."""
        now_s = self._clock()
        for scope, share in list(self._shares.items()):
            is_idle = now_s - share.used_s >= KEEP_S
            n_peak = share.n_running if is_idle else share.n_peak
            share.n_peak = share.n_running
            holds = is_idle and (share.requests or share.tokens)
            if holds or share.slots > n_peak or (share.slots and now_s - share.renewed_s > LEASE_S / 3):
                async with share.lock:
                    # Before the store knows: a request that comes now asks for one.
                    share.slots = min(share.slots, max(n_peak, share.n_peak))
                    await self._exchange(share, self._returning(share))
            elif not (share.n_running or share.n_reserving or share.slots) and now_s - share.used_s > MINUTE_S:
                del self._shares[scope]
        if now_s - self._forgot_s > MINUTE_S:
            self._forgot_s = now_s
            now_us = self._store.now_us()
            day_us = now_us - 86_400 * _SECOND_US
            await self._store.transaction([Query(_FORGET[0], (now_us,)), Query(_FORGET[1], (day_us,))])


def _take(limit: RateLimit, core: str, want: Want, now_us: int) -> Transaction[Granted]:
    yield Query(_CREATE, (limit.scope, now_us))
    ((requests, tokens, at_us),) = yield Query(_LOCK, (limit.scope,))
    minutes = max(0, now_us - _int(at_us)) / _SECOND_US / MINUTE_S
    rpm, tpm = limit.requests_per_minute, limit.tokens_per_minute
    used_requests = max(0.0, max(0.0, _float(requests) - minutes * (rpm or 0)) - want.returned_requests)
    used_tokens = max(0.0, max(0.0, _float(tokens) - minutes * (tpm or 0)) - want.returned_tokens)
    room_requests = _capacity(rpm, LARGE) - used_requests
    room_tokens = _capacity(tpm, 1000 * LARGE) - used_tokens
    lacks, wait_s, leases_slots = "", None, False
    if want.takes and rpm is not None and want.requests > room_requests + 1e-6:
        lacks, wait_s = f"{rpm} requests a minute", (want.requests - room_requests) * MINUTE_S / rpm
    elif want.takes and tpm is not None and want.tokens > room_tokens + 1e-6:
        lacks, wait_s = f"{tpm} tokens a minute", (want.tokens - room_tokens) * MINUTE_S / tpm
    elif limit.concurrency is not None:
        ((others,),) = yield Query(_SLOTS, (limit.scope, core, now_us))
        if want.takes and want.slots + _int(others) > limit.concurrency:
            lacks, wait_s = f"{limit.concurrency} concurrent requests", CONCURRENCY_RETRY_S
        else:
            until_us = now_us + int(LEASE_S * _SECOND_US)
            yield Query(_SET_SLOTS, (limit.scope, core, want.slots, until_us))
            leases_slots = True
    got_requests = got_tokens = 0.0
    if wait_s is None:
        got_requests = want.requests + max(0.0, min(want.ahead_requests, room_requests - want.requests))
        got_tokens = want.tokens + max(0.0, min(want.ahead_tokens, room_tokens - want.tokens))
    used_requests, used_tokens = used_requests + got_requests, used_tokens + got_tokens
    yield Query(_SET, (used_requests, used_tokens, max(now_us, _int(at_us)), limit.scope))
    return Granted(
        requests=got_requests,
        tokens=got_tokens,
        used_requests=used_requests,
        used_tokens=used_tokens,
        lacks=lacks,
        wait_s=wait_s,
        leases_slots=leases_slots,
    )


def _capacity(per_minute: int | None, large: int) -> float:
    """Return the capacity of the bucket. Where cores take ahead, what they hold was regained by up to a second too
    early."""
    if per_minute is None:
        return math.inf
    return per_minute * (1 - 2 * KEEP_S / MINUTE_S) if per_minute >= large else float(per_minute)


def _ahead(per_minute: int | None, large: int) -> float:
    return per_minute * AHEAD_S / MINUTE_S if per_minute is not None and per_minute >= large else 0.0


def _less(state: LimitState | None, limit: int | None, used: float) -> LimitState | None:
    if state is None or limit is None or limit != state.limit:
        return state
    remaining = max(0, math.floor(limit - used))
    return state if remaining >= state.remaining else LimitState(limit, remaining, used * MINUTE_S / limit)


def _int(value: Value) -> int:
    assert isinstance(value, int | float)
    return int(value)


def _float(value: Value) -> float:
    assert isinstance(value, int | float)
    return float(value)
