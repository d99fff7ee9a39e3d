"""The GPU engine on the Triton backend, interpreted where there is no GPU, against the reference backend."""

import msgspec
import pytest
import torch

triton = pytest.importorskip("triton")

from emberline.engine.core.latency_target import LatencyTarget  # noqa: E402
from emberline.engine.core.limits import Limits  # noqa: E402
from emberline.engine.core.step_loop import StepLoop  # noqa: E402
from emberline.engine.runners.cpu.torch_runner import TorchRunner  # noqa: E402
from emberline.engine.runners.gpu.runner import GpuRunner  # noqa: E402
from emberline.engine.runners.gpu.shapes import (  # noqa: E402
    CHUNK_ROWS,
    GPU_SHAPES,
    MAX_GRAPH_TOKENS,
    max_draws,
    most_drafts,
)
from emberline.engine.worker.build import build_scheduler  # noqa: E402
from emberline.kernels.gpu import decode_inputs as inputs  # noqa: E402
from emberline.kernels.gpu.backend.triton_backend import TritonBackend  # noqa: E402
from emberline.kernels.gpu.backend.workspace import WorkspaceSizes  # noqa: E402
from emberline.kernels.gpu.sampler import sample_batch  # noqa: E402
from emberline.kernels.gpu.sampler_table import SamplerTable  # noqa: E402
from emberline.kernels.reference import TorchBackend  # noqa: E402
from emberline.kv.cache import KVCache  # noqa: E402
from emberline.models.decoder import Decoder  # noqa: E402
from emberline.models.deepseek import deepseek  # noqa: E402
from emberline.models.llama import llama  # noqa: E402
from emberline.weights.model_config import LatentConfig, ModelConfig, MoEConfig  # noqa: E402
from tests.engine.fakes import request  # noqa: E402
from tests.engine.runners.cpu.test_torch_runner import tokens  # noqa: E402
from tests.engine.runners.gpu.host_sampler import HostKernels, HostTable  # noqa: E402
from tests.engine.speculation.standin import StandinSpeculation, output_of  # noqa: E402
from tests.models.random_checkpoint import RandomCheckpoint  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=32,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    mlp_size=64,
    context_len=256,
    norm_eps=1e-5,
    rope_theta=10000.0,
)
DEEPSEEK = msgspec.structs.replace(
    CONFIG,
    n_kv_heads=4,
    head_dim=24,
    latent=LatentConfig(q_lora=16, kv_lora=32, nope=16, rope=8, v_dim=16),
    moe=MoEConfig(layers=(0,), experts=8, top_k=2, width=16, shared_width=16, scoring="sigmoid", correction_bias=True),
)
LIMITS = Limits(256, 97, (0,), 4, 48)


def generate(make_runner, model, steps_in_flight, speculation=None, prefill=None):
    cache = KVCache(model.kv_groups, [40], chunk=LIMITS.token_budget)
    scheduler = build_scheduler(cache, LIMITS, "x", speculation=speculation, prefill=prefill)
    loop = StepLoop(scheduler, make_runner(model), steps_in_flight)
    generator = torch.Generator().manual_seed(3)
    deltas = {}
    for n in range(2):  # the second is prefilled in two chunks, the last in a step that also decodes
        ids = torch.randint(1, 97, (7 + 50 * n,), generator=generator).tolist()
        loop.submit(request(f"r{n}", ids, max_tokens=4 if speculation is None else 12, temperature=0.0), 0.0)
        deltas[f"r{n}"] = []
    while loop.busy:
        for delta in loop.step(0.0):
            deltas[delta.id].append(delta)
    return {id: tokens(each) for id, each in deltas.items()}


@pytest.mark.slow  # the runner and the kernels have everyday tests of their own
@pytest.mark.parametrize(("config", "architecture"), [(CONFIG, llama), (DEEPSEEK, deepseek)])
def test_tokens_match_the_reference_backend(config, architecture):
    reference = Decoder(RandomCheckpoint(config, scale=0.2), TorchBackend(DEVICE, torch.float32), architecture)
    expected = generate(lambda model: TorchRunner(model, [40], LIMITS, DEVICE), reference, 1)
    model = Decoder(RandomCheckpoint(config, scale=0.2), TritonBackend(DEVICE, torch.float32), architecture)
    n_rows = LIMITS.max_running + CHUNK_ROWS
    model.kernels.reserve(WorkspaceSizes.of(model, MAX_GRAPH_TOKENS, n_rows, n_rows, item=4))

    def gpu_runner(model):
        return GpuRunner(model, [40], LIMITS, DEVICE, HostKernels(), HostTable(), graphs=DEVICE == "cpu")

    assert generate(gpu_runner, model, 2) == expected


class _Kernels:
    """The Triton kernels around a forward pass, too."""

    prepare = staticmethod(inputs.prepare)
    keep = staticmethod(inputs.keep)
    accept = staticmethod(inputs.accept)
    sample = staticmethod(sample_batch)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("config", "architecture"), [(CONFIG, llama), (DEEPSEEK, deepseek)])
def test_tokens_are_the_same_with_drafts(config, architecture, deterministic):
    reference = Decoder(RandomCheckpoint(config, scale=0.2), TorchBackend(DEVICE, torch.float32), architecture)
    silent = StandinSpeculation(lambda seq: [])
    expected = generate(lambda model: TorchRunner(model, [40], LIMITS, DEVICE), reference, 1, silent)
    backend = TritonBackend(DEVICE, torch.float32, deterministic=deterministic)
    model = Decoder(RandomCheckpoint(config, scale=0.2), backend, architecture)
    n_rows, n_draws = LIMITS.max_running + CHUNK_ROWS, max_draws(4)
    model.kernels.reserve(WorkspaceSizes.of(model, MAX_GRAPH_TOKENS, n_rows, n_draws, item=4, verify_rows=4))
    table = SamplerTable(4, 97, DEVICE, max_rows=n_draws)
    speculation = StandinSpeculation(lambda seq: expected[seq.id][len(output_of(seq)) :], 5, 97)
    policy = LatencyTarget(GPU_SHAPES, most_drafts=lambda rows: most_drafts(rows, 4))

    def gpu_runner(model):
        return GpuRunner(model, [40], LIMITS, DEVICE, _Kernels(), table, graphs=DEVICE == "cpu", speculates=True)

    assert generate(gpu_runner, model, 2, speculation, policy) == expected
    assert speculation.n_accepted > 4
