from math import inf

import pytest

from emberline.engine.core.latency_target import DECODE_SHARE, TARGET_S, LatencyTarget
from emberline.engine.core.prefill_policy import BatchTimeLimit, StepWork
from emberline.engine.runners.gpu.shapes import BURST_TOKENS, CHUNK_ROWS, GPU_SHAPES, MAX_GRAPH_TOKENS, TILE


def flat(work):
    """About an 8B model on an H200: a short chunk costs as much as a tile, and its context costs the same."""
    tokens = -(-(work.n_decodes + work.n_tokens) // 128) * 128
    attention = max(work.n_tokens, 480) * work.context * 1.2e-9 if work.n_tokens else 0.0
    return max(4.2e-3, tokens * 2.1e-5) + 3e-4 + work.n_decodes * 2e-5 + attention


def steep(work):
    """A device on which everything takes ten times as long."""
    return 10 * flat(work)


def serve(policy, cost, n_decodes, length, budget=8192):
    """The chunks of a prompt while sequences decode, each measured two steps late, as on a device."""
    sizes, done, late = [], 0, []
    while done < length:
        work = StepWork(n_decodes)
        allowed = policy.chunk(work, done, budget - n_decodes)
        n = min(allowed, length - done)
        work.add(n, done + n)
        done += n
        sizes.append((n, cost(work)))
        late.append((work, cost(work)))
        if len(late) > 2:
            policy.observe(*late.pop(0))
    for seen in late:
        policy.observe(*seen)
    return sizes


def decodes(policy, cost, n_decodes, n=30):
    for _ in range(n):
        policy.observe(StepWork(n_decodes), cost(StepWork(n_decodes)))


@pytest.mark.parametrize("start", ["nothing measured", "measured too slow", "chunks far too long"])
def test_chunk_sizes_converge_to_the_latency_target(start):
    policy = LatencyTarget(GPU_SHAPES)
    decodes(policy, flat, 32)
    for context in () if start == "nothing measured" else (500, 3000, 9000):
        odd = StepWork(32)
        odd.add(128 if start == "measured too slow" else 4000, context)
        for _ in range(20):
            policy.observe(odd, 10.0 if start == "measured too slow" else flat(odd))
    for _ in range(12):
        serve(policy, flat, 32, 8192)
    served = serve(policy, flat, 32, 8192)
    assert all(seconds < 1.25 * TARGET_S for _, seconds in served)
    assert sum(seconds for _, seconds in served) < 0.27


def test_chunks_stay_efficient_when_a_long_context_exceeds_the_target():
    policy = LatencyTarget(GPU_SHAPES)
    decodes(policy, flat, 32)
    for _ in range(3):
        longer = serve(policy, flat, 32, 65_536)
    deep = longer[-20:-1]
    assert sum(n for n, _ in deep) / len(deep) > 200, "a shorter chunk would take as long"
    assert all(seconds < 1.6 * flat_least(65_536) for _, seconds in deep)


def flat_least(context):
    work = StepWork(32)
    work.add(96, context)
    return flat(work)


def test_a_slow_device_shares_its_time_between_decode_and_prefill():
    policy = LatencyTarget(GPU_SHAPES)
    decodes(policy, steep, 32)
    for _ in range(4):
        serve(policy, steep, 32, 8192)
    served = serve(policy, steep, 32, 8192)[:-1]
    alone = steep(StepWork(32))
    assert all(seconds < 1.5 * DECODE_SHARE * alone for _, seconds in served)
    assert min(n for n, _ in served) >= TILE - 32


def test_an_outlier_has_no_lasting_effect():
    """For instance when a kernel was compiled during the step."""
    policy = LatencyTarget(GPU_SHAPES)
    decodes(policy, flat, 32)
    for _ in range(3):
        usual = serve(policy, flat, 32, 8192)
    odd = StepWork(32)
    odd.add(480, 480)
    policy.observe(odd, 2.0)
    serve(policy, flat, 32, 8192)
    assert len(serve(policy, flat, 32, 8192)) <= len(usual) + 1


def test_stages_of_a_pipeline_share_the_target():
    """The first says how long its own part took: a token passes all of them."""

    def longest(n_stages):
        policy = LatencyTarget(GPU_SHAPES, n_stages=n_stages)
        decodes(policy, flat, 32)
        for _ in range(12):
            served = serve(policy, flat, 32, 8192)
        return max(seconds for _, seconds in served)

    assert longest(2) < 1.25 * TARGET_S / 2 < longest(1) < 1.25 * TARGET_S


def test_without_decodes_a_prompt_gets_the_whole_budget():
    assert LatencyTarget(GPU_SHAPES).chunk(StepWork(0), 0, 8192) == 8192


@pytest.mark.parametrize("n_decodes", [1, 32, 33, 100, 300])
def test_mixed_steps_fill_whole_tiles(n_decodes):
    n = LatencyTarget(GPU_SHAPES).chunk(StepWork(n_decodes), 0, 8192)
    assert (n_decodes + n) % 128 == 0


def test_prefill_progresses_even_when_decodes_exceed_the_target():
    policy = LatencyTarget(GPU_SHAPES)
    for _ in range(30):
        busy = StepWork(512)
        busy.add(256, 256)
        policy.observe(busy, 1.0)
    assert policy.chunk(StepWork(512), 0, 8192) > 0
    assert policy.chunk(busy, 0, 8192) == 0


def test_a_time_limit_bounds_prefill_steps():
    policy = LatencyTarget(GPU_SHAPES)
    whole = StepWork(0)
    whole.add(8192, 8192)
    policy.observe(whole, 0.2)
    n = policy.chunk(StepWork(0), 4096, 8192, limit_s=0.04)
    assert n == pytest.approx(8192 / 5, rel=0.01)
    begun = StepWork(0)
    begun.add(n, n)
    assert policy.chunk(begun, 4096, 8192, limit_s=0.04) <= 0
    assert policy.chunk(StepWork(0), 0, 8192, limit_s=1e-6) == TILE


def test_without_a_latency_target_only_the_time_limit_applies():
    policy = BatchTimeLimit()
    for n_decodes in (0, 3, 64):
        assert policy.chunk(StepWork(n_decodes), 100, 511) == 511
    step = StepWork(3)
    step.add(509, 600)
    for _ in range(20):
        policy.observe(step, 0.5)
    assert policy.chunk(StepWork(3), 100, 511) == 511
    assert policy.chunk(StepWork(3), 100, 511, limit_s=0.25) == pytest.approx(255, abs=5)


def test_the_time_of_a_prompt_token_is_without_that_of_decoding():
    policy = BatchTimeLimit()
    for _ in range(30):
        for n in (1, 3, 8):
            policy.observe(StepWork(n), 0.004 + 0.005 * n)
        mixed = StepWork(8)
        mixed.add(20, 20)
        policy.observe(mixed, 0.004 + 0.005 * 8 + 0.001 * 20)
    assert policy.chunk(StepWork(8), 0, 511, limit_s=0.05) == pytest.approx(50, abs=2)
    assert policy.n_decodes(0.05) == pytest.approx(10, abs=0.5)
    assert BatchTimeLimit().n_decodes(0.05) == LatencyTarget(GPU_SHAPES).n_decodes(0.05) == inf


def test_mixed_steps_never_exceed_the_largest_cuda_graph():
    policy = LatencyTarget(GPU_SHAPES)
    for _ in range(30):
        policy.observe(StepWork(8), 0.001)
        quick = StepWork(8)
        quick.add(1016, 1016)
        policy.observe(quick, 0.002)
    assert policy.chunk(StepWork(8), 0, 8192, slack=3.0) == MAX_GRAPH_TOKENS - 8
    assert policy.chunk(StepWork(8), 0, 8184, slack=4.0) == 8184, "no target: as many as there are"


def test_slack_lengthens_steps():
    policy = LatencyTarget(GPU_SHAPES)
    decodes(policy, flat, 32)
    for _ in range(6):
        serve(policy, flat, 32, 8192)
    assert policy.chunk(StepWork(32), 4096, 8192, slack=2.0) > policy.chunk(StepWork(32), 4096, 8192) + TILE


def test_decode_time_is_estimated_from_mixed_steps():
    policy = LatencyTarget(GPU_SHAPES)
    alone = StepWork(0)
    alone.add(4096, 4096)
    policy.observe(alone, 0.08)
    for _ in range(8):
        mixed_step = StepWork(200)
        mixed_step.add(312, 312)
        policy.observe(mixed_step, 0.020 + 312 * 0.08 / 4096)
    assert policy.chunk(StepWork(200), 0, 4096) > 312 + TILE


def test_untargeted_steps_are_large_or_fit_a_cuda_graph():
    policy = LatencyTarget(GPU_SHAPES)
    for n_untargeted, budget, tokens in (
        (5000, 4096, 4096),
        (4096, 4096, 4096),
        (4000, 4096, MAX_GRAPH_TOKENS),
        (4000, 512, 512),
        (2048, 2048, 2048),
        (5000, 8192, 8192),
    ):
        limit = policy.step_limit(0, budget, lambda most: n_untargeted)  # noqa: B023 called at once
        assert limit == (tokens, CHUNK_ROWS - 1 if tokens <= MAX_GRAPH_TOKENS else inf)
    assert policy.step_limit(8, 8192, lambda most: 0) == (MAX_GRAPH_TOKENS, CHUNK_ROWS - 1)
    assert BatchTimeLimit().step_limit(0, 4096, lambda most: 4000) == (4096, inf)


def test_a_burst_beside_decodes_is_computed_in_steps_of_bounded_time():
    def limit(token_s, n_untargeted=20_000, n_decodes=8):
        policy = LatencyTarget(GPU_SHAPES)
        if token_s:
            alone = StepWork(0)
            alone.add(8192, 8192)
            policy.observe(alone, 8192 * token_s)
        return policy.step_limit(n_decodes, 8192, lambda most: n_untargeted)

    assert limit(None) == limit(20e-6) == (BURST_TOKENS, CHUNK_ROWS - 1)
    assert limit(20e-6, BURST_TOKENS - 9) == (MAX_GRAPH_TOKENS, CHUNK_ROWS - 1), "too few to fill it"
    assert limit(40e-6) == (MAX_GRAPH_TOKENS, CHUNK_ROWS - 1), "a slower model"
    assert limit(10e-6) == (5376, inf), "a faster one: launched without a CUDA graph"
    assert limit(5e-6) == (8192, inf)
    assert limit(20e-6, n_decodes=0) == (8192, inf), "nobody waits for the step"


def test_long_prompts_are_cut_at_multiples():
    policy = LatencyTarget(GPU_SHAPES)
    assert policy.align(StepWork(0), 4112, 8192) == 8192 - 4112
    assert policy.align(StepWork(0), 4112, 1024) == 1024
    assert policy.align(StepWork(0), 8192, 8192) == 8192
    assert policy.align(StepWork(0), 0, 4096) == 4096
    assert policy.align(StepWork(3), 4112, 8192) == 8192
    assert BatchTimeLimit().align(StepWork(0), 4112, 8192) == 8192
