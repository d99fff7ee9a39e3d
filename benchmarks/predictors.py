"""A predictor served by Emberline against the same one on Cog's server alone, in one run; and its return from zero.

python -m benchmarks.predictors [--requests N] [--json]

Requests alternate between the two, so that both meet the same load of the machine. The predictor returns its input; its
environment is built first, from the package index. Its first `setup`, when it is pushed, takes 5 s to fill the model's
store, as one that downloads and converts weights does. Prints medians in milliseconds, and for a model that was
unloaded the seconds to its first reply and the bytes of memory that its processes have left.
"""

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from emberline.predictor.versions import PredictorVersions
from emberline.protocol.prediction import Manifest

LOAD_S = 5
PROJECT = {
    "cog.yaml": 'run: "run.py:Runner"\n',
    "run.py": f"""import os, time
from pathlib import Path

from cog import BaseRunner


class Runner(BaseRunner):
    def setup(self) -> None:
        stored = Path(os.environ["HF_HOME"], "loaded")
        if not stored.exists():
            time.sleep({LOAD_S})
            stored.parent.mkdir(parents=True)
            stored.write_text("loaded")

    def run(self, text: str) -> str:
        return text
""",
}
START_S = 300.0
PAUSE_S = 0.01  # between two pairs of requests: Cog's server alone refuses one before it has freed the last one's slot
INPUT = {"text": "hello"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="to each of the two")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emberline-bench-") as folder:
        found = measure(Path(folder), args.requests)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:<28}{value:.3f}" if isinstance(value, float) else f"{name:<28}{value}")
    return 0


def measure(folder: Path, n_requests: int) -> dict[str, Any]:
    """Push, serve, compare, unload and load again."""
    home, project = folder / "home", folder / "echo"
    project.mkdir()
    for name, text in PROJECT.items():
        (project / name).write_text(text)
    emberline = [sys.executable, "-m", "emberline.cli.main"]
    push = [*emberline, "push", str(project), "--data-dir", str(home), "--fetch-from", "huggingface.co"]
    subprocess.run(push, check=True, stdout=subprocess.DEVNULL)
    (manifest,) = PredictorVersions(home).list("@me/echo")
    ports = free_port(), free_port()
    began_s = time.monotonic()
    server = subprocess.Popen(
        [*emberline, "serve", "@me/echo", "--port", str(ports[0]), "--data-dir", str(home)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    alone = _cog_server(manifest, PredictorVersions(home).path(manifest).parent / "src", ports[1])
    try:
        path = "/client/v4/accounts/bench/ai/run/@me/echo"
        ours, theirs = (
            http.client.HTTPConnection("127.0.0.1", ports[0]),
            http.client.HTTPConnection("127.0.0.1", ports[1]),
        )
        wait_until_served(ours, path, INPUT)
        first_s = time.monotonic() - began_s
        wait_until_served(theirs, "/predictions", {"input": INPUT})
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(n_requests):
            times[0].append(ask(ours, path, INPUT))
            times[1].append(ask(theirs, "/predictions", {"input": INPUT}))
            time.sleep(PAUSE_S)
        alone.terminate()
        alone.wait()
        loaded = _memory_of(manifest.folders[0])
        ask(ours, "/api/models/unload", {"model": "@me/echo"})
        left = _memory_of(manifest.folders[0])
        return_s = ask(ours, path, INPUT)
        medians = [1000 * statistics.median(each) for each in times]
        return {
            "emberline_p50_ms": medians[0],
            "cog_alone_p50_ms": medians[1],
            "added_p50_ms": medians[0] - medians[1],
            "requests": n_requests,
            "server_and_first_reply_s": first_s,
            "first_setup_s": manifest.setup_s,
            "return_from_zero_s": return_s,
            "return_is_faster_by": manifest.setup_s / return_s,
            "bytes_loaded": loaded,
            "bytes_left_at_zero": left,
        }
    finally:
        for process in (server, alone):
            process.terminate()
            process.wait()


def _cog_server(manifest: Manifest, source: Path, port: int) -> "subprocess.Popen[bytes]":
    """Cog's own server with the same predictor, without a sandbox: the predictor is this script's."""
    env = {
        "PATH": f"{Path(manifest.interpreter).parent}:{os.environ['PATH']}",
        "COG_PREDICT_TYPE_STUB": manifest.reference,
        "PORT": str(port),
        "COG_LOG_LEVEL": "warning",
        "HF_HOME": f"{manifest.store}/huggingface",
    }
    command = [manifest.interpreter, "-m", "cog.server.http", "--host", "127.0.0.1"]
    return subprocess.Popen(command, cwd=source, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ask(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> float:
    """Seconds of one request that succeeds."""
    began_s = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    assert response.status == 200, answer
    return time.perf_counter() - began_s


def wait_until_served(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> None:
    """Ask until a request succeeds. Raises the last failure after START_S."""
    end_s = time.monotonic() + START_S
    while True:
        try:
            ask(connection, path, body)
            return
        except (OSError, http.client.HTTPException, AssertionError):
            connection.close()
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def _memory_of(environment: str) -> int:
    """Resident bytes of the processes that run an interpreter of the environment."""
    n_bytes = 0
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if environment in (each / "cmdline").read_text():
                n_bytes += int((each / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return n_bytes


def free_port() -> int:
    """A TCP port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
