"""Deliveries for Prometheus, as the process that makes them counts them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline.jobs.deliverer import Deliverer

OUTCOMES = ("delivered", "failed", "exhausted")


class DeliveryMetrics(Collector):
    def __init__(self, deliverer: Deliverer) -> None:
        self._deliverer = deliverer

    def collect(self) -> Iterator[Metric]:
        counts = self._deliverer.counts
        attempts = CounterMetricFamily(
            "emberline_webhook_deliveries",
            "Attempts that delivered or failed, and deliveries given up after the last.",
            labels=["outcome"],
        )
        for outcome in OUTCOMES:
            attempts.add_metric([outcome], counts[outcome])
        yield attempts
        yield CounterMetricFamily(
            "emberline_webhook_endpoints_disabled", "Endpoints disabled by us.", value=counts["disabled"]
        )
        yield GaugeMetricFamily(
            "emberline_webhook_deliveries_pending", "Deliveries that wait.", value=self._deliverer.n_pending
        )
