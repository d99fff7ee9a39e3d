"""The state of a caller's rate limits: the core computes it, the APIs put it into response headers."""

import msgspec


class LimitState(msgspec.Struct, frozen=True, array_like=True):
    """State of a limit per minute."""

    limit: int
    remaining: int
    reset_s: float  # seconds until all of the limit is available again


class RateLimits(msgspec.Struct, frozen=True, array_like=True):
    """None: there is no such limit. Of a key's limit and its account's, the one with less left."""

    requests: LimitState | None = None
    tokens: LimitState | None = None
