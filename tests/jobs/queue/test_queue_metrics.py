"""The labels of the queue's metrics are bounded, whatever models the jobs name."""

from emberline.jobs.queue.puller import OTHER, QueueMetrics
from emberline.jobs.queue.reader import QueueDepth


def samples(metrics: QueueMetrics) -> dict[tuple[str, ...], float]:
    found = [sample for family in metrics.collect() for sample in family.samples]
    return {(each.name, *sorted(each.labels.values())): each.value for each in found}


def test_models_of_jobs_beyond_the_limit_are_counted_together() -> None:
    metrics = QueueMetrics(max_models=2)
    depths = [
        QueueDepth(f"p/{number}", account, number, 1, 0, 1_000_000 * number, 0)
        for number in range(5)
        for account in ("a", "b")
    ]
    metrics.update(depths, 0, 10_000_000)
    for number in range(100):
        metrics.count("claimed", f"p/{number}")
    found = samples(metrics)
    depth = {key[1]: value for key, value in found.items() if key[0] == "emberline_queue_depth"}
    assert depth == {"p/4": 8, "p/3": 6, OTHER: 2 * (0 + 1 + 2)}
    assert found["emberline_queue_leased", OTHER] == 6
    assert found["emberline_queue_age_seconds", OTHER] == 10  # of the oldest among them
    lines = {key[1:]: value for key, value in found.items() if key[0] == "emberline_queue_lines_total"}
    assert lines == {("claimed", "p/0"): 1, ("claimed", "p/1"): 1, ("claimed", OTHER): 98}
