"""The latency of a model beside a predictor that misbehaves, against its latency beside the same predictor at rest.

python -m benchmarks.bad_predictors [--seconds S] [--rounds N] [--json]

One server has a predictor that returns its input and one that hangs, leaks, forks, writes 10 GB, floods its log or
returns 40 MB, one after another without a pause. Windows with and without such requests alternate, so that both meet
the same load of the machine. Prints p50 and p99 in milliseconds, and the ratio of the two p99.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.predictors import ask, free_port, wait_until_served

ACTS = ("hang", "leak", "fork", "fill", "flood", "large")
PREDICT_S = 4  # after which a prediction that hangs is ended
PAUSE_S = 0.005  # between two measured requests
BAD_PAUSE_S = 0.05  # between two requests to the one that misbehaves
SETTLE_S = 0.3  # between two windows
GOOD = """from cog import BaseRunner


class Runner(BaseRunner):
    def run(self, text: str) -> str:
        return text
"""
BAD = """import os
import time

from cog import BaseRunner


class Runner(BaseRunner):
    def run(self, act: str) -> str:
        return getattr(self, act)()

    def hang(self) -> str:
        while True:
            pass

    def leak(self) -> str:
        held = []
        while True:
            held.append(bytearray(b"x" * (16 << 20)))

    def fork(self) -> str:
        n_forked = 0
        try:
            while os.fork():
                n_forked += 1
            time.sleep(2)
            os._exit(0)
        except OSError:
            return str(n_forked)

    def fill(self) -> str:
        with open("/tmp/large", "wb") as large:
            for _ in range(10 << 10):
                large.write(b"x" * (1 << 20))
        return ""

    def flood(self) -> str:
        for _ in range(100_000):
            print("x" * 80)
        return ""

    def large(self) -> str:
        return "x" * (40 << 20)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of a window (default 3)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="pairs of windows for each (default 10)")
    parser.add_argument("--only", choices=ACTS, action="append", help="measure beside this one alone")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emberline-bench-") as folder:
        found = measure(Path(folder), args.seconds, args.rounds, args.only or ACTS)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    heads = f"{'predictor':<12}{'p50':>8}{'beside':>8}{'p99':>9}{'beside':>9}{'ratio':>8}{'requests':>10}"
    print(f"{heads}  answers of the bad one")
    for row in found:
        print(
            f"{row['act']:<12}{row['p50_ms']:8.2f}{row['p50_beside_ms']:8.2f}{row['p99_ms']:9.2f}"
            f"{row['p99_beside_ms']:9.2f}{row['p99_ratio']:8.2f}{row['requests']:10}  {row['bad_answers']}"
        )
    return 0


def measure(folder: Path, window_s: float, n_rounds: int, acts: Sequence[str]) -> list[dict[str, Any]]:
    """Push both predictors, serve them, and measure beside each kind of request."""
    with serving(folder) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        rows = []
        for act in acts:
            quiet: list[float] = []
            beside: list[float] = []
            statuses: dict[int, int] = {}
            for _ in range(n_rounds):
                time.sleep(SETTLE_S)
                quiet += ask_for(connection, window_s)
                with misbehaving(port, act) as counted:
                    time.sleep(SETTLE_S)
                    beside += ask_for(connection, window_s)
                statuses = {each: statuses.get(each, 0) + counted.get(each, 0) for each in {*statuses, *counted}}
            rows.append(
                {
                    "act": act,
                    "p50_ms": 1000 * statistics.median(quiet),
                    "p50_beside_ms": 1000 * statistics.median(beside),
                    "p99_ms": 1000 * percentile(quiet, 0.99),
                    "p99_beside_ms": 1000 * percentile(beside, 0.99),
                    "p99_ratio": percentile(beside, 0.99) / percentile(quiet, 0.99),
                    "requests": len(quiet) + len(beside),
                    "bad_answers": statuses,
                }
            )
        return rows


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    """A server with both predictors, at the port."""
    home, port = folder / "home", free_port()
    emberline = [sys.executable, "-m", "emberline.cli.main"]
    small = ["--memory", "512MiB", "--scratch", "512MiB", "--timeout", str(PREDICT_S)]
    for name, source in (("good", GOOD), ("bad", BAD)):
        project = folder / name
        project.mkdir()
        (project / "cog.yaml").write_text('run: "run.py:Runner"\n')
        (project / "run.py").write_text(source)
        command = [*emberline, "push", str(project), "--data-dir", str(home), *small]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = subprocess.Popen(
        [*emberline, "serve", "@me/good", "@me/bad", "--port", str(port), "--data-dir", str(home)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        wait_until_served(connection, path_of("good"), {"text": "x"})
        wait_until_served(connection, path_of("bad"), {"act": "flood"})
        yield port
    finally:
        server.terminate()
        server.wait()


@contextmanager
def misbehaving(port: int, act: str) -> Iterator[dict[int, int]]:
    """Requests for the act one after another, in a thread. Yields the number of answers by status, which grows."""
    counted, is_over = dict[int, int](), threading.Event()

    def run() -> None:
        while not is_over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("POST", path_of("bad"), json.dumps({"act": act}))
                response = connection.getresponse()
                response.read()
                counted[response.status] = counted.get(response.status, 0) + 1
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            is_over.wait(BAD_PAUSE_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield counted
    finally:
        is_over.set()
        thread.join()


def ask_for(connection: http.client.HTTPConnection, limit_s: float) -> list[float]:
    """Seconds of each request to the good model in a window."""
    found, end_s = [], time.monotonic() + limit_s
    while time.monotonic() < end_s:
        found.append(ask(connection, path_of("good"), {"text": "hello"}))
        time.sleep(PAUSE_S)
    return found


def path_of(name: str) -> str:
    """The path of a model's predictions."""
    return f"/client/v4/accounts/bench/ai/run/@me/{name}"


def percentile(values: list[float], share: float) -> float:
    """The value that this share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    sys.exit(main())
