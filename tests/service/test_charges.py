"""Who pays for a request that does not finish: what its client ends is paid as far as it was computed, our failures are
free."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.accounts.usage_row import UsageRow
from emberline.gateway.gateway_errors import FirstByteTimeout
from emberline.gateway.gateways import GatewayService
from emberline.gateway.stage_chain import open_chain
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import (
    BadInput,
    ContextExceeded,
    DeadlineExceeded,
    EmberlineError,
    EngineLost,
    ErrorInfo,
    Internal,
    Overloaded,
    Unavailable,
)
from emberline.protocol.events import Started, TextEvent, TokenDelta, Usage
from emberline.protocol.gateway import GatewayOptions, GatewaySettings
from emberline.protocol.price import Price
from emberline.protocol.request import EngineRequest
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service import Service
from emberline.service.request_run import RequestRun
from emberline.service.work import Work
from emberline.telemetry.request_log import JobContext
from tests.service.fake_engine import FakeEngine
from tests.service.test_request_run import FakeCore, FakeTransport, ended, output_of, run_of

from .conftest import ALICE
from .test_pricing import PRICE, set_price
from .test_service import ask, events_of, ledger_of, row_of

LONG = "a prompt of some length, which is computed in several steps"


def charge(row: UsageRow) -> int:
    """The price of the tokens in the row."""
    cached = row.cached_tokens
    return (row.input_tokens - cached) * 1000 + cached * 100 + row.output_tokens * 5000


async def submitted(
    service: Service, engine: FakeEngine, **fields: object
) -> tuple["asyncio.Task[list[TextEvent]]", EngineRequest]:
    """A request that the engine has received and not begun to answer."""
    await set_price(service, PRICE)
    engine.script = None
    request = ask(LONG, **fields)
    running = asyncio.create_task(events_of(service, request))
    (sent,) = await engine.submission()
    return running, sent


async def cancel(running: "asyncio.Task[list[TextEvent]]") -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_client_that_leaves_before_the_first_token_pays_for_the_prefill(
    service: Service, engine: FakeEngine
) -> None:
    running, sent = await submitted(service, engine)
    engine.prefilled[sent.id] = 32
    await cancel(running)
    row = await row_of(service, sent.id)
    assert (row.status, row.input_tokens, row.output_tokens) == ("cancelled", 32, 0)
    assert row.cost_pico == 32 * 1000


async def test_a_client_that_leaves_while_its_request_waits_pays_nothing(service: Service, engine: FakeEngine) -> None:
    running, sent = await submitted(service, engine)
    await cancel(running)
    row = await row_of(service, sent.id)
    assert (row.status, row.input_tokens, row.cost_pico) == ("cancelled", 0, 0)


async def test_an_older_engine_that_reports_no_progress_bills_no_prefill(service: Service, engine: FakeEngine) -> None:
    running, sent = await submitted(service, engine)
    engine.answers_aborts = False
    await cancel(running)
    while sent.id not in engine.aborted:
        await asyncio.sleep(0.001)
    usage = Usage(prompt_tokens=tokens.count(sent.prompt_ids))  # of the whole prompt, computed or not
    engine.step(TokenDelta(sent.id, finish="cancelled", usage=usage))
    assert (await row_of(service, sent.id)).cost_pico == 0


async def test_tokens_that_a_slow_client_has_not_read_are_paid(service: Service, engine: FakeEngine) -> None:
    await set_price(service, PRICE)
    engine.script = None
    request = ask(LONG)
    async with aclosing(service.run(Work(request, ALICE))) as events:
        first = asyncio.ensure_future(anext(events))
        (sent,) = await engine.submission()
        usage = Usage(prompt_tokens=tokens.count(sent.prompt_ids), cached_by_tier={"device": 16})
        engine.step(TokenDelta(sent.id, tokens.pack([70]), usage=usage))
        assert isinstance(await first, Started)
        for _ in range(5):
            engine.step(TokenDelta(sent.id, tokens.pack([71, 72])))
    row = await row_of(service, request.id)
    assert (row.status, row.output_tokens, row.cached_tokens) == ("cancelled", 11, 16)
    assert row.input_tokens == tokens.count(sent.prompt_ids)
    assert row.cost_pico == charge(row)


async def test_a_grammar_that_fails_after_text_was_streamed_is_paid(service: Service, engine: FakeEngine) -> None:
    running, sent = await submitted(service, engine)
    n_prompt = tokens.count(sent.prompt_ids)
    engine.step(TokenDelta(sent.id, tokens.pack([70, 71]), usage=Usage(prompt_tokens=n_prompt)))
    error = ErrorInfo("bad_input", "the grammar is too complex", "grammar")
    engine.step(TokenDelta(sent.id, finish="error", usage=Usage(prompt_tokens=n_prompt, partial=True), error=error))
    with pytest.raises(BadInput):
        await running
    row = await row_of(service, sent.id)
    assert (row.status, row.input_tokens, row.output_tokens) == ("failed", n_prompt, 2)
    assert row.cost_pico == charge(row) > 0


async def test_a_request_beyond_its_own_deadline_pays_for_the_prefill(service: Service, engine: FakeEngine) -> None:
    running, sent = await submitted(service, engine, deadline_s=60.0)
    usage, error = Usage(prompt_tokens=48, partial=True), ErrorInfo("deadline_exceeded", "too late")
    engine.step(TokenDelta(sent.id, finish="error", usage=usage, error=error))
    with pytest.raises(DeadlineExceeded):
        await running
    row = await row_of(service, sent.id)
    assert (row.status, row.input_tokens, row.cost_pico) == ("failed", 48, 48_000)


@pytest.mark.parametrize(
    ("operators_ms", "accounts_ms", "asked_ms", "is_paid"),
    [
        (None, 300, None, True),
        (None, 60_000, 300, True),
        (0, 300, None, True),
        (60_000, 300, None, True),
        (60_000, 0, 300, True),
        (300, 0, None, False),
        (300, 60_000, None, False),
        (300, 0, 60_000, False),
    ],
)
async def test_only_the_operators_timeout_is_free(
    service: Service,
    engine: FakeEngine,
    operators_ms: int | None,
    accounts_ms: int,
    asked_ms: int | None,
    is_paid: bool,
) -> None:
    """The shortest timeout ends the request, whoever has set it."""
    await set_price(service, PRICE)
    engine.script = None
    floor = [] if operators_ms is None else [GatewaySettings(name="g", request_timeout_ms=operators_ms)]
    gateways = GatewayService(ledger_of(service).store, floor)
    await gateways.open()
    own = GatewaySettings(name="g", account=ALICE.account, request_timeout_ms=accounts_ms)
    await gateways.settings.put(own)
    request, options = ask(LONG), GatewayOptions(id="g", request_timeout_ms=asked_ms)
    engine.prefilled[request.id] = 32
    work = Work(request, ALICE)
    open_chain(gateways, options, ALICE, service, "log").apply(work)
    with pytest.raises(FirstByteTimeout):
        async with aclosing(service.run(work)) as events:
            await anext(events)
    await gateways.close()
    row = await row_of(service, request)
    assert (row.status, row.cost_pico) == ("cancelled", 32_000 if is_paid else 0)


@pytest.mark.parametrize("kind", ["internal", "overloaded"])
async def test_a_failure_of_ours_is_free(service: Service, engine: FakeEngine, kind: str) -> None:
    running, sent = await submitted(service, engine)
    n_prompt = tokens.count(sent.prompt_ids)
    engine.step(TokenDelta(sent.id, tokens.pack([70, 71]), usage=Usage(prompt_tokens=n_prompt)))
    usage = Usage(prompt_tokens=n_prompt, partial=True)
    engine.step(TokenDelta(sent.id, finish="error", usage=usage, error=ErrorInfo(kind, "no")))
    with pytest.raises(EmberlineError):
        await running
    row = await row_of(service, sent.id)
    assert (row.status, row.output_tokens, row.cost_pico) == ("failed", 2, 0)


async def test_a_lost_engine_is_free(service: Service, engine: FakeEngine) -> None:
    await set_price(service, PRICE)
    engine.script = None
    recorded: list[UsageRow] = []
    running = asyncio.ensure_future(anext(service.run(Work(ask(LONG), ALICE, JobContext("e0", recorded.append)))))
    await engine.submission()
    await engine.die()  # under a job, which is not moved
    with pytest.raises(EngineLost):
        await running
    assert [(row.status, row.cost_pico) for row in recorded] == [("failed", 0)]


async def test_a_cancelled_job_is_charged_what_was_computed(service: Service, engine: FakeEngine) -> None:
    await set_price(service, PRICE)
    engine.script = None
    recorded: list[UsageRow] = []
    events = service.run(Work(ask(LONG), ALICE, JobContext("e0", recorded.append)))
    running = asyncio.ensure_future(anext(events))
    (sent,) = await engine.submission()
    engine.prefilled[sent.id] = 32
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (row,) = recorded  # as soon as the request has ended: the queue stores the row with the outcome
    assert (row.status, row.input_tokens, row.cost_pico) == ("cancelled", 32, 32_000)


# --- the rule, whatever happens --------------------------------------------------------------------------------------


class PricedCore(FakeCore):
    async def admit(self, request: RouteRequest) -> Route:
        route = await super().admit(request)
        return Route(decode=route.decode, price=Price(input=1000, output=5000))


OURS: list[Callable[[], EmberlineError]] = [
    lambda: Internal("a bug"),
    lambda: Unavailable("gone"),
    lambda: EngineLost("w"),
    lambda: Overloaded("full"),
]
THEIRS: list[Callable[[], EmberlineError]] = [
    lambda: BadInput("a grammar that cannot be met"),
    lambda: ContextExceeded("too long"),
    lambda: DeadlineExceeded("too late"),
]


async def leave(run: RequestRun[str], n_read: int) -> None:
    await run.admit()
    async with run:
        for _ in range(n_read):
            await run.step()
        raise asyncio.CancelledError


@settings(max_examples=60, deadline=None)
@given(
    n_read=st.integers(0, 4),
    n_unread=st.integers(0, 4),
    ending=st.sampled_from(["finish", "leave", *range(len(OURS) + len(THEIRS))]),
)
def test_clients_pay_for_what_they_end_and_never_for_our_failures(
    n_read: int, n_unread: int, ending: str | int
) -> None:
    async def check() -> None:
        core = PricedCore()
        error = [*OURS, *THEIRS][ending]() if isinstance(ending, int) else None
        last = "z" if error is None else error
        transport = FakeTransport([*("a" * n_read), last], retryable=False)
        transport.n_unread = n_unread
        run = run_of(core, transport)
        if ending == "leave":
            with pytest.raises(asyncio.CancelledError):
                await leave(run, n_read)
        elif error is None:
            await output_of(run)
        else:
            with pytest.raises(type(error)):
                await output_of(run)
        row = (await ended(core)).row
        computed = 3 * 1000 + (n_read + (0 if ending == "finish" else n_unread) + (ending == "finish")) * 5000
        is_ours = isinstance(ending, int) and ending < len(OURS)
        if ending == "leave" and not n_read:
            computed -= n_unread * 5000  # nothing was opened
        assert row.cost_pico == (0 if is_ours else computed)

    asyncio.run(check())
