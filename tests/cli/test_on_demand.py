"""`emberline serve` with more models than may be loaded: stand-in engines behind two HTTP workers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.grants import Grants
from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_files import ModelFiles
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.cli import http_client as client
from emberline.cli.http_client import ChatTiming
from emberline.cli.main import main
from emberline.cluster.timings import Timings
from emberline.config import Config, resolve
from emberline.server import on_demand_models as on_demand
from emberline.server.address import ServerAddress
from emberline.server.core_process import serve
from emberline.server.listener import bind
from emberline.server.on_demand_models import OnDemandModels
from tests.standin import standin_worker

NAMED, OTHER = "@local/models/smollm2", "@local/models/other"
PATIENCE_S = 60.0
TIMINGS = Timings(model_scan_s=0.05)


@pytest.fixture
def home(smollm2: Path, tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    return tmp_path


@pytest.fixture
def small(tiny_model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two model folders, smollm2 and other: stand-in engines do not read them, and HTTP workers read them soon."""
    folders = tmp_path / "smollm2", tmp_path / "other"
    for folder in folders:
        folder.symlink_to(tiny_model)
    return folders


@asynccontextmanager
async def running(config: Config, entries: Sequence[ModelEntry]) -> AsyncIterator[ServerAddress]:
    stop = asyncio.Event()
    ready: asyncio.Future[ServerAddress] = asyncio.get_running_loop().create_future()

    def announce(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address)

    with bind(config.server) as listener:
        serving = asyncio.create_task(serve(config, entries, listener, announce, stop, TIMINGS, standin_worker()))
        await asyncio.wait([serving, ready], timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), serving
        yield ready.result()
        stop.set()
        await asyncio.wait_for(serving, 60)


CLIENTS = ThreadPoolExecutor(16)  # not the event loop's own threads, which the server in this process needs


async def call(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(CLIENTS, function, *args)


async def chat(address: ServerAddress, model: str) -> int:
    timing = ChatTiming()
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    await call(list, client.chat(address, body, timing))
    return timing.output_tokens


async def states(address: ServerAddress) -> dict[str, str]:
    return {model["id"]: model["state"] for model in (await call(client.get, address, "/api/ps"))["model_states"]}


async def listed(address: ServerAddress) -> dict[str, str]:
    return {row["root"]: row["state"] for row in (await call(client.get, address, "/v1/models"))["data"]}


async def test_two_models_take_turns_behind_two_http_workers(small: tuple[Path, Path], tmp_path: Path) -> None:
    store, paths = ModelStore(tmp_path), [str(path) for path in small]
    flags = {"server.port": 0, "server.http_workers": 2, "server.drain_timeout_s": 2, "models.max_loaded": 1}
    config = resolve({**flags, "models.switch_after_s": 0.2, "engine.models": paths}, {}, tmp_path)
    async with running(config, [store.resolve(path) for path in paths]) as address:
        assert await states(address) == {NAMED: "loaded", OTHER: "on_disk"}
        names = ("smollm2", OTHER)
        assert await asyncio.gather(*(chat(address, names[n % 2]) for n in range(12))) == [3] * 12
        assert sorted((await states(address)).values()) == ["loaded", "on_disk"]
        await call(client.post, address, "/api/models/load", {"model": "smollm2"})
        assert await states(address) == {NAMED: "loaded", OTHER: "on_disk"}
        await call(client.post, address, "/api/models/unload", {"model": "smollm2"})
        assert set((await states(address)).values()) == {"on_disk"}
        assert (await call(client.get, address, "/health"))["status"] == "ok"
        async with asyncio.timeout(PATIENCE_S):  # each HTTP worker hears of it from the core
            while await listed(address) != dict.fromkeys((NAMED, OTHER), "on_disk"):
                await asyncio.sleep(0.02)


async def test_a_model_pulled_meanwhile_is_loaded_beside_the_named_one(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    store, (named, other) = ModelStore(tmp_path), small
    entry = store.resolve(str(named))
    config = resolve({"server.port": 0, "server.drain_timeout_s": 2}, {}, tmp_path)
    async with running(config, [entry]) as address:
        assert await states(address) == {NAMED: "loaded"}
        assert await call(main, ["pull", str(other), "--data-dir", str(tmp_path)]) == 0
        assert await states(address) == {NAMED: "loaded", OTHER: "on_disk"}, "known once pull returns"
        assert await chat(address, "other") == 3
        assert await states(address) == {NAMED: "loaded", OTHER: "loaded"}
        assert await call(main, ["rm", "other", "--data-dir", str(tmp_path)]) == 0
        async with asyncio.timeout(PATIENCE_S):
            while len(await listed(address)) > 1:
                await asyncio.sleep(0.02)
        await call(client.post, address, "/api/models/unload", {"model": "smollm2"})
        assert await chat(address, "smollm2") == 3, "a named model that was stopped is loaded again"


def test_memory_and_models_at_start(home: Path) -> None:
    local = {"a": Path("/a"), "b": Path("/b")}
    assert on_demand.memory_limit(resolve({"engine.device": "cpu"}, {}, home), free_bytes=lambda: 10 << 30) == 8 << 30
    assert on_demand.memory_limit(resolve({"models.memory_bytes": "3G"}, {}, home)) == 3 << 30
    assert on_demand.loaded_at_start(resolve({}, {}, home), local) == local
    assert on_demand.loaded_at_start(resolve({"models.max_loaded": 2}, {}, home), local) == local
    assert on_demand.loaded_at_start(resolve({"models.max_loaded": 1}, {}, home), local) == {}
    assert on_demand.memory_limit(resolve({}, {}, home), lambda: ["0"]) > 1 << 60


class FakeMembership:
    def __init__(self) -> None:
        self.offered: list[str] = []

    def offer(self, models: Sequence[ModelFiles]) -> None:
        self.offered = [model.card.id for model in models]

    def show_states(self, states: object, problems: object) -> None: ...

    def reported_problem(self, model: str) -> str:
        return ""


async def offered(config: Config, named: Sequence[ModelEntry] = (), elsewhere: bool = False) -> list[str]:
    admission, membership = AdmissionController(), FakeMembership()
    core = SimpleNamespace(
        membership=membership,
        admission=admission,
        grants=Grants(admission.balancer.fleet),
        register=lambda metrics: None,
    )
    workers: Any = SimpleNamespace(problem=lambda model: "")
    models = OnDemandModels(config, 1 << 40, named, (), workers, core, lambda card: elsewhere)  # type: ignore[arg-type]
    await models.open()
    await models.close()
    return membership.offered


async def test_which_models_are_loaded_on_demand(home: Path) -> None:
    config, entry = resolve({}, {}, home), ModelStore(home).resolve("smollm2")
    assert await offered(config) == [DEFAULT_MODEL]
    assert await offered(config, elsewhere=True) == [], "an upstream server, or another machine, has it"
    assert await offered(config, [entry], elsewhere=True) == [DEFAULT_MODEL], "it was named for this machine, too"
    assert await offered(resolve({"models.on_demand": False}, {}, home)) == []
    (home / "emberline.toml").write_text('[[endpoints]]\nname = "v"\nurl = "http://10.0.0.8:8000"\n')
    assert await offered(resolve({}, {}, home)) == [], "a server without workers of its own"


def test_weights_that_draft_are_counted(home: Path, tmp_path: Path) -> None:
    model, head = tmp_path / "small.gguf", tmp_path / "head"
    model.write_bytes(bytes(1000))
    head.mkdir()
    (head / "model.safetensors").write_bytes(bytes(300))
    for keys, expected in (
        ({}, 0),
        ({"engine.draft_model": str(model)}, 1000),
        ({"engine.draft_head": str(head)}, 300),
        ({"engine.draft_model": str(model), "engine.speculation": "suffix"}, 0),
    ):
        assert on_demand.drafter_bytes(resolve(keys, {}, home).engine) == expected
