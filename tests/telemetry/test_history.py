import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.accounts.usage_row import UsageRow
from emberline.balancer.worker import Snapshot
from emberline.telemetry.history import N_POINTS, N_RECENT, STEP_S, History, quantile_ms
from emberline.telemetry.metrics import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S, Counts, Histogram

IDLE = Snapshot(workers=[], waiting={"default": 3}, dispatched=2, index_blocks=0)


class Time:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def row(n: int, output_tokens: int = 5, status: str = "finished") -> UsageRow:
    return UsageRow(
        id=f"r{n}",
        account="a",
        model="m",
        model_version="v",
        input_tokens=10,
        cached_by_tier={"device": 4},
        output_tokens=output_tokens,
        status=status,  # type: ignore[arg-type]
        created_us=0,
        first_token_us=40_000,
        finished_us=90_000,
    )


def test_a_growing_reply_counts_when_it_grows_and_once() -> None:
    time = Time()
    history = History(lambda: IDLE, time)
    early, later, end = row(0, 3), row(0, 7), row(0, 9)
    history.progressed(early, None)
    history.close_point()
    time.now_s += STEP_S
    history.progressed(later, early)
    history.ended(end, later, Counts())
    history.refused(2)
    history.close_point()
    series = history.series()
    assert series["output_tokens"] == [3, 6]
    assert series["input_tokens"] == [10, 0]
    assert series["cached_tokens"] == [4, 0]
    assert series["requests"] == [0, 1]
    assert series["refused"] == [0, 2]
    assert (series["waiting"], series["in_flight"]) == ([3, 3], [2, 2])
    assert series["ttft_p50_ms"][0] is None
    assert 20 <= (series["ttft_p50_ms"][1] or 0) <= 40
    assert history.series(since_s=1000)["time_s"] == [1010]


def test_memory_is_bounded() -> None:
    time = Time()
    history = History(lambda: IDLE, time)
    for n in range(N_POINTS + 5):
        time.now_s += STEP_S
        history.ended(row(n), None, Counts())
        history.close_point()
    assert len(history.series()["requests"]) == N_POINTS
    assert len(history.recent) == N_RECENT


def test_a_restarted_worker_has_no_negative_rate() -> None:
    history = History(lambda: IDLE, Time())
    history._totals.append({"w": (900.0, 500, 1000)})
    assert history.rate("w", 600, 3000).output_per_s == 20
    assert history.rate("w", 600, 3000).input_per_s == 1
    assert history.rate("w", 0, 10).output_per_s == 0
    assert history.rate("other", 0, 10).output_per_s == 0


@given(st.lists(st.floats(0.0001, 500), min_size=1, max_size=50), st.sampled_from((0.5, 0.95, 0.99)))
def test_a_quantile_is_in_the_bucket_of_its_value(values: list[float], q: float) -> None:
    for bounds in (TTFT_BOUNDS_S, INTER_TOKEN_BOUNDS_S):
        histogram = Histogram(bounds)
        for value in values:
            histogram.observe(value)
        found = quantile_ms(histogram, q)
        assert found is not None
        exact = sorted(values)[max(0, -int(-q * len(values) // 1) - 1)]
        upper = next((bound for bound in bounds if exact <= bound), bounds[-1])
        lower = max((bound for bound in bounds if bound < exact), default=0.0)
        assert 1000 * lower - 0.001 <= found <= 1000 * upper + 0.001


def test_no_quantile_of_nothing() -> None:
    assert quantile_ms(Histogram((1.0, 2.0)), 0.5) is None


def test_the_query_is_bounded() -> None:
    from emberline.telemetry.status import MAX_REQUESTS, StatusQuery

    with pytest.raises(AssertionError):
        StatusQuery(requests=MAX_REQUESTS + 1)
