"""The planner over a load that doubles and halves within an hour, in virtual time: the production policy, router and
admission over simulated workers whose nodes take three minutes to start.

    python -m benchmarks.planner [--trace FILE …] [--seeds N] [--swing X] [--quick]

Without traces, traffic is generated in the shape of published chats. It states, for each trace and seed: the share of
requests within their targets and the GPU-hours; the same of the smallest fleet per minute that a search finds with the
arrivals known, and of fixed fleets of as many GPU-hours; of as many GPU-hours, also a fleet that follows the arrivals
because it knows them: what any planner could save of the misses of a fixed one; what the misses come from; how soon
prefill and decode workers follow a change of the mix; and what becomes of a node that flaps, a burst, and a model that
is idle.

Targets: a first token within `TOLERATED_S` beyond what its prompt takes on an idle worker that has cached what any has
computed before, and `ITL_S` per output token. The replicas are `SLOWDOWN` times as slow as the fitted engine, as those
of a model of that many times its size are: a fleet of some ten for an hour of traffic takes seconds to simulate.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from math import ceil
from typing import Any

import msgspec

from emberline.engine.core.latency_target import TARGET_S
from emberline.simulator import coefficients
from emberline.simulator.coefficients import Coefficients, LatencyTargetBudget
from emberline.simulator.elastic_fleet import NodeSpec, kept_through
from emberline.simulator.experiment import SimulationConfig, SimulationResult
from emberline.simulator.planner import PlannerSpec
from emberline.simulator.simulation import simulate
from emberline.simulator.trace import LoadProfile, TraceSession, TrafficTrace
from emberline.simulator.trace_sources import open_trace
from emberline.supervisor.cluster.scaling_plan import ScalingBounds

SLOWDOWN = 4.0
TOLERATED_S, ITL_S = 4.0, 0.06
HOUR_S = 3600.0
SWING = 2.0
WANTED = 0.95  # of requests within their targets
MAX_REPLICAS = 30
SMOOTH_MINUTES = 2


def engine() -> Coefficients:
    fitted = coefficients.load("h200-llama-8b")
    slower = {name: SLOWDOWN * getattr(fitted, name) for name in ("step_s", "row_s", "context_s", "token_s", "pair_s")}
    return msgspec.structs.replace(fitted, name=f"{fitted.name} / {SLOWDOWN:g}", **slower)


def swinging(
    model: Coefficients, load: float, seed: int, swing: float = SWING, seconds: float = HOUR_S
) -> SimulationConfig:
    return SimulationConfig(
        model=model,
        load=load,
        workers=1,
        prefill_policy=LatencyTargetBudget(target_s=SLOWDOWN * TARGET_S),
        seed=seed,
        warmup_s=0.0,
        measured_s=seconds,
        profile=LoadProfile.swing(swing, seconds),
    )


def planner(**changes: Any) -> PlannerSpec:
    bounds = ScalingBounds(max_replicas=MAX_REPLICAS, tolerated_s=TOLERATED_S)
    return PlannerSpec(bounds=msgspec.structs.replace(bounds, **changes), itl_s=ITL_S)


def misses(result: SimulationResult) -> list[bool]:
    return result.missed(TOLERATED_S, ITL_S)


def in_target(result: SimulationResult) -> float:
    return 1 - sum(misses(result)) / max(1, len(result.requests))


def causes(result: SimulationResult) -> dict[str, float]:
    """Shares of all requests that missed their targets, each counted once: it would have on an idle worker with what
    its own had cached (`cache`); a node was starting when it came (`start`); only its tokens were late (`itl`); the
    rest waited behind others (`queue`)."""
    model, found = result.config.model, {"cache": 0, "start": 0, "itl": 0, "queue": 0}
    spans = [
        (size.at_s, later.at_s if later else result.config.end_s)
        for size, later in zip_longest(result.sizes, result.sizes[1:])
        if size.starting
    ]
    for request, ttft_s, least_s, missed in zip(result.requests, result.ttft_s(), result.min_ttft_s(), misses(result)):
        if not missed:
            continue
        own_s = model.prefill_s(request.n_prompt - request.cached_tokens, request.cached_tokens)
        if own_s > least_s + TOLERATED_S:
            found["cache"] += 1
        elif any(start_s <= request.arrival_s < end_s for start_s, end_s in spans):
            found["start"] += 1
        elif ttft_s <= least_s + TOLERATED_S:
            found["itl"] += 1
        else:
            found["queue"] += 1
    return {cause: round(n / len(result.requests), 4) for cause, n in found.items()}


# --- the smallest fleet per minute -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    counts: tuple[int, ...]
    in_target: float
    gpu_s: float


class ScheduleSearch:
    """Of a fleet per minute, for arrivals that are known: as small as keeps `WANTED` of them within their targets.

    First proportional to the work of each minute, with the factor by bisection; then one worker fewer wherever blocks
    of minutes can spare it, longest blocks first, those with the fewest misses first.
    """

    def __init__(self, trace: TrafficTrace, config: SimulationConfig, max_runs: int) -> None:
        self._trace, self._config = trace, config
        self._left = max_runs
        self._tried: dict[tuple[int, ...], tuple[Found, list[float]]] = {}

    def run(self, work: Sequence[float]) -> Found:
        low, high, best = 1.0, 3.0, None
        while high - low > 0.1 or best is None:
            factor = high if self._left <= 1 and best is None else (low + high) / 2
            found = self._try(tuple(max(1, ceil(factor * each)) for each in work))
            if found.in_target >= WANTED:
                high, best = factor, found
            else:
                low = factor
                if high - low <= 0.1 and best is None:
                    high += 1.0
        n_minutes = len(work)
        for length in (n_minutes // 4, n_minutes // 10):
            starts = [start for start in range(0, n_minutes, length) if max(best.counts[start : start + length]) > 1]
            missed = self._tried[best.counts][1]
            for start in sorted(starts, key=lambda start: sum(missed[start : start + length])):
                if self._left <= 0:
                    return best
                block = range(start, start + length)
                fewer = tuple(max(1, n - (minute in block)) for minute, n in enumerate(best.counts))
                found = self._try(fewer)
                if found.in_target >= WANTED and found.gpu_s < best.gpu_s:
                    best = found
        return best

    def _try(self, counts: tuple[int, ...]) -> Found:
        if counts not in self._tried:
            self._left -= 1
            result = simulate(self._trace, replace(self._config, workers=counts[0], schedule=counts))
            missed = [0.0] * len(counts)
            for request, was_missed in zip(result.requests, misses(result)):
                missed[int(request.arrival_s // 60)] += was_missed
            self._tried[counts] = Found(counts, in_target(result), result.gpu_s), missed
        return self._tried[counts][0]


def following(work: Sequence[float], gpu_s: float, power: float) -> tuple[int, ...]:
    """Workers by minute: those that are busy and a multiple of their number to the power, as many as take no more than
    those GPU-seconds."""
    start_s, best = NodeSpec().start_s, (1,) * len(work)
    for margin in range(800):
        counts = tuple(max(1, round(each + margin / 100 * each**power)) for each in work)
        kept = kept_through(counts, int(-(-start_s // 60)))
        n_started = sum(max(0, after - before) for before, after in pairwise(kept))
        if 60 * sum(kept) + start_s * n_started <= gpu_s:
            best = kept
    return best


def work_by_minute(result: SimulationResult) -> list[float]:
    """Workers that are busy with what arrives in a minute, smoothed over neighbours."""
    model = result.config.model
    work = [0.0] * int(result.config.measured_s // 60)
    for request in result.requests:
        prefill_s = model.prefill_s(request.n_prompt - request.cached_tokens, request.cached_tokens)
        decode_s = request.n_output * (model.row_s + model.context_s * request.n_prompt)
        work[int(request.arrival_s // 60)] += (prefill_s + decode_s) / 60
    near = [work[max(0, minute - SMOOTH_MINUTES) : minute + SMOOTH_MINUTES + 1] for minute in range(len(work))]
    return [sum(each) / len(each) for each in near]


# --- cases -----------------------------------------------------------------------------------------------------------


def swing_case(trace: TrafficTrace, config: SimulationConfig, first: int, max_runs: int) -> dict[str, Any]:
    """The planner, the smallest fleet per minute, and fixed fleets of as many GPU-hours."""
    planned = simulate(trace, replace(config, workers=first, planner=planner()))
    work = work_by_minute(planned)
    best = ScheduleSearch(trace, config, max_runs).run(work)
    n_equal = planned.gpu_s / config.measured_s
    missed_planned = 1 - in_target(planned)
    fixed = {n: 1 - in_target(simulate(trace, replace(config, workers=n))) for n in {int(n_equal), ceil(n_equal)}}
    low, high = fixed[int(n_equal)], fixed[ceil(n_equal)]
    missed_fixed = low + (high - low) * (n_equal - int(n_equal))  # a fleet has no part of a worker
    schedules = [following(work, planned.gpu_s, power) for power in (0.5, 1.0)]
    known = max(
        (simulate(trace, replace(config, workers=counts[0], schedule=counts)) for counts in schedules), key=in_target
    )
    return {
        "requests": len(planned.requests),
        "in_target": round(in_target(planned), 4),
        "gpu_hours": round(planned.gpu_s / 3600, 2),
        "sizes": _sizes(planned),
        "smallest_in_target": round(best.in_target, 4),
        "smallest_gpu_hours": round(best.gpu_s / 3600, 2),
        "over_smallest": round(planned.gpu_s / best.gpu_s, 3),
        "fixed_missed": {n: round(missed, 4) for n, missed in sorted(fixed.items())},
        "fewer_misses": _times(missed_fixed, missed_planned),
        "known_gpu_hours": round(known.gpu_s / 3600, 2),
        "known_fewer_misses": _times(missed_fixed, 1 - in_target(known)),
        "missed_by_cause": causes(planned),
    }


def _times(fixed: float, other: float) -> float:
    return round(fixed / other, 2) if other else float("inf")


def mix_case(trace: TrafficTrace, config: SimulationConfig, n: int, change_s: float) -> dict[str, Any]:
    """Prefill and decode workers of a full cluster, when half as many requests have four times the output: after how
    many seconds the roles are within one worker of those in which they stay."""
    mixed = longer_replies(trace, change_s, 4.0)
    profile = LoadProfile(((0.0, 1.0), (change_s, 1.0), (change_s + 1, 0.5)))
    n_decode = n // 3
    given = replace(config, profile=profile, workers=0, prefill_workers=n - n_decode, decode_workers=n_decode)
    spec = planner(min_replicas=n, max_replicas=n, disaggregated=True)
    result = simulate(mixed, replace(given, planner=spec))
    fixed = simulate(mixed, given)
    settled = result.sizes[-1].prefill
    before = [size.prefill for size in result.sizes if size.at_s < change_s][-1]
    retuned_s = max(
        (later.at_s for size, later in zip(result.sizes, result.sizes[1:]) if abs(size.prefill - settled) > 1),
        default=change_s,
    )
    return {
        "prefill_before": before,
        "prefill_after": settled,
        "decode_after": n - settled,
        "retuned_s": round(max(0.0, retuned_s - change_s)),
        "flips": sum(d.action == "flip" for plan in result.plans for d in plan.decisions if plan.at_s >= change_s),
        "in_target": round(in_target(result), 4),
        "in_target_without_flips": round(in_target(fixed), 4),
    }


def longer_replies(trace: TrafficTrace, after_s: float, factor: float) -> TrafficTrace:
    def changed(session: TraceSession) -> TraceSession:
        turns = tuple(replace(turn, n_output=int(factor * turn.n_output)) for turn in session.turns)
        return replace(session, turns=turns) if session.start_s >= after_s else session

    sessions = [changed(session) for session in trace.sessions]
    return replace(trace, sessions=sessions)


def steady(config: SimulationConfig, *points: tuple[float, float]) -> SimulationConfig:
    return replace(config, profile=LoadProfile(points))


def flap_case(trace: TrafficTrace, config: SimulationConfig, first: int) -> dict[str, Any]:
    """One node dies every minute for a quarter of an hour, for 20 s each, at a constant load."""
    constant = replace(steady(config, (0.0, 0.5)), workers=first)
    faults = tuple((600.0 + 60 * place, "w000", 20.0) for place in range(15))
    calm, flapping = (simulate(trace, replace(constant, planner=replace(planner(), faults=f))) for f in ((), faults))
    return {
        "in_target": [round(in_target(calm), 4), round(in_target(flapping), 4)],
        "gpu_hours": [round(calm.gpu_s / 3600, 2), round(flapping.gpu_s / 3600, 2)],
        "changes": [sum(len(plan.decisions) for plan in each.plans) for each in (calm, flapping)],
        "unfinished": sum(request.end_s < 0 for request in flapping.requests),
    }


def burst_case(trace: TrafficTrace, config: SimulationConfig, first: int) -> dict[str, Any]:
    """Twice the load for two minutes: over before a node could help."""
    at_s = 1200.0
    points = ((0.0, 0.5), (at_s, 0.5), (at_s + 1, 1.0), (at_s + 120, 1.0), (at_s + 121, 0.5))
    result = simulate(trace, replace(steady(config, *points), workers=first, planner=planner()))
    calm = simulate(trace, replace(steady(config, (0.0, 0.5)), workers=first, planner=planner()))
    return {
        "in_target": [round(in_target(calm), 4), round(in_target(result), 4)],
        "gpu_hours": [round(calm.gpu_s / 3600, 2), round(result.gpu_s / 3600, 2)],
        "unfinished": sum(request.end_s < 0 for request in result.requests),
    }


def idle_case(trace: TrafficTrace, config: SimulationConfig, first: int) -> dict[str, Any]:
    """Ten minutes of requests, half an hour without, and again: with `min_replicas` 0 and 10 minutes of patience."""
    points = ((0.0, 0.5), (600.0, 0.5), (601.0, 0.0), (2400.0, 0.0), (2401.0, 0.5))
    spec = planner(min_replicas=0, idle_s=600.0)
    result = simulate(trace, replace(steady(config, *points), workers=first, planner=spec))
    none_s = [size.at_s for size in result.sizes if not size.running + size.starting]
    woken = [request for request in result.requests if request.arrival_s > 2400]
    return {
        "none_from_s": round(none_s[0]) if none_s else None,
        "gpu_hours": round(result.gpu_s / 3600, 2),
        "first_wait_s": round(woken[0].first_token_s - woken[0].arrival_s, 1),
        "unfinished": sum(request.end_s < 0 for request in result.requests),
        "refused": result.rejected,
    }


def _sizes(result: SimulationResult) -> list[int]:
    """Workers that run, every five minutes."""
    found, sizes = [], result.sizes
    for at_s in range(0, int(result.config.measured_s), 300):
        found.append([size.running for size in sizes if size.at_s <= at_s][-1])
    return found


def run(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    model = engine()
    trace = open_trace(name, seed, model.context_len)
    config = swinging(model, args.load, seed, args.swing)
    report: dict[str, Any] = {"trace": trace.name, "seed": seed, "load": args.load, "swing": args.swing}
    cases = {
        "swing": lambda: swing_case(trace, config, args.workers, 6 if args.quick else 20),
        "mix": lambda: mix_case(trace, replace(config, measured_s=2700.0), 9, 1200.0),
        "flap": lambda: flap_case(trace, replace(config, measured_s=1800.0), args.workers),
        "burst": lambda: burst_case(trace, replace(config, measured_s=2400.0), args.workers),
        "idle": lambda: idle_case(trace, replace(config, measured_s=3000.0), args.workers),
    }
    for case in args.case or cases:
        began_s = time.process_time()
        report[case] = {**cases[case](), "cpu_s": round(time.process_time() - began_s, 1)}
        print(f"{trace.name}, seed {seed}, {case}: {json.dumps(report[case])}", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", help="files or synthetic traffic (default: chats)")
    parser.add_argument("--load", type=float, default=0.5, help="at the peak: copies, or session starts per second")
    parser.add_argument("--swing", type=float, default=SWING, help="the highest load as a multiple of the lowest")
    parser.add_argument("--workers", type=int, default=6, help="at the beginning")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--case", action="append", choices=("swing", "mix", "flap", "burst", "idle"))
    parser.add_argument("--quick", action="store_true", help="a short search for the smallest fleet")
    parser.add_argument("--json", help="write all figures there")
    args = parser.parse_args()
    reports = [run(name, args.seed + n, args) for name in args.trace or ["chats"] for n in range(args.seeds)]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(reports, file, indent=1)


if __name__ == "__main__":
    main()
