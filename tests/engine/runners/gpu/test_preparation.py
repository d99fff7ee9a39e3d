"""Nothing is compiled or captured while requests wait."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import triton

from benchmarks.gpu.model_files import SMOLLM2_135M, write_gguf
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import DeviceLost
from emberline.engine.runners.gpu.batch import MixedShape
from emberline.engine.runners.gpu.graphs import StepKind
from emberline.engine.runners.gpu.preparation import StepPreparation
from emberline.engine.runners.gpu.shapes import MAX_GRAPH_TOKENS
from emberline.kernels.backend import LatentAttention
from emberline.kernels.gpu.launch import compiling_only, is_compiling
from tests.engine.fakes import request

LONGEST_STEP_S = 0.15
BURSTS = (("burst", 64, 40), ("one", 1, 5), ("few", 5, 700), ("many", 250, 60), ("long", 2, 7000))


@pytest.mark.gpu
@pytest.mark.alone
def test_a_first_burst_meets_no_step_that_is_not_prepared(tmp_path, monkeypatch):
    """A quantized model with an empty kernel cache, right after its start: bursts of many sizes, eager steps."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    from emberline.engine.worker import main as worker

    path = tmp_path / "random.gguf"
    write_gguf(path, SMOLLM2_135M | {"block_count": 6})
    args = worker.parse_arguments(
        ["--model", str(path), "--socket", "unused", "--device", "cuda", "--kv-bytes", str(2 << 30)]
    )
    loop = worker.build(args).loop
    compiled, n_graphs = [], loop.runner.n_graphs
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
    assert loop.runner.n_graphs == n_graphs
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


class RecordingRunner:
    pools = ()
    draft_models = ()
    n_graphs = 0

    graph_tokens = MAX_GRAPH_TOKENS

    def __init__(self, kernels):
        self.kernels = kernels
        self.captured, self.compiled, self.eager = [], [], []

    def step_kinds(self):
        return [StepKind(MixedShape(16, 128, 32, True)), *map(StepKind, (1, 2, 4, 64, 80)), StepKind(64, cascade=True)]

    def capture(self, kind):
        self.captured.append(kind)

    def run_padding(self, kind):
        self.compiled.append(kind)

    def wait(self):
        pass

    def run_eager_padding(self, chunks):
        self.eager.append((len(chunks), self.kernels.long_plans))


def plans(error):
    yield True
    if error is not None:
        raise error
    yield True


def preparation_of(compile_error=None, plan_error=None, attentions=()):
    kernels = SimpleNamespace(warm_up=lambda attentions, pools: plans(plan_error), long_plans=True)
    blocks = {"attentions": attentions, "feed_forwards": ()}
    model = SimpleNamespace(kernels=kernels, distinct_layers=nullcontext, kv_groups=(), **blocks)
    runner = RecordingRunner(kernels)
    if compile_error is not None:
        runner.run_padding = raiser(compile_error)
    return StepPreparation(model, runner, Limits(8192, 100, (0,), 80, 8192)), runner


def test_kernels_of_every_size_are_compiled_for_a_model_of_latents():
    preparation, runner = preparation_of(attentions=(object.__new__(LatentAttention),))
    runner.graph_tokens = 256
    runner.run_eager_padding = lambda chunks: runner.eager.append(sum(n for _, n in chunks))
    preparation.begin()
    preparation.finish()
    assert {512, 1024, 2048, 4096, 8192} <= set(runner.eager)
    assert 64 * 16 in runner.eager
    assert any(n % 2 for n in runner.eager), "libraries do not multiply every number of rows"


def raiser(error):
    def fail(*args):
        raise error

    return fail


def test_essential_steps_come_before_requests_and_the_others_when_idle():
    preparation, runner = preparation_of()
    kinds = runner.step_kinds()
    preparation.begin()
    compiled = [(64, False), *[(1, False)] * 2, *[(1, True)] * 2]
    assert runner.eager == compiled
    preparation.finish()
    assert runner.eager == [*compiled, (64, False)], "the last one is not only compiled"
    essential = [kind for kind in kinds if not kind.cascade and kind.shape not in (2, 4)]
    assert runner.captured == essential
    assert set(runner.compiled) == set(kinds), "no kernel is left to compile"
    assert not runner.kernels.long_plans, "cuDNN has no plans yet"
    n_idle = 0
    while preparation.next():
        n_idle += 1
        assert not runner.kernels.long_plans
    assert n_idle == len(kinds) - len(essential) + 2
    assert set(runner.captured) == set(kinds)
    assert runner.kernels.long_plans


def test_steps_that_verify_drafts_are_timed_when_idle():
    told = []
    made, runner = preparation_of()
    preparation = StepPreparation(made._model, runner, Limits(8192, 100, (0,), 80, 8192), timed=told.append)
    runner.time_padding = lambda kind: None if kind.shape == (4, 36) else 0.004
    while preparation.next():
        pass
    (step_s,) = told
    assert {(1, 1), (1, 5), (16, 16), (16, 80)} <= set(step_s)
    assert (4, 36) not in step_s


def test_a_kernel_that_cannot_be_compiled_does_not_prevent_the_start(caplog):
    preparation, runner = preparation_of(ValueError("no such tile"))
    preparation.begin()
    preparation.finish()
    assert "no such tile" in caplog.text
    assert len(runner.captured) == 4
    preparation, _ = preparation_of(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceLost):
        preparation.begin()


def test_attention_that_cannot_be_planned_does_not_end_the_engine(caplog):
    preparation, runner = preparation_of(plan_error=RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    while preparation.next():
        pass
    assert "Tried to allocate 2 GiB" in caplog.text
    assert len(runner.captured) == 3, "the steps that are not essential"
    assert not runner.kernels.long_plans, "Triton's kernel goes on"
    preparation, _ = preparation_of(plan_error=RuntimeError("CUDA error: an illegal memory access was encountered"))
    for _ in range(4):
        assert preparation.next()
    with pytest.raises(DeviceLost):
        preparation.next()


def test_kernels_are_compiled_without_being_launched(monkeypatch):
    ran = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: ran.append(warmup))
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    before = triton.JITFunction.run
    with compiling_only():
        triton.JITFunction.run(SimpleNamespace(device_caches=[None]), grid=(1,), warmup=False)
        assert is_compiling()
    assert ran == [True]
    assert not is_compiling()
    assert triton.JITFunction.run is before
