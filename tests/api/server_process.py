"""Runs `emberline serve` as processes, with a stand-in engine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Running(NamedTuple):
    url: str
    process: "subprocess.Popen[str]"

    def kill(self) -> None:
        """The core at once; its APIs and engines see it and go."""
        os.killpg(self.process.pid, signal.SIGKILL)


def make_home(smollm2: Path, folder: Path) -> Path:
    home = folder / "home"
    (home / "models").mkdir(parents=True)
    (home / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    return home


@contextmanager
def serving(home: Path, script: str, n_running: int, *flags: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "tests.soak.server", script, f"--journal {home}/journal --max-running {n_running}"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json", "--log-level", "error", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EMBERLINE_HOME": str(home)},
        start_new_session=True,
    )
    assert process.stdout is not None
    running = None
    try:
        running = Running(json.loads(process.stdout.readline())["url"], process)
        yield running
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
