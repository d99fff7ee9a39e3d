"""A request is charged the version valid when it was accepted, whatever came later."""

from bisect import bisect_right

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from emberline.accounts.prices import PriceTable, PriceVersion
from emberline.accounts.usage_row import UsageRow, UsageStatus
from emberline.protocol.price import Price


def version(number: int, valid_from_us: int, price: Price | None, model: str = "m") -> PriceVersion:
    return PriceVersion(
        model=model, number=number, valid_from_us=valid_from_us, source="admin", created_us=0, price=price
    )


def usage(status: UsageStatus = "finished", price_version: str = "1", **cached: int) -> UsageRow:
    return UsageRow(
        id="r",
        account="a",
        model="M",
        model_version="",
        input_tokens=10,
        cached_by_tier=cached or {"device": 4},
        output_tokens=3,
        status=status,
        created_us=0,
        finished_us=1,
        price_version=price_version,
    )


@given(st.lists(st.integers(0, 100), max_size=8).map(sorted), st.integers(-1, 101))
def test_the_version_valid_at_a_time(begins: list[int], at_us: int) -> None:
    table = PriceTable(version(n, us, Price(input=n)) for n, us in enumerate(begins, 1))
    expected = bisect_right(begins, at_us)
    price = table.find("M", at_us)
    assert (price.version if price else "0") == str(expected)


def test_costs_of_rows() -> None:
    table = PriceTable([version(1, 0, Price(input=10, cached_input=1, output=100)), version(2, 50, None)])
    assert table.cost(usage()) == 6 * 10 + 4 + 3 * 100
    assert table.cost(usage(device=1, host=1, disk=1, pool=1)) == table.cost(usage()), "of any tier"
    assert table.cost(usage("cancelled")) == 364  # what was computed
    assert table.cost(usage("failed")) == 0
    assert table.find("m", 50) is None
    assert table.cost(usage(price_version="2")) is None
    assert table.worst_case("m", 49, 10, 3) == 400
    assert table.worst_case("m", 50, 10, 3) is None
    assert table.find("other", 0) is None
    assert [entry.number for entry in table.history("M")] == [1, 2]


def test_models_of_accounts_have_a_default_price() -> None:
    own, default = "@accounts/alice/m", "@accounts/*"
    table = PriceTable([version(1, 10, Price(second=7), default), version(2, 30, Price(second=8), default)])
    first = table.find(own, 10)
    assert first is not None
    row = usage(price_version=first.version)
    row = msgspec.structs.replace(row, model=own, output_tokens=0, compute_ms=1000)
    assert table.cost(row) == 7000
    assert [each.number for each in table.history(own)] == [1, 2]
    assert [table.find(model, 30) for model in (own, "@me/m", "m")] == [table.find(default, 30), None, None]
    table.add(version(1, 20, Price(second=1), own))
    assert [(price := table.find(own, at_us)) and price.second for at_us in (9, 10, 19, 20, 30)] == [None, 7, 7, 1, 1]
    assert table.cost(row) == 7000, "a row has the price that it was charged"
    table.add(version(2, 40, None, own))
    assert [(price := table.find(own, at_us)) and price.second for at_us in (39, 40)] == [1, 8]
    table.add(version(3, 50, None, default))
    assert table.find(own, 50) is None, "both prices were taken away"
    assert [each.number for each in table.history(own)] == [1, 2]
