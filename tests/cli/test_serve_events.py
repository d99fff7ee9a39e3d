"""Webhook events in a whole server: the core delivers them, every HTTP worker streams them, streams end at shutdown."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from standardwebhooks import Webhook

from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.config import resolve
from emberline.server.address import ServerAddress
from emberline.server.core_process import serve
from emberline.server.listener import bind
from emberline.service.service_factory import DATABASE
from emberline.store import open_store
from tests.jobs.webhooks.helpers import emit_event
from tests.jobs.webhooks.receiver import receiving
from tests.standin import standin_worker

DELIVERED = 'emberline_webhook_deliveries_total{outcome="delivered"} 1.0'
N_STREAMS = 8  # enough that each of two HTTP workers has some


@dataclass
class StandinServer:
    """A server in this process, its HTTP workers and stand-in engines in processes of their own."""

    operator: ServerAddress
    home: Path
    stopping: asyncio.Event
    serving: "asyncio.Task[None]"

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(asyncio.shield(self.serving), 120)


@asynccontextmanager
async def standin_server(home: Path, model: Path, flags: Mapping[str, Any]) -> AsyncIterator[StandinServer]:
    """Serve `model` under the name smollm2: the stand-in engine says the same, and a small model loads faster."""
    (home / "smollm2").symlink_to(model)
    always = {"server.port": 0, "server.drain_timeout_s": 60, "webhooks.allowed_networks": "127.0.0.0/8"}
    config = resolve({**always, **flags}, {}, home)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()

    def announce(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address)

    with bind(config.server) as listener:
        entry = ModelStore(home).resolve(str(home / "smollm2"))
        serving = asyncio.create_task(serve(config, [entry], listener, announce, stop, make_spec=standin_worker()))
        try:
            await asyncio.wait([serving, ready], timeout=120, return_when=asyncio.FIRST_COMPLETED)
            assert ready.done(), serving
            secret = ServerAddress.of(config).secret  # read after the start: the server has created it
            operator = ServerAddress(ready.result().host, ready.result().port, None, secret)
            yield StandinServer(operator, home, stop, serving)
        finally:
            stop.set()
            await asyncio.wait_for(serving, 120)


async def read_stream(url: str, headers: Mapping[str, str], received: "asyncio.Queue[str]") -> None:
    """Read the stream of events until the server ends it."""
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("GET", url, headers={**headers, "accept": "text/event-stream"}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith(("retry", "data")):
                received.put_nowait(line)


@asynccontextmanager
async def open_streams(server: StandinServer) -> AsyncIterator[tuple["list[asyncio.Task[None]]", "asyncio.Queue[str]"]]:
    """Streams of events over N_STREAMS connections, and the lines that they receive. Streams left open are closed."""
    url, received = f"{server.operator.url}/v1/events", asyncio.Queue[str]()
    streams = [asyncio.create_task(read_stream(url, credential(server), received)) for _ in range(N_STREAMS)]
    try:
        async with asyncio.timeout(60):
            assert {await received.get() for _ in streams} == {"retry: 1000"}
        yield streams, received
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def credential(server: StandinServer) -> dict[str, str]:
    return {"authorization": f"Bearer {server.operator.credential}"}


async def check_events(server: StandinServer) -> None:
    """An event reaches the webhook once and every stream."""
    url = server.operator.url
    async with receiving() as receiver, httpx.AsyncClient(timeout=60, headers=credential(server)) as client:
        made = (await client.post(f"{url}/v1/webhook_endpoints", json={"url": receiver.url})).json()
        async with open_streams(server) as (streams, received), asyncio.timeout(60):
            queue = await open_store(server.home / DATABASE)
            await emit_event(queue, "batch_1", account="local")
            assert len({await received.get() for _ in streams}) == 1
            await receiver.until(1)
        Webhook(made["secret"]).verify(receiver.got[0].body, receiver.got[0].headers)
        await queue.close()
        async with asyncio.timeout(60):  # counted once it is written down
            while DELIVERED not in (metrics := (await client.get(f"{url}/metrics")).text):
                await asyncio.sleep(0.05)
        assert "emberline_webhook_deliveries_pending " in metrics
    assert len(receiver.got) == 1


async def check_stop(server: StandinServer) -> None:
    """Stop the server, which ends all streams of events first."""
    async with open_streams(server) as (streams, _):
        began_s = time.monotonic()
        await server.stop()
        assert time.monotonic() - began_s < 50
        await asyncio.gather(*streams)


async def test_events_reach_the_webhook_and_every_stream(tiny_model: Path, tmp_path: Path) -> None:
    """The core itself serves HTTP; tests/cli/test_serve_http_workers.py has two HTTP workers."""
    async with standin_server(tmp_path, tiny_model, {}) as server:
        await check_events(server)
        await check_stop(server)
