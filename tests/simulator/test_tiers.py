"""Tiers in the simulator: what is evicted from the device comes back from them, with the engine's own policies."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from emberline.kv.retention import Retention
from emberline.protocol.errors import BadInput
from emberline.simulator.coefficients import load
from emberline.simulator.experiment import SimulationConfig, SimulationResult
from emberline.simulator.simulation import simulate
from emberline.simulator.tiers import RetentionName, SimTier, TierSpec, make_order
from emberline.simulator.trace import TrafficTrace, run_lengths
from emberline.simulator.trace_sources import RecordedRequest, RecordedSession, build_agent_trace, synthetic_agents
from emberline.simulator.virtual_clock import VirtualClock
from tests.examples import n_examples

HOST = TierSpec("host", 6_000_000, 50e9)
DISK = TierSpec("disk", 40_000_000, 3e9)
POOL = TierSpec("pool", 6_000_000, 50e9, 0.002, shared=True)
MODEL = with_fields(load("h200-llama-8b"), kv_tokens=300_000)
CONFIG = SimulationConfig(
    model=MODEL, load=0.004, workers=2, warmup_s=200.0, measured_s=150.0, session_affinity=True, drain_s=60.0
)
SHORT = replace(  # begins with full caches, if it has a history
    CONFIG, model=with_fields(MODEL, kv_tokens=400_000), load=0.006, warmup_s=10.0, measured_s=60.0, tiers=(HOST, DISK)
)


@pytest.fixture(scope="module")
def trace() -> TrafficTrace:
    return synthetic_agents(3, MODEL.context_len, 60)


@pytest.fixture(scope="module")
def device_only(trace: TrafficTrace) -> SimulationResult:
    return simulate(trace, CONFIG)


def p90_s(result: SimulationResult) -> float:
    return float(result.figures()["ttft_p90_s"])


def test_tiers_raise_hits_and_lower_ttft(trace: TrafficTrace, device_only: SimulationResult) -> None:
    tiered = simulate(trace, replace(CONFIG, tiers=(HOST, DISK)))
    assert tiered.hit_ratio > device_only.hit_ratio + 0.02
    assert tiered.hit_ratio > tiered.ideal_hit_ratio - 0.02
    assert p90_s(tiered) < p90_s(device_only)
    assert tiered.hits_by_tier()["host"] > 0.01


def random_session(rng: Random) -> RecordedSession:
    """An agent's session that grows, is cut back, branches, and names blocks again; with sub-agents."""
    requests: list[RecordedRequest] = []
    ids: list[int] = []
    next_id, at_s = 1, 0.0
    for _ in range(rng.randrange(1, 12)):
        if rng.random() < 0.25:
            del ids[rng.randrange(len(ids) + 1) :]
        n = rng.randrange(1, 300)
        ids += range(next_id, next_id + n)
        next_id += n
        if rng.random() < 0.2:
            ids += ids[rng.randrange(len(ids)) :][:40]
        requests.append(
            RecordedRequest(at_s, 64 * len(ids), rng.randrange(1, 500), run_lengths(ids), 20 * rng.random())
        )
        if rng.random() < 0.3:
            own = [*ids[: rng.randrange(len(ids))], *range(next_id, next_id + 50)]
            next_id += 50
            inner = RecordedRequest(0.0, 64 * len(own), 5, run_lengths(own))
            requests.append(RecordedRequest(at_s, requests=[inner]))
        at_s += 60 * rng.random()
    return RecordedSession(requests, tool_tokens=rng.choice([0, 320, 768]), system_tokens=192)


@settings(max_examples=n_examples(20))
@given(st.randoms(use_true_random=False), st.sampled_from(["learned", "lru", "oracle"]))
def test_any_sessions_are_simulated_to_their_end(rng: Random, retention: RetentionName) -> None:
    model = with_fields(MODEL, kv_tokens=140_000, context_len=100_000)
    trace = build_agent_trace([random_session(rng) for _ in range(6)], model.context_len)
    tiers = (
        TierSpec("host", rng.choice([6_400, 100_000, 400_000]), 50e9),
        TierSpec("disk", 500_000, 3e9),
        TierSpec("pool", 200_000, 3e9, shared=True),
    )
    config = replace(CONFIG, model=model, load=0.05, warmup_s=10.0, measured_s=20.0, retention=retention, tiers=tiers)
    result = simulate(trace, replace(config, history_s=rng.choice([0.0, 3600.0]), seed=rng.randrange(1000)))
    assert 0 <= result.hit_ratio <= result.ideal_hit_ratio + 1e-9


def test_a_slow_tier_makes_no_request_slower_than_none(trace: TrafficTrace, device_only: SimulationResult) -> None:
    slow = simulate(trace, replace(CONFIG, tiers=(TierSpec("disk", 40_000_000, 2e8),)))
    assert p90_s(slow) <= 1.1 * p90_s(device_only)


def test_a_fetch_queues_after_the_transfers_of_its_worker() -> None:
    tier = SimTier(TierSpec("disk", 1600, 1e6), 100, VirtualClock(), make_order("lru", 100, Retention()))
    assert tier.occupy("a", 2_000_000) == 2.0
    assert tier.queue("a").seconds(1_000_000) == pytest.approx(3.0005)
    assert tier.queue("b").seconds(1_000_000) == pytest.approx(1.0005)


def test_a_shared_pool_needs_no_affinity(trace: TrafficTrace, device_only: SimulationResult) -> None:
    config = replace(CONFIG, policy="least_loaded", session_affinity=False)
    pooled, alone = simulate(trace, replace(config, tiers=(POOL,))), simulate(trace, config)
    assert pooled.hit_ratio > 0.95 * device_only.hit_ratio
    assert pooled.hit_ratio > alone.hit_ratio + 0.1


def test_history_stands_for_hours_before_the_simulation(trace: TrafficTrace) -> None:
    cold, warm = simulate(trace, SHORT), simulate(trace, replace(SHORT, history_s=4 * 3600.0))
    assert warm.ideal_hit_ratio > cold.ideal_hit_ratio + 0.05
    assert warm.hit_ratio > warm.ideal_hit_ratio - 0.02, "the router knows where each session's cache is"
    assert p90_s(warm) < p90_s(cold)


def test_history_fills_small_tiers_so_that_old_sessions_come_from_the_drive(trace: TrafficTrace) -> None:
    small = TierSpec("host", 500_000, 50e9)
    config = replace(SHORT, tiers=(small, DISK), history_s=4 * 3600.0)
    result = simulate(trace, config)
    assert result.hits_by_tier()["disk"] > 0.05
    assert result.figures() == simulate(trace, config).figures(), "the same seed gives the same figures"


def test_history_with_a_compared_policy_is_refused() -> None:
    with pytest.raises(BadInput, match="history"):
        replace(CONFIG, policy="dynamo", history_s=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["lru", "oracle"])
def test_other_orders_of_eviction(trace: TrafficTrace, device_only: SimulationResult, retention: str) -> None:
    result = simulate(trace, replace(CONFIG, retention=retention))
    assert abs(result.hit_ratio - device_only.hit_ratio) < 0.1
    assert result.hits_by_tier() == {}


def test_tiers_with_faults_are_refused() -> None:
    with pytest.raises(BadInput, match="tiers"):
        replace(CONFIG, tiers=(HOST,), faults=1)
