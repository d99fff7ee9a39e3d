"""Starts confined processes of ours for work that a stranger's data decides; for programs that are not ours: `program`.

A process runs one module of ours over frames (`child`), without files, network or other processes where the kernel can
take these away, within memory and CPU time that the launcher sets, and without the environment's secrets. Whatever goes
wrong in it costs the request that caused it: the process is killed, and the owner starts another.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

import msgspec

from emberline.supervisor.sandbox.child import REPLY, REQUEST
from emberline.supervisor.sandbox.confinement import Confinement

START_S = 30.0  # for a process to start
MAX_WALL = 10  # times the limit of CPU time: the process hangs, or gets next to no CPU
MAX_REPLY_BYTES = 256 << 20
_CHILD = "emberline.supervisor.sandbox.child"
# All that a process inherits, beside the folders of our modules.
_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")

log = logging.getLogger("emberline.supervisor")


class Launcher:
    """Starts processes of one confinement."""

    def __init__(self, confinement: Confinement, max_wall: float = MAX_WALL) -> None:
        self._confinement = confinement
        self._max_wall = max_wall
        self._has_told = False  # what the kernel lacks is logged once

    def start(self, module: str) -> "ConfinedProcess":
        """Start a process that answers by the `handle` of this module. Blocks. Raises RuntimeError if it cannot."""
        process = ConfinedProcess(module, self._confinement, self._max_wall)
        if process.missing and not self._has_told:
            self._has_told = True
            log.warning(
                "%s runs with limits on memory and time, but without %s, which this machine lacks",
                module,
                " and ".join(process.missing),
            )
        return process


class ConfinedProcess:
    """One process, used by one thread at a time. Its methods block."""

    def __init__(self, module: str, confinement: Confinement, max_wall: float) -> None:
        self._max_wall = max_wall
        self._link, theirs = socket.socketpair()
        with theirs:
            arguments = [module, str(theirs.fileno()), msgspec.json.encode(confinement).decode()]
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", "-m", _CHILD, *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_environment(),
                cwd="/",
                start_new_session=True,
            )
        self._clock = ~self._process.pid << 3 | 2  # Linux's number of the clock that counts a process's CPU time
        try:
            self.missing: list[str] = msgspec.json.decode(self._reply(START_S, START_S), type=list[str])
        except (EOFError, TimeoutError):
            self._process.kill()
            assert self._process.stderr is not None
            said = self._process.stderr.read().decode(errors="replace").strip()[-1000:]
            self.kill()
            raise RuntimeError(f"{module} does not start in a confined process: {said or 'it says nothing'}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, data: bytes, cpu_s: float) -> bytes:
        """Send data, and return the reply. The process is dead after any exception.

        Raises TimeoutError if it uses more CPU time than `cpu_s`, or many times that of wall time, and EOFError if it
        ends, as it does when it takes too much memory in a way that Python cannot report."""
        try:
            self._link.settimeout(cpu_s * self._max_wall)
            self._link.sendall(REQUEST.pack(cpu_s, len(data)) + data)
            return self._reply(cpu_s, cpu_s * self._max_wall)
        except ConnectionError:
            self.kill()
            raise EOFError("it ended") from None
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process. Idempotent."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._link.close()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _reply(self, cpu_s: float, wall_s: float) -> bytes:
        end_s, end_cpu_s = time.monotonic() + wall_s, self._cpu_s() + cpu_s
        (length,) = REPLY.unpack(self._receive(REPLY.size, end_s, end_cpu_s))
        if length > MAX_REPLY_BYTES:
            raise EOFError(f"its reply has {length} bytes")
        return bytes(self._receive(length, end_s, end_cpu_s))

    def _receive(self, length: int, end_s: float, end_cpu_s: float) -> bytearray:
        data = bytearray(length)
        view, n = memoryview(data), 0
        while n < length:
            left_s = min(end_cpu_s - self._cpu_s(), end_s - time.monotonic())
            if left_s <= 0:
                raise TimeoutError
            self._link.settimeout(max(left_s, 1e-3))
            with suppress(TimeoutError):  # look at its clock: it may have waited for the processor
                if not (got := self._link.recv_into(view[n:])):
                    raise EOFError("it ended")
                n += got
        return data

    def _cpu_s(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # it has ended, which the socket is about to tell
            return 0.0


def _environment() -> dict[str, str]:
    """A process's variables. It finds modules where this one does: its own working directory and home are others."""
    inherited = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return inherited | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
