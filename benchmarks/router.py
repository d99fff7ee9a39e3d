"""Latency and throughput cost of a router: `python -m benchmarks.router`.

Relaying: the stand-in OpenAI server answers at once with 50 tokens, behind Emberline, vllm-router, sglang-router and
LiteLLM in turn; chats of 4.5 KB. Own engine: `emberline serve` over a stand-in engine that answers at once with 50
tokens; fresh 4 KB prompts, and the tenth turn of an agent whose conversation of 200 KB is cached.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import closed_loop, emberline_contender
from benchmarks.contender import Setup
from benchmarks.peers.routers import PEERS
from benchmarks.peers.venv import SetupFailed
from benchmarks.process import Process, cpu_s, ended_by_sigterm, free_port
from benchmarks.report import OURS, markdown
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull

MODEL = "standin"
TOKENS = 50
CONNECTIONS = (1, 8, 32)
FRESH_BYTES, AGENT_BYTES = 4096, 200 << 10
TURNS = 10
KV_TOKENS = 1 << 23  # 60 conversations of 73,000 tokens: all are cached when their tenth turn arrives
TARGETS = {
    "p50_ms": 1.5,
    "times_litellm": 40.0,
    "share_of_vllm_router": 1 / 8,
    "fresh_per_s": 150.0,
    "agent_per_s": 80.0,
}
_WORDS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in ("n", "rt", "st", "lm", "")]


def text(n_bytes: int, draw: random.Random) -> str:
    words: list[str] = []
    n = 0
    while n < n_bytes:
        words.append(draw.choice(_WORDS))
        n += len(words[-1]) + 1
    return " ".join(words)[:n_bytes]


def chat(model: str, messages: Sequence[dict[str, str]], **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": messages, "stream": True, **more}).encode()


def wait_ready(port: int, process: Process, paths: Sequence[str], limit_s: float) -> None:
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        process.check()
        for path in paths:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
    raise RuntimeError(f"not ready within {limit_s:.0f} s; see {process.log}")


async def measured(
    port: int, pids: Callable[[], list[int]], bodies: Sequence[bytes], connections: int
) -> dict[str, float]:
    began = sum(cpu_s(pid) for pid in pids())
    result = await closed_loop.run(port, bodies, connections)
    cpu = sum(cpu_s(pid) for pid in pids()) - began
    return {
        "per_s": result.per_s,
        "p50_ms": result.p50_ms,
        "p99_ms": result.p99_ms,
        "cpu_ms": cpu / result.n_requests * 1e3,
    }


# --- relaying ---------------------------------------------------------------------------------------------------------


def emberline_command(data: Path, port: int, server: int) -> list[str]:
    data.mkdir(parents=True, exist_ok=True)
    (data / "emberline.toml").write_text(
        f'[[endpoints]]\nname = "standin"\nurl = "http://127.0.0.1:{server}"\nmodels = ["{MODEL}"]\nmax_running = 256\n'
    )
    flags = ["--port", str(port), "--data-dir", str(data), "--log-level", "warning"]
    return [sys.executable, "-m", "emberline.cli.main", "serve", *flags]


async def relaying(setup: Setup, names: Sequence[str], scale: float, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    standin = [sys.executable, "-m", "standins.standin_openai", "--model", MODEL]
    server = free_port()
    script = f"canned=true,tokens={TOKENS}"
    with Process([*standin, "--port", str(server), "--script", script], folder / "standin.log") as behind:
        wait_ready(server, behind, ["/health"], 30)
        found["direct"] = await _row(server, behind, scale, 2000)
        for name, command in _contenders(setup, names, folder):
            port = free_port()
            print(f"measuring {name}", file=sys.stderr)
            try:
                with Process(command(port, server), folder / f"{name}.log", _env(name)) as process:
                    wait_ready(port, process, ["/v1/models", "/health", "/health/liveliness"], 400)
                    found[name] = await _row(port, process, scale, 60 if name == "litellm" else 1200)
            except (RuntimeError, closed_loop.LoadFailed) as error:
                print(f"{name}: {error}", file=sys.stderr)
                found[name] = {"error": str(error)}
    return found


def _contenders(
    setup: Setup, names: Sequence[str], folder: Path
) -> Iterator[tuple[str, Callable[[int, int], list[str]]]]:
    yield OURS, lambda port, server: emberline_command(folder / "relay", port, server)
    for name in names:
        try:
            yield name, PEERS[name](setup)
        except SetupFailed as error:
            print(error, file=sys.stderr)


def _env(name: str) -> dict[str, str]:
    """LiteLLM requires a key, or a setting that disables it."""
    return {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"} if name == "litellm" else {}


async def _row(port: int, process: Process, scale: float, n: int) -> dict[str, Any]:
    body = chat(MODEL, [{"role": "user", "content": text(4400, random.Random(7))}], max_tokens=TOKENS)
    await closed_loop.run(port, [body] * max(8, int(n * scale) // 10), 1)
    row: dict[str, Any] = {}
    for connections in CONNECTIONS:
        row[str(connections)] = await measured(
            port, process.tree, [body] * max(connections, int(n * scale)), connections
        )
    return row


# --- our own engine ---------------------------------------------------------------------------------------------------


async def own_engine(gguf: Path, scale: float, folder: Path) -> dict[str, Any]:
    data, port = folder / "own", free_port()
    model = pull(str(gguf), ModelStore(data)).card.id
    flags = ["--port", str(port), "--data-dir", str(data), model, "--log-level", "warning"]
    command = [sys.executable, "-m", "benchmarks.standin_serve", "say=count", *flags]
    room = {"STANDIN_CONTEXT": str(1 << 18), "STANDIN_KV": str(KV_TOKENS)}
    with Process(command, folder / "own.log", room) as process:
        wait_ready(port, process, ["/health"], 120)
        core = [process.pid]
        draw = random.Random(time.time_ns())
        fresh = [_fresh(model, draw) for _ in range(int(600 * scale))]
        await closed_loop.run(port, [_fresh(model, draw) for _ in range(20)], 1)
        found: dict[str, Any] = {"fresh_4_kb": await measured(port, lambda: core, fresh, 8)}
        turns = await _tenth_turns(port, model, int(60 * scale), draw)
        found["agent_200_kb"] = await measured(port, lambda: core, turns, 8)
        return found


def _fresh(model: str, draw: random.Random) -> bytes:
    return chat(model, [{"role": "user", "content": text(FRESH_BYTES, draw)}], max_tokens=TOKENS)


async def _tenth_turns(port: int, model: str, n: int, draw: random.Random) -> list[bytes]:
    """The tenth turn of conversations whose first nine turns have been served."""
    lasts: list[bytes] = []
    for _ in range(n):
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": text(AGENT_BYTES // TURNS, draw)})
            body = chat(model, messages, max_tokens=TOKENS)
            if turn == TURNS - 1:
                lasts.append(body)
            else:
                answer = await _said(port, body)
                messages.append({"role": "assistant", "content": answer})
    return lasts


async def _said(port: int, body: bytes) -> str:
    def ask() -> str:
        whole = json.loads(body) | {"stream": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(whole).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.loads(answer.read())["choices"][0]["message"]["content"])

    return await asyncio.to_thread(ask)


# --- the report -------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    rows = []
    for name, row in found["relaying"].items():
        if "error" in row:
            rows.append([name, "failed", "", "", ""])
            continue
        rates = " / ".join(f"{row[str(n)]['per_s']:,.0f}" for n in CONNECTIONS)
        rows.append(
            [
                name,
                f"{row['1']['p50_ms']:.2f} ms",
                f"{row['1']['p99_ms']:.2f} ms",
                rates,
                f"{row['8']['cpu_ms']:.2f} ms",
            ]
        )
    relayed = markdown(["relaying", "p50 at 1", "p99 at 1", "requests/s at 1 / 8 / 32", "CPU a request"], rows)
    own = [
        [name, f"{row['per_s']:.0f}", f"{row['cpu_ms']:.2f} ms", f"{row['p50_ms']:.1f} ms"]
        for name, row in found["own_engine"].items()
    ]
    return relayed + "\n\n" + markdown(["own engine, 8 connections", "requests/s", "CPU a request", "p50"], own)


def verdicts(found: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Each target, its measured value, and whether it is met; none for a peer that did not run."""
    rows, own = found["relaying"], found["own_engine"]
    best = {name: max(row[str(n)]["per_s"] for n in CONNECTIONS) for name, row in rows.items() if "error" not in row}
    seen: dict[str, float] = {}
    if OURS in best:
        seen["p50_ms"] = rows[OURS]["1"]["p50_ms"]
        if "litellm" in best:
            seen["times_litellm"] = best[OURS] / best["litellm"]
        if "vllm-router" in best:
            seen["share_of_vllm_router"] = best[OURS] / best["vllm-router"]
    if own:
        seen["fresh_per_s"], seen["agent_per_s"] = own["fresh_4_kb"]["per_s"], own["agent_200_kb"]["per_s"]
    return {
        key: (value, value <= TARGETS[key] if key == "p50_ms" else value >= TARGETS[key]) for key, value in seen.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--peers", default=",".join(PEERS), help="which to compare with")
    parser.add_argument("--part", choices=["relaying", "own"], help="only this half")
    parser.add_argument("--json", type=Path, default=Path("bench-router.json"))
    options = parser.parse_args(argv)
    gguf = emberline_contender.default_gguf().resolve()
    setup = Setup(
        gguf,
        Path(os.environ.get("EMBERLINE_PEERS") or ".cache/peers").absolute(),
        lambda line: print(line, file=sys.stderr),
    )
    setup.cache.mkdir(parents=True, exist_ok=True)
    scale = 0.25 if options.quick else 1.0
    names = [name for name in options.peers.split(",") if name]
    found: dict[str, Any] = {"relaying": {}, "own_engine": {}, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.part != "own":
            found["relaying"] = runner.run(relaying(setup, names, scale, Path(folder)))
        if options.part != "relaying":
            found["own_engine"] = runner.run(own_engine(gguf, scale, Path(folder)))
    print(table(found))
    for key, (value, met) in verdicts(found).items():
        print(f"{key}: {value:.2f} (target {TARGETS[key]:g}) {'met' if met else 'MISSED'}")
    found["load_1_min"] = os.getloadavg()[0]
    options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
