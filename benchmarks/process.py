"""A server process under measurement: start, memory, CPU time, stop."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def ended_by_sigterm() -> None:
    """Make SIGTERM unwind this program as Ctrl-C does, so that it stops the servers it has started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    """Below those that the system gives to connections and to others: nobody is given it before the server has it."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(12_000, 32_000)))
            return int(probe.getsockname()[1])


class ServerDied(RuntimeError):
    """The server exited; the message contains the end of its log."""


class Process:
    """A server process and all its children. Its output goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.started_at = time.perf_counter()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        code = self._process.poll()
        if code is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise ServerDied(f"the server ended with status {code}; the end of {self.log}:\n{tail}")

    def pss_bytes(self) -> int:
        """Memory of the whole tree, shared pages counted once (sum of proportional set sizes)."""
        return sum(_pss_bytes(pid) for pid in self.tree())

    def tree(self) -> list[int]:
        """This process and its descendants."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (fields := _stat(int(entry.name))):
                children.setdefault(int(fields[1]), []).append(int(entry.name))
        found = [self.pid]
        for pid in found:
            found.extend(children.get(pid, []))
        return found

    def stop(self, grace_s: float = 10.0) -> None:
        """Stop the process group: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
                self._process.wait(grace_s)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # children that outlived their parent


class Interference:
    """The share of the machine that other processes used during a measurement."""

    def __init__(self, server: Process) -> None:
        self._server = server
        self._began = time.perf_counter()
        self._others_s = self._others()

    @property
    def share(self) -> float:
        """CPU time of processes other than the server and this one, over the CPU time available."""
        had_s = (time.perf_counter() - self._began) * len(os.sched_getaffinity(0))
        return max(0.0, self._others() - self._others_s) / had_s

    def _others(self) -> float:
        return _busy_s() - time.process_time() - sum(cpu_s(pid) for pid in self._server.tree())


def cpu_s(pid: int) -> float:
    """CPU seconds (user and system) of a process; 0 if it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0


def _busy_s() -> float:
    """CPU seconds of the whole machine since boot, including steal time."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command name: state, parent, …; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _pss_bytes(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
