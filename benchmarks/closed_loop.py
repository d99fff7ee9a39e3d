"""A closed-loop HTTP load generator over keep-alive connections.

It shares the machine with what it measures, so it only checks the status and end of each response and counts them.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

_END = b"0\r\n\r\n"  # of a chunked body


class LoadFailed(RuntimeError):
    """A response was wrong or did not arrive."""


@dataclass(frozen=True, slots=True)
class Result:
    n_requests: int
    took_s: float
    p50_ms: float
    p99_ms: float

    @property
    def per_s(self) -> float:
        return self.n_requests / self.took_s


class _Client(asyncio.Protocol):
    def __init__(self) -> None:
        self._arrived = bytearray()
        self._waiter: asyncio.Future[bytes] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        if self._arrived.endswith(_END) and self._waiter is not None:
            answer, self._arrived = bytes(self._arrived), bytearray()
            self._waiter.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(LoadFailed(f"connection lost: {exc}; so far: {bytes(self._arrived[:500])!r}"))

    async def ask(self, request: bytes) -> bytes:
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._waiter


def request(port: int, body: bytes, headers: str = "") -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n{headers}"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def run(port: int, bodies: Sequence[bytes], connections: int, headers: str = "") -> Result:
    """Send every body once, over so many connections."""
    waiting: Iterator[bytes] = iter([request(port, body, headers) for body in bodies])
    took: list[float] = []
    loop = asyncio.get_running_loop()

    async def follow() -> None:
        _, client = await loop.create_connection(_Client, "127.0.0.1", port)
        for asked in waiting:
            sent_s = time.perf_counter()
            answer = await client.ask(asked)
            took.append(time.perf_counter() - sent_s)
            if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer[-64:]:
                raise LoadFailed(f"not a whole stream: {answer[:500]!r}")
        client.transport.close()

    began_s = time.perf_counter()
    await asyncio.gather(*(follow() for _ in range(connections)))
    took_s = time.perf_counter() - began_s
    took.sort()
    return Result(len(took), took_s, median(took) * 1e3, took[int(len(took) * 0.99)] * 1e3)
