"""Errors for a provider's failures: they say who failed and what to do, without the key that was used."""

from typing import Any, NoReturn

import msgspec

from emberline.net.http_client import retry_after_s
from emberline.protocol.errors import BadInput, ContextExceeded, EngineLost, Forbidden, ModelNotFound, TooLarge
from emberline.upstream.servers.attempt import CONTEXT_EXCEEDED, UpstreamBusy

MAX_MESSAGE_CHARS = 1000
MAX_RETRY_AFTER_S = 86_400.0
DEFAULT_RETRY_AFTER_S = 1.0
_BUSY = (429, 529)  # Anthropic's 529: overloaded
_TIMEOUT = (408, 504)


class ProviderFailed(EngineLost):
    """The provider is to blame: it cannot be reached, or answers what nobody can read."""

    def __init__(self, provider: str, what: str) -> None:
        super().__init__(provider, what)
        self.message = f"provider {provider} {what}"
        self.args = (self.message,)


class ProviderTimeout(ProviderFailed):
    """The provider did not answer in time."""


class ProviderRefusedKey(Forbidden):
    """Nobody's fault but the key's: another account's may work."""


def raise_status(provider: str, status: int, headers: dict[str, str], body: bytes, key: str) -> NoReturn:
    """The error that a status other than 200 stands for. All families send `error` objects with a message."""
    message, param, details = _error_of(body, key)
    said = f": {message}" if message else ""
    if status in _BUSY:
        retry_after_s = retry_after(headers, details)
        raise UpstreamBusy(f"provider {provider} has no room{said}", retry_after_s=retry_after_s)
    if status == 413:
        raise TooLarge(f"the request is too large for provider {provider}{said}")
    if status in (400, 422):
        if "API_KEY_INVALID" in body.decode("utf-8", "replace"):  # Gemini's answer to a wrong key
            raise ProviderRefusedKey(_refused(provider))
        kind = ContextExceeded if CONTEXT_EXCEEDED.search(message) else BadInput
        raise kind(message or f"provider {provider} answered {status}", param=param)
    if status in (401, 403):
        raise ProviderRefusedKey(_refused(provider) + (f" ({message})" if status == 403 and message else ""))
    if status == 402:
        raise ProviderRefusedKey(f"provider {provider} wants to be paid{said}")
    if status == 404:
        raise ModelNotFound(f"provider {provider} has no such model{said}", param="model")
    failure = ProviderTimeout if status in _TIMEOUT else ProviderFailed
    if 300 <= status < 400:
        raise failure(provider, f"answered {status}, a redirect, which is not followed: correct its url")
    raise failure(provider, f"answered {status}{said[:300]}")


def _refused(provider: str) -> str:
    return f"provider {provider} does not accept the key that is stored for it: `emberline provider add {provider}`"


def hide_key(text: str, key: str) -> str:
    return text.replace(key, "…") if key else text


def retry_after(headers: dict[str, str], details: Any = None) -> float:
    """Return the provider's delay in seconds: `retry-after-ms`, `Retry-After` (seconds or a date), or Google's
    RetryInfo."""
    for found in (_milliseconds(headers), retry_after_s(headers), _retry_info(details)):
        if found is not None and 0 <= found < float("inf"):
            return min(MAX_RETRY_AFTER_S, max(DEFAULT_RETRY_AFTER_S, found))
    return DEFAULT_RETRY_AFTER_S


def _milliseconds(headers: dict[str, str]) -> float | None:
    value = _number(headers.get("retry-after-ms", ""))
    return None if value is None else value / 1000


def _retry_info(details: Any) -> float | None:
    for entry in details if isinstance(details, list) else ():
        if isinstance(entry, dict) and isinstance(delay := entry.get("retryDelay"), str):
            return _number(delay.removesuffix("s"))
    return None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value else None


def _error_of(body: bytes, key: str) -> tuple[str, str | None, Any]:
    """Message, `param` and Google's `details` of an error object in any family's form; of anything else nothing. The
    key is replaced before anything is cut off, which would leave a part of it."""
    try:
        answer: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "", None, None
    if isinstance(answer, list) and answer:  # Gemini sends a list of one where a stream was asked for
        answer = answer[0]
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return hide_key(str(error), key)[:MAX_MESSAGE_CHARS], None, None
    message = error.get("message") or error.get("detail") or ""
    param = error.get("param")
    short = hide_key(param, key)[:64] if isinstance(param, str) else None
    return hide_key(str(message), key)[:MAX_MESSAGE_CHARS], short, error.get("details")
