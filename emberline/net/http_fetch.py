"""Fetches a file that a client names by its URL: every address is checked, redirects too, within bytes and time.

The name is resolved once for each request, and the connection is made to an address that was checked. A redirect is a
new URL of a stranger: it passes the same checks.
"""

import asyncio
import ssl
from typing import NamedTuple
from urllib.parse import urljoin

from emberline.net.egress_policy import EgressPolicy, Target, parse_target
from emberline.net.http_client import (
    Address,
    Connection,
    ConnectionFailed,
    Exchange,
    HeadTooLarge,
    MalformedReply,
    dial,
)
from emberline.protocol.errors import BadInput
from emberline.protocol.sizes import format_limit

MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_HEAD = "GET {path} HTTP/1.1\r\nhost: {host}\r\nuser-agent: emberline\r\naccept: {accept}\r\nconnection: close\r\n\r\n"


class FetchLimits(NamedTuple):
    """Bounds of one fetch, redirects included."""

    max_bytes: int
    time_s: float


async def fetch(
    url: str, egress: EgressPolicy, limits: FetchLimits, accept: str = "*/*", tls: ssl.SSLContext | None = None
) -> bytes:
    """Return the body behind a URL. Raises BadInput, which says what is wrong with the URL or its server.

    `tls` says which certificates are trusted, by default those of the system."""
    try:
        async with asyncio.timeout(limits.time_s):
            for _ in range(MAX_REDIRECTS + 1):
                target = parse_target(url)
                found = await _get(target, await egress.addresses(target), limits.max_bytes, accept, tls)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found.location)
    except TimeoutError:
        raise BadInput(f"the URL's server has not sent the file within {limits.time_s:g} s", param="url") from None
    raise BadInput(f"the URL redirects more than {MAX_REDIRECTS} times", param="url")


class _Redirect(NamedTuple):
    location: str


async def _get(
    target: Target, addresses: list[str], max_bytes: int, accept: str, tls: ssl.SSLContext | None
) -> bytes | _Redirect:
    address = Address(target.host, target.port, target.secure, "")
    try:
        connection = await dial(lambda: Connection(_close, lambda connection: None), address, addresses, tls)
    except ConnectionFailed as error:
        reason = str(error).removeprefix("no connection: ")
        raise BadInput(f"{target.host} cannot be reached: {reason}", param="url") from None
    head = _HEAD.format(path=target.path, host=target.authority, accept=accept).encode("ascii")
    exchange = connection.begin(head, b"")
    try:
        await exchange.head
        return await _read(exchange, target, max_bytes)
    except (MalformedReply, HeadTooLarge):
        raise BadInput(f"what {target.host} answers is not HTTP", param="url") from None
    except ConnectionFailed:
        raise BadInput(f"{target.host} closed the connection before its answer was complete", param="url") from None
    finally:
        exchange.close()


async def _read(exchange: Exchange, target: Target, max_bytes: int) -> bytes | _Redirect:
    if exchange.status in _REDIRECTS and (location := exchange.headers.get("location")):
        return _Redirect(location)
    if exchange.status != 200:
        raise BadInput(f"{target.host} answers with status {exchange.status} instead of a file", param="url")
    announced = exchange.headers.get("content-length", "")
    pieces: list[bytes] = []
    n_bytes = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
    if n_bytes <= max_bytes:
        n_bytes = 0
        while n_bytes <= max_bytes and (piece := await exchange.piece()):
            pieces.append(piece)
            n_bytes += len(piece)
    if n_bytes > max_bytes:
        raise BadInput(f"the file at {target.host} is larger than {format_limit(max_bytes)}", param="url")
    return b"".join(pieces)


def _close(connection: Connection) -> None:
    connection.abort("its one request has ended")
