"""A module for confined processes that does what it is told, good or bad."""

import ctypes
import fcntl
import os
import resource
import socket
import subprocess
import threading
from pathlib import Path


def handle(data: bytes) -> bytes:
    act, _, argument = data.decode().partition(" ")
    try:
        return str(_ACTS[act](argument)).encode()
    except (OSError, MemoryError, RecursionError) as error:
        return f"{type(error).__name__} {error}".encode()


def _spin(_: str) -> None:
    while True:
        pass


def _fork(_: str) -> str:
    if os.fork() == 0:
        os._exit(0)
    return "forked"


def _thread(_: str) -> str:
    done: list[str] = []
    thread = threading.Thread(target=done.append, args=("ran",))
    thread.start()
    thread.join()
    return done[0]


def _signal(pid: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(int(pid), int(pid), 0) != 0:
        raise OSError(ctypes.get_errno(), "tgkill")
    return 0


_ACTS = {
    "echo": lambda text: text,
    "spin": _spin,
    "wait": lambda _: threading.Event().wait(),
    "allocate": lambda size: len(bytearray(int(size))),
    "exit": lambda status: os._exit(int(status)),
    "read": lambda path: Path(path).read_bytes(),
    "write": lambda path: Path(path).write_bytes(b"x"),
    "connect": lambda _: socket.create_connection(("127.0.0.1", 9)),
    "pair": lambda _: socket.socketpair(),
    "run": lambda path: subprocess.run([path]),
    "fork": _fork,
    "kill": lambda pid: os.kill(int(pid), 9),
    "signal": _signal,
    "limits": lambda pid: resource.prlimit(int(pid), resource.RLIMIT_CPU),
    "own": lambda pid: fcntl.fcntl(2, fcntl.F_SETOWN, int(pid)),
    "affinity": lambda pid: os.sched_setaffinity(int(pid), [0]),
    "renice": lambda pid: os.setpriority(os.PRIO_PROCESS, int(pid), 5),
    "flags": lambda _: fcntl.fcntl(2, fcntl.F_GETFL) >= 0,
    "thread": _thread,
    "environment": lambda name: os.environ.get(name, "nothing"),
}
