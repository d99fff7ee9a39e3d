"""Every error that a request can end with.

An error has a `kind` (stable, crosses process borders), a message that its reader can act on, and the name of the
offending field where there is one. Only the APIs map a kind to a status and an error code.
"""

from typing import ClassVar

import msgspec

from emberline.protocol.rate_limits import RateLimits


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error on the wire."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    rate_limits: RateLimits | None = None  # of the caller, where its request was refused for them


class EmberlineError(Exception):
    """Base of every error that is reported to a caller."""

    kind: ClassVar[str] = "internal"
    caused_by_request: ClassVar[bool] = False  # a request that fails with it pays for what was computed

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        rate_limits: RateLimits | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.rate_limits = rate_limits

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.kind, self.message, self.param, self.retry_after_s, self.rate_limits)


class Internal(EmberlineError):
    """A bug or failure of ours: details go to the log, not into the message."""

    kind = "internal"


class BadInput(EmberlineError):
    kind = "bad_input"
    caused_by_request = True


class Unsupported(BadInput):
    """A field of the API that is not implemented: named in the error, never ignored."""

    kind = "unsupported"


class TooLarge(EmberlineError):
    kind = "too_large"
    caused_by_request = True


class ContextExceeded(EmberlineError):
    kind = "context_exceeded"
    caused_by_request = True


class ModelNotFound(EmberlineError):
    kind = "model_not_found"


class MalformedModelId(EmberlineError):
    kind = "malformed_model_id"


class Unauthorized(EmberlineError):
    kind = "unauthorized"


class Forbidden(EmberlineError):
    kind = "forbidden"


class NotFound(EmberlineError):
    kind = "not_found"


class Conflict(EmberlineError):
    """Not possible in the current state, for example because a job is still running."""

    kind = "conflict"


class NoSuchFile(NotFound):
    """No uploaded file of that id, of the caller's account."""

    kind = "file_not_found"


class NoSuchStream(NotFound):
    """No event log of that id, of the caller's account."""

    kind = "stream_not_found"


class IdempotencyMismatch(EmberlineError):
    """The idempotency key was already used with another request."""

    kind = "idempotency_mismatch"


class Overloaded(EmberlineError):
    """Rejected by admission control; `retry_after_s` says when to retry."""

    kind = "overloaded"


class RateLimited(EmberlineError):
    """Beyond a limit on requests or tokens a minute, or on concurrent requests, of the caller's key or account."""

    kind = "rate_limited"


class BudgetExceeded(EmberlineError):
    """The request could cost more than is left of a budget, which `retry_after_s` may reset. None: it never does."""

    kind = "budget_exceeded"


class BudgetReserved(BudgetExceeded):
    """The same, but only while other requests run: what they reserved and do not use becomes free again."""

    kind = "budget_reserved"


class Unavailable(EmberlineError):
    """No engine can serve the request now: starting, draining or lost."""

    kind = "unavailable"


class EngineLost(Unavailable):
    """The engine failed while the request was running on it. Reported to clients as `unavailable`."""

    def __init__(self, engine: str, what: str = "went away") -> None:
        super().__init__(f"engine {engine} {what}", retry_after_s=1)
        self.engine = engine


class WorkerRemoved(Unavailable):
    """The worker of a route was removed before the request was sent to it, so that another one can take it."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"worker {worker} was removed", retry_after_s=1)
        self.worker = worker


class PredictionFailed(EmberlineError):
    """A predictor that a user brought along failed or crashed. The message is its own: it may be the input."""

    kind = "prediction_failed"


class DeadlineExceeded(EmberlineError):
    kind = "deadline_exceeded"
    caused_by_request = True


class Cancelled(EmberlineError):
    kind = "cancelled"
    caused_by_request = True


_BY_KIND: dict[str, type[EmberlineError]] = {
    cls.kind: cls
    for cls in (
        *(Internal, BadInput, Unsupported, TooLarge, ContextExceeded, ModelNotFound, MalformedModelId, Unauthorized),
        *(Forbidden, NotFound, Conflict, IdempotencyMismatch, Overloaded, Unavailable, DeadlineExceeded, Cancelled),
        *(RateLimited, BudgetExceeded, BudgetReserved, NoSuchFile, NoSuchStream, PredictionFailed),
    )
}


def from_info(info: ErrorInfo) -> EmberlineError:
    """The exception that an `ErrorInfo` describes; an unknown kind becomes `Internal`."""
    kind = _BY_KIND.get(info.kind, Internal)
    return kind(info.message, param=info.param, retry_after_s=info.retry_after_s, rate_limits=info.rate_limits)
