"""Metrics from the workers' load reports: of KV cache tiers, of speculative decoding, and of devices.

The size of a pool is that of the whole pool, whichever worker tells; its traffic is the worker's own. Draft tokens are
counted by drafter and position, and in vLLM's totals.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from emberline.balancer.worker import Snapshot
from emberline.protocol.frames import DraftStats, TierStats

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


def device_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Metrics of how much the workers' devices compute, and of their memory and power where they tell it."""
    labels = ["model", "engine"]
    busy = CounterMetricFamily("emberline_device_busy_seconds", "Seconds in which the device computed.", labels=labels)
    share = GaugeMetricFamily(
        "emberline_device_utilisation", "Share of the last seconds in which the device computed.", labels=labels
    )
    memory = GaugeMetricFamily("emberline_device_memory_bytes", "Memory of the device.", labels=labels)
    used = GaugeMetricFamily("emberline_device_memory_used_bytes", "Memory in use on the device.", labels=labels)
    power = GaugeMetricFamily("emberline_device_power_watts", "Power that the device draws.", labels=labels)
    for worker in snapshot.workers:
        load, names = worker.load, (worker.models[0], worker.name)
        if load.utilisation is not None:
            busy.add_metric(names, load.busy_s)
            share.add_metric(names, load.utilisation)
        if load.device is not None:
            memory.add_metric(names, load.device.memory_bytes)
            used.add_metric(names, load.device.memory_used_bytes)
            if load.device.power_w is not None:
                power.add_metric(names, load.device.power_w)
    yield from (busy, share, memory, used, power)


_TOTALS: tuple[tuple[str, str, Callable[[DraftStats], tuple[int, ...]]], ...] = (
    ("draft_tokens", "Draft tokens that were verified.", lambda stats: stats.drafted),
    ("accepted_tokens", "Draft tokens that became tokens of a reply.", lambda stats: stats.accepted),
)


def draft_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    found = [((w.models[0], w.name), stats) for w in snapshot.workers for stats in w.load.drafts]
    for name, text, counts in _TOTALS:
        ours = "drafted_tokens" if name == "draft_tokens" else name
        labels = ["model", "engine", "drafter", "position"]
        family = CounterMetricFamily(f"emberline_spec_decode_num_{ours}", text, labels=labels)
        alias = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=["model_name", "engine"])
        totals = {(w.models[0], w.name): 0 for w in snapshot.workers}
        for worker, stats in found:
            totals[worker] += sum(counts(stats))
            for position, n_tokens in enumerate(counts(stats)):
                family.add_metric([*worker, stats.drafter, str(position)], n_tokens)
        for worker, total in totals.items():
            alias.add_metric(worker, total)
        yield from (family, alias)
    drafts = CounterMetricFamily("vllm:spec_decode_num_drafts", "Drafts.", labels=["model_name", "engine"])
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that became tokens of a reply, by position.",
        labels=["model_name", "engine", "position"],
    )
    for worker in {worker for worker, _ in found}:
        of_worker = [stats for each, stats in found if each == worker]
        drafts.add_metric(worker, sum(stats.drafted[0] for stats in of_worker if stats.drafted))
        n_positions = max(len(stats.accepted) for stats in of_worker)
        for position in range(n_positions):
            n_tokens = sum(stats.accepted[position] for stats in of_worker if position < len(stats.accepted))
            accepted.add_metric([*worker, str(position)], n_tokens)
    yield from (drafts, accepted)
