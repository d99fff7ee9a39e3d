import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from emberline.accounts.usage_row import UsageRow
from emberline.balancer.balancer import Balancer
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.worker import Snapshot
from emberline.protocol.errors import BadInput
from emberline.protocol.events import Completed
from emberline.protocol.frames import DraftStats, EngineLoad, TierStats
from emberline.service import Service
from emberline.telemetry.metrics import OTHER, Counts, Histogram, Metrics
from emberline.telemetry.worker_metrics import draft_metrics, tier_metrics
from tests.service.fake_engine import FakeEngine
from tests.service.test_service import ask, events_of

BOUNDS = (0.1, 1.0, 10.0)


async def test_prometheus_text(service: Service, engine: FakeEngine) -> None:
    engine.cached = 4
    engine.running.add("a sequence of another core")
    for _ in range(2):
        *_, completed = await events_of(service, ask())
        assert isinstance(completed, Completed)
    n_prompt = completed.usage.prompt_tokens
    with pytest.raises(BadInput):
        await events_of(service, ask(n=0))
    text = (await service.operations.metrics()).decode()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    model = "@cf/test/bytes"
    assert samples["emberline_requests_total", model, "finished"] == 2
    assert samples["emberline_requests_refused_total", "bad_input"] == 1
    assert samples["emberline_engine_up", model, "e0"] == 1
    assert samples["emberline_requests_in_flight",] == 0
    assert samples["emberline_prefill_tokens_in_flight", "both", "e0"] == 0
    assert samples["emberline_decode_tokens_in_flight", "both", "e0"] == 0
    assert samples["emberline_endpoint_state", "e0", "ready"] == 1
    assert samples["emberline_endpoint_state", "e0", "open"] == 0
    assert samples["emberline_endpoint_lies_total", "e0"] == 0
    for prefix in ("emberline_", "vllm:"):
        assert samples[f"{prefix}prompt_tokens_total", model] == 2 * n_prompt
        assert samples[f"{prefix}generation_tokens_total", model] == 2 * 7
        assert samples[f"{prefix}prefix_cache_queries_total", model] == 2 * n_prompt
        assert samples[f"{prefix}time_to_first_token_seconds_count", model] == 2
        assert samples[f"{prefix}e2e_request_latency_seconds_count", model] == 2
        assert 0 < samples[f"{prefix}inter_token_latency_seconds_count", model] <= 2 * 6
        assert samples[f"{prefix}num_requests_waiting", model, "e0"] == 0
        assert samples[f"{prefix}num_requests_running", model, "e0"] == 1
        assert samples[f"{prefix}kv_cache_usage_perc", model, "e0"] == 1 / 1024
    genai = ("chat", "emberline", model)
    assert samples["gen_ai_server_request_duration_seconds_count", "", *sorted(genai, key=str)] == 2
    assert samples["gen_ai_server_time_to_first_token_seconds_count", *sorted(genai)] == 2
    assert samples["gen_ai_server_time_per_output_token_seconds_count", *sorted(genai)] == 2
    assert samples["gen_ai_client_token_usage_sum", *sorted((*genai, "input"))] == 2 * n_prompt
    assert samples["gen_ai_client_token_usage_sum", *sorted((*genai, "output"))] == 2 * 7
    assert samples["emberline_cached_tokens_total", model] == 8
    assert samples["emberline_cached_tokens_by_tier_total", model, "device"] == 8
    assert samples["vllm:prefix_cache_hits_total", model] == 8


@given(st.lists(st.floats(0, 100)), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
def test_histograms_add_up(values: list[float], more: list[tuple[float, int]]) -> None:
    one, other = Histogram(BOUNDS), Histogram(BOUNDS)
    for value in values:
        one.observe(value)
    for value, times in more:
        other.observe(value, times)
    one.add(other.counts)
    every = values + [value for value, times in more for _ in range(times)]
    for (name, cumulative), bound in zip(one.cumulative(), (*BOUNDS, float("inf")), strict=True):
        assert float(name) == bound
        assert cumulative == sum(value <= bound for value in every)
    assert one.counts.total == pytest.approx(sum(every))


def test_metrics_of_speculative_decoding() -> None:
    drafts = (DraftStats("grammar", (10, 8), (10, 7)), DraftStats("suffix", (5, 5, 4), (3, 1, 0)))
    balancer = Balancer()
    balancer.fleet.join(Endpoint(name="e0", address="unix:/e0", models=("m",)), Capacity(), 0.0)
    balancer.fleet.report("e0", EngineLoad(drafts=drafts), 0.0)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in draft_metrics(balancer.snapshot(0.0))
        for sample in family.samples
    }
    assert found["emberline_spec_decode_num_drafted_tokens_total", "m", "e0", "grammar", "1"] == 8
    assert found["emberline_spec_decode_num_accepted_tokens_total", "m", "e0", "suffix", "0"] == 3
    assert found["vllm:spec_decode_num_draft_tokens_total", "m", "e0"] == 32
    assert found["vllm:spec_decode_num_accepted_tokens_total", "m", "e0"] == 21
    assert found["vllm:spec_decode_num_drafts_total", "m", "e0"] == 15
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "m", "e0", "0"] == 13


def test_metrics_of_tiers() -> None:
    tiers = (
        TierStats("host", used_bytes=10, capacity_bytes=100, blocks=2, hits=3, misses=1, read_rate=5.0),
        TierStats("pool", state="degraded: the master does not answer", oldest_s=7.0, extra={"refused": 2.0}),
    )
    balancer = Balancer()
    balancer.fleet.join(Endpoint(name="e0", address="unix:/e0", models=("m",)), Capacity(), 0.0)
    balancer.fleet.report("e0", EngineLoad(tiers=tiers), 0.0)
    found = {
        (sample.name, sample.labels["tier"]): sample.value
        for family in tier_metrics(balancer.snapshot(0.0))
        for sample in family.samples
        if sample.labels["engine"] == "e0" and sample.labels["model"] == "m"
    }
    prefix = "emberline_kv_tier_"
    assert found[f"{prefix}used_bytes", "host"] == 10
    assert found[f"{prefix}capacity_bytes", "host"] == 100
    assert found[f"{prefix}hits_total", "host"] == 3
    assert found[f"{prefix}misses_total", "host"] == 1
    assert found[f"{prefix}read_bytes_per_second", "host"] == 5
    assert (found[f"{prefix}ok", "host"], found[f"{prefix}ok", "pool"]) == (1, 0)
    assert found[f"{prefix}oldest_seconds", "pool"] == 7
    assert found[f"{prefix}refused_total", "pool"] == 2


IDLE = Snapshot(workers=[], waiting={}, dispatched=0, index_blocks=0)


def row(model: str, status: str = "finished") -> UsageRow:
    return UsageRow(
        id="r",
        account="a",
        model=model,
        model_version="v",
        input_tokens=10,
        output_tokens=5,
        status=status,  # type: ignore[arg-type]
        created_us=0,
        first_token_us=40_000,
        finished_us=90_000,
    )


async def labels(metrics: Metrics) -> tuple[set[str], set[str]]:
    """The models and the providers that `/metrics` names."""
    text = (await metrics.expose()).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    models = {sample.labels[name] for sample in samples for name in ("model", "model_name") if name in sample.labels}
    models |= {sample.labels["gen_ai_request_model"] for sample in samples if "gen_ai_request_model" in sample.labels}
    providers = {sample.labels["gen_ai_provider_name"] for sample in samples if "gen_ai_provider_name" in sample.labels}
    return models, providers


async def test_clients_cannot_grow_the_labels() -> None:
    metrics = Metrics(lambda: IDLE, is_known=lambda model: model == "p/known", max_answered=3)
    for number in range(50):
        metrics.record(row(f"p{number}/made-up", "failed"), Counts(), provider=f"p{number}")
        metrics.record(row(f"q/{number}"), Counts(), provider="q")
    metrics.record(row("p/known", "failed"), Counts(), provider="p")
    models, providers = await labels(metrics)
    assert models == {"p/known", "q/0", "q/1", "q/2", OTHER}
    assert providers == {"p", "q", OTHER}
    assert metrics.models[OTHER].by_status == {"failed": 50, "finished": 47}  # none is lost
    size = len(await metrics.expose())
    for number in range(1000):
        metrics.record(row(f"r{number}/x", "cancelled"), Counts(), provider=f"r{number}")
    assert len(await metrics.expose()) < 2 * size


async def test_a_provider_takes_its_series_with_it() -> None:
    metrics = Metrics(lambda: IDLE, max_answered=2)
    for model in ("p/a", "p/b", "other/c"):
        metrics.record(row(model), Counts(), provider=model[0])
    metrics.forget_provider("p")
    assert await labels(metrics) == ({OTHER}, {OTHER})
    metrics.record(row("new/d"), Counts(), provider="new")  # there is room for others again
    assert await labels(metrics) == ({OTHER, "new/d"}, {OTHER, "new"})


async def test_known_models_outlive_a_provider_that_is_called_like_them() -> None:
    metrics = Metrics(lambda: IDLE, is_known=lambda model: model == "meta-llama/llama-3")
    for model in ("meta-llama/llama-3", "meta-llama/mine"):
        metrics.record(row(model), Counts())
    metrics.forget_provider("meta-llama")
    assert await labels(metrics) == ({"meta-llama/llama-3"}, {"emberline"})
    assert metrics.models["meta-llama/llama-3"].by_status == {"finished": 1}


async def test_the_event_loop_runs_on_while_metrics_are_rendered() -> None:
    metrics = Metrics(lambda: IDLE, max_answered=200)
    for number in range(200):
        metrics.record(row(f"p/{number}"), Counts())
    scrape, n_turns = asyncio.create_task(metrics.expose()), 0
    while not scrape.done():
        await asyncio.sleep(0.001)
        n_turns += 1
    assert n_turns > 10  # on the loop, it would be two or three
    assert b'model="p/199"' in scrape.result()
