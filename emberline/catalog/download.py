"""Parts that every download shares: progress by the size of what was written, errors, and disk space."""

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from emberline.protocol.errors import Unavailable

INTERVAL_S = 0.2


class DownloadProgress(NamedTuple):
    done_bytes: int
    total_bytes: int


ReportProgress = Callable[[DownloadProgress], None]


@contextmanager
def watched(folder: Path, total_bytes: int, report: ReportProgress | None) -> Iterator[None]:
    """Report the growth of `folder` while the block runs, and completion when the block succeeds."""
    if report is None:
        yield
        return
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(INTERVAL_S):
            report(DownloadProgress(min(folder_bytes(folder), total_bytes), total_bytes))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    report(DownloadProgress(total_bytes, total_bytes))


def folder_bytes(folder: Path) -> int:
    """The size of all files below; one that disappears meanwhile counts as 0."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
        except OSError:
            continue
    return total


class PullFailed(Unavailable):
    """The model was not downloaded; no partial model is left in the store."""


class NoSpace(PullFailed):
    pass


class NoNetwork(PullFailed):
    pass


class HashMismatch(PullFailed):
    pass


class AccessDenied(PullFailed):
    """The hub requires a token, or another one."""


@contextmanager
def room_for(needed_bytes: int, folder: Path) -> Iterator[None]:
    """Raise NoSpace at once if `needed_bytes` do not fit, or later when the disk fills up inside the block."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise _no_space(folder, f"{needed_bytes / 2**20:.0f} MiB are needed, {free / 2**20:.0f} MiB are free")
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(folder) from error
        raise


def no_space(folder: Path) -> NoSpace:
    return _no_space(folder, f"it filled up while writing, {shutil.disk_usage(folder).free / 2**20:.0f} MiB are free")


def _no_space(folder: Path, detail: str) -> NoSpace:
    return NoSpace(
        f"no disk space in {folder}: {detail}. Free some, or choose another folder: --data-dir or EMBERLINE_HOME."
    )
