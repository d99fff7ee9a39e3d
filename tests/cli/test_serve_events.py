"""Webhook events in a whole server: the core delivers them, every HTTP worker streams them, streams end at shutdown."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.catalog.pull import pull
from emberline.cli.http_client import ServerAddress
from emberline.cli.serve import bind, serve
from emberline.config import resolve
from emberline.service.open import DATABASE
from emberline.store import open_store
from tests.jobs.webhooks.helpers import emit_event
from tests.jobs.webhooks.receiver import receiving
from tests.standin import standin_worker

DELIVERED = 'emberline_webhook_deliveries_total{outcome="delivered"} 1.0'
N_STREAMS = 8  # enough that each of two HTTP workers has some


async def read_stream(url: str, received: "asyncio.Queue[str]") -> None:
    """Until the server ends it."""
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("GET", url, headers={"accept": "text/event-stream"}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith(("retry", "data")):
                received.put_nowait(line)


@pytest.mark.parametrize("http_workers", [1, 2])
async def test_events_reach_the_webhook_and_every_stream(smollm2: Path, tmp_path: Path, http_workers: int) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    flags = {
        "server.port": 0,
        "server.http_workers": http_workers,
        "server.drain_timeout_s": 60,
        "webhooks.allowed_networks": "127.0.0.0/8",
    }
    config = resolve(flags, {}, tmp_path)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()

    def announce(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address.url)

    with bind(config.server) as listener:
        entry = pull(DEFAULT_MODEL, ModelStore(tmp_path))
        serving = asyncio.create_task(serve(config, [entry], listener, announce, stop, make_spec=standin_worker()))
        await asyncio.wait([serving, ready], timeout=120, return_when=asyncio.FIRST_COMPLETED)
        url, received = ready.result(), asyncio.Queue[str]()
        async with receiving() as receiver, httpx.AsyncClient(timeout=60) as client:
            made = (await client.post(f"{url}/v1/webhook_endpoints", json={"url": receiver.url})).json()
            streams = [asyncio.create_task(read_stream(f"{url}/v1/events", received)) for _ in range(N_STREAMS)]
            async with asyncio.timeout(60):
                assert {await received.get() for _ in streams} == {"retry: 1000"}
                queue = await open_store(tmp_path / DATABASE)
                await emit_event(queue, "batch_1", account="local")
                assert len({await received.get() for _ in streams}) == 1
                await receiver.until(1)
            Webhook(made["secret"]).verify(receiver.got[0].body, receiver.got[0].headers)
            await queue.close()
            async with asyncio.timeout(60):  # counted once it is written down
                while DELIVERED not in (metrics := (await client.get(f"{url}/metrics")).text):
                    await asyncio.sleep(0.05)
            assert "emberline_webhook_deliveries_pending " in metrics
            began_s = time.monotonic()
            stop.set()
            await asyncio.wait_for(serving, 120)
            assert time.monotonic() - began_s < 50
            await asyncio.gather(*streams)
        assert len(receiver.got) == 1
