"""Errors of a gateway. The APIs give each kind of error the code that Cloudflare's AI Gateway has for it."""

import re

from emberline.protocol.errors import BadInput, EmberlineError

MAX_MESSAGE_CHARS = 1000
# What looks like a credential: a provider may repeat the one that it refuses.
_SECRET = re.compile(
    r"(?i)\b(?:bearer\s+\S{8,}|AIza[\w-]{16,}|(?:sk|pk|rk|gsk|xai|key|ember|whsec|cf|hf|token)[-_][\w-]{8,})"
)


def redact(message: str) -> str:
    """The message without what looks like a credential, and not longer than MAX_MESSAGE_CHARS."""
    return _SECRET.sub("[redacted]", message[: 2 * MAX_MESSAGE_CHARS])[:MAX_MESSAGE_CHARS]


class GatewayNotFound(EmberlineError):
    kind = "gateway_not_found"  # 2001


class AttemptsFailed(EmberlineError):
    """Every attempt has failed; the message says how the last one did."""

    kind = "provider_failed"  # 2005


class AttemptsRefused(AttemptsFailed):
    """The same, and the last attempt was refused for now: `retry_after_s` says when to ask again."""

    kind = "provider_busy"  # 2005


class InvalidProvider(BadInput):
    kind = "invalid_provider"  # 2008


class GatewayUnauthorized(EmberlineError):
    kind = "gateway_unauthorized"  # 2009


class FirstByteTimeout(EmberlineError):
    """No byte of a reply within the request timeout."""

    kind = "provider_timeout"  # 2014


class PromptBlocked(EmberlineError):
    kind = "prompt_blocked"  # 2016


class ResponseBlocked(EmberlineError):
    kind = "response_blocked"  # 2017
