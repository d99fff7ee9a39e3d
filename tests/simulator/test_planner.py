"""The planner's own policy over simulated workers: it follows the load, keeps to its bounds, and loses no request."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from emberline.balancer.cost_model import Settings
from emberline.protocol.errors import BadInput
from emberline.simulator.coefficients import LatencyTargetBudget, load
from emberline.simulator.elastic_fleet import NodeSpec
from emberline.simulator.experiment import SimulationConfig, SimulationResult
from emberline.simulator.planner import PlannerSpec
from emberline.simulator.simulation import simulate
from emberline.simulator.trace import LoadProfile, TraceSession, TraceTurn, TrafficTrace
from emberline.supervisor.cluster.scaling_plan import ScalingBounds

FITTED = load("h200-llama-8b")
SLOW = {name: 20 * getattr(FITTED, name) for name in ("step_s", "row_s", "context_s", "token_s", "pair_s")}
MODEL = with_fields(FITTED, context_len=20_000, kv_tokens=60_000, **SLOW)
TARGETS = (10.0, 0.5)  # beyond a prompt's own time, per token


def prompts(seconds: int, every_s: float = 2.0, n_output: int = 10) -> TrafficTrace:
    """Of 4,096 tokens each, which take two seconds to compute."""
    n = int(seconds / every_s)
    sessions = [TraceSession((TraceTurn((number,), (64,), 4096, n_output),), every_s * number) for number in range(n)]
    return TrafficTrace("prompts", 64, sessions, n, shared=True)


def run(trace: TrafficTrace, profile: LoadProfile, seconds: float, spec: PlannerSpec, **roles: int) -> SimulationResult:
    config = SimulationConfig(
        model=MODEL,
        load=1.0,
        warmup_s=0.0,
        measured_s=seconds,
        profile=profile,
        planner=spec,
        prefill_policy=LatencyTargetBudget(target_s=0.3),
        settings=Settings(local_tokens=0),
        **(roles or {"workers": 2}),  # type: ignore[arg-type]
    )
    result = simulate(trace, config)
    assert result.requests
    assert all(request.end_s > 0 for request in result.requests)
    return result


def planner(start_s: float = 30.0, **bounds: object) -> PlannerSpec:
    given = {"max_replicas": 8, "tolerated_s": TARGETS[0], "shrink_after_s": 60.0, **bounds}
    checked = ScalingBounds(**given)  # type: ignore[arg-type]
    return PlannerSpec(bounds=checked, nodes=NodeSpec(start_s=start_s), itl_s=TARGETS[1], history_s=200.0)


def test_the_fleet_follows_a_load_that_rises_and_falls() -> None:
    trace, profile = prompts(900, 0.75), LoadProfile.swing(4, 900)
    result = run(trace, profile, 900.0, planner())
    sizes = [size.running for size in result.sizes]
    assert max(sizes) >= 2 * sizes[0]
    assert sizes[-1] < max(sizes)
    assert {decision.action for plan in result.plans for decision in plan.decisions} >= {"start", "drain"}
    assert sum(result.missed(*TARGETS)) < 0.05 * len(result.requests)
    again = run(trace, profile, 900.0, planner())
    assert again.figures() == result.figures()
    assert again.plans == result.plans


def test_roles_follow_the_mix_without_new_nodes() -> None:
    """One prompt a second with hardly any output is more than three prefill workers can compute."""
    spec = planner(max_replicas=12, disaggregated=True, shrink_after_s=1000.0)
    roles = {"workers": 0, "prefill_workers": 3, "decode_workers": 3}
    result = run(prompts(300, 1.0, n_output=4), LoadProfile(((0.0, 1.0),)), 300.0, spec, **roles)
    assert (result.sizes[0].prefill, result.sizes[0].decode) == (3, 3)
    assert (result.sizes[-1].prefill, result.sizes[-1].decode) == (5, 1)
    assert result.plans[0].decisions[0].action == "flip"


def test_an_idle_model_has_no_node_and_its_next_request_is_held() -> None:
    profile = LoadProfile(((0.0, 1.0), (200.0, 1.0), (201.0, 0.0), (600.0, 0.0), (601.0, 1.0)))
    result = run(prompts(700, 4.0), profile, 700.0, planner(min_replicas=0, idle_s=100.0))
    assert any(not size.running + size.starting + size.draining for size in result.sizes)
    woken = next(request for request in result.requests if request.arrival_s > 600)
    assert 30 <= woken.first_token_s - woken.arrival_s < 45
    assert result.rejected == 0


def test_a_node_that_flaps_changes_the_fleet_a_few_times_at_most() -> None:
    faults = tuple((200.0 + 60 * n, "w000", 20.0) for n in range(5))
    spec = replace(planner(), faults=faults)
    result = run(prompts(600, 3.0), LoadProfile(((0.0, 1.0),)), 600.0, spec)
    assert sum(len(plan.decisions) for plan in result.plans) <= 4


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(BadInput, match="factor of 1 or more"):
        LoadProfile.swing(0.5, 100)
    with pytest.raises(BadInput, match="order of time"):
        LoadProfile(((5.0, 1.0), (0.0, 1.0)))
    with pytest.raises(BadInput, match="disagree on roles"):
        run(prompts(10), LoadProfile(((0.0, 1.0),)), 10.0, planner(disaggregated=True))
