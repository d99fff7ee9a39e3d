"""What a model needs and what replicas have: the published formula for equal replicas, sums of rates for others."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.supervisor.cluster.replica_demand import (
    BURSTS,
    KV_TARGET,
    ArrivalInterval,
    Capacities,
    Demand,
    NodeOffer,
    Replica,
    ReplicaCapacity,
    backlog_at,
    forecast,
    load_of,
)


@given(
    queued=st.integers(1, 10**5),
    rate=st.integers(100, 10**5),
    tolerated_s=st.integers(1, 60),
    kv=st.integers(0, 10**5),
    kv_capacity=st.integers(1000, 10**6),
)
def test_equal_replicas_are_enough_from_the_number_of_the_formula_on(
    queued: int, rate: int, tolerated_s: int, kv: int, kv_capacity: int
) -> None:
    n = max(-(-queued // (rate * tolerated_s)), -(-10 * kv // (round(10 * KV_TARGET) * kv_capacity)))
    one = ReplicaCapacity(prefill_rate=rate, kv_tokens=kv_capacity)
    demand = Demand(prefill_rate=queued / tolerated_s, kv_tokens=kv)
    assert load_of("both", [one] * n, demand) <= 1 + 1e-9
    assert load_of("both", [one] * (n - 1), demand) > 1


def test_replicas_of_different_gpus_are_added_up_by_their_rates() -> None:
    slow, fast = ReplicaCapacity(prefill_rate=100), ReplicaCapacity(prefill_rate=300)
    assert load_of("prefill", [slow, fast], Demand(prefill_rate=200)) == 0.5


def test_a_replica_for_both_shares_its_time() -> None:
    one = ReplicaCapacity(prefill_rate=100, decode_rate=10)
    assert load_of("both", [one], Demand(prefill_rate=50, decode_rate=5)) == 1.0
    assert load_of("prefill", [one], Demand(prefill_rate=50, decode_rate=5)) == 0.5


def test_what_is_not_measured_is_not_judged_and_nothing_is_never_enough() -> None:
    assert load_of("both", [ReplicaCapacity()], Demand(prefill_rate=50)) == 0.0
    assert load_of("both", [], Demand(prefill_rate=50)) == math.inf


def history(*tokens: int) -> list[ArrivalInterval]:
    return [ArrivalInterval(seconds=10, uncached_tokens=n) for n in tokens]


def test_a_rising_load_is_followed_ahead_and_a_falling_one_to_where_it_is() -> None:
    rising = forecast(history(100, 200, 300, 400, 500, 600), 40).prefill_rate
    assert rising == pytest.approx(60 + 5 + 40)  # 1 token/s more each second, from the middle of the last interval
    assert forecast(history(600, 500, 400, 300, 200, 100), 60).prefill_rate == pytest.approx(10 - 5)
    assert forecast(history(100, 200, 300, 400, 500, 600), 10_000).prefill_rate == pytest.approx(120)
    assert forecast([], 60) == Demand()


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30), st.floats(0, 1000), st.integers(2, 9))
def test_a_forecast_is_no_more_than_twice_the_highest_and_grows_with_the_load(
    tokens: list[int], ahead_s: float, factor: int
) -> None:
    found = forecast(history(*tokens), ahead_s).prefill_rate
    assert 0 <= found <= 2 * max(tokens) / 10 + 1e-6
    assert forecast(history(*(n * factor for n in tokens)), ahead_s).prefill_rate == pytest.approx(found * factor)


def test_bursts_are_expected_again() -> None:
    bursts = forecast(history(*[300, 900] * 30), 180).prefill_rate
    scatter = math.sqrt(60 / 58) * 30
    assert bursts == pytest.approx(60 + BURSTS * scatter, rel=0.01)
    assert forecast(history(*[590, 610] * 30), 180).prefill_rate < 63


def test_a_constant_load_has_no_trend() -> None:
    assert forecast(history(*[700] * 30), 180).prefill_rate == pytest.approx(70)


def test_the_backlog_counts_what_replicas_compute_meanwhile() -> None:
    assert backlog_at(1000, 10, 100, [(5, 0.0), (20, 80.0)]) == 1000 + 1000 - 500 - 400
    assert backlog_at(1000, 0, 100, [(50, 0.0)]) == 0


def test_rates_come_from_the_replica_then_from_its_kind_then_from_the_offer() -> None:
    measured = Replica(name="a", gpu="h200", capacity=ReplicaCapacity(prefill_rate=100))
    new, other = Replica(name="b", gpu="h200"), Replica(name="c", gpu="l40s")
    offer = NodeOffer(gpu="l40s", n_free=1, capacity=ReplicaCapacity(prefill_rate=30, kv_tokens=5))
    capacities = Capacities([measured, new, other], [offer])
    assert [capacities.of(each).prefill_rate for each in (measured, new, other)] == [100, 100, 30]
    assert capacities.of(new).kv_tokens == 5  # nothing better is known
