"""A webhook receiver on loopback with one scripted response per connection."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

HANG, CLOSE, CUT, GARBAGE, ENDLESS = "hang", "close", "cut", "garbage", "endless"
Instruction = int | str | bytes


class Got(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    def __init__(self, instructions: Sequence[Instruction], then: Instruction) -> None:
        self.got: list[Got] = []
        self.arrived = asyncio.Condition()
        self.port = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self._instructions = list(instructions)
        self._then = then

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [got.headers["webhook-id"] for got in self.got]

    async def until(self, n: int, timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s), self.arrived:
            await self.arrived.wait_for(lambda: len(self.got) >= n)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers["content-length"]))
            async with self.arrived:
                self.got.append(Got(head[0].split()[1], headers, body))
                self.arrived.notify_all()
            await self._answer(self._instructions.pop(0) if self._instructions else self._then, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    def abort(self) -> None:
        """End the connections of deliveries that hang."""
        for writer in self._connections:
            writer.transport.abort()

    async def _answer(self, what: Instruction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if what == HANG:
            await reader.read()  # until the other side gives up
        elif what == CUT:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nonly this")
        elif what == GARBAGE:
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        elif what == ENDLESS:
            writer.write(b"HTTP/1.1 200 OK\r\n" + b"x-more: and more\r\n" * 10_000)
        elif isinstance(what, bytes):
            writer.write(what)
        elif isinstance(what, int):
            writer.write(b"HTTP/1.1 %d Said\r\ncontent-length: 2\r\n\r\nok" % what)
        else:
            assert what == CLOSE
        if not writer.is_closing():
            await writer.drain()


@asynccontextmanager
async def receiving(*instructions: Instruction, then: Instruction = 200) -> AsyncIterator[Receiver]:
    """After the scripted responses, every further connection gets `then`."""
    receiver = Receiver(instructions, then)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        receiver.abort()
