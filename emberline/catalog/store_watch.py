"""Tells a running server of changes to its model store: `pull` and `rm` return once the server knows.

The server holds a lock on a file of the store for as long as it runs, and writes there which state of the store it
offers. No address and no key are needed.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

FILE = ".offered"
WAIT_S = 10.0  # for a server that is busy
_POLL_S = 0.02


class StoreWatch:
    """The server's side. `offered` does nothing if another server runs on the same store, or if it is read-only."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._file: int | None = None

    def open(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            file = os.open(self._root / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:  # what is pulled elsewhere is seen at the next look all the same
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
        else:
            self._file = file

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def stamp(self) -> int:
        """A number that changes with every model that is pulled or removed."""
        return _stamp(self._root)

    def offered(self, stamp: int) -> None:
        """Note that the server offers the models that the store had at `stamp`."""
        if self._file is not None:
            os.pwrite(self._file, b"%20d" % stamp, 0)


def wait_until_offered(root: Path, limit_s: float = WAIT_S) -> bool:
    """Wait until the server on this store offers what the store has now. Returns False if it has not by `limit_s`."""
    try:
        file = os.open(root / FILE, os.O_RDONLY)
    except OSError:
        return True
    deadline_s = time.monotonic() + limit_s
    try:
        while _is_locked(file) and os.pread(file, 20, 0) != b"%20d" % _stamp(root):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True
    finally:
        os.close(file)


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _stamp(root: Path) -> int:
    with contextlib.suppress(OSError):
        return root.stat().st_mtime_ns
    return 0
