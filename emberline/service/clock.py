"""A request's own clock: it began at a wall-clock time and runs monotonically from there."""

import time


class Clock:
    __slots__ = ("_started_s", "created_us")

    def __init__(self) -> None:
        self.created_us = time.time_ns() // 1000  # Unix time
        self._started_s = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def now_us(self) -> int:
        return self.created_us + int(1e6 * self.elapsed_s())
