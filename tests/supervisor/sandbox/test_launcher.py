"""Confined processes: what they cannot reach, and what ends them."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberline.supervisor.sandbox.confinement import Confinement
from emberline.supervisor.sandbox.launcher import ConfinedProcess, Launcher

MODULE = "tests.supervisor.sandbox.misbehaving"
MEMORY_BYTES = 64 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux's")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    monkeypatch.setenv("EMBERLINE_SECRET", "s" * 32)
    return Launcher(Confinement(memory_bytes=MEMORY_BYTES), max_wall=20)


@pytest.fixture
def process(launcher: Launcher) -> Iterator[ConfinedProcess]:
    process = launcher.start(MODULE)
    yield process
    process.kill()


def ask(process: ConfinedProcess, act: str, cpu_s: float = 5.0) -> str:
    return process.exchange(act.encode(), cpu_s).decode()


def test_a_process_reaches_nothing_but_its_launcher(process: ConfinedProcess, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    assert ask(process, "echo " + "x" * 1_000_000) == "x" * 1_000_000
    assert ask(process, "thread") == "ran"
    assert ask(process, "limits 0").startswith("(")
    assert ask(process, "flags") == "True"
    assert ask(process, "environment EMBERLINE_SECRET") == "nothing"
    refused = [f"read {secret}", f"write {tmp_path / 'new'}", "run /bin/true", "connect", "pair", "fork"]
    if process.missing:
        pytest.skip(f"this kernel lacks {process.missing}")
    others = ("kill", "signal", "limits", "own", "affinity", "renice")
    for act in (*refused, *(f"{act} {os.getpid()}" for act in others)):
        assert ask(process, act).startswith("PermissionError"), act
    assert ask(process, f"allocate {4 * MEMORY_BYTES}").startswith("MemoryError")
    assert ask(process, "echo still here") == "still here"


def test_a_process_that_takes_too_long_is_killed(launcher: Launcher, process: ConfinedProcess) -> None:
    with pytest.raises(TimeoutError):
        ask(process, "spin", cpu_s=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    idle = launcher.start(MODULE)
    with pytest.raises(TimeoutError):  # it uses no CPU time
        ask(idle, "wait", cpu_s=0.02)


def test_a_process_that_ends_is_noticed(process: ConfinedProcess) -> None:
    with pytest.raises(EOFError):
        ask(process, "exit 3")
    with pytest.raises((EOFError, OSError)):
        ask(process, "echo")


def test_a_process_ends_with_the_thread_that_has_it_or_not(launcher: Launcher) -> None:
    """The thread that started it may end: the process goes on, until its launcher closes the socket."""
    started: list[ConfinedProcess] = []
    thread = threading.Thread(target=lambda: started.append(launcher.start(MODULE)))
    thread.start()
    thread.join()
    assert ask(started[0], "echo here") == "here"
    started[0].kill()


def test_a_process_finds_modules_where_its_launcher_does(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's path may be relative to its working directory, which is another than the process's."""
    root = str(Path(__file__).parents[3])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", ["", *(folder for folder in sys.path if folder != root)])
    process = launcher.start(MODULE)
    assert ask(process, "echo here") == "here"
    process.kill()


def test_a_module_that_cannot_be_imported_is_named(launcher: Launcher) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)tests.no_such_module does not start.*No module named"):
        launcher.start("tests.no_such_module")
