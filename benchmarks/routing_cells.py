"""Routing policies in cells of traces × fleets × utilization: `python -m benchmarks.routing_cells --traces DIR`.

In each cell the load is the one that keeps our default policy's workers computing for that share of the time. The knobs
of the other policies are chosen per cell, by p90 TTFT on seeds that are not measured. Every policy then runs the same
seeds; ours against the best other is judged by the interval of the paired differences. DIR holds the traces that
`balancer_sim` names; without it, synthetic traffic. `--part` leaves every other session out: choose settings on one
half, check them on the other.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.balancer_sim import ENGINE, FILES, SYNTHETIC
from benchmarks.report import markdown
from emberline.simulator.baselines import DynamoKnobs, SGLangKnobs
from emberline.simulator.coefficients import load
from emberline.simulator.experiment import SimulationConfig, interval
from emberline.simulator.simulation import load_at_utilization, simulate
from emberline.simulator.trace import TrafficTrace
from emberline.simulator.trace_sources import open_trace

OURS = "sticky"
KNOBS: dict[str, tuple[SGLangKnobs | DynamoKnobs | None, ...]] = {
    "sglang": (
        SGLangKnobs(),
        SGLangKnobs(balance_absolute=16, balance_relative=1.5),
        SGLangKnobs(balance_absolute=4, balance_relative=1.2),
        SGLangKnobs(cache_threshold=0.5, balance_absolute=16, balance_relative=1.5),
    ),
    "dynamo": (DynamoKnobs(), DynamoKnobs(overlap_weight=4.0), DynamoKnobs(overlap_weight=16.0)),
    "plain_least_loaded": (None,),
    "plain_round_robin": (None,),
}
TUNING_SEED = 1000  # the first of those that knobs are chosen on
TIMES_S = {8: (300.0, 900.0), 64: (200.0, 200.0)}  # warm-up and measured, by workers


def half_of(trace: TrafficTrace, part: str) -> TrafficTrace:
    if part != "all":
        place = 0 if part == "even" else 1
        keep = [(s.group or n) % 2 == place for n, s in enumerate(trace.sessions)]
        trace.sessions = [session for session, kept in zip(trace.sessions, keep) if kept]
    return trace


def p90(trace: TrafficTrace, config: SimulationConfig) -> float:
    return float(simulate(trace, config).figures()["ttft_p90_s"])


def cell(trace: TrafficTrace, config: SimulationConfig, busy: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Every policy at the load at which ours is so busy."""
    config = replace(config, load=load_at_utilization(trace, replace(config, seed=TUNING_SEED), busy))
    runs: dict[str, list[dict[str, Any]]] = {OURS: _runs(trace, config, seeds)}
    chosen: dict[str, str] = {}
    for policy, variants in KNOBS.items():
        tries = [replace(config, policy=policy, knobs=knobs, seed=TUNING_SEED) for knobs in variants]
        best = tries[0] if len(tries) == 1 else min(tries, key=lambda one: p90(trace, one))
        chosen[policy] = str(best.knobs or "")
        runs[policy] = _runs(trace, best, seeds)
    return {"load": config.load, "runs": runs, "knobs": chosen, **{q: _verdict(runs, q) for q in ("p50", "p90")}}


def _runs(trace: TrafficTrace, config: SimulationConfig, seeds: Sequence[int]) -> list[dict[str, Any]]:
    return [simulate(trace, replace(config, seed=seed)).figures() for seed in seeds]


def _verdict(runs: dict[str, list[dict[str, Any]]], q: str) -> dict[str, Any]:
    """Ours minus the policy of the lowest mean among the others, seed by seed."""
    values = {policy: [row[f"ttft_{q}_s"] for row in rows] for policy, rows in runs.items()}
    best = min((policy for policy in values if policy != OURS), key=lambda policy: sum(values[policy]))
    mean, half = interval([ours - other for ours, other in zip(values[OURS], values[best])])
    verdict = "wins" if mean + half < 0 else "loses" if mean - half > 0 else "ties"
    return {"best": best, "difference": mean, "half": half, "verdict": verdict}


def row_of(name: str, found: dict[str, Any]) -> list[str]:
    row = [name]
    for q in ("p50", "p90"):
        for policy in (OURS, found[q]["best"]):
            mean, half = interval([run[f"ttft_{q}_s"] for run in found["runs"][policy]])
            row.append(f"{mean:.3g} ± {half:.2g}" + ("" if policy == OURS else f" ({policy})"))
        row.append(found[q]["verdict"])
    busy, _ = interval([run["busy"] for run in found["runs"][OURS]])
    return [*row, f"{busy:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_cells", description=__doc__)
    add = parser.add_argument
    add("--traces", type=Path, help="folder with the traces (default: synthetic traffic)")
    add("--names", default="mooncake,claude_code", help="which traces, with commas")
    add("--part", choices=("all", "even", "odd"), default="all", help="which half of the sessions")
    add("--workers", default="8,64", help="fleets, with commas (8,64)")
    add("--busy", default="0.5,0.7,0.85", help="utilizations, with commas (0.5,0.7,0.85)")
    add("--seeds", type=int, default=5, help="measured seeds per cell (5)")
    add("--json", type=Path, default=Path("bench-routing-cells.json"))
    options = parser.parse_args(argv)
    model, found, rows = load(ENGINE), {}, []
    for name in options.names.split(","):
        where = SYNTHETIC[name] if options.traces is None else str(options.traces / FILES[name])
        trace = half_of(open_trace(where, 1, model.context_len), options.part)
        for workers in map(int, options.workers.split(",")):
            warmup_s, measured_s = TIMES_S.get(workers, TIMES_S[8])
            config = SimulationConfig(
                model=model, load=1.0, workers=workers, warmup_s=warmup_s, measured_s=measured_s, policy=OURS
            )
            for busy in map(float, options.busy.split(",")):
                key = f"{name}, {workers} workers, {busy:.0%}"
                found[key] = cell(trace, config, busy, range(1, options.seeds + 1))
                rows.append(row_of(key, found[key]))
                print(" | ".join(rows[-1]), flush=True)
                options.json.write_text(json.dumps({"engine": ENGINE, "part": options.part, "cells": found}, indent=1))
    head = ["TTFT, s", "p50 ours", "best other", "", "p90 ours", "best other", "", "busy"]
    print("\n" + markdown(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
