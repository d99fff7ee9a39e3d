"""Where separate prefill and decode workers pay: `python -m benchmarks.disaggregated_cells [--cells 8000:200:0.7,…]`.

The simulator with step times of one H200, four workers, requests of one turn that share no prefix, in cells of prompt
tokens : output tokens : load. Lengths are lognormal around these, arrivals random. The load is a share of what four
workers could do with 64 sequences each. Compared are workers that do both, with prompts computed whole or in chunks
that keep to the latency target (the engine's default), and every split. 500 requests a cell, or more: differences of
10 % may be chance.
"""

import argparse
from collections.abc import Sequence
from math import ceil, exp
from random import Random
from typing import Any

from benchmarks.report import markdown
from emberline.simulator import coefficients
from emberline.simulator.coefficients import Coefficients, FixedTokenBudget
from emberline.simulator.experiment import SimulationConfig
from emberline.simulator.simulation import simulate
from emberline.simulator.trace import TraceSession, TraceTurn, TrafficTrace

CELLS = "500:200:0.7,2000:200:0.7,2000:1000:0.7,8000:200:0.7,8000:1000:0.7,30000:300:0.7,30000:1500:0.7"
WORKERS, ROWS, REQUESTS = 4, 64, 500
LEAST_S = 20.0  # of a cell's arrivals
SPREAD = 0.6  # of the logarithm of a length
MEAN = exp(SPREAD**2 / 2)  # of lengths, by their median
BLOCK_TOKENS = 64
WARM_UP = 0.25  # of the time, not measured


def requests_per_s(model: Coefficients, n_prompt: int, n_output: int, load: float) -> float:
    """The arrivals of which four workers would be busy for `load` of the time."""
    step_s = model.decode_s(ROWS, ROWS * n_prompt)
    return load * WORKERS / (model.prefill_s(int(MEAN * n_prompt)) + MEAN * n_output * step_s / ROWS)


def build_trace(n_prompt: int, n_output: int, rate: float, span_s: float, seed: int = 1) -> TrafficTrace:
    """Requests that share nothing."""
    rng, at_s, sessions = Random(seed), 0.0, list[TraceSession]()
    while (at_s := at_s + rng.expovariate(rate)) <= span_s:
        prompt, output = (max(8, int(n * exp(rng.gauss(0, SPREAD)))) for n in (n_prompt, n_output))
        turn = TraceTurn((len(sessions),), (ceil(prompt / BLOCK_TOKENS),), prompt, output)
        sessions.append(TraceSession((turn,), at_s))
    return TrafficTrace("cell", BLOCK_TOKENS, sessions, len(sessions) + 1, shared=True)


def measure(model: Coefficients, n_prompt: int, n_output: int, load: float) -> list[str]:
    """A row of the table: p90 TTFT, p90 and p99 inter-token latency of each fleet."""
    rate = requests_per_s(model, n_prompt, n_output, load)
    span_s = max(LEAST_S, REQUESTS / rate)
    trace = build_trace(n_prompt, n_output, rate, span_s)

    def run(**fleet: Any) -> dict[str, Any]:
        times = {"warmup_s": WARM_UP * span_s, "measured_s": (1 - WARM_UP) * span_s}
        return simulate(trace, SimulationConfig(model=model, load=1.0, **times, **fleet)).figures()

    whole = run(workers=WORKERS, prefill_policy=FixedTokenBudget(model.token_budget))
    chunks = run(workers=WORKERS)
    splits = {n: run(workers=0, prefill_workers=n, decode_workers=WORKERS - n) for n in range(1, WORKERS)}
    best = min(splits, key=lambda n: float(splits[n]["ttft_p90_s"]))
    return [
        f"{n_prompt:,} / {n_output:,}, {load:.0%}",
        *(_latencies(each) for each in (whole, chunks)),
        f"{best} + {WORKERS - best}: {_latencies(splits[best])}",
    ]


def _latencies(found: dict[str, Any]) -> str:
    return f"{found['ttft_p90_s']:.2f} s; {found['interval_p90_ms']:.0f}, {found['interval_p99_ms']:.0f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregated_cells",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cells", default=CELLS, help=f"prompt:output:load,… (default {CELLS})")
    parser.add_argument("--engine", default="h200-llama-8b", help="coefficients (default h200-llama-8b)")
    args = parser.parse_args(argv)
    model, rows = coefficients.load(args.engine), list[list[str]]()
    for cell in args.cells.split(","):
        n_prompt, n_output, load = cell.split(":")
        rows.append(measure(model, int(n_prompt), int(n_output), float(load)))
        print(" | ".join(rows[-1]), flush=True)
    print(markdown(("prompt / output, load", "whole prompts", "chunks (default)", "the best split"), rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
