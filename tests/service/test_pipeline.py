"""Stages around a request: begun in order, ended once in reverse order however it ends, with taps only where needed."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest

from emberline.accounts.usage_row import UsageRow
from emberline.protocol.errors import BadInput, Conflict, EmberlineError, ErrorInfo, Forbidden, Internal
from emberline.protocol.events import Completed, Started, TextDelta, TextEvent, TokenDelta, Usage
from emberline.protocol.request import Principal
from emberline.service import Service
from emberline.service.work import Begun, RelayRequest, Start, Work
from emberline.telemetry.request_log import AttemptContext
from emberline.upstream.target import Target
from emberline.upstream.upstream_request import UpstreamRequest
from tests.service.conftest import ALICE, MODEL
from tests.service.fake_engine import FakeEngine, Script
from tests.service.test_service import ask, row_of, rows, text_of


class Noted:
    """A stage that notes its calls, and does as it is told."""

    def __init__(
        self,
        name: str,
        calls: list[str],
        begin: Callable[[Work], None] = lambda work: None,
        told: EmberlineError | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.is_done = False
        self._name, self._calls, self._begin, self._told = name, calls, begin, told

    async def begin(self, work: Work) -> None:
        self._calls.append(f"begin {self._name}")
        self._begin(work)

    def end(self, work: Work, error: BaseException | None) -> BaseException | None:
        self._calls.append(f"end {self._name}")
        self.error, self.is_done = error, work.is_done
        return self._told if error is not None and self._told is not None else error


async def run(service: Service, work: Work) -> list[TextEvent]:
    async with aclosing(service.run(work)) as events:
        return [event async for event in events]


async def test_stages_begin_in_order_and_end_in_reverse(service: Service) -> None:
    calls: list[str] = []
    work = Work(ask(), ALICE, stages=[Noted("outer", calls), Noted("inner", calls)])
    events = await run(service, work)
    assert text_of(events) == "Hello!"
    assert calls == ["begin outer", "begin inner", "end inner", "end outer"]
    assert work.is_done
    assert work.completed is events[-1]


async def test_a_reader_who_stops_at_the_last_event_has_it_all(service: Service) -> None:
    stage = Noted("one", [])
    async with aclosing(service.run(Work(ask(), ALICE, stages=[stage]))) as events:
        async for event in events:
            if isinstance(event, Completed):
                break
    assert stage.is_done
    assert stage.error is None


async def test_a_reader_who_leaves_earlier_cancels(service: Service, engine: FakeEngine) -> None:
    stage, request = Noted("one", []), ask()
    async with aclosing(service.run(Work(request, ALICE, stages=[stage]))) as events:
        await anext(events)
    assert isinstance(stage.error, GeneratorExit)
    assert not stage.is_done
    assert (await row_of(service, request)).status == "cancelled"


async def test_a_stage_that_refuses_is_ended_and_no_later_one_begins(service: Service) -> None:
    calls: list[str] = []

    def refuse(work: Work) -> None:
        raise BadInput("no")

    told = Conflict("as the outer stage tells it")
    outer = Noted("outer", calls, told=told)
    stages = [outer, Noted("refusing", calls, refuse), Noted("never", calls)]
    with pytest.raises(Conflict) as caught:
        await run(service, Work(ask(), ALICE, stages=stages))
    assert caught.value is told
    assert isinstance(caught.value.__cause__, BadInput)
    assert calls == ["begin outer", "begin refusing", "end refusing", "end outer"]
    assert await rows(service) == 0


async def test_a_replay_computes_nothing_and_states_its_cost(service: Service, engine: FakeEngine) -> None:
    known = [Started(Usage()), TextDelta(0, "known"), Completed(Usage(), None, 0)]
    stage = Noted("cache", [], lambda work: setattr(work, "replay", known))
    work = Work(ask(), ALICE, stages=[stage], wants_cost=True)
    events = await run(service, work)
    assert text_of(events) == "known"
    assert work.completed is known[-1]
    assert work.completed.usage.cost is not None
    assert not work.was_admitted
    assert stage.is_done
    assert not engine.submitted


async def test_taps_hold_events_back_one_after_the_other(service: Service) -> None:
    """The second tap sees what the first has let through, the terminal event last."""
    held: list[TextEvent] = []
    seen: list[TextEvent] = []

    async def hold(event: TextEvent) -> Sequence[TextEvent]:
        held.append(event)
        return held.copy() if isinstance(event, Completed) else ()

    async def look(event: TextEvent) -> Sequence[TextEvent]:
        assert isinstance(held[-1], Completed), "nothing passes before"
        seen.append(event)
        return (event,)

    def add(work: Work) -> None:
        work.taps += [hold, look]

    events = await run(service, Work(ask(), ALICE, stages=[Noted("tap", [], add)]))
    assert events == seen == held
    assert text_of(events) == "Hello!"


async def test_a_tap_that_blocks_the_end_fails_what_was_computed(service: Service) -> None:
    async def block(event: TextEvent) -> Sequence[TextEvent]:
        if isinstance(event, Completed):
            raise BadInput("blocked")
        return (event,)

    request, stage = ask(), Noted("tap", [], lambda work: work.taps.append(block))
    work = Work(request, ALICE, stages=[stage])
    with pytest.raises(BadInput, match="blocked"):
        await run(service, work)
    assert work.completed is not None, "it is charged: the model has answered"
    assert not stage.is_done
    assert (await row_of(service, request)).status == "finished"


async def test_a_stage_repeats_an_attempt_that_fails_before_its_first_output(
    service: Service, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    """Each attempt is in flight under its own id, and has a usage row of its own."""
    request, ended = ask(), list[UsageRow]()
    engine.script = None

    async def attempts(start: Start) -> Begun:
        card = service.models.find(MODEL, None)
        first = asyncio.ensure_future(start(card, AttemptContext(id=f"{request.id}-1", on_end=ended.append)))
        (sent,) = await engine.submission()
        engine.step(TokenDelta(sent.id, finish="error", error=ErrorInfo("internal", "no")))
        with pytest.raises(Internal):
            await first
        engine.script = say("Hello!")
        return await start(card, AttemptContext(id=f"{request.id}-2", is_retry=True))

    work = Work(request, ALICE, stages=[Noted("attempts", [], lambda work: setattr(work, "attempts", attempts))])
    assert text_of(await run(service, work)) == "Hello!"
    assert work.was_admitted
    assert (await row_of(service, f"{request.id}-1")).status == "failed"
    assert (await row_of(service, f"{request.id}-2")).status == "finished"
    assert [row.id for row in ended] == [f"{request.id}-1"]


async def test_a_body_that_is_not_relayed_is_refused_without_a_trace(service: Service) -> None:
    """The endpoint that reads the body refuses it; nothing was admitted, and nothing is counted."""

    def make(target: Target, request_id: str) -> UpstreamRequest:
        assert (target.card.id, request_id) == (MODEL, "r1")
        raise BadInput("images must come inside the request")

    stage = Noted("one", [])
    task = RelayRequest(id="r1", model=MODEL, make=make, stream=True)
    with pytest.raises(BadInput, match="images"):
        await run(service, Work(task, ALICE, stages=[stage]))
    with pytest.raises(Forbidden):
        await run(service, Work(task, Principal("alice", models=("other",))))
    assert isinstance(stage.error, BadInput)
    refused = [
        line
        for line in (await service.operations.metrics()).splitlines()
        if line.startswith(b"emberline_requests_refused")
    ]
    assert refused
    assert {line.rpartition(b" ")[2] for line in refused} == {b"0.0"}
    assert await rows(service) == 0
