"""How far a batch is, on one line that stays where it is."""

import os
import sys
import time
from collections import deque
from types import TracebackType
from typing import Any, TextIO

WINDOW_S = 20.0  # the rate is that of the last while, so that a stall shows
_LEAST_BAR = 8


class Pace:
    """Lines that end a second."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, done: int, now_s: float | None = None) -> None:
        now_s = time.monotonic() if now_s is None else now_s
        self._seen.append((now_s, done))
        while now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (start_s, before), (end_s, done) = self._seen[0], self._seen[-1]
        return max(0.0, (done - before) / max(end_s - start_s, 1e-9))


class Bar:
    """Where a person looks, the line is written over; elsewhere it is written when the figures have changed a lot."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty() and os.environ.get("TERM") != "dumb"
        self._said_s = 0.0

    @property
    def width(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns if self._live else 80
        except OSError:
            return 80

    def show(self, line: str) -> None:
        if self._live:
            print(f"\r\x1b[K{line}", end="", file=self._out, flush=True)
        elif time.monotonic() - self._said_s > 10:
            self._said_s = time.monotonic()
            print(line, file=self._out, flush=True)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            print(file=self._out, flush=True)


def line_of(batch: dict[str, Any], pace: Pace, width: int) -> str:
    """A bar, what is done, what failed, how fast, and how long still; never wider than the terminal."""
    counts = batch["request_counts"]
    total, failed = int(counts["total"]), int(counts["failed"])
    done = int(counts["completed"]) + failed
    if not total or batch["status"] == "validating":
        return f"{batch['status']}: {total:,} lines read"[: width - 1]
    parts = [f"{done:,}/{total:,} done"]
    if failed:
        parts.append(f"{failed:,} failed")
    if batch["status"] not in ("in_progress", "finalizing"):
        parts.append(str(batch["status"]))
    elif pace.per_s:
        parts += [f"{pace.per_s:.1f}/s", f"{seconds((total - done) / pace.per_s)} left"]
    else:
        parts += _wait(batch.get("queue") or {})
    told = ", ".join(parts)
    room = width - len(told) - 10
    percent = f"{100 * done / total:3.0f} %"
    if room < _LEAST_BAR:
        return f"{percent} {told}"[: width - 1]
    room = min(room, 40)
    filled = room * done / total
    blocks = "█" * int(filled) + ("▌" if filled % 1 >= 0.5 else "")
    if (sys.stderr.encoding or "").lower().replace("-", "") != "utf8":
        blocks = "#" * int(filled)
    return f"{percent} [{blocks.ljust(room)}] {told}"


def _wait(place: dict[str, Any]) -> list[str]:
    """What the server says, as long as nothing has been seen to move."""
    parts = []
    if place.get("position"):
        parts.append(f"{place['position']:,} lines before it")
    if place.get("estimated_wait_s"):
        parts.append(f"{seconds(place['estimated_wait_s'])} left")
    return parts


def seconds(value: float) -> str:
    """A time as a person says it."""
    if value < 99.5:
        return f"{value:.0f} s"
    if value < 5940:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 172_800 else f"{value / 86_400:.0f} d"
