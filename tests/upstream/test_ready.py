"""A service is ready once its upstream servers were probed: a request right after that reaches one that is up."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from emberline.balancer.endpoint import Endpoint
from emberline.service import Service, open_service
from emberline.upstream.models import discover
from emberline.upstream.servers.client import UpstreamConfig

MODEL = "standin"
PATIENCE_S = 60.0


class SlowServer:
    """Lists its model, after it is let go."""

    def __init__(self) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listed = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.asked.set()
                await self.go.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(listed), listed))
        writer.close()


@asynccontextmanager
async def service_before(url: str, folder: Path) -> AsyncIterator[Service]:
    endpoint = Endpoint(name="up", address=url, kind="openai", models=(MODEL,))
    service = await open_service([], data_dir=folder, upstreams=await discover([UpstreamConfig(endpoint=endpoint)]))
    try:
        yield service
    finally:
        await service.close()


async def test_ready_waits_for_the_first_probe(tmp_path: Path) -> None:
    slow = SlowServer()
    async with await asyncio.start_server(slow.answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with service_before(f"http://127.0.0.1:{port}", tmp_path) as service:
            ready = asyncio.create_task(service.ready(PATIENCE_S))
            async with asyncio.timeout(PATIENCE_S):
                await slow.asked.wait()
            assert not ready.done()
            slow.go.set()
            assert await ready
            assert service.upstream.clients["up"].connected


async def test_a_server_that_is_down_holds_nothing_up(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        async with service_before(f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path) as service:
            assert await service.ready(PATIENCE_S)
            assert not service.upstream.clients["up"].connected
