"""The name under which a process holds leases, and the proof on this machine that it lives: a lock on a file.

A process that was killed has let go of its lock. The next one that starts on the same data folder sees it and gives
the dead one's lines back at once, where others would wait for its leases to end.
"""

import fcntl
import os
import secrets
import socket
from pathlib import Path

FOLDER = "pullers"


class Owner:
    def __init__(self, data_dir: Path) -> None:
        folder = data_dir / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.name = f"{socket.gethostname()[:40]}-{secrets.token_hex(6)}"
        self._path = folder / self.name
        self._file: int | None = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def dead(self) -> list[str]:
        """Names that processes on this data folder had which are no more; `forget` each once it is dealt with."""
        others = [path for path in self._path.parent.iterdir() if path != self._path]
        return [path.name for path in others if _unlocked(path)]

    def forget(self, name: str) -> None:
        (self._path.parent / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def _unlocked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
