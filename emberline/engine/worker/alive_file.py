"""A file that is touched while a worker makes progress: what a service manager without our protocol can look at.

Kubernetes' probes compare its time of modification with the clock. A worker that computes nothing in a step that has
begun, such as one whose GPU hangs, stops touching it; so does a process that is stopped. One without work touches it.
"""

import logging
from pathlib import Path

from emberline.protocol.errors import BadInput
from emberline.protocol.frames import Heartbeat

_log = logging.getLogger(__name__)


class AliveFile:
    def __init__(self, path: Path) -> None:
        """Remove the file of an earlier run: there is one again when this worker serves. BadInput: it cannot be
        written."""
        self._path = path
        self._progress = (-1, -1)
        self._failed = False
        try:
            path.touch()
            path.unlink()
        except OSError as error:
            raise BadInput(f"--alive-file {path}: {error.strerror}", param="alive_file") from None

    def beat(self, state: Heartbeat) -> None:
        """Every second, from the thread of heartbeats."""
        progress = (state.computed_tokens, state.n_prepared)
        if progress == self._progress and (state.in_step or state.preparing):
            return
        self._progress = progress
        try:
            self._path.touch()
        except OSError as error:
            if not self._failed:
                _log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._failed = True


def open_alive_file(path: Path | None) -> AliveFile | None:
    return None if path is None else AliveFile(path)
