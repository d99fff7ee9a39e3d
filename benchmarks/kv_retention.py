"""KV cache tiers and retention in simulation: `python -m benchmarks.kv_retention --traces DIR [--scenario NAME]`.

Coding agents on a fleet, at the load at which workers with device memory alone compute for 70 % of the time: device
memory alone, host memory and a drive behind it, and one pool of all workers with the least loaded worker for every
request. On the device the engine's retention is compared with least recently used, and with an oracle that evicts what
is used again last, there and in the tiers; and it is searched with how many times as many sessions the tiers have the
p90 TTFT of device memory alone: these cells (`few`) have a quarter of the workers and of the load.

DIR holds claude_code.jsonl.gz (simulator/trace_sources.py says where it is published); without it, synthetic traffic.
`--part` chooses sessions by a hash of their number: what the engine assumes of return times (`--priors`) was read from
`tuning`, figures are those of `held-out`. What the fleet has at time 0 is what the sessions of `--history` seconds
before it left behind; `--warmup` seconds are simulated and not measured. Several processes run at once: see `--jobs`.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace as with_fields

from benchmarks.balancer_sim import BUSY, ENGINE, FILES, SYNTHETIC
from benchmarks.report import markdown
from emberline.kv.retention import N_BINS, PRIOR_TURNS, Kind, return_bin
from emberline.simulator.coefficients import load
from emberline.simulator.experiment import SimulationConfig
from emberline.simulator.simulation import load_at_utilization, next_turn_s, simulate
from emberline.simulator.tiers import TierSpec
from emberline.simulator.trace import TraceSession, TrafficTrace
from emberline.simulator.trace_sources import open_trace, synthetic_agents

DEVICE_TOKENS = 900_000
HOST = TierSpec("host", 6_000_000, 50e9)
DISK = TierSpec("disk", 40_000_000, 3e9, 0.001)
FAST_RATE = 12e9
SMALL_HOST_TOKENS = 1_000_000
FEWER = 4  # times, in comparisons of policies and in other scenarios than the asked one
N_PAUSES, PAUSE_S = 3, (2 * 3600.0, 8 * 3600.0)  # of a session, in the scenario `pauses`
POOL_WARMUP_S = 60.0  # where no worker's own cache matters; a longer period is measured instead
SEARCH = "few: sessions"
MULTIPLES, MAX_RUNS = (2.0, 0.5), 3  # of the load: the first that is tried and the first step; runs of the search
SCENARIOS = {
    "asked": "6 M tokens of host memory, 40 M on a drive",
    "small-host": "1 M tokens of host memory, 40 M on a drive",
    "pauses": "as asked; every session pauses three times for two to eight hours",
}
COLUMNS = ("requests_per_s", "ttft_p50_s", "ttft_p90_s", "hit_ratio", "ideal_hit_ratio", "busy", "busiest_over_mean")


class Job(NamedTuple):
    cell: str
    seed: int
    config: SimulationConfig


def part_of(trace: TrafficTrace, part: str) -> TrafficTrace:
    if part != "all":
        wanted = part == "held-out"
        hashes = (blake2b(b"%d" % n, digest_size=1).digest()[0] % 2 for n in range(len(trace.sessions)))
        trace.sessions = [session for session, odd in zip(trace.sessions, hashes) if odd == wanted]
    return trace


def with_pauses(trace: TrafficTrace) -> TrafficTrace:
    """Users who come back after hours: the waits before some turns of each session, evenly spread, are prolonged."""
    rng = Random("pauses")
    trace.sessions = [_paused(session, rng) for session in trace.sessions]
    return trace


def _paused(session: TraceSession, rng: Random) -> TraceSession:
    places = [place for place, turn in enumerate(session.turns) if place and not turn.is_sub_agent]
    chosen = {places[len(places) * (n + 1) // (N_PAUSES + 1)] for n in range(N_PAUSES)} if places else set()
    turns, times_s, paused_s = [], [], 0.0
    for place, (turn, time_s) in enumerate(zip(session.turns, session.times_s)):
        pause_s = rng.uniform(*PAUSE_S) if place in chosen else 0.0
        paused_s += pause_s
        turns.append(replace(turn, wait_s=turn.wait_s + pause_s))
        times_s.append(time_s + paused_s)
    return replace(session, turns=tuple(turns), times_s=tuple(times_s))


def priors(trace: TrafficTrace) -> dict[str, list[float]]:
    """Of PRIOR_TURNS turns of each kind, those that are followed by another within each bin of time."""
    ended = dict.fromkeys((Kind.TOOL, Kind.IDLE, Kind.SIDE), 0)
    returned = {kind: [0] * N_BINS for kind in ended}
    for session in trace.sessions:
        for place, turn in enumerate(session.turns):
            kind = Kind.SIDE if turn.is_sub_agent else Kind.TOOL if turn.called_tools else Kind.IDLE
            ended[kind] += 1
            after_s = next_turn_s(session.turns, place)
            if after_s < float("inf"):
                returned[kind][return_bin(after_s)] += 1
    return {kind.name: [round(PRIOR_TURNS * n / max(1, ended[kind]), 2) for n in returned[kind]] for kind in ended}


# --- what is run -----------------------------------------------------------------------------------------------------


def cells(config: SimulationConfig, scenario: str) -> dict[str, SimulationConfig]:
    """By name. The cell `few: sessions` is a search, see `sessions_at_equal_ttft`."""
    host = replace(HOST, tokens=SMALL_HOST_TOKENS) if scenario == "small-host" else HOST
    tiers, fast = (host, DISK), (host, replace(DISK, bytes_per_s=FAST_RATE))
    pool = (replace(host, name="pool", latency_s=0.002, shared=True), replace(DISK, name="pool_disk", shared=True))
    few = config
    if scenario == "asked":
        few = replace(config, workers=max(1, config.workers // FEWER), load=config.load / FEWER)
    settled_s = min(config.warmup_s, POOL_WARMUP_S)
    longer_s = config.measured_s + config.warmup_s - settled_s
    found = {
        "device": config,
        "tiers": replace(config, tiers=tiers),
        "tiers, 12 GB/s": replace(config, tiers=fast),
        "pool": replace(
            replace(config, warmup_s=settled_s, measured_s=longer_s),
            tiers=pool,
            policy="least_loaded",
            session_affinity=False,
        ),
        SEARCH: replace(few, tiers=tiers),
    }
    for retention in ("learned", "lru", "oracle"):
        found[f"few: device, {retention}"] = replace(few, retention=retention)
        found[f"few: tiers, {retention}"] = replace(few, tiers=tiers, retention=retention)
    return found


def run(trace: TrafficTrace, job: Job) -> dict[str, Any]:
    began_s = time.process_time()
    if job.cell == SEARCH:
        found = sessions_at_equal_ttft(trace, job.config)
    else:
        found = simulate(trace, job.config).figures()
    return {**found, "cpu_s": round(time.process_time() - began_s, 1)}


def sessions_at_equal_ttft(trace: TrafficTrace, config: SimulationConfig) -> dict[str, Any]:
    """The greatest multiple of the load that was tried at which p90 TTFT is no longer than that of device memory alone
    at the load itself. Every run halves what is left between those that were and those that were not."""
    base = simulate(trace, replace(config, tiers=())).figures()
    (times, step), best, tried = MULTIPLES, 1.0, {}
    requests = 1.0
    for _ in range(MAX_RUNS):
        figures = simulate(trace, replace(config, load=times * config.load)).figures()
        tried[times] = figures["ttft_p90_s"]
        if figures["ttft_p90_s"] <= base["ttft_p90_s"]:
            best, requests = times, figures["requests"] / base["requests"]
            times += step
        else:
            times -= step
        step /= 2
    return {"device_p90_s": base["ttft_p90_s"], "sessions": best, "requests": round(requests, 3), "tried": tried}


_trace: TrafficTrace | None = None  # inherited by the processes


def _run(job: Job) -> dict[str, Any]:
    assert _trace is not None
    return run(_trace, job)


def run_all(trace: TrafficTrace, jobs: Iterable[Job], n_processes: int) -> Iterable[tuple[Job, dict[str, Any]]]:
    global _trace
    _trace = trace
    if n_processes == 1:
        yield from ((job, _run(job)) for job in jobs)
        return
    with ProcessPoolExecutor(n_processes, multiprocessing.get_context("fork")) as pool:
        found: list[tuple[Job, Future[dict[str, Any]]]] = [(job, pool.submit(_run, job)) for job in jobs]
        for job, future in found:
            yield job, future.result()


# --- report ----------------------------------------------------------------------------------------------------------


def mean_and_range(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else f"{mean:.3f}"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    rows = {cell: seeds for cell, seeds in found.items() if cell != SEARCH}
    tiers = sorted({key for seeds in rows.values() for key in seeds[0] if key[:4] == "hit_" and key != "hit_ratio"})
    head = [*COLUMNS, *tiers]
    lines = [
        [cell, *(mean_and_range([row[key] for row in seeds]) if key in seeds[0] else "" for key in head)]
        for cell, seeds in rows.items()
    ]
    text = markdown(["", *head], lines)
    for row in found.get(SEARCH, ()):
        text += f"\nSessions at {row['device_p90_s']} s: {row['sessions']} times, requests {row['requests']} times"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_retention", description=__doc__)
    add = parser.add_argument
    add("--traces", type=Path, help="folder with the trace (default: synthetic traffic)")
    add("--part", choices=("all", "tuning", "held-out"), default="held-out", help="which sessions")
    add("--scenario", choices=tuple(SCENARIOS), default="asked", help="; ".join(map(": ".join, SCENARIOS.items())))
    add("--cells", default="all", help="which, with semicolons")
    add("--workers", type=int, help="default: 64, in other scenarios than the asked one 16")
    add("--load", type=float, help="session starts per second (default: searched, with a quarter of the workers)")
    add("--history", type=float, help="seconds before the simulation (default: 8 hours; with pauses 24)")
    add("--warmup", type=float, default=300.0, help="seconds simulated before measuring (300)")
    add("--duration", type=float, default=300.0, help="seconds measured (300)")
    add("--seeds", type=int, default=3)
    add("--jobs", type=int, default=2, help="processes")
    add("--quick", action="store_true", help="a minute of four workers and synthetic traffic: whether the script works")
    add("--priors", action="store_true", help="print return times of the part, and end")
    add("--json", type=Path, default=Path("bench-kv-retention.json"))
    options = parser.parse_args(argv)
    if options.quick:
        options.traces, options.workers, options.seeds, options.load = None, 4, 1, 0.012
        options.history, options.warmup, options.duration = 3600.0, 20.0, 40.0
    model = with_fields(load(ENGINE), kv_tokens=DEVICE_TOKENS)
    if options.quick:
        trace = synthetic_agents(1, model.context_len, 20)
    else:
        where = SYNTHETIC["claude_code"] if options.traces is None else str(options.traces / FILES["claude_code"])
        trace = part_of(open_trace(where, 1, model.context_len), options.part)
    if options.priors:
        print(json.dumps(priors(trace), indent=1))
        return 0
    if options.scenario == "pauses":
        trace = with_pauses(trace)
    config = SimulationConfig(
        model=model,
        load=options.load or 1.0,
        workers=options.workers or (64 if options.scenario == "asked" else 64 // FEWER),
        history_s=options.history or (24 if options.scenario == "pauses" else 8) * 3600.0,
        warmup_s=options.warmup,
        measured_s=options.duration,
        session_affinity=True,
    )
    if options.load is None:
        few = max(1, config.workers // FEWER)
        config = replace(
            config, load=load_at_utilization(trace, replace(config, workers=few), BUSY) * config.workers / few
        )
    every = cells(config, options.scenario)
    names = every if options.cells == "all" else [cell.strip() for cell in options.cells.split(";")]
    jobs = [Job(cell, seed, replace(every[cell], seed=seed)) for seed in range(1, options.seeds + 1) for cell in names]
    found: dict[str, list[dict[str, Any]]] = {cell: [] for cell in names}
    facts = {"engine": ENGINE, "part": options.part, "scenario": options.scenario, "load": config.load}
    for job, figures in run_all(trace, jobs, options.jobs):
        found[job.cell].append(figures)
        print(job.cell, job.seed, figures, flush=True)
        options.json.write_text(json.dumps({**facts, "cells": found}, indent=1) + "\n")
    print(
        f"\n{options.scenario}, {config.load:.4f} session starts per second, {config.workers} workers\n{table(found)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
