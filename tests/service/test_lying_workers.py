"""Workers with a valid join token that say what cannot be true, over real sockets: clients notice nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from emberline.balancer.stall_detector import StallLimits
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.timings import Timings
from emberline.protocol import token_ids as tokens
from emberline.protocol.frames import EngineLoad, Heartbeat, Step
from emberline.service import Service
from tests.service.conftest import Opener
from tests.service.fake_engine import FakeEngine, Script
from tests.service.test_service import PATIENCE_S, ask, events_of, text_of

TEXT = "Hello there, this is what was computed."
Lie = Callable[[Step], Sequence[Step]]


def with_load(step: Step, **load: int) -> Step:
    return msgspec.structs.replace(step, load=msgspec.structs.replace(step.load, **load))


def with_ids(step: Step, ids: bytes) -> Step:
    deltas = [msgspec.structs.replace(delta, token_ids=ids) for delta in step.deltas]
    return msgspec.structs.replace(step, deltas=deltas)


def from_third(lie: Lie) -> Lie:
    """Tell the truth for two steps of a reply, then lie."""
    n_steps = 0

    def told(step: Step) -> Sequence[Step]:
        nonlocal n_steps
        n_steps += bool(step.deltas)
        return lie(step) if n_steps == 3 else (step,)

    return told


LIES: dict[str, tuple[Lie, str]] = {
    "a token beyond the vocabulary": (lambda step: [with_ids(step, tokens.pack([512]))], "its vocabulary has 512"),
    "the largest token id": (lambda step: [with_ids(step, b"\xff" * 4)], "its vocabulary has 512"),
    "a part of a token id": (lambda step: [with_ids(step, b"\1\0\0\0\1")], "a part of a token id"),
    "a delta twice": (
        lambda step: [msgspec.structs.replace(step, deltas=[*step.deltas, *step.deltas])],
        "some were repeated or lost",
    ),
    "a step twice": (lambda step: [step, step], "some were repeated or lost"),
    "a step left out": (lambda step: [], "some were repeated or lost"),
    "more tokens than it counts": (lambda step: [with_ids(step, tokens.pack([70, 71]))], "some were repeated or lost"),
    "negative load": (lambda step: [with_load(step, running=-5)], "a count is negative"),
    "a negative queue": (lambda step: [with_load(step, waiting=-5)], "a count is negative"),
    "more KV than it has": (lambda step: [with_load(step, kv_used_blocks=1 << 20)], "more KV blocks are in use"),
    "steps that go back": (lambda step: [with_load(step, steps=0)], "it counts backwards"),
}


def rest(say: Callable[..., Script]) -> Script:
    """Says what of the text is not said yet."""
    whole = say(TEXT)
    return lambda sent: list(whole(sent))[tokens.count(sent.output_ids) :]


@pytest.fixture
async def engines(tmp_path: Path, say: Callable[..., Script]) -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    """A liar and an honest one."""
    made = [await FakeEngine(tmp_path / f"{name}.sock", rest(say), name=name).start() for name in ("liar", "honest")]
    yield made[0], made[1]
    for engine in made:
        await engine.die()


async def replies(service: Service, liar: FakeEngine) -> list[str]:
    """Ask until the liar has had a request, and once more."""
    said: list[str] = []
    for turn in range(40):
        said.append(text_of(await asyncio.wait_for(events_of(service, ask(f"{turn:016}")), PATIENCE_S)))
        if liar.submitted:
            break
    said.append(text_of(await asyncio.wait_for(events_of(service, ask("f" * 16)), PATIENCE_S)))
    return said


async def state_of(service: Service, name: str) -> str:
    engines = (await service.operations.health()).detail["engines"]
    return next(str(engine["state"]) for engine in engines if engine["name"] == name)


@pytest.mark.parametrize("name", LIES)
async def test_a_liar_is_disconnected_and_its_requests_move(
    engines: tuple[FakeEngine, FakeEngine], open_one: Opener, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    liar, honest = engines
    lie, why = LIES[name]
    liar.lie = from_third(lie)
    service = await open_one(liar, honest, timings=Timings(first_retry_s=0.001, last_retry_s=0.001))
    said = await replies(service, liar)
    assert liar.submitted, "it was asked"
    assert said == [TEXT] * len(said)
    told = [record for record in caplog.records if "engine liar is not believed" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.ERROR]
    assert why in told[0].getMessage()
    assert "left out for 60 s" in told[0].getMessage()
    assert await state_of(service, "liar") != "ready"
    for _ in range(20):  # it is not connected to again, however short the delays between attempts are
        await asyncio.sleep(0.005)
        assert not liar.links
    (worker,) = [worker for worker in service.core.admission.snapshot().workers if worker.name == "liar"]  # type: ignore[attr-defined]
    assert worker.state != "ready"


@pytest.mark.parametrize("computing", [False, True], ids=["idle", "computing"])
async def test_a_worker_that_is_alive_and_sends_no_steps_loses_its_requests(
    tmp_path: Path, say: Callable[..., Script], open_one: Opener, caplog: pytest.LogCaptureFixture, computing: bool
) -> None:
    liar = await FakeEngine(tmp_path / "l.sock", rest(say), name="liar", heartbeat_s=0.01).start()
    honest = await FakeEngine(tmp_path / "h.sock", rest(say), name="honest").start()
    n_computed = 0

    def beat() -> Heartbeat:
        nonlocal n_computed
        n_computed += computing
        return Heartbeat(n_computed, in_step=computing)

    async def beating() -> None:
        while True:
            for link in liar.links:
                link.send(beat())
            await asyncio.sleep(0.01)

    beats = asyncio.create_task(beating())
    n_steps = 0

    def drop(step: Step) -> Sequence[Step]:
        nonlocal n_steps
        n_steps += bool(step.deltas)
        return [step] if n_steps < 3 else []

    liar.lie = drop
    stalls = StallLimits(check_s=0.01)
    service = await open_one(liar, honest, timings=Timings(stalls=stalls, no_step_s=0.2, no_work_s=0.2))
    try:
        said = await replies(service, liar)
        assert liar.submitted, "it was asked"
        assert said == [TEXT] * len(said)
        assert ("it computes, but has sent no step" if computing else "has taken no step") in caplog.text
    finally:
        beats.cancel()
        await liar.die()
        await honest.die()


async def test_an_impossible_first_report_is_no_welcome(
    engines: tuple[FakeEngine, FakeEngine], open_one: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    liar, honest = engines
    liar.first_load = EngineLoad(running=-1)
    service = await open_one(honest)
    client = EngineClient(liar.endpoint)
    client.start()
    while not client.problem.startswith("a count is negative"):
        await asyncio.sleep(0.001)
    assert not client.connected
    assert client.load == EngineLoad(), "nobody is shown it"
    await client.close()
    assert text_of(await events_of(service, ask())) == TEXT
