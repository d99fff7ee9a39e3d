"""An EAGLE-3 head on the backends against its plain form, token by token and in chunks."""

import subprocess
import sys

import pytest
import torch

from emberline.engine.runners.cpu.torch_runner import allocate_pool
from emberline.engine.training.eagle_training import chain_attention
from emberline.kernels.backend import Backend
from emberline.kernels.cpu.native_backend import NativeBackend
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.draft_head import DraftHead
from emberline.models.eagle3 import Eagle3Config, Eagle3Head
from emberline.models.llama import llama
from emberline.weights.model_config import ModelConfig
from tests.models.random_checkpoint import RandomCheckpoint

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=64,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    mlp_size=96,
    context_len=256,
    norm_eps=1e-5,
    rope_theta=1e4,
)


def model_on(backend: Backend) -> Decoder:
    return Decoder(RandomCheckpoint(CONFIG, bits=8), backend, llama)


def random_head(seed: int = 0) -> Eagle3Head:
    torch.manual_seed(seed)
    return Eagle3Head(Eagle3Config.of(CONFIG, 32))


def step_of(ids: torch.Tensor, start: int, n_blocks: int = 4) -> StepInputs:
    n = len(ids)
    ints = torch.int32
    return StepInputs(
        token_ids=ids.to(ints),
        positions=torch.arange(start, start + n, dtype=ints),
        query_starts=torch.tensor([0, n], dtype=ints),
        context_lens=torch.tensor([start + n], dtype=ints),
        block_tables=[torch.arange(1, 1 + n_blocks, dtype=ints)[None]],
        sample_tokens=torch.empty(0, dtype=torch.int64),
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("backend", "bound"), [(TorchBackend, 1e-5), (NativeBackend, 0.03)])
def test_as_the_plain_head(backend: type[Backend], bound: float) -> None:
    model, head = model_on(backend()), random_head()
    drafting = DraftHead(head, model)
    pool = allocate_pool(drafting.kv_group, 5, torch.device("cpu"))
    torch.manual_seed(1)
    ids, taps = torch.randint(CONFIG.vocab_size, (40,)), torch.randn(40, 3 * CONFIG.hidden_size)
    hidden = head.combine(taps[None])
    embedding = TorchBackend().load_matrix([RandomCheckpoint(CONFIG, bits=8).weight("token_embd.weight")]).weight
    q, k, v = head.layer.attention_inputs(embedding[ids][None], hidden, torch.arange(40))
    want = head.layer.finish(chain_attention(q, [k], [v]), hidden)[0]
    combined = drafting.combine([part.contiguous() for part in taps.chunk(3, dim=-1)])
    assert error(combined, hidden[0]) < bound
    parts = [
        drafting.extend(step_of(ids[a:b], a), combined[a:b], pool) for a, b in ((0, 20), (20, 33), (33, 34), (34, 40))
    ]
    assert error(torch.cat(parts), want) < bound
    assert error(drafting.logits(parts[-1]), head.logits(want[34:])) < 2 * bound


@pytest.mark.parametrize("backend", [TorchBackend, NativeBackend])
def test_taps_are_what_enters_the_layers(backend: type[Backend]) -> None:
    model = model_on(backend())
    pools = [allocate_pool(group, 5, torch.device("cpu")) for group in model.kv_groups]
    ids = torch.arange(20)
    hidden, taps = model.tapped(step_of(ids, 0), pools, (0, 2, 3))
    embedded = taps[0]
    rows = TorchBackend().load_matrix([RandomCheckpoint(CONFIG, bits=8).weight("token_embd.weight")]).weight
    assert error(embedded, rows[ids]) < 1e-2
    pools = [allocate_pool(group, 5, torch.device("cpu")) for group in model.kv_groups]
    assert torch.equal(hidden, model.hidden(step_of(ids, 0), pools))
    model.layers = model.layers[:2]
    pools = [allocate_pool(group, 5, torch.device("cpu")) for group in model.kv_groups]
    half = model._run_layers(step_of(ids, 0), pools)
    assert error(taps[1], half) < 1e-6


def test_an_engine_without_a_head_needs_no_safetensors() -> None:
    modules = "emberline.engine.runners.cpu.torch_runner, emberline.engine.worker.build"
    code = f"import sys; sys.modules['safetensors'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
