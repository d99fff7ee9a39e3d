"""Everything that can go wrong with a request, in one place.

An error has a `kind` (stable, crosses process borders), a message its reader can act on, and, where one field is to
blame, that field's name. Doors translate the kind into their dialect's status and code; nothing else does.
"""

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error on the wire."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class EmberlineError(Exception):
    """The base of every error that a caller is told about."""

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.kind, self.message, self.param, self.retry_after_s)


class Internal(EmberlineError):
    """Our fault: the message says nothing about the inside, the log does."""

    kind = "internal"


class BadInput(EmberlineError):
    kind = "bad_input"


class Unsupported(BadInput):
    """A field that exists in the dialect and is not built yet: named, never ignored."""

    kind = "unsupported"


class TooLarge(EmberlineError):
    kind = "too_large"


class ContextExceeded(EmberlineError):
    kind = "context_exceeded"


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
    """Not while things are as they are: it is still running, or not yet ended."""

    kind = "conflict"


class IdempotencyMismatch(EmberlineError):
    """The key was used before, for something else."""

    kind = "idempotency_mismatch"


class Overloaded(EmberlineError):
    """No room now; `retry_after_s` says when to come back."""

    kind = "overloaded"


class Unavailable(EmberlineError):
    """Tokens cannot move now: the engine is starting, draining or gone."""

    kind = "unavailable"


class EngineLost(Unavailable):
    """The engine died with the request on it. To a client it is as unavailable as any other."""

    def __init__(self, engine: str, what: str = "went away") -> None:
        super().__init__(f"engine {engine} {what}", retry_after_s=1)
        self.engine = engine


class DeadlineExceeded(EmberlineError):
    kind = "deadline_exceeded"


class Cancelled(EmberlineError):
    kind = "cancelled"


_BY_KIND: dict[str, type[EmberlineError]] = {
    cls.kind: cls
    for cls in (
        Internal,
        BadInput,
        Unsupported,
        TooLarge,
        ContextExceeded,
        ModelNotFound,
        MalformedModelId,
        Unauthorized,
        Forbidden,
        NotFound,
        Conflict,
        IdempotencyMismatch,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
    )
}


def from_info(info: ErrorInfo) -> EmberlineError:
    """The exception an `ErrorInfo` was made from; an unknown kind is `Internal`."""
    return _BY_KIND.get(info.kind, Internal)(info.message, param=info.param, retry_after_s=info.retry_after_s)
