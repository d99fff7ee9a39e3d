"""Metrics of speculative decoding, from the workers' load reports: by drafter and position, and vLLM's totals."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from emberline.balancer.worker import Snapshot
from emberline.protocol.frames import DraftStats

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
