"""A file that a worker touches while it makes progress, for service managers that do not speak our protocol.

Kubernetes' probes compare the file's time of modification with the clock. A worker that computes nothing in a step that
has begun, such as one whose GPU hangs, stops touching the file. A worker without work goes on touching it.
"""

import logging
from pathlib import Path

from emberline.protocol.errors import BadInput
from emberline.protocol.frames import Heartbeat

_log = logging.getLogger(__name__)


class AliveFile:
    def __init__(self, path: Path) -> None:
        """Remove the file of an earlier run. Raises BadInput if the file cannot be written."""
        self._path = path
        self._progress = (-1, -1)
        self._failed = False
        try:
            path.touch()
            path.unlink()
        except OSError as error:
            raise BadInput(f"--alive-file {path}: {error.strerror}", param="alive_file") from None

    def beat(self, state: Heartbeat) -> None:
        """Touch the file if there was progress or there is no work. The thread of heartbeats calls this each second."""
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
    """Open the file that a flag names. Returns None if no flag does."""
    return None if path is None else AliveFile(path)
