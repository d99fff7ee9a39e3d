"""Recorded traffic replayed, and the settings that `tune` finds for it."""

from collections.abc import Iterator
from random import Random

import msgspec
import pytest

from emberline.balancer.step_capacity import decode_rate, mean_cost, prefill_rate
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import StepCost
from emberline.simulator import coefficients
from emberline.simulator.coefficients import Coefficients
from emberline.simulator.recorded_traffic import RecordedRow, build_recorded_trace, busiest
from emberline.simulator.tuning import Setting, TunedFleet, Tuner, measured_model

COST = StepCost(0.032, 1e-4, 3e-7, 1.6e-4, 9e-9, 1000, 0.02)
KNOWN = msgspec.structs.replace(coefficients.load("h200-llama-8b"), context_len=32_768, kv_tokens=200_000)
SPAN_S = 240.0


def agents(seed: int, n_sessions: int, span_s: float = SPAN_S) -> list[RecordedRow]:
    """Sessions of a few turns with long prompts: prefill is most of the work."""
    rng = Random(seed)
    rows = []
    for session in range(n_sessions):
        at_s, context = rng.uniform(0, span_s), 0
        for _ in range(rng.randrange(1, 6)):
            n_prompt, n_output = context + rng.randrange(200, 6000), rng.randrange(20, 400)
            end_s = at_s + 0.3 + n_output * 0.03
            rows.append(row(f"s{session}", at_s, n_prompt, n_output, context, end_s))
            at_s, context = end_s + rng.expovariate(0.1), n_prompt + n_output
    return [each for each in rows if each.arrival_s < span_s]


def row(session: str, at_s: float, n_prompt: int, n_output: int, cached: int, end_s: float = 0.0) -> RecordedRow:
    return RecordedRow(
        account="acme",
        session=session,
        arrival_s=at_s,
        first_token_s=at_s + 0.3,
        end_s=end_s or at_s + 1.0,
        input_tokens=n_prompt,
        cached_tokens=cached,
        output_tokens=n_output,
    )


def fleet(n_workers: int = 4, model: Coefficients | None = None, **more: object) -> TunedFleet:
    model = model or measured_model(COST, KNOWN)
    return TunedFleet(models={"": model}, workers={"": n_workers}, itl_s=0.06, **more)  # type: ignore[arg-type]


def halves(rows: list[RecordedRow]) -> tuple[list[RecordedRow], list[RecordedRow]]:
    return [each for each in rows if each.arrival_s < SPAN_S / 2], [
        each for each in rows if each.arrival_s >= SPAN_S / 2
    ]


# --- recorded traffic ------------------------------------------------------------------------------------------------


def test_turns_of_a_session_share_prompt_and_reply() -> None:
    rows = [row("a", 0.0, 640, 128, 0, 5.0), row("a", 9.0, 1280, 64, 768, 12.0), row("b", 1.0, 640, 64, 0)]
    trace = build_recorded_trace(rows, 32_768)
    first, second = next(each for each in trace.sessions if len(each.turns) == 2).turns
    shared = len(first.path)
    assert second.path[:shared] == first.path
    assert second.path[shared] == first.reply[0]
    assert first.reply[1] == 2
    assert sum(second.lengths) == 20
    assert second.wait_s == 4.0
    (other,) = (each for each in trace.sessions if len(each.turns) == 1)
    assert not set(other.turns[0].path) & {*first.path, *second.path}
    assert [each.start_s for each in trace.sessions] == [0.0, 1.0]


def test_a_shorter_prompt_shares_what_was_cached_of_it() -> None:
    trace = build_recorded_trace([row("a", 0.0, 6400, 64, 0, 1.0), row("a", 5.0, 3200, 64, 640, 6.0)], 32_768)
    first, second = trace.sessions[0].turns
    common = [length for segment, length in zip(second.path, second.lengths) if segment in first.path]
    assert sum(common) == 10


def test_rows_without_a_session_join_the_one_that_explains_their_cached_tokens() -> None:
    rows = [row("", 0.0, 640, 64, 0, 1.0), row("", 5.0, 1000, 64, 700, 6.0), row("", 6.5, 900, 64, 0, 7.0)]
    trace = build_recorded_trace(rows, 32_768)
    assert sorted(len(each.turns) for each in trace.sessions) == [1, 2]


def test_first_turns_share_what_was_cached_of_them() -> None:
    rows = [row("a", 0.0, 1280, 64, 0), row("b", 1.0, 1280, 64, 640), row("c", 2.0, 1920, 64, 640)]
    trace = build_recorded_trace(rows, 32_768)
    by_length = [{*each.turns[0].path} for each in trace.sessions]
    assert by_length[1] & by_length[2]
    assert not by_length[0] & by_length[1]  # nothing of it was cached, so nothing is known to be shared


def test_requests_that_exceed_the_context_are_left_out() -> None:
    trace = build_recorded_trace([row("a", 0.0, 40_000, 64, 0), row("b", 1.0, 100, 10, 0)], 32_768)
    assert (trace.left_out, trace.n_turns) == (1, 1)
    assert not build_recorded_trace([], 32_768).sessions


def test_the_busiest_window_is_replayed() -> None:
    rows = [row(f"s{n}", at_s, 100, 10, 0) for n, at_s in enumerate([0.0, 50.0, 100.0, 101.0, 102.0, 200.0])]
    assert [each.arrival_s for each in busiest(rows, 10.0)] == [100.0, 101.0, 102.0]
    assert busiest([], 10.0) == []


# --- rates and costs -------------------------------------------------------------------------------------------------


def test_rates_follow_from_the_cost_of_steps() -> None:
    assert prefill_rate(COST, 8192) == pytest.approx(8192 / (0.032 + 1.6e-4 * 8192 + 9e-9 * 8192**2 / 2))
    few, many = (decode_rate(COST, itl_s, 2000, 256) for itl_s in (0.04, 0.08))
    assert 0 < few < many
    assert decode_rate(COST, 0.001, 2000, 256) == pytest.approx(1 / COST.seconds(1, 2000))


def test_the_mean_of_several_workers_weighs_their_steps() -> None:
    fast, slow = StepCost(0.01, 0, 0, 0, 0, 300), StepCost(0.02, 0, 0, 0, 0, 100)
    mean = mean_cost([fast, slow])
    assert mean is not None
    assert mean.step_s == pytest.approx(0.0125)
    assert mean_cost([]) is None


# --- tuning ----------------------------------------------------------------------------------------------------------


def test_a_mistuned_fleet_is_given_a_setting_that_serves_the_next_hours_as_well_as_the_best() -> None:
    """Proposed on the first half of a trace, judged on the second against a search over roles and budgets there."""
    first, second = halves(agents(1, 44))
    now = Setting(prefill_workers=1, token_budget=256)  # most of the work is prefill, and chunks are too small for it
    proposal = Tuner(build_recorded_trace(first, 32_768), fleet(3)).propose(now)
    assert proposal.is_worth_it
    judge = Tuner(build_recorded_trace(second, 32_768), fleet(3))
    found, before = judge.outcome(proposal.best.setting), judge.outcome(now)
    best = min(judge.outcome(each).strain for each in candidates())
    assert found.strain <= 1.10 * best
    assert found.strain < 0.7 * before.strain


def candidates() -> Iterator[Setting]:
    for n_prefill in range(3):
        for budget in (512, 8192):
            yield Setting(prefill_workers=n_prefill, token_budget=budget)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("now", [Setting(prefill_workers=1, token_budget=256), Setting(prefill_workers=3)])
def test_other_traffic_and_other_mistakes(seed: int, now: Setting) -> None:
    first, second = halves(agents(seed, 160))
    proposal = Tuner(build_recorded_trace(first, 32_768), fleet(6)).propose(now)
    judge = Tuner(build_recorded_trace(second, 32_768), fleet(6))
    settings = [
        Setting(prefill_workers=n, token_budget=b) for n in range(6) for b in (256, 512, 1024, 2048, 4096, 8192)
    ]
    best = min(judge.outcome(each).strain for each in settings)
    assert judge.outcome(proposal.best.setting).strain <= 1.10 * best


def test_a_fleet_that_is_tuned_is_left_alone() -> None:
    trace = build_recorded_trace(agents(3, 20), 32_768)
    tuner = Tuner(trace, fleet(2))
    best = tuner.propose(Setting(token_budget=8192)).best.setting
    again = tuner.propose(best)
    assert again.best.setting == best
    assert (again.gain, again.is_worth_it) == (0.0, False)


def test_drafts_are_proposed_where_they_are_accepted() -> None:
    trace = build_recorded_trace(agents(4, 12), 32_768)
    useful = Tuner(trace, fleet(1, accepted=(0.9, 0.8))).propose(Setting(token_budget=8192)).best.setting
    useless = Tuner(trace, fleet(1, accepted=(0.01, 0.0))).propose(Setting(token_budget=8192, draft_tokens=2))
    assert useful.draft_tokens == 2
    assert useless.best.setting.draft_tokens == 0


@pytest.mark.slow
def test_a_tier_is_proposed_where_prompts_come_back_after_eviction() -> None:
    small = msgspec.structs.replace(measured_model(COST, KNOWN), kv_tokens=34_000)
    trace = build_recorded_trace(agents(5, 30), 32_768)
    found = Tuner(trace, fleet(1, small, max_host_tokens=1_000_000)).propose(Setting(token_budget=8192))
    assert found.best.setting.host_tokens > 0
    assert found.best.hit_ratio > found.now.hit_ratio


def test_a_tier_serves_prompts_that_come_back_after_eviction() -> None:
    small = msgspec.structs.replace(measured_model(COST, KNOWN), kv_tokens=34_000)
    tuner = Tuner(build_recorded_trace(agents(5, 30), 32_768), fleet(1, small))
    without, with_tier = (tuner.outcome(Setting(token_budget=8192, host_tokens=n)) for n in (0, 1_000_000))
    assert with_tier.hit_ratio > without.hit_ratio + 0.05
    assert with_tier.ttft_p90_s < without.ttft_p90_s


def test_without_traffic_there_is_nothing_to_tune() -> None:
    with pytest.raises(BadInput, match="no recorded request"):
        Tuner(build_recorded_trace([], 32_768), fleet())
