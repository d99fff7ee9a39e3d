"""Fit the simulator's coefficients from runs of the real engine: `python -m benchmarks.fit_engine`.

On a CPU it starts `emberline serve` with workers of one thread, measures prompts and batches of several sizes one by
one over HTTP, and fits. `--figures` fits from figures that were measured on another machine (JSON; see fit_h200.json).
`--check` replays a small trace on the same server right after, simulates it, and compares times to the first token.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks import emberline_contender, fit_check
from benchmarks.client import Reply
from benchmarks.contender import Setup
from benchmarks.process import Interference, Process, ended_by_sigterm, free_port
from benchmarks.prompts import Prompts
from benchmarks.workloads import Target, ask, first_token
from emberline.simulator.coefficients import Coefficients

PROMPTS = (64, 150, 300, 600, 1200, 2000)
STREAMS = ((1, 100), (1, 1200), (2, 300), (4, 300))  # (streams, prompt tokens)
WORKERS = 2
REPLY = 48  # tokens of them
ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Observation:
    """A measured time and its terms in the step-time model."""

    seconds: float
    steps: float = 0.0
    rows: float = 0.0
    context: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0
    requests: float = 0.0

    @property
    def terms(self) -> list[float]:
        return [self.steps, self.rows, self.context, self.tokens, self.pairs, self.requests]


def prompt(seconds: float, n: int, start: int, budget: int, tile: int = 1, requests: float = 1.0) -> Observation:
    """A single prompt of which n tokens after the first `start` were computed."""
    steps, tiled = -(-n // budget), -(-n // tile) * tile
    return Observation(seconds, steps=steps, tokens=tiled, pairs=n * (start + n / 2), requests=requests)


def step(seconds: float, streams: int, context: float) -> Observation:
    """A decode step of `streams` sequences with the given context each."""
    return Observation(seconds, steps=1, rows=streams, context=streams * context)


def fit(observations: Sequence[Observation]) -> tuple[list[float], list[float]]:
    """(coefficients, relative errors): least squares of relative errors, none below zero."""
    terms = np.array([o.terms for o in observations]) / np.array([[o.seconds] for o in observations])
    kept = list(range(terms.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(terms[:, kept], np.ones(len(observations)), rcond=None)
        if (solved >= 0).all():
            break
        kept.pop(int(np.argmin(solved * terms[:, kept].max(axis=0))))
    found = [0.0] * terms.shape[1]
    for place, value in zip(kept, solved):
        found[place] = float(value)
    return found, [float(error) for error in terms @ np.array(found) - 1]


def coefficients(observations: Sequence[Observation], **facts: Any) -> Coefficients:
    (step_s, row_s, context_s, token_s, pair_s, request_s), errors = fit(observations)
    for observation, error in zip(observations, errors):
        terms = ", ".join(f"{value:g}" for value in observation.terms)
        print(f"  {observation.seconds * 1e3:10.2f} ms  fitted {error:+7.1%}  ({terms})", flush=True)
    return Coefficients(
        step_s=step_s,
        row_s=row_s,
        context_s=context_s,
        token_s=token_s,
        pair_s=pair_s,
        request_s=request_s,
        **facts,
    )


def from_figures(path: Path) -> Coefficients:
    """Of a JSON file: {facts, prompts: [[tokens, seconds]], steps: [[streams, context, seconds]]}."""
    figures = json.loads(path.read_text())
    facts = figures["facts"]
    budget, tile = facts["token_budget"], facts["tile"]
    seen = [prompt(seconds, n, 0, budget, tile, requests=0) for n, seconds in figures["prompts"]]
    seen += [step(seconds, streams, context) for streams, context, seconds in figures["steps"]]
    return coefficients(seen, **facts)


async def measure(targets: Sequence[Target], prompts: Prompts, repeats: int) -> list[Observation]:
    """Medians of the repeats, on all servers concurrently, as workers run in production."""
    found = []
    for n in PROMPTS:
        replies = [reply for _ in range(repeats) for reply in await _each(targets, prompts, n, 1)]
        computed = replies[-1].prompt_tokens - replies[-1].cached_tokens
        seconds = median(reply.ttft_s for reply in replies)
        found.append(prompt(seconds, computed, replies[-1].cached_tokens, fit_check.TOKEN_BUDGET))
    for n_streams, n in STREAMS:
        paces = []
        for _ in range(repeats):
            replies = await _each(list(targets) * n_streams, prompts, n, REPLY)
            for first in range(len(targets)):  # all streams of a server decode once the last has begun
                last = max(replies[first :: len(targets)], key=lambda reply: reply.first_at)
                paces.append(last.decode_s / (REPLY - 1))
        found.append(step(median(paces), n_streams, n + REPLY / 2))
    return found


async def _each(targets: Sequence[Target], prompts: Prompts, n: int, n_output: int) -> list[Reply]:
    return await asyncio.gather(*(ask(target, [prompts.user(n)], n_output) for target in targets))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_engine", description=__doc__)
    parser.add_argument("--figures", type=Path, help="fit from measured figures (JSON) instead of a run here")
    parser.add_argument("--out", type=Path, help="where to write the coefficients (default: print them)")
    parser.add_argument("--check", action="store_true", help="then replay and simulate a small trace, and compare")
    parser.add_argument("--repeats", type=int, default=3, help="of every measurement (3)")
    parser.add_argument("--seed", default="fit", help="of the prompts and the replay")
    parser.add_argument("--json", type=Path, help="write the check's figures there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.figures:
        _keep(from_figures(options.figures), options.out)
        return 0
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    gguf = emberline_contender.default_gguf()
    cache = Path(os.environ.get("EMBERLINE_PEERS", str(ROOT / ".cache" / "peers")))
    cache.mkdir(parents=True, exist_ok=True)
    source = emberline_contender.prompts_of(gguf, options.seed)
    print(f"load before {os.getloadavg()[0]:.2f}", flush=True)
    with ExitStack() as stack:
        targets, servers = zip(*[await _served(stack, gguf, cache, source, number, 1) for number in range(WORKERS)])
        others = Interference(servers[0])
        observations = await measure(targets, source("fit"), options.repeats)
        share = others.share - 0.5  # the other server's share is expected
        print(f"fitted from {len(observations)} measurements; others used {max(0.0, share):.0%} of this machine")
    model = coefficients(
        observations,
        name="cpu-smollm2",
        source="SmolLM2-135M Q4_1, workers of one thread on two Neoverse-N1 cores, emberline serve over HTTP",
        kv_tokens=1 << 16,
        kv_bytes=23040 * 2,
        max_running=64,
        token_budget=fit_check.TOKEN_BUDGET,
        context_len=8192,
        paced=False,
    )
    _keep(model, options.out)
    if not options.check:
        return 0
    with ExitStack() as stack:
        target, server = await _served(stack, gguf, cache, source, WORKERS, WORKERS)
        others = Interference(server)
        report = await fit_check.compare(target, source("check"), model, options.seed)
        report["others_share"], report["load"] = round(others.share, 3), os.getloadavg()[0]
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["within"] else 1


async def _served(
    stack: ExitStack, gguf: Path, cache: Path, source: emberline_contender.PromptsOf, number: int, replicas: int
) -> tuple[Target, Process]:
    """A warm server with single-threaded workers and its own data folder."""
    home, port = cache / f"fit-{number}", free_port()
    home.mkdir(exist_ok=True)
    contender = emberline_contender.contender(Setup(gguf.resolve(), home, print))
    command = [*contender.command(port, 1), "--replicas", str(replicas)]
    command[command.index("--threads") + 1] = "1"
    server = stack.enter_context(Process(command, cache / "logs" / f"fit-{number}.log", {}))
    target, warm = Target(port, contender.model), source(f"warm-up {number}")
    await first_token(target, warm, time.perf_counter() + 180, server.check)
    await asyncio.gather(*(ask(target, [warm.user(256)], 16) for _ in range(2 * replicas)))
    return target, server


def _keep(model: Coefficients, path: Path | None) -> None:
    text = msgspec.json.format(msgspec.json.encode(model), indent=1).decode() + "\n"
    print(text)
    if path is not None:
        path.write_text(text)


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
