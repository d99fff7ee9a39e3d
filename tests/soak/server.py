"""`emberline serve` for the soak test of the queue: stand-in engines (or the real one) and short backoffs.

python -m tests.soak.server JOURNAL N_RUNNING SCRIPT [flags of serve]; with SCRIPT "real", the real model.
"""

import functools
import socket
import sys

from emberline.cli import serve
from emberline.cli.main import main
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import queue
from emberline.supervisor import engine_workers, process
from emberline.supervisor.http_workers import HttpWorkers
from tests.standin import standin_worker


def run(journal: str, n_running: str, script: str, flags: list[str]) -> int:
    if script != "real":
        engine_workers.worker_spec = standin_worker(
            "--script", script, "--journal", journal, "--max-running", n_running
        )
    serve.HttpWorkers = _http_workers  # type: ignore[assignment,misc]
    process.MIN_BACKOFF_S = process.MAX_BACKOFF_S = 0.1  # these processes are killed often
    queue.QueueLimits = functools.partial(QueueLimits, backoff_s=(0.05, 0.5), lease_s=10.0)  # type: ignore[misc,assignment]
    return main(["serve", *flags])


def _http_workers(n: int, listener: socket.socket, module: str, arguments: list[str]) -> HttpWorkers:
    return HttpWorkers(n, listener, "tests.soak.http_worker", arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
