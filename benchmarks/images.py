"""Images over HTTP: `python -m benchmarks.images [MODEL]`. Prints a table and JSON.

It starts `emberline serve MODEL` (a folder or a name). With `--peer PORT=NAME` it asks a running server, too.

- Time to the first token of a prompt with 8 distinct images, new each time, and of the same prompt again. The engine's
  counter tells how many images its tower computed (target: 0 when they are repeated).
- Inter-token latency of text streams: alone, while so many images a second arrive (target: p99 at most 1.5 times), and
  while prompts of text arrive that are as long.
"""

import argparse
import asyncio
import base64
import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from benchmarks.client import Reply, stream
from benchmarks.process import Process, ended_by_sigterm, free_port
from benchmarks.report import markdown

PATH = "/v1/chat/completions"
Json = dict[str, Any]


def image_url(side: int, rng: random.Random) -> str:
    """A picture of coloured noise in blocks, as a JPEG file: no two are alike."""
    noise = Image.frombytes("RGB", (side // 8, side // 8), rng.randbytes(3 * (side // 8) ** 2))
    file = BytesIO()
    noise.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def body(model: str, urls: Sequence[str], text: str, max_tokens: int) -> Json:
    content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content if urls else text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def n_encoded(port: int) -> int | None:
    """Tiles that the engine's tower has encoded so far. Returns None from a server that does not tell."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    found = re.findall(r'^emberline_image_tiles_total\{[^}]*result="encoded"[^}]*\} ([0-9.e+]+)$', text, re.MULTILINE)
    return int(sum(map(float, found))) if found else None


async def first_tokens(port: int, model: str, side: int, n_images: int, repeats: int, rng: random.Random) -> Json:
    """Times to the first token in milliseconds, of new images and of the same again."""
    fresh: list[float] = []
    again: list[float] = []
    n_repeated = 0
    for number in range(repeats + 1):
        asked = body(model, [image_url(side, rng) for _ in range(n_images)], "What is in these pictures?", 2)
        first = await stream(port, PATH, asked)
        before = n_encoded(port)
        second = await stream(port, PATH, asked)
        after = n_encoded(port)
        if number:  # the first one starts what is started on demand
            fresh.append(first.ttft_s * 1e3)
            again.append(second.ttft_s * 1e3)
            n_repeated += (after or 0) - (before or 0)
    return {
        "ttft_ms": round(median(fresh), 1),
        "ttft_repeated_ms": round(median(again), 1),
        "repeated_encoded": n_repeated if before is not None else None,
        "prompt_tokens": first.prompt_tokens,
    }


async def token_latency(
    port: int, model: str, n_streams: int, tokens: int, per_s: float = 0.0, arrival: Callable[[], Json] | None = None
) -> Json:
    """Latency between tokens of text streams, in milliseconds. itl: the mean of each stream, its median and 99th
    percentile over all streams. gap: between two events of a stream, over all gaps of all streams. arrival: makes the
    requests of which so many a second arrive meanwhile."""
    rng = random.Random(7)
    ended = asyncio.Event()
    arrived: list[Reply] = []

    async def arrive(make: Callable[[], Json]) -> None:
        tasks: list[asyncio.Task[Reply]] = []
        while not ended.is_set():
            tasks.append(asyncio.create_task(stream(port, PATH, make())))
            try:
                await asyncio.wait_for(ended.wait(), 1 / per_s)
            except TimeoutError:
                continue
        arrived.extend(await asyncio.gather(*tasks))

    arriving = asyncio.create_task(arrive(arrival)) if arrival is not None else None
    prompts = [f"Tell a long story about the number {rng.randrange(10**9)}." for _ in range(n_streams)]
    asked = [body(model, [], prompt, tokens) | {"ignore_eos": True} for prompt in prompts]
    replies = await asyncio.gather(*(stream(port, PATH, one) for one in asked))
    ended.set()
    if arriving is not None:
        await arriving
    each = [1e3 * reply.decode_s / max(1, reply.output_tokens - 1) for reply in replies]
    gaps = [1e3 * (later - at) for reply in replies for at, later in pairwise(reply.event_at)]
    return {
        "itl_ms": _quantile(each, 0.5),
        "itl_p99_ms": _quantile(each, 0.99),
        "gap_p50_ms": _quantile(gaps, 0.5),
        "gap_p99_ms": _quantile(gaps, 0.99),
        "arrived": len(arrived),
        "arrived_ttft_ms": _quantile([1e3 * reply.ttft_s for reply in arrived], 0.5),
    }


def _quantile(values: Sequence[float], q: float) -> float:
    return round(sorted(values)[int(q * (len(values) - 1))], 2) if values else 0.0


async def measure(port: int, model: str, args: argparse.Namespace) -> Json:
    rng = random.Random(args.seed)
    found = await first_tokens(port, model, args.side, args.images, args.repeats, rng)
    one = await stream(port, PATH, body(model, [image_url(args.side, rng)], "What is it?", 2))

    def image() -> Json:
        return body(model, [image_url(args.side, rng)], "What is it?", 2)

    def text() -> Json:  # as many tokens, of which the tower computes none
        words = " ".join(str(rng.randrange(10)) for _ in range(one.prompt_tokens // 2))
        return body(model, [], words, 2)

    await token_latency(port, model, args.streams, 8)
    for name, arrival in (("alone", None), ("beside_images", image), ("beside_text", text)):
        found[name] = await token_latency(port, model, args.streams, args.tokens, args.per_s, arrival)
    found["itl_p99_ratio"] = round(found["beside_images"]["itl_p99_ms"] / found["alone"]["itl_p99_ms"], 2)
    found["gap_p99_ratio"] = round(found["beside_images"]["gap_p99_ms"] / found["alone"]["gap_p99_ms"], 2)
    return found


def wait_ready(port: int, server: Process, limit_s: float = 600.0) -> None:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        server.check()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(f"the server was not ready within {limit_s:.0f} s")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model that takes images: a folder, or a name")
    parser.add_argument("--peer", metavar="PORT=NAME", help="another server on loopback, and its name of the model")
    parser.add_argument("--side", type=int, default=1024, help="pixels of each image's side")
    parser.add_argument("--images", type=int, default=8, help="of one prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--per-s", type=float, default=2.0, help="images that arrive each second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".cache/images"), help="data folder and log")
    args = parser.parse_args(argv)
    ended_by_sigterm()
    results: dict[str, Json] = {}
    if args.model:
        port, data = free_port(), args.folder.resolve()
        command = [sys.executable, "-m", "emberline.cli.main", "serve", args.model, "--port", str(port)]
        with Process([*command, "--data-dir", str(data / "data")], data / "server.log") as server:
            wait_ready(port, server)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
                model = json.load(answer)["data"][0]["id"]
            results["emberline"] = asyncio.run(measure(port, model, args))
    if args.peer:
        port_text, _, model = args.peer.partition("=")
        results["peer"] = asyncio.run(measure(int(port_text), model, args))
    print(table(results, args.images))
    print(json.dumps(results, indent=2))


def table(results: dict[str, Json], n_images: int) -> str:
    """The main figures of each server, as a table."""
    head = ["", f"TTFT of {n_images} images, ms", "the same again, ms", "encoded again", "ITL p99 with ÷ without"]
    keys = ("ttft_ms", "ttft_repeated_ms", "repeated_encoded", "itl_p99_ratio")
    return markdown(head, [[name, *(str(found.get(key, "-")) for key in keys)] for name, found in results.items()])


if __name__ == "__main__":
    main()
