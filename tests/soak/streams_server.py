"""`emberline serve` for the soak test of streams: stand-in engines in their roles, or the real model.

python -m tests.soak.streams_server SCRIPT [flags of serve]; with SCRIPT "real", the real model.
"""

import sys

from emberline.cli.main import main
from emberline.supervisor import engine_workers, process
from tests.soak import http_worker  # noqa: F401  skips the warm-up
from tests.standin import standin_worker

SIZES = ("--max-running", "16", "--token-budget", "256", "--kv-tokens", "65536", "--head-dim", "16")


def run(script: str, flags: list[str]) -> int:
    if script != "real":
        engine_workers.worker_spec = standin_worker("--script", script, *SIZES)
    process.MIN_BACKOFF_S = process.MAX_BACKOFF_S = 0.1  # these processes are killed often
    return main(["serve", *flags])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
