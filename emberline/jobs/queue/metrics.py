"""The queue's numbers for Prometheus: what waits, for how long, and what became of lines."""

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline.jobs.queue.reader import Depth


class Figures(Collector):
    """Counts what this process did. Depth and age are those of the whole queue, when they were last looked at."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._depths: Sequence[Depth] = ()
        self._dead = 0
        self._now_us = 0

    def count(self, what: str, model: str, n: int = 1) -> None:
        self._counts[what, model] += n

    def total(self, what: str) -> int:
        return sum(n for (name, _), n in self._counts.items() if name == what)

    def looked(self, depths: Sequence[Depth], dead: int, now_us: int) -> None:
        self._depths, self._dead, self._now_us = depths, dead, now_us

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily("emberline_queue_depth", "Lines that wait.", labels=["model"])
        leased = GaugeMetricFamily("emberline_queue_leased", "Lines that run.", labels=["model"])
        oldest = GaugeMetricFamily("emberline_queue_age_seconds", "Age of the line that is next.", labels=["model"])
        for model in sorted({depth.model for depth in self._depths}):
            depths = [depth for depth in self._depths if depth.model == model]
            queued.add_metric([model], sum(depth.n_queued for depth in depths))
            leased.add_metric([model], sum(depth.n_leased for depth in depths))
            since_us = min((depth.oldest_us for depth in depths if depth.oldest_us is not None), default=self._now_us)
            oldest.add_metric([model], max(0.0, (self._now_us - since_us) / 1e6))
        yield from (queued, leased, oldest)
        dead = GaugeMetricFamily("emberline_queue_dead_letters", "Lines under which workers died too often.")
        dead.add_metric([], self._dead)
        yield dead
        lines = CounterMetricFamily("emberline_queue_lines", "What became of lines here.", labels=["event", "model"])
        for (what, model), n in sorted(self._counts.items()):
            lines.add_metric([what, model], n)
        yield lines
