"""Duration of the collectives of a rank group: measured all-reduces where there are some, otherwise estimates from the
link.

A small all-reduce is one-shot: every rank reads the whole tensor of all others. A large one is NCCL's: each rank sums
its part of all tensors and passes the sum on, after a start that takes longer.
"""

from itertools import pairwise
from math import exp, log

from emberline.engine.planning.hardware import Gpu

_LARGE = 3  # times the latency of a small collective: 17 to 21 µs are published for half a megabyte and four H100s


class Link:
    """Between ranks that are next to each other, in one machine or, where there are more, in several."""

    def __init__(self, gpu: Gpu, ranks: int) -> None:
        inside = ranks <= gpu.gpus_per_machine
        self.ranks = ranks
        self._rate = 1e9 * (gpu.link_gb_s if inside else gpu.network_gb_s)
        self._latency_s = 1e-6 * (gpu.link_us if inside else gpu.network_us)
        self._measured = sorted((1024 * each.kib, 1e-6 * each.us) for each in gpu.all_reduce if each.ranks == ranks)

    def all_reduce_s(self, n_bytes: float) -> float:
        if self.ranks == 1:
            return 0.0
        if self._measured:
            return self._interpolated(n_bytes)
        one_shot = self._latency_s + (self.ranks - 1) * n_bytes / self._rate
        return min(one_shot, _LARGE * self._latency_s + 2 * (self.ranks - 1) / self.ranks * n_bytes / self._rate)

    def all_gather_s(self, n_bytes: float) -> float:
        """n_bytes: of each rank."""
        return 0.0 if self.ranks == 1 else self._latency_s + (self.ranks - 1) * n_bytes / self._rate

    def exchange_s(self, n_bytes: float) -> float:
        """An all-to-all; n_bytes: that each rank has for all together."""
        return 0.0 if self.ranks == 1 else self._latency_s + (self.ranks - 1) / self.ranks * n_bytes / self._rate

    def send_s(self, n_bytes: float) -> float:
        return self._latency_s + n_bytes / self._rate

    def _interpolated(self, n_bytes: float) -> float:
        """Between the measured sizes on logarithmic scales; beyond the largest in proportion, below the smallest none
        is faster."""
        points = self._measured
        if n_bytes <= points[0][0]:
            return points[0][1]
        if n_bytes >= points[-1][0]:
            return points[-1][1] * n_bytes / points[-1][0]
        (low, low_s), (high, high_s) = next(pair for pair in pairwise(points) if n_bytes <= pair[1][0])
        share = log(n_bytes / low) / log(high / low)
        return exp((1 - share) * log(low_s) + share * log(high_s))
