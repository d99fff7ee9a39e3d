"""Loads at which something holds: found by halving, since more load never helps."""

from collections.abc import Callable
from dataclasses import replace

from emberline.simulator.outcome import SLO_TOKEN_S, SLO_TTFT_S, Outcome, percentile
from emberline.simulator.plan import Plan
from emberline.simulator.simulation import simulate
from emberline.simulator.trace import Trace

NEAR = 0.01  # of the share searched for
MOST = 12  # runs


def load_at_busy(trace: Trace, plan: Plan, busy: float) -> float:
    """The load at which this plan's workers compute for that share of the time."""
    load, low, high = _guess(trace, plan), 0.0, float("inf")
    for _ in range(MOST):
        found = simulate(trace, replace(plan, load=load)).busy
        if abs(found - busy) <= NEAR:
            break
        low, high = (load, high) if found < busy else (low, load)
        if high == float("inf"):
            load *= min(4.0, max(1.1, busy / max(found, 0.01)))
        elif found < 0.97:  # where not overloaded, busyness is nearly linear in load
            load = min(max(load * busy / found, low + 0.05 * (high - low)), high - 0.05 * (high - low))
        else:
            load = (low + high) / 2
    return load


def load_within_slo(trace: Trace, plan: Plan, start: float) -> tuple[float, Outcome | None]:
    """The highest load, to 5 %, at which 90 % have their first token and their pace as promised."""
    return _highest(lambda load: simulate(trace, replace(plan, load=load)), start)


def _highest(run: Callable[[float], Outcome], load: float) -> tuple[float, Outcome | None]:
    low, high, best = 0.0, float("inf"), None
    for _ in range(MOST):
        outcome = run(load)
        if keeps_slo(outcome):
            low, best = load, outcome
        else:
            high = load
        if high <= low * 1.05:
            break
        load = low * 1.3 if high == float("inf") else (low + high) / 2 if low else high / 1.5
    return low, best


def keeps_slo(outcome: Outcome) -> bool:
    ttft, pace = sorted(outcome.first_token_s()), sorted(outcome.time_per_token_s())
    return percentile(ttft, 90) <= SLO_TTFT_S and percentile(pace, 90) <= SLO_TOKEN_S


def _guess(trace: Trace, plan: Plan) -> float:
    """Where to begin: the load at which computing with half of the hits that are there to be had keeps all busy."""
    turns = [turn for session in trace.sessions for turn in session.turns]
    model = plan.model
    sample = turns[:: max(1, len(turns) // 500)]
    work_s = sum(
        model.prefill_s(t.n_prompt // 4, t.n_prompt - t.n_prompt // 4) / 2 + t.n_output * model.step_s for t in sample
    )
    per_turn_s = work_s / len(sample)
    rate = 0.5 * len(plan.roles) / per_turn_s
    if trace.shared:
        last_s = max(session.start_s for session in trace.sessions)
        return rate * max(last_s, 1.0) / len(turns)
    return rate * len(trace.sessions) / len(turns)
