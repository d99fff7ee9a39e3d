"""Health of a drive: after errors in a row, or while a call stalls, the drive is out of use; it recovers by itself."""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_ERRORS = 3  # in a row, until the drive is left alone
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk is full: what it holds can still be read

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class DriveTimes:
    """Times after which a drive is out of use, or is tried again."""

    stall_s: float = 2.0  # a call that takes longer: nobody else should wait for this drive
    first_pause_s: float = 1.0  # after MAX_ERRORS errors; doubles with each further one
    max_pause_s: float = 60.0
    full_pause_s: float = 10.0  # after the disk was full, until the files may grow again
    check_s: float = 1.0  # between two looks whether the files are still there
    shrink_pause_s: float = 0.01  # before each step in which blocks of other layouts give way to the size limit


DRIVE_TIMES = DriveTimes()


class DriveHealth:
    """State of the drive of one tier. Every change of state is logged once."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic, times: DriveTimes = DRIVE_TIMES) -> None:
        self._what = what
        self._times = times
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[int, float] = {}  # running: number, and when it began
        self._next_call = 0
        self._errors = 0
        self._pause_s = 0.0
        self._down_until_s = 0.0
        self._problem = ""
        self._told = ""

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call to the drive runs. An OSError counts, and is for the caller to handle; so does what goes well."""
        with self._lock:
            number = self._next_call = self._next_call + 1
            self._calls[number] = self._clock()
        try:
            yield
        except OSError as error:
            if error.errno not in NO_ROOM:
                self.failed(error)
            raise
        else:
            self._succeeded()
        finally:
            with self._lock:
                del self._calls[number]

    def failed(self, error: OSError, lasting: bool = False) -> None:
        """`lasting`: the next call would fail, too, so the pause begins at the first error."""
        with self._lock:
            self._errors += 1
            self._problem = error.strerror or str(error)
            if self._errors >= MAX_ERRORS or lasting:
                self._pause_s = min(self._times.max_pause_s, max(self._times.first_pause_s, 2 * self._pause_s))
                self._down_until_s = self._clock() + self._pause_s
        self.check()

    def _succeeded(self) -> None:
        if not self._errors and not self._told:
            return  # the common case
        with self._lock:
            self._errors, self._pause_s, self._down_until_s = 0, 0.0, 0.0
        self.check()

    @property
    def usable(self) -> bool:
        return not self._state()

    @property
    def state(self) -> str:
        """ "ok", or "degraded: why"."""
        found = self._state()
        return f"degraded: {found}" if found else "ok"

    def check(self) -> None:
        """Log a change of state."""
        found = self._state()
        if found == self._told or (found and self._told):
            return
        self._told = found
        if found:
            _log.warning("%s is out of use: %s; requests are recomputed until it recovers", self._what, found)
        else:
            _log.info("%s is in use again", self._what)

    def _state(self) -> str:
        now_s = self._clock()
        if now_s < self._down_until_s:
            return self._problem
        if self._calls:
            oldest_s = min(list(self._calls.values()), default=now_s)
            if now_s - oldest_s > self._times.stall_s:
                return "the drive does not answer"
        return ""
