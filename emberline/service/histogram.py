"""A histogram as plain numbers: a door fills one per request, the core adds them up."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAP_BOUNDS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
E2E_BOUNDS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Counts(msgspec.Struct, array_like=True):
    """How many values fell into each bucket (the last one is open-ended), and their sum."""

    buckets: list[int] = []
    total: float = 0.0


class Histogram:
    __slots__ = ("bounds", "counts")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = Counts([0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        counts = self.counts
        counts.buckets[bisect_left(self.bounds, value)] += times
        counts.total += value * times

    def add(self, other: Counts) -> None:
        counts = self.counts
        for bucket, n in enumerate(other.buckets):
            counts.buckets[bucket] += n
        counts.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus wants it: (upper bound, values up to it)."""
        seen = 0
        lines: list[tuple[str, float]] = []
        for bound, n in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts.buckets, strict=True):
            seen += n
            lines.append((bound, seen))
        return lines
