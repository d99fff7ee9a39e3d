"""Published claims beside our figures, and where each of ours is from: `make claims`.

    python -m benchmarks.claims                    all parts, up to 30 minutes on two cores
    python -m benchmarks.claims --quick            small traffic: whether it works; its figures should not be stated
    python -m benchmarks.claims --only plan,cost   some parts

Parts: `plan` (memory of layouts), `cost` (prices), `simulator` (coefficients of one H200), `fleet` (the real small
model on this machine: roles, tiers, drafts, a full queue, a kill, the session header, and `emberline tune` between two
runs) and `tools` (speculation on tool calls). Figures of a GPU are of other commands, which docs/claims.md names.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import claims_fleet
from benchmarks.claims_fleet import QUICK, Run, Shape
from benchmarks.emberline_contender import default_gguf, prompts_of
from benchmarks.process import ended_by_sigterm
from benchmarks.report import markdown
from emberline.simulator import coefficients
from emberline.simulator.coefficients import FixedTokenBudget
from emberline.simulator.experiment import SimulationConfig
from emberline.simulator.recorded_traffic import RecordedRow, build_recorded_trace
from emberline.simulator.simulation import simulate
from emberline.simulator.trace_sources import open_trace
from emberline.simulator.tuning import Setting, TunedFleet, Tuner

GIB = 1 << 30
# Dollars per million tokens: input, cached input, output. Kimi K2.5 on Workers AI, and a proprietary frontier model's
# list price, which --proprietary replaces.
KIMI, PROPRIETARY = (0.60, 0.10, 3.00), (3.00, 0.30, 15.00)
MISTUNED = (3, 1)  # prefill workers of four, where none would be best
STRAINING_LOAD = 1.4  # of a day of chats: what four workers do not serve within their targets, mistuned
CPU, SIMULATOR, PLAN, PRICES = "real model on this CPU", "simulator, H200 coefficients", "plan", "prices"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    claim: str
    theirs: str
    ours: str
    source: str


def fleet(options: argparse.Namespace) -> list[Figure]:
    """Five runs of the whole system: without roles, with them, with the session header, with a kill, and tuned."""
    shape = QUICK if options.quick else Shape(agents=options.agents)
    gguf = default_gguf()
    prompts = prompts_of(gguf, "claims")
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="emberline-claims-") as name:
        folder = Path(name)
        (folder / "models").mkdir()
        (folder / "models" / gguf.parent.name).symlink_to(gguf.parent)

        def run(title: str, words: Sequence[str], header: bool, kills: bool = False) -> Run:
            with claims_fleet.serving(folder, words, f"{title}.log") as server:
                measured = asyncio.run(claims_fleet.measure(server, shape, prompts, title, header, kills))
                if title == "header":
                    runs["tune"] = _tune(server.port, folder)  # type: ignore[assignment]
            runs[title] = measured
            print(f"{title}: {measured}", file=sys.stderr, flush=True)
            return measured

        alike = claims_fleet.flags(False, options.workers)
        split = claims_fleet.flags(True, options.workers)
        before = run("aggregated", alike, header=False)
        after = run("disaggregated", split, header=False)
        with_header = run("header", split, header=True)
        killed = run("killed", split, header=True, kills=True)
        tune: Any = runs.pop("tune")
        tuned = run("tuned", _tuned_flags(split, tune), header=True)
    _keep(options, "fleet", {title: asdict(each) for title, each in runs.items()} | {"tune": tune})
    n = options.workers
    return [
        Figure("p90 TTFT, disaggregated", "lower", f"{after.ttft_p90_s} s; {n} alike: {before.ttft_p90_s} s", CPU),
        Figure(
            "p90 time per token, disaggregated",
            "~100 ms → 20–30 ms",
            f"{before.token_p90_ms} → {after.token_p90_ms} ms",
            CPU,
        ),
        Figure(
            "input from the cache, session header off → on",
            "60 → 80 %",
            f"{after.hit_ratio:.1%} → {with_header.hit_ratio:.1%}",
            CPU,
        ),
        Figure("cold start", "< 20 s", f"{before.ready_s} s to the first reply, {n} workers", CPU),
        Figure(
            "async requests",
            "usually within 5 minutes",
            f"{killed.jobs_done} of {shape.jobs} beside agents and a kill, p90 {killed.job_p90_s} s",
            CPU,
        ),
        Figure("replies lost to `kill -9`", "–", f"{killed.lost} of {killed.replies + killed.lost}", CPU),
        Figure(
            "retuned to the traffic",
            "3×",
            f"predicted gain {tune['gain']:.0%} ± {tune['uncertainty']:.0%}; p90 TTFT {with_header.ttft_p90_s} → "
            f"{tuned.ttft_p90_s} s, time per token {with_header.token_p90_ms} → {tuned.token_p90_ms} ms",
            CPU,
        ),
    ]


def _tune(port: int, folder: Path) -> dict[str, Any]:
    """Ask `emberline tune` for settings, after the traffic of three runs."""
    words = [sys.executable, "-m", "emberline.cli.main", "tune", "--json", "--hours", "1"]
    words += ["--port", str(port), "--data-dir", str(folder), "--itl", "0.1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"tune: {done.stderr.strip()}", file=sys.stderr, flush=True)
        return {"gain": 0.0, "uncertainty": 0.0, "worth_it": False, "changes": {}, "problem": done.stderr.strip()}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


_FLAG = {
    "engine.replicas": "--replicas",
    "engine.token_budget": "--token-budget",
    "engine.speculation": "--speculation",
}


def _tuned_flags(words: Sequence[str], tune: dict[str, Any]) -> list[str]:
    """Flags of a server with what was proposed."""
    changes = tune["changes"] if tune["worth_it"] else {}
    found = list(words)
    if "engine.prefill_workers" in changes:
        for flag in ("--prefill-workers", "--decode-workers"):
            place = found.index(flag)
            del found[place : place + 2]
        if changes["engine.prefill_workers"]:
            found += ["--prefill-workers", str(changes["engine.prefill_workers"])]
            found += ["--decode-workers", str(changes["engine.decode_workers"])]
    for key, flag in _FLAG.items():
        if changes.get(key):
            found += [flag, str(changes[key])]
    return found


def simulator(options: argparse.Namespace) -> list[Figure]:
    """Roles, the session header and tuning at the size of a small fleet, with step times of one H200."""
    model = coefficients.load("h200-llama-8b")
    seconds = 120.0 if options.quick else 600.0
    trace = open_trace(options.trace, 1, model.context_len)
    load = 0.03 if not trace.shared else 1.0

    def run(**fields: Any) -> dict[str, Any]:
        config = SimulationConfig(model=model, load=load, warmup_s=seconds / 2, measured_s=seconds, **fields)
        return simulate(trace, config).figures()

    alike = run(workers=8, session_affinity=True, prefill_policy=FixedTokenBudget(model.token_budget))
    paced = run(workers=8, session_affinity=True)
    split = run(workers=0, prefill_workers=4, decode_workers=4, session_affinity=True)
    off = run(workers=8, policy="plain_least_loaded")
    recognised = run(workers=8)
    on = paced
    gain = _retuned(options)
    _keep(
        options,
        "simulator",
        {"alike": alike, "paced": paced, "split": split, "off": off, "recognised": recognised, "tuned": gain},
    )
    return [
        Figure(
            "p90 TTFT, disaggregated",
            "lower",
            f"{alike['ttft_p90_s']:.2f} → {split['ttft_p90_s']:.2f} s (8 alike → 4 + 4); 8 alike with chunks that keep "
            f"to the latency target {paced['ttft_p90_s']:.2f} s",
            SIMULATOR,
        ),
        Figure(
            "p90 inter-token latency, disaggregated",
            "~100 ms → 20–30 ms",
            f"{alike['interval_p90_ms']:.1f} → {split['interval_p90_ms']:.1f} ms (p99 {alike['interval_p99_ms']:.0f} → "
            f"{split['interval_p99_ms']:.0f}); with such chunks {paced['interval_p90_ms']:.1f} ms",
            SIMULATOR,
        ),
        Figure(
            "input from the cache, session header off → on",
            "60 → 80 %",
            f"no affinity at all {off['hit_ratio']:.1%}; ours without the header {recognised['hit_ratio']:.1%}, "
            f"with it {on['hit_ratio']:.1%}; at most {on['ideal_hit_ratio']:.1%}",
            SIMULATOR,
        ),
        Figure(
            "retuned to the traffic",
            "3×",
            "p90 strain on the next half of the trace: "
            + ", ".join(
                f"{name} ÷ {each['before'] / each['after']:.1f} (best of a search there: ÷ "
                f"{each['before'] / each['best']:.1f})"
                for name, each in gain.items()
            ),
            SIMULATOR,
        ),
    ]


def _retuned(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Fleets mistuned on purpose: tuned on the first half of a day of chats, judged on the second.

    The load is one that this fleet does not serve within its targets. Below it token budgets tie: the p90 of a few
    hundred requests differs by 15 % between them by chance, and the best one on a half is not the best on the other.
    """
    model = coefficients.load("h200-llama-8b")
    trace = open_trace("chats", 2, model.context_len)
    span_s = 60.0 if options.quick else 100.0
    config = SimulationConfig(model=model, load=STRAINING_LOAD, workers=4, warmup_s=0.0, measured_s=2 * span_s)
    simulated = simulate(trace, config)
    rows = [
        RecordedRow(
            account="a",
            session=str(each.session),
            arrival_s=each.arrival_s,
            first_token_s=each.first_token_s,
            end_s=each.end_s,
            input_tokens=each.n_prompt,
            cached_tokens=each.cached_tokens,
            output_tokens=each.n_output,
        )
        for each in simulated.requests
        if each.end_s > 0
    ]
    first = [row for row in rows if row.arrival_s < span_s]
    second = [row for row in rows if row.arrival_s >= span_s]
    fleet = TunedFleet(models={"": model}, workers={"": 4})
    tuner, judge = (Tuner(build_recorded_trace(half, model.context_len), fleet) for half in (first, second))
    settings = [Setting(prefill_workers=n, token_budget=b) for n in range(4) for b in (512, 2048, 8192)]
    best = min(judge.outcome(each).strain for each in settings)
    gains = {}
    for n_prefill in MISTUNED:
        now = Setting(prefill_workers=n_prefill, token_budget=256)
        after = judge.outcome(tuner.propose(now).best.setting).strain
        gains[f"{n_prefill} of 4 for prompts"] = {"before": judge.outcome(now).strain, "after": after, "best": best}
    return gains


def cost(options: argparse.Namespace) -> list[Figure]:
    """Cost of an agent's day: a trace's tokens at two price lists, with the cache and without."""
    model = coefficients.load("h200-llama-8b")
    trace = open_trace(options.trace, 1, model.context_len)
    config = SimulationConfig(
        model=model, load=0.008 if not trace.shared else 0.5, workers=8, warmup_s=300.0, measured_s=300.0
    )
    found = simulate(trace, config)
    done = [each for each in found.requests if each.first_token_s >= 0]
    n_prompt = sum(each.n_prompt for each in done)
    tokens = n_prompt, sum(each.cached_tokens for each in done), sum(each.n_output for each in done)
    prices = tuple(float(part) for part in options.proprietary.split(","))
    kimi, uncached = _dollars(tokens, KIMI), _dollars((tokens[0], 0, tokens[2]), KIMI)
    theirs = _dollars(tokens, prices)
    _keep(options, "cost", {"tokens": tokens, "kimi": kimi, "kimi_uncached": uncached, "proprietary": theirs})
    hit = tokens[1] / max(1, n_prompt)
    return [
        Figure(
            "an agent's tokens, against a proprietary model's price list",
            "−77 %",
            f"−{1 - kimi / theirs:.0%} at ${KIMI[0]}/{KIMI[1]}/{KIMI[2]} against ${'/'.join(f'{p:g}' for p in prices)}",
            PRICES,
        ),
        Figure("the same, against no cache", "–", f"−{1 - kimi / uncached:.0%} with {hit:.1%} of input cached", PRICES),
    ]


def _dollars(tokens: tuple[int, int, int], prices: Sequence[float]) -> float:
    n_prompt, n_cached, n_output = tokens
    return ((n_prompt - n_cached) * prices[0] + n_cached * prices[1] + n_output * prices[2]) / 1e6


def plan(options: argparse.Namespace) -> list[Figure]:
    """KV room of two large models, as the plan has it."""
    found = []
    for model, gpus, layout, theirs in (
        ("llama-4-scout", "2xH200", "tp=2", "> 56 GiB"),
        ("kimi-k2.5", "8xH100", "tp=8,dcp=8", "> 30 GiB"),
    ):
        words = [
            sys.executable,
            "-m",
            "emberline.cli.main",
            "plan",
            model,
            "--gpus",
            gpus,
            "--layout",
            layout,
            "--json",
        ]
        said = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout)
        room = said["recommended"]["kv_bytes"] / GIB
        found.append(Figure(f"KV room of {model} on {gpus}", theirs, f"{room:.1f} GiB ({layout})", PLAN))
    _keep(options, "plan", [asdict(each) for each in found])
    return found


def tools(options: argparse.Namespace) -> list[Figure]:
    """Speculation on tool calls: the tokens per second with drafts, by those without."""
    target = options.json.with_suffix(".tools.json") if options.json else Path(tempfile.mkdtemp()) / "tools.json"
    words = [sys.executable, "-m", "benchmarks.speculation", "--settings", "off,auto", "--json", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200)
    if not target.exists():
        raise RuntimeError(f"benchmarks.speculation failed: {done.stderr[-500:]}")
    said = json.loads(target.read_text())["tool_calls"]  # its exit status judges random tokens as well
    off, auto = (said[name]["tokens_per_s"] for name in ("off", "auto"))
    _keep(options, "tools", said)
    ours = f"{auto / off:.2f} times the tokens per second ({off:.1f} → {auto:.1f})"
    return [Figure("speculation on tool calls", "faster", ours, CPU)]


PARTS: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
    "plan": plan,
    "cost": cost,
    "simulator": simulator,
    "fleet": fleet,
    "tools": tools,
}


def _keep(options: argparse.Namespace, part: str, figures: Any) -> None:
    """Write what a part has measured at once: a later one may fail."""
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps({**known, part: figures}, indent=1) + "\n")


def report(found: Sequence[Figure]) -> str:
    """The table of claims."""
    rows = [[each.claim, each.theirs, each.ours, each.source] for each in found]
    return markdown(("claim", "published", "ours", "from"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default=",".join(PARTS), metavar="LIST", help=f"parts, of {', '.join(PARTS)}")
    add("--quick", action="store_true", help="small traffic: whether it works, not how fast")
    add("--workers", type=int, default=4, metavar="N", help="of the fleet, half of them for prefill (default 4)")
    add("--agents", type=int, default=Shape().agents, metavar="N", help=f"at once (default {Shape().agents})")
    add("--trace", default="agents", help="of the simulator and the cost: a file, or agents (default)")
    add("--proprietary", default=",".join(map(str, PROPRIETARY)), metavar="IN,CACHED,OUT", help="$ per million tokens")
    add("--json", type=Path, metavar="FILE", help="write all figures there, part by part")
    options = parser.parse_args(argv)
    ended_by_sigterm()
    found: list[Figure] = []
    for part in options.only.split(","):
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: {', '.join(PARTS)}")
        began_s = time.monotonic()
        found += PARTS[part](options)
        print(f"{part}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
