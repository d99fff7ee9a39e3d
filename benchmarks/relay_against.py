"""Relayed and gateway requests beside another checkout: `python -m benchmarks.relay_against DIR [--quick]`.

This checkout's server and the other's relay streamed chats of 4 KB to one stand-in provider, which answers at once
with 50 events. All servers run all the time and are asked in turn, in short windows, so that they see the same machine.
The CPU time that a server's processes take for a request bounds its requests/s. Each window gives a ratio, the other
checkout's time over this one's: above 1 this checkout serves so many times as many requests in the same CPU time. The
median of the ratios counts, with their quartiles, since a busy machine disturbs single windows.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks import closed_loop
from benchmarks.gateway import EVENTS, MODEL, PROMPT_BYTES, Server, emberline
from benchmarks.process import Process, cpu_s, ended_by_sigterm, free_port
from benchmarks.report import markdown
from benchmarks.router import chat, emberline_command, text, wait_ready

REPOSITORY = Path(__file__).parent.parent
CONNECTIONS = 8
KINDS = ("relay", "gateway")  # without keys; with keys, limits, prices and a gateway


@dataclass(slots=True)
class Contender:
    server: Server
    process: Process
    cpu_us: list[float] = field(default_factory=list)  # per request, by window
    per_s: list[float] = field(default_factory=list)

    async def serve(self, n: int) -> None:
        body = chat(self.server.model, [{"role": "user", "content": text(PROMPT_BYTES, random.Random(7))}])
        began_s = self._cpu_s()
        result = await closed_loop.run(self.server.port, [body] * n, CONNECTIONS, self.server.headers)
        self.cpu_us.append((self._cpu_s() - began_s) / n * 1e6)
        self.per_s.append(result.per_s)

    def _cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self.process.tree())


def server_of(kind: str, checkout: Path, folder: Path, provider: int) -> Server:
    env = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    if kind == "gateway":
        return emberline(folder, provider, has_gateway=True, more_env=env)
    port = free_port()
    return Server(kind, emberline_command(folder, port, provider), port, MODEL, env=env)


async def run(checkouts: Mapping[str, Path], n_windows: int, n_requests: int, folder: Path) -> dict[str, Contender]:
    """Measure the checkouts. Returns contenders by kind and checkout, such as `relay this`."""
    found: dict[str, Contender] = {}
    provider = free_port()
    standin = [sys.executable, "-m", "standins.standin_openai", "--model", MODEL, "--port", str(provider)]
    with ExitStack() as stack:
        script = ["--script", f"canned=true,tokens={EVENTS}"]
        behind = stack.enter_context(Process([*standin, *script], folder / "provider.log"))
        wait_ready(provider, behind, ["/health"], 30)
        for kind in KINDS:
            for name, checkout in checkouts.items():
                server = server_of(kind, checkout, folder / f"{kind}-{name}", provider)
                process = stack.enter_context(Process(server.command, folder / f"{kind}-{name}.log", server.env))
                wait_ready(server.port, process, ["/health"], 120)
                found[f"{kind} {name}"] = Contender(server, process)
        for number in range(n_windows + 1):
            for contender in list(found.values())[:: 1 if number % 2 == 0 else -1]:
                await contender.serve(n_requests)
    for contender in found.values():  # the first window filled caches
        del contender.cpu_us[0], contender.per_s[0]
    return found


def table(found: Mapping[str, Contender]) -> str:
    rows = []
    for kind in KINDS:
        ours, theirs = (found[f"{kind} {name}"] for name in ("this", "other"))
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
    parser.add_argument("--json", type=Path, default=Path("bench-relay-against.json"))
    options = parser.parse_args(argv)
    if not (options.other / "emberline").is_dir():
        parser.error(f"{options.other} is no checkout: it has no folder emberline")
    n_windows, n_requests = (6, 200) if options.quick else (16, 500)
    checkouts = {"this": REPOSITORY, "other": options.other.resolve()}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(checkouts, n_windows, n_requests, Path(folder)))
    print(table(found))
    figures = {name: {"cpu_us": one.cpu_us, "per_s": one.per_s} for name, one in found.items()}
    options.json.write_text(json.dumps({"load_1_min": os.getloadavg()[0], "windows": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
