"""What a status other than 200 means, and whose fault it is."""

import re
from typing import Any, NoReturn

import msgspec

from emberline.balancer.http.exchange import Broken, Exchange
from emberline.balancer.http.upstream import Upstream
from emberline.protocol.errors import BadInput, ContextExceeded, Overloaded, TooLarge

MAX_ERROR_BYTES = 64 << 10
_MOST_CHARS = 1000
_CONTEXT = re.compile(r"maximum context length|context[ _]length|max_model_len|longer than the model", re.IGNORECASE)


class Busy(Overloaded):
    """The server has no room now: another may have; nobody is to blame."""


async def check_status(server: Upstream, exchange: Exchange) -> NoReturn:
    try:
        body = await exchange.read(MAX_ERROR_BYTES)
    except Broken as error:
        raise server.lost(str(error)) from error
    finally:
        exchange.close()
    status = exchange.status
    message, param = _said(body)
    if status == 429:
        raise Busy(message or f"{server.name} has no room", retry_after_s=_seconds(exchange.headers.get("retry-after")))
    if status == 413:
        raise TooLarge(message or "the request is too large for the server")
    if status in (400, 422):
        kind = ContextExceeded if _CONTEXT.search(message) else BadInput
        raise kind(message or f"the server answered {status}", param=param)
    if status in (401, 403):
        raise server.lost("does not accept the key that is configured for it")
    raise server.lost(f"answered {status}{f': {message[:200]}' if message else ''}")


def _said(body: bytes) -> tuple[str, str | None]:
    """The message of an error as OpenAI's kin write it, and the field at fault; neither is trusted to be short."""
    try:
        answer: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "", None
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return str(error)[:_MOST_CHARS], None
    message = error.get("message") or error.get("detail") or ""
    param = error.get("param")
    return str(message)[:_MOST_CHARS], param[:64] if isinstance(param, str) else None


def _seconds(retry_after: str | None) -> float:
    try:
        return min(600.0, max(1.0, float(retry_after or 1)))
    except ValueError:
        return 1.0
