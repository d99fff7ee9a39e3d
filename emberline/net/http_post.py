"""One HTTP POST to a checked address: no redirects, no connection pool; of the response only the head is used."""

import asyncio
import contextlib
import math
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import cache
from typing import NamedTuple

from emberline.net.egress_policy import Target

CONNECT_S = 5.0  # for each of the target's addresses
MAX_HEAD_BYTES = 32 << 10
MAX_BODY_BYTES = 64 << 10  # read and discarded, so that the receiver can finish its response
BODY_S = 1.0
_MAX_INTERIM = 8
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: [^\r\n]*)?")


class PostFailed(Exception):
    """There was no response; the text says why, for the delivery's log."""


class PostResponse(NamedTuple):
    status: int
    retry_after_s: float | None = None


async def post(
    target: Target,
    addresses: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    tls: ssl.SSLContext | None = None,
) -> PostResponse:
    """Send and return the final response. The caller sets the timeout; cancelling closes the connection.

    `tls` says which certificates are trusted; by default those of the system."""
    reader, writer = await _connect(target, addresses, tls)
    try:
        writer.write(_head(target, headers, len(body)) + body)
        await writer.drain()
        answer = await _read_head(reader)
        await _drain_body(reader)
        return answer
    except asyncio.IncompleteReadError:
        raise PostFailed("the connection closed before an answer came") from None
    except asyncio.LimitOverrunError:
        raise PostFailed(f"the answer's head is longer than {MAX_HEAD_BYTES >> 10} KiB") from None
    except OSError as error:
        raise PostFailed(_reason(error)) from None
    finally:
        writer.close()


async def _drain_body(reader: asyncio.StreamReader) -> None:
    """The status counts, even if the body after it is cut off."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(BODY_S):
            await reader.readexactly(MAX_BODY_BYTES)


async def _connect(
    target: Target, addresses: Sequence[str], tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that accepts; the certificate is checked against the target's host."""
    problem = "no address"
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(
                    address,
                    target.port,
                    limit=MAX_HEAD_BYTES,
                    ssl=(tls or _system_tls()) if target.secure else None,
                    server_hostname=target.host if target.secure else None,
                )
        except TimeoutError:
            problem = f"no connection within {CONNECT_S:g} s"
        except OSError as error:
            problem = _reason(error)
    raise PostFailed(f"cannot connect: {problem}")


def _head(target: Target, headers: Mapping[str, str], n_bytes: int) -> bytes:
    fields = {"host": target.authority, **headers, "content-length": str(n_bytes), "connection": "close"}
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    assert not any("\r" in line or "\n" in line for line in lines), "header injection"
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n"


async def _read_head(reader: asyncio.StreamReader) -> PostResponse:
    for _ in range(_MAX_INTERIM):
        status_line, *fields = (await reader.readuntil(b"\r\n\r\n")).rstrip(b"\r\n").split(b"\r\n")
        found = _STATUS.fullmatch(status_line)
        if found is None:
            raise PostFailed("the answer is not HTTP/1.1")
        status = int(found[1])
        if status >= 200:
            return PostResponse(status, _retry_after_s(fields))
    raise PostFailed("interim answers without an end")


def _retry_after_s(fields: Sequence[bytes]) -> float | None:
    """The Retry-After header, seconds or a date, in seconds; None where there is no valid one."""
    for field in fields:
        name, _, value = field.partition(b":")
        if name.lower() != b"retry-after":
            continue
        text = value.strip().decode("latin-1")
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            seconds = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
            return max(0.0, seconds) if math.isfinite(seconds) else None
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or 'handshake'}"
    return error.strerror or type(error).__name__


@cache
def _system_tls() -> ssl.SSLContext:
    return ssl.create_default_context()
