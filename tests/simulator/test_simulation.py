"""Whole simulations: the same every time, nothing lost, and what is known beforehand comes out."""

from collections import Counter
from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from emberline.protocol.errors import BadInput
from emberline.simulator.coefficients import Coefficients, Fixed, load, names
from emberline.simulator.outcome import Outcome
from emberline.simulator.plan import POLICIES, Plan
from emberline.simulator.search import load_at_busy
from emberline.simulator.simulation import simulate
from emberline.simulator.trace import Session, Trace, Turn

MODEL = with_fields(load("h200-llama-8b"), context_len=20_000, kv_tokens=60_000)


def agents(n_sessions: int = 12, n_turns: int = 5) -> Trace:
    """Sessions that begin with the same 40 blocks, then go on by ten blocks a turn."""
    sessions = []
    for number in range(n_sessions):
        turns = []
        for turn in range(n_turns):
            path, lengths = tuple(range(turn + 2)), (40, 20 + number, *[10] * turn)
            turns.append(Turn(path, lengths, 64 * sum(lengths), 50 + number, wait_s=2.0 if turn else 0.0))
        ages = tuple(5.0 * turn for turn in range(n_turns))
        sessions.append(Session(tuple(turns), 0.0, common=(0, 1), ages=ages))
    return Trace("few", 64, sessions, 10, shared=False)


def plan(**changes: object) -> Plan:
    given = {"model": MODEL, "load": 0.5, "workers": 3, "warm_s": 20.0, "measured_s": 60.0, "tenants": 3}
    return Plan(**{**given, **changes})  # type: ignore[arg-type]


def check(outcome: Outcome) -> None:
    """Every request that was asked has ended once, in order, with all its tokens."""
    assert outcome.jobs
    assert max(Counter(job.id for job in outcome.jobs).values()) == 1
    for job in outcome.jobs:
        assert 0 <= job.asked_s < job.first_s <= job.ended_s
        assert 0 <= job.cached_tokens < job.n_prompt
    figures = outcome.figures()
    assert figures["unfinished"] == 0
    assert 0 < figures["busy"] <= 1
    assert 0 <= figures["hit_ratio"] <= 1
    assert 0 < figures["fairness"] <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everybody_and_the_same_way_again(policy: str) -> None:
    trace = agents()
    outcome = simulate(trace, plan(policy=policy))
    check(outcome)
    again = simulate(trace, plan(policy=policy))
    assert again.figures() == outcome.figures()
    assert [job.decode for job in again.jobs] == [job.decode for job in outcome.jobs]


def test_another_seed_gives_other_arrivals() -> None:
    assert simulate(agents(), plan()).figures() != simulate(agents(), plan(seed=2)).figures()


def test_prefill_and_decode_apart() -> None:
    outcome = simulate(agents(), plan(workers=0, prefill=1, decode=2, settings=_never_local()))
    check(outcome)
    apart = [job for job in outcome.jobs if job.prefill]
    assert apart
    assert {job.prefill for job in apart} == {"w000"}
    assert {job.decode for job in outcome.jobs} <= {"w001", "w002"}
    assert outcome.transferred_bytes > 0


def _never_local() -> object:
    from emberline.balancer.cost_model import Settings

    return Settings(local_tokens=0)


def test_two_cores_serve_everybody() -> None:
    check(simulate(agents(), plan(cores=2, delay_s=0.1)))


def test_affinity_finds_what_round_robin_does_not() -> None:
    ours, robin = simulate(agents(), plan()), simulate(agents(), plan(policy="plain_round_robin"))
    assert ours.hit_ratio > robin.hit_ratio
    assert ours.ideal_hit_ratio >= ours.hit_ratio


def test_the_load_for_a_share_of_the_time_is_found() -> None:
    trace, wanted = agents(), plan(policy="plain_least_loaded", measured_s=200.0)
    found = load_at_busy(trace, wanted, 0.5)
    assert simulate(trace, replace(wanted, load=found)).busy == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "best"}, "no policy 'best'"),
        ({"workers": 0}, "1 to 256"),
        ({"workers": 300}, "1 to 256"),
        ({"prefill": 2}, "need each other"),
        ({"load": 0.0}, "above 0"),
        ({"policy": "dynamo", "cores": 2}, "our own"),
        ({"policy": "dynamo", "prefill": 1, "decode": 1}, "do both"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        plan(**changes)


def test_a_context_that_does_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(BadInput, match="KV"):
        simulate(agents(), plan(model=with_fields(MODEL, kv_tokens=10_000)))


def test_fitted_coefficients_come_with_the_package() -> None:
    assert "h200-llama-8b" in names()
    for name in names():
        model = load(name)
        assert model.name == name
        assert model.prefill_s(4000) > 4 * model.prefill_s(1000) * 0.9
        assert model.decode_s(8, 8000) > model.decode_s(1, 1000) > 0
    with pytest.raises(BadInput, match="h200"):
        load("none")


def test_a_chunk_that_fits_a_time_takes_about_that_time() -> None:
    model: Coefficients = load("h200-llama-8b")
    for start in (0, 10_000, 100_000):
        n = model.fitting(0.05, start, 100_000)
        assert n % model.tile == 0
        assert model.chunk_s(n, start) <= 0.05 or n == model.tile
        assert model.chunk_s(n + model.tile, start) > 0.05


def test_fixed_chunks_slow_streams_more_than_timed_ones() -> None:
    trace = agents()
    fixed, timed = (simulate(trace, plan(load=1.0, **more)) for more in ({"chunking": Fixed(8192)}, {}))
    assert timed.figures()["interval_p99_ms"] < fixed.figures()["interval_p99_ms"]
