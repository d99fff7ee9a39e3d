"""`emberline simulate`: the production balancer over simulated workers and recorded or synthetic traffic.

Step times come from coefficients fitted to the real engine; the same seed gives the same figures.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from emberline.cli import common
from emberline.protocol.errors import BadInput
from emberline.simulator import coefficients
from emberline.simulator.coefficients import FixedTokenBudget, LatencyTargetBudget, PrefillPolicy
from emberline.simulator.elastic_fleet import NodeSpec
from emberline.simulator.experiment import (
    POLICIES,
    SLO_TPOT_S,
    SLO_TTFT_S,
    SimulationConfig,
    SimulationResult,
    interval,
)
from emberline.simulator.fleet import LinkSpec
from emberline.simulator.planner import PlannerSpec
from emberline.simulator.plot import Curve, chart, distribution
from emberline.simulator.simulation import estimated_load, load_at_utilization, simulate
from emberline.simulator.trace import LoadProfile
from emberline.simulator.trace_sources import open_trace
from emberline.supervisor.cluster.scaling_plan import ScalingBounds

COLUMNS = (
    ("policy", "policy", "{}"),
    ("requests", "requests", "{:d}"),
    ("ttft_p50_s", "TTFT p50", "{:.3f} s"),
    ("ttft_p90_s", "p90", "{:.3f} s"),
    ("ttft_p99_s", "p99", "{:.3f} s"),
    ("token_p50_ms", "TPOT p50", "{:.1f} ms"),
    ("token_p90_ms", "p90", "{:.1f} ms"),
    ("token_p99_ms", "p99", "{:.1f} ms"),
    ("hit_ratio", "hit ratio", "{:.3f}"),
    ("ideal_hit_ratio", "at most", "{:.3f}"),
    ("busy", "busy", "{:.0%}"),
    ("busiest_over_mean", "busiest/mean", "{:.2f}"),
    ("fairness", "fairness", "{:.3f}"),
    ("within_slo", "in SLO", "{:.1%}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", default="agents", help="a file, or synthetic: agents (default), chats")
    add("--workers", type=int, default=8, metavar="N", help="workers of role both, 1 to 256 (default 8)")
    add("--prefill-workers", type=int, default=0, metavar="N", help="disaggregated: prefill workers, with")
    add("--decode-workers", type=int, default=0, metavar="N", help="decode workers, instead of --workers")
    add("--policy", default="sticky", help=f"one, several with commas, or all: {', '.join(POLICIES)} (default sticky)")
    add(
        "--load",
        type=float,
        metavar="X",
        help="copies of a trace with arrivals, or session starts per second (default: workers are about half busy)",
    )
    add(
        "--utilization",
        type=float,
        metavar="SHARE",
        help="instead of --load: search for the load at which the first policy is so busy, in up to 12 runs",
    )
    add("--engine", default="h200-llama-8b", help="coefficients: a name or a JSON file (default h200-llama-8b)")
    add("--kv-tokens", type=float, metavar="N", help="KV capacity of a worker (default: the engine's)")
    add(
        "--token-budget",
        default="itl",
        metavar="N",
        help="tokens per step, or itl (default): prefill up to the inter-token latency target",
    )
    add("--bandwidth", type=float, default=50.0, metavar="GB/S", help="of a worker, for KV transfer (default 50)")
    add("--balancers", type=int, default=1, metavar="N", help="balancers that share the fleet (default 1)")
    add("--report-delay", type=float, default=0.0, metavar="S", help="latency of load reports and KV events")
    add("--upstream", action="store_true", help="workers are other servers: no KV events, load reports every 2 s")
    add("--unstreamed", type=float, default=0.0, metavar="SHARE", help="requests whose first token is seen at the end")
    add("--faults", type=int, default=0, metavar="N", help="workers that die or hang for 5 to 60 s, and return")
    add("--session-affinity", action="store_true", help="clients send their session (x-session-affinity)")
    add("--warmup", type=float, default=120.0, metavar="S", help="simulated before measuring (default 120)")
    add("--duration", type=float, default=600.0, metavar="S", help="simulated and measured (default 600)")
    add("--swing", type=float, metavar="X", help="the load begins at 1/X, rises by X until half-time, and falls again")
    add("--planner", action="store_true", help="the planner changes the fleet; the workers above are the first ones")
    add("--min-replicas", type=int, default=1, metavar="N", help="of the planner (default 1; 0: none while idle)")
    add("--max-replicas", type=int, default=16, metavar="N", help="of the planner (default 16)")
    add("--start-seconds", type=float, default=180.0, metavar="S", help="that a node takes to start (default 180)")
    add("--seed", type=int, default=1, metavar="N", help="of arrivals and synthetic traffic (default 1)")
    add("--seeds", type=int, default=1, metavar="N", help="run N seeds: means with 95 %% intervals (default 1)")
    add("--plots", type=Path, metavar="DIR", help="write SVG plots there")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    configs = _configs(args)
    told = _ProgressLines()
    trace = open_trace(args.trace, args.seed, configs[0].model.context_len)
    if args.load is None:
        load = estimated_load(trace, configs[0])
        if args.utilization is not None:
            load = load_at_utilization(trace, configs[0], args.utilization, told)
        configs = [replace(config, load=load) for config in configs]
    by_seed = [[simulate(trace, replace(one, seed=args.seed + n), told) for one in configs] for n in range(args.seeds)]
    told.end()
    results = by_seed[0]
    figures = [result.figures() for run_of_seed in by_seed for result in run_of_seed]
    if args.json:
        report = {"trace": trace.name, "left_out": trace.left_out, "runs": figures}
        if args.planner:
            report["plans"] = msgspec.to_builtins(results[0].plans)
        common.print_json(report)
    else:
        unit = "copies" if trace.shared else "session starts per second"
        print(f"{trace.name}: {trace.n_turns} requests, {trace.left_out} left out as too long")
        print(f"load {configs[0].load:.4g} {unit}; {len(configs[0].roles)} workers of {configs[0].model.name}")
        print(_table(figures[: len(configs)]))
        if args.seeds > 1:
            print(f"\n{args.seeds} seeds, mean and 95 % interval:\n{_intervals(figures)}")
    if args.planner and not args.json:
        print(_decisions(results[0]))
    if args.plots:
        _plot(args.plots, results)
    return 0


class _ProgressLines:
    """Lines on stderr that say which run is being simulated; on a terminal, the last one tells how far it is."""

    def __init__(self) -> None:
        self._run: SimulationConfig | None = None
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, run: SimulationConfig, share: float) -> None:
        text = f"simulating {run.end_s:g} s of {run.policy} at load {run.load:.4g}"
        if self._is_terminal:
            print(f"\r\x1b[K{text}: {share:.0%}", end="", file=sys.stderr, flush=True)
        elif run is not self._run:
            print(text, file=sys.stderr, flush=True)
        self._run = run

    def end(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _configs(args: argparse.Namespace) -> list[SimulationConfig]:
    """One configuration per policy."""
    model = coefficients.load(args.engine)
    if args.kv_tokens:
        model = msgspec.structs.replace(model, kv_tokens=int(args.kv_tokens))
    if args.token_budget != "itl" and not (args.token_budget.isdigit() and int(args.token_budget) > 0):
        raise BadInput(
            f"--token-budget is 'itl' or a number of tokens, not {args.token_budget!r}", param="token-budget"
        )
    prefill_policy: PrefillPolicy = LatencyTargetBudget()
    if args.token_budget != "itl" or not model.paced:
        prefill_policy = FixedTokenBudget(model.token_budget if args.token_budget == "itl" else int(args.token_budget))
    if args.seeds < 1:
        raise BadInput("--seeds must be at least 1", param="seeds")
    if min(args.warmup, args.duration) < 0 or args.duration == 0 or args.bandwidth <= 0 or args.report_delay < 0:
        raise BadInput("times and bandwidth must be above 0", param="duration")
    planner = _planner(args) if args.planner else None
    return [
        SimulationConfig(
            model=model,
            load=1.0 if args.load is None else args.load,
            workers=0 if args.prefill_workers or args.decode_workers else args.workers,
            prefill_workers=args.prefill_workers,
            decode_workers=args.decode_workers,
            policy=policy.strip(),
            prefill_policy=prefill_policy,
            link=LinkSpec(args.bandwidth * 1e9),
            seed=args.seed,
            warmup_s=args.warmup,
            measured_s=args.duration,
            balancers=args.balancers,
            report_delay_s=args.report_delay,
            session_affinity=args.session_affinity,
            upstream=args.upstream,
            unstreamed=args.unstreamed,
            faults=args.faults,
            profile=None if args.swing is None else LoadProfile.swing(args.swing, args.warmup + args.duration),
            planner=planner,
        )
        for policy in (POLICIES if args.policy == "all" else args.policy.split(","))
    ]


def _planner(args: argparse.Namespace) -> PlannerSpec:
    bounds = ScalingBounds(
        min_replicas=args.min_replicas,
        max_replicas=args.max_replicas,
        disaggregated=bool(args.prefill_workers),
        tolerated_s=SLO_TTFT_S,
    )
    return PlannerSpec(bounds=bounds, nodes=NodeSpec(start_s=args.start_seconds), itl_s=SLO_TPOT_S)


def _decisions(result: SimulationResult) -> str:
    """Describe the planner's decisions and their reasons."""
    figures = result.figures()
    lines = [f"\n{figures['gpu_hours']:.2f} GPU-hours, {figures['in_target']:.1%} of requests within their targets"]
    for plan in result.plans:
        for each in plan.decisions:
            lines.append(f"{plan.at_s:8,.0f} s  {each.action:7} {each.replica or each.role}: {each.why}")
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [[title for _, title, _ in COLUMNS]]
    lines += [[form.format(row[key]) for key, _, form in COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _intervals(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        parts = []
        for key, title in (("ttft_p50_s", "p50"), ("ttft_p90_s", "p90"), ("ttft_p99_s", "p99")):
            mean, half = interval([row[key] for row in rows if row["policy"] == policy])
            parts.append(f"{title} {mean:.3f} ± {half:.3f} s")
        lines.append(f"{policy.rjust(20)}  TTFT {', '.join(parts)}")
    return "\n".join(lines)


def _plot(folder: Path, results: Sequence[SimulationResult]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ttft = [distribution(result.config.policy, result.ttft_s()) for result in results]
    tpot = [distribution(result.config.policy, [1e3 * s for s in result.time_per_token_s()]) for result in results]
    busy = [
        Curve(
            result.config.policy,
            [(n, s / result.config.measured_s) for n, s in enumerate(sorted(result.busy_s))] or [(0, 0)],
        )
        for result in results
    ]
    plots = {
        "ttft": chart("Time to first token", "seconds", "share of requests", ttft, log_x=True),
        "time-per-token": chart("Time per output token", "milliseconds", "share of requests", tpot, log_x=True),
        "busy": chart("Utilization, least busy worker first", "worker", "share of the time busy", busy),
    }
    for name, text in plots.items():
        (folder / f"{name}.svg").write_text(text)
    print(f"plots in {folder}: {', '.join(f'{name}.svg' for name in plots)}", file=sys.stderr)
