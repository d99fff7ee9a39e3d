"""Queued jobs and interactive requests on one engine: their interference, queueing delay and throughput.

python -m benchmarks.queue_load [--json FILE] [--fleet N]      about 6 minutes on two quiet cores; a fleet adds its own

1. throughput: the same jobs submitted straight to an engine and through the queue, without other load
2. TTFT: requests at a steady rate, without queued jobs and with a queue that is never empty
3. queueing delay: requests at 70 % of the engine's capacity, jobs arriving at half of what is left
4. --fleet N: all three on N simulated engines in virtual time (benchmarks/queue_fleet.py)

The two sides are measured in alternating slices (A B B A …), so that other load on the machine affects both alike, and
reported as the median of pairs. `outside` is how many CPUs other processes kept busy; above 0.2 the wall-clock figures
are unreliable, and the ratio of CPU time (`cpu_ratio`) is the better one.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.client import stream
from benchmarks.cpu_usage import Meter, family
from benchmarks.emberline_contender import default_gguf
from benchmarks.process import Process, ended_by_sigterm, free_port
from benchmarks.queue_fleet import quantile, simulate
from emberline.balancer.endpoint import Endpoint
from emberline.cluster.engine_client import EngineClient
from emberline.protocol.request import EngineRequest, Message, SamplingParams
from emberline.text.text_model import TextModel

MAX_TOKENS = 32
TOKEN = "benchmark"
WORDS = ("river", "bank", "stone", "light", "house", "market", "winter", "garden", "letter", "window", "music", "road")


def question(n: int, words: int = 48) -> str:
    rng = random.Random(n)
    return f"{n}: " + " ".join(rng.choice(WORDS) for _ in range(words))


def line(n: int) -> dict[str, Any]:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": question(n)}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}


class Server:
    """`emberline serve` with its own data folder."""

    def __init__(self, folder: Path, gguf: Path) -> None:
        self.home = folder / "home"
        (self.home / "models").mkdir(parents=True)
        (self.home / "models" / gguf.parent.name).symlink_to(gguf.parent)
        self.port = free_port()
        command = [
            sys.executable,
            "-m",
            "emberline.cli.main",
            "serve",
            "--port",
            str(self.port),
            "--log-level",
            "warning",
        ]
        self.process = Process(command, folder / "server.log", {**os.environ, "EMBERLINE_HOME": str(self.home)})

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def wait_ready(self) -> None:
        for _ in range(600):
            try:
                self.ask("GET", "/health")
                return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError(self.process.log.read_text()[-2000:])

    def submit(self, numbers: range) -> str:
        mark = uuid.uuid4().hex
        part = f'--{mark}\r\nContent-Disposition: form-data; name="'
        text = "\n".join(json.dumps(line(n)) for n in numbers)
        form = f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="in.jsonl"\r\n\r\n{text}\r\n--{mark}--\r\n'
        file = self.ask("POST", "/v1/files", form.encode(), f"multipart/form-data; boundary={mark}")
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self.ask("POST", "/v1/batches", json.dumps(body).encode())["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/batches/{batch_id}")
        return found

    def cancel(self, batch_id: str) -> None:
        self.ask("POST", f"/v1/batches/{batch_id}/cancel", b"{}")

    async def until_done(self, batch_id: str) -> None:
        while (await asyncio.to_thread(self.batch, batch_id))["status"] not in ("completed", "cancelled"):
            await asyncio.sleep(0.05)

    def ages(self) -> list[float]:
        """Seconds from submission to completion of each job, read from the store."""
        import sqlite3

        with sqlite3.connect(self.home / "emberline.db") as store:
            rows = store.execute("SELECT ended_us - created_us FROM lines WHERE state = 'succeeded'").fetchall()
        return [row[0] / 1e6 for row in rows]


class Slice(NamedTuple):
    """One slice of jobs."""

    lines_per_s: float
    cpu_s_per_line: float
    outside: float  # CPUs that other processes kept busy


class Engine:
    """An engine worker, to which jobs are submitted directly."""

    def __init__(self, folder: Path, gguf: Path) -> None:
        self._address = f"unix:{folder / 'engine.sock'}"
        command = [sys.executable, "-m", "emberline.engine.worker", "--model", str(gguf), "--socket", self._address]
        env = {**os.environ, "EMBERLINE_WORKER_TOKEN": TOKEN, "EMBERLINE_LOG_LEVEL": "warning"}
        self.process = Process(command, folder / "engine.log", env)
        self._client = EngineClient(Endpoint(name="e", address=self._address, token=TOKEN))
        self._text = TextModel.load(gguf)

    async def connect(self) -> None:
        self._client.start()
        assert await self._client.wait_connected(120)

    async def close(self) -> None:
        await self._client.close()

    async def run(self, numbers: range) -> None:
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        requests = []
        for n in numbers:
            prompt = self._text.encode(self._text.render([Message("user", question(n))]), special=True)
            requests.append(EngineRequest(id=f"r{n}", prompt_ids=prompt, sampling=sampling))
        waiting = self._client.stream(requests)
        left = len(requests)
        while left:
            left -= sum(delta.finish is not None for delta in await waiting.next())


async def sliced(run: Any, numbers: range, pids: set[int]) -> Slice:
    meter, began_s = Meter(pids), time.perf_counter()
    await run(numbers)
    took_s = time.perf_counter() - began_s
    cpu_s, outside = meter.read(took_s)
    return Slice(len(numbers) / took_s, cpu_s / len(numbers), outside)


def alternating(n_pairs: int) -> list[str]:
    """A B, B A, A B, …"""
    return [name for pair in range(n_pairs) for name in ("ab" if pair % 2 == 0 else "ba")]


async def throughput(server: Server, engine: Engine, n_lines: int, n_pairs: int) -> dict[str, float]:
    """Equal numbers of fresh jobs, directly and through the queue."""

    async def queued(numbers: range) -> None:
        await server.until_done(await asyncio.to_thread(server.submit, numbers))

    ours, alone = family(server.process.pid), family(engine.process.pid)
    await engine.run(range(10_000, 10_016))  # warm
    await queued(range(30_000, 30_016))
    found: dict[str, list[Slice]] = {"a": [], "b": []}
    for number, way in enumerate(alternating(n_pairs)):
        numbers = range(100_000 + number * n_lines, 100_000 + (number + 1) * n_lines)
        found[way].append(await sliced(engine.run if way == "a" else queued, numbers, alone if way == "a" else ours))
    pairs = list(zip(found["a"], found["b"], strict=True))
    median = statistics.median
    return {
        "lines": n_lines,
        "pairs": n_pairs,
        "straight_per_s": round(median(one.lines_per_s for one in found["a"]), 2),
        "queued_per_s": round(median(one.lines_per_s for one in found["b"]), 2),
        "ratio": round(median(b.lines_per_s / a.lines_per_s for a, b in pairs), 3),
        "ratio_worst": round(min(b.lines_per_s / a.lines_per_s for a, b in pairs), 3),
        "cpu_ratio": round(median(a.cpu_s_per_line / b.cpu_s_per_line for a, b in pairs), 3),
        "outside": round(median(one.outside for ones in found.values() for one in ones), 2),
    }


async def requests(server: Server, n: int, every_s: float, first: int, seed: int) -> list[float]:
    """TTFT of requests with Poisson arrivals, `every_s` apart on average."""
    rng = random.Random(seed)

    async def one(number: int) -> float:
        body = {**line(number)["body"], "stream": True, "stream_options": {"include_usage": True}}
        return (await stream(server.port, "/v1/chat/completions", body)).ttft_s

    tasks = []
    for number in range(first, first + n):
        tasks.append(asyncio.create_task(one(number)))
        await asyncio.sleep(rng.expovariate(1 / every_s))
    return list(await asyncio.gather(*tasks))


async def first_tokens(server: Server, n: int, every_s: float, backlog: int, n_pairs: int) -> dict[str, float]:
    """Both slices of a pair have the same arrivals."""
    found: dict[str, list[list[float]]] = {"a": [], "b": []}
    meter, began_s = Meter(family(server.process.pid)), time.perf_counter()
    for number, way in enumerate(alternating(n_pairs)):
        batch_id = ""
        if way == "b":
            first = 200_000 + number * backlog
            batch_id = await asyncio.to_thread(server.submit, range(first, first + backlog))
            await asyncio.sleep(2)
        found[way].append(await requests(server, n, every_s, 1_000_000 + number * n, seed=number // 2))
        if batch_id:
            left = (await asyncio.to_thread(server.batch, batch_id))["request_counts"]
            assert left["completed"] < left["total"], "the queue ran empty: give it more lines"
            await asyncio.to_thread(server.cancel, batch_id)
            await server.until_done(batch_id)
    _, outside = meter.read(time.perf_counter() - began_s)
    off, on = ([value for values in found[way] for value in values] for way in "ab")
    halves = [quantile(off[::2], 95), quantile(off[1::2], 95)]
    more = [quantile(b, 95) - quantile(a, 95) for a, b in zip(found["a"], found["b"], strict=True)]
    ms = {"off_p50": quantile(off, 50), "on_p50": quantile(on, 50), "off_p95": quantile(off, 95)}
    ms |= {"on_p95": quantile(on, 95), "p95_more": quantile(on, 95) - quantile(off, 95)}
    ms |= {"p95_more_median_of_pairs": statistics.median(more), "off_p95_differs_by_itself": abs(halves[0] - halves[1])}
    told = {f"{name}_ms": round(1e3 * value, 1) for name, value in ms.items()}
    return {"requests": len(off), "pairs": n_pairs, **told, "outside": round(outside, 2)}


async def age(server: Server, lines_per_s: float, seconds: float) -> dict[str, float]:
    before = len(await asyncio.to_thread(server.ages))
    meter, began_s = Meter(family(server.process.pid)), time.perf_counter()
    per_s = 0.7 * lines_per_s
    asking = asyncio.create_task(requests(server, int(seconds * per_s), 1 / per_s, 3_000_000, seed=3))
    every_s, n = 2.0, 0
    per_batch = max(1, round(every_s * 0.15 * lines_per_s))
    ids = []
    while not asking.done():
        ids.append(await asyncio.to_thread(server.submit, range(500_000 + n, 500_000 + n + per_batch)))
        n += per_batch
        await asyncio.sleep(every_s)
    ttft, took_s = await asking, time.perf_counter() - began_s
    cpu_s, outside = meter.read(took_s)
    for batch_id in ids:
        await server.until_done(batch_id)
    ages = (await asyncio.to_thread(server.ages))[before:]
    return {
        "requests_per_s": round(per_s, 2),
        "queued_lines": n,
        "age_p50_s": round(quantile(ages, 50), 2),
        "age_p95_s": round(quantile(ages, 95), 2),
        "request_ttft_p95_ms": round(quantile(ttft, 95) * 1e3, 1),
        "processors_used": round(cpu_s / took_s, 2),
        "outside": round(outside, 2),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    gguf = default_gguf()
    with tempfile.TemporaryDirectory(prefix="emberline-async-") as name:
        folder = Path(name)
        engine, server = Engine(folder, gguf), Server(folder, gguf)
        with engine.process, server.process:
            await engine.connect()
            await asyncio.to_thread(server.wait_ready)
            found: dict[str, Any] = {"throughput": await throughput(server, engine, args.lines, args.pairs)}
            await engine.close()
            found["first_token"] = await first_tokens(server, args.requests, args.every_s, args.backlog, args.pairs)
            if args.seconds:
                found["age"] = await age(server, found["throughput"]["straight_per_s"], args.seconds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5, help="of alternating slices")
    parser.add_argument("--lines", type=int, default=128, help="of a slice of the throughput run")
    parser.add_argument("--requests", type=int, default=24, help="of a slice of the TTFT run")
    parser.add_argument("--every-s", type=float, default=0.5, help="between two requests, on average")
    parser.add_argument("--backlog", type=int, default=2000, help="queued jobs while TTFT is measured")
    parser.add_argument("--seconds", type=float, default=90, help="of the run at 70 %% load; 0: none")
    parser.add_argument("--fleet", type=int, action="append", default=[], metavar="N", help="also N simulated engines")
    parser.add_argument("--fleet-seconds", type=float, default=20, help="of virtual time per part")
    parser.add_argument("--only-fleet", action="store_true", help="no real model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    ended_by_sigterm()
    found = {} if args.only_fleet else asyncio.run(measure(args))
    for n in args.fleet:
        found[f"fleet of {n}"] = simulate(n, args.fleet_seconds)
    for title, figures in found.items():
        print(title)
        for name, value in figures.items():
            print(f"  {name:<30}{value:>10}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
