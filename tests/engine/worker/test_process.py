"""How an engine process ends before it serves: its parent is gone, or a signal comes while it loads."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from emberline.engine.addresses import PARENT_VARIABLE
from emberline.engine.worker.process import NicePrefill, Parent


def test_a_parent_that_is_gone_already_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setenv(PARENT_VARIABLE, str(gone.pid))
    with pytest.raises(SystemExit):
        Parent()
    assert PARENT_VARIABLE not in os.environ  # this process's children have another


LOADING = """
import os, time
os.getpid = lambda: 1
from emberline.engine.worker import process
process.end_on_signals()
print("loading", flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_signal_ends_a_container_that_loads_a_model() -> None:
    """The kernel lets process 1 ignore what it has no handler for; this one only says that it is process 1."""
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True) as loading:
        assert loading.stdout is not None
        assert loading.stdout.readline() == "loading\n"
        loading.send_signal(signal.SIGTERM)
        assert loading.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("may_return", [True, False])
def test_a_prefill_worker_is_nice_while_it_is_one(monkeypatch: pytest.MonkeyPatch, may_return: bool) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(os, "nice", lambda _: 3)
    monkeypatch.setattr(os, "setpriority", lambda which, task, niceness: set_to.append(niceness))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if may_return else 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))
    priority = NicePrefill(5)
    priority("decode", is_first=True)
    assert set(set_to) == {3}
    priority("prefill")
    assert set_to[-1] == (8 if may_return else 3)
    priority("both")
    assert set_to[-1] == 3
    priority("prefill", is_first=True)
    assert set_to[-1] == 8
    del set_to[:]
    NicePrefill(0)("prefill", is_first=True)
    assert not set_to
