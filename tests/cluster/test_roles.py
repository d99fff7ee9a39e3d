"""Workers change their roles while requests run: nothing is lost, neither streams nor prefix caches."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.cluster.membership import WorkerChange
from emberline.cluster.timings import Timings
from emberline.protocol.errors import Conflict, NotFound, Unavailable
from emberline.protocol.events import Completed
from emberline.service import Served, Service, open_service
from emberline.text.text_model import TextModel
from tests.cluster.test_membership import until
from tests.service.conftest import PATIENCE_S, Opener, offer
from tests.service.fake_engine import FakeEngine
from tests.service.test_service import ask, events_of, in_flight
from tests.service.test_standin import Standin

LONG = "a prompt of many tokens, since each byte is one of them here; " * 16


class Pair:
    """A prefill and a decode worker, as processes."""

    def __init__(self, service: Service, workers: list[Standin]) -> None:
        self.service = service
        self.workers = workers

    async def set_role(self, name: str, role: str, wait_s: float = 0.0) -> None:
        change = WorkerChange(action="role", name=name, role=role, wait_s=wait_s)  # type: ignore[arg-type]
        assert await self.service.cluster_admin.change_workers(change) == [name]

    async def ask(self, prompt: str, n: int = 4, itl_ms: int = 0) -> Completed:
        request = ask(prompt, session=f"standin:say=count,itl_ms={itl_ms}", sampling={"max_tokens": n})
        completed = (await events_of(self.service, request))[-1]
        assert isinstance(completed, Completed)
        assert completed.usage.completion_tokens == n
        return completed

    async def until_received_by(self, name: str) -> str:
        """Prompts, until the other worker computes one, as soon as the balancer thinks that it pays: that one."""
        before = (await self.loads("blocks_received"))[name]
        async with asyncio.timeout(PATIENCE_S):
            for n in itertools.count():
                prompt = f"{name} {n}: {LONG}"
                await self.ask(prompt)
                if (await self.loads("blocks_received"))[name] > before:
                    return prompt

    async def engines(self) -> dict[str, dict[str, object]]:
        return {each["name"]: each for each in (await self.service.operations.health()).detail["engines"]}

    async def loads(self, key: str) -> dict[str, int]:
        return {name: each["load"][key] for name, each in (await self.engines()).items()}  # type: ignore[index]


@pytest.fixture
async def pair(text_model: TextModel, tmp_path: Path) -> AsyncIterator[Pair]:
    workers = [Standin(tmp_path / f"{role}.sock", role, ("--role", role)) for role in ("prefill", "decode")]
    served = Served(offer(text_model).card, text_model, tuple(worker.endpoint for worker in workers))
    service = await open_service([served], data_dir=tmp_path / "data", timings=Timings(role_s=PATIENCE_S))
    assert await service.ready(PATIENCE_S)
    yield Pair(service, workers)
    await service.close()
    for worker in workers:
        worker.stop()


async def test_two_workers_exchange_their_roles_under_a_running_stream(pair: Pair) -> None:
    """KV goes the other way afterwards, and what each has cached is found."""
    both_have = await pair.until_received_by("decode")
    assert (await pair.loads("blocks_received"))["prefill"] == 0
    running = asyncio.create_task(pair.ask("a long reply", 200, itl_ms=5))
    await until(lambda: in_flight(pair.service))
    with pytest.raises(Conflict, match=r"last worker of .* that decodes"):
        await pair.set_role("decode", "prefill")
    await pair.set_role("prefill", "decode")
    await pair.set_role("decode", "prefill", wait_s=PATIENCE_S)
    assert not in_flight(pair.service), "it ran where the role has changed, and was waited for"
    await running
    engines = await pair.engines()
    assert {name: engine["role"] for name, engine in engines.items()} == {"prefill": "decode", "decode": "prefill"}
    assert (await pair.ask(both_have)).usage.cached_tokens > 900
    await pair.until_received_by("prefill")


async def test_a_worker_of_this_machine_has_its_new_role_again_after_a_restart(pair: Pair) -> None:
    await pair.set_role("prefill", "both")
    pair.workers[0].stop()
    await until(lambda: not pair.service.engines["prefill"].connected)
    pair.workers[0].start()

    async def is_back() -> bool:
        engine = (await pair.engines())["prefill"]
        return bool(engine["ok"]) and engine["role"] == "both"

    async with asyncio.timeout(PATIENCE_S):
        while not await is_back():
            await asyncio.sleep(0.02)
    await pair.ask("hello")


async def test_a_worker_that_drains_does_not_decode_for_another(pair: Pair) -> None:
    await pair.set_role("prefill", "both")
    await pair.service.cluster_admin.change_workers(WorkerChange(action="drain", name="prefill"))
    with pytest.raises(Conflict, match=r"last worker of .* that decodes"):
        await pair.set_role("decode", "prefill")
    await pair.ask("hello")
    await pair.service.cluster_admin.change_workers(WorkerChange(action="undrain", name="prefill"))
    await pair.set_role("decode", "prefill")
    await pair.service.cluster_admin.change_workers(WorkerChange(action="drain", name="prefill"))
    await pair.set_role("decode", "prefill")  # it has that role


async def test_what_cannot_be(engine: FakeEngine, open_one: Opener) -> None:
    service = await open_one(engine, timings=Timings(role_s=0.05))
    with pytest.raises(NotFound, match="no worker is called w9"):
        await service.cluster_admin.change_workers(WorkerChange(action="role", name="w9", role="both"))
    with pytest.raises(Conflict, match="does not receive KV"):
        await service.cluster_admin.change_workers(WorkerChange(action="role", name="e0", role="prefill"))
    engine.info = type(engine.info)(**{**engine_facts(engine), "role": "decode", "transfers": ("tcp",)})
    await engine.die()
    await engine.start()
    client = service.engines["e0"]
    await until(lambda: client.connected and client.role == "decode")
    engine.takes_roles = False
    with pytest.raises(Unavailable, match="gets it once it answers"):
        await service.cluster_admin.change_workers(WorkerChange(action="role", name="e0", role="both"))


def engine_facts(engine: FakeEngine) -> dict[str, object]:
    return {name: getattr(engine.info, name) for name in engine.info.__struct_fields__}
