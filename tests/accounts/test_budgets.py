"""Budgets of cores that share a store; `test_budget_properties.py` has every schedule."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.accounts import budgets
from emberline.accounts.budget_leases import PERIODS, insert_rows, period_bounds, period_label
from emberline.accounts.budgets import Budget, Budgets, LeaseLimits
from emberline.accounts.usage_row import UsageRow, insert_usage
from emberline.protocol.errors import BudgetExceeded, BudgetReserved, Unavailable
from emberline.store import Database, Value
from tests.databases import DatabaseLocation
from tests.faulty_store import FaultyStore

NOW_US = 1_800_000_000_000_000
BUDGET = Budget("acme", "k1", "this API key", 1000, "month")


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
async def cores(store: Database) -> AsyncIterator[list[Budgets]]:
    limits = LeaseLimits(answer_wait_s=60.0)  # the others answer, however busy the machine is
    cores = [Budgets(store, f"core{number}", limits=limits) for number in range(3)]
    for core in cores:
        core.start()
    yield cores
    for core in cores:
        await core.close(rows_stored=False)


def row(name: str, cost_pico: int, lease: str = "") -> UsageRow:
    return UsageRow(
        id=name,
        account="acme",
        key_id="k1",
        model="m",
        model_version="",
        status="finished",
        created_us=NOW_US,
        finished_us=NOW_US + 1,
        cost_pico=cost_pico,
        lease=lease,
    )


async def record(store: Database, budget: Budget, *, removed: bool = False) -> None:
    """The budget in the record of its account or key."""
    fields: dict[str, Value] = {
        "id": budget.key_id or budget.account,
        "budget_pico": None if removed else budget.cap_pico,
        "budget_period": budget.period,
        "created_us": 0,
        "version": 1,
    }
    if budget.key_id:
        texts = dict.fromkeys(("name", "role", "models", "apis", "hint"), "")
        fields |= {"account": budget.account, "digest": b"", **texts}
    table = "api_keys" if budget.key_id else "accounts"
    marks = ", ".join("?" * len(fields))
    await store.write(
        f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE "
        "SET budget_pico = excluded.budget_pico, budget_period = excluded.budget_period",
        list(fields.values()),
    )


async def billed(store: Database) -> dict[Value, Value]:
    return dict(await store.read("SELECT id, cost_pico FROM usage"))  # type: ignore[arg-type]


async def test_a_core_gets_what_the_others_do_not_use(cores: list[Budgets]) -> None:
    first = await cores[0].reserve([BUDGET], 100, NOW_US)  # and a slice more
    await cores[1].reserve([BUDGET], 100, NOW_US)
    last = await cores[2].reserve([BUDGET], 800, NOW_US)
    with pytest.raises(BudgetReserved):
        await cores[0].reserve([BUDGET], 1, NOW_US)
    cores[0].settle(first, 60)
    await cores[1].reserve([BUDGET], 40, NOW_US)
    cores[2].settle(last, 800)
    with pytest.raises(BudgetExceeded) as refused:
        await cores[2].reserve([BUDGET], 901, NOW_US)
    assert not isinstance(refused.value, BudgetReserved)


async def test_a_core_that_asks_while_another_gives_back_gets_what_became_free_meanwhile(store: Database) -> None:
    late, limits = FaultyStore(store), LeaseLimits(answer_wait_s=60.0)
    giver = Budgets(late, "giver")
    first, second = (Budgets(store, name, limits=limits) for name in ("first", "second"))
    running = await giver.reserve([BUDGET], 100, NOW_US)  # and a slice of 50 more
    await first.reserve([BUDGET], 800, NOW_US)
    came, may_run = asyncio.Event(), asyncio.Event()

    async def wait(name: str, _: Any) -> None:
        if name == "run":
            came.set()
            await may_run.wait()

    async def asked(n_times: int) -> None:
        while await store.read("SELECT asked FROM budgets") != [(n_times,)]:
            await asyncio.sleep(0.002)

    async with asyncio.timeout(60):
        refused = asyncio.create_task(first.reserve([BUDGET], 200, NOW_US))
        await asked(1)
        late.before = wait
        giving = asyncio.create_task(giver.answer())
        await came.wait()
        giver.settle(running, 60)
        granted = asyncio.create_task(second.reserve([BUDGET], 120, NOW_US))
        await asked(2)
        await first.answer()
        may_run.set()
        await giving
        await giver.answer()
        await granted
        with pytest.raises(BudgetReserved):
            await refused


async def test_what_a_core_gets_and_gives_back_at_once_is_not_refused(store: Database) -> None:
    """It asked for what others do not use, and answers its own question between the grant and the reservation."""
    polls, may_run, has_read = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def note_reads(name: str, _: Any) -> None:
        has_read.set()

    late, limits = FaultyStore(store, after=note_reads), LeaseLimits(answer_wait_s=60.0)
    giver, asker = Budgets(store, "giver"), Budgets(late, "asker", limits=limits)
    await giver.reserve([BUDGET], 100, NOW_US)  # and a slice of 50 more
    await asker.reserve([BUDGET], 800, NOW_US)

    async def wait(name: str, _: Any) -> None:
        if name == "run":
            polls.set()
            await may_run.wait()

    async with asyncio.timeout(60):
        granted = asyncio.create_task(asker.reserve([BUDGET], 100, NOW_US))
        while await store.read("SELECT asked FROM budgets") != [(1,)]:
            await asyncio.sleep(0.002)
        late.before = wait
        await polls.wait()
        await giver.answer()
        has_read.clear()
        answering = asyncio.create_task(asker.answer())
        await has_read.wait()
        await asyncio.sleep(0)  # it waits for the transaction of the request
        may_run.set()
        await answering
        await granted


async def test_concurrent_requests_share_a_transaction_and_never_exceed_the_cap(
    cores: list[Budgets], store: Database
) -> None:
    async def ask(number: int) -> bool:
        try:
            reservation = await cores[number % 3].reserve([BUDGET], 10, NOW_US)
        except BudgetExceeded:
            return False
        cores[number % 3].settle(reservation, 10)
        await store.write(*insert_usage(row(f"r{number}", 10, reservation.lease)))
        return True

    taken = await asyncio.gather(*map(ask, range(150)))
    assert sum(taken) == 100


async def test_what_was_billed_before_the_budget_was_set_counts(cores: list[Budgets], store: Database) -> None:
    await store.write(*insert_usage(row("before", 995)))
    with pytest.raises(BudgetExceeded, match=r"has 0\.000000000005 left of its budget of 0\.000000001 a month"):
        await cores[0].reserve([BUDGET], 6, NOW_US)
    next_month_us = period_bounds("2027-01")[1]
    await cores[0].reserve([BUDGET], 1000, next_month_us)


async def test_what_was_billed_while_a_budget_was_removed_counts(store: Database) -> None:
    now_s = 0.0
    core = Budgets(store, "core", clock=lambda: now_s)
    core.settle(await core.reserve([BUDGET], 100, NOW_US), 0)
    now_s = budgets.FORGET_S + 1
    await core.renew()
    await store.write(*insert_usage(row("without", 900)))
    with pytest.raises(BudgetExceeded):
        await core.reserve([BUDGET], 101, NOW_US)
    await core.reserve([BUDGET], 100, NOW_US)


async def test_a_lower_cap_holds_at_once(cores: list[Budgets]) -> None:
    cores[0].settle(await cores[0].reserve([BUDGET], 300, NOW_US), 300)
    lower = Budget("acme", "k1", "this API key", 310, "month")
    with pytest.raises(BudgetExceeded):
        await cores[0].reserve([lower], 11, NOW_US)
    await cores[0].reserve([lower], 10, NOW_US)


@pytest.mark.parametrize("removed", [False, True])
async def test_a_budget_that_is_no_longer_in_force_limits_no_bill(
    cores: list[Budgets], store: Database, removed: bool
) -> None:
    old = Budget("acme", "", "account acme", 100, "total")
    await record(store, old)
    await record(store, BUDGET)
    used = await cores[0].reserve([BUDGET, old], 100, NOW_US)
    cores[0].settle(used, 100)
    await store.write(*insert_usage(row("old", 100, used.lease)))
    await cores[0].close()
    new = Budget("acme", "", "account acme", 1000, "month")
    await record(store, new, removed=removed)
    budgets_now = [BUDGET] if removed else [BUDGET, new]
    later = await cores[1].reserve(budgets_now, 50, NOW_US)
    cores[1].settle(later, 50)
    await store.run(lambda: insert_rows([row("job", 50, later.lease)]))
    assert await billed(store) == {"old": 100, "job": 50}


async def test_the_end_of_a_request_stands_and_not_its_checkpoint(cores: list[Budgets], store: Database) -> None:
    """A killed core leaves both where the end was spooled and the next checkpoint not yet written."""
    await record(store, BUDGET)
    lease = (await cores[0].reserve([BUDGET], 50, NOW_US)).lease
    ended, checkpoint = row("r", 50, lease), msgspec.structs.replace(row("r", 0, lease), status="failed")
    await store.run(lambda: insert_rows([ended, checkpoint]))
    assert await store.read("SELECT status, cost_pico FROM usage") == [("finished", 50)]


async def test_the_budgets_of_one_request_are_under_one_lease(store: Database) -> None:
    """Here the account had no budget for a while, so what was leased of it ended, and the key's did not."""
    now_s = 0.0
    core = Budgets(store, "core", clock=lambda: now_s)
    account = Budget("acme", "", "account acme", 1000, "month")
    core.settle(await core.reserve([BUDGET, account], 10, NOW_US), 0)
    now_s = budgets.FORGET_S + 1
    core.settle(await core.reserve([BUDGET], 10, NOW_US), 0)
    await core.renew()
    reservation = await core.reserve([BUDGET, account], 300, NOW_US)
    assert {allowance.lease for allowance in reservation.allowances} == {reservation.lease}
    core.settle(reservation, 300)
    await store.write(*insert_usage(row("r", 300, reservation.lease)))
    await core.close()
    assert await store.read("SELECT committed_pico FROM budgets ORDER BY key_id") == [(300,), (300,)]


async def test_a_lease_begins_anew_after_some_hours(store: Database) -> None:
    now_s = 0.0
    core = Budgets(store, "core", clock=lambda: now_s)
    first = await core.reserve([BUDGET], 10, NOW_US)
    core.settle(first, 10)
    await store.write(*insert_usage(row("first", 10, first.lease)))
    for at_s in (budgets.MAX_AGE_S + 1, budgets.MAX_AGE_S + 100):
        now_s = at_s
        second = await core.reserve([BUDGET], 10, NOW_US)
        core.settle(second, 0)
        await core.renew()
    assert second.lease != first.lease
    leases = await store.read("SELECT lease, granted_pico FROM budget_leases")
    assert [lease for lease, _ in leases] == [second.lease]
    assert await store.read("SELECT committed_pico FROM budgets") == [(10 + int(leases[0][1] or 0),)]


async def test_without_the_store_a_lease_is_used_for_a_while(store: Database) -> None:
    now_s = 0.0
    faulty = FaultyStore(store)
    core = Budgets(faulty, "core", lease_s=100, clock=lambda: now_s)
    await core.reserve([BUDGET], 100, NOW_US)
    faulty.away = True
    now_s = 49.0
    await core.reserve([BUDGET], 10, NOW_US)
    now_s = 51.0
    with pytest.raises(Unavailable):
        await core.reserve([BUDGET], 10, NOW_US)
    faulty.away = False
    await core.reserve([BUDGET], 10, NOW_US)
    await core.close()


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)), st.sampled_from(PERIODS))
def test_a_time_is_within_its_period(at: datetime, period: str) -> None:
    at_us = int(at.replace(tzinfo=UTC).timestamp() * 1e6)
    start_us, end_us = period_bounds(period_label(period, at_us))  # type: ignore[arg-type]
    assert start_us <= at_us < end_us
    if period != "total":
        assert period_label(period, end_us) != period_label(period, at_us)  # type: ignore[arg-type]
        assert period_label(period, end_us - 1) == period_label(period, start_us)  # type: ignore[arg-type]
