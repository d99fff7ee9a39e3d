"""Try a fleet in virtual time: the balancer's own code over modelled workers and recorded or made-up traffic.

Workers are modelled by coefficients fitted from the real engine; sessions think as long as they did. The same seed
gives the same figures.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emberline.cli import common
from emberline.protocol.errors import BadInput

POLICIES = (  # the balancer's own, then others'; as the simulator's plan knows them, which is not imported for --help
    *("sticky", "affinity", "prefix", "round_robin", "least_loaded"),
    *("plain_round_robin", "plain_least_loaded", "sglang", "dynamo"),
)
COLUMNS = (
    ("policy", "policy", "{}"),
    ("requests", "requests", "{:d}"),
    ("ttft_p50_s", "TTFT p50", "{:.3f} s"),
    ("ttft_p90_s", "p90", "{:.3f} s"),
    ("ttft_p99_s", "p99", "{:.3f} s"),
    ("token_p50_ms", "time/token p50", "{:.1f} ms"),
    ("token_p90_ms", "p90", "{:.1f} ms"),
    ("token_p99_ms", "p99", "{:.1f} ms"),
    ("hit_ratio", "hits", "{:.3f}"),
    ("ideal_hit_ratio", "of at most", "{:.3f}"),
    ("busy", "busy", "{:.0%}"),
    ("busiest_over_mean", "busiest/mean", "{:.2f}"),
    ("fairness", "fairness", "{:.3f}"),
    ("within_slo", "in SLO", "{:.1%}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", default="agents", help="a file, or made up: agents (default), chats")
    add("--workers", type=int, default=8, metavar="N", help="workers that do both, 1 to 256 (default 8)")
    add("--prefill-workers", type=int, default=0, metavar="N", help="instead: so many workers for prompts,")
    add("--decode-workers", type=int, default=0, metavar="N", help="and so many for replies")
    add(
        "--policy", default="sticky", help=f"one or several with commas, or all: {', '.join(POLICIES)} (default sticky)"
    )
    add("--load", type=float, metavar="X", help="copies of a trace with arrivals, or session starts a second")
    add(
        "--busy",
        type=float,
        metavar="SHARE",
        help="instead: search the load at which the first policy is so busy (0.7)",
    )
    add("--engine", default="h200-llama-8b", help="coefficients: a name or a JSON file (default h200-llama-8b)")
    add("--kv-tokens", type=float, metavar="N", help="memory of a worker (default: the engine's)")
    add("--chunk", default="timed", metavar="KIND", help="prompts beside streams: timed (default), or tokens a step")
    add("--bandwidth", type=float, default=50.0, metavar="GB/S", help="of a worker, for KV (default 50)")
    add("--cores", type=int, default=1, metavar="N", help="balancers over the one fleet (default 1)")
    add("--report-delay", type=float, default=0.0, metavar="S", help="until a balancer hears of load and caches")
    add("--named", action="store_true", help="sessions tell their names (x-session-affinity)")
    add("--warm", type=float, default=600.0, metavar="S", help="simulated before measuring (default 600)")
    add("--time", type=float, default=1800.0, metavar="S", help="simulated and measured (default 1800)")
    add("--seed", type=int, default=1, metavar="N", help="of arrivals and made-up traffic (default 1)")
    add("--plots", type=Path, metavar="DIR", help="draw SVG plots there")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.simulator.outcome import Outcome
    from emberline.simulator.search import load_at_busy
    from emberline.simulator.simulation import simulate
    from emberline.simulator.trace_files import open_trace

    plans = _plans(args)
    trace = open_trace(args.trace, args.seed, plans[0].model.context_len)
    if args.load is None:
        load = load_at_busy(trace, plans[0], args.busy or 0.7)
        plans = [_with(plan, load=load) for plan in plans]
    outcomes: list[Outcome] = [simulate(trace, plan) for plan in plans]
    figures = [outcome.figures() for outcome in outcomes]
    if args.json:
        common.print_json({"trace": trace.name, "left_out": trace.left_out, "runs": figures})
    else:
        per = "copies" if trace.shared else "session starts a second"
        print(f"{trace.name}: {trace.n_turns} requests, {trace.left_out} left out as too long")
        print(f"load {plans[0].load:.4g} {per}; {len(plans[0].roles)} workers of {plans[0].model.name}")
        print(_table(figures))
    if args.plots:
        _draw(args.plots, outcomes)
    return 0


def _plans(args: argparse.Namespace) -> list[Any]:
    from msgspec.structs import replace

    from emberline.simulator import coefficients
    from emberline.simulator.coefficients import Chunking, Fixed, Timed
    from emberline.simulator.plan import Plan
    from emberline.simulator.transfer import Wire

    model = coefficients.load(args.engine)
    if args.kv_tokens:
        model = replace(model, kv_tokens=int(args.kv_tokens))
    if args.chunk != "timed" and not (args.chunk.isdigit() and int(args.chunk) > 0):
        raise BadInput(f"--chunk is 'timed' or a number of tokens, not {args.chunk!r}", param="chunk")
    timed = args.chunk == "timed" and model.paced
    chunking: Chunking = Timed() if timed else Fixed(model.token_budget if args.chunk == "timed" else int(args.chunk))
    if min(args.warm, args.time) < 0 or args.time == 0 or args.bandwidth <= 0 or args.report_delay < 0:
        raise BadInput("times and bandwidth must be above 0", param="time")
    apart = bool(args.prefill_workers or args.decode_workers)
    return [
        Plan(
            model=model,
            load=1.0 if args.load is None else args.load,
            workers=0 if apart else args.workers,
            prefill=args.prefill_workers,
            decode=args.decode_workers,
            policy=policy.strip(),
            chunking=chunking,
            wire=Wire(args.bandwidth * 1e9),
            seed=args.seed,
            warm_s=args.warm,
            measured_s=args.time,
            cores=args.cores,
            delay_s=args.report_delay,
            named=args.named,
        )
        for policy in (POLICIES if args.policy == "all" else args.policy.split(","))
    ]


def _with(plan: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(plan, **changes)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [[title for _, title, _ in COLUMNS]]
    lines += [[form.format(row[key]) for key, _, form in COLUMNS] for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _draw(folder: Path, outcomes: Sequence[Any]) -> None:
    from emberline.simulator.plot import Line, chart, distribution

    folder.mkdir(parents=True, exist_ok=True)
    first = [distribution(outcome.plan.policy, outcome.first_token_s()) for outcome in outcomes]
    pace = [distribution(o.plan.policy, [1e3 * s for s in o.time_per_token_s()]) for o in outcomes]
    busy = [
        Line(o.plan.policy, [(n, s / o.plan.measured_s) for n, s in enumerate(sorted(o.busy_s))] or [(0, 0)])
        for o in outcomes
    ]
    plots = {
        "ttft": chart("Time to the first token", "seconds", "share of requests", first, log_x=True),
        "time-per-token": chart("Time per token", "milliseconds", "share of requests", pace, log_x=True),
        "busy": chart("Workers, the least busy first", "worker", "share of the time busy", busy),
    }
    for name, text in plots.items():
        (folder / f"{name}.svg").write_text(text)
    print(f"plots in {folder}: {', '.join(f'{name}.svg' for name in plots)}", file=sys.stderr)
