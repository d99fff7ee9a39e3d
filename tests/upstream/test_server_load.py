"""Load reports of upstream servers: valid, missing and implausible ones, and what follows from them."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.frames import EngineLoad
from emberline.upstream.servers.server_load import (
    FIRST_LIMIT,
    MAX_LIMIT,
    ConcurrencyLimit,
    NoLoadReport,
    ProbeTimings,
    ProgressCheck,
    sglang_load,
    vllm_load,
)

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.0e+06
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 9.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 12.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",num_gpu_blocks="100"} 1.0
process_cpu_seconds_total 3.0
"""


def test_vllms_metrics() -> None:
    load = vllm_load(METRICS)
    assert (load.running, load.waiting, load.prompt_tokens, load.steps) == (7, 5, 1_000_000, 12)
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


def test_absurd_figures_count_as_zero() -> None:
    digits = "9" * 5000
    metrics = f'vllm:num_requests_running 1.0\nvllm:cache_config_info{{block_size="16",num_gpu_blocks="{digits}"}} 1.0'
    assert vllm_load(metrics).kv_total_blocks == 0
    rank = {"num_running_reqs": 1, "num_used_tokens": 10**400, "max_total_num_tokens": -(10**400)}
    assert sglang_load(rank) == EngineLoad(running=1)


def test_metrics_are_read_in_linear_time() -> None:
    began_s = time.process_time()
    load = vllm_load("vllm:num_requests_running 1.0\n" + 'vllm:a{b="\n' * 50_000)
    assert load.running == 1
    assert time.process_time() - began_s < 2.0  # quadratic, it takes a minute


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


def test_the_limit_follows_a_queue_that_does_not_empty() -> None:
    limit = ConcurrencyLimit()
    assert not limit.observe(EngineLoad(running=40, waiting=60))  # a burst that has just arrived
    assert not limit.observe(EngineLoad(running=100, waiting=0))
    assert not limit.observe(EngineLoad(running=64, waiting=36))
    assert limit.observe(EngineLoad(running=64, waiting=36))
    assert limit.sequences == 64
    assert not limit.observe(EngineLoad(running=30, waiting=0))


def test_the_limit_grows_while_the_server_runs_all_it_gets() -> None:
    limit = ConcurrencyLimit()
    for _ in range(40):
        limit.observe(EngineLoad(running=limit.sequences))
    assert limit.sequences == MAX_LIMIT
    idle = ConcurrencyLimit()
    assert not idle.observe(EngineLoad())
    assert idle.sequences == FIRST_LIMIT


def test_a_server_whose_report_does_not_change_is_stuck() -> None:
    check = ProgressCheck()
    for second in range(0, 20, 2):
        check.observe(EngineLoad(running=2, steps=100 * second), float(second))
    for second in range(20, 28, 2):
        check.observe(EngineLoad(running=2, waiting=second, steps=1800), float(second))  # it still accepts requests
        assert not check.is_stuck(second)
    assert check.patience_s == ProbeTimings().min_patience_s
    assert check.is_suspect(18 + 6)
    assert check.is_stuck(18 + 11)
    check.progressed(29.0)  # a canary was answered
    assert not check.is_suspect(30)


def test_patience_follows_the_duration_of_a_step() -> None:
    check = ProgressCheck()
    check.observe(EngineLoad(running=1, steps=1), 0.0)
    assert check.patience_s == ProbeTimings().first_patience_s
    check.observe(EngineLoad(running=1, steps=3), 8.0)
    assert check.patience_s == 80


def test_an_idle_server_is_not_stuck() -> None:
    check = ProgressCheck()
    for second in range(0, 1000, 2):
        check.observe(EngineLoad(steps=5), float(second))
    assert not check.is_suspect(1000)
