"""One HTTP POST to a checked address, for webhooks: no redirects, no kept connection; only the reply's head is used."""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from emberline.net.egress_policy import Target
from emberline.net.http_client import (
    Address,
    Connection,
    ConnectionFailed,
    Exchange,
    HeadTooLarge,
    MalformedReply,
    dial,
    retry_after_s,
)

MAX_BODY_BYTES = 64 << 10  # read and discarded, so that the receiver can finish its response
BODY_S = 1.0  # for the body to arrive


class PostFailed(Exception):
    """There was no response; the text says why, for the delivery's log."""


class PostResponse(NamedTuple):
    """Status of a response, and the seconds that its Retry-After asks to wait."""

    status: int
    retry_after_s: float | None = None


async def post(
    target: Target,
    addresses: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    tls: ssl.SSLContext | None = None,
    body_s: float = BODY_S,
) -> PostResponse:
    """Send and return the final response. The caller sets the timeout; cancelling closes the connection.

    `tls` says which certificates are trusted, by default those of the system; `body_s` limits the time for the body."""
    address = Address(target.host, target.port, target.secure, "")
    try:
        connection = await dial(lambda: Connection(_close, lambda connection: None), address, addresses, tls)
    except ConnectionFailed as error:
        raise PostFailed(f"cannot connect: {str(error).removeprefix('no connection: ')}") from None
    exchange = connection.begin(_head(target, headers, len(body)), body)
    try:
        await exchange.head
        await _discard_body(exchange, body_s)
        return PostResponse(exchange.status, retry_after_s(exchange.headers))
    except MalformedReply:
        raise PostFailed("the answer is not HTTP/1.1") from None
    except HeadTooLarge:
        raise PostFailed("the answer's head is too large") from None
    except ConnectionFailed:
        raise PostFailed("the connection closed before an answer came") from None
    finally:
        exchange.close()


def _close(connection: Connection) -> None:
    connection.abort("its one request has ended")


async def _discard_body(exchange: Exchange, limit_s: float) -> None:
    """Read the body to its end, or for a moment. The status counts, even if the body is cut off."""
    with contextlib.suppress(ConnectionFailed, TimeoutError):
        async with asyncio.timeout(limit_s):
            await exchange.read(MAX_BODY_BYTES)


def _head(target: Target, headers: Mapping[str, str], n_bytes: int) -> bytes:
    fields = {"host": target.authority, **headers, "content-length": str(n_bytes), "connection": "close"}
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    assert not any("\r" in line or "\n" in line for line in lines), "header injection"
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n"
