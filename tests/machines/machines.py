"""Machines for tests: a network and a host name each, all on one bridge, with links that can be cut.

A machine is a network namespace which a process of its own keeps open. `make cluster-test` runs the tests in
namespaces of their own for network, processes and mounts: the bridge is not the host's, and when the run ends, even by
kill -9, the kernel ends what it started and removes what it made.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

IS_ISOLATED = "EMBERLINE_TEST_NAMESPACES"  # set by scripts/cluster-test
_BRIDGE = "bridge0"
_SUBNET = "10.77.0"
_KEEP_OPEN = 'hostname "$0" && ip link set lo up && echo ready && exec sleep infinity'


class Machine:
    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"{_SUBNET}.{number}"
        self._port = f"port{number}"  # of the bridge
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", _KEEP_OPEN, name], stdout=subprocess.PIPE, text=True
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "ready\n", f"no namespace for {name}"
        _ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self._keeper.pid))
        _ip("link", "set", self._port, "master", _BRIDGE, "up")
        for words in (("addr", "add", f"{self.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            subprocess.run([*self._enter(), "ip", *words], check=True)

    def start(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> "subprocess.Popen[str]":
        """A process there; its standard output is a pipe, and its errors are appended to `log`."""
        with open(log, "a") if log is not None else contextlib.nullcontext() as errors:
            return subprocess.Popen(
                [*self._enter(), *map(str, command)],
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> str:
        """What the command prints. AssertionError with all its output where it fails."""
        done = subprocess.run(
            [*self._enter(), *map(str, command)],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def cut(self) -> None:
        """From now on every packet to or from it is lost, without a sign: its own end of the cable stays up."""
        _ip("link", "set", self._port, "nomaster")

    def heal(self) -> None:
        _ip("link", "set", self._port, "master", _BRIDGE)

    def pids(self) -> list[int]:
        """Of all processes there."""
        own, found = self._namespace(self._keeper.pid), []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and int(entry) != self._keeper.pid and self._namespace(int(entry)) == own:
                    found.append(int(entry))
        return found

    def kill(self) -> None:
        """kill -9 of everything that runs there, and of what that starts meanwhile; the machine itself stays."""
        while pids := [pid for pid in self.pids() if not _is_dead(pid)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()

    def _enter(self) -> tuple[str, ...]:
        return ("nsenter", "--target", str(self._keeper.pid), "--net", "--uts", "--")

    @staticmethod
    def _namespace(pid: int) -> int:
        return os.stat(f"/proc/{pid}/ns/net").st_ino


class Network:
    """A bridge with machines. The tests themselves are connected to it, as clients are."""

    def __init__(self) -> None:
        assert os.environ.get(IS_ISOLATED), "run by scripts/cluster-test, in a network namespace of its own"
        self.machines: dict[str, Machine] = {}
        _ip("link", "set", "lo", "up")
        # With an address of its own: it would take one of its ports', and change it when that one is cut off.
        _ip("link", "add", _BRIDGE, "address", "02:00:00:00:00:fe", "type", "bridge")
        _ip("addr", "add", f"{_SUBNET}.254/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")

    def add(self, name: str) -> Machine:
        machine = self.machines[name] = Machine(name, len(self.machines) + 1)
        return machine

    def close(self) -> None:
        for machine in self.machines.values():
            machine.close()
        _ip("link", "del", _BRIDGE)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _is_dead(pid: int) -> bool:
    """Ended, and perhaps not waited for by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
