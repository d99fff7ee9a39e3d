"""What requests cost: the price of their acceptance, in the row and in the terminal event; never silently zero."""

import asyncio
from contextlib import aclosing

import pytest

from emberline.accounts.usage_row import UsageRow, session_digest
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import ErrorInfo, Internal
from emberline.protocol.events import Completed, Started, TokenDelta
from emberline.protocol.price import Price
from emberline.protocol.request import Priority
from emberline.service import Service
from emberline.service.core import LocalCore
from emberline.service.work import Work
from emberline.telemetry.request_log import JobContext
from tests.service.fake_engine import FakeEngine

from .conftest import ALICE, MODEL
from .test_service import ask, events_of, row_of

PRICE = Price(input=1000, cached_input=100, output=5000, flex=50, batch=50)
DEARER = Price(input=7000, output=7000)


async def set_price(service: Service, price: Price | None) -> int:
    """When it begins."""
    assert isinstance(service.core, LocalCore)
    assert service.core.price_store is not None
    return (await service.core.price_store.set(MODEL, price, "admin")).valid_from_us


async def test_the_row_and_the_terminal_event_have_the_cost(service: Service, engine: FakeEngine) -> None:
    await set_price(service, PRICE)
    engine.cached = 4
    request = ask("hi", priority=Priority.FLEX, session="ses_1", api="chat")
    completed = (await events_of(service, request))[-1]
    assert isinstance(completed, Completed)
    n_in = completed.usage.prompt_tokens
    cost_pico = ((n_in - 4) * 1000 + 4 * 100 + 7 * 5000) // 2
    row = await row_of(service, request)
    assert row.cost_pico == completed.cost_pico == cost_pico
    assert row.discount_pico == 4 * 900 // 2
    assert (row.price_version, row.api, row.session) == ("1", "chat", session_digest("alice/ses_1"))
    assert completed.price is not None
    assert "ses_1" not in row.session


async def test_a_model_without_a_price_has_no_cost(service: Service) -> None:
    request = ask()
    completed = (await events_of(service, request))[-1]
    assert isinstance(completed, Completed)
    row = await row_of(service, request)
    assert (completed.price, completed.cost_pico, row.cost_pico, row.price_version) == (None, None, None, "")


async def test_a_failed_request_costs_nothing(service: Service, engine: FakeEngine) -> None:
    await set_price(service, PRICE)
    engine.script = None
    request = ask()
    running = asyncio.create_task(events_of(service, request))
    (sent,) = await engine.submission()
    engine.step(TokenDelta(sent.id, tokens.pack([70]), "error", error=ErrorInfo("internal", "invalid numbers")))
    with pytest.raises(Internal):
        await running
    row = await row_of(service, request)
    assert (row.status, row.cost_pico, row.price_version) == ("failed", 0, "1")


async def test_a_cancelled_request_costs_what_was_computed(service: Service) -> None:
    await set_price(service, PRICE)
    request = ask()
    async with aclosing(service.run(Work(request, ALICE))) as events:
        assert isinstance(await anext(events), Started)
    row = await row_of(service, request)
    assert row.status == "cancelled"
    assert row.cost_pico == row.input_tokens * 1000 + row.output_tokens * 5000


async def test_the_price_of_the_acceptance_is_charged(service: Service, engine: FakeEngine) -> None:
    await set_price(service, PRICE)
    engine.script, say = None, engine.script
    request = ask()
    running = asyncio.create_task(events_of(service, request))
    await engine.submission()
    await set_price(service, DEARER)
    await engine.die()
    engine.script = say
    await engine.start()  # admitted once more, accepted once
    await running
    assert (await row_of(service, request)).price_version == "1"
    later = ask()
    await events_of(service, later)
    assert (await row_of(service, later)).price_version == "2"


async def test_a_job_is_charged_the_price_of_when_it_was_queued(service: Service) -> None:
    queued_us = await set_price(service, PRICE)
    await set_price(service, DEARER)
    rows: list[UsageRow] = []
    job = JobContext("e0", rows.append, accepted_us=queued_us)
    async with aclosing(service.run(Work(ask(priority=Priority.BATCH), ALICE, job))) as events:
        async for _ in events:
            pass
    (row,) = rows
    assert row.price_version == "1"
    assert row.cost_pico == (row.input_tokens * 1000 + 7 * 5000) // 2


async def test_a_request_cancelled_before_its_admission_has_a_price(service: Service) -> None:
    await set_price(service, PRICE)
    assert isinstance(service.core, LocalCore)
    row = UsageRow(
        id="r",
        account="a",
        model=MODEL,
        model_version="",
        status="cancelled",
        created_us=service.core.usage.store.now_us(),
        finished_us=0,
    )
    assert service.core.prices.priced(row).cost_pico == 0
