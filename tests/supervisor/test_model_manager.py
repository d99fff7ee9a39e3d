"""Models loaded and unloaded for requests, jobs and operators: a real service over fake engines."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.balancer.endpoint import Endpoint
from emberline.catalog.model_files import ModelFiles
from emberline.cluster.membership import Membership
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import DeadlineExceeded, NotFound, Overloaded, Unavailable
from emberline.protocol.events import TextEvent, TokenDelta
from emberline.service import Served, Service, open_core_server, open_http_worker, open_service
from emberline.service.core import LocalCore
from emberline.service.work import Work
from emberline.supervisor.model_manager import FIRST_RETRY_S, LoadableModel, ModelManager
from emberline.supervisor.model_switching import Limits
from emberline.supervisor.process import ProcessFailed
from emberline.text.text_model import TextModel
from tests.service.conftest import ALICE, PATIENCE_S, offer, say, text_model
from tests.service.fake_engine import EOS, FakeEngine, Script
from tests.service.test_service import ask, events_of, row_of, text_of

__all__ = ["say", "text_model"]  # fixtures

A, B = "@cf/test/a", "@cf/test/b"


class FakeWorkers:
    """Starts fake engines, one a model, in place of processes."""

    def __init__(self, folder: Path, script: Script) -> None:
        self._folder = folder
        self.script: Script | None = script
        self.engines: dict[str, FakeEngine] = {}
        self.log: list[str] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()  # loading goes on when it is set
        self.gate.set()

    async def load(self, model: str, path: Path, kv_bytes: int) -> Sequence[Endpoint]:
        self.log.append(f"load {model[-1]}")
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        name = f"{model[-1]}-0"
        engine = self.engines[model] = FakeEngine(self._folder / f"{name}.sock", self.script, name=name, model=model)
        await engine.start()
        return [msgspec.structs.replace(engine.endpoint, models=(model,))]

    async def unload(self, model: str) -> None:
        self.log.append(f"unload {model[-1]}")
        await self.engines.pop(model).die()


class FailingAttachment:
    """The service's membership, which fails to attach workers while `error` is set."""

    def __init__(self, membership: Membership) -> None:
        self.error: Exception | None = None
        self.attach_first = membership.attach
        self.detach, self.show_states = membership.detach, membership.show_states

    async def attach(self, endpoints: Sequence[Endpoint]) -> bool:
        attached = await self.attach_first(endpoints)
        if self.error is not None:
            raise self.error
        return attached


class Bench:
    """A service with two models that are loaded on demand, one at a time."""

    def __init__(
        self,
        service: Service,
        workers: FakeWorkers,
        text: TextModel,
        clock: Callable[[], float] = time.monotonic,
        **limits: float,
    ) -> None:
        assert isinstance(service.core, LocalCore)
        assert service.core.membership is not None
        self.service, self.workers, self.core = service, workers, service.core
        given = {"memory_bytes": 100, "max_loaded": 1, "switch_after_s": 0.2, "keep_alive_s": 60.0}
        attachment = FailingAttachment(service.core.membership)
        rules = Limits(**(given | limits))  # type: ignore[arg-type]
        self.manager = ModelManager(
            rules,
            workers,
            attachment,
            service.core.admission,
            service.core.grants,
            clock=clock,
            idle_poll_s=0.02,
        )
        service.core.models = self.manager
        self.attachment = attachment
        card = offer(text).card
        cards = [msgspec.structs.replace(card, id=name, aliases=(name[-1],)) for name in (A, B)]
        service._served._load = lambda files: Served(files.card, text, info=INFO)
        service.core.membership.offer([ModelFiles(found, "/m") for found in cards])
        self.manager.offer([LoadableModel(id=found.id, path=Path("/m"), memory_bytes=10) for found in cards])
        self.manager.start()

    def states(self) -> dict[str, str]:
        return {name[-1]: self.service.models.state(name) for name in (A, B)}

    async def until(self, **states: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not states.items() <= self.states().items():
                await asyncio.sleep(0.002)

    async def engine(self, model: str) -> FakeEngine:
        """Wait until the model's engine has a request."""
        async with asyncio.timeout(PATIENCE_S):
            while (engine := self.workers.engines.get(model)) is None or not engine.submitted:
                await asyncio.sleep(0.002)
        return engine

    def ask(self, model: str, **fields: object) -> "asyncio.Task[list[TextEvent]]":
        return asyncio.create_task(events_of(self.service, ask(model=model, **fields)))

    def finish(self, model: str) -> None:
        """End every request that runs on the model's engine."""
        engine = self.workers.engines[model]
        for request in engine.submitted:
            engine.step(TokenDelta(request.id, tokens.pack([EOS]), "stop"))


INFO = FakeEngine(Path("/x")).info
MakeBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def make(tmp_path: Path, text_model: TextModel, say: Callable[..., Script]) -> AsyncIterator[MakeBench]:
    made: list[Bench] = []

    async def open_bench(max_waiting: int = 64, **settings: Any) -> Bench:
        service = await open_service([], data_dir=tmp_path / "data", max_waiting=max_waiting)
        made.append(Bench(service, FakeWorkers(tmp_path, say("Hello!")), text_model, **settings))
        return made[-1]

    yield open_bench
    for bench in made:
        await bench.manager.close()
        await bench.service.close()
        for engine in bench.workers.engines.values():
            await engine.die()


@pytest.fixture
async def bench(make: MakeBench) -> Bench:
    return await make()


async def test_a_request_waits_while_its_model_is_loaded(bench: Bench) -> None:
    bench.workers.gate.clear()
    waiting = [bench.ask("a"), bench.ask(A)]
    await bench.until(a="loading", b="on_disk")
    assert (await bench.service.operations.health()).ok, "what is not loaded can be"
    bench.workers.gate.set()
    for answer in await asyncio.gather(*waiting):
        assert text_of(answer) == "Hello!"
    assert bench.states() == {"a": "loaded", "b": "on_disk"}
    assert bench.workers.log == ["load a"], "once for both"


async def test_workers_that_cannot_be_attached_end(bench: Bench) -> None:
    bench.attachment.error = OSError("no descriptors left")
    with pytest.raises(Unavailable, match="no descriptors left"):
        await bench.ask("a")
    assert bench.states()["a"] == "failed"
    assert bench.workers.log == ["load a", "unload a"]
    assert not bench.core.admission.worker_names()
    bench.attachment.error = None
    await bench.ask("b")
    assert bench.states()["b"] == "loaded"


async def test_waiting_keeps_the_rules_of_admission(make: MakeBench) -> None:
    """Deadlines hold, a full queue refuses, a client that leaves is forgotten."""
    bench = await make(max_waiting=4)
    bench.workers.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await bench.ask("a", deadline_s=0.05)
    waiting = [bench.ask("a") for _ in range(4)]
    await bench.until(a="loading")
    async with asyncio.timeout(PATIENCE_S):
        while sum(bench.core.admission.snapshot().waiting.values()) < 4:
            await asyncio.sleep(0.002)
    with pytest.raises(Overloaded, match="4 requests already wait"):
        await bench.ask("a")
    with pytest.raises(Overloaded):
        await bench.ask("a", reject_if_busy=True)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    bench.workers.gate.set()
    assert all(text_of(answer) == "Hello!" for answer in await asyncio.gather(*waiting[1:]))
    assert len(bench.workers.engines[A].submitted) == 3


async def test_idle_models_make_way_at_once_and_are_unloaded_after_a_while(make: MakeBench) -> None:
    bench = await make(keep_alive_s=0.3, switch_after_s=60.0)
    await bench.ask("a")
    await bench.ask("b")
    turns = ["load a", "unload a", "load b"]
    assert bench.workers.log[:3] == turns  # and b may be idle for long enough already
    await bench.until(a="on_disk", b="on_disk")
    await bench.ask("b")
    assert bench.workers.log[:5] == [*turns, "unload b", "load b"]


async def test_a_request_says_how_long_its_model_stays_loaded(make: MakeBench) -> None:
    now_s = [1000.0]
    bench = await make(keep_alive_s=60.0, clock=lambda: now_s[0])
    await bench.ask("a", keep_alive_s=0.0)
    await bench.until(a="on_disk")
    await bench.ask("a")
    await asyncio.sleep(0.1)
    assert bench.states()["a"] == "loaded", "the next request has its own wish, or none"
    await bench.core.load_model(A, "load", 0.05)
    now_s[0] += 0.06
    await bench.until(a="on_disk")
    await bench.ask("a", keep_alive_s=-1.0)
    (status, _) = bench.manager.statuses()
    assert (status["state"], status["unload_in_s"]) == ("loaded", None)
    await bench.ask("a", keep_alive_s=30.0)
    assert bench.manager.statuses()[0]["unload_in_s"] == 30.0


async def test_a_busy_model_finishes_its_requests_before_it_makes_way(bench: Bench) -> None:
    bench.workers.script = None
    running = bench.ask("a")
    engine = await bench.engine(A)
    other = bench.ask("b")
    await bench.until(a="unloading")
    late = bench.ask("a")  # waits for the next turn
    await asyncio.sleep(0.15)
    assert (len(engine.submitted), bench.workers.log) == (1, ["load a"])
    assert not running.done()
    bench.finish(A)
    await running
    await bench.engine(B)  # which makes way again soon after it is loaded
    bench.finish(B)
    await other
    await bench.engine(A)
    bench.finish(A)
    await late
    assert bench.workers.log == ["load a", "unload a", "load b", "unload b", "load a"]


async def test_a_failure_is_told_to_all_that_wait_and_tried_again_later(make: MakeBench) -> None:
    now_s = [1000.0]
    bench = await make(clock=lambda: now_s[0])
    bench.workers.error = ProcessFailed("a-0 exited with status 1: the weights are damaged")
    for result in await asyncio.gather(bench.ask("a"), bench.ask("a"), return_exceptions=True):
        assert isinstance(result, Unavailable)
        assert "could not be loaded: a-0 exited with status 1: the weights are damaged" in result.message
        assert result.retry_after_s is not None
    assert bench.states()["a"] == "failed"
    with pytest.raises(Unavailable, match="the weights are damaged"):
        await bench.ask("a")
    assert bench.workers.log == ["load a"], "not before the backoff has passed"
    bench.workers.error = None
    now_s[0] += 2 * FIRST_RETRY_S
    assert text_of(await bench.ask("a")) == "Hello!"


async def test_a_model_that_fails_for_days_is_still_tried(bench: Bench) -> None:
    bench.manager.switching.models[A].n_failures = 5000
    bench.workers.error = ProcessFailed("no room")
    with pytest.raises(Unavailable, match="no room"):
        await bench.ask("a")
    assert bench.states()["a"] == "failed"


async def test_what_can_never_fit_is_refused_with_the_reason(make: MakeBench) -> None:
    bench = await make(memory_bytes=9)
    with pytest.raises(Unavailable, match="raise \\[models\\] memory_bytes"):
        await bench.ask("a")
    with pytest.raises(Unavailable, match="raise \\[models\\] memory_bytes"):
        await bench.service.operations.load_model("a", "load")


async def test_an_operator_loads_and_unloads(bench: Bench) -> None:
    await bench.service.operations.load_model("A", "load")
    assert bench.service.models.find("A", None).id == A
    assert bench.states() == {"a": "loaded", "b": "on_disk"}
    bench.workers.engines[A].script = None
    running = bench.ask("a")
    await bench.workers.engines[A].submission()
    unloading = asyncio.create_task(bench.service.operations.load_model("a", "unload"))
    await bench.until(a="unloading")
    assert not unloading.done()
    bench.finish(A)
    await asyncio.gather(running, unloading)
    assert bench.states()["a"] == "on_disk"
    exposed = {sample.name: sample.value for family in bench.manager.metrics.collect() for sample in family.samples}
    assert exposed["emberline_model_loads_total"] == 1
    assert exposed["emberline_model_load_seconds_total"] > 0
    bench.workers.error = OSError("no memory")
    with pytest.raises(Unavailable, match="no memory"):
        await bench.service.operations.load_model("b", "load")
    with pytest.raises(NotFound):
        await bench.core.load_model("@cf/test/none", "load")


async def test_an_operator_who_asks_for_a_model_that_was_to_leave_has_it(bench: Bench) -> None:
    await bench.service.operations.load_model("a", "load")
    bench.workers.engines[A].script = None
    running = bench.ask("a")
    await bench.workers.engines[A].submission()
    other = asyncio.create_task(bench.service.operations.load_model("a", "unload"))
    await bench.until(a="unloading")
    async with asyncio.timeout(PATIENCE_S):
        await bench.service.operations.load_model("a", "load")
        await other
    assert bench.states()["a"] == "loaded"
    bench.finish(A)
    await running


async def test_unloading_ends_with_a_failure_to_load_and_loading_with_the_removal(bench: Bench) -> None:
    bench.workers.gate.clear()
    bench.workers.error = OSError("no memory")
    request = bench.ask("a")
    await bench.until(a="loading")
    unloading = asyncio.create_task(bench.core.load_model(A, "unload"))
    async with asyncio.timeout(PATIENCE_S):
        while not bench.manager.switching.models[A].asked:
            await asyncio.sleep(0.002)
        loading = asyncio.create_task(bench.core.load_model(B, "load"))  # has no room yet
        while not bench.manager.switching.models[B].asked:
            await asyncio.sleep(0.002)
        bench.manager.offer([])
        with pytest.raises(NotFound, match="removed"):
            await loading
        bench.workers.gate.set()
        await unloading
    assert isinstance((await asyncio.gather(request, return_exceptions=True))[0], Unavailable)


async def test_queued_jobs_load_their_model(bench: Bench) -> None:
    bench.core.grants.queued({A: 1.0})
    await bench.until(a="loaded")
    (grant,) = bench.core.grants.issue(A, 1)
    bench.core.grants.queued({B: 1000.0})
    await bench.until(a="unloading")
    assert not bench.core.grants.issue(A, 1), "jobs of the model that makes way are claimed no more"
    await asyncio.sleep(0.1)
    assert "unload a" not in bench.workers.log, "a job was granted room there"
    grant.release()
    await bench.until(b="loaded")


async def test_a_client_that_leaves_lets_the_model_stay(bench: Bench) -> None:
    bench.workers.script = None
    running = bench.ask("a")
    await bench.engine(A)
    other = bench.ask("b")
    await bench.until(a="unloading")
    other.cancel()
    await bench.until(a="loaded")
    late = bench.ask("a")
    await bench.workers.engines[A].submission(2)
    bench.finish(A)
    await asyncio.gather(running, late)


async def test_switching_under_load_ends_every_request_once(bench: Bench, tmp_path: Path) -> None:
    """Two models, one place, clients of both that leave at random: whoever stays is answered in full, with one row."""
    requests = [ask(model="ab"[n % 2 if n < 40 else n % 3 // 2]) for n in range(60)]

    async def run(number: int) -> str:
        await asyncio.sleep(0.01 * number)
        async with aclosing(bench.service.run(Work(requests[number], ALICE))) as events:
            return text_of([event async for event in events])

    tasks = [asyncio.create_task(run(number)) for number in range(60)]
    for number in range(5, 60, 9):
        asyncio.get_running_loop().call_later(0.01 * number + 0.03, tasks[number].cancel)
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert result == "Hello!" or isinstance(result, asyncio.CancelledError), result
    finished = [n for n, result in enumerate(results) if result == "Hello!"]
    assert len(finished) >= 60 - len(range(5, 60, 9))
    for number in finished:
        row = await row_of(bench.service, requests[number])
        assert (row.status, row.output_tokens) == ("finished", len("Hello!") + 1)
    assert bench.workers.log.count("load a") + bench.workers.log.count("load b") >= 2
    snapshot = bench.core.admission.snapshot()
    assert (snapshot.dispatched, sum(snapshot.waiting.values())) == (0, 0)


async def test_http_workers_follow(bench: Bench, text_model: TextModel, tmp_path: Path) -> None:
    server = await open_core_server(bench.service, tmp_path / "core.sock")
    worker = await open_http_worker([], core_socket=tmp_path / "core.sock")
    worker._served._load = lambda files: Served(files.card, text_model, info=INFO)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while [card.id for card in worker.models.cards()] != [A, B]:
                await asyncio.sleep(0.002)
        assert worker.models.state(A) == "on_disk"
        for model in ("a", "b", "a"):
            assert text_of(await events_of(worker, ask(model=model))) == "Hello!"
            assert text_of(await events_of(bench.service, ask(model=model))) == "Hello!"
        await worker.operations.load_model("a", "unload")
        async with asyncio.timeout(PATIENCE_S):
            while worker.models.state(A) != "on_disk":
                await asyncio.sleep(0.002)
        assert not worker.engines, "its connection is closed, too"
    finally:
        await worker.close()
        await server.close()


async def test_named_models_stay_until_they_are_stopped(
    tmp_path: Path, text_model: TextModel, say: Callable[..., Script]
) -> None:
    workers = FakeWorkers(tmp_path, say("Hello!"))
    (endpoint,) = await workers.load(A, Path("/m"), 0)
    card = msgspec.structs.replace(offer(text_model).card, id=A)
    service = await open_service([Served(card, text_model, (endpoint,))], data_dir=tmp_path / "data")
    assert await service.ready(PATIENCE_S)
    bench = Bench(service, workers, text_model, keep_alive_s=0.0)
    bench.manager.add_loaded(LoadableModel(id=A, path=Path("/m"), memory_bytes=10), [endpoint])
    try:
        await bench.ask(A)
        with pytest.raises(Unavailable, match="max_loaded is 1, and as many models stay loaded"):
            await bench.ask("b")
        await service.operations.load_model(A, "unload")
        assert await bench.ask("b")
        assert text_of(await bench.ask(A)) == "Hello!", "loaded again for a request"
        await bench.until(a="on_disk")
    finally:
        await bench.manager.close()
        await service.close()
        for engine in workers.engines.values():
            await engine.die()
