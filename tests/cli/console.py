"""Runs the command line as a process, with pipes or in a pseudo-terminal."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path


def emberline(*words: str, home: Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EMBERLINE_")}
    return subprocess.run(
        [sys.executable, "-m", "emberline.cli.main", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**environ, "EMBERLINE_HOME": str(home), **env},
    )


class Terminal:
    """`emberline run` in a pseudo-terminal."""

    def __init__(self, port: str, home: Path) -> None:
        self.master, slave = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "emberline.cli.main", "run", "--port", port],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "EMBERLINE_HOME": str(home), "TERM": "dumb"},
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str, limit_s: float = 60.0) -> None:
        end_s = time.monotonic() + limit_s
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def close(self) -> int:
        code = self.process.wait(60)
        os.close(self.master)
        return code
