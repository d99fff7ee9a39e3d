"""Prometheus metrics, kept in the core only. Where vLLM has a name for a figure, it appears under that name too."""

import asyncio
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline.accounts.usage_row import UsageRow, UsageStatus
from emberline.balancer.worker import Snapshot, WorkerSnapshot
from emberline.protocol.frames import EngineLoad
from emberline.protocol.request import Priority
from emberline.telemetry.worker_metrics import device_metrics, draft_metrics, tier_metrics

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
INTER_TOKEN_BOUNDS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
# As OpenTelemetry's semantic conventions for generative AI have them.
GENAI_DURATION_BOUNDS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
GENAI_TTFT_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
GENAI_TPOT_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
GENAI_TOKEN_BOUNDS = tuple(4**power for power in range(14))
E2E_BOUNDS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


STATUSES: tuple[UsageStatus, ...] = get_args(UsageStatus)  # of ended requests: exposed from the start, at zero,
REFUSED_KINDS = ("overloaded", "unavailable")  # as these are: an alert cannot see the first of a missing series


class Counts(msgspec.Struct, array_like=True):
    """Numbers of values in each bucket (the last bucket is open-ended), and their sum."""

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
        """Return Prometheus' cumulative buckets: (upper bound, number of values up to it)."""
        seen = 0
        lines: list[tuple[str, float]] = []
        for bound, n in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts.buckets, strict=True):
            seen += n
            lines.append((bound, seen))
        return lines


class ModelMetrics:
    """Totals of one model since the core's start."""

    def __init__(self) -> None:
        self.by_status: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.cached_by_tier: Counter[str] = Counter()
        self.generation_tokens = 0
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.e2e_s = Histogram(E2E_BOUNDS_S)


class _GenAIMetrics:
    """The metrics of OpenTelemetry's conventions, of one operation, provider and model."""

    def __init__(self) -> None:
        self.duration_s: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(GENAI_DURATION_BOUNDS_S))
        self.ttft_s = Histogram(GENAI_TTFT_BOUNDS_S)
        self.tpot_s = Histogram(GENAI_TPOT_BOUNDS_S)
        self.tokens = {"input": Histogram(GENAI_TOKEN_BOUNDS), "output": Histogram(GENAI_TOKEN_BOUNDS)}

    def record(self, row: UsageRow) -> None:
        # The status stands for the error's type, which the core does not know.
        duration_s = (row.finished_us - row.created_us) / 1e6
        self.duration_s["" if row.status == "finished" else row.status].observe(duration_s)
        self.tokens["input"].observe(row.input_tokens)
        self.tokens["output"].observe(row.output_tokens)
        if row.first_token_us is None:
            return
        self.ttft_s.observe((row.first_token_us - row.created_us) / 1e6)
        if row.output_tokens > 1:
            self.tpot_s.observe((row.finished_us - row.first_token_us) / 1e6 / (row.output_tokens - 1))


MAX_ANSWERED = 100  # models that only clients name, with metrics of their own: about 25 KB of text each
OTHER = "other"  # the label of all further models, and of their providers


class Metrics:
    """Totals by model, and the text of `/metrics`.

    Clients name the models of providers at will. A model has a label of its own if the operator knows it, or if it has
    answered and fewer than `max_answered` others have. All other models are counted together.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        is_known: Callable[[str], bool] = lambda model: False,
        max_answered: int = MAX_ANSWERED,
    ) -> None:
        """`snapshot` is that of the in-flight ledger; `is_known` is True for a model that the operator has named."""
        self._snapshot = snapshot
        self._is_known = is_known
        self._max_answered = max_answered
        self._answered: set[str] = set()  # models that have a label because they answered
        self.models: defaultdict[str, ModelMetrics] = defaultdict(ModelMetrics)
        self._genai: defaultdict[tuple[str, str, str], _GenAIMetrics] = defaultdict(_GenAIMetrics)
        self._refused: Counter[str] = Counter()
        self._others: list[Collector] = []
        self._rendering = asyncio.Lock()

    def add(self, collector: Collector) -> None:
        """Expose the metrics of another part of the core, which are collected on the event loop."""
        self._others.append(collector)

    def refused(self, kind: str, times: int = 1) -> None:
        """Count a request that was not admitted; `kind` of its error."""
        self._refused[kind] += times

    def record(self, row: UsageRow, inter_token: Counts, operation: str = "chat", provider: str = "emberline") -> None:
        """Count a request that has ended; `inter_token`: its inter-token latencies."""
        name = row.model if row.model in self.models else self._label(row)
        self._genai[operation, OTHER if name == OTHER else provider, name].record(row)
        model = self.models[name]
        model.by_status[row.status] += 1
        model.prompt_tokens += row.input_tokens
        model.cached_tokens += row.cached_tokens
        model.cached_by_tier.update(row.cached_by_tier)
        model.generation_tokens += row.output_tokens
        if inter_token.buckets:
            model.inter_token_s.add(inter_token)
        model.e2e_s.observe((row.finished_us - row.created_us) / 1e6)
        if row.first_token_us is not None:
            model.ttft_s.observe((row.first_token_us - row.created_us) / 1e6)

    def forget_provider(self, name: str) -> None:
        """Remove the series of a provider that is gone. What its models counted is in the usage rows.

        Models that the operator knows keep theirs: an account may call its provider like the first part of their names.
        """
        named = {model for model in self.models if model.startswith(f"{name}/")}
        gone = {model for model in named if not self._is_known(model)}
        for model in gone:
            del self.models[model]
        self._answered -= gone
        for key in [key for key in self._genai if key[2] in gone]:
            del self._genai[key]

    def _label(self, row: UsageRow) -> str:
        model = row.model
        if model in self.models or self._is_known(model):
            return model
        if row.status != "finished" or len(self._answered) >= self._max_answered:
            return OTHER
        self._answered.add(model)
        return model

    async def expose(self) -> bytes:
        """The text of `/metrics`. A thread renders it, one scrape at a time: with many models it takes a while."""
        async with self._rendering:
            snapshot = self._snapshot()
            for worker in snapshot.workers:
                if not worker.models[0].endswith("/*"):  # the pool of a provider, which is no model
                    self.models[worker.models[0]]  # exposed from the start, at zero
            totals = _Totals(list(self.models.items()), list(self._genai.items()), dict(self._refused), snapshot)
            others = [family for collector in self._others for family in collector.collect()]
            return await asyncio.to_thread(lambda: generate_latest(_Collected(totals, others)))


class _Totals(NamedTuple):
    """The totals as a thread reads them. The event loop adds to their values meanwhile, but to no mapping in them."""

    models: list[tuple[str, ModelMetrics]]
    genai: list[tuple[tuple[str, str, str], _GenAIMetrics]]
    refused: Mapping[str, int]
    snapshot: Snapshot


class _Collected(Collector):
    """Everything that one scrape exposes."""

    def __init__(self, totals: _Totals, others: Sequence[Metric]) -> None:
        self._models, self._genai, self._refused, self._snapshot = totals
        self._others = others

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily("emberline_requests_refused", "Requests refused, by error.", labels=["error"])
        for kind in {*REFUSED_KINDS, *self._refused}:
            refused.add_metric([kind], self._refused.get(kind, 0))
        yield refused
        ended = CounterMetricFamily("emberline_requests", "Requests ended, by status.", labels=["model", "status"])
        for name, model in self._models:
            for status in STATUSES:
                ended.add_metric([name, status], model.by_status[status])
        yield ended
        yield from self._counters("prompt_tokens", "vllm:prompt_tokens", lambda m: m.prompt_tokens)
        yield from self._counters("cached_tokens", "vllm:prefix_cache_hits", lambda m: m.cached_tokens)
        by_tier = CounterMetricFamily(
            "emberline_cached_tokens_by_tier", "Cached tokens, by where they came from.", labels=["model", "tier"]
        )
        for name, model in self._models:
            for tier, n_tokens in list(model.cached_by_tier.items()):
                by_tier.add_metric([name, tier], n_tokens)
        yield by_tier
        yield from self._counters("generation_tokens", "vllm:generation_tokens", lambda m: m.generation_tokens)
        yield from self._counters("prefix_cache_queries", "vllm:prefix_cache_queries", lambda m: m.prompt_tokens)
        yield from self._histograms("time_to_first_token_seconds", lambda m: m.ttft_s)
        yield from self._histograms("inter_token_latency_seconds", lambda m: m.inter_token_s)
        yield from self._histograms("e2e_request_latency_seconds", lambda m: m.e2e_s)
        yield from _genai_metrics(self._genai)
        yield from _worker_metrics(self._snapshot)
        yield from tier_metrics(self._snapshot)
        yield from draft_metrics(self._snapshot)
        yield from device_metrics(self._snapshot)
        yield from self._others

    def _counters(self, name: str, alias: str, value: Callable[[ModelMetrics], int]) -> Iterator[Metric]:
        for full_name, label in ((f"emberline_{name}", "model"), (alias, "model_name")):
            family = CounterMetricFamily(full_name, name.replace("_", " ").capitalize() + ".", labels=[label])
            for model_name, model in self._models:
                family.add_metric([model_name], value(model))
            yield family

    def _histograms(self, name: str, value: Callable[[ModelMetrics], Histogram]) -> Iterator[Metric]:
        for full_name, label in ((f"emberline_{name}", "model"), (f"vllm:{name}", "model_name")):
            family = HistogramMetricFamily(full_name, name.replace("_", " ").capitalize() + ".", labels=[label])
            for model_name, model in self._models:
                histogram = value(model)
                family.add_metric([model_name], histogram.cumulative(), histogram.counts.total)
            yield family


def _genai_metrics(found: Sequence[tuple[tuple[str, str, str], _GenAIMetrics]]) -> Iterator[Metric]:
    labels = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]

    def family(name: str, text: str, *more: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(f"gen_ai_{name}", text, labels=[*labels, *more])

    duration = family("server_request_duration_seconds", "Duration of requests.", "error_type")
    ttft = family("server_time_to_first_token_seconds", "Time to the first token.")
    tpot = family("server_time_per_output_token_seconds", "Time per output token after the first.")
    tokens = family("client_token_usage", "Tokens of a request.", "gen_ai_token_type")
    for key, each in found:
        for error, histogram in list(each.duration_s.items()):
            duration.add_metric([*key, error], histogram.cumulative(), histogram.counts.total)
        ttft.add_metric(key, each.ttft_s.cumulative(), each.ttft_s.counts.total)
        tpot.add_metric(key, each.tpot_s.cumulative(), each.tpot_s.counts.total)
        for kind, histogram in each.tokens.items():
            tokens.add_metric([*key, kind], histogram.cumulative(), histogram.counts.total)
    yield from (duration, ttft, tpot, tokens)


STATES = ("ready", "down", "draining", "stalled", "open", "half_open")

_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineLoad], float]], ...] = (
    ("num_requests_running", "Running sequences.", lambda load: load.running),
    ("num_requests_waiting", "Sequences waiting in the engine.", lambda load: load.waiting),
    (
        "kv_cache_usage_perc",
        "KV blocks in use, 0 to 1.",
        lambda load: load.kv_used_blocks / load.kv_total_blocks if load.kv_total_blocks else 0.0,
    ),
)
_GAUGES: tuple[tuple[str, str, Callable[[WorkerSnapshot], float]], ...] = (
    ("prefill_tokens_in_flight", "Uncached prompt tokens that are still to be computed.", lambda w: w.prefill_tokens),
    ("decode_tokens_in_flight", "Context tokens of the sequences in flight.", lambda w: w.decode_tokens),
    ("endpoint_active", "Sequences in flight on the worker.", lambda w: w.active),
    ("endpoint_foreign", "Sequences of other cores there that are not preemptible.", lambda w: w.foreign_active),
    ("endpoint_held", "Requests in the admission queue that wait for the worker.", lambda w: w.waiting),
    ("endpoint_wait_seconds", "Until a prompt sent now would be started.", lambda w: w.wait_s),
)


def _worker_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    for name, text, load_value in _ENGINE_GAUGES:
        for full_name, label in ((f"emberline_{name}", "model"), (f"vllm:{name}", "model_name")):
            family = GaugeMetricFamily(full_name, text, labels=[label, "engine"])
            for worker in snapshot.workers:
                family.add_metric([worker.models[0], worker.name], load_value(worker.load))
            yield family
    up = GaugeMetricFamily("emberline_engine_up", "1: connected and making progress.", labels=["model", "engine"])
    state = GaugeMetricFamily("emberline_endpoint_state", "1: the worker is in it.", labels=["endpoint", "state"])
    rejected = CounterMetricFamily("emberline_endpoint_lies", "Load reports rejected.", labels=["endpoint"])
    for worker in snapshot.workers:
        up.add_metric([worker.models[0], worker.name], worker.healthy)
        rejected.add_metric([worker.name], worker.rejected_reports)
        for each in STATES:
            state.add_metric([worker.name, each], worker.state == each)
    yield from (up, state, rejected)
    for name, text, value in _GAUGES:
        family = GaugeMetricFamily(f"emberline_{name}", text, labels=["endpoint", "role"])
        for worker in snapshot.workers:
            family.add_metric([worker.name, worker.role], value(worker))
        yield family
    tiles = CounterMetricFamily(
        "emberline_image_tiles", "Tiles of images in prompts, by what was done.", labels=["model", "engine", "result"]
    )
    for worker in snapshot.workers:
        tiles.add_metric([worker.models[0], worker.name, "encoded"], worker.load.image_tiles_encoded)
        tiles.add_metric([worker.models[0], worker.name, "reused"], worker.load.image_tiles_reused)
    yield tiles
    waiting = GaugeMetricFamily("emberline_requests_held", "Requests in the admission queue.", labels=["priority"])
    for priority in Priority:
        name = priority.name.lower()
        waiting.add_metric([name], snapshot.waiting.get(name, 0))
    yield waiting
    yield GaugeMetricFamily("emberline_requests_in_flight", "Requests on workers.", value=snapshot.dispatched)
    yield GaugeMetricFamily(
        "emberline_index_blocks", "Blocks in the prefix index of the fleet.", value=snapshot.index_blocks
    )
