"""Whole simulations: deterministic, no request lost, and with the expected results."""

from collections import Counter
from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from emberline.balancer.cost_model import Settings
from emberline.protocol.errors import BadInput
from emberline.simulator.baselines import DynamoKnobs, SGLangKnobs
from emberline.simulator.coefficients import Coefficients, FixedTokenBudget, load, names
from emberline.simulator.emberline_router import EmberlineRouter
from emberline.simulator.experiment import POLICIES, SimulationConfig, SimulationResult, interval, percentile
from emberline.simulator.simulation import _Simulation, load_at_utilization, simulate
from emberline.simulator.trace import TraceSession, TraceTurn, TrafficTrace

MODEL = with_fields(load("h200-llama-8b"), context_len=20_000, kv_tokens=60_000)


def agents(n_sessions: int = 12, n_turns: int = 5) -> TrafficTrace:
    """Sessions that share their first 40 blocks and grow by ten blocks per turn."""
    sessions = []
    for number in range(n_sessions):
        turns = []
        for turn in range(n_turns):
            path, lengths = tuple(range(turn + 2)), (40, 20 + number, *[10] * turn)
            turns.append(TraceTurn(path, lengths, 64 * sum(lengths), 50 + number, wait_s=2.0 if turn else 0.0))
        times_s = tuple(5.0 * turn for turn in range(n_turns))
        sessions.append(TraceSession(tuple(turns), 0.0, common=(0, 1), times_s=times_s))
    return TrafficTrace("few", 64, sessions, 10, shared=False)


def config(**changes: object) -> SimulationConfig:
    given = {"model": MODEL, "load": 0.5, "workers": 3, "warmup_s": 20.0, "measured_s": 60.0, "tenants": 3}
    return SimulationConfig(**{**given, **changes})  # type: ignore[arg-type]


def check(result: SimulationResult) -> None:
    """Every request has finished once, in order."""
    assert result.requests
    assert max(Counter(request.id for request in result.requests).values()) == 1
    for request in result.requests:
        assert 0 <= request.arrival_s < request.first_token_s <= request.end_s
        assert 0 <= request.cached_tokens < request.n_prompt
    figures = result.figures()
    assert figures["unfinished"] == 0
    assert 0 < figures["busy"] <= 1
    assert 0 <= figures["hit_ratio"] <= 1
    assert 0 < figures["fairness"] <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finishes_every_request_deterministically(policy: str) -> None:
    trace = agents()
    result = simulate(trace, config(policy=policy))
    check(result)
    again = simulate(trace, config(policy=policy))
    assert again.figures() == result.figures()
    assert [request.decode_worker for request in again.requests] == [
        request.decode_worker for request in result.requests
    ]


def test_seed_changes_arrivals() -> None:
    assert simulate(agents(), config()).figures() != simulate(agents(), config(seed=2)).figures()


def test_prefill_decode_disaggregation() -> None:
    result = simulate(agents(), config(workers=0, prefill_workers=1, decode_workers=2, settings=_never_local()))
    check(result)
    disaggregated = [request for request in result.requests if request.prefill_worker]
    assert disaggregated
    assert {request.prefill_worker for request in disaggregated} == {"w000"}
    assert {request.decode_worker for request in result.requests} <= {"w001", "w002"}
    assert result.transferred_bytes > 0


def _never_local() -> object:
    from emberline.balancer.cost_model import Settings

    return Settings(local_tokens=0)


def test_two_balancers_finish_every_request() -> None:
    check(simulate(agents(), config(balancers=2, report_delay_s=0.1)))


def test_affinity_has_a_higher_hit_ratio_than_round_robin() -> None:
    sticky, robin = simulate(agents(), config()), simulate(agents(), config(policy="plain_round_robin"))
    assert sticky.hit_ratio > robin.hit_ratio
    assert sticky.ideal_hit_ratio >= sticky.hit_ratio


def test_load_at_utilization() -> None:
    trace, wanted = agents(), config(policy="plain_least_loaded", measured_s=200.0)
    found = load_at_utilization(trace, wanted, 0.5)
    assert simulate(trace, replace(wanted, load=found)).busy == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "best"}, "no policy 'best'"),
        ({"workers": 0}, "1 to 256"),
        ({"workers": 300}, "1 to 256"),
        ({"prefill_workers": 2}, "need each other"),
        ({"load": 0.0}, "above 0"),
        ({"policy": "dynamo", "balancers": 2}, "own policies"),
        ({"policy": "dynamo", "prefill_workers": 1, "decode_workers": 1}, "disaggregation"),
        ({"policy": "sglang", "faults": 1}, "own policies"),
        ({"policy": "sglang", "upstream": True}, "own policies"),
        ({"workers": 0, "faults": 1, "prefill_workers": 1, "decode_workers": 1}, "role both"),
        ({"unstreamed": 1.5}, "share"),
    ],
)
def test_invalid_config_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        config(**changes)


def test_context_larger_than_the_kv_cache_is_refused() -> None:
    with pytest.raises(BadInput, match="KV"):
        simulate(agents(), config(model=with_fields(MODEL, kv_tokens=10_000)))


def test_fitted_coefficients_come_with_the_package() -> None:
    assert "h200-llama-8b" in names()
    for name in names():
        model = load(name)
        assert model.name == name
        assert model.prefill_s(4000) > 4 * model.prefill_s(1000) * 0.9
        assert model.decode_s(8, 8000) > model.decode_s(1, 1000) > 0
    with pytest.raises(BadInput, match="h200"):
        load("none")


def test_tokens_within_a_time_limit() -> None:
    model: Coefficients = load("h200-llama-8b")
    for start in (0, 10_000, 100_000):
        n = model.tokens_within(0.05, start, 100_000)
        assert n % model.tile == 0
        assert model.chunk_s(n, start) <= 0.05 or n == model.tile
        assert model.chunk_s(n + model.tile, start) > 0.05


def test_latency_target_lowers_inter_token_latency() -> None:
    trace = agents()
    fixed, timed = (
        simulate(trace, config(load=3.0, warmup_s=10.0, measured_s=20.0, **more))
        for more in ({"prefill_policy": FixedTokenBudget(8192)}, {})
    )
    assert timed.figures()["interval_p99_ms"] < fixed.figures()["interval_p99_ms"]


def test_the_balancer_runs_with_the_settings_of_production() -> None:
    """The cost model is not that of the simulated workers: only its scale is measured."""
    router = _Simulation(agents(), config())._make_router()
    assert isinstance(router, EmberlineRouter)
    assert router.balancer.settings == with_fields(Settings(), block_tokens=256)


def test_no_request_is_lost_when_workers_die_hang_and_return() -> None:
    faulty = config(faults=8, drain_s=600.0)
    result = simulate(agents(), faulty)
    check(result)
    assert result.failovers > 0
    assert result.figures() == simulate(agents(), faulty).figures()


def test_a_fleet_whose_only_worker_dies_serves_again_when_it_returns() -> None:
    result = simulate(agents(), config(workers=1, load=1.0, faults=6, drain_s=600.0))
    check(result)
    assert result.rejected > 0  # while it was down; the clients tried again


def test_a_request_that_moves_keeps_its_tokens() -> None:
    """And its first token: what the client has seen is not taken back."""
    result = simulate(agents(), config(load=1.0, faults=8, drain_s=600.0))
    moved = [request for request in result.requests if request.n_failovers and request.n_written]
    assert moved
    for request in moved:
        assert request.n_written < request.n_output


def test_servers_without_kv_events_are_routed_to_by_what_they_were_sent() -> None:
    result = simulate(agents(), config(upstream=True))
    check(result)
    assert result.hit_ratio > 0.8 * simulate(agents(), config()).hit_ratio


def test_requests_whose_first_token_is_not_seen_hold_up_others() -> None:
    """Their prompts count as pending until they end. That is why production streams from every server."""
    streamed, unstreamed = (
        simulate(agents(), config(load=4.0, warmup_s=10.0, measured_s=15.0, unstreamed=share)) for share in (0.0, 1.0)
    )
    check(unstreamed)
    assert percentile(sorted(unstreamed.ttft_s()), 50) > 5 * percentile(sorted(streamed.ttft_s()), 50)


def test_an_interval_covers_the_mean_of_few_seeds() -> None:
    assert interval([3.0]) == (3.0, float("inf"))
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.776 * (2.5 / 5) ** 0.5, rel=1e-3)
    assert interval([2.0] * 40) == (2.0, 0.0)


@pytest.mark.parametrize("knobs", [SGLangKnobs(balance_absolute=0, balance_relative=1), DynamoKnobs(overlap_weight=0)])
def test_the_knobs_of_compared_policies_change_their_decisions(knobs: SGLangKnobs | DynamoKnobs) -> None:
    policy = "sglang" if isinstance(knobs, SGLangKnobs) else "dynamo"
    default, changed = (simulate(agents(), config(policy=policy, load=2.0, knobs=one)) for one in (None, knobs))
    check(changed)
    assert [r.decode_worker for r in default.requests] != [r.decode_worker for r in changed.requests]
