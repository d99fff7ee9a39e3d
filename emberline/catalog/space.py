"""Disk space: asked for before a download, and the one message for when it runs out all the same."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emberline.catalog.errors import NoSpace


@contextmanager
def room_for(needed_bytes: int, folder: Path) -> Iterator[None]:
    """NoSpace at once when `needed_bytes` do not fit, and later when the disk fills up inside the block."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise _no_space(folder, f"{needed_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(folder) from error
        raise


def no_space(folder: Path) -> NoSpace:
    return _no_space(folder, f"it filled up while writing, {shutil.disk_usage(folder).free / 1e6:.0f} MB are free")


def _no_space(folder: Path, detail: str) -> NoSpace:
    return NoSpace(
        f"no disk space in {folder}: {detail}. Free some, or choose another data folder with --data or EMBERLINE_HOME."
    )
