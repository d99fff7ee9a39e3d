"""Requests beside another checkout: `python -m benchmarks.relay_against DIR [--quick] [--kinds local,stream]`.

relay, gateway  streamed chats of 4 KB relayed to one stand-in provider, which answers at once with 50 events
local           streamed chats of 2 KB, one after another, to a stand-in engine that answers with one token
stream          eight such chats at a time, of 256 tokens each, 100 steps a second

Both checkouts' servers run all the time and are asked in turn, in short windows, so that they see the same machine. The
CPU time that a server takes for a request bounds its requests/s; of a server with a stand-in engine the core process
alone counts. Each window gives a ratio, the other checkout's time over this one's: above 1 this checkout serves so many
times as many requests in the same CPU time. The median of the ratios counts, with their quartiles, since a busy machine
disturbs single windows.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks import closed_loop, emberline_contender, http_frontend
from benchmarks.gateway import EVENTS, MODEL, PROMPT_BYTES, Server, emberline
from benchmarks.process import Process, cpu_s, ended_by_sigterm, free_port
from benchmarks.report import markdown
from benchmarks.router import chat, emberline_command, text, wait_ready
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Kind:
    n_requests: int  # in a window
    connections: int
    engine: str = ""  # the script of the stand-in engine; empty: requests are relayed
    n_tokens: int = 0  # of its replies


KINDS = {
    "relay": Kind(500, 8),  # without keys
    "gateway": Kind(500, 8),  # with keys, limits, prices and a gateway
    "local": Kind(400, 1, "say=count", 1),
    "stream": Kind(16, 8, http_frontend.SCRIPT, http_frontend.STREAM_TOKENS),
}
Bodies = Callable[[int], list[bytes]]  # the bodies of a window with so many requests


@dataclass(slots=True)
class Contender:
    server: Server
    process: Process
    kind: Kind
    cpu_us: list[float] = field(default_factory=list)  # per request, by window
    per_s: list[float] = field(default_factory=list)

    async def serve(self, bodies: Sequence[bytes]) -> None:
        began_s = self._cpu_s()
        result = await closed_loop.run(self.server.port, bodies, self.kind.connections, self.server.headers)
        self.cpu_us.append((self._cpu_s() - began_s) / len(bodies) * 1e6)
        self.per_s.append(result.per_s)

    def _cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in ([self.process.pid] if self.kind.engine else self.process.tree()))


def relaying_server(kind: str, env: Mapping[str, str], folder: Path, provider: int) -> Server:
    if kind == "gateway":
        return emberline(folder, provider, has_gateway=True, more_env=env)
    port = free_port()
    return Server(kind, emberline_command(folder, port, provider), port, MODEL, env=dict(env))


def local_server(kind: Kind, env: Mapping[str, str], folder: Path, gguf: Path) -> Server:
    port = free_port()
    model = pull(str(gguf), ModelStore(folder)).card.id
    flags = ["--port", str(port), "--data-dir", str(folder), model, "--log-level", "warning"]
    command = [sys.executable, "-m", "benchmarks.standin_serve", kind.engine, *flags]
    return Server("local", command, port, model, env=dict(env))


def relayed_bodies(server: Server) -> Bodies:
    body = chat(server.model, [{"role": "user", "content": text(PROMPT_BYTES, random.Random(7))}])
    return lambda n: [body] * n


def local_bodies(kind: Kind, server: Server, gguf: Path) -> Bodies:
    prompts = emberline_contender.prompts_of(gguf, f"{time.time_ns()}")("windows")
    return lambda n: [
        chat(server.model, http_frontend.prompt_of(prompts), max_tokens=kind.n_tokens, temperature=0) for _ in range(n)
    ]


async def run(
    kinds: Sequence[str], checkouts: Mapping[str, Path], n_windows: int, scale: float, folder: Path
) -> dict[str, dict[str, Contender]]:
    """Measure the checkouts. Returns contenders by kind, and then by checkout."""
    found: dict[str, dict[str, Contender]] = {name: {} for name in kinds}
    bodies: dict[str, Bodies] = {}
    has_engine = any(KINDS[name].engine for name in kinds)
    gguf = emberline_contender.default_gguf().resolve() if has_engine else Path()
    provider = free_port()
    standin = [sys.executable, "-m", "standins.standin_openai", "--model", MODEL, "--port", str(provider)]
    with ExitStack() as stack:
        script = ["--script", f"canned=true,tokens={EVENTS}"]
        behind = stack.enter_context(Process([*standin, *script], folder / "provider.log"))
        wait_ready(provider, behind, ["/health"], 30)
        for name, contenders in found.items():
            kind = KINDS[name]
            for checkout, path in checkouts.items():
                data, env = folder / f"{name}-{checkout}", {"PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}
                if kind.engine:
                    server = local_server(kind, env, data, gguf)
                else:
                    server = relaying_server(name, env, data, provider)
                process = stack.enter_context(Process(server.command, folder / f"{data.name}.log", server.env))
                wait_ready(server.port, process, ["/health"], 120)
                contenders[checkout] = Contender(server, process, kind)
            bodies[name] = local_bodies(kind, server, gguf) if kind.engine else relayed_bodies(server)
        for number in range(n_windows + 1):
            for name, contenders in found.items():
                window = bodies[name](max(KINDS[name].connections, int(KINDS[name].n_requests * scale)))
                for contender in list(contenders.values())[:: 1 if number % 2 == 0 else -1]:
                    await contender.serve(window)
    for contenders in found.values():
        for contender in contenders.values():  # the first window filled caches
            del contender.cpu_us[0], contender.per_s[0]
    return found


def table(found: Mapping[str, Mapping[str, Contender]]) -> str:
    rows = []
    for kind, contenders in found.items():
        ours, theirs = contenders["this"], contenders["other"]
        ratios = [other_us / us for us, other_us in zip(ours.cpu_us, theirs.cpu_us, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        times = f"{median(ours.cpu_us):,.0f} / {median(theirs.cpu_us):,.0f} µs"
        rates = f"{median(ours.per_s):,.0f} / {median(theirs.per_s):,.0f}"
        rows.append([kind, times, f"{middle:.2f} ({low:.2f}–{high:.2f})", rates])
    return markdown(["medians, this / other", "CPU a request", "ratio (quartiles)", "requests/s"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which requests")
    parser.add_argument("--json", type=Path, default=Path("bench-relay-against.json"))
    options = parser.parse_args(argv)
    if not (options.other / "emberline").is_dir():
        parser.error(f"{options.other} is no checkout: it has no folder emberline")
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}")
    n_windows, scale = (6, 0.4) if options.quick else (16, 1.0)
    checkouts = {"this": REPOSITORY, "other": options.other.resolve()}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(kinds, checkouts, n_windows, scale, Path(folder)))
    print(table(found))
    figures = {
        kind: {checkout: {"cpu_us": one.cpu_us, "per_s": one.per_s} for checkout, one in contenders.items()}
        for kind, contenders in found.items()
    }
    options.json.write_text(json.dumps({"load_1_min": os.getloadavg()[0], "windows": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
