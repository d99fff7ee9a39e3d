"""`emberline serve` for the soak: stand-in engines (or the real one), and pauses short enough for many deaths.

python -m tests.soak.server JOURNAL N_RUNNING SCRIPT [serve's own flags]; with SCRIPT "real", the real model.
"""

import functools
import socket
import sys
from pathlib import Path

from emberline.cli import serve
from emberline.cli.main import main
from emberline.config import EngineConfig
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import queue
from emberline.supervisor import engine_workers as local
from emberline.supervisor import process as child
from emberline.supervisor.http_workers import HttpWorkers
from emberline.supervisor.process import ChildSpec


def run(journal: str, n_running: str, script: str, flags: list[str]) -> int:
    def standin(plan: local.WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ChildSpec:
        arguments = ("--name", plan.model, "--socket", str(socket), "--script", script)
        arguments += ("--journal", journal, "--max-running", n_running)
        env = {"EMBERLINE_WORKER_TOKEN": token}
        return ChildSpec(name=plan.name, module="emberline.testing.standin_engine", arguments=arguments, env=env)

    if script != "real":
        local.worker_spec = standin
    serve.Doors = _doors  # type: ignore[assignment,misc]
    child.FIRST_RETRY_S = child.LAST_RETRY_S = 0.1  # ours dies more often than any process should
    queue.Limits = functools.partial(QueueLimits, backoff_s=(0.05, 0.5), lease_s=10.0)  # type: ignore[misc,assignment]
    return main(["serve", *flags])


def _doors(n: int, listener: socket.socket, module: str, arguments: list[str]) -> HttpWorkers:
    return HttpWorkers(n, listener, "tests.soak.door", arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
