"""Durations of the phases of an engine's start, in one log line when it is ready."""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)


class StartTimeline:
    """Phases one after the other on the main thread, from the start of the process on.

    Weights are read meanwhile: `weights` is the time that was spent waiting for them, once nothing else was left.
    """

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self.seconds = {"python": process_age_s()}

    def end(self, phase: str) -> None:
        """End a phase now. The times of a phase that ends twice add up."""
        now_s = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def log(self) -> None:
        seconds = {name: round(s, 3) for name, s in self.seconds.items()}
        phases = ", ".join(f"{name} {s:.2f}" for name, s in seconds.items())
        _log.info("started in %.2f s: %s", sum(self.seconds.values()), phases, extra={"phases_s": seconds})


def process_age_s() -> float:
    """Seconds since this process was started; 0 if the platform does not tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    return 0.0
