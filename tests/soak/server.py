"""`emberline serve` for the soak tests: stand-in engines (or the real model) and short backoffs.

python -m tests.soak.server SCRIPT "FLAGS OF THE STAND-IN" [flags of serve]; with SCRIPT "real", the real model.
"""

import functools
import shlex
import socket
import sys

import msgspec

from emberline.cli import serve
from emberline.cli.main import main
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import queue
from emberline.supervisor import engine_workers, process
from emberline.supervisor.engine_workers import worker_spec
from emberline.supervisor.http_workers import HttpWorkers
from tests.soak import http_worker  # noqa: F401  skips the warm-up
from tests.standin import standin_worker

BACKOFF_S = 0.1  # these processes are killed often


def run(script: str, standin_flags: str, flags: list[str]) -> int:
    is_real = script == "real"
    make_spec = worker_spec if is_real else standin_worker("--script", script, *shlex.split(standin_flags))
    engine_workers.worker_spec = lambda *planned: msgspec.structs.replace(make_spec(*planned), backoff_s=BACKOFF_S)
    serve.HttpWorkers = _http_workers  # type: ignore[assignment,misc]
    process.MAX_BACKOFF_S = BACKOFF_S
    queue.QueueLimits = functools.partial(QueueLimits, backoff_s=(0.05, 0.5), lease_s=10.0)  # type: ignore[misc,assignment]
    return main(["serve", *flags])


def _http_workers(n: int, listener: socket.socket, module: str, plan: bytes) -> HttpWorkers:
    return HttpWorkers(n, listener, "tests.soak.http_worker", plan, backoff_s=BACKOFF_S)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:]))
