"""Has anything become slower? `python -m benchmarks.compare [SUITE …] [--write] [--from-json SUITE=FILE]`.

Runs the short forms of our benchmarks, turns their figures into ratios (ours over a peer, or over a calibration loop
that runs before and after each benchmark) and compares them with the file of this kind of machine in
`benchmarks/baselines/`. Prints what slipped beyond noise and exits with status 1 if anything did. `--write` records the
ratios instead; run it on a quiet machine.

`--from-json` takes a saved run in place of a new one, such as `--from-json gpu=gpu.json` for `python -m benchmarks.gpu`
on another machine; its figures are compared with those of vLLM in the same file. Several files of one suite are its
rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import baseline
from benchmarks.baseline import Ratio, Samples, Verdict
from benchmarks.gpu.report import LINES, pick
from benchmarks.report import FIGURES, OURS, RATIO_KEYS, markdown

LOOP = "calibration loop"
CONFIRMATIONS = 3  # more rounds at most of a suite that seems to have slipped, before it is said to have
ROOT = Path(__file__).resolve().parent.parent
Found = dict[str, Samples]
Report = Mapping[str, Any]


class Objects:
    """What the calibration loop works on: Python objects, as our own code does."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names = {f"key {number % 7}": number}

    def total(self, other: "Objects") -> int:
        return self.number + sum(other.names.values())


def calibrate() -> float:
    """CPU milliseconds of a fixed piece of Python, the least of several: the unit of figures without a peer."""
    took_s = []
    for _ in range(15):
        began_s = time.thread_time()
        objects = [Objects(number) for number in range(2000)]
        text = ",".join(str(one.total(two)) for one, two in zip(objects, reversed(objects)))
        assert json.loads(f"[{text}]")[0] == 1999
        took_s.append(time.thread_time() - began_s)
    return min(took_s) * 1e3


def _add(found: Found, name: str, better: str, reference: str, ours: float, theirs: float) -> None:
    samples = found.setdefault(name, Samples(better, reference))
    samples.ours.append(ours)
    samples.theirs.append(theirs)


# --- from a benchmark's JSON to samples ------------------------------------------------------------------------------


def from_cpu(found: Found, report: Report, loop_ms: float) -> None:
    """Throughput of the CPU engine over each peer's, or per calibration loop where no peer ran."""
    runs: dict[str, dict[str, list[float]]] = report["runs"]
    for figure in FIGURES:
        if figure.key not in RATIO_KEYS or not runs[OURS].get(figure.key):
            continue
        for peer, theirs in runs.items():
            if peer != OURS and theirs.get(figure.key):
                samples = found.setdefault(f"cpu: {figure.title} / {peer}", Samples(figure.better, peer))
                samples.ours += runs[OURS][figure.key]
                samples.theirs += theirs[figure.key]
        if len(runs) == 1:
            for value in runs[OURS][figure.key]:
                unit = 1 / loop_ms if figure.better == "more" else loop_ms
                _add(found, f"cpu: {figure.title}", figure.better, LOOP, value, unit)


def from_router(found: Found, report: Report, loop_ms: float) -> None:
    """CPU of a relayed request over each peer's or the loop's, and of a request to our own engine over the loop's."""
    rows = {name: row["8"]["cpu_ms"] for name, row in report["relaying"].items() if "error" not in row}
    for peer, theirs in rows.items():
        if peer not in (OURS, "direct"):
            _add(found, f"router: relayed request / {peer}", "less", peer, rows[OURS], theirs)
    if OURS in rows:
        _add(found, "router: relayed request", "less", LOOP, rows[OURS], loop_ms)
    for name, row in report["own_engine"].items():
        _add(found, f"router: own engine, {name}", "less", LOOP, row["cpu_ms"], loop_ms)


def from_gateway(found: Found, report: Report, loop_ms: float) -> None:
    """CPU of a request through a gateway over the plain relay's, and over LiteLLM's if it ran."""
    rows = {name: row["8"]["cpu_ms"] for name, row in report["servers"].items() if "error" not in row}
    ours = rows["emberline gateway"]
    _add(found, "gateway: request / relay", "less", "emberline relay", ours, rows["emberline relay"])
    _add(found, "gateway: request", "less", LOOP, ours, loop_ms)
    if "litellm" in rows:
        _add(found, "gateway: request / litellm", "less", "litellm", ours, rows["litellm"])


def from_http_frontend(found: Found, report: Report, loop_ms: float) -> None:
    """CPU of the core per request and per token."""
    for value in report["request_ms"]:
        _add(found, "http_frontend: request", "less", LOOP, value, loop_ms)
    for value in report["token_us"]:
        _add(found, "http_frontend: token", "less", LOOP, value / 1e3, loop_ms)


def from_accounts(found: Found, report: Report, loop_ms: float) -> None:
    """CPU of a request with keys, limits, prices and budgets over one without."""
    for run in report["runs"]:
        name = f"accounts: request, {run['http_workers']} HTTP workers / without keys"
        _add(found, name, "less", "without keys", run["cpu_ms"]["keys"], run["cpu_ms"]["none"])


def from_host_step(found: Found, report: Report, loop_ms: float) -> None:
    """CPU of the step loop's thread per step."""
    for run in report["runs"]["this"]:
        for name, figures in run.items():
            _add(found, f"host_step: {name}", "less", LOOP, figures["thread_us"] / 1e3, loop_ms)


def from_gpu(found: Found, report: Report, loop_ms: float) -> None:
    """Figures of the GPU engine over vLLM's in the same file; those without a peer are no ratios and are left out."""
    for line in LINES:
        ours, theirs = pick(report["emberline"], line.key), pick(report["vllm"], line.key.replace("steady_", ""))
        if ours and theirs:
            _add(found, f"gpu: {line.title} / vllm", line.better, "vllm", ours, theirs)


SUITES: dict[str, tuple[list[str], Callable[[Found, Report, float], None]]] = {
    "cpu": (["--quick", "--peers", ""], from_cpu),
    "router": (["--quick", "--peers", ""], from_router),
    "gateway": (["--quick", "--peers", ""], from_gateway),
    "http_frontend": (["--quick"], from_http_frontend),
    "accounts": (["--quick"], from_accounts),
    "host_step": (["--quick"], from_host_step),
    "gpu": ([], from_gpu),
}
HAVE_PEERS = ("cpu", "router", "gateway")


# --- running and reporting --------------------------------------------------------------------------------------------


def run_suite(name: str, peers: str, folder: Path) -> Report:
    """Run a benchmark in a process of its own and return its JSON."""
    written = folder / f"{name}.json"
    flags = [*SUITES[name][0], "--json", str(written)]
    if name in HAVE_PEERS:
        flags += ["--peers", peers]
    command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode or not written.exists():
        raise SystemExit(f"benchmarks.{name} failed with status {done.returncode}:\n{done.stdout[-3000:]}")
    return dict(json.loads(written.read_text()))


def measure(found: Found, suites: Sequence[str], rounds: int, peers: str) -> None:
    """Run every suite once per round, in turn, each between two calibrations, and add what was found."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name in suites:
                print(f"round {number + 1} of {rounds}: benchmarks.{name}", file=sys.stderr, flush=True)
                before_ms = calibrate()
                report = run_suite(name, peers, Path(folder))
                SUITES[name][1](found, report, min(before_ms, calibrate()))


def table(verdicts: Sequence[Verdict], before: Mapping[str, Ratio], now: Mapping[str, Ratio]) -> str:
    """Every figure with its baseline, the factor by which it got worse, and the noise that it is judged by."""
    rows = []
    for verdict in verdicts:
        old, new = before.get(verdict.name), now.get(verdict.name)
        cells = [f"{ratio.value:.4g} ±{ratio.spread:.0%}" if ratio else "-" for ratio in (old, new)]
        judged = f"{verdict.worse:.3f} (noise {verdict.noise:.0%})" if verdict.noise else "-"
        rows.append([verdict.name, *cells, judged, verdict.state])
    return markdown(["ratio", "recorded", "now", "worse by", ""], rows)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line: which suites to run, and which to read from files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; default: all but gpu")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each suite (3)")
    parser.add_argument("--peers", default="", help="for cpu, router and gateway, such as llama.cpp; default: none")
    parser.add_argument("--from-json", action="append", default=[], metavar="SUITE=FILE", help="a saved run")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="instead of that of this kind of machine")
    parser.add_argument("--write", action="store_true", help="record the ratios")
    options = parser.parse_args(argv)
    options.saved = {}  # files by suite
    for given in options.from_json:
        suite, _, file = given.partition("=")
        if suite not in SUITES or not Path(file).is_file():
            parser.error(f"--from-json {given}: needs SUITE=FILE, a suite of {', '.join(SUITES)} and its JSON")
        options.saved.setdefault(suite, []).append(Path(file))
    unknown = set(options.suites) - set(SUITES)
    if unknown:
        parser.error(f"unknown suites {', '.join(sorted(unknown))}; known: {', '.join(SUITES)}")
    options.suites = options.suites or list(options.saved) or [name for name in SUITES if name != "gpu"]
    if "gpu" in options.suites and "gpu" not in options.saved:
        parser.error("run `python -m benchmarks.gpu --vllm DIR` on the GPU first, then give --from-json gpu=gpu.json")
    if "gpu" in options.saved and set(options.suites) | set(options.saved) != {"gpu"}:
        parser.error("gpu has a file of its own, named by the GPU: compare it alone")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    about: dict[str, Any] = {"recorded": datetime.now(UTC).date().isoformat()}
    if "gpu" in options.saved:
        device = json.loads(options.saved["gpu"][0].read_text())["emberline"]["device"]
        path = options.baseline or baseline.gpu_baseline(device)
        about["device"] = device
    else:
        path = options.baseline or baseline.cpu_baseline()
        about |= {"cpu": baseline.cpu_name(), "cores": len(os.sched_getaffinity(0))}
        about["load_1_min"] = round(os.getloadavg()[0], 1)
    suites = list(dict.fromkeys([*options.suites, *options.saved]))
    found: Found = {}
    for name, files in options.saved.items():
        for file in files:
            SUITES[name][1](found, json.loads(file.read_text()), calibrate())
    due = [name for name in suites if name not in options.saved]
    measure(found, due, options.rounds, options.peers)
    before = {name: ratio for name, ratio in baseline.read(path).items() if name.partition(":")[0] in suites}
    for attempt in range(CONFIRMATIONS + 1):
        now = {name: samples.ratio() for name, samples in found.items()}
        verdicts = baseline.compare(before, now)
        suspects = {verdict.name.partition(":")[0] for verdict in verdicts if verdict.state == "slipped"}
        again = [name for name in due if name in suspects and not options.write]
        if not again or attempt == CONFIRMATIONS:
            break
        measure(found, again, 1, options.peers)  # noise only makes a round worse, so one good round clears a suspect
    print(table(verdicts, before, now))
    if options.write:
        baseline.write(path, now, suites, about)
        print(f"\nrecorded in {path}")
        return 0
    if not before:
        print(f"\nnothing is recorded for this kind of machine: `--write` makes {path}")
    slipped = [verdict for verdict in verdicts if verdict.state == "slipped"]
    for verdict in slipped:
        print(f"SLIPPED: {verdict.name} is {verdict.worse:.2f} times worse; noise is {verdict.noise:.0%}")
    return 1 if slipped else 0


if __name__ == "__main__":
    sys.exit(main())
