"""Jobs in the pipeline: they run on the worker they were granted; the queue writes their usage row."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from emberline.accounts.usage_ledger import UsageLedger
from emberline.accounts.usage_row import UsageRow
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import EngineLost, Unavailable
from emberline.protocol.events import Completed, TextDelta, TokenDelta
from emberline.protocol.request import GenerateRequest, Message, Priority
from emberline.service import Service
from emberline.service.core import LocalCore
from emberline.service.event_collector import collect_answer
from emberline.service.work import Work
from emberline.telemetry.request_log import JobContext
from emberline.text.text_model import TextModel
from tests.service.fake_engine import EOS, FakeEngine, Script

from .conftest import ALICE, MODEL, PATIENCE_S, Opener


def queued(name: str = "b-0") -> GenerateRequest:
    return GenerateRequest(id=name, model=MODEL, messages=(Message("user", "Hi"),), priority=Priority.BATCH)


async def until(condition: Callable[[], bool]) -> None:
    """What a cancelled request held is given back after it has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def ledger_of(service: Service) -> UsageLedger:
    assert isinstance(service.core, LocalCore)
    return service.core.usage


async def test_the_usage_row_of_a_job_is_handed_to_its_queue(service: Service) -> None:
    rows: list[UsageRow] = []
    answer = await collect_answer(service.run(Work(queued(), ALICE, JobContext("e0", rows.append))))
    assert answer.choices[0].text == "Hello!"
    assert [(row.id, row.status, row.priority, row.output_tokens) for row in rows] == [("b-0", "finished", "batch", 7)]
    assert await ledger_of(service).find("b-0") is None


async def test_a_job_runs_on_the_worker_it_was_granted(
    tmp_path: Path, say: Callable[..., Script], open_one: Opener
) -> None:
    engines = [await FakeEngine(tmp_path / f"{n}.sock", say("Hi"), name=n).start() for n in ("e0", "e1")]
    service = await open_one(*engines)
    for n in range(4):
        await collect_answer(service.run(Work(queued(f"b-{n}"), ALICE, JobContext("e1", lambda row: None))))
    assert (len(engines[0].submitted), len(engines[1].submitted)) == (0, 4)
    await engines[1].die()
    with pytest.raises(Unavailable):
        await collect_answer(service.run(Work(queued("b-9"), ALICE, JobContext("e1", lambda row: None))))
    await engines[0].die()


async def test_a_job_fails_at_once_when_its_worker_is_lost(engine: FakeEngine, service: Service) -> None:
    engine.script = None
    rows: list[UsageRow] = []
    events = service.run(Work(queued(), ALICE, JobContext("e0", rows.append)))
    first = events.__anext__()

    waiting = asyncio.ensure_future(first)
    await engine.submission()
    await engine.die()
    with pytest.raises(EngineLost):
        await waiting
    assert [row.status for row in rows] == ["failed"]
    assert await ledger_of(service).find("b-0") is None


async def test_jobs_do_not_block_requests(engine: FakeEngine, service: Service) -> None:

    engine.script = None
    runs = [
        asyncio.ensure_future(
            collect_answer(service.run(Work(queued(f"b-{n}"), ALICE, JobContext("e0", lambda row: None))))
        )
        for n in range(8)
    ]
    await engine.submission(8)
    assert isinstance(service.core, LocalCore)
    core = service.core

    def active() -> tuple[int, int]:
        [worker] = core.admission.snapshot().workers
        return worker.active, worker.batch_active

    assert active() == (8, 8)
    flex = GenerateRequest(id="flex", model=MODEL, prompt="x", priority=Priority.FLEX, reject_if_busy=True)
    asked = asyncio.ensure_future(collect_answer(service.run(Work(flex, ALICE))))
    await engine.submission(9)
    assert active() == (9, 8)
    for run in (*runs, asked):
        run.cancel()
    await asyncio.gather(*runs, asked, return_exceptions=True)
    await until(lambda: active() == (0, 0))


async def test_the_late_end_of_an_expired_attempt_leaves_the_next_one_on_record(
    engine: FakeEngine, service: Service
) -> None:
    """A lease expires in an outage, and the same process claims the job again."""
    engine.script = None
    assert isinstance(service.core, LocalCore)
    core, rows = service.core, []

    def n_active() -> int:
        return core.admission.snapshot().workers[0].batch_active

    def attempt(number: int) -> "asyncio.Future[object]":
        context = JobContext("e0", rows.append, attempt=number)
        return asyncio.ensure_future(collect_answer(service.run(Work(queued(), ALICE, context))))

    first = attempt(1)
    await engine.submission()
    second = attempt(2)
    await engine.submission(2)
    assert n_active() == 2
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await until(lambda: n_active() < 2)
    assert ([row.id for row in rows], n_active()) == (["b-0.1"], 1)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await until(lambda: n_active() == 0)


async def test_a_job_resumes_behind_its_transcript(engine: FakeEngine, service: Service, text_model: TextModel) -> None:
    """Only new tokens are sent; all are counted, and the engine samples none twice."""
    ids = tokens.unpack(text_model.encode("Hello!", special=False))
    engine.script = lambda request: [*ids, EOS][len(request.output_ids) // 4 :]
    for n_said in range(len(ids) + 1):
        deltas: list[TokenDelta] = []
        name = f"b-{n_said}"
        resume_from = TokenDelta(name, tokens.pack(ids[:n_said]))
        events = service.run(Work(queued(name), ALICE, JobContext("e0", lambda row: None, resume_from, deltas.append)))
        told = [event async for event in events]
        assert "".join(event.text for event in told if isinstance(event, TextDelta)) == "Hello!"[n_said:]
        assert b"".join(delta.token_ids for delta in deltas) == tokens.pack([*ids[n_said:], EOS])
        assert isinstance(told[-1], Completed)
        assert told[-1].usage.completion_tokens == len(ids) + 1
        assert engine.submitted[-1].output_ids == tokens.pack(ids[:n_said])


async def test_a_complete_transcript_needs_no_engine(
    engine: FakeEngine, service: Service, text_model: TextModel
) -> None:
    ids = [*tokens.unpack(text_model.encode("Hello!", special=False)), EOS]
    rows: list[UsageRow] = []
    resume_from = TokenDelta("b-0", tokens.pack(ids), "stop")
    told = [event async for event in service.run(Work(queued(), ALICE, JobContext("e0", rows.append, resume_from)))]
    assert [type(event) for event in told] == [Completed]
    assert [(row.status, row.output_tokens) for row in rows] == [("finished", len(ids))]
    assert engine.submitted == []
