"""Limits of keys and accounts, enforced in the core for every request."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from emberline.accounts.account import Limits
from emberline.accounts.account_service import AccountService, KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.accounts.secret import Secret
from emberline.accounts.usage_row import UsageRow
from emberline.protocol.errors import BudgetExceeded, BudgetReserved, Forbidden, Overloaded, RateLimited
from emberline.protocol.events import Completed
from emberline.protocol.price import Price
from emberline.protocol.request import Principal, Priority
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service import Service
from emberline.service.core import LocalCore
from emberline.service.work import Work
from emberline.store import Database, open_store
from emberline.telemetry.request_log import JobContext
from tests.service.conftest import Opener
from tests.service.fake_engine import FakeEngine, Script
from tests.service.test_pricing import set_price
from tests.service.test_service import ask, events_of

ADMIN = Actor("admin", "here")
PRICE = Price(input=1000, cached_input=100, output=5000, batch=50)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Database]:
    store = await open_store(tmp_path / "limits.db")
    yield store
    await store.close()


@pytest.fixture
async def accounts(store: Database) -> AsyncIterator[AccountService]:
    accounts = AccountService(store, Secret("s" * 32))
    await accounts.open()
    yield accounts
    await accounts.close()


@pytest.fixture
async def limited(engine: FakeEngine, open_one: Opener, accounts: AccountService, store: Database) -> Service:
    return await open_one(engine, directory=accounts.directory, store=store)


async def key_with(accounts: AccountService, **limits: Any) -> Principal:
    issued = await accounts.create_key(ADMIN, "acme", KeyGrant(limits=Limits(**limits)))
    return Principal("acme", issued.record.id, b"a" * 16)


async def test_requests_a_minute(limited: Service, accounts: AccountService) -> None:
    key = await key_with(accounts, requests_per_minute=2)
    for _ in range(2):
        assert isinstance((await events_of(limited, ask(), key))[-1], Completed)
    with pytest.raises(RateLimited, match="2 requests a minute") as refused:
        await events_of(limited, ask(), key)
    assert refused.value.rate_limits is not None
    assert refused.value.rate_limits.requests is not None
    assert refused.value.rate_limits.requests.remaining == 0
    other = await key_with(accounts, requests_per_minute=2)
    await events_of(limited, ask(), other)


async def test_tokens_are_taken_for_the_worst_case_and_put_back(limited: Service, accounts: AccountService) -> None:
    key = await key_with(accounts, tokens_per_minute=1000)
    work = Work(ask(sampling={"max_tokens": 100}), key)
    async with aclosing(limited.run(work)) as events:
        *_, completed = [event async for event in events]
    assert isinstance(completed, Completed)
    used = completed.usage.prompt_tokens + completed.usage.completion_tokens
    limits = work.rate_limits
    assert limits is not None
    assert limits.tokens is not None
    assert limits.tokens.remaining == 1000 - completed.usage.prompt_tokens - 100
    work = Work(ask(sampling={"max_tokens": 100}), key)
    async with aclosing(limited.run(work)) as events:
        await anext(events)
    limits = work.rate_limits
    assert limits is not None
    assert limits.tokens is not None
    assert limits.tokens.remaining in range(1000 - used - completed.usage.prompt_tokens - 100, 1000 - used)


async def test_concurrency_is_given_back_by_a_client_that_leaves(
    limited: Service, accounts: AccountService, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    key = await key_with(accounts, concurrency=1)
    engine.script = say("and so on", end=False)
    async with aclosing(limited.run(Work(ask(), key))) as events:
        await anext(events)
        with pytest.raises(RateLimited, match="concurrent requests"):
            await events_of(limited, ask(), key)
    core = limited.core
    assert isinstance(core, LocalCore)
    assert core.limits is not None
    async with asyncio.timeout(60):
        while core.limits.n_held:
            await asyncio.sleep(0.001)
    request = RouteRequest(
        id="next",
        account=key.account,
        key_id=key.key_id,
        model="m",
        model_version="",
        input_tokens=1,
        max_tokens=1,
        created_us=0,
    )
    await core.limits.admit(request, None)


async def test_a_request_shed_for_capacity_does_not_count(
    limited: Service, accounts: AccountService, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await key_with(accounts, requests_per_minute=1, concurrency=1)

    async def full(request: object) -> Route:
        raise Overloaded("full")

    with monkeypatch.context() as patch:
        patch.setattr(limited.core.admission, "admit", full)  # type: ignore[attr-defined]
        with pytest.raises(Overloaded):
            await events_of(limited, ask(), key)
    await events_of(limited, ask(), key)


async def test_queued_jobs_have_no_rate_limit(limited: Service, accounts: AccountService) -> None:
    key = await key_with(accounts, requests_per_minute=1)
    for _ in range(3):
        async with aclosing(limited.run(Work(ask(), key, JobContext("e0", lambda row: None)))) as events:
            assert [event async for event in events]


async def test_an_account_limits_all_of_its_keys_and_may_be_disabled(
    limited: Service, accounts: AccountService
) -> None:
    await accounts.create_account(ADMIN, "acme", Limits(requests_per_minute=1))
    first, second = await key_with(accounts), await key_with(accounts)
    await events_of(limited, ask(), first)
    with pytest.raises(RateLimited, match="account acme"):
        await events_of(limited, ask(), second)
    await accounts.update_account(ADMIN, "acme", {"requests_per_minute": None})
    await events_of(limited, ask(), second)
    await accounts.update_account(ADMIN, "acme", disabled=True)
    with pytest.raises(Forbidden):
        await events_of(limited, ask(), second)


# --- budgets ---------------------------------------------------------------------------------------------------------


async def cost_of(service: Service, key: Principal) -> int:
    """Of a request with at most ten output tokens."""
    *_, completed = await events_of(service, ask(sampling={"max_tokens": 10}), key)
    assert isinstance(completed, Completed)
    assert completed.cost_pico is not None
    return completed.cost_pico


async def test_a_budget_is_spent_to_the_last_request_that_fits(limited: Service, accounts: AccountService) -> None:
    await set_price(limited, PRICE)
    unlimited = await key_with(accounts)
    cost_pico = await cost_of(limited, unlimited)
    worst_pico = cost_pico + 3 * PRICE.output  # seven of ten output tokens are used
    key = await key_with(accounts, budget_pico=2 * cost_pico + worst_pico)
    for _ in range(3):
        assert await cost_of(limited, key) == cost_pico
    with pytest.raises(BudgetExceeded, match="lower max_tokens, or raise the budget") as refused:
        await cost_of(limited, key)
    assert not isinstance(refused.value, BudgetReserved)
    assert refused.value.retry_after_s is None
    await accounts.update_key(ADMIN, key.key_id, {"budget_pico": 3 * cost_pico + worst_pico})
    assert await cost_of(limited, key) == cost_pico
    await accounts.update_key(ADMIN, key.key_id, {"budget_pico": cost_pico})
    with pytest.raises(BudgetExceeded):
        await cost_of(limited, key)
    assert await cost_of(limited, unlimited) == cost_pico


async def test_what_running_requests_reserve_becomes_free_again(
    limited: Service, accounts: AccountService, engine: FakeEngine
) -> None:
    await set_price(limited, PRICE)
    cost_pico = await cost_of(limited, await key_with(accounts))
    key = await key_with(accounts, budget_pico=2 * cost_pico + 3 * PRICE.output, budget_period="day")
    script, engine.script = engine.script, None
    async with aclosing(limited.run(Work(ask(sampling={"max_tokens": 10}), key))) as events:
        started = asyncio.ensure_future(anext(events))
        await engine.submission(2)
        with pytest.raises(BudgetReserved, match="running requests have reserved it") as refused:
            await cost_of(limited, key)
        assert refused.value.retry_after_s == 1
        assert script is not None
        engine.script = script
        asyncio.get_running_loop().create_task(engine.play(engine.submitted[1]))
        await started
        assert [event async for event in events]
    assert await cost_of(limited, key) == cost_pico


async def test_the_budget_of_a_day_says_when_it_resets(limited: Service, accounts: AccountService) -> None:
    await set_price(limited, PRICE)
    key = await key_with(accounts, budget_pico=1, budget_period="day")
    with pytest.raises(BudgetExceeded, match=r"wait until it resets at 20..-..-..T00:00:00Z") as refused:
        await cost_of(limited, key)
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 86_400


async def test_keys_share_the_budget_of_their_account(limited: Service, accounts: AccountService) -> None:
    await set_price(limited, PRICE)
    cost_pico = await cost_of(limited, await key_with(accounts))  # counts: it was in this month
    limits = {"budget_pico": 2 * cost_pico + 3 * PRICE.output, "budget_period": "month"}
    await accounts.update_account(ADMIN, "acme", limits)
    await cost_of(limited, await key_with(accounts))
    with pytest.raises(BudgetExceeded, match="account acme has"):
        await cost_of(limited, await key_with(accounts))


async def test_a_model_without_a_price_is_refused_under_a_budget(limited: Service, accounts: AccountService) -> None:
    key = await key_with(accounts, budget_pico=10**12)
    with pytest.raises(Forbidden, match="this model has no price"):
        await events_of(limited, ask(), key)


async def test_a_job_without_budget_is_refused_and_one_within_it_is_billed(
    limited: Service, accounts: AccountService
) -> None:
    await set_price(limited, PRICE)
    cost_pico = await cost_of(limited, await key_with(accounts))
    batch = Priority.BATCH
    rows: list[UsageRow] = []
    poor, rich = await key_with(accounts, budget_pico=cost_pico // 4), await key_with(accounts, budget_pico=cost_pico)
    request = ask(sampling={"max_tokens": 10}, priority=batch)
    with pytest.raises(BudgetExceeded):
        async with aclosing(limited.run(Work(request, poor, JobContext("e0", rows.append)))) as events:
            await anext(events)
    async with aclosing(limited.run(Work(request, rich, JobContext("e0", rows.append)))) as events:
        assert [event async for event in events]
    (row,) = rows
    assert row.cost_pico == cost_pico // 2
    assert row.lease


async def test_a_job_spends_of_its_budget_when_its_row_is_stored(
    limited: Service, accounts: AccountService, store: Database
) -> None:
    await set_price(limited, PRICE)
    cost_pico = await cost_of(limited, await key_with(accounts))
    key = await key_with(accounts, budget_pico=cost_pico + 3 * PRICE.output)  # for one request
    core = limited.core
    assert isinstance(core, LocalCore)
    for _ in range(3):
        rows: list[UsageRow] = []
        job = Work(ask(sampling={"max_tokens": 10}), key, JobContext("e0", rows.append))
        async with aclosing(limited.run(job)) as events:
            assert [event async for event in events]
        (row,) = rows
        with pytest.raises(BudgetReserved):  # until the queue says what became of it
            await cost_of(limited, key)
        core.settle_job(row, is_stored=False)  # the job was leased to another worker meanwhile
    assert await cost_of(limited, key) == cost_pico
    ((spent,),) = await store.read("SELECT SUM(cost_pico) FROM usage WHERE key_id = ?", (key.key_id,))
    assert spent == cost_pico


async def test_what_a_core_that_died_had_leased_is_free_again_at_the_next_start(
    engine: FakeEngine, open_one: Opener, accounts: AccountService, store: Database
) -> None:
    first = await open_one(engine, directory=accounts.directory, store=store)
    await set_price(first, PRICE)
    cost_pico = await cost_of(first, await key_with(accounts))
    key = await key_with(accounts, budget_pico=2 * cost_pico + 3 * PRICE.output)
    await cost_of(first, key)
    leases = "SELECT granted_pico FROM budget_leases"
    assert await store.read(leases)
    core = first.core
    assert isinstance(core, LocalCore)
    journal = core.usage._journal
    assert journal is not None
    os.close(journal._file)  # the lock ends with the process
    journal._file = -1
    second = await open_one(engine, directory=accounts.directory, store=store)
    async with asyncio.timeout(60):
        while await store.read(leases):
            await asyncio.sleep(0.01)
    assert await cost_of(second, key) == cost_pico
    with pytest.raises(BudgetExceeded):
        await cost_of(second, key)
