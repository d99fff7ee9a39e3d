"""Routing policies compared in simulation: `python -m benchmarks.balancer_sim --traces DIR`.

DIR holds mooncake_conversation.jsonl.gz and claude_code.jsonl.gz (simulator/trace_sources.py says where they are
published); without it, synthetic traffic of the same shape. Coefficients are those of the package. One process.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as with_fields

from benchmarks.report import markdown
from emberline.simulator.coefficients import FixedTokenBudget, load
from emberline.simulator.experiment import SLO_TPOT_S, SLO_TTFT_S, SimulationConfig, SimulationResult, percentile
from emberline.simulator.simulation import MAX_SEARCH_RUNS, load_at_utilization, simulate
from emberline.simulator.trace import TrafficTrace
from emberline.simulator.trace_sources import open_trace

ENGINE = "h200-llama-8b"
BUSY = 0.7
OTHERS = ("dynamo", "sglang", "plain_least_loaded", "plain_round_robin")
FILES = {"mooncake": "mooncake_conversation.jsonl.gz", "claude_code": "claude_code.jsonl.gz"}
SYNTHETIC = {"mooncake": "chats", "claude_code": "agents"}
AMPLE = {"mooncake": 16_000_000, "claude_code": 8_000_000}  # KV tokens per worker: almost nothing is evicted
SPLITS = {8: (2, 3), 64: (16, 24)}  # prefill workers to try

COLUMNS = (
    ("load", "{:.4g}"),
    ("requests", "{}"),
    ("unfinished", "{}"),
    ("ttft_p50_s", "{:.3f}"),
    ("ttft_p90_s", "{:.3f}"),
    ("ttft_p99_s", "{:.2f}"),
    ("ttft_least_p90_s", "{:.3f}"),
    ("token_p50_ms", "{:.1f}"),
    ("token_p90_ms", "{:.1f}"),
    ("token_p99_ms", "{:.1f}"),
    ("interval_p99_ms", "{:.0f}"),
    ("hit_ratio", "{:.3f}"),
    ("ideal_hit_ratio", "{:.3f}"),
    ("busy", "{:.2f}"),
    ("busiest_over_mean", "{:.2f}"),
    ("fairness", "{:.3f}"),
    ("within_slo", "{:.3f}"),
)


@dataclass(slots=True)
class Sweep:
    """Runs simulations, prints progress, and keeps every figure."""

    traces: Path | None
    seed: int
    warmup_s: float
    measured_s: float
    rows: list[dict[str, Any]]
    verdicts: list[dict[str, Any]]

    def trace(self, name: str) -> TrafficTrace:
        where = SYNTHETIC[name] if self.traces is None else str(self.traces / FILES[name])
        return open_trace(where, self.seed, load(ENGINE).context_len)

    def plan(self, name: str, workers: int, kv_tokens: int | None = None, **more: Any) -> SimulationConfig:
        model = load(ENGINE)
        model = with_fields(model, kv_tokens=kv_tokens or model.kv_tokens)
        times = {"warmup_s": self.warmup_s, "measured_s": self.measured_s}
        return SimulationConfig(**{"model": model, "load": 1.0, "workers": workers, "seed": self.seed, **times, **more})

    def keep(self, part: str, name: str, outcome: SimulationResult, began: float) -> dict[str, Any]:
        figures = {"part": part, "name": name, "kv_tokens": outcome.config.model.kv_tokens, **outcome.figures()}
        self.rows.append(figures)
        shown = ", ".join(f"{key} {form.format(figures[key])}" for key, form in COLUMNS)
        print(f"  {name}: {shown} ({time.perf_counter() - began:.0f} s)", flush=True)
        return figures

    def run(self, part: str, name: str, trace: TrafficTrace, plan: SimulationConfig) -> dict[str, Any]:
        began = time.perf_counter()
        return self.keep(part, name, simulate(trace, plan), began)

    def judge(self, part: str, what: str, value: float, bound: float, at_least: bool) -> None:
        met = value >= bound if at_least else value <= bound
        self.verdicts.append({"part": part, "what": what, "value": round(value, 3), "bound": bound, "met": met})
        print(
            f"  {'met    ' if met else 'NOT MET'} {what}: {value:.3f} (wanted {'≥' if at_least else '≤'} {bound})",
            flush=True,
        )


def routing(sweep: Sweep, name: str, workers: int, memory: str) -> None:
    """The default policy against others at the load where it keeps the fleet 70 % busy."""
    part = f"{name}, {workers} workers, {memory} memory"
    print(part, flush=True)
    trace = sweep.trace(name)
    plan = sweep.plan(name, workers, AMPLE[name] if memory == "ample" else None)
    plan = replace(plan, load=load_at_utilization(trace, plan, BUSY))
    ours = sweep.run(part, "sticky", trace, plan)
    others = {policy: sweep.run(part, policy, trace, replace(plan, policy=policy)) for policy in OTHERS}
    p90 = ours["ttft_p90_s"]
    sweep.judge(part, "p90 TTFT of round robin ÷ ours", others["plain_round_robin"]["ttft_p90_s"] / p90, 5.0, True)
    sweep.judge(part, "p90 TTFT of sglang ÷ ours", others["sglang"]["ttft_p90_s"] / p90, 1.0, True)
    sweep.judge(part, "p90 TTFT of dynamo ÷ ours", others["dynamo"]["ttft_p90_s"] / p90, 1.0, True)
    if memory == "ample":
        sweep.judge(part, "hit ratio ÷ ideal", ours["hit_ratio"] / ours["ideal_hit_ratio"], 0.95, True)
    sweep.judge(part, "busiest ÷ mean busy-seconds", ours["busiest_over_mean"], 1.25, False)


def disaggregated(sweep: Sweep, workers: int, kv_tokens: int | None) -> None:
    """Prefill/decode disaggregation against aggregated workers, on coding agents."""
    part = f"disaggregated, claude_code, {workers} workers, {kv_tokens or 'card'} tokens of KV"
    print(part, flush=True)
    trace = sweep.trace("claude_code")
    timed = sweep.plan("claude_code", workers, kv_tokens)
    at = load_at_utilization(trace, timed, BUSY)
    fixed = sweep.run(part, "aggregated, 2048", trace, replace(timed, load=at, prefill_policy=FixedTokenBudget(2048)))
    sweep.run(part, "aggregated, ITL target", trace, replace(timed, load=at))
    rows = [
        (
            plan,
            sweep.run(
                part, f"disaggregated {plan.prefill_workers}+{plan.decode_workers}", trace, replace(plan, load=at)
            ),
        )
        for plan in splits(timed, workers)
    ]
    no_worse = [row for _, row in rows if row["ttft_p90_s"] <= fixed["ttft_p90_s"]]
    tpot_ms = min((row["token_p90_ms"] for row in no_worse), default=float("inf"))
    sweep.judge(
        part, "p90 time per token, 2,048 ÷ disaggregated, TTFT no worse", fixed["token_p90_ms"] / tpot_ms, 3.0, True
    )
    aggregated = _served(load_within_slo(trace, timed, at)[1])
    served = {}
    for plan, _ in rows:
        served[f"{plan.prefill_workers}+{plan.decode_workers}"] = _served(load_within_slo(trace, plan, at)[1])
    best = max(served.values())
    print(f"  requests/s within SLO: aggregated, ITL target {aggregated}; disaggregated {served}", flush=True)
    ratio = best / aggregated if aggregated else 0.0
    sweep.judge(part, "requests within SLO, disaggregated ÷ aggregated", ratio, 1.3, True)


def load_within_slo(
    trace: TrafficTrace, config: SimulationConfig, start: float
) -> tuple[float, SimulationResult | None]:
    """The highest load, to 5 %, that meets the SLO, and its result. `start`: the first load to try."""
    load, low, high = start, 0.0, float("inf")
    best: SimulationResult | None = None
    for _ in range(MAX_SEARCH_RUNS):
        result = simulate(trace, replace(config, load=load))
        if _meets_slo(result):
            low, best = load, result
        else:
            high = load
        if high <= low * 1.05:
            break
        load = low * 1.3 if high == float("inf") else (low + high) / 2 if low else high / 1.5
    return low, best


def _meets_slo(result: SimulationResult) -> bool:
    """Whether the 90th percentiles of TTFT and time per output token do."""
    ttft, tpot = sorted(result.ttft_s()), sorted(result.time_per_token_s())
    return percentile(ttft, 90) <= SLO_TTFT_S and percentile(tpot, 90) <= SLO_TPOT_S


def _served(outcome: SimulationResult | None) -> float:
    return round(len(outcome.requests) / outcome.config.measured_s, 3) if outcome else 0.0


def splits(plan: SimulationConfig, workers: int) -> Iterator[SimulationConfig]:
    for prefill in SPLITS.get(workers, (max(1, workers // 4),)):
        yield replace(plan, workers=0, prefill_workers=prefill, decode_workers=workers - prefill)


def two_balancers(sweep: Sweep, workers: int) -> None:
    """Two balancers over one fleet, each learning of the other's requests only through late load reports."""
    part = f"two balancers, claude_code, {workers} workers"
    print(part, flush=True)
    trace = sweep.trace("claude_code")
    plan = sweep.plan("claude_code", workers)
    plan = replace(plan, load=load_at_utilization(trace, plan, BUSY))
    one = sweep.run(part, "one balancer", trace, plan)
    two = sweep.run(part, "two balancers, reports 0.1 s late", trace, replace(plan, balancers=2, report_delay_s=0.1))
    sweep.judge(part, "p90 TTFT, two balancers ÷ one", two["ttft_p90_s"] / one["ttft_p90_s"], 1.25, False)
    sweep.judge(part, "busiest ÷ mean busy-seconds, two balancers", two["busiest_over_mean"], 1.25, False)


def tables(rows: Sequence[dict[str, Any]]) -> str:
    texts = []
    for part in dict.fromkeys(row["part"] for row in rows):
        lines = [
            [row["name"], *(form.format(row[key]) for key, form in COLUMNS)] for row in rows if row["part"] == part
        ]
        texts.append(f"{part}\n\n" + markdown(["", *(key for key, _ in COLUMNS)], lines))
    return "\n\n".join(texts)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balancer_sim", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder with the traces (default: synthetic traffic)")
    parser.add_argument("--quick", action="store_true", help="8 workers, shorter: to try things out")
    parser.add_argument("--workers", default="8,64", help="fleets, with commas (8,64)")
    parser.add_argument(
        "--parts", default="mooncake,claude_code,disaggregated,two_balancers", help="which, with commas"
    )
    parser.add_argument("--memory", default="card,ample", help="card: the GPU's; ample: nothing is evicted")
    parser.add_argument("--warmup", type=float, default=600.0, help="seconds simulated before measuring (600)")
    parser.add_argument("--duration", type=float, default=1800.0, help="seconds measured (1800)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("bench-balancer-sim.json"))
    options = parser.parse_args(argv)
    if options.quick:
        options.workers, options.warmup, options.duration = "8", 300.0, 600.0
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    sweep = Sweep(options.traces, options.seed, options.warmup, options.duration, [], [])
    parts = options.parts.split(",")
    for workers in map(int, options.workers.split(",")):
        for name in ("mooncake", "claude_code"):
            for memory in options.memory.split(",") if name in parts else ():
                routing(sweep, name, workers, memory)
        if "disaggregated" in parts and workers == 8:
            for kv_tokens in (None, 4_000_000):
                disaggregated(sweep, workers, kv_tokens)
        if "two_balancers" in parts:
            two_balancers(sweep, workers)
    print("\n" + tables(sweep.rows) + "\n")
    for verdict in sweep.verdicts:
        print(f"- {verdict['part']}: {verdict['what']} {verdict['value']} ({'met' if verdict['met'] else 'NOT MET'})")
    facts = {"engine": ENGINE, "seed": options.seed, "traces": "recorded" if options.traces else "synthetic"}
    options.json.write_text(json.dumps({**facts, "rows": sweep.rows, "verdicts": sweep.verdicts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
