"""Workers join, leave and drain while the service runs; HTTP workers follow."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from emberline.balancer.endpoint import Endpoint
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.membership import Members, WorkerChange, WorkerConnections
from emberline.cluster.served_models import ServedModels
from emberline.config import EndpointConfig
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import BadInput, Conflict, NotFound, Unavailable
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import Welcome
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service import Service, open_core_server, open_http_worker
from emberline.service.core import LocalCore
from emberline.service.core_link import RemoteCore
from emberline.text.text_model import TextModel
from emberline.upstream.models import UpstreamModels
from emberline.upstream.servers.client import UpstreamConfig
from standins.standin_openai import StandinServer
from tests.service.conftest import MODEL, PATIENCE_S, Opener, offer
from tests.service.fake_engine import EOS, FakeEngine, Script
from tests.service.test_service import ask, events_of, row_of, text_of


def config_of(engine: FakeEngine, **more: object) -> EndpointConfig:
    url = engine.endpoint.address
    fields = {"name": engine.endpoint.name, "url": url, "kind": "emberline", "models": ("bytes",), "key": "join"}
    return EndpointConfig(**{**fields, **more})  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def states(service: Service) -> dict[str, str]:
    return {engine["name"]: engine["state"] for engine in (await service.operations.health()).detail["engines"]}


async def wait_for_states(service: Service, expected: dict[str, str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await states(service) != expected:
            await asyncio.sleep(0.001)


@pytest.fixture
async def other(tmp_path: Path, say: Callable[..., Script]) -> AsyncIterator[FakeEngine]:
    other = await FakeEngine(tmp_path / "e1.sock", say("Other!"), name="e1").start()
    yield other
    await other.die()


def change(service: Service, action: str, name: str = "", **more: object) -> "asyncio.Task[list[str]]":
    made = WorkerChange(action=action, name=name, **more)  # type: ignore[arg-type]
    return asyncio.create_task(service.cluster_admin.change_workers(made))


async def test_a_drained_worker_finishes_what_it_has_and_gets_nothing_new(
    engine: FakeEngine, other: FakeEngine, open_one: Opener
) -> None:
    service = await open_one(engine, other)
    engine.script = other.script = None
    running = asyncio.create_task(events_of(service, ask()))
    await until(lambda: engine.submitted or other.submitted)
    (busy, idle) = (engine, other) if engine.submitted else (other, engine)
    assert await change(service, "drain", busy.endpoint.name) == [busy.endpoint.name]
    assert (await states(service))[busy.endpoint.name] == "draining"
    idle.script = lambda request: [EOS]
    for n in range(8):
        await events_of(service, ask(f"{n:020}"))
    assert len(idle.submitted) == 8
    busy.step(TokenDelta(busy.submitted[0].id, tokens.pack([EOS]), "stop"))
    await running
    await busy.die()  # the drain survives a restart
    await busy.start()
    await wait_for_states(service, {"e0": "ready", "e1": "ready", busy.endpoint.name: "draining"})
    await change(service, "undrain", busy.endpoint.name)
    await wait_for_states(service, {"e0": "ready", "e1": "ready"})


async def test_the_last_worker_can_be_drained_and_requests_are_told(service: Service) -> None:
    await change(service, "drain", "e0")
    assert not (await service.operations.health()).ok
    with pytest.raises(Unavailable):
        await events_of(service, ask())
    with pytest.raises(NotFound, match="no worker is called e9; there are e0"):
        await change(service, "drain", "e9")


async def test_a_worker_leaves_when_its_last_request_has_ended(
    engine: FakeEngine, other: FakeEngine, open_one: Opener
) -> None:
    service = await open_one(engine, other)
    assert isinstance(service.core, LocalCore)
    assert service.core.membership is not None
    left: list[str] = []

    async def on_leave(name: str) -> None:
        left.append(name)

    service.core.membership._on_leave = on_leave
    engine.script = other.script = None
    running = asyncio.create_task(events_of(service, ask()))
    await until(lambda: engine.submitted or other.submitted)
    busy, idle = (engine, other) if engine.submitted else (other, engine)
    await change(service, "leave", busy.endpoint.name, stop=True)
    with pytest.raises(Conflict):
        await change(service, "undrain", busy.endpoint.name)
    await asyncio.sleep(0.3)
    assert not left, "a request is running there"
    busy.step(TokenDelta(busy.submitted[0].id, tokens.pack([EOS]), "stop"))
    await running
    await until(lambda: left == [busy.endpoint.name])
    await until(lambda: busy.drained)  # it was asked to end
    assert await states(service) == {idle.endpoint.name: "ready"}
    await change(service, "join", config=config_of(busy))  # and comes back
    await wait_for_states(service, {"e0": "ready", "e1": "ready"})


async def test_a_request_goes_elsewhere_when_its_worker_was_removed_before_it_was_sent(
    engine: FakeEngine, other: FakeEngine, open_one: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await open_one(engine, other)
    assert isinstance(service.core, LocalCore)
    membership, admit = service.core.membership, service.core.admit
    assert membership is not None
    routes: list[str] = []

    async def admit_and_remove(request: RouteRequest) -> Route:
        route = await admit(request)
        routes.append(route.decode)
        if len(routes) == 1:
            await membership.drop_engine(route.decode)
        return route

    monkeypatch.setattr(service.core, "admit", admit_and_remove)
    request = ask()
    text = text_of(await events_of(service, request))
    assert text == {"e0": "Other!", "e1": "Hello!"}[routes[0]]
    assert sorted(routes) == ["e0", "e1"]
    assert (await row_of(service, request)).status == "finished"
    assert len(engine.submitted + other.submitted) == 1


async def test_a_worker_that_speaks_while_it_is_removed_is_not_added_again(
    engine: FakeEngine, other: FakeEngine, open_one: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had sent is read until its connection is closed. It would take its name from its next run."""
    service = await open_one(engine, other)
    assert isinstance(service.core, LocalCore)
    membership = service.core.membership
    assert membership is not None
    removed = membership._connections.engines["e1"]
    close, link, info = removed.close, removed._link, removed.info
    assert link is not None
    assert info is not None

    async def speak_and_close() -> None:
        removed.changed(link, Welcome(info, removed.load))
        await close()

    monkeypatch.setattr(removed, "close", speak_and_close)
    await membership.drop_engine("e1")
    assert service.core.admission.worker_names() == ["e0"]
    await change(service, "join", config=config_of(other))
    await wait_for_states(service, {"e0": "ready", "e1": "ready"})


async def test_a_worker_joins_and_serves(service: Service, engine: FakeEngine, other: FakeEngine) -> None:
    assert await change(service, "join", config=config_of(other)) == ["e1"]
    await wait_for_states(service, {"e0": "ready", "e1": "ready"})
    await change(service, "drain", "e0")
    assert text_of(await events_of(service, ask())) == "Other!"
    with pytest.raises(Conflict, match="called e1 already"):
        await change(service, "join", config=config_of(other))


async def test_a_worker_that_cannot_serve_does_not_join(
    service: Service, other: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match="not served here"):
        await change(service, "join", config=config_of(other, models=("unknown",)))

    async def not_longer_than_known(self: EngineClient, timeout_s: float) -> bool:
        await until(lambda: self.problem != "not connected yet")
        return self.connected

    with monkeypatch.context() as patch:
        patch.setattr(EngineClient, "wait_connected", not_longer_than_known)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await change(service, "join", config=config_of(other, url=f"unix:{tmp_path}/nothing"))
        with pytest.raises(Unavailable, match="wrong token"):
            await change(service, "join", config=config_of(other, key="guess"))
    with pytest.raises(BadInput, match=r"tcp://host:port"):
        await change(service, "join", config=config_of(other, url="http://h"))
    different = await FakeEngine(tmp_path / "e2.sock", name="e2", fingerprint="0" * 32).start()
    with pytest.raises(BadInput, match="other weights"):
        await change(service, "join", config=config_of(different))
    await different.die()
    assert await states(service) == {"e0": "ready"}


async def test_room_granted_on_a_worker_that_has_left_is_forgotten(service: Service) -> None:
    assert isinstance(service.core, LocalCore)
    core = service.core
    (grant,) = core.grants.issue(MODEL, 1)
    assert core.grants.granted_on(grant.engine) == 1
    core.discard(grant.engine)
    assert core.grants.granted_on(grant.engine) == 0


async def test_an_upstream_server_joins_and_leaves(service: Service) -> None:
    standin = await StandinServer("openai", "far/model").start()
    config = EndpointConfig(name="far", url=standin.url)
    assert await change(service, "join", config=config) == ["far"]
    await wait_for_states(service, {"e0": "ready", "far": "ready"})
    assert text_of(await events_of(service, ask(model="far/model")))
    await change(service, "leave", "far")
    await wait_for_states(service, {"e0": "ready"})
    assert [card.id for card in service.models.cards()] == [MODEL]
    await standin.close()


@pytest.mark.parametrize("kind", ["emberline", "openai"])
async def test_of_two_workers_that_join_at_once_under_one_name_one_does(
    service: Service, other: FakeEngine, kind: str
) -> None:
    standin = await StandinServer("openai", "far/model").start()
    config = config_of(other) if kind == "emberline" else EndpointConfig(name="e1", url=standin.url)
    joins = [change(service, "join", config=config) for _ in range(2)]
    done = await asyncio.gather(*joins, return_exceptions=True)
    assert done[0] == ["e1"]
    assert isinstance(done[1], Conflict)
    await wait_for_states(service, {"e0": "ready", "e1": "ready"})
    await change(service, "leave", "e1")
    await wait_for_states(service, {"e0": "ready"})
    await standin.close()


async def test_members_are_followed_in_order_while_a_tokenizer_is_loaded(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core may send requests to a server that has joined at once, and the server may leave again."""
    loaded = threading.Event()

    def load(config: UpstreamConfig, templates: object) -> TextModel:
        assert loaded.wait(PATIENCE_S)
        return text_model

    monkeypatch.setattr("emberline.upstream.models._load_tokenizer", load)
    endpoint = Endpoint(name="far", address="http://127.0.0.1:1", kind="openai", models=("far/model",))
    joined = Members(upstreams=[UpstreamConfig(endpoint=endpoint, tokenizer="far.json")])
    connections = WorkerConnections(ServedModels(), UpstreamModels([]))
    tasks = []
    for members, known in ((joined, ["far"]), (joined, ["far"]), (Members(), [])):
        tasks.append(asyncio.create_task(connections.follow(members)))
        await asyncio.sleep(0)
        assert list(connections.upstream.clients) == known
    loaded.set()
    await asyncio.gather(*tasks)
    assert not connections.upstream.clients


async def test_an_http_worker_may_hear_of_members_before_it_is_complete(
    service: Service,
    engine: FakeEngine,
    other: FakeEngine,
    text_model: TextModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = await open_core_server(service, tmp_path / "core.sock")
    await change(service, "join", config=config_of(other))
    followed = asyncio.Event()
    follow, wait_connected = WorkerConnections.follow, RemoteCore.wait_connected

    async def followed_once(self: WorkerConnections, members: Members) -> None:
        await follow(self, members)
        followed.set()

    async def wait_until_followed(self: RemoteCore, timeout_s: float) -> bool:
        await followed.wait()
        return await wait_connected(self, timeout_s)

    monkeypatch.setattr(WorkerConnections, "follow", followed_once)
    monkeypatch.setattr(RemoteCore, "wait_connected", wait_until_followed)
    http_worker = await open_http_worker([offer(text_model, engine)], core_socket=tmp_path / "core.sock")
    assert await http_worker.ready(PATIENCE_S)
    assert list(http_worker.engines) == ["e0", "e1"]
    await http_worker.close()
    await server.close()


async def test_http_workers_follow(
    service: Service, engine: FakeEngine, other: FakeEngine, text_model: TextModel, tmp_path: Path
) -> None:
    server = await open_core_server(service, tmp_path / "core.sock")
    http_worker = await open_http_worker([offer(text_model, engine)], core_socket=tmp_path / "core.sock")
    assert await http_worker.ready(PATIENCE_S)
    assert await change(http_worker, "join", config=config_of(other)) == ["e1"]
    await change(http_worker, "leave", "e0")
    await wait_for_states(http_worker, {"e1": "ready"})
    await until(lambda: list(http_worker.engines) == ["e1"])  # it follows the core a moment later
    assert await http_worker.engines["e1"].wait_connected(PATIENCE_S)  # as the core is already
    assert text_of(await events_of(http_worker, ask())) == "Other!"
    core = service.core
    assert isinstance(core, LocalCore)
    assert core.membership is not None
    assert core.membership.members.gone == ["e0"]
    assert await change(http_worker, "join", config=config_of(engine)) == ["e0"]
    assert core.membership.members.gone == []
    await change(http_worker, "leave", "e0")
    await until(lambda: list(http_worker.engines) == ["e1"])
    restarted = await open_http_worker([offer(text_model, engine)], core_socket=tmp_path / "core.sock")
    await until(lambda: list(restarted.engines) == ["e1"])
    assert await restarted.engines["e1"].wait_connected(PATIENCE_S)
    assert text_of(await events_of(restarted, ask())) == "Other!"
    await change(http_worker, "leave", "e1")
    await until(lambda: not http_worker.engines and not restarted.engines)
    assert core.membership.members.gone == ["e0"]  # a worker that had joined leaves no name behind
    for each in (http_worker, restarted):
        await each.close()
    await server.close()
