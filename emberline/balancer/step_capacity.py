"""Tokens per second of a worker, from the cost of steps that it has measured.

The cluster's planner and `emberline tune` match prefill and decode workers by these rates.
"""

from emberline.protocol.frames import StepCost


def prefill_rate(cost: StepCost, budget: int) -> float:
    """Prompt tokens per second of a worker that computes prompts alone, in chunks of `budget` tokens."""
    return budget / max(1e-9, cost.seconds(0, 0, budget, budget * budget / 2))


def decode_rate(cost: StepCost, itl_s: float, context: float, max_running: int) -> float:
    """Output tokens per second with as many sequences as an inter-token latency of `itl_s` allows, one at least.

    context: tokens of each sequence.
    """
    row_s = cost.row_s + cost.context_s * context
    room = (itl_s - cost.step_s) / row_s if row_s > 0 else max_running
    n_rows = max(1, min(max_running, int(room)))
    return n_rows / max(1e-9, cost.seconds(n_rows, n_rows * context))


def mean_cost(costs: list[StepCost]) -> StepCost | None:
    """Mean of what several workers have measured, weighted by their steps. Returns None if none has measured any."""
    n_steps = sum(cost.n_steps for cost in costs)
    if not n_steps:
        return None

    def mean(name: str) -> float:
        return sum(float(getattr(cost, name)) * cost.n_steps for cost in costs) / n_steps

    step_s, row_s, context_s, token_s, pair_s = map(mean, ("step_s", "row_s", "context_s", "token_s", "pair_s"))
    return StepCost(step_s, row_s, context_s, token_s, pair_s, n_steps, mean("error"))
