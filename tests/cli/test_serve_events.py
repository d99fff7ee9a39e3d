"""Events in the whole server: the core delivers, every door tells, and a stream does not hold up the end."""

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
from emberline.cli.http_client import Address
from emberline.cli.listen import bound
from emberline.cli.serve import serve
from emberline.config import EngineConfig, resolve
from emberline.service.open import DATABASE
from emberline.store import open_store
from emberline.supervisor import engine_workers as local
from emberline.supervisor.process import ChildSpec
from tests.jobs.desks import happen
from tests.jobs.receiver import receiving

DELIVERED = 'emberline_webhook_deliveries_total{outcome="delivered"} 1.0'
N_STREAMS = 8  # over two doors: each has some


def standin(plan: local.WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ChildSpec:
    arguments = ("--socket", str(socket), "--name", plan.model)
    env = {"EMBERLINE_WORKER_TOKEN": token}
    return ChildSpec(name=plan.name, module="emberline.testing.standin_engine", arguments=arguments, env=env)


async def read_stream(url: str, heard: "asyncio.Queue[str]") -> None:
    """Until the server ends it."""
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("GET", url, headers={"accept": "text/event-stream"}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith(("retry", "data")):
                heard.put_nowait(line)


@pytest.mark.parametrize("doors", [1, 2])
async def test_told_at_every_door(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doors: int) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    monkeypatch.setattr(local, "worker_spec", standin)
    flags = {"server.port": 0, "server.doors": doors, "server.drain_s": 25, "webhooks.allow": "127.0.0.0/8"}
    config = resolve(flags, {}, tmp_path)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()

    def announce(address: Address, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address.url)

    with bound(config.server) as listener:
        entry = pull(DEFAULT_MODEL, ModelStore(tmp_path))
        serving = asyncio.create_task(serve(config, [entry], listener, announce, stop))
        await asyncio.wait([serving, ready], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        url, heard = ready.result(), asyncio.Queue[str]()
        async with receiving() as receiver, httpx.AsyncClient() as client:
            made = (await client.post(f"{url}/v1/webhook_endpoints", json={"url": receiver.url})).json()
            streams = [asyncio.create_task(read_stream(f"{url}/v1/events", heard)) for _ in range(N_STREAMS)]
            async with asyncio.timeout(20):
                assert {await heard.get() for _ in streams} == {"retry: 1000"}
                queue = await open_store(tmp_path / DATABASE)
                await happen(queue, "batch_1", account="local")
                assert len({await heard.get() for _ in streams}) == 1
                await receiver.until(1)
            Webhook(made["secret"]).verify(receiver.got[0].body, receiver.got[0].headers)
            await queue.close()
            async with asyncio.timeout(5):  # counted once it is written down
                while DELIVERED not in (metrics := (await client.get(f"{url}/metrics")).text):
                    await asyncio.sleep(0.05)
            assert "emberline_webhook_deliveries_pending " in metrics
            began_s = time.monotonic()
            stop.set()
            await asyncio.wait_for(serving, 20)
            assert time.monotonic() - began_s < 10
            await asyncio.gather(*streams)
        assert len(receiver.got) == 1
