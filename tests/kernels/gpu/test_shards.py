"""Divided models on the Triton backend against the reference backend on one rank."""

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.collectives import Collectives, ParallelGroups
from emberline.kernels.gpu.backend import triton_backend
from emberline.kernels.gpu.backend.triton_backend import TritonBackend
from emberline.kernels.gpu.backend.workspace import WorkspaceSizes
from emberline.kernels.gpu.mla import prefill as mla_prefill
from emberline.kernels.gpu.mla.prefill import attend_expanded
from emberline.kernels.gpu.mla.shares import LatentShares, gathered_elements
from emberline.kernels.reference import TorchBackend, rotate
from emberline.models.decoder import Architecture, Decoder
from emberline.models.deepseek import deepseek
from emberline.models.shard import Shard
from emberline.protocol.parallel_layout import Layout, Position
from emberline.weights.model_config import ModelConfig
from standins.thread_collectives import run_ranks, thread_groups
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, everyday
from tests.kernels.gpu.mla.layers import latent_batch, latent_layer, mla_reference, new_tokens, rotary
from tests.kernels.gpu.test_fa3_attention import plain_attention
from tests.kernels.gpu.test_triton_backend import (
    DEEPSEEK,
    EXPERTS,
    MODELS,
    PROMPTS,
    TABLES,
    assert_close,
    pools,
    run,
    to_device,
)
from tests.models.step_inputs import step
from tests.weights.test_rank_checkpoint import checkpoint


class InTurns:
    """Collectives that let another rank compute while they wait: the interpreter runs one kernel at a time."""

    def __init__(self, group: Collectives, turn: threading.Lock) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._turn = group, turn

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._turn.release()
            try:
                return getattr(self._group, name)(*args)
            finally:
                self._turn.acquire()

        return call


def in_turns(layout: Layout, compute: Any) -> list[Any]:
    turn = threading.Lock()

    def rank(groups: ParallelGroups) -> Any:
        with turn:
            return compute(ParallelGroups(*(InTurns(group, turn) for group in groups)))

    return run_ranks(thread_groups(layout.tp, layout.pp, layout.dcp), rank)


def divided(config: ModelConfig, architecture: Architecture, layout: Layout, groups: ParallelGroups) -> Decoder:
    shard = Shard.of(config, layout, Position(groups.pp.rank, groups.tp.rank), groups)
    backend = TritonBackend(DEVICE, DTYPE, groups=groups)
    model = Decoder(shard.checkpoint(checkpoint(config)), backend, architecture, shard)
    backend.reserve(WorkspaceSizes.of(model, 80, 8, 80, item=DTYPE.itemsize))
    return model


def short_run(model: Decoder) -> list[Tensor]:
    """Two prompts, then both decode."""
    kv, groups = pools(model, 25), len(model.kv_groups)
    first = step([(PROMPTS[0][:10], 0), ([9, 4], 0)], TABLES[:2], groups, [9, 11])
    second = step([([7], 10), ([8], 2)], TABLES[:2], groups)
    return [model.forward(to_device(inputs), kv).clone() for inputs in (first, second)]


ONE_LAYER = msgspec.structs.replace(DEEPSEEK, n_layers=1, moe=msgspec.structs.replace(EXPERTS, layers=(0,)))
EVERYDAY = ("one layer", Layout(tp=2, ep=True, dcp=2))
CASES = [
    EVERYDAY, ("deepseek", Layout(tp=4, dcp=4, ep=True)), ("deepseek with direct queries", Layout(tp=2, pp=2)),
    ("gemma", Layout(tp=2)), ("llama4", Layout(tp=2)), ("gpt-oss", Layout(tp=2, ep=True)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), everyday(CASES, [EVERYDAY]))
def test_a_divided_model_computes_the_same(name: str, layout: Layout) -> None:
    config, architecture = (ONE_LAYER, deepseek) if name == "one layer" else MODELS[name]
    config = msgspec.structs.replace(config, qk_norm=name == "gemma")
    compute = short_run if (name, layout) == EVERYDAY else run
    want = compute(Decoder(checkpoint(config), TorchBackend(DEVICE, DTYPE), architecture))
    found = in_turns(layout, lambda groups: compute(divided(config, architecture, layout, groups)))
    for got in found[-layout.tp :]:  # of the last stage
        assert_close(got, want)


@pytest.mark.slow
def test_long_chunks_gather_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    config, architecture = MODELS["deepseek"]
    library = SimpleNamespace(has_plans=False, forward=plain_attention, supports_expanded=lambda *dims: True)
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(triton_backend, "long_attention", lambda: library)
    monkeypatch.setattr(mla_prefill, "MIN_TOKENS", 4)
    layout = Layout(tp=2, dcp=2)
    want = run(Decoder(checkpoint(config), TorchBackend(DEVICE, DTYPE), architecture))
    for got in in_turns(layout, lambda groups: run(divided(config, architecture, layout, groups), shaped=True)):
        assert_close(got, want)


@pytest.mark.parametrize("ranks", everyday([2, 8], [2]))
def test_a_chunk_attends_to_the_latents_of_all_ranks(ranks: int) -> None:
    """The chunk and its context, in segments of the memory, both begin within a block."""
    attn, n, context, layout = latent_layer(3), 21, 58, Layout(tp=ranks, dcp=ranks)
    whole = latent_batch([n], [context], attn)
    q, kv = new_tokens(whole, attn)
    want = mla_reference(q, kv, attn, whole)  # writes the cache

    def rank(groups: ParallelGroups) -> Tensor:
        shares, queries = LatentShares(groups.dcp), q.clone()
        pool = whole.pool[:, 1, :, :, slice(*shares.own.span)].contiguous()
        rotated = rotate(queries.view(n, 3, -1)[..., attn.nope_dim :], *rotary(whole, attn))
        queries.view(n, 3, -1)[..., attn.nope_dim :] = rotated
        width = attn.kv_lora + attn.rope_dim
        per_token = attn.kv_lora + 3 * (attn.nope_dim + attn.rope_dim + attn.v_dim)
        memory = torch.full((32 * per_token + gathered_elements(32, width, ranks),), torch.nan, device=DEVICE)
        out = torch.empty(n, 3, attn.v_dim, device=DEVICE, dtype=q.dtype)
        library: Any = SimpleNamespace(forward=plain_attention)
        attend_expanded(
            queries.view(n, 3, -1), attn, library, pool, whole.tables[0], context, memory.to(q.dtype), out, shares
        )
        return out.flatten(1)

    for got in in_turns(layout, rank):
        assert error(got, want) < LIMIT
