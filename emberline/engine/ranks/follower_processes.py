"""The follower processes that rank 0 starts on its own machine: the same command with another rank."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from emberline.engine.addresses import PARENT_VARIABLE, RANK_0_VARIABLE, TOKEN_VARIABLE
from emberline.protocol.errors import BadInput

WORKER = "emberline.engine.worker"


class FollowerProcesses:
    """Processes of the followers on this machine. They belong to rank 0's process group, end with it, and write to its
    log. A follower that cannot start says why on stdout."""

    def __init__(self, command: Sequence[str], ranks: Sequence[int], address: str, token: str) -> None:
        self._children = {
            rank: subprocess.Popen(
                [sys.executable, "-m", WORKER, *command, "--rank", str(rank), "--rendezvous", address],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={**os.environ, TOKEN_VARIABLE: token, PARENT_VARIABLE: str(os.getpid()), RANK_0_VARIABLE: "1"},
            )
            for rank in ranks
        }

    def check(self) -> None:
        """BadInput: one has ended, with the reason it gave."""
        for rank, child in self._children.items():
            if child.poll() is not None:
                raise BadInput(f"rank {rank} did not start: {_reason(child)}")

    def exit_of(self, rank: int, wait_s: float) -> str:
        """Describe how a follower ended whose connection is closed. Its exit status can be read a moment later, within
        wait_s."""
        try:
            code = self._children[rank].wait(wait_s)
        except (KeyError, subprocess.TimeoutExpired):
            return "its connection is closed"
        return f"killed by signal {-code}" if code < 0 else f"exited with status {code}"

    def pids(self) -> dict[int, int]:
        return {rank: child.pid for rank, child in self._children.items()}

    def end(self, wait_s: float) -> None:
        """Kill those that have not ended within the time, which is that of all together."""
        limit_s = time.monotonic() + wait_s
        for child in self._children.values():
            try:
                child.wait(max(0.0, limit_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def kill(self) -> None:
        for child in self._children.values():
            if child.poll() is None:
                child.kill()


def _reason(child: "subprocess.Popen[bytes]") -> str:
    said = b"" if child.stdout is None else child.stdout.read()
    for line in reversed(said.splitlines()):
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if isinstance(report, dict) and report.get("error"):
            return str(report["error"])
    code = child.returncode
    return f"killed by signal {-code}" if code < 0 else f"exited with status {code}; its log says why"
