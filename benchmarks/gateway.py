"""What a gateway adds to a request: `python -m benchmarks.gateway`. Prints a table and JSON.

A local stand-in provider answers at once with 50 streamed events; chats of 4 KB. Behind it, in turn: Emberline's plain
relay (no keys, no gateway), Emberline's gateway with keys, limits, prices, metering and logs, and LiteLLM's proxy.
Latency is measured at 50 requests/s (an open loop: each is sent when it is due, whatever became of those before it),
throughput over 8 and 32 connections. What a server adds is its latency less the provider's own.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import closed_loop
from benchmarks.contender import Setup
from benchmarks.peers.routers import litellm
from benchmarks.peers.venv import SetupFailed
from benchmarks.process import Process, cpu_s, ended_by_sigterm, free_port
from benchmarks.report import markdown
from benchmarks.router import chat, text, wait_ready

PROMPT_BYTES = 4096
EVENTS = 50
RATE = 50  # requests a second
CONNECTIONS = (8, 32)
MODEL = "standin"
TARGETS = {"added_p50_ms": 2.0, "added_p99_ms": 8.0, "per_s": 1000.0, "share_of_relay": 0.8}
LIMITS = ["--rpm", "100000000", "--tpm", "100000000000", "--concurrency", "100000", "--budget", "1000000/month"]
ENV = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}


class Server:
    """A server under test: how it is started, which model it is asked for, and with which headers."""

    def __init__(
        self, name: str, command: list[str], port: int, model: str, headers: str = "", env: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self.command = command
        self.port = port
        self.model = model
        self.headers = headers
        self.env = env or {}


def emberline(folder: Path, provider: int, has_gateway: bool, more_env: Mapping[str, str] | None = None) -> Server:
    """The plain relay, or the gateway with everything that a tenant's request goes through."""
    folder.mkdir(parents=True)
    port = free_port()
    (folder / "emberline.toml").write_text(
        f'[[providers]]\nname = "standin"\nurl = "http://127.0.0.1:{provider}/v1"\nkey = "none"\n'
        f'[[prices]]\nmodel = "standin/{MODEL}"\ninput = 0.6\noutput = 3\n'
    )
    env = {"EMBERLINE_HOME": str(folder), "EMBERLINE_PORT": str(port), **(more_env or {})}
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "--log-level", "warning"]
    command += ["--auth", "keys" if has_gateway else "none"]
    headers = ""
    if has_gateway:
        create = ["key", "create", "--account", "acme", *LIMITS, "--json"]
        made = subprocess.run(
            [sys.executable, "-m", "emberline.cli.main", *create],
            env={**os.environ, **env},
            capture_output=True,
            check=True,
        )
        headers = f"authorization: Bearer {json.loads(made.stdout)['key']}\r\ncf-aig-gateway-id: default\r\n"
    name = "emberline gateway" if has_gateway else "emberline relay"
    return Server(name, command, port, f"standin/{MODEL}", headers, env)


def contenders(setup: Setup, peers: Sequence[str], folder: Path, provider: int) -> Iterator[Server]:
    yield emberline(folder / "relay", provider, has_gateway=False)
    yield emberline(folder / "gateway", provider, has_gateway=True)
    if "litellm" in peers:
        try:
            port = free_port()
            yield Server("litellm", litellm(setup)(port, provider), port, MODEL, env=ENV)
        except SetupFailed as error:
            print(error, file=sys.stderr)


async def open_loop(port: int, body: bytes, headers: str, seconds: float) -> list[float]:
    """Latencies in ms of requests that are sent RATE times a second, over as many connections as they need."""
    took: list[float] = []
    idle: list[Any] = []
    loop = asyncio.get_running_loop()
    asked = closed_loop.request(port, body, headers)

    async def ask(due_s: float) -> None:
        client = idle.pop() if idle else (await loop.create_connection(closed_loop._Client, "127.0.0.1", port))[1]
        answer = await client.ask(asked)
        took.append((time.perf_counter() - due_s) * 1e3)
        if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer[-64:]:
            raise closed_loop.LoadFailed(f"not a whole stream: {answer[:500]!r}")
        idle.append(client)

    began_s = time.perf_counter()
    tasks = []
    for number in range(int(seconds * RATE)):
        due_s = began_s + number / RATE
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(due_s)))
    await asyncio.gather(*tasks)
    for client in idle:
        client.transport.close()
    return took


async def measure(server: Server | int, pids: Callable[[], list[int]], seconds: float, n: int) -> dict[str, Any]:
    port, model, headers = (
        (server, MODEL, "") if isinstance(server, int) else (server.port, server.model, server.headers)
    )
    body = chat(model, [{"role": "user", "content": text(PROMPT_BYTES, random.Random(7))}], max_tokens=EVENTS)
    await closed_loop.run(port, [body] * max(40, n // 10), 4, headers)  # warm up
    took = await open_loop(port, body, headers, seconds)
    row: dict[str, Any] = {"p50_ms": median(took), "p99_ms": quantiles(took, n=100)[98]}
    for connections in CONNECTIONS:
        began = sum(cpu_s(pid) for pid in pids())
        result = await closed_loop.run(port, [body] * n, connections, headers)
        cpu = sum(cpu_s(pid) for pid in pids()) - began
        row[str(connections)] = {"per_s": result.per_s, "p99_ms": result.p99_ms, "cpu_ms": cpu / n * 1e3}
    return row


async def run(setup: Setup, peers: Sequence[str], scale: float, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    provider = free_port()
    standin = [sys.executable, "-m", "standins.standin_openai", "--model", MODEL, "--port", str(provider)]
    with Process([*standin, "--script", f"canned=true,tokens={EVENTS}"], folder / "provider.log") as behind:
        wait_ready(provider, behind, ["/health"], 30)
        found["provider"] = await measure(provider, behind.tree, 10 * scale, int(3000 * scale))
        for server in contenders(setup, peers, folder, provider):
            print(f"measuring {server.name}", file=sys.stderr)
            n = int((100 if server.name == "litellm" else 3000) * scale)
            try:
                with Process(server.command, folder / f"{server.name}.log", server.env) as process:
                    wait_ready(server.port, process, ["/health", "/health/liveliness"], 400)
                    found[server.name] = await measure(server, process.tree, 10 * scale, max(64, n))
            except (RuntimeError, closed_loop.LoadFailed) as error:
                print(f"{server.name}: {error}", file=sys.stderr)
                found[server.name] = {"error": str(error)}
    return found


def verdicts(found: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Each target, what was measured, and whether it is met."""
    direct, relay, ours = found["provider"], found["emberline relay"], found["emberline gateway"]
    if "error" in relay or "error" in ours:
        return {}
    best = {name: max(row[str(n)]["per_s"] for n in CONNECTIONS) for name, row in (("relay", relay), ("ours", ours))}
    seen = {
        "added_p50_ms": ours["p50_ms"] - direct["p50_ms"],
        "added_p99_ms": ours["p99_ms"] - direct["p99_ms"],
        "per_s": best["ours"],
        "share_of_relay": best["ours"] / best["relay"],
    }
    return {
        key: (value, value <= TARGETS[key] if key.startswith("added") else value >= TARGETS[key])
        for key, value in seen.items()
    }


def table(found: dict[str, Any]) -> str:
    rows = []
    direct = found["provider"]
    for name, row in found.items():
        if "error" in row:
            rows.append([name, "failed", "", "", ""])
            continue
        rates = " / ".join(f"{row[str(n)]['per_s']:,.0f}" for n in CONNECTIONS)
        added = [f"{row[key] - direct[key]:.2f} ms" for key in ("p50_ms", "p99_ms")]
        rows.append([name, *added, rates, f"{row['8']['cpu_ms']:.2f} ms"])
    headings = ["", f"added p50 at {RATE}/s", "added p99", "requests/s at 8 / 32 connections", "CPU a request"]
    return markdown(headings, rows)


def main(argv: Sequence[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--peers", default="litellm", help="which to compare with; empty: none")
    parser.add_argument("--json", type=Path, default=Path("bench-gateway.json"))
    options = parser.parse_args(argv)
    cache = Path(os.environ.get("EMBERLINE_PEERS") or ".cache/peers").absolute()
    setup = Setup(Path(), cache, lambda line: print(line, file=sys.stderr))
    setup.cache.mkdir(parents=True, exist_ok=True)
    scale = 0.25 if options.quick else 1.0
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(setup, [name for name in options.peers.split(",") if name], scale, Path(folder)))
    print(table(found))
    for key, (value, met) in verdicts(found).items():
        print(f"{key}: {value:.2f} (target {TARGETS[key]:g}) {'met' if met else 'MISSED'}")
    report = {"servers": found, "cores": len(os.sched_getaffinity(0)), "load_1_min": os.getloadavg()[0]}
    options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
