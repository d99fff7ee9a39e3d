"""Frames over asyncio transports: the base of the connections to engines, and between HTTP workers and core."""

import asyncio
import logging
import random
import socket
import ssl
import struct
from collections.abc import Iterator
from typing import TypeVar, cast

import msgspec

from emberline.protocol.frames import FrameBuffer, FrameError, detect_dead_peer, encode

_TCP_INFO_BYTES, _RTT_OFFSET = 104, 68  # of Linux's struct tcp_info, and of its tcpi_rtt

log = logging.getLogger("emberline.balancer")


class Link(asyncio.Protocol):
    """One connection, closed when the peer violates the protocol. Subclasses implement the `on_` methods."""

    def __init__(self, peer: str = "another process") -> None:
        """`peer` names the other side in log messages."""
        self.peer = peer
        self._transport: asyncio.Transport | None = None
        self._buffer = FrameBuffer()
        self._reason = "the other side closed the connection"
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_open(self) -> None: ...

    def on_frame(self, payload: bytes) -> None: ...

    def on_close(self, reason: str) -> None: ...

    def send(self, message: msgspec.Struct) -> None:
        if self._transport is not None:
            self._transport.write(encode(message))

    def round_trip_s(self) -> float:
        """The network's round-trip time as the kernel measures it; 0 on this machine, or if it is not known."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is None or sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return 0.0
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return float(struct.unpack_from("=I", info, _RTT_OFFSET)[0]) / 1e6 if len(info) == _TCP_INFO_BYTES else 0.0

    def drop(self, reason: str) -> None:
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no asyncio.Transport by type
        detect_dead_peer(transport.get_extra_info("socket"))
        self.on_open()

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._buffer.feed(data):
                self.on_frame(payload)
        except FrameError as error:
            log.error("connection to %s closed: %s", self.peer, error)
            self.drop("the other side violated the protocol")
        except Exception:
            log.exception("a frame of %s could not be handled", self.peer)
            self.drop("a frame of the other side could not be handled")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.on_close(self._reason)
        if not self.closed.done():
            self.closed.set_result(None)


LinkT = TypeVar("LinkT", bound=Link)


async def dial(
    link: LinkT, address: tuple[str | None, str, int], tls_host: str = "", tls: ssl.SSLContext | None = None
) -> LinkT:
    """Connect `link` to the path of a Unix socket, or to a host and port if the path is None.

    A host with the certificate `tls_host` is dialled by TLS; `tls` then has this process's own certificate."""
    loop = asyncio.get_running_loop()
    path, host, port = address
    if path is not None:
        await loop.create_unix_connection(lambda: link, path)
    elif tls_host:
        if tls is None:
            raise OSError("it uses TLS, and this core has no certificate")
        await loop.create_connection(lambda: link, host, port, ssl=tls, server_hostname=tls_host)
    else:
        await loop.create_connection(lambda: link, host, port)
    return link


def retry_delays(first_s: float, last_s: float) -> Iterator[float]:
    """Seconds before each reconnect: exponential backoff with jitter, without end."""
    delay_s = first_s
    while True:
        yield delay_s * random.uniform(0.5, 1.0)
        delay_s = min(last_s, delay_s * 2)
