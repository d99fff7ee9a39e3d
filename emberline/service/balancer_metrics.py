"""The balancer's figures for Prometheus: who waits, what is in flight where, and whom it keeps away from."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline.balancer.balancer import Balancer
from emberline.balancer.snapshot import WorkerSnapshot

STATES = ("ready", "down", "draining", "stalled", "open", "half_open")  # the last two are the breaker's

_GAUGES: tuple[tuple[str, str, Callable[[WorkerSnapshot], float]], ...] = (
    ("prefill_tokens_in_flight", "Prompt tokens to be computed, cached ones not counted.", lambda w: w.prefill_tokens),
    ("decode_tokens_in_flight", "Tokens of contexts that are in flight.", lambda w: w.decode_tokens),
    ("endpoint_active", "Sequences sent to the endpoint that have not ended.", lambda w: w.active),
    ("endpoint_foreign", "Sequences of other cores there that do not make room.", lambda w: w.foreign_active),
    ("endpoint_held", "Requests that wait for the endpoint.", lambda w: w.held),
    ("endpoint_wait_seconds", "Until a prompt sent now would be begun.", lambda w: w.wait_s),
)


class BalancerMetrics(Collector):
    def __init__(self, balancer: Balancer, clock: Callable[[], float] = time.monotonic) -> None:
        self._balancer = balancer
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        snapshot = self._balancer.snapshot(self._clock())
        waiting = GaugeMetricFamily("emberline_requests_held", "Requests that wait for room.", labels=["priority"])
        for priority, n in snapshot.waiting.items():
            waiting.add_metric([priority], n)
        yield waiting
        yield GaugeMetricFamily(
            "emberline_requests_in_flight", "Requests that are charged to an endpoint.", value=snapshot.charged
        )
        yield GaugeMetricFamily(
            "emberline_index_blocks", "Cached blocks that are known, of all endpoints.", value=snapshot.index_blocks
        )
        for name, text, value in _GAUGES:
            family = GaugeMetricFamily(f"emberline_{name}", text, labels=["endpoint", "role"])
            for worker in snapshot.workers:
                family.add_metric([worker.name, worker.role], value(worker))
            yield family
        state = GaugeMetricFamily("emberline_endpoint_state", "1: it is so now.", labels=["endpoint", "state"])
        lies = CounterMetricFamily("emberline_endpoint_lies", "Loads that were not believed.", labels=["endpoint"])
        for worker in snapshot.workers:
            lies.add_metric([worker.name], worker.lies)
            for each in STATES:
                state.add_metric([worker.name, each], worker.state == each)
        yield state
        yield lies
