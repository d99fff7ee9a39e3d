"""What tracing costs: `python -m benchmarks.tracing`.

`emberline serve` over stand-in engines, without tracing, with 10 % and with all requests sampled, and where
`--baseline` names another checkout, that too. All servers run at once, and each round measures every one of them, in
turn and in another order, so that what else the machine does falls on all alike. CPU time of the core process per
request is the robust figure; requests per second depend on what else runs. Targets: off, nothing measurable; at 10 %,
at most 3 %.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks import emberline_contender
from benchmarks.closed_loop import run
from benchmarks.process import Process, ended_by_sigterm, free_port
from benchmarks.report import markdown, spread
from benchmarks.workloads import Target, first_token
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull

SAMPLED = {"off": None, "10 %": 0.1, "all": 1.0}
LIMIT = 0.03  # at 10 %
CONNECTIONS = 4
OUTPUT_TOKENS = 16
EXPORT_S = 6.0  # until the last spans are exported


def collect(port: Connection) -> None:
    """A trace collector that accepts everything, in a process of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_address[1])
    server.serve_forever()


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, in nanoseconds' resolution."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Server:
    """One of the servers that are compared."""

    def __init__(self, stack: ExitStack, gguf: Path, env: dict[str, str]) -> None:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, self.port = pull(str(gguf), ModelStore(data)).card.id, free_port()
        flags = ["--port", str(self.port), "--data-dir", str(data), "--log-level", "warning", model]
        command = [sys.executable, "-m", "benchmarks.standin_serve", "say=count", *flags]
        self.process = stack.enter_context(Process(command, data / "serve.log", env))
        self.target = Target(self.port, model)
        self.cpu_us: list[float] = []  # per request, one entry per round
        self.per_s: list[float] = []
        self._n = 0  # requests of the open round
        self._began_s = 0.0

    async def measure(self, n: int, name: str) -> None:
        bodies = [
            json.dumps(
                {
                    "model": self.target.model,
                    "messages": [{"role": "user", "content": f"{name} {number} " * 20}],
                    "max_tokens": OUTPUT_TOKENS,
                    "stream": True,
                }
            ).encode()
            for number in range(n)
        ]
        self.close_round()
        self._n, self._began_s = n, cpu_s(self.process.pid)
        self.per_s.append((await run(self.port, bodies, CONNECTIONS)).per_s)

    def close_round(self) -> None:
        """What it does until its next round belongs to this one: spans are exported seconds later."""
        if self._n:
            self.cpu_us.append((cpu_s(self.process.pid) - self._began_s) / self._n * 1e6)
            self._n = 0


async def compare(gguf: Path, rounds: int, n: int, baseline: Path | None) -> dict[str, Server]:
    prompts = emberline_contender.prompts_of(gguf, f"{time.time_ns()}")
    with ExitStack() as stack:
        ours, theirs = multiprocessing.Pipe()
        collector = multiprocessing.Process(target=collect, args=(theirs,), daemon=True)
        collector.start()
        stack.callback(collector.terminate)
        endpoint = f"http://127.0.0.1:{ours.recv()}"
        servers: dict[str, Server] = {}
        if baseline is not None:
            other = {"PYTHONPATH": str(baseline.resolve()), "PYTHONSAFEPATH": "1"}  # not the current folder
            servers["baseline"] = Server(stack, gguf, other)
        for name, ratio in SAMPLED.items():
            tracing = {"EMBERLINE_TRACING_ENDPOINT": endpoint, "EMBERLINE_TRACING_SAMPLE_RATIO": f"{ratio}"}
            servers[name] = Server(stack, gguf, tracing if ratio is not None else {})
        for name, server in servers.items():
            await first_token(server.target, prompts(name), time.perf_counter() + 120, server.process.check)
            await server.measure(n, "warm-up")
        await asyncio.sleep(EXPORT_S)
        for server in servers.values():
            server.close_round()
            server.cpu_us.clear()
            server.per_s.clear()
        order = list(servers.values())
        for number in range(rounds):
            for server in order[number % len(order) :] + order[: number % len(order)]:
                await server.measure(n, f"round {number}")
        await asyncio.sleep(EXPORT_S)
        for server in order:
            server.close_round()
    return servers


def overhead(server: Server, reference: Server) -> tuple[float, float]:
    """Of CPU time over the reference: the median of the rounds' ratios, and half their interquartile range."""
    ratios = sorted(one / other - 1 for one, other in zip(server.cpu_us, reference.cpu_us, strict=True))
    quarter = len(ratios) // 4
    return median(ratios), (ratios[-1 - quarter] - ratios[quarter]) / 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--baseline", type=Path, help="another checkout, measured in the same run")
    parser.add_argument("--model", type=Path, help="a GGUF file for its tokenizer (default: the catalog's default)")
    parser.add_argument("--json", type=Path, default=Path("bench-tracing.json"))
    options = parser.parse_args(argv)
    gguf = (options.model or emberline_contender.default_gguf()).resolve()
    rounds, n = (4, 100) if options.quick else (20, 200)
    servers = asyncio.run(compare(gguf, rounds, n, options.baseline))
    reference = servers.get("baseline") or servers["off"]
    lines, found = [], {}
    for name, server in servers.items():
        over, noise = overhead(server, reference)
        found[name] = {"cpu_us": server.cpu_us, "per_s": server.per_s, "overhead": over, "noise": noise}
        cpu = f"{median(server.cpu_us):,.0f} µs ±{spread(server.cpu_us):.0%}"
        per_s = f"{median(server.per_s):,.0f} ±{spread(server.per_s):.0%}"
        lines.append([name, cpu, "–" if server is reference else f"{over:+.1%} ±{noise:.1%}", per_s])
    print(markdown(["sampled", "CPU a request", "over the first", "requests/s"], lines))
    options.json.write_text(json.dumps({"limit": LIMIT, "rounds": rounds, "requests": n, "servers": found}))
    print(f"\nwritten to {options.json}")
    over, _ = overhead(servers["10 %"], servers["off"])
    print(f"at 10 %: {over:+.1%} of the CPU time without tracing; the target is at most {LIMIT:.0%}")
    return 0


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
