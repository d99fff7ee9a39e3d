"""Enforces the limits of keys and accounts: a request takes its share when it is admitted and settles when it ends.

Rate limits come first, then budgets, for which the store may have to be asked. Queued jobs have no rate limit, because
they wait until there is room; they do have budgets.
"""

from typing import NamedTuple

import msgspec

from emberline.accounts.account import Account
from emberline.accounts.api_key import ApiKey
from emberline.accounts.budgets import Budget, Budgets, Reservation
from emberline.accounts.key_directory import KeyDirectory
from emberline.accounts.rate_limits import RateLimit, RateLimiter, Taken
from emberline.accounts.shared_rate_limits import SharedRateLimiter
from emberline.accounts.usage_row import UsageRow
from emberline.protocol.errors import BadInput, Forbidden
from emberline.protocol.price import Price
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.route_request import RouteRequest


class Share(msgspec.Struct, frozen=True):
    """An admitted request's share of the limits."""

    rate_limits: RateLimits | None = None
    lease: str = ""  # of its budgets, for its usage row
    reserved_pico: int = 0


class _Held(msgspec.Struct):
    """Reservations that a running request holds until it ends."""

    share: Share
    taken: Taken | None
    reservation: Reservation | None = None


class _OwnersLimits(NamedTuple):
    owner: Account | ApiKey
    rate: RateLimit | None
    budget: Budget | None


class LimitEnforcer:
    """Owns what running requests hold, by request id. Lives in the core. Without `budgets` there are none."""

    def __init__(
        self,
        directory: KeyDirectory,
        budgets: Budgets | None = None,
        limiter: RateLimiter | SharedRateLimiter | None = None,
    ) -> None:
        self._directory = directory
        self._budgets = budgets
        self._limiter = limiter or RateLimiter()
        self._held: dict[str, _Held] = {}
        self._known: dict[str, _OwnersLimits] = {}  # by the id of the key or account

    @property
    def n_held(self) -> int:
        """Running requests that are limited."""
        return len(self._held)

    async def admit(self, request: RouteRequest, price: Price | None) -> Share:
        """Let a request in, or raise RateLimited, BudgetExceeded, BudgetReserved.

        A request that is moved to another worker has its share already."""
        if (held := self._held.get(request.id)) is not None:
            return held.share
        account = self._directory.account(request.account)
        key = self._directory.key(request.key_id) if request.key_id else None
        if account is not None and account.disabled_us is not None:
            raise Forbidden(f"account {account.id} is disabled")
        rate_limits: list[RateLimit] = []
        budgets: list[Budget] = []
        for owner in (key, account):
            if owner is None:
                continue
            _, rate, budget = self._limits_of(owner)
            if rate is not None and not request.engine:
                rate_limits.append(rate)
            if budget is not None:
                budgets.append(budget)
        if not rate_limits and not budgets:
            return Share()
        held = _Held(Share(), None)
        if rate_limits:
            n_requests = 0 if request.is_retry else 1
            n_output = request.most_output_tokens or 0
            if isinstance(self._limiter, SharedRateLimiter):
                held.taken = await self._limiter.take(rate_limits, request.input_tokens, n_output, n_requests)
            else:
                held.taken = self._limiter.take(rate_limits, request.input_tokens, n_output, n_requests)
        if budgets and self._budgets is not None:
            try:
                amount_pico = _worst_case_pico(request, price, budgets[0].name)
                held.reservation = await self._budgets.reserve(budgets, amount_pico, request.created_us)
            except BaseException:
                self._give_up(held)
                raise
        held.share = Share(
            None if held.taken is None else held.taken.state,
            "" if held.reservation is None else held.reservation.lease,
            0 if held.reservation is None else held.reservation.amount_pico,
        )
        self._held[request.id] = held
        return held.share

    def _limits_of(self, owner: Account | ApiKey) -> "_OwnersLimits":
        """Made once for each state of a record."""
        known = self._known.get(owner.id)
        if known is None or known.owner is not owner:
            known = self._known[owner.id] = _OwnersLimits(owner, _rate_limit(owner), _budget(owner))
        return known

    def release(self, request_id: str) -> None:
        """The request never ran."""
        if (held := self._held.pop(request_id, None)) is not None:
            self._give_up(held)

    def settle(self, row: UsageRow) -> bool:
        """The request has ended. Cached tokens of the prompt do not count for rate limits. True: the row is late, see
        `Budgets.settle`."""
        held = self._held.pop(row.id, None)
        if held is None:
            return bool(row.lease)  # it was admitted by a core that has ended
        if held.taken is not None:
            self._limiter.put_back(held.taken, row.input_tokens - row.cached_tokens + row.output_tokens)
        if held.reservation is None or self._budgets is None:
            return False
        return not self._budgets.settle(held.reservation, row.cost_pico or 0)

    def _give_up(self, held: _Held) -> None:
        if held.taken is not None:
            self._limiter.put_back(held.taken, 0, ran=False)
        if held.reservation is not None and self._budgets is not None:
            self._budgets.settle(held.reservation, 0)


def _name(owner: Account | ApiKey) -> str:
    return "this API key" if isinstance(owner, ApiKey) else f"account {owner.id}"


def _rate_limit(owner: Account | ApiKey) -> RateLimit | None:
    limits = owner.requests_per_minute, owner.tokens_per_minute, owner.concurrency
    if limits == (None, None, None):
        return None
    kind = "key" if isinstance(owner, ApiKey) else "account"
    return RateLimit(f"{kind}:{owner.id}", _name(owner), *limits)


def _budget(owner: Account | ApiKey) -> Budget | None:
    if owner.budget_pico is None:
        return None
    account, key_id = (owner.account, owner.id) if isinstance(owner, ApiKey) else (owner.id, "")
    return Budget(account, key_id, _name(owner), owner.budget_pico, owner.budget_period)


def _worst_case_pico(request: RouteRequest, price: Price | None, name: str) -> int:
    """The most that a request may cost. Raises BadInput if nothing bounds the cost."""
    if price is None:
        raise Forbidden(
            f"{name} has a budget, and this model has no price: set one in `[[prices]]` of the configuration",
            param="model",
        )
    n_output = request.most_output_tokens
    if n_output is None:
        if price.output:
            raise BadInput(
                f"{name} has a budget, and nothing bounds what this request may cost: set max_tokens",
                param="max_tokens",
            )
        n_output = 0
    return price.worst_case_pico(
        request.most_input_tokens,
        n_output,
        request.priority,
        images=request.images,
        audio_ms=request.max_audio_ms,
        compute_ms=request.max_compute_ms,
        predictions=request.predictions,
    )
