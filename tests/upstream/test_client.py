"""Load reports of upstream servers: valid, missing and implausible ones."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.upstream.client import NoLoadReport, sglang_load, vllm_load

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.0e+06
vllm:cache_config_info{block_size="128",cache_dtype="auto",num_gpu_blocks="100"} 1.0
process_cpu_seconds_total 3.0
"""


def test_vllms_metrics() -> None:
    load = vllm_load(METRICS)
    assert (load.running, load.waiting, load.prompt_tokens) == (7, 5, 1_000_000)
    assert (load.kv_used_blocks, load.kv_total_blocks) == (400, 800)  # of 16 tokens


def test_sglangs_loads() -> None:
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 1, "num_waiting_uncached_tokens": 900}
    rank |= {"num_used_tokens": 1600, "max_total_num_tokens": 16000}
    for answer in ({"loads": [rank, rank]}, [rank, rank]):
        load = sglang_load(answer)
        assert (load.running, load.waiting, load.waiting_tokens) == (4, 2, 1800)
        assert (load.kv_used_blocks, load.kv_total_blocks) == (200, 2000)
    assert sglang_load(rank).running == 2


@pytest.mark.parametrize("lie", ["NaN", "-5", "1e300", "inf", "many"])
def test_implausible_figures_count_as_zero(lie: str) -> None:
    load = vllm_load(
        f"vllm:num_requests_running 1.0\nvllm:num_requests_waiting {lie}\nvllm:kv_cache_usage_perc {lie}\n"
    )
    assert (load.running, load.waiting, load.kv_used_blocks) == (1, 0, 0)


@pytest.mark.parametrize("answer", [None, 3, [], {}, {"loads": []}, {"loads": 3}, [3], {"loads": [{"x": 1}]}])
def test_an_answer_that_is_no_load(answer: Any) -> None:
    with pytest.raises(NoLoadReport):
        sglang_load(answer)
    with pytest.raises(NoLoadReport):
        vllm_load("<html>hello</html>")


@given(
    st.dictionaries(
        st.sampled_from(["num_running_reqs", "num_waiting_reqs", "num_used_tokens"]),
        st.floats() | st.integers() | st.text() | st.none(),
    )
)
def test_no_number_breaks_the_books(rank: dict[str, Any]) -> None:
    try:
        load = sglang_load([rank])
    except NoLoadReport:
        return
    for value in (load.running, load.waiting, load.kv_used_blocks):
        assert value >= 0
        assert math.isfinite(value)
