import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from emberline.balancer.route_request import Route
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import BadInput, Overloaded, Unavailable
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import Message
from emberline.service import Service, open_core_server, open_http_worker, remote_core
from emberline.service.core_server import CoreServer
from emberline.service.remote_core import RemoteCore
from emberline.text.text_model import TextModel
from tests.balancer.fake_engine import EOS, FakeEngine, Script
from tests.service.conftest import ALICE, PATIENCE_S, offer
from tests.service.test_service import ask, events_of, in_flight, row_of, rows, settled, text_of


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def server(service: Service, tmp_path: Path) -> AsyncIterator[CoreServer]:
    server = await open_core_server(service, tmp_path / "core.sock")
    yield server
    await server.close()


@pytest.fixture
async def door(server: CoreServer, engine: FakeEngine, text_model: TextModel, tmp_path: Path) -> AsyncIterator[Service]:
    door = await open_http_worker([offer(text_model, engine)], core_socket=tmp_path / "core.sock")
    assert await door.ready(PATIENCE_S)
    yield door
    await door.close()


def remote(door: Service) -> RemoteCore:
    assert isinstance(door.core, RemoteCore)
    return door.core


async def test_a_door_serves_and_the_core_keeps_the_books(
    service: Service, door: Service, engine: FakeEngine, say: Callable[..., Script], tmp_path: Path
) -> None:
    request = ask("hello")
    events = await events_of(door, request)
    assert text_of(events) == "Hello!"
    row = await row_of(service, request)
    assert (row.status, row.output_tokens) == ("finished", 7)
    assert in_flight(service) == 0
    history = (Message("user", "hello"), Message("assistant", "Hello!"), Message("user", "more"))
    await events_of(door, ask(messages=history))  # the session is the core's
    assert engine.submitted[1].prompt_ids.startswith(engine.submitted[0].prompt_ids)
    assert (await door.health()).ok
    assert b'emberline_requests_total{model="@cf/test/bytes",status="finished"} 2.0' in await door.metrics()
    assert os.stat(tmp_path / "core.sock").st_mode & 0o777 == 0o600


async def test_errors_cross_the_border(service: Service, door: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(ask: object) -> str:
        raise Overloaded("no room", retry_after_s=7)

    monkeypatch.setattr(service.core, "admit", full)
    with pytest.raises(Overloaded) as refused:
        await events_of(door, ask())
    assert refused.value.retry_after_s == 7


async def test_a_door_that_dies_leaves_no_request_open(service: Service, door: Service, engine: FakeEngine) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(door, request))
    await engine.submission()
    assert in_flight(service) == 1
    link = remote(door)._link
    assert link is not None
    link.drop("killed")
    row = await row_of(service, request)
    assert row.status == "failed"
    assert row.input_tokens > 0
    assert in_flight(service) == 0
    task.cancel()
    await asyncio.wait([task])


async def test_a_client_that_leaves_a_door_while_it_waits_holds_nothing(
    service: Service, door: Service, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(door, request))
    await engine.submission()
    await engine.die()  # before its first token: the request now waits for the engine to return
    await until(lambda: in_flight(service) == 0)
    task.cancel()
    await asyncio.wait([task])
    assert (await row_of(service, request)).status == "cancelled"
    await engine.start()
    await asyncio.sleep(0.2)
    assert in_flight(service) == 0
    assert await rows(service) == 1


async def test_a_door_that_dies_between_two_engines_leaves_a_row(
    service: Service, door: Service, engine: FakeEngine
) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(door, request))
    await engine.submission()
    await engine.die()  # before its first token: the request now waits for the engine to return
    await until(lambda: in_flight(service) == 0)
    link = remote(door)._link
    assert link is not None
    link.drop("killed")
    row = await row_of(service, request)
    assert (row.status, row.model_version) == ("failed", "f" * 32)
    with pytest.raises(Unavailable):
        await task
    await engine.start()
    await asyncio.sleep(0.1)
    assert in_flight(service) == 0
    assert await rows(service) == 1


async def test_a_door_waits_for_an_engine_whose_death_the_core_has_not_noticed(
    service: Service, door: Service, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unaware(ask: object) -> Route:
        return Route(decode="e0")

    monkeypatch.setattr("emberline.service.engine_transport.CONNECT_WAIT_S", 0.0)
    monkeypatch.setattr(service.core, "admit", unaware)
    script, engine.script = engine.script, None
    task = asyncio.create_task(events_of(door, ask()))
    await engine.submission()
    await engine.die()
    await asyncio.sleep(0.1)
    engine.script = script
    await engine.start()
    assert text_of(await task) == "Hello!"


async def test_without_a_core_a_door_says_unavailable(
    door: Service, server: CoreServer, engine: FakeEngine, tmp_path: Path, service: Service
) -> None:
    engine.script = None
    running = asyncio.create_task(events_of(door, ask()))
    (sent,) = await engine.submission()
    await server.close()
    await until(lambda: remote(door)._link is None)
    with pytest.raises(Unavailable) as refused:
        await events_of(door, ask())
    assert refused.value.retry_after_s
    assert not (await door.health()).ok
    engine.step(TokenDelta(sent.id, tokens.pack([EOS]), "stop"))
    with pytest.raises(Unavailable, match="core process"):
        await running
    again = await open_core_server(service, tmp_path / "core.sock")
    await until(lambda: remote(door)._link is not None)
    engine.script = lambda request: [EOS]
    await events_of(door, ask())
    await again.close()


async def test_what_a_door_sees_reaches_the_core(
    service: Service, door: Service, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = None
    async with aclosing(door.generate(ask(), ALICE)) as events:
        started = asyncio.ensure_future(anext(events))
        (sent,) = await engine.submission()
        engine.step(TokenDelta(sent.id, tokens.pack([70])))
        await started
        with pytest.raises(BadInput):
            await events_of(door, ask(n=0))
        remote(door)._send_notice()
        await door.health()  # answered after the notice
        metrics = (await service.metrics()).decode()
        assert 'emberline_requests_refused_total{error="bad_input"} 1.0' in metrics
        assert 'vllm:num_requests_running{engine="e0",model_name="@cf/test/bytes"} 1.0' in metrics
    await settled(door)


async def test_notices_go_out_by_themselves(service: Service, door: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_core, "NOTICE_INTERVAL_S", 0.01)
    door.core.refused("bad_input")
    async with asyncio.timeout(PATIENCE_S):
        while b"bad_input" not in await service.metrics():
            await asyncio.sleep(0.01)
