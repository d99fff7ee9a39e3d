"""Runs Mooncake's master as a supervised process: ready when it answers, killed when it does not, gone with its parent.

It exits when the master has ended, so that its supervisor starts both anew on the same ports. The master keeps what the
pool holds in memory: a new one begins with an empty pool.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from emberline.kv.tiers.pool.pool_master import MasterMetrics
from emberline.kv.tiers.pool.pool_process import end_with_parent

START_S = 20.0
CHECK_S = 1.0
MAX_FAILED_CHECKS = 4  # each may take two seconds


def command(host: str, port: int, metrics_port: int) -> list[str]:
    package = importlib.util.find_spec("mooncake")
    assert package is not None
    assert package.origin is not None
    return [
        str(Path(package.origin).with_name("mooncake_master")),
        *(f"--rpc_address={host}", f"--rpc_port={port}"),
        *(f"--metrics_host={host}", f"--metrics_port={metrics_port}"),
        "--enable_metric_reporting=false",
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emberline.kv.tiers.pool.mooncake_master", description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    args = parser.parse_args(argv)
    end_with_parent()
    master = subprocess.Popen(
        command(args.host, args.port, args.metrics_port),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        return _watch(master, MasterMetrics(f"{args.host}:{args.metrics_port}"))
    finally:
        master.kill()
        master.wait()


def _watch(master: "subprocess.Popen[bytes]", metrics: MasterMetrics) -> int:
    until_s = time.monotonic() + START_S
    while not metrics.is_healthy():
        if master.poll() is not None or time.monotonic() > until_s:
            ended = master.poll() is not None
            error = f"mooncake_master ended with status {master.returncode}" if ended else "mooncake_master hangs"
            print(json.dumps({"ready": False, "error": error}), flush=True)
            return 1
        time.sleep(0.05)
    print(json.dumps({"ready": True, "pid": os.getpid(), "master_pid": master.pid}), flush=True)
    n_failed = 0
    while n_failed < MAX_FAILED_CHECKS:
        try:
            master.wait(CHECK_S)
            return 1
        except subprocess.TimeoutExpired:
            n_failed = 0 if metrics.is_healthy() else n_failed + 1
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
