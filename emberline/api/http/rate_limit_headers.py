"""The state of a caller's rate limits as response headers, as clients of each API read them."""

import math
import time
from datetime import UTC, datetime

from emberline.api.http.errors import Dialect, HeaderList
from emberline.protocol.rate_limits import LimitState, RateLimits


def rate_limit_headers(limits: RateLimits, dialect: Dialect) -> HeaderList:
    """`x-ratelimit-*` as in OpenAI's API; in the Anthropic API `anthropic-ratelimit-*`."""
    is_anthropic = dialect in (Dialect.ANTHROPIC, Dialect.ANTHROPIC_ENVELOPED)
    headers: HeaderList = []
    for name, state in ((b"requests", limits.requests), (b"tokens", limits.tokens)):
        if state is None:
            continue
        reset = _when(state) if is_anthropic else _wait(state)
        values = {b"limit": b"%d" % state.limit, b"remaining": b"%d" % state.remaining, b"reset": reset}
        for field, value in values.items():
            ours = b"x-ratelimit-%b-%b" % (field, name)
            headers.append((b"anthropic-ratelimit-%b-%b" % (name, field) if is_anthropic else ours, value))
    return headers


def _when(state: LimitState) -> bytes:
    """RFC 3339, rounded up to the second."""
    at = datetime.fromtimestamp(math.ceil(time.time() + state.reset_s), UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ").encode()


def _wait(state: LimitState) -> bytes:
    """A duration as OpenAI writes it: 8ms, 1.5s, 1m30s."""
    if state.reset_s < 1:
        return b"%dms" % math.ceil(state.reset_s * 1000)
    minutes, tenths = divmod(math.ceil(state.reset_s * 10), 600)
    seconds = f"{tenths / 10:g}s"
    return (f"{minutes}m{seconds}" if minutes else seconds).encode()
