"""Inter-token latency while long prompts arrive: prefill/decode disaggregation against one worker, on a CPU.

    python -m benchmarks.disaggregation            five runs of each, about five minutes; on an otherwise idle machine
    python -m benchmarks.disaggregation --quick    one short run of each: whether it works, not how fast

Disaggregated: a prefill worker on the first core, together with HTTP and the clients, and a decode worker alone on the
second. Aggregated: one worker with two threads on both cores. Each run is measured twice, without and with prompts that
arrive one after another, on the same processes with the same pinning.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.cpu_usage import Meter, family
from benchmarks.emberline_contender import PromptsOf, default_gguf, prompts_of
from benchmarks.process import Process, ended_by_sigterm, free_port
from benchmarks.prompts import Message
from benchmarks.report import markdown

LIMIT = 1.2  # times the ITL without prompts
START_S = 300.0
MODES = {
    "disaggregated": ["--prefill-workers", "1", "--decode-workers", "1"],
    "aggregated": ["--replicas", "1", "--threads", "2"],
}


@dataclass(frozen=True)
class Shape:
    repeats: int = 5
    streams: int = 4
    tokens: int = 160  # of each
    prompt_tokens: int = 2000  # of those that arrive


QUICK = Shape(repeats=1, streams=2, tokens=24, prompt_tokens=600)


@dataclass
class TokenLatency:
    """ITL in milliseconds: the 90th percentile of all gaps, and of the streams' means."""

    gap_p90: float
    mean_p90: float
    n_prompts: int = 0  # computed in the meantime


async def _follow(port: int, messages: Sequence[Message], n_tokens: int) -> list[float]:
    """The arrival times of a reply's chunks."""
    body = json.dumps(
        {
            "model": "smollm2",
            "messages": messages,
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read()!r}")
    arrived, ended = [], False
    while line := await reader.readline():
        ended = ended or line.startswith(b"data: [DONE]")
        if line.startswith(b"data: {") and b'"content"' in line:
            arrived.append(time.perf_counter())
    writer.close()
    if not ended:
        raise RuntimeError("a stream broke off")
    return arrived


async def _measure(port: int, shape: Shape, prompts: PromptsOf, name: str, loaded: bool) -> TokenLatency:
    """Run all streams. Under load, the first long prompt is sent before them, and each next one as the last ends."""
    texts = prompts(f"streams {name}")
    streams = [[texts.user(60)] for _ in range(shape.streams)]
    n_prompts, over = 0, False

    async def arrive() -> None:
        nonlocal n_prompts
        long = prompts(f"prompts {name}")
        for _ in itertools.takewhile(lambda _: not over, itertools.count()):
            await _follow(port, [long.user(shape.prompt_tokens)], 1)
            n_prompts += 1

    arrivals = asyncio.create_task(arrive()) if loaded else None
    await asyncio.sleep(0.3)
    replies = await asyncio.gather(*(_follow(port, messages, shape.tokens) for messages in streams))
    over = True
    if arrivals is not None:
        await arrivals
    gaps = [1e3 * (b - a) for times in replies for a, b in itertools.pairwise(times)]
    means = [1e3 * (times[-1] - times[0]) / (shape.tokens - 1) for times in replies]
    return TokenLatency(_p90(gaps), _p90(means), n_prompts)


def _p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1]


@contextmanager
def _server(mode: str, folder: Path) -> Iterator[int]:
    port = free_port()
    words = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", str(port), "--data-dir", str(folder)]
    words += ["--kv-bytes", "512M", "--log-level", "warning", *MODES[mode]]
    with Process(words, folder / f"{mode}.log") as process:
        _wait(port)
        if mode == "disaggregated":
            _pin(process.pid, sorted(os.sched_getaffinity(0))[:1])
        yield port


def _wait(port: int) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def _pin(pid: int, cores: Sequence[int]) -> None:
    """The threads of the process, not its children: the workers have their own cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


async def _runs(mode: str, shape: Shape, prompts: PromptsOf, folder: Path) -> list[tuple[TokenLatency, TokenLatency]]:
    found = []
    before = os.sched_getaffinity(0)
    with _server(mode, folder) as port:
        if mode == "disaggregated":
            os.sched_setaffinity(0, sorted(before)[:1])
        try:
            await _measure(port, QUICK, prompts, f"warm {mode}", True)
            others = Meter(family(os.getpid()))
            began_s = time.monotonic()
            for repeat in range(shape.repeats):
                pair = [await _measure(port, shape, prompts, f"{mode} {repeat} {on}", on) for on in (False, True)]
                found.append((pair[0], pair[1]))
                print(f"{mode} {repeat}: quiet {pair[0]}, loaded {pair[1]}", file=sys.stderr, flush=True)
            busy = others.read(time.monotonic() - began_s)[1]
            print(f"{mode}: other processes kept {busy:.2f} cores busy meanwhile", file=sys.stderr, flush=True)
        finally:
            os.sched_setaffinity(0, before)
    return found


def summary(runs: Sequence[tuple[TokenLatency, TokenLatency]]) -> dict[str, float]:
    """Medians over the runs; ratios are per run, each with its own baseline."""
    figures = {}
    for key in ("gap_p90", "mean_p90"):
        figures[f"{key}_quiet_ms"] = median(getattr(quiet, key) for quiet, _ in runs)
        figures[f"{key}_loaded_ms"] = median(getattr(loaded, key) for _, loaded in runs)
        figures[f"{key}_ratio"] = median(getattr(loaded, key) / getattr(quiet, key) for quiet, loaded in runs)
    return figures


def report(found: dict[str, dict[str, float]]) -> str:
    heads = ("", "gap p90 quiet", "with prompts", "ratio", "time per token p90 quiet", "with prompts", "ratio")
    rows = [[mode, *(f"{value:.2f}" for value in figures.values())] for mode, figures in found.items()]
    return markdown(heads, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregation", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    ended_by_sigterm()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("two cores are needed: one for each role")
    shape = QUICK if args.quick else Shape()
    gguf = default_gguf()
    prompts = prompts_of(gguf, "roles")
    runs: dict[str, list[tuple[TokenLatency, TokenLatency]]] = {}
    with tempfile.TemporaryDirectory(prefix="emberline-roles-") as folder:
        (Path(folder) / "models").mkdir()
        (Path(folder) / "models" / gguf.parent.name).symlink_to(gguf.parent)
        for mode in MODES:
            of_mode = shape if mode == "disaggregated" else replace(shape, tokens=min(48, shape.tokens))  # far slower
            runs[mode] = asyncio.run(_runs(mode, of_mode, prompts, Path(folder)))
    found = {mode: summary(pairs) for mode, pairs in runs.items()}
    print(report(found))
    for key, name in (("mean_p90", "time per token p90"), ("gap_p90", "p90 of single gaps")):
        ratio = found["disaggregated"][f"{key}_ratio"]
        verdict = "met" if ratio <= LIMIT else "NOT MET"
        print(f"\ndisaggregated, {name}: {ratio:.2f} of the ITL without prompts (at most {LIMIT}): {verdict}")
    if args.json:
        args.json.write_text(json.dumps({"shape": asdict(shape), "figures": found, "runs": _plain(runs)}, indent=2))
    return 0


def _plain(runs: dict[str, list[tuple[TokenLatency, TokenLatency]]]) -> dict[str, Any]:
    return {mode: [[asdict(pace) for pace in pair] for pair in pairs] for mode, pairs in runs.items()}


if __name__ == "__main__":
    sys.exit(main())
