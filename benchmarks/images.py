"""Images over HTTP: `python -m benchmarks.images [MODEL]`. Prints a table and JSON.

It starts `emberline serve MODEL` (a folder or a name). With `--peer PORT=NAME` it asks a running server, too.

- Time to the first token of a prompt with 8 distinct images, new each time, and of the same prompt again. The engine's
  counter tells how many images its tower computed (target: 0 when they are repeated).
- Inter-token latency of text streams, alone and while so many images a second arrive (target: p99 at most 1.5 times).
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
from collections.abc import Sequence
from io import BytesIO
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


async def token_latency(port: int, model: str, side: int, n_streams: int, per_s: float, tokens: int) -> Json:
    """Mean time between two tokens of each stream, in milliseconds: the median and the 99th percentile of all."""
    rng = random.Random(7)
    ended = asyncio.Event()
    n_sent = 0

    async def arrive() -> None:
        nonlocal n_sent
        tasks: list[asyncio.Task[Reply]] = []
        while not ended.is_set():
            url = image_url(side, rng)
            tasks.append(asyncio.create_task(stream(port, PATH, body(model, [url], "What is it?", 2))))
            n_sent += 1
            try:
                await asyncio.wait_for(ended.wait(), 1 / per_s)
            except TimeoutError:
                continue
        await asyncio.gather(*tasks)

    arriving = asyncio.create_task(arrive()) if per_s else None
    prompts = [f"Tell a long story about the number {rng.randrange(10**9)}." for _ in range(n_streams)]
    asked = [body(model, [], prompt, tokens) | {"ignore_eos": True} for prompt in prompts]
    replies = await asyncio.gather(*(stream(port, PATH, one) for one in asked))
    ended.set()
    if arriving is not None:
        await arriving
    each = sorted(1e3 * reply.decode_s / max(1, reply.output_tokens - 1) for reply in replies)
    return {
        "itl_ms": round(median(each), 2),
        "itl_p99_ms": round(each[int(0.99 * (len(each) - 1))], 2),
        "images": n_sent,
    }


async def measure(port: int, model: str, args: argparse.Namespace) -> Json:
    found = await first_tokens(port, model, args.side, args.images, args.repeats, random.Random(args.seed))
    alone = await token_latency(port, model, args.side, args.streams, 0, args.tokens)
    beside = await token_latency(port, model, args.side, args.streams, args.per_s, args.tokens)
    ratio = round(beside["itl_p99_ms"] / alone["itl_p99_ms"], 2)
    return found | {"alone": alone, "beside": beside, "itl_p99_ratio": ratio}


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
    rows = [
        [name, found["ttft_ms"], found["ttft_repeated_ms"], found["repeated_encoded"], found["itl_p99_ratio"]]
        for name, found in results.items()
    ]
    head = [
        "",
        f"TTFT of {args.images} images, ms",
        "the same again, ms",
        "encoded again",
        "ITL p99 with ÷ without",
    ]
    print(markdown(head, [[str(cell) for cell in row] for row in rows]))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
