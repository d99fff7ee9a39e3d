"""Fleets that change in virtual time: nodes start, drain, fail and change roles, and no request is lost by it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from emberline.balancer.cost_model import Settings
from emberline.protocol.errors import BadInput
from emberline.simulator.coefficients import load
from emberline.simulator.elastic_fleet import NodeSpec, kept_through
from emberline.simulator.experiment import SimulationConfig, SimulationResult
from emberline.simulator.simulation import _Simulation, simulate
from emberline.simulator.trace import TraceSession, TraceTurn, TrafficTrace

MODEL = with_fields(load("h200-llama-8b"), context_len=20_000, kv_tokens=60_000)


def chats(n: int = 120, n_output: int = 1500) -> TrafficTrace:
    """One request a second, of 1,024 tokens that no other has."""
    sessions = [
        TraceSession((TraceTurn((number,), (16,), 1024, n_output),), float(number), group=number + 1)
        for number in range(n)
    ]
    return TrafficTrace("chats", 64, sessions, n, shared=True)


def config(**changes: object) -> SimulationConfig:
    given = {"model": MODEL, "load": 1.0, "workers": 2, "warmup_s": 0.0, "measured_s": 200.0}
    return SimulationConfig(**{**given, **changes})  # type: ignore[arg-type]


def run(simulation: _Simulation, *events: tuple[float, str, object]) -> SimulationResult:
    """With calls of the elastic fleet at given times."""
    for at_s, name, args in events:
        simulation._clock.at(at_s, getattr(simulation._elastic, name), *args)  # type: ignore[misc]
    return simulation.run()


def all_ended(result: SimulationResult) -> None:
    assert len(result.requests) == 120
    assert all(0 <= request.arrival_s < request.first_token_s <= request.end_s for request in result.requests)


def test_a_started_node_takes_requests_once_it_runs_and_costs_from_its_order() -> None:
    simulation = _Simulation(chats(), config(workers=1, nodes=NodeSpec(start_s=70.0)))
    result = run(simulation, (10.0, "start", ("both",)))
    all_ended(result)
    used = [request for request in result.requests if request.decode_worker == "w001"]
    assert used
    assert min(request.arrival_s for request in used) >= 79
    assert result.gpu_s == 200 + 190
    assert result.worker_s == [200, 120]


def test_a_drained_node_finishes_what_it_has_and_leaves() -> None:
    simulation = _Simulation(chats(), config())
    result = run(simulation, (60.5, "drain", ("w000",)))
    all_ended(result)
    assert result.failovers == 0
    node = simulation._elastic.nodes["w000"]
    assert node.state == "gone"
    assert 60.5 < node.ended_s < 70
    assert not any(r.decode_worker == "w000" and r.arrival_s > 60.5 for r in result.requests)
    assert result.gpu_s == pytest.approx(200 + node.ended_s)


def test_streams_that_outlast_the_limit_continue_elsewhere() -> None:
    simulation = _Simulation(chats(n_output=1500), config(drain_s=600.0, nodes=NodeSpec(drain_limit_s=1.0)))
    result = run(simulation, (70.0, "drain", ("w000",)))
    all_ended(result)
    assert result.failovers > 0
    assert simulation._elastic.nodes["w000"].ended_s == pytest.approx(71.0)
    assert {request.decode_worker for request in result.requests if request.n_failovers} == {"w001"}


def test_a_drain_that_is_taken_back_changes_nothing() -> None:
    simulation = _Simulation(chats(), config())
    result = run(simulation, (60.0, "drain", ("w000",)), (60.2, "undrain", ("w000",)))
    all_ended(result)
    assert simulation._elastic.nodes["w000"].state == "running"
    assert any(r.decode_worker == "w000" and r.arrival_s > 61 for r in result.requests)


def test_a_flip_keeps_the_cache_and_sends_nothing_to_the_old_role() -> None:
    disaggregated = config(workers=0, prefill_workers=2, decode_workers=1, settings=Settings(local_tokens=0))
    simulation = _Simulation(chats(), disaggregated)
    result = run(simulation, (60.0, "flip", ("w001", "decode")))
    all_ended(result)
    worker = simulation._fleet.worker("w001")
    assert worker.role == "decode"
    flipped = [request for request in result.requests if request.decode_worker == "w001"]
    assert flipped
    assert min(request.arrival_s for request in flipped) > 60
    assert not any(r.prefill_worker == "w001" and r.arrival_s > 60 for r in result.requests)
    assert worker.present(max(r.path[0] for r in result.requests if r.prefill_worker == "w001")) > 0


def test_a_node_that_fails_loses_no_request_and_comes_back() -> None:
    simulation = _Simulation(chats(), config())
    result = run(simulation, (62.0, "fail", ("w000", 20.0)))
    all_ended(result)
    assert result.failovers > 0
    assert any(r.decode_worker == "w000" and r.arrival_s > 82 for r in result.requests)


def test_a_schedule_is_followed_in_time() -> None:
    counts = (1, 1, 1, 1, 2, 2, 2, 1, 1, 1)
    result = simulate(chats(), config(workers=1, measured_s=600.0, schedule=counts))
    all_ended(result)
    assert sum(result.worker_s) == pytest.approx(600 + 180, abs=10)
    assert result.gpu_s == pytest.approx(600 + 180 + 180, abs=10)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 5))
def test_dips_are_filled_and_nothing_else(counts: list[int], start: int) -> None:
    kept = kept_through(tuple(counts), start)
    assert all(after >= before for before, after in zip(counts, kept))
    assert max(kept) == max(counts)
    assert kept_through(kept, start) == kept


def test_fleets_that_cannot_change_are_refused() -> None:
    with pytest.raises(BadInput, match="own policies"):
        config(policy="dynamo", schedule=(1, 2))
    with pytest.raises(BadInput, match="role both"):
        replace(config(workers=0, prefill_workers=1, decode_workers=1), schedule=(1, 2))
