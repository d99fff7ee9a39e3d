"""Queued work beside requests, on the real model: what it costs them, how old it gets, and how much it gets done.

python -m benchmarks.async_load [--lines 96] [--requests 40] [--seconds 120] [--json FILE]

1. throughput: the same lines straight through the engine, all at once, and through the queue, with nobody else there
2. first token: requests at a steady pace, without queued work and with a queue that is never empty
3. age: requests at 70 % of the engine's pace, lines arriving at half of what is left
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
from typing import Any

from benchmarks.client import stream
from benchmarks.ours import default_gguf
from benchmarks.process import Process, free_port
from emberline.balancer.endpoint import Endpoint
from emberline.balancer.engine_client import EngineClient
from emberline.protocol.request import EngineRequest, Message, SamplingParams
from emberline.text.model import TextModel

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
    """`emberline serve` in a data folder of its own."""

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
        """Seconds from the submission of each line to its end, from the store itself."""
        import sqlite3

        with sqlite3.connect(self.home / "emberline.db") as store:
            rows = store.execute("SELECT ended_us - created_us FROM lines WHERE state = 'succeeded'").fetchall()
        return [row[0] / 1e6 for row in rows]


async def straight(folder: Path, gguf: Path, numbers: range) -> float:
    """Lines a second when all are given to an engine at once."""
    socket = folder / "engine.sock"
    command = [sys.executable, "-m", "emberline.engine.worker", "--model", str(gguf), "--socket", f"unix:{socket}"]
    text = TextModel.load(gguf)
    with Process(command, folder / "engine.log", {**os.environ, "EMBERLINE_WORKER_TOKEN": TOKEN}):
        engine = EngineClient(Endpoint(name="e", address=f"unix:{socket}", token=TOKEN))
        engine.start()
        assert await engine.wait_connected(120)
        await _run(engine, text, range(10_000, 10_004))  # warm
        began_s = time.perf_counter()
        await _run(engine, text, numbers)
        took_s = time.perf_counter() - began_s
        await engine.close()
    return len(numbers) / took_s


async def _run(engine: EngineClient, text: TextModel, numbers: range) -> None:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    requests = []
    for n in numbers:
        prompt = text.encode(text.render([Message("user", question(n))]), special=True)
        requests.append(EngineRequest(id=f"r{n}", prompt_ids=prompt, sampling=sampling))
    waiting = engine.stream(requests)
    left = len(requests)
    while left:
        left -= sum(delta.finish is not None for delta in await waiting.next())


async def queued(server: Server, numbers: range) -> float:
    """Lines a second through the queue, from the submission to the last result."""
    began_s = time.perf_counter()
    batch_id = await asyncio.to_thread(server.submit, numbers)
    await server.until_done(batch_id)
    return len(numbers) / (time.perf_counter() - began_s)


async def requests(server: Server, n: int, every_s: float, seed: int) -> list[float]:
    """Times to the first token of requests that come at random, `every_s` apart on average."""
    rng = random.Random(seed)

    async def one(number: int) -> float:
        body = {**line(number)["body"], "stream": True, "stream_options": {"include_usage": True}}
        return (await stream(server.port, "/v1/chat/completions", body)).ttft_s

    tasks = []
    for number in range(n):
        tasks.append(asyncio.create_task(one(1_000_000 * seed + number)))
        await asyncio.sleep(rng.expovariate(1 / every_s))
    return list(await asyncio.gather(*tasks))


async def first_tokens(server: Server, n: int, every_s: float, n_queued: int) -> dict[str, float]:
    without = await requests(server, n, every_s, seed=1)
    batch_id = await asyncio.to_thread(server.submit, range(20_000, 20_000 + n_queued))
    await asyncio.sleep(3)
    beside = await requests(server, n, every_s, seed=2)
    left = server.batch(batch_id)["request_counts"]
    assert left["completed"] < left["total"], "the queue ran empty: give it more lines"
    await asyncio.to_thread(server.cancel, batch_id)
    await server.until_done(batch_id)
    figures = {"off": without, "on": beside}
    out = {f"{name}_p{p}_ms": round(quantile(values, p) * 1e3, 1) for name, values in figures.items() for p in (50, 95)}
    return {**out, "p95_more_ms": round((quantile(beside, 95) - quantile(without, 95)) * 1e3, 1)}


async def age(server: Server, lines_per_s: float, seconds: float) -> dict[str, float]:
    before = len(await asyncio.to_thread(server.ages))
    asking = asyncio.create_task(requests(server, int(seconds * 0.7 * lines_per_s), 1 / (0.7 * lines_per_s), seed=3))
    every_s, n = 5.0, 0
    per_batch = max(1, round(every_s * 0.15 * lines_per_s))
    ids = []
    while not asking.done():
        ids.append(await asyncio.to_thread(server.submit, range(50_000 + n, 50_000 + n + per_batch)))
        n += per_batch
        await asyncio.sleep(every_s)
    ttft = await asking
    for batch_id in ids:
        await server.until_done(batch_id)
    ages = (await asyncio.to_thread(server.ages))[before:]
    return {
        "requests_per_s": round(0.7 * lines_per_s, 2),
        "queued_lines": n,
        "age_p50_s": round(quantile(ages, 50), 2),
        "age_p95_s": round(quantile(ages, 95), 2),
        "request_ttft_p95_ms": round(quantile(ttft, 95) * 1e3, 1),
    }


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    gguf = default_gguf()
    with tempfile.TemporaryDirectory(prefix="emberline-async-") as name:
        folder = Path(name)
        rate = await straight(folder, gguf, range(args.lines))
        server = Server(folder, gguf)
        with server.process:
            await asyncio.to_thread(server.wait_ready)
            await queued(server, range(30_000, 30_004))  # warm
            rate_queued = await queued(server, range(args.lines))
            throughput = {
                "lines": args.lines,
                "straight_per_s": round(rate, 2),
                "queued_per_s": round(rate_queued, 2),
                "ratio": round(rate_queued / rate, 3),
            }
            first = await first_tokens(server, args.requests, args.every_s, args.backlog)
            aged = await age(server, rate, args.seconds) if args.seconds else {}
    return {"throughput": throughput, "first_token": first, "age": aged}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, default=192, help="of the throughput run")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--every-s", type=float, default=0.5, help="between two requests, on average")
    parser.add_argument("--backlog", type=int, default=4000, help="lines that wait while first tokens are measured")
    parser.add_argument("--seconds", type=float, default=120, help="of the run at 70 %% load; 0: none")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    for title, figures in found.items():
        print(title)
        for name, value in figures.items():
            print(f"  {name:<22}{value:>10}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
