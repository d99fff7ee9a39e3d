"""A measured server process: memory, CPU time and stop cover its whole tree."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.process import Interference, Process, ServerDied, cpu_s

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; x = bytearray(40_000_000); time.sleep(60)"])
while True: time.sleep(0.01)
"""


def test_measures_and_stops_the_whole_tree(tmp_path: Path) -> None:
    with Process([sys.executable, "-c", PARENT], tmp_path / "log") as server:
        deadline = time.monotonic() + 60
        while server.pss_bytes() < 45_000_000 and time.monotonic() < deadline:
            time.sleep(0.05)
        tree = server.tree()
        assert len(tree) == 2
        assert server.pss_bytes() > 45_000_000
        assert cpu_s(server.pid) >= 0.0
        server.check()
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in tree) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(pid) for pid in tree)


def test_reports_why_a_server_exited(tmp_path: Path) -> None:
    with Process([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log") as server:
        deadline = time.monotonic() + 60
        while _alive(server.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(ServerDied, match="no such model"):
            server.check()


def test_cpu_time_of_others_is_separate(tmp_path: Path) -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    with Process(spin, tmp_path / "server"), Process(spin, tmp_path / "other") as measured:
        others = Interference(measured)
        before_s, deadline = cpu_s(measured.pid), time.monotonic() + 60
        while (others.share <= 0.05 or cpu_s(measured.pid) <= before_s) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert others.share > 0.05  # the other process, which spins
        assert cpu_s(measured.pid) > before_s


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end after the file was opened
        return False
