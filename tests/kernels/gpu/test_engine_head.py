"""A draft head in the GPU engine, interpreted where there is no GPU: tokens as without it, drafts as on a CPU."""

import msgspec
import pytest
import torch

triton = pytest.importorskip("triton")

from emberline.engine.core.latency_target import LatencyTarget  # noqa: E402
from emberline.engine.core.limits import Limits  # noqa: E402
from emberline.engine.core.step_loop import StepLoop  # noqa: E402
from emberline.engine.runners.cpu.torch_runner import TorchRunner  # noqa: E402
from emberline.engine.runners.gpu.engine import _Kernels  # noqa: E402
from emberline.engine.runners.gpu.runner import GpuRunner  # noqa: E402
from emberline.engine.runners.gpu.shapes import (  # noqa: E402
    CHUNK_ROWS,
    GPU_SHAPES,
    MAX_GRAPH_TOKENS,
    max_draws,
    most_drafts,
)
from emberline.engine.speculation.head_drafter import HeadDrafter  # noqa: E402
from emberline.engine.worker.build import build_scheduler  # noqa: E402
from emberline.kernels.gpu.backend.triton_backend import TritonBackend  # noqa: E402
from emberline.kernels.gpu.backend.workspace import WorkspaceSizes  # noqa: E402
from emberline.kernels.gpu.sampler_table import SamplerTable  # noqa: E402
from emberline.kernels.reference import TorchBackend  # noqa: E402
from emberline.kv.cache import KVCache  # noqa: E402
from emberline.models.decoder import Decoder  # noqa: E402
from emberline.models.draft_head import DraftHead, GpuDraftHead  # noqa: E402
from emberline.models.eagle3 import Eagle3Config, Eagle3Head  # noqa: E402
from emberline.models.llama import llama  # noqa: E402
from emberline.weights.model_config import LatentConfig  # noqa: E402
from tests.engine.fakes import request  # noqa: E402
from tests.engine.runners.cpu.test_head_runner import EagerSpeculator  # noqa: E402
from tests.engine.runners.cpu.test_torch_runner import tokens  # noqa: E402
from tests.kernels.gpu.test_engine import CONFIG, DEVICE  # noqa: E402
from tests.models.random_checkpoint import RandomCheckpoint  # noqa: E402

TARGET = msgspec.structs.replace(CONFIG, n_layers=2)
LIMITS = Limits(256, 97, (0,), 2, 48)


class Watched(EagerSpeculator):
    """Notes what was drafted behind which tokens."""

    def __init__(self, on_device):
        super().__init__([HeadDrafter()], 0.0, on_device=on_device)
        self.seen, self.proposed, self.n_drafts, self.n_drafts_accepted = {}, {}, 0, 0

    def verified(self, seq, n_drafted, n_accepted):
        self.n_drafts += n_drafted
        self.n_drafts_accepted += n_accepted
        super().verified(seq, n_drafted, n_accepted)

    def leave(self, seq):
        super().leave(seq)
        for at, ids in self.proposed.pop(seq.number, {}).items():
            self.seen[seq.id, at] = ids

    def take_drafts(self, plan, sampled, drafts):
        """Tokens are the same in all engines: a position says behind which of them something was drafted."""
        super().take_drafts(plan, sampled, drafts)
        for seq in (self.core.sequence_of(row) for row in plan.rows if row.samples):
            if seq is not None:
                at, ids = self.drafters[0].proposal(seq.number)
                self.proposed.setdefault(seq.number, {})[at] = ids


LATENT = LatentConfig(q_lora=32, kv_lora=64, nope=32, rope=16, v_dim=32)
VARIANTS = {
    "as trained here": {},
    "two layers": {"n_layers": 2},
    "MLA": {"latent": LATENT},
    "3.1": {"latent": LATENT, "n_layers": 2, "fc_norm": True, "norm_output": True, "own_embedding": True},
}


def head_of(variant):
    torch.manual_seed(2)
    head = Eagle3Head(msgspec.structs.replace(Eagle3Config.of(TARGET, 30), taps=(0, 1, 2), **variant))
    head.d2t.copy_(torch.arange(30) * 2)  # ids 0, 3, 6 …
    if head.config.own_embedding:
        torch.nn.init.normal_(head.embedding)
    return head


def generate(runner, groups, prefill, steps_in_flight, temperature):
    cache = KVCache(groups, [40] * len(groups), chunk=LIMITS.token_budget)
    speculation = Watched(steps_in_flight > 1) if len(groups) > 1 else None
    scheduler = build_scheduler(cache, LIMITS, "x", speculation=speculation, prefill=prefill)
    loop = StepLoop(scheduler, runner, steps_in_flight)
    generator = torch.Generator().manual_seed(3)
    deltas = {}
    for n in range(2):  # the second is prefilled in two chunks, the last in a step that also decodes
        ids = torch.randint(1, 97, (7 + 45 * n,), generator=generator).tolist()
        loop.submit(request(f"r{n}", ids, max_tokens=10, temperature=temperature, seed=n), 0.0)
        deltas[f"r{n}"] = []
    while loop.busy:
        for delta in loop.step(0.0):
            deltas[delta.id].append(delta)
    return {id: tokens(each) for id, each in deltas.items()}, speculation


def gpu_engine(deterministic=False, head=None):
    model = Decoder(
        RandomCheckpoint(TARGET, scale=0.2), TritonBackend(DEVICE, torch.float32, deterministic=deterministic), llama
    )
    drafting = None if head is None else GpuDraftHead(head, model)
    n_rows, n_draws = LIMITS.max_running + CHUNK_ROWS, max_draws(2)
    layer = None if drafting is None else drafting.layer
    sizes = WorkspaceSizes.of(model, MAX_GRAPH_TOKENS, n_rows, n_draws, item=4, verify_rows=2, head=layer)
    model.kernels.reserve(sizes)
    table = SamplerTable(2, 97, DEVICE, max_rows=n_draws)
    groups = model.kv_groups if drafting is None else (*model.kv_groups, drafting.kv_group)
    blocks = [40] * len(groups)
    runner = GpuRunner(
        model, blocks, LIMITS, DEVICE, _Kernels(), table, graphs=False, speculates=head is not None, head=drafting
    )
    policy = LatencyTarget(GPU_SHAPES, most_drafts=lambda rows: most_drafts(rows, 2))
    return runner, groups, policy


@pytest.mark.slow  # the runner and the kernels have everyday tests of their own
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_without_a_head_and_drafts_those_of_the_cpu(variant):
    temperature = 0.7
    model = Decoder(RandomCheckpoint(TARGET, scale=0.2), TorchBackend(DEVICE, torch.float32), llama)
    plain, _ = generate(TorchRunner(model, [40], LIMITS, DEVICE), model.kv_groups, None, 1, temperature)
    head = head_of(VARIANTS[variant])
    drafting = DraftHead(head, model)
    groups = (*model.kv_groups, drafting.kv_group)
    runner = TorchRunner(model, [40, 40], LIMITS, DEVICE, head=drafting)
    on_cpu, of_cpu = generate(runner, groups, None, 1, temperature)
    assert on_cpu == plain
    found, of_gpu = generate(*gpu_engine(head=head), 2, temperature)
    assert found == plain
    assert of_gpu.n_drafts > 8
    common = of_cpu.seen.keys() & of_gpu.seen.keys()
    assert len(common) > 2
    assert all(of_cpu.seen[key] == of_gpu.seen[key] for key in common)
