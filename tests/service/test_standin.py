"""The pipeline against a real engine process: our scheduler, prefix cache and socket, without a model."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from emberline.balancer.endpoint import Endpoint
from emberline.balancer.stall_detector import StallLimits
from emberline.cluster.timings import Timings
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import Internal, Overloaded, Unavailable
from emberline.protocol.events import Completed, TextDelta
from emberline.protocol.request import Message, Principal
from emberline.service import Served, Service, open_service
from emberline.service.work import Work
from emberline.telemetry.status import StatusQuery
from emberline.text.text_model import TextModel
from tests.service.conftest import ALICE, PATIENCE_S, offer
from tests.service.test_pricing import PRICE, set_price
from tests.service.test_service import ask, events_of, in_flight, row_of, rows, settled, text_of

TOKEN = "a-token-to-join"


class Standin:
    def __init__(self, path: Path, name: str = "e0", flags: tuple[str, ...] = ()) -> None:
        self.endpoint = Endpoint(name=name, address=f"unix:{path}", token=TOKEN)
        self._flags = flags
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "standins.standin_engine", "--socket", self.endpoint.address),
                *("--vocab-size", "259", "--eos-ids", "2", "--context-len", "4096"),
                *self._flags,
            ],
            env={**os.environ, "EMBERLINE_WORKER_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        assert b'"ready": true' in self._process.stdout.readline()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    """Shared: a test that stops it starts it again."""
    standin = Standin(tmp_path_factory.mktemp("standin") / "engine.sock")
    yield standin
    standin.stop()


@pytest.fixture
async def service(standin: Standin, text_model: TextModel, tmp_path: Path) -> AsyncIterator[Service]:
    served = Served(offer(text_model).card, text_model, (standin.endpoint,))
    service = await open_service([served], data_dir=tmp_path / "data")
    assert await service.ready(PATIENCE_S)
    yield service
    await service.close()


def usage_of(events: list[object]) -> Completed:
    assert isinstance(events[-1], Completed)
    return events[-1]


async def test_a_conversation_finds_its_beginning_in_the_cache(service: Service, text_model: TextModel) -> None:
    prompt = "say something long enough to fill several blocks of sixteen tokens"
    said = tokens.unpack(text_model.encode("a reply of more than sixteen tokens, too", special=False))
    first = ask(prompt, session=f"standin:say={'.'.join(map(str, said))}")
    reply = text_of(await events_of(service, first))
    assert reply == "a reply of more than sixteen tokens, too"
    turns = (*(first.messages or ()), Message("assistant", reply), Message("user", "go on"))
    usage = usage_of(list(await events_of(service, ask(messages=turns, session="s1")))).usage
    n_first = await service.count_tokens(first, ALICE)
    assert usage.cached_tokens == (n_first + len(reply)) // 16 * 16
    other = usage_of(list(await events_of(service, ask(messages=turns, session="s1"), Principal("bob", "", b"b" * 16))))
    assert other.usage.cached_tokens == 0
    assert other.usage.prompt_tokens == usage.prompt_tokens


async def test_eight_streams_at_once(service: Service) -> None:
    script = "standin:say=count,itl_ms=1"
    requests = [ask(f"stream {n}", session=script, sampling={"max_tokens": 100}) for n in range(8)]
    for events in await asyncio.gather(*(events_of(service, request) for request in requests)):
        assert usage_of(list(events)).usage.completion_tokens == 100
    assert await rows(service) == 8


async def test_a_client_that_leaves_frees_the_engine(service: Service) -> None:
    request = ask(session="standin:say=count,itl_ms=5", sampling={"max_tokens": 2000})
    async with aclosing(service.run(Work(request, ALICE))) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                break
    assert (await row_of(service, request)).status == "cancelled"
    await events_of(service, ask(session="standin:say=count", sampling={"max_tokens": 2}))
    (engine,) = (await service.operations.health()).detail["engines"]
    assert engine["load"]["running"] + engine["load"]["waiting"] <= 1
    assert engine["in_flight"] == 0


@pytest.mark.parametrize(
    ("fault", "error"), [("error_after=2", Internal), ("drop_after=2", Unavailable), ("refuse=true", Overloaded)]
)
async def test_faults_are_the_request_s_own(service: Service, fault: str, error: type[Exception]) -> None:
    request = ask(session=f"standin:say=count,{fault}", sampling={"max_tokens": 9})
    with pytest.raises(error):
        await events_of(service, request)
    assert (await row_of(service, request)).status == "failed"
    assert await service.ready(PATIENCE_S)
    assert text_of(await events_of(service, ask("still here?")))
    await settled(service)
    assert in_flight(service) == 0


async def test_an_engine_that_died_early_is_replaced(service: Service, standin: Standin) -> None:
    slow = ask("patience", session="standin:say=echo,ttft_ms=400")
    waiting = asyncio.create_task(events_of(service, slow))
    await asyncio.sleep(0.1)
    standin.stop()
    await asyncio.to_thread(standin.start)
    assert "patience" in text_of(await waiting)
    assert (await row_of(service, slow)).status == "finished"


async def test_an_engine_that_hangs_is_not_healthy(standin: Standin, text_model: TextModel, tmp_path: Path) -> None:
    timings = Timings(restart_wait_s=0.2, stalls=StallLimits(min_stall_s=0.2))
    served = Served(offer(text_model).card, text_model, (standin.endpoint,))
    service = await open_service([served], data_dir=tmp_path / "impatient", timings=timings)
    assert await service.ready(PATIENCE_S)
    task = asyncio.create_task(events_of(service, ask(session="standin:say=count,hang_after=1")))
    async with asyncio.timeout(PATIENCE_S):
        while not in_flight(service):
            await asyncio.sleep(0.005)
        while (await service.operations.health()).ok:
            await asyncio.sleep(0.005)
        (described,) = (await service.operations.health()).detail["engines"]
        assert described["problem"]
        with pytest.raises(Unavailable):
            await task
    await service.close()
    standin.stop()
    await asyncio.to_thread(standin.start)


async def test_streams_of_a_stopped_engine_move_and_it_is_trusted_again_after_a_canary(
    standin: Standin, text_model: TextModel, tmp_path: Path
) -> None:
    other = await asyncio.to_thread(Standin, tmp_path / "e1.sock", "e1")
    served = Served(offer(text_model).card, text_model, (standin.endpoint, other.endpoint))
    timings = Timings(stalls=StallLimits(silent_s=1.0, check_s=0.1))
    service = await open_service([served], data_dir=tmp_path / "data", timings=timings)
    assert await service.ready(PATIENCE_S)
    script = {"session": "standin:say=count,itl_ms=20", "sampling": {"max_tokens": 40, "ignore_eos": True}}
    expected = text_of(await events_of(service, ask("alone", **script)))
    streams = [asyncio.create_task(events_of(service, ask(f"{n} {'x' * 40}", **script))) for n in range(6)]
    async with asyncio.timeout(60):
        while not all(engine["in_flight"] for engine in (await service.operations.health()).detail["engines"]):
            await asyncio.sleep(0.005)
        other.pause()
        assert [text_of(events) for events in await asyncio.gather(*streams)] == [expected] * 6
    async with asyncio.timeout(60):  # its own streams may have ended just before it was stopped
        while (e1 := (await service.operations.health()).detail["engines"][1])["ok"]:
            await asyncio.sleep(0.005)
    assert e1["in_flight"] == 0
    assert (await service.operations.health()).ok, "the other engine serves the model"
    other.resume()
    async with asyncio.timeout(60):
        while not all(engine["ok"] for engine in (await service.operations.health()).detail["engines"]):
            await asyncio.sleep(0.005)
    await service.close()
    other.stop()


async def test_a_prompt_that_is_abandoned_half_way_is_paid_as_far_as_it_was_computed(
    text_model: TextModel, tmp_path: Path
) -> None:
    standin = Standin(tmp_path / "chunks.sock", flags=("--token-budget", "64", "--script", "chunk_ms=20"))
    served = Served(offer(text_model).card, text_model, (standin.endpoint,))
    service = await open_service([served], data_dir=tmp_path / "chunked")
    try:
        assert await service.ready(PATIENCE_S)
        await set_price(service, PRICE)
        request = ask("x" * 2000)
        running = asyncio.create_task(events_of(service, request))
        while (await service.operations.status(StatusQuery())).workers[0].prompt_tokens < 128:
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        row = await row_of(service, request)
        assert row.status == "cancelled"
        assert 128 <= row.input_tokens < 2000
        assert row.cost_pico == row.input_tokens * PRICE.input
        retried = usage_of([*await events_of(service, ask("x" * 2000))])
        assert retried.usage.cached_tokens <= row.input_tokens, "what a retry finds in the cache was paid once"
        assert retried.usage.cached_tokens >= 128
    finally:
        await service.close()
        standin.stop()
