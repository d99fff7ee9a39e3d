"""The record of Ray's processes: exactly those are ended, whatever became of the one that started them."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberline.supervisor.cluster.ray_node import ProcessId, Record, end_all, end_session, session_processes
from emberline.supervisor.cluster.ray_settings import NodeSettings

# A leader that starts another process in a process group of its own, and ends without it.
LEADER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def leader() -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    session = id_of(process.pid)
    yield process
    end_session(session, grace_s=0)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def child_of(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def id_of(pid: int) -> ProcessId:
    found = ProcessId.of(pid)
    assert found is not None
    return found


def record(folder: Path, keeper: ProcessId, session: ProcessId) -> Record:
    node = NodeSettings(address="127.0.0.2", head="127.0.0.2", port=1, folder=folder)
    return Record(keeper=keeper, nodes=(node,), sessions={"node": session})


def test_a_session_is_ended_with_all_its_groups(leader: "subprocess.Popen[str]") -> None:
    child, session = child_of(leader), id_of(leader.pid)
    assert sorted(session_processes(session)) == sorted([leader.pid, child])
    end_session(session, grace_s=0)
    leader.wait(60)
    until(lambda: not session_processes(session))


def test_what_a_killed_leader_left_is_ended(leader: "subprocess.Popen[str]") -> None:
    child, session = child_of(leader), id_of(leader.pid)
    leader.kill()
    leader.wait()
    assert session_processes(session) == [child]
    end_session(session, grace_s=0)
    until(lambda: not session_processes(session))


def test_a_process_with_the_same_number_is_left_alone(tmp_path: Path, leader: "subprocess.Popen[str]") -> None:
    child_of(leader)
    real = id_of(leader.pid)
    other = ProcessId(real.pid, real.started - 1)  # one that ended, and whose number was given to another
    assert not other.is_alive
    assert session_processes(other) == []
    record(tmp_path, other, other).write(tmp_path)
    assert end_all(tmp_path) == 0
    assert leader.poll() is None


def test_the_record_is_read_as_it_was_written(tmp_path: Path, leader: "subprocess.Popen[str]") -> None:
    child_of(leader)
    assert Record.read(tmp_path) is None
    assert end_all(tmp_path) == 0
    session = id_of(leader.pid)
    gone = ProcessId(session.pid, session.started - 1)
    written = record(tmp_path, gone, session)
    written.write(tmp_path)
    assert Record.read(tmp_path) == written
    assert len(written.processes()) == 2
    assert end_all(tmp_path) == 2  # though the process that kept the node running was killed before
    leader.wait(60)
    assert Record.read(tmp_path) is None
    (tmp_path / "processes.json").write_text("{")
    assert Record.read(tmp_path) is None
