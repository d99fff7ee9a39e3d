"""Costs are exact, additive and never negative; cached input never costs more; the worst case bounds every outcome."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.errors import BadInput
from emberline.protocol.price import MICRO, PICO, Price, PriceFields, format_amount, parse_amount, price_fields

CLASSES = st.sampled_from(["priority", "default", "flex", "batch"])
TOKENS = st.integers(0, 10_000_000)
KIMI = Price(input=600_000, cached_input=100_000, output=3_000_000, flex=50, batch=50, priority=200, neuron=11)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    rate = st.integers(0, 10**8).map(lambda n: 100 * n)  # any percentage of it is whole
    full, cached = sorted(draw(st.tuples(rate, rate)), reverse=True)
    percent = st.integers(0, 1000)
    return Price(
        input=full,
        cached_input=cached,
        output=draw(rate),
        image=draw(rate) // 10_000 * 100,
        audio_second=draw(rate),
        flex=draw(percent),
        batch=draw(percent),
        priority=draw(percent),
    )


def test_a_known_bill() -> None:
    # 1,026 new tokens at 0.60, 8,192 cached at 0.10 and 317 out at 3.00 per million: 0.0023858
    cost = KIMI.cost_pico("default", input_tokens=9218, cached_tokens=8192, output_tokens=317)
    assert format_amount(cost) == "0.0023858"
    assert KIMI.cost_pico("batch", input_tokens=9218, cached_tokens=8192, output_tokens=317) == cost // 2
    assert KIMI.neurons(cost) == "216.89"
    assert KIMI.cached_discount_pico("default", 8192) == 500_000 * 8192
    assert Price(audio_second=8333).cost_pico("default", audio_ms=60_000) == 8333 * 60_000
    assert format_amount(Price(image=500).cost_pico("default", images=3)) == "0.0015"


@given(prices(), CLASSES, TOKENS, TOKENS, TOKENS, TOKENS)
def test_additive(price: Price, kind: str, a: int, b: int, out_a: int, out_b: int) -> None:
    def cost(n: int, out: int) -> int:
        return price.cost_pico(kind, input_tokens=n, cached_tokens=n // 3, output_tokens=out, images=out, audio_ms=out)

    both = price.cost_pico(
        kind,
        input_tokens=a + b,
        cached_tokens=a // 3 + b // 3,
        output_tokens=out_a + out_b,
        images=out_a + out_b,
        audio_ms=out_a + out_b,
    )
    assert both == cost(a, out_a) + cost(b, out_b)


@given(prices(), CLASSES, TOKENS, st.data())
def test_never_negative_cached_never_dearer_and_bounded_by_the_worst_case(
    price: Price, kind: str, n: int, data: st.DataObject
) -> None:
    cached, computed = data.draw(st.integers(0, n)), data.draw(st.integers(0, n))
    most = data.draw(TOKENS)
    out = data.draw(st.integers(0, most))
    cost = price.cost_pico(kind, input_tokens=computed, cached_tokens=cached, output_tokens=out)
    full = price.cost_pico(kind, input_tokens=computed, output_tokens=out)
    assert 0 <= cost <= full <= price.worst_case_pico(n, most, kind)
    assert full - cost == price.cached_discount_pico(kind, min(cached, computed))


def test_a_price_that_cannot_be_exact_is_refused() -> None:
    with pytest.raises(ValueError, match="33 % of the price of input"):
        Price(input=50, flex=33)
    with pytest.raises(ValueError, match="cached input"):
        Price(input=1, cached_input=2)
    for wrong in ({"input": -1}, {"input": 10**10 + 1}, {"output": 1.5}, {"flex": 1001}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Price)


def test_the_largest_cost_fits_64_bits() -> None:
    largest = Price(input=10**10, cached_input=0, output=10**10, priority=1000)
    assert largest.worst_case_pico(10**6, 10**7, "priority") < 1 << 63


@given(st.integers(0, 10**24 - 1))
def test_amounts_are_written_and_read_exactly(amount: int) -> None:
    assert parse_amount(format_amount(amount), PICO) == amount


def test_amounts() -> None:
    assert parse_amount("0.60") == 600_000
    assert parse_amount("3") == 3 * MICRO
    assert parse_amount(".5") == 500_000
    assert format_amount(0) == "0.00"
    assert format_amount(-1_500_000, MICRO) == "-1.50"
    for wrong in ("", ".", "-1", "1e3", "1,5", "0.0000001", "٣", "9" * 5000, "nan"):
        with pytest.raises(BadInput):
            parse_amount(wrong)


def test_a_price_as_people_write_it() -> None:
    price = PriceFields(input="0.60", cached_input=0.1, output=3, batch=50, audio_second="0.000008334").price()
    assert (price.input, price.cached_input, price.output, price.batch) == (600_000, 100_000, 3_000_000, 50)
    assert price.audio_second == 8334
    assert price_fields(price) == {
        "input": "0.60",
        "cached_input": "0.10",
        "output": "3.00",
        "audio_second": "0.000008334",
        "batch": 50,
    }
    assert PriceFields(input="0.60").price().cached_input == 600_000  # no discount unless it is stated
    for wrong in ({"input": "0.0000001"}, {"output": 1e-9}, {"input": float("nan")}, {"image": -1}, {"output": "1e3"}):
        with pytest.raises(BadInput, match=f"`{next(iter(wrong))}`"):
            PriceFields(**wrong).price()  # type: ignore[arg-type]
    for refused in ({"input": 1, "cached_input": 2}, {"input": 10_001}, {"input": "0.000001", "flex": 50}):
        with pytest.raises(BadInput, match="cannot be used"):
            PriceFields(**refused).price()  # type: ignore[arg-type]
