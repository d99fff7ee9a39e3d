"""Calls of Mooncake Store, each with a time limit: owns the client process (`pool_process.py`) and its circuit breaker.

A call that takes too long, or a master that is lost, costs one process: it is killed, its calls fail, and a new one
connects in the background, after a delay that grows while that fails. Until then calls fail at once.
"""

import contextlib
import itertools
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from emberline.kv.host_memory import Pages
from emberline.kv.tiers.pool.pool_process import Operation, PoolCall, Reply
from emberline.protocol.frames import FrameBuffer, FrameError, decode, encode
from emberline.protocol.kv_store import StoreSettings

START_LIMIT_S = 15.0  # to import the library and to join the pool
FIRST_DELAY_S, LAST_DELAY_S = 0.25, 15.0  # before a new process connects
HEALTHY_S = 30.0  # a process that lived so long resets the delay
SEND_LIMIT_S = 1  # to hand a call to the process
PAUSE_S = 5.0  # without calls, after transfers have failed: a peer that is lost costs every call a second
TUNING = {"MC_TCP_SLICE_SIZE": str(1 << 20)}  # bytes that its TCP transport moves at once: a tenth faster with 1 MiB
RPC_ERRORS = -900  # codes from here down: the master does not answer
TRANSFER_ERROR = -800  # the peer that has the bytes does not answer

_log = logging.getLogger(__name__)


class PoolUnavailable(Exception):
    """The pool does not answer; the text says why."""


class PoolClient:
    """A `pool.PoolStore`. Thread-safe. `memory` is shared with the client process: calls name places in it."""

    def __init__(self, settings: StoreSettings, memory: Pages) -> None:
        self._settings = settings
        self._descriptor = memory.descriptor
        self._lock = threading.Lock()  # guards what follows
        self._process: _Process | None = None  # connected
        self._paused_until_s = 0.0
        self._closed = threading.Event()
        self._problem = "not connected yet"
        self.generation = 0  # of the client process
        threading.Thread(target=self._keep_connected, name="kv-pool", daemon=True).start()

    @property
    def problem(self) -> str:
        """Why calls fail now; empty: they do not."""
        if self._process is None:
            return self._problem
        return "a peer of the pool does not answer" if time.monotonic() < self._paused_until_s else ""

    def call(
        self,
        operation: Operation,
        names: Sequence[str],
        starts: Sequence[int] = (),
        sizes: Sequence[int] = (),
        *,
        limit_s: float,
    ) -> list[int]:
        """Mooncake's code for each name. PoolUnavailable: at once, or after `limit_s`."""
        process = self._process
        if process is None or self.problem:
            raise PoolUnavailable(self.problem)
        codes = process.call(operation, list(names), list(starts), list(sizes), limit_s)
        if codes is None:
            self._lost(process, f"it did not answer within {limit_s:g} s")
            raise PoolUnavailable(self.problem)
        if codes and max(codes) <= RPC_ERRORS:
            self._lost(process, f"the master at {self._settings.master} does not answer")
            raise PoolUnavailable(self.problem)
        if TRANSFER_ERROR in codes:
            self._paused_until_s = time.monotonic() + PAUSE_S
        return codes

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            process, self._process, self._problem = self._process, None, "closed"
        if process is not None:
            process.kill()

    def _lost(self, process: "_Process", why: str) -> None:
        with self._lock:
            if self._process is process:
                self._process, self._problem = None, why
                _log.warning("the KV pool is lost: %s; blocks are computed again meanwhile", why)
        process.kill()

    def _keep_connected(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._closed.is_set():
            began_s = time.monotonic()
            self._run_one()
            if time.monotonic() - began_s > HEALTHY_S:
                delay_s = FIRST_DELAY_S
            self._closed.wait(delay_s)
            delay_s = min(2 * delay_s, LAST_DELAY_S)

    def _run_one(self) -> None:
        """Start a process, and return when it has ended."""
        try:
            process = _Process(self._settings, self._descriptor)
        except OSError as error:
            self._problem = f"the client cannot be started: {error}"
            return
        self.generation += 1
        if problem := process.wait_connected(START_LIMIT_S):
            self._set_problem(problem)
            process.kill()
            return
        with self._lock:
            if self._closed.is_set():
                process.kill()
                return
            self._process, self._problem, self._paused_until_s = process, "", 0.0
        _log.info("the KV pool at %s is connected", self._settings.master)
        process.wait_ended()
        with self._lock:
            if self._process is process:
                self._process, self._problem = None, "its client process has died"
                _log.warning("the KV pool's client process has died; a new one is started")

    def _set_problem(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("no connection to the KV pool: %s", problem)
        self._problem = problem


class _Process:
    """One client process and the calls that it has not answered."""

    def __init__(self, settings: StoreSettings, descriptor: int) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT_S, 0))
        with theirs:
            self._child = subprocess.Popen(
                (
                    *(sys.executable, "-m", "emberline.kv.tiers.pool.pool_process"),
                    *("--socket", str(theirs.fileno()), "--memory", str(descriptor)),
                    *("--store", msgspec.json.encode(settings).decode()),
                ),
                pass_fds=(theirs.fileno(), descriptor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the library writes a line for every block that fails
                env=_environment(),
                process_group=0,  # no Ctrl-C; a session of its own would compete with the worker for cores
            )
        self._numbers = itertools.count(1)
        self._lock = threading.Condition()  # guards what follows
        self._replies: dict[int, Reply | None] = {0: None}  # None: not answered yet
        self._ended = False
        threading.Thread(target=self._read, name="kv-pool-replies", daemon=True).start()

    def call(
        self, operation: Operation, names: list[str], starts: list[int], sizes: list[int], limit_s: float
    ) -> list[int] | None:
        """None: no answer in time, or the process is gone."""
        number = next(self._numbers)
        with self._lock:
            self._replies[number] = None
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(PoolCall(number, operation, names, starts, sizes)))
            reply = self._wait(number, limit_s)
            return reply.codes if reply is not None and len(reply.codes) == len(names) else None
        return None

    def wait_connected(self, limit_s: float) -> str:
        """Why it is not; empty: it is."""
        reply = self._wait(0, limit_s)
        return f"no answer within {limit_s:g} s" if reply is None else reply.error

    def wait_ended(self) -> None:
        self._child.wait()

    def kill(self) -> None:
        """When this returns nothing is written into the shared memory any more."""
        self._child.kill()
        self._child.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _wait(self, number: int, limit_s: float) -> Reply | None:
        with self._lock:
            self._lock.wait_for(lambda: self._replies[number] is not None or self._ended, limit_s)
            return self._replies.pop(number)

    def _read(self) -> None:
        decoder, frames = msgspec.msgpack.Decoder(Reply), FrameBuffer()
        with contextlib.suppress(OSError, FrameError):
            while data := self._socket.recv(1 << 16):
                for payload in frames.feed(data):
                    reply = decode(decoder, payload)
                    with self._lock:
                        if reply.number in self._replies:
                            self._replies[reply.number] = reply
                            self._lock.notify_all()
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        self._socket.close()


def _environment() -> dict[str, str]:
    """Without anything of ours: a worker has its join token and keys there."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EMBERLINE_")}
    return {**TUNING, **inherited}
