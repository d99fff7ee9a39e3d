import asyncio
import dataclasses
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import Unavailable
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import EngineLoad, Step
from emberline.service import Service, open_service
from emberline.text.text_model import TextModel
from tests.service.conftest import MODEL, PATIENCE_S, Opener, offer
from tests.service.fake_engine import EOS, FakeEngine, Script
from tests.service.test_service import ask, events_of


async def test_a_connected_idle_engine_is_healthy(service: Service) -> None:
    health = await service.operations.health()
    assert health.ok
    (engine,) = health.detail["engines"]
    assert (engine["name"], engine["ok"], engine["problem"], engine["in_flight"]) == ("e0", True, "", 0)
    assert engine["context_len"] == 256


async def test_a_stalled_engine_is_not_healthy(
    service: Service, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("emberline.balancer.worker.STALLED_S", 0.05)
        await asyncio.sleep(0.06)
        assert (await service.operations.health()).ok  # idle for longer than that
    engine.script = None
    task = asyncio.create_task(events_of(service, ask()))
    (sent,) = await engine.submission()
    assert (await service.operations.health()).ok
    with monkeypatch.context() as patch:
        patch.setattr("emberline.balancer.worker.STALLED_S", 0.05)
        await asyncio.sleep(0.06)
        health = await service.operations.health()
    assert not health.ok
    assert "no step" in health.detail["engines"][0]["problem"]
    engine.step(TokenDelta(sent.id, tokens.pack([EOS]), "stop"))
    await task
    assert (await service.operations.health()).ok


async def test_a_model_without_engines_is_down(service: Service, engine: FakeEngine) -> None:
    await engine.die()
    async with asyncio.timeout(PATIENCE_S):
        while (await service.operations.health()).ok:
            await asyncio.sleep(0.001)
    health = await service.operations.health()
    assert health.detail["models_down"] == ["@cf/test/bytes"]
    assert health.detail["engines"][0]["problem"]


async def test_one_dead_model_of_two_leaves_the_node_serving(
    tmp_path: Path, text_model: TextModel, say: Callable[..., Script]
) -> None:
    engines = [await FakeEngine(tmp_path / f"{name}.sock", say("Hello!"), name=name).start() for name in ("a", "b")]
    served = [offer(text_model, engine) for engine in engines]
    served[1] = dataclasses.replace(served[1], card=msgspec.structs.replace(served[1].card, id="b", aliases=()))
    service = await open_service(served, data_dir=tmp_path / "data")
    assert await service.ready(PATIENCE_S)
    await engines[1].die()
    async with asyncio.timeout(PATIENCE_S):
        while not (await service.operations.health()).detail["models_down"]:
            await asyncio.sleep(0.001)
    health = await service.operations.health()
    assert health.ok
    assert health.detail["models_down"] == ["b"]
    assert health.detail["models"]["b"] == {"ready": False, "workers": 1, "workers_ready": 0}
    assert health.detail["models"][MODEL] == {"ready": True, "workers": 1, "workers_ready": 1}
    await engines[0].die()
    async with asyncio.timeout(PATIENCE_S):
        while (await service.operations.health()).ok:
            await asyncio.sleep(0.001)
    await service.close()


async def test_a_draining_engine_serves_no_model(service: Service, engine: FakeEngine) -> None:
    for link in engine.links:
        link.send(Step([], EngineLoad(steps=1, draining=True)))
    async with asyncio.timeout(PATIENCE_S):
        while (await service.operations.health()).ok:
            await asyncio.sleep(0.001)
    assert (await service.operations.health()).detail["engines"][0]["state"] == "draining"
    with pytest.raises(Unavailable):
        await events_of(service, ask())


async def test_one_of_two_engines_is_enough(tmp_path: Path, open_one: Opener) -> None:
    engines = [await FakeEngine(tmp_path / f"{name}.sock", name=name).start() for name in ("a", "b")]
    service = await open_one(*engines)
    await engines[0].die()
    async with asyncio.timeout(PATIENCE_S):
        while all(engine["ok"] for engine in (await service.operations.health()).detail["engines"]):
            await asyncio.sleep(0.001)
    health = await service.operations.health()
    assert health.ok
    assert sorted(engine["ok"] for engine in health.detail["engines"]) == [False, True]
    await engines[1].die()


async def test_a_full_disk_is_not_healthy(service: Service) -> None:
    """Requests fail there, since no usage row can be written. A limit on the size of files fails writes as well."""
    assert (await service.operations.health()).detail["disk"] == "ok"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        found = await service.operations.health()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not found.ok
    assert "cannot be written: File too large" in found.detail["disk"]
    assert (await service.operations.health()).ok
