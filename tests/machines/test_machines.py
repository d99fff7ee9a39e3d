import contextlib
import socket
import sys

import pytest

from tests.cluster_processes import wait_until
from tests.machines.machines import Machine

SERVE = "import socket as s; l = s.create_server(('', 7000)); print('up', flush=True)\nwhile 1: l.accept()[0].close()"


def is_open(machine: Machine) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((machine.address, 7000), timeout=0.5):
        return True
    return False


def test_links_are_cut_and_healed_and_processes_killed(machines: dict[str, Machine]) -> None:
    machine = machines["three"]
    assert machine.run("hostname") == "three\n"
    process = machine.start(sys.executable, "-c", SERVE)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert is_open(machine)
    assert machine.pids() == [process.pid]
    machine.cut()
    assert not is_open(machine)
    machine.heal()
    wait_until(lambda: is_open(machine), "not healed")
    machine.kill()
    assert process.wait(10) == -9
    process.stdout.close()
    assert not is_open(machine)
    with pytest.raises(AssertionError, match="oh no"):
        machine.run("sh", "-c", "echo oh no; exit 3")
