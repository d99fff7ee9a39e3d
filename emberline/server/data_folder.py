"""The data folder belongs to one server at a time: it holds a lock, which the system releases however it ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from emberline.protocol.errors import Conflict

LOCK = "server.lock"
_MAX_PID_CHARS = 20


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises Conflict if another server holds it, and says which process that is."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(home / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(file, _MAX_PID_CHARS).decode("ascii", "replace").strip()
            process = f" (process {pid})" if pid.isdecimal() else ""
            raise Conflict(
                f"a server{process} uses the data folder {home}: stop it, or name another folder with --data-dir"
            ) from None
        os.ftruncate(file, 0)
        os.write(file, b"%d\n" % os.getpid())
        yield
    finally:
        os.close(file)
