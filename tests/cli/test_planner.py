"""`emberline serve` with a scaled model: replicas start, serve, are drained when idle, and start again."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.catalog.pull import pull
from emberline.cli import http_client as client
from emberline.cli.http_client import ChatTiming
from emberline.cli.main import main
from emberline.cluster.timings import Timings
from emberline.config import resolve
from emberline.server.address import ServerAddress
from emberline.server.core_process import serve
from emberline.server.listener import bind
from tests.standin import standin_worker

PATIENCE_S = 90.0
TIMINGS = Timings(report_s=0.1, planner_round_s=0.2)
STANDIN = standin_worker("--script", "say=echo,itl_ms=300", "--kv-tokens", "2048")
BOUNDS = {
    "min_replicas": 0,
    "max_replicas": 2,
    "grow_after_s": 0,
    "shrink_after_s": 1,
    "settle_s": 0,
    "idle_s": 1,
    "start_s": 1,
}


@pytest.fixture
async def address(smollm2: Path, tmp_path: Path) -> AsyncIterator[ServerAddress]:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    environ = {"EMBERLINE_CLUSTER_MODELS": json.dumps({"smollm2": BOUNDS})}
    flags = {"server.port": 0, "server.drain_timeout_s": 2, "cluster.local_replicas": 2, "engine.device": "cpu"}
    config = resolve(flags, environ, tmp_path)
    entry = pull(DEFAULT_MODEL, ModelStore(tmp_path))
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()

    def announce(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address)

    with bind(config.server) as listener:
        serving = asyncio.create_task(serve(config, [entry], listener, announce, stop, TIMINGS, STANDIN))
        await asyncio.wait([serving, ready], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), serving
        yield ready.result()
        stop.set()
        await asyncio.wait_for(serving, PATIENCE_S)


async def members(address: ServerAddress) -> list[dict[str, Any]]:
    found = await asyncio.to_thread(client.get, address, "/api/cluster")
    return [member for member in found["members"] if member["connected"]]


async def until(address: ServerAddress, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(await members(address)):
                await asyncio.sleep(0.05)
    except TimeoutError:
        plan = await asyncio.to_thread(client.get, address, "/api/cluster/plan")
        raise AssertionError(f"{what}: {json.dumps(plan, indent=1)}") from None


def prompt(n_words: int, **more: object) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [{"role": "user", "content": "word " * n_words}], **more}


async def test_replicas_follow_the_load_down_to_none_and_up_again(
    address: ServerAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await members(address) == []
    health = await asyncio.to_thread(client.get, address, "/health")
    assert health
    long = client.chat(address, prompt(1680, max_tokens=300), ChatTiming())
    first = await asyncio.to_thread(next, long)  # held until a first replica had started
    assert first
    await until(address, lambda found: len(found) == 2, "its KV is too much for one")
    timings = [ChatTiming() for _ in range(2)]
    for timing in timings:
        await asyncio.to_thread(list, client.chat(address, prompt(20, max_tokens=2), timing))
    assert [timing.output_tokens for timing in timings] == [2, 2]
    await asyncio.to_thread(long.close)
    await until(address, lambda found: not found, "idle")
    timing = ChatTiming()
    await asyncio.to_thread(list, client.chat(address, prompt(20, max_tokens=2), timing))
    assert timing.output_tokens == 2
    plan = await asyncio.to_thread(client.get, address, "/api/cluster/plan?model=smollm2")
    (model,) = plan["models"]
    causes = {(each["action"], each["cause"]) for each in model["decisions"]}
    assert {("start", "wake"), ("start", "load"), ("drain", "idle")} <= causes
    assert all(each["why"] for each in model["decisions"])
    port = str(address.port)
    arguments = ["cluster", "plan", "--host", address.host, "--port", port]
    assert await asyncio.to_thread(main, arguments) == 0
    shown = capsys.readouterr().out
    assert "0 to 2 replicas" in shown
    assert "min_replicas is 0" in shown
