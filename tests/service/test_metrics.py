import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from emberline.protocol.errors import BadInput
from emberline.protocol.events import Completed
from emberline.service import Service
from emberline.service.metrics import Histogram
from tests.service.fake_engine import FakeEngine
from tests.service.test_service import ask, events_of

BOUNDS = (0.1, 1.0, 10.0)


async def test_prometheus_text(service: Service, engine: FakeEngine) -> None:
    engine.cached = 4
    for _ in range(2):
        *_, completed = await events_of(service, ask())
        assert isinstance(completed, Completed)
    n_prompt = completed.usage.prompt_tokens
    with pytest.raises(BadInput):
        await events_of(service, ask(n=0))
    text = (await service.metrics()).decode()
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
        assert samples[f"{prefix}kv_cache_usage_perc", model, "e0"] == 0.25
    genai = ("chat", "emberline", model)
    assert samples["gen_ai_server_request_duration_seconds_count", "", *sorted(genai, key=str)] == 2
    assert samples["gen_ai_server_time_to_first_token_seconds_count", *sorted(genai)] == 2
    assert samples["gen_ai_server_time_per_output_token_seconds_count", *sorted(genai)] == 2
    assert samples["gen_ai_client_token_usage_sum", *sorted((*genai, "input"))] == 2 * n_prompt
    assert samples["gen_ai_client_token_usage_sum", *sorted((*genai, "output"))] == 2 * 7
    assert samples["emberline_cached_tokens_total", model] == 8
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
