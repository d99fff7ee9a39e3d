"""A clock that follows the time of day but never jumps.

Leases and deadlines are compared with it. A wall clock that is set by an hour would end every lease at once, or extend
a dead worker's by an hour. This clock runs on the machine's monotonic clock and corrects an offset by running at most
5 % faster or slower.
"""

import time
from collections.abc import Callable

SLEW = 0.05
_CORRECT_US = 1_000_000  # a small offset is corrected within about a second
_SAMPLE_US = 10_000  # between two readings of the wall clock
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # continues while the machine sleeps


def wall_us() -> int:
    return time.time_ns() // 1000


def uptime_us() -> int:
    return time.clock_gettime_ns(_BOOT) // 1000


class SteadyClock:
    def __init__(self, target: Callable[[], int] = wall_us, ticks: Callable[[], int] = uptime_us) -> None:
        self._target = target
        self._ticks = ticks
        self._at_tick = ticks()
        self._at_us = target()
        self._rate = 1.0

    def now_us(self) -> int:
        elapsed_us = self._ticks() - self._at_tick
        now_us = self._at_us + int(elapsed_us * self._rate)
        if elapsed_us >= _SAMPLE_US:
            self._at_tick += elapsed_us
            self._at_us = now_us
            offset = (self._target() - now_us) / _CORRECT_US
            self._rate = 1.0 + max(-SLEW, min(SLEW, offset))
        return now_us
