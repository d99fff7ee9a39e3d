"""When a failed attempt is repeated, and what is tried after the last one."""

from collections.abc import Iterator
from typing import NamedTuple

from emberline.gateway.gateway_errors import FirstByteTimeout
from emberline.protocol.errors import (
    ContextExceeded,
    EmberlineError,
    Internal,
    ModelNotFound,
    Overloaded,
    TooLarge,
    Unavailable,
    Unsupported,
)
from emberline.protocol.gateway import Backoff
from emberline.upstream.providers.errors import ProviderRefusedKey

MAX_WAIT_S = 30.0  # before an attempt: where a provider asks for more, the next model is tried, or the client told

_TRANSIENT = (Unavailable, Overloaded, FirstByteTimeout, Internal)
_OF_THE_MODEL = (
    ContextExceeded,
    TooLarge,
    Unsupported,
    ModelNotFound,
    ProviderRefusedKey,
)  # another model may take the request


class RetryPolicy(NamedTuple):
    max_attempts: int = 1
    delay_ms: int = 500
    backoff: Backoff = "exponential"
    timeout_ms: int = 0  # until the first byte; 0: no limit
    is_timeout_free: bool = False  # an attempt that the timeout ends costs nothing

    def delays_s(self) -> Iterator[float]:
        """Before the second attempt, the third, …; at most MAX_WAIT_S each."""
        for number in range(self.max_attempts - 1):
            factor = {"constant": 1, "linear": number + 1, "exponential": 1 << number}[self.backoff]
            yield min(MAX_WAIT_S, self.delay_ms * factor / 1000)


def is_transient(error: EmberlineError) -> bool:
    """True if the same request may succeed a little later."""
    return isinstance(error, _TRANSIENT)


def wait_s(error: EmberlineError, delay_s: float) -> float | None:
    """Return the delay before the next attempt: the provider's, or the schedule's if that is longer. Returns None if
    the delay is too long to wait."""
    asked_s = error.retry_after_s or 0.0 if isinstance(error, Overloaded) else 0.0
    return None if asked_s > MAX_WAIT_S else max(asked_s, delay_s)


def falls_back(error: EmberlineError) -> bool:
    """True if another model may do better. A request that is wrong, or that the caller may not make, is refused."""
    return is_transient(error) or isinstance(error, _OF_THE_MODEL)


def is_providers_fault(error: EmberlineError) -> bool:
    """True if a circuit breaker counts the error as its provider's fault. A rate limit is none."""
    return isinstance(error, Unavailable | FirstByteTimeout)
