"""CPU cost of the HTTP frontend: `python -m benchmarks.http_frontend`.

`emberline serve` over a stand-in engine; measured is the CPU time of the core process alone, including tokenizing,
detokenizing, the ledger and HTTP, against our targets.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks import emberline_contender
from benchmarks.client import Reply
from benchmarks.process import Process, cpu_s, ended_by_sigterm, free_port
from benchmarks.prompts import Prompts
from benchmarks.report import markdown, spread
from benchmarks.workloads import Target, ask, first_token
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull

REQUEST_LIMIT_MS = 2.0
TOKEN_LIMIT_US = 60.0
PROMPT_BYTES = 2048
STREAMS = 8
STREAM_TOKENS = 256
STEP_MS = 10.0  # 8 streams at 100 steps a second: what a small model does on a desktop
SCRIPT = f"say=count,itl_ms={STEP_MS}"


class Meter:
    """CPU seconds of one process since the meter was created."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = cpu_s(pid)

    @property
    def spent_s(self) -> float:
        return cpu_s(self._pid) - self._began


def prompt_of(prompts: Prompts) -> list[dict[str, str]]:
    """A random message of 2 KB, so that no prefix is cached."""
    text = prompts.user(600)["content"].encode()[:PROMPT_BYTES].decode()
    assert len(text) == PROMPT_BYTES
    return [{"role": "user", "content": text}]


async def request_cost(target: Target, pid: int, prompts: Prompts, n: int) -> tuple[float, float]:
    """Milliseconds of CPU and of TTFT (median) for a request with one output token."""
    asked = [prompt_of(prompts) for _ in range(n)]
    meter = Meter(pid)
    replies = [await ask(target, messages, 1) for messages in asked]
    return meter.spent_s / n * 1e3, median(reply.ttft_s for reply in replies) * 1e3


async def token_cost(target: Target, pid: int, prompts: Prompts, n_rounds: int, request_ms: float) -> float:
    """Microseconds of CPU per token of 8 concurrent streams, without the cost per request."""
    n_tokens = 0
    meter = Meter(pid)
    for _ in range(n_rounds):
        asked = [prompt_of(prompts) for _ in range(STREAMS)]
        replies: list[Reply] = await asyncio.gather(*(ask(target, messages, STREAM_TOKENS) for messages in asked))
        n_tokens += sum(reply.output_tokens for reply in replies)
    assert n_tokens == n_rounds * STREAMS * STREAM_TOKENS, n_tokens
    return (meter.spent_s - n_rounds * STREAMS * request_ms / 1e3) / n_tokens * 1e6


async def measure(
    prompts_of: Callable[[str], Prompts], gguf: Path, repeats: int, scale: float
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"request_ms": [], "request_wait_ms": [], "token_us": []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        model = pull(str(gguf), ModelStore(data)).card.id
        port = free_port()
        flags = ["--port", str(port), "--data-dir", str(data), model, "--log-level", "warning"]
        command = [sys.executable, "-m", "benchmarks.standin_serve", SCRIPT, *flags]
        with Process(command, data / "serve.log") as server:
            target = Target(port, model)
            await first_token(target, prompts_of("first"), time.perf_counter() + 60, server.check)
            await request_cost(target, server.pid, prompts_of("warm-up"), 50)
            for repeat in range(repeats):
                prompts = prompts_of(f"repeat {repeat}")
                cpu_ms, wait_ms = await request_cost(target, server.pid, prompts, int(400 * scale))
                token_us = await token_cost(target, server.pid, prompts, max(1, int(4 * scale)), cpu_ms)
                for key, value in zip(found, (cpu_ms, wait_ms, token_us)):
                    found[key].append(value)
    return found


def table(found: dict[str, list[float]]) -> str:
    rows = [
        ("CPU a request (2 KB prompt)", "request_ms", "ms", REQUEST_LIMIT_MS),
        ("time to first token", "request_wait_ms", "ms", None),
        (f"CPU a token ({STREAMS} streams)", "token_us", "µs", TOKEN_LIMIT_US),
    ]
    lines = []
    for title, key, unit, limit in rows:
        middle = median(found[key])
        verdict = "-" if limit is None else ("within" if middle <= limit else "OVER")
        shown = "-" if limit is None else f"{limit:g} {unit}"
        lines.append([title, f"{middle:.2f} {unit} ±{spread(found[key]):.0%}", shown, verdict])
    return markdown(["", "median", "limit", ""], lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_frontend", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer requests, one repeat")
    parser.add_argument("--model", type=Path, help="a GGUF file for its tokenizer (default: the catalog's default)")
    parser.add_argument("--json", type=Path, default=Path("bench-http-frontend.json"))
    options = parser.parse_args(argv)
    gguf = (options.model or emberline_contender.default_gguf()).resolve()
    prompts_of = emberline_contender.prompts_of(gguf, f"{time.time_ns()}")
    repeats, scale = (1, 0.25) if options.quick else (3, 1.0)
    try:
        found = asyncio.run(measure(prompts_of, gguf, repeats, scale))
    except RuntimeError as error:  # the server died or refused; the message has its log
        print(error, file=sys.stderr)
        return 1
    print(table(found))
    options.json.write_text(
        json.dumps({"limits": {"request_ms": REQUEST_LIMIT_MS, "token_us": TOKEN_LIMIT_US}, **found})
    )
    print(f"\nwritten to {options.json}")
    return 0


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
