"""Metrics of KV cache tiers, from the workers' load reports: `emberline_kv_tier_*`.

The size of the pool is that of the whole pool, whichever worker tells; its traffic is the worker's own.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from emberline.balancer.worker import Snapshot
from emberline.protocol.frames import TierStats

_LABELS = ["model", "engine", "tier"]
_Value = Callable[[TierStats], float]
_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("used_bytes", "Bytes of stored KV blocks.", lambda tier: tier.used_bytes),
    ("capacity_bytes", "Bytes that the tier may hold.", lambda tier: tier.capacity_bytes),
    ("blocks", "Stored KV blocks.", lambda tier: tier.blocks),
    ("read_bytes_per_second", "Measured while blocks are read.", lambda tier: tier.read_rate),
    ("oldest_seconds", "Age of the block that was not used for longest.", lambda tier: tier.oldest_s),
    ("ok", "1: it works; 0: it is degraded.", lambda tier: tier.state == "ok"),
)
_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("hits", "Blocks that were asked for and returned.", lambda tier: tier.hits),
    ("misses", "Blocks that were asked for and are absent or not verified.", lambda tier: tier.misses),
    ("read_bytes", "Bytes of the blocks that were returned.", lambda tier: tier.read_bytes),
    ("written_bytes", "Bytes of the blocks that were stored.", lambda tier: tier.written_bytes),
    ("dropped", "Blocks that were not stored: full, failing or too slow.", lambda tier: tier.dropped),
    ("evicted", "Blocks that were evicted.", lambda tier: tier.evicted),
    ("refused", "Blocks that did not verify.", lambda tier: tier.extra.get("refused", 0.0)),
)


def tier_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    found = [((w.models[0], w.name, tier.name), tier) for w in snapshot.workers for tier in w.load.tiers]
    for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, text, value in metrics:
            family = kind(f"emberline_kv_tier_{name}", text, labels=_LABELS)
            for labels, tier in found:
                family.add_metric(labels, value(tier))
            yield family
