"""Budgets of cores that share a store; `test_budget_properties.py` has every schedule."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.accounts.budget_leases import PERIODS, period_bounds, period_label
from emberline.accounts.budgets import Budget, Budgets
from emberline.accounts.usage_row import UsageRow, insert_usage
from emberline.protocol.errors import BudgetExceeded, BudgetReserved, Unavailable
from emberline.store import Database
from tests.databases import DatabaseLocation

NOW_US = 1_800_000_000_000_000
BUDGET = Budget("acme", "k1", "this API key", 1000, "month")


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
async def cores(store: Database) -> AsyncIterator[list[Budgets]]:
    cores = [Budgets(store, f"core{number}") for number in range(3)]
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


async def test_a_lower_cap_holds_at_once(cores: list[Budgets]) -> None:
    cores[0].settle(await cores[0].reserve([BUDGET], 300, NOW_US), 300)
    lower = Budget("acme", "k1", "this API key", 310, "month")
    with pytest.raises(BudgetExceeded):
        await cores[0].reserve([lower], 11, NOW_US)
    await cores[0].reserve([lower], 10, NOW_US)


async def test_without_the_store_a_lease_is_used_for_a_while(store: Database) -> None:
    now_s = 0.0
    core = Budgets(store, "core", lease_s=100, clock=lambda: now_s)
    await core.reserve([BUDGET], 100, NOW_US)
    work, core._store = core._store, Away()  # type: ignore[assignment]
    now_s = 49.0
    await core.reserve([BUDGET], 10, NOW_US)
    now_s = 51.0
    with pytest.raises(Unavailable):
        await core.reserve([BUDGET], 10, NOW_US)
    core._store = work
    await core.reserve([BUDGET], 10, NOW_US)
    await core.close()


class Away:
    def now_us(self) -> int:
        return NOW_US

    async def run(self, work: object) -> None:
        raise Unavailable("away")


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)), st.sampled_from(PERIODS))
def test_a_time_is_within_its_period(at: datetime, period: str) -> None:
    at_us = int(at.replace(tzinfo=UTC).timestamp() * 1e6)
    start_us, end_us = period_bounds(period_label(period, at_us))  # type: ignore[arg-type]
    assert start_us <= at_us < end_us
    if period != "total":
        assert period_label(period, end_us) != period_label(period, at_us)  # type: ignore[arg-type]
        assert period_label(period, end_us - 1) == period_label(period, start_us)  # type: ignore[arg-type]
