"""Text embeddings over HTTP against sentence-transformers: `python -m benchmarks.embeddings`.

Sixteen clients send one text of 16 to 256 tokens a request to `emberline serve`, on the cores that the peer uses before
and after it. The peer is sentence-transformers, in float32: called once per request (in a loop without HTTP, its best
case, and behind a threaded HTTP server) and in batches of 32 sorted by length. Vectors are compared, too.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.contender import Setup
from benchmarks.cpu_usage import cpu_s, family
from benchmarks.peers.venv import ensure_venv
from benchmarks.process import Process, ended_by_sigterm, free_port
from benchmarks.report import markdown, spread
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from emberline.config import home_dir
from emberline.text.text_encoder import TextEncoder
from emberline.weights.task_config import task_of

MODEL = "@cf/sentence-transformers/all-minilm-l6-v2"
PINS = ("sentence-transformers==6.2.0", "torch==2.13.0")
CLIENTS = 16
SHORTEST, LONGEST = 16, 256  # tokens, special tokens included
GOALS = {"once": 3.0, "batched": 1.0}
TITLES = {
    "emberline": "Emberline, 16 clients over HTTP",
    "once": "sentence-transformers, once per request, no HTTP",
    "server": "sentence-transformers, once per request, behind HTTP",
    "batched": "sentence-transformers, batches of 32",
}


def make_texts(encoder: TextEncoder, n: int, seed: int = 0) -> tuple[list[str], int]:
    """Random words, of lengths evenly distributed; and the number of tokens."""
    rng = random.Random(seed)
    words = [line for line in Path(__file__).read_text().split() if line.isalpha()]
    texts: list[str] = []
    n_tokens = 0
    for _ in range(n):
        wanted, text = rng.randint(SHORTEST, LONGEST), [rng.choice(words)]
        while len(encoder.encode([" ".join(text)]).ids) // 4 < wanted:
            text.append(rng.choice(words))
        if len(encoder.encode([" ".join(text)]).ids) // 4 > LONGEST:
            text.pop()
        texts.append(" ".join(text))
        n_tokens += encoder.encode([texts[-1]]).lens[0]
    return texts, n_tokens


async def post(port: int, path: str, bodies: Sequence[bytes]) -> list[bytes]:
    """The replies to all bodies, sent by CLIENTS connections that wait for each reply."""
    replies = [b""] * len(bodies)
    waiting = iter(range(len(bodies)))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for index in waiting:
            head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {len(bodies[index])}\r\n\r\n"
            writer.write(head.encode() + bodies[index])
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
            replies[index] = await reader.readexactly(length)
            assert b" 200 " in answer.partition(b"\r\n")[0] + b" ", replies[index][:300]
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return replies


class Peer:
    """sentence-transformers in its own process."""

    def __init__(self, python: Path, model: Path, texts: Path, port: int) -> None:
        script = Path(__file__).parent / "peers" / "sentence_transformers_server.py"
        self._process = subprocess.Popen(
            [str(python), str(script), str(model), str(texts), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"},
        )
        assert self._read()["ready"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "sentence-transformers ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def timed(pid: int, work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and seconds of CPU time of the process and its children: those are the same on a busy machine."""
    began_s, spent_s = time.perf_counter(), cpu_s(family(pid))
    work()
    return time.perf_counter() - began_s, cpu_s(family(pid)) - spent_s


def wait_ready(process: Process, port: int, limit_s: float = 120.0) -> None:
    until_s = time.monotonic() + limit_s
    while True:
        try:
            asyncio.run(asyncio.wait_for(_probe(port), 1.0))
            return
        except (OSError, TimeoutError):
            assert time.monotonic() < until_s, process.log.read_text()[-2000:]
            time.sleep(0.1)


async def _probe(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    entry = pull(args.model, ModelStore(home_dir(os.environ)))
    encoder = TextEncoder.load(entry.path, task_of(entry.path))
    texts, n_tokens = make_texts(encoder, args.texts)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in TITLES}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "texts.json").write_text(json.dumps(texts))
        setup = Setup(entry.path, args.cache, lambda line: print(line, file=sys.stderr, flush=True))
        python = args.python or ensure_venv(setup, "sentence-transformers", PINS)
        port, peer_port = free_port(), free_port()
        command = [sys.executable, "-m", "emberline.cli.main", "serve", str(entry.card.id), "--port", str(port)]
        with Process([*command, "--data-dir", str(home_dir(os.environ))], folder / "serve.log") as process:
            peer = Peer(python, entry.path, folder / "texts.json", peer_port)
            try:
                wait_ready(process, port)
                ours = [json.dumps({"model": entry.card.id, "input": t, "encoding_format": "base64"}) for t in texts]
                theirs = [json.dumps({"input": text}).encode() for text in texts]
                difference = compare(peer, port, entry.card.id, texts, folder)
                bodies = [body.encode() for body in ours]
                runs: dict[str, tuple[int, Callable[[], Any]]] = {
                    "emberline": (process.pid, lambda: asyncio.run(post(port, "/v1/embeddings", bodies))),
                    "once": (peer.pid, lambda: peer.ask("once")),
                    "batched": (peer.pid, lambda: peer.ask("batched")),
                    "server": (peer.pid, lambda: asyncio.run(post(peer_port, "/", theirs))),
                }
                for _ in range(args.repeats):  # in turns, so that a busy moment of the machine hits all of them
                    for name, (pid, work) in runs.items():
                        times[name].append(timed(pid, work))
                        setup.say(f"{TITLES[name]}: {len(texts) / times[name][-1][0]:.1f} texts/s")
            finally:
                peer.stop()
    rates = {name: [len(texts) / s for s, _ in values] for name, values in times.items()}
    by_cpu = {name: [len(texts) / s for _, s in values] for name, values in times.items()}
    return {
        "model": entry.card.id,
        "texts": len(texts),
        "tokens": n_tokens,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "texts_per_s": rates,
        "texts_per_cpu_s": by_cpu,
        "emberline_over": _ratios(rates),
        "emberline_over_by_cpu": _ratios(by_cpu),
        "largest_difference": difference,
    }


def _ratios(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in list(TITLES)[1:]:
        over = [ours / theirs for ours, theirs in zip(rates["emberline"], rates[name], strict=True)]
        found[name] = {"median": median(over), "min": min(over), "max": max(over)}
    return found


def compare(peer: Peer, port: int, model: str, texts: list[str], folder: Path) -> float:
    """The largest difference of two numbers of a vector."""
    peer.ask(f"vectors {folder / 'vectors.bin'}")
    expected = np.fromfile(folder / "vectors.bin", "<f4").reshape(len(texts), -1)
    bodies = [json.dumps({"model": model, "input": text}).encode() for text in texts]
    replies = asyncio.run(post(port, "/v1/embeddings", bodies))
    found = np.array([json.loads(reply)["data"][0]["embedding"] for reply in replies])
    return float(np.abs(found - expected).max())


def _ratio(over: dict[str, float] | None) -> str:
    return "" if over is None else f"{over['median']:.2f} ({over['min']:.2f} to {over['max']:.2f})"


def main() -> int:
    ended_by_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embeddings", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="an embeddings model that sentence-transformers can load, too")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where the peer is installed")
    parser.add_argument("--python", type=Path, help="of an environment that has sentence-transformers")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    found = measure(args)
    rows = []
    for name, title in TITLES.items():
        values = found["texts_per_s"][name]
        ratio, by_cpu = (_ratio(found[key].get(name)) for key in ("emberline_over", "emberline_over_by_cpu"))
        goal = f"≥ {GOALS[name]:.1f}" if name in GOALS else ""
        rows.append([title, f"{median(values):.1f}", f"±{spread(values):.0%}", ratio, goal, by_cpu])
    print(markdown(["", "texts/s", "spread", "Emberline ÷ it", "goal", "by CPU time"], rows))
    print(
        f"\n{found['texts']} texts, {found['tokens'] / found['texts']:.0f} tokens on average, {found['cores']} cores, "
        f"load average {found['load_average']:.1f}; largest difference of a number {found['largest_difference']:.1e}"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
