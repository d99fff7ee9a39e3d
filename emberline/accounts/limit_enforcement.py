"""Enforces the limits of keys and accounts: a request takes its share when it is admitted and settles when it ends."""

from emberline.accounts.account import Account
from emberline.accounts.api_key import ApiKey
from emberline.accounts.key_directory import KeyDirectory
from emberline.accounts.rate_limits import RateLimit, RateLimiter, Taken
from emberline.accounts.usage_row import UsageRow
from emberline.protocol.errors import Forbidden
from emberline.protocol.rate_limits import RateLimits


class LimitEnforcer:
    """Owns what running requests hold, by request id. Lives in the core; nothing here waits."""

    def __init__(self, directory: KeyDirectory, limiter: RateLimiter | None = None) -> None:
        self._directory = directory
        self._limiter = limiter or RateLimiter()
        self._held: dict[str, Taken] = {}

    @property
    def n_held(self) -> int:
        """Running requests that are limited."""
        return len(self._held)

    def admit(
        self, request_id: str, account: str, key_id: str, *, input_tokens: int, output_tokens: int, is_job: bool
    ) -> RateLimits | None:
        """Let a request in that produces at most `output_tokens`, or raise RateLimited. One that is moved to another
        worker holds its share already. Rate limits are not for queued jobs, which wait until there is room."""
        limited = self._limited(account, key_id)
        if is_job or request_id in self._held:
            return None
        limits = [limit for limit in limited if limit != RateLimit(limit.scope, limit.name)]
        if not limits:
            return None
        self._held[request_id] = self._limiter.take(limits, input_tokens, output_tokens)
        return self._limiter.state(limits)

    def release(self, request_id: str) -> None:
        """The request never ran."""
        if (taken := self._held.pop(request_id, None)) is not None:
            self._limiter.put_back(taken, 0, ran=False)

    def settle(self, row: UsageRow) -> None:
        """The request has ended. Cached tokens of the prompt do not count."""
        if (taken := self._held.pop(row.id, None)) is not None:
            self._limiter.put_back(taken, row.input_tokens - row.cached_tokens + row.output_tokens)

    def _limited(self, account_id: str, key_id: str) -> list[RateLimit]:
        account, key = self._directory.account(account_id), self._directory.key(key_id) if key_id else None
        if account is not None and account.disabled_us is not None:
            raise Forbidden(f"account {account.id} is disabled")
        return [_rate_limit(owner) for owner in (key, account) if owner is not None]


def _rate_limit(owner: Account | ApiKey) -> RateLimit:
    is_key = isinstance(owner, ApiKey)
    return RateLimit(
        f"{'key' if is_key else 'account'}:{owner.id}",
        "this API key" if is_key else f"account {owner.id}",
        owner.requests_per_minute,
        owner.tokens_per_minute,
        owner.concurrency,
    )
