"""Nothing is compiled or captured while requests wait."""

import time

import pytest

from benchmarks.gpu.model_files import SMOLLM2_135M, write_gguf
from tests.engine.fakes import request

LONGEST_STEP_S = 0.15
BURSTS = (("burst", 64, 40), ("one", 1, 5), ("few", 5, 700), ("many", 250, 60), ("long", 2, 7000))


@pytest.mark.gpu
def test_a_first_burst_meets_no_step_that_is_not_prepared(tmp_path, monkeypatch):
    """A quantized model with an empty kernel cache, right after its start: bursts of many sizes, eager steps."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    import triton

    from emberline.engine import worker

    path = tmp_path / "random.gguf"
    write_gguf(path, SMOLLM2_135M | {"block_count": 6})
    args = worker._parse(["--model", str(path), "--socket", "unused", "--device", "cuda", "--kv-bytes", str(2 << 30)])
    loop, _, _ = worker.build(args)
    compiled, n_graphs = [], loop._runner.n_graphs
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda *_, fn, **__: compiled.append(fn.name)
    longest = {}
    try:
        for name, n, length in BURSTS:
            longest[name] = run_burst(loop, name, n, length)
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    print(f"longest step of each burst: {longest}")
    assert not compiled
    assert loop._runner.n_graphs == n_graphs
    assert max(longest.values()) < LONGEST_STEP_S


def run_burst(loop, name, n, length):
    """The duration of the longest step."""
    kinds = [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}, {"presence_penalty": 0.5, "logprobs": 3}]
    for i in range(n):
        ids = [3 + (i * 7919 + j * j * 31) % 49000 for j in range(length)]
        loop.submit(request(f"{name}{i}", ids, max_tokens=12, temperature=0.7, **kinds[i % 4]), 0.0)
    longest = 0.0
    while loop.busy:
        begun = time.perf_counter()
        loop.step(0.0)
        longest = max(longest, time.perf_counter() - begun)
    return longest


def test_random_gguf_files_can_be_read(tmp_path):
    from emberline.weights.checkpoint import open_checkpoint

    path = tmp_path / "random.gguf"
    write_gguf(path, SMOLLM2_135M | {"block_count": 1}, vocab=64)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.config.n_layers, checkpoint.config.vocab_size, checkpoint.config.head_dim) == (1, 64, 64)
    affine = checkpoint.weight("blk.0.ffn_down.weight").affine()
    assert affine.bits == 4
    assert affine.codes.shape == (576, 1536)
