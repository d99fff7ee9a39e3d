"""Two models on one machine: `python -m benchmarks.model_switching [--part switching|threads] [MODEL MODEL]`.

switching: room for one of the two, clients of both. No stream may be cut, and no request may wait longer than a turn
and two switches, each as long as the longest request, unloading and loading take. threads: one model beside an idle
one, and two busy ones, with the cores shared by need and split at start. Prints JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.client import Reply, RequestFailed, stream
from benchmarks.process import Process, ended_by_sigterm, free_port
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from emberline.config import home_dir

PROMPT = "The history of the city begins with"
START_S = 120.0


@dataclass
class Record:
    """What the clients of one model saw."""

    replies: list[Reply] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    cut: int = 0

    def summary(self, took_s: float) -> dict[str, Any]:
        waits = sorted(reply.ttft_s for reply in self.replies)
        return {
            "requests": len(self.replies),
            "cut": self.cut,
            "errors": self.errors[:3],
            "wait_p50_s": round(waits[len(waits) // 2], 2) if waits else None,
            "wait_max_s": round(waits[-1], 2) if waits else None,
            "longest_s": round(max((reply.last_at - reply.first_at for reply in self.replies), default=0.0), 2),
            "output_tokens_per_s": round(sum(reply.output_tokens for reply in self.replies) / took_s, 1),
        }


async def ask(port: int, model: str, n_tokens: int, record: Record) -> None:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        reply = await stream(port, "/v1/completions", body)
    except RequestFailed as error:
        record.errors.append(str(error)[:300])
        return
    record.replies.append(reply)
    record.cut += reply.output_tokens != n_tokens


async def load(port: int, clients: dict[str, int], n_tokens: int, seconds: float) -> tuple[dict[str, Record], float]:
    """Clients that ask again and again, until the time is over; those that run then finish."""
    records = {model: Record() for model in clients}
    began_s = time.perf_counter()

    async def client(model: str) -> None:
        while time.perf_counter() - began_s < seconds:
            await ask(port, model, n_tokens, records[model])

    await asyncio.gather(*(client(model) for model, n in clients.items() for _ in range(n)))
    return records, time.perf_counter() - began_s


@contextmanager
def serving(home: Path, log: Path, models: list[str], flags: list[str], **env: str) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-m", "emberline.cli.main", "serve", *models, "--port", str(port), "--kv-bytes", "256M"]
    with Process([*command, *flags], log, {"EMBERLINE_HOME": str(home), **env}) as process:
        until_s = time.monotonic() + START_S
        while not _healthy(port):
            process.check()
            if time.monotonic() > until_s:
                raise TimeoutError(f"the server is not ready; its log is {log}")
            time.sleep(0.1)
        yield port


def _healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def switches(log: Path) -> dict[str, Any]:
    """How often models were loaded, and how long that took, from the server's log."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    loads = [line["seconds"] for line in lines if line["message"].startswith("loaded ") and "seconds" in line]
    return {"loads": len(loads), "load_max_s": max(loads, default=0.0)}


def switching(home: Path, folder: Path, models: list[str], args: argparse.Namespace) -> dict[str, Any]:
    env = {"EMBERLINE_MODELS_MAX_LOADED": "1", "EMBERLINE_MODELS_SWITCH_AFTER_S": str(args.switch_after)}
    log = folder / "switching.log"
    with serving(home, log, models, [], **env) as port:
        clients = dict.fromkeys(models, args.clients)
        records, took_s = asyncio.run(load(port, clients, args.tokens, args.seconds))
    found = {model: record.summary(took_s) for model, record in records.items()}
    times = switches(log)
    longest_s = max(summary["longest_s"] for summary in found.values())
    bound_s = args.switch_after + 2 * (longest_s + times["load_max_s"] + 1.0)
    worst_s = max(summary["wait_max_s"] or 0.0 for summary in found.values())
    return {
        "models": found,
        **times,
        "seconds": round(took_s, 1),
        "bound_s": round(bound_s, 2),
        "wait_max_s": worst_s,
        "bound_kept": worst_s <= bound_s,
        "no_stream_cut": not any(summary["cut"] or summary["errors"] for summary in found.values()),
    }


def threads(home: Path, folder: Path, models: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens a second with the cores shared by need, and with them split."""
    first, second = models
    half = ["--threads", str(max(1, len(os.sched_getaffinity(0)) // 2))]
    one, both = {first: args.clients}, {first: args.clients, second: args.clients}
    runs: dict[str, tuple[list[str], list[str], dict[str, int]]] = {
        "alone": ([first], [], one),
        "beside_idle": (models, [], one),
        "beside_idle_split": (models, half, one),
        "both_busy": (models, [], both),
        "both_busy_split": (models, half, both),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats):
        for name, (served, flags, clients) in runs.items():
            with serving(home, folder / f"{name}-{repeat}.log", served, flags) as port:
                asyncio.run(load(port, clients, 4, 1.0))
                records, took_s = asyncio.run(load(port, clients, args.tokens, args.seconds / 4))
            total = sum(reply.output_tokens for record in records.values() for reply in record.replies)
            rates[name].append(round(total / took_s, 1))
    middle = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    return {
        "output_tokens_per_s": middle,
        "all": rates,
        "beside_idle_over_alone": round(middle["beside_idle"] / middle["alone"], 3),
        "both_busy_over_split": round(middle["both_busy"] / middle["both_busy_split"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Two models on one machine.")
    parser.add_argument("models", nargs="*", default=["smollm2", "gemma-3-270m"], metavar="MODEL")
    parser.add_argument("--part", choices=("switching", "threads"), action="append")
    parser.add_argument("--clients", type=int, default=4, help="of each model (default 4)")
    parser.add_argument("--tokens", type=int, default=64, help="of each reply (default 64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load (default 60)")
    parser.add_argument("--switch-after", type=float, default=5.0, help="seconds of a turn (default 5)")
    parser.add_argument("--repeats", type=int, default=3, help="of the part `threads` (default 3)")
    args = parser.parse_args()
    ended_by_sigterm()
    home = home_dir(os.environ)
    models = [pull(name, ModelStore(home)).card.id for name in args.models]
    folder = Path(tempfile.mkdtemp(prefix="emberline-bench-"))
    with tempfile.TemporaryDirectory(prefix="emberline-bench-home-") as own:
        (Path(own) / "models").symlink_to(home / "models")
        parts = {"switching": switching, "threads": threads}
        result = {name: parts[name](Path(own), folder, models, args) for name in args.part or parts}
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "logs": str(folder), **result}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
