import asyncio
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.accounts.usage_ledger import UsageTimings
from emberline.balancer.balancer import Balancer
from emberline.balancer.ledger import ORPHAN_RUNNING_S
from emberline.cluster.timings import Timings
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import BadInput, Conflict, ModelNotFound, NotFound, Overloaded, Unavailable
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import Message
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service import Service, open_core_server, open_http_worker, open_service
from emberline.service.core import LocalCore
from emberline.service.core_link import CoreServer, RemoteCore
from emberline.service.event_log import NewLog
from emberline.service.work import Work
from emberline.store import open_store
from emberline.text.text_model import TextModel
from tests.api.fake_service import Wire, app_of
from tests.faulty_store import FaultyStore
from tests.service.conftest import ALICE, MODEL, PATIENCE_S, Opener, offer
from tests.service.fake_engine import EOS, FakeEngine, Script
from tests.service.test_service import ask, events_of, in_flight, row_of, rows, settled, text_of


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


QUICK = Timings(checkpoint_s=0.02, notice_interval_s=0.01, usage=UsageTimings(checkpoint_s=0.02))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FaultyStore]:
    store = FaultyStore(await open_store(tmp_path / "core.db"))
    yield store
    await store.close()


@pytest.fixture
async def service(engine: FakeEngine, store: FaultyStore, open_one: Opener) -> Service:
    """In the core process, with the store that the test may break."""
    return await open_one(engine, timings=QUICK, store=store)


@pytest.fixture
async def server(service: Service, tmp_path: Path) -> AsyncIterator[CoreServer]:
    server = await open_core_server(service, tmp_path / "core.sock")
    yield server
    await server.close()


@pytest.fixture
async def http_worker(
    server: CoreServer, engine: FakeEngine, text_model: TextModel, tmp_path: Path
) -> AsyncIterator[Service]:
    http_worker = await open_http_worker([offer(text_model, engine)], core_socket=tmp_path / "core.sock", timings=QUICK)
    assert await http_worker.ready(PATIENCE_S)
    yield http_worker
    await http_worker.close()


def kill_http_workers(server: CoreServer) -> None:
    """Their connections end, as if their processes had been killed."""
    assert server.links
    for link in tuple(server.links):
        link.drop("killed")


def admission(service: Service) -> Balancer:
    assert isinstance(service.core, LocalCore)
    return service.core.admission.balancer


def remote(http_worker: Service) -> RemoteCore:
    assert isinstance(http_worker.core, RemoteCore)
    return http_worker.core


async def test_an_http_worker_serves_and_the_core_records(
    service: Service, http_worker: Service, engine: FakeEngine, say: Callable[..., Script], tmp_path: Path
) -> None:
    request = ask("hello")
    events = await events_of(http_worker, request)
    assert text_of(events) == "Hello!"
    row = await row_of(service, request)
    assert (row.status, row.output_tokens) == ("finished", 7)
    assert in_flight(service) == 0
    history = (Message("user", "hello"), Message("assistant", "Hello!"), Message("user", "more"))
    await events_of(http_worker, ask(messages=history))  # the session is the core's
    assert engine.submitted[1].prompt_ids.startswith(engine.submitted[0].prompt_ids)
    assert (await http_worker.operations.health()).ok
    assert (
        b'emberline_requests_total{model="@cf/test/bytes",status="finished"} 2.0'
        in await http_worker.operations.metrics()
    )
    assert os.stat(tmp_path / "core.sock").st_mode & 0o777 == 0o600


async def test_errors_of_the_core_reach_the_client(http_worker: Service, engine: FakeEngine) -> None:
    engine.script = None
    n = engine.info.max_running
    running = [asyncio.create_task(events_of(http_worker, ask())) for _ in range(n)]
    await engine.submission(n)
    with pytest.raises(Overloaded) as refused:
        await events_of(http_worker, ask(reject_if_busy=True))
    assert refused.value.retry_after_s
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_a_client_that_asks_is_told_its_place_in_the_queue(
    service: Service, http_worker: Service, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    engine.script = None
    n = engine.info.max_running
    running = [asyncio.create_task(events_of(service, ask())) for _ in range(n)]
    await engine.submission(n)
    body = b'{"model": "%s", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}' % MODEL.encode()
    asks = {"x_emberline_queue_position": "true"}
    silent = Wire(app_of(service), "/v1/chat/completions", body)
    await until(lambda: len(admission(service).queue) == 1)
    first = Wire(app_of(service), "/v1/chat/completions", body, **asks)
    await until(lambda: len(admission(service).queue) == 2)
    second = Wire(app_of(http_worker), "/v1/chat/completions", body, **asks)
    await first.until_sent(b": waiting, 1 ahead\n\n")
    await second.until_sent(b": waiting, 2 ahead\n\n")
    silent.leave()
    await asyncio.wait([silent.task])
    assert not silent.sent
    running[0].cancel()
    await engine.submission(n + 1)
    await first.until_sent(b": running\n\n")
    await second.until_sent(b": waiting, 0 ahead\n\n")
    engine.script = say("Hello!")
    engine.step(TokenDelta(engine.submitted[n].id, tokens.pack([EOS]), "stop"))
    await asyncio.wait_for(asyncio.gather(first.task, second.task), PATIENCE_S)
    assert [wire.sent[0]["status"] for wire in (first, second)] == [200, 200]
    assert all(wire.body.endswith(b"data: [DONE]\n\n") for wire in (first, second))
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_requests_of_a_dead_http_worker_are_ended(
    service: Service, server: CoreServer, http_worker: Service, engine: FakeEngine
) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(http_worker, request))
    await engine.submission()
    assert in_flight(service) == 1
    kill_http_workers(server)
    row = await row_of(service, request)
    assert (row.status, row.input_tokens) == ("failed", 0)  # nothing is known to be computed
    assert in_flight(service) == 0
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("orphaned", [False, True])
async def test_a_request_of_a_dead_http_worker_is_billed_what_it_produced(
    service: Service, server: CoreServer, http_worker: Service, engine: FakeEngine, orphaned: bool
) -> None:
    """Also when it was written off as load long before: then its end is still recorded."""
    engine.script = None
    request = ask("hello")
    task = asyncio.create_task(events_of(http_worker, request))
    (sent,) = await engine.submission()
    engine.step(TokenDelta(sent.id, tokens.pack([70, 71, 72])))
    core = service.core
    assert isinstance(core, LocalCore)
    await until(lambda: (used := core.usage.used_by(request.id)) is not None and used.output_tokens == 3)
    if orphaned:
        core.admission.balancer.dispatch(time.monotonic() + ORPHAN_RUNNING_S + 60)
        assert in_flight(service) == 0
    kill_http_workers(server)
    row = await row_of(service, request)
    assert (row.status, row.input_tokens, row.output_tokens) == ("failed", len(sent.prompt_ids) // 4, 3)
    assert row.first_token_us is not None
    task.cancel()
    await asyncio.wait([task])


async def test_requests_of_a_dead_core_are_recorded_by_the_next_one(
    service: Service, http_worker: Service, engine: FakeEngine, text_model: TextModel, tmp_path: Path
) -> None:
    engine.script = None
    remote_request, local_request = ask("hello"), ask("hello")
    tasks = []
    for at, request in ((http_worker, remote_request), (service, local_request)):
        tasks.append(asyncio.create_task(events_of(at, request)))
        sent = (await engine.submission(len(tasks)))[-1]
        engine.step(TokenDelta(sent.id, tokens.pack([70, 71])))
    folder = tmp_path / "data" / "usage"

    def checkpointed() -> bool:
        data = b"".join(path.read_bytes() for path in folder.glob("*.running"))
        return all(request.id.encode() in data for request in (remote_request, local_request))

    await until(checkpointed)
    shutil.copytree(folder, tmp_path / "again" / "usage")  # what a killed process leaves: files without a lock
    heir = await open_service([offer(text_model, engine)], data_dir=tmp_path / "again")
    for request in (remote_request, local_request):
        row = await row_of(heir, request)
        assert (row.status, row.input_tokens, row.output_tokens) == ("failed", len(sent.prompt_ids) // 4, 2)
    await heir.close()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_one_request_of_a_dead_http_worker_that_cannot_be_recorded_does_not_keep_the_others(
    service: Service, server: CoreServer, http_worker: Service, engine: FakeEngine, store: FaultyStore
) -> None:
    engine.script = None
    tasks = [asyncio.create_task(events_of(http_worker, ask())) for _ in range(3)]
    first = (await engine.submission(3))[0]
    assert isinstance(service.core, LocalCore)

    async def refuse(name: str, asked: Any) -> None:
        if name == "write" and first.id in asked:
            raise ValueError("a row that the database refuses")

    store.before = refuse
    kill_http_workers(server)
    ledger = service.core.admission.balancer.ledger
    await until(lambda: not list(ledger))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    async with asyncio.timeout(PATIENCE_S):
        while await rows(service) < 2:
            await asyncio.sleep(0.001)


async def test_a_cancelled_request_that_waits_holds_nothing(
    service: Service, http_worker: Service, engine: FakeEngine
) -> None:
    script, engine.script = engine.script, None
    request = ask()
    task = asyncio.create_task(events_of(http_worker, request))
    await engine.submission()
    await engine.die()  # before its first token: the request now waits for the engine to return
    await until(lambda: in_flight(service) == 0)
    task.cancel()
    await asyncio.wait([task])
    assert (await row_of(service, request)).status == "cancelled"
    engine.script = script
    await engine.start()
    assert all(await asyncio.gather(service.ready(PATIENCE_S), http_worker.ready(PATIENCE_S)))
    assert text_of(await events_of(http_worker, ask())) == "Hello!"
    assert [sent.id for sent in engine.submitted].count(request.id) == 1, "it is not sent when the engine is back"
    assert in_flight(service) == 0
    assert await rows(service) == 2


async def test_a_client_that_leaves_the_admission_queue_leaves_nothing_behind(
    service: Service, server: CoreServer, http_worker: Service, engine: FakeEngine
) -> None:
    engine.script = None
    n = engine.info.max_running
    running = [asyncio.create_task(events_of(http_worker, ask())) for _ in range(n)]
    await until(lambda: in_flight(service) == n)
    assert isinstance(service.core, LocalCore)
    ledger = service.core.admission.balancer.ledger
    request = ask()
    leaving = asyncio.create_task(events_of(http_worker, request))
    await until(lambda: ledger.get(request.id) is not None)
    assert in_flight(service) == n  # it waits
    leaving.cancel()
    await asyncio.wait([leaving])
    await until(lambda: ledger.get(request.id) is None)
    assert service.core.admission.snapshot().waiting == {}
    await until(lambda: not server.tasks)
    for task in running:  # and room that becomes free is not given to it
        task.cancel()
    await asyncio.wait(running)
    await until(lambda: not list(ledger))
    assert request.id not in {sent.id for sent in engine.submitted}


async def test_an_http_worker_that_dies_during_failover_leaves_a_usage_row(
    service: Service, server: CoreServer, http_worker: Service, engine: FakeEngine
) -> None:
    engine.script = None
    request = ask()
    task = asyncio.create_task(events_of(http_worker, request))
    await engine.submission()
    await engine.die()  # before its first token: the request now waits for the engine to return
    await until(lambda: in_flight(service) == 0)
    kill_http_workers(server)
    row = await row_of(service, request)
    assert (row.status, row.model_version) == ("failed", "f" * 32)
    with pytest.raises(Unavailable):
        await task
    engine.script = lambda sent: [EOS]
    await engine.start()
    assert await service.ready(PATIENCE_S)
    await events_of(service, ask())
    assert [sent.id for sent in engine.submitted].count(request.id) == 1, "it is not sent when the engine is back"
    assert in_flight(service) == 0
    assert await rows(service) == 2


async def test_a_request_that_no_worker_takes_over_is_ended_when_its_http_worker_dies(
    service: Service, server: CoreServer, engine: FakeEngine, tmp_path: Path
) -> None:
    """It has run, so it needs a usage row, also if the HTTP worker dies before it can tell the end."""
    remote = RemoteCore(tmp_path / "core.sock", [])
    assert await remote.wait_connected(PATIENCE_S)
    assert await service.ready(PATIENCE_S)
    request = RouteRequest(
        id="moved", account="alice", model=MODEL, model_version="f" * 32, input_tokens=3, created_us=1
    )
    assert (await remote.admit(request)).decode == "e0"
    await engine.die()
    await until(lambda: not service.engines["e0"].connected)
    with pytest.raises(Unavailable):
        await remote.admit(msgspec.structs.replace(request, avoid=("e0",), lost=("e0",)))
    assert await rows(service) == 0
    kill_http_workers(server)
    async with asyncio.timeout(PATIENCE_S):
        while await rows(service) == 0:
            await asyncio.sleep(0.001)
    await remote.close()


class UnawareCore:
    """A core that does not notice the loss of its engine."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def admit(self, ask: object) -> Route:
        return Route(decode="e0")


async def test_an_http_worker_waits_for_an_engine_whose_loss_the_core_has_not_noticed(
    service: Service, engine: FakeEngine, text_model: TextModel, tmp_path: Path
) -> None:
    server = CoreServer(UnawareCore(service.core), tmp_path / "unaware.sock")  # type: ignore[arg-type]
    await server.start()
    http_worker = await open_http_worker(
        [offer(text_model, engine)], core_socket=tmp_path / "unaware.sock", timings=Timings(connect_wait_s=0.0)
    )
    assert await http_worker.ready(PATIENCE_S)
    script, engine.script = engine.script, None
    task = asyncio.create_task(events_of(http_worker, ask()))
    await engine.submission()
    await engine.die()
    await until(lambda: not http_worker.engines["e0"].connected)
    engine.script = script
    await engine.start()
    assert text_of(await task) == "Hello!"
    await http_worker.close()
    await server.close()


async def test_without_a_core_requests_are_unavailable(
    http_worker: Service, server: CoreServer, engine: FakeEngine, tmp_path: Path, service: Service
) -> None:
    engine.script = None
    running = asyncio.create_task(events_of(http_worker, ask()))
    (sent,) = await engine.submission()
    await server.close()
    await until(lambda: not remote(http_worker).connected)
    with pytest.raises(Unavailable) as refused:
        await events_of(http_worker, ask())
    assert refused.value.retry_after_s
    assert not (await http_worker.operations.health()).ok
    engine.step(TokenDelta(sent.id, tokens.pack([EOS]), "stop"))
    with pytest.raises(Unavailable, match="core process"):
        await running
    again = await open_core_server(service, tmp_path / "core.sock")
    await until(lambda: remote(http_worker).connected)
    engine.script = lambda request: [EOS]
    await events_of(http_worker, ask())
    await again.close()


async def test_http_workers_are_told_of_a_worker_that_the_core_has_lost(
    service: Service, server: CoreServer, tmp_path: Path
) -> None:
    """It may hang, which an HTTP worker cannot see."""
    told: list[tuple[str, str]] = []
    remote = RemoteCore(tmp_path / "core.sock", [], lambda name, reason: told.append((name, reason)))
    assert await remote.wait_connected(PATIENCE_S)
    await until(lambda: len(server.links) == 1)
    assert isinstance(service.core, LocalCore)
    service.core.admission.left("e9", "it hangs")
    await until(lambda: told == [("e9", "it hangs")])
    await remote.close()


async def test_load_reports_and_refusals_reach_the_core(
    service: Service, http_worker: Service, engine: FakeEngine
) -> None:
    engine.script = None
    async with aclosing(http_worker.run(Work(ask(), ALICE))) as events:
        started = asyncio.ensure_future(anext(events))
        (sent,) = await engine.submission()
        engine.step(TokenDelta(sent.id, tokens.pack([70])))
        await started
        with pytest.raises(BadInput):
            await events_of(http_worker, ask(n=0))
        refused = b'emberline_requests_refused_total{error="bad_input"} 1.0'
        running = b'vllm:num_requests_running{engine="e0",model_name="@cf/test/bytes"} 1.0'
        async with asyncio.timeout(PATIENCE_S):  # the core has a connection of its own to the engine
            while not (refused in (exposed := await service.operations.metrics()) and running in exposed):
                await asyncio.sleep(0.001)
    await settled(http_worker)


async def test_notices_are_sent_periodically(service: Service, http_worker: Service) -> None:
    http_worker.core.refused("bad_input")
    async with asyncio.timeout(PATIENCE_S):
        while b"bad_input" not in await service.operations.metrics():
            await asyncio.sleep(0.01)


async def test_aliases_are_in_effect_in_every_process_at_once(service: Service, http_worker: Service) -> None:
    for name in ("gpt-4o", "@cf/moonshotai/kimi-k2.5"):
        await http_worker.operations.change_alias(name, {"bytes": 1})
        assert service.models.find(name, None).id == http_worker.models.find(name.upper(), None).id == "@cf/test/bytes"
        request = msgspec.structs.replace(ask("hello"), model=name)
        assert text_of(await events_of(http_worker, request)) == "Hello!"
        assert (await row_of(service, request)).model == "@cf/test/bytes"
    await http_worker.operations.change_alias("best", {"gpt-4o": 1})
    for name, targets, error in (
        ("gpt-4o", {"best": 1}, BadInput),
        ("loop", {"loop": 1}, ModelNotFound),
        ("@cf/test/bytes", {"bytes": 1}, Conflict),
        ("other", {"unknown": 1}, ModelNotFound),
        ("unknown", None, NotFound),
    ):
        with pytest.raises(error):
            await http_worker.operations.change_alias(name, targets)
    assert http_worker.models.cards()[0].aliases == ("bytes", "gpt-4o", "@cf/moonshotai/kimi-k2.5", "best")
    await service.operations.change_alias("best", None)
    with pytest.raises(ModelNotFound):
        service.models.find("best", None)
    await until(lambda: "best" not in http_worker.models.aliases.aliases)


async def test_a_stream_is_resumed_at_another_http_worker(service: Service, http_worker: Service) -> None:
    """Its log is in the core: written by one process, read and cancelled by any."""
    new = NewLog("stream_1", "acme", 60.0, b"text/event-stream", b"data: lost\n\n")
    await http_worker.event_logs.open(new)
    reading = asyncio.create_task(service.event_logs.read("acme", "stream_1", -1, PATIENCE_S))
    http_worker.event_logs.append("stream_1", [b"0", b"1"])
    assert (await reading).events == [b"0", b"1"]
    part = await http_worker.event_logs.read("acme", "stream_1", 0, 0)
    assert (part.events, part.done, part.content_type) == ([b"1"], False, b"text/event-stream")
    assert await http_worker.event_logs.idle_s("stream_1") < PATIENCE_S
    for elsewhere in (service, http_worker):
        with pytest.raises(NotFound) as refused:
            await elsewhere.event_logs.read("other", "stream_1", -1, 0)
        assert refused.value.kind == "stream_not_found"
    await service.event_logs.cancel("acme", "stream_1")
    assert await http_worker.event_logs.idle_s("stream_1") == math.inf
    http_worker.event_logs.append("stream_1", [b"2"], done=True)
    assert (await service.event_logs.read("acme", "stream_1", 1, PATIENCE_S)).done


async def test_a_stream_whose_http_worker_dies_ends_with_an_error(service: Service, http_worker: Service) -> None:
    await http_worker.event_logs.open(NewLog("stream_1", "acme", 60.0, b"text/event-stream", b"data: lost\n\n"))
    http_worker.event_logs.append("stream_1", [b"0"])
    await http_worker.close()
    found: list[bytes] = []
    while not (part := await service.event_logs.read("acme", "stream_1", len(found) - 1, PATIENCE_S)).done:
        found += part.events
    assert found + part.events == [b"0", b"data: lost\n\n"]
