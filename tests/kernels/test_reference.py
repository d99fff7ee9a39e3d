"""The blocks of the reference backend against formulas written another way."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from emberline.kernels.backend import (
    MLP,
    Attention,
    GroupedQueryAttention,
    LatentAttention,
    Layer,
    MoE,
    QueryTemperature,
    Rope,
)
from emberline.kernels.reference import TorchBackend, TorchMatrix, attend, rms_norm, rotate
from emberline.kernels.routing import Routing
from emberline.models.decoder import StepInputs
from emberline.protocol.block_hash import KVGroup

HIDDEN, TOKENS, EPS = 24, 21, 1e-6


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def matrix(*shape: int, seed: int = 0) -> TorchMatrix:
    return TorchMatrix(noise(*shape, seed=seed), None)


def rope(dim: int) -> Rope:
    return Rope((100.0 ** -(torch.arange(0, dim, 2) / dim)).float())


def run(layer: Layer, x: Tensor, *chunks: int) -> Tensor:
    """The residual of one sequence, computed in steps of so many tokens."""
    attn, backend, out = layer.attention, TorchBackend(), x.clone()
    group = KVGroup("full", (0,), dtype="float32", **attn.cache._asdict())
    kv = [torch.full((4, *group.block_shape), torch.nan)]
    start = 0
    for n in chunks:
        step = StepInputs(
            token_ids=torch.zeros(n, dtype=torch.int32),
            positions=torch.arange(start, start + n, dtype=torch.int32),
            query_starts=torch.tensor([0, n]),
            context_lens=torch.tensor([start + n]),
            block_tables=[torch.tensor([[2, 0, 3]])],
            sample_tokens=torch.zeros(0, dtype=torch.int64),
        )
        context = backend.begin_step(step, kv, (group,), [rope(attn.rotary_dim)])
        backend.run_layers([layer], out[start : start + n], context)
        start += n
    return out


def zero_mlp() -> MLP:
    zero = TorchMatrix(torch.zeros(2, HIDDEN), None), TorchMatrix(torch.zeros(HIDDEN, 1), None)
    return MLP(norm=torch.ones(HIDDEN), gate_up=zero[0], down=zero[1], eps=EPS, activation="silu")


def attention_alone(attn: Attention, x: Tensor, *chunks: int) -> Tensor:
    return run(Layer(replace(attn, kv_group=0, layer_index=0), zero_mlp()), x, *chunks) - x


def mla(q_lora: int | None) -> LatentAttention:
    heads, nope, rotary, v_dim, kv_lora = 3, 4, 6, 5, 7
    q_rows = heads * (nope + rotary)
    return LatentAttention(
        norm=torch.ones(HIDDEN),
        qkv_a=matrix((q_lora or q_rows) + kv_lora + rotary, HIDDEN),
        q_norm=None if q_lora is None else noise(q_lora, seed=1) + 1,
        q_b=None if q_lora is None else matrix(q_rows, q_lora, seed=2),
        kv_norm=noise(kv_lora, seed=3) + 1,
        k_up=noise(heads, nope, kv_lora, seed=4),
        v_up=noise(heads, v_dim, kv_lora, seed=5),
        output=matrix(HIDDEN, heads * v_dim, seed=6),
        heads=heads, q_lora=q_lora, kv_lora=kv_lora, nope_dim=nope, rope_dim=rotary, v_dim=v_dim,
        scale=0.3, eps=EPS,
    )  # fmt: skip


@pytest.mark.parametrize("q_lora", [None, 8])
def test_latent_attention_equals_attention_over_expanded_keys_and_values(q_lora: int | None) -> None:
    attn, x = mla(q_lora), noise(TOKENS, HIDDEN, seed=9)
    projected = rms_norm(x, attn.norm, EPS) @ attn.qkv_a.weight.T
    q, latent, key = projected.split([projected.shape[1] - 13, 7, 6], dim=1)
    if q_lora is not None:
        q = rms_norm(q, attn.q_norm, EPS) @ attn.q_b.weight.T
    angles = torch.outer(torch.arange(TOKENS).float(), rope(6).inverse_frequencies)
    latent = rms_norm(latent, attn.kv_norm, EPS)
    q_nope, q_rope = q.view(TOKENS, 3, 10).split([4, 6], dim=-1)
    q = torch.cat([q_nope, rotate(q_rope, angles.cos(), angles.sin())], dim=-1)
    shared = rotate(key[:, None], angles.cos(), angles.sin()).expand(-1, 3, -1)
    k = torch.cat([torch.einsum("tc,hnc->thn", latent, attn.k_up), shared], dim=-1)
    v = torch.einsum("tc,hvc->thv", latent, attn.v_up)
    want = attend(q, k, v, attn.scale, 0).flatten(1) @ attn.output.weight.T
    for chunks in ([TOKENS], [17, 1, 3]):
        torch.testing.assert_close(attention_alone(attn, x, *chunks), want, rtol=1e-4, atol=1e-5)


def gqa(**more: Any) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        norm=torch.ones(HIDDEN), qkv=matrix(8 * 4, HIDDEN), output=matrix(HIDDEN, 4 * 4, seed=6), heads=4, kv_heads=2,
        head_dim=4, scale=0.5, eps=EPS, **more,
    )  # fmt: skip


VARIANTS = {
    "plain": {},
    "window": {"window": 5},
    "chunk": {"chunk": 16},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "nope": {"rope": False, "temperature": QueryTemperature(0.5, 8)},
    "l2": {"l2_norm": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_grouped_query_attention_token_by_token(name: str) -> None:
    attn, x = gqa(**VARIANTS[name]), noise(TOKENS, HIDDEN, seed=9)
    q, k, v = (rms_norm(x, attn.norm, EPS) @ attn.qkv.weight.T).view(TOKENS, 8, 4).split([4, 2, 2], dim=1)
    if attn.rope:
        angles = torch.outer(torch.arange(TOKENS).float(), rope(4).inverse_frequencies)
        q, k = (rotate(t, angles.cos(), angles.sin()) for t in (q, k))
    if attn.l2_norm:
        q, k = (t / (t.pow(2).mean(-1, keepdim=True) + EPS).sqrt() for t in (q, k))
    want = torch.zeros(TOKENS, 4, 4)
    for t in range(TOKENS):
        first = max(0, t - 4) if attn.window else (t // 16 * 16 if attn.chunk else 0)
        heat = 1 + 0.5 * math.log(1 + (t + 1) // 8) if attn.temperature else 1.0
        for head in range(4):
            logits = heat * 0.5 * (k[first : t + 1, head // 2] @ q[t, head])
            powers = logits.exp()
            sink = attn.sinks[head].exp() if attn.sinks is not None else 0.0
            want[t, head] = (powers / (powers.sum() + sink)) @ v[first : t + 1, head // 2]
    got = attention_alone(attn, x, 17, 1, 3)
    torch.testing.assert_close(got, want.flatten(1) @ attn.output.weight.T, rtol=1e-4, atol=1e-5)


def moe(**more: Any) -> MoE:
    width, experts = 5, 8
    return MoE(
        norm=torch.ones(HIDDEN), router=noise(experts, HIDDEN, seed=1), gate_up=matrix(experts, 2 * width, HIDDEN),
        down=matrix(experts, HIDDEN, width, seed=2), eps=EPS, routing=Routing(2), activation="silu", **more,
    )  # fmt: skip


def expert_output(block: MoE, x: Tensor, expert: int) -> Tensor:
    gate, up = (x @ block.gate_up.weight[expert].T).chunk(2)
    return (torch.nn.functional.silu(gate) * up) @ block.down.weight[expert].T


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("row_by_row", [False, True])
def test_each_token_is_computed_by_its_experts(on_input: bool, row_by_row: bool) -> None:
    shared = MLP(norm=torch.ones(HIDDEN), gate_up=matrix(6, HIDDEN), down=matrix(HIDDEN, 3), eps=EPS, activation="silu")
    block, x = moe(shared=shared, weight_on_input=on_input), noise(TOKENS, HIDDEN, seed=9)
    normed = rms_norm(x, block.norm, EPS)
    want = x.clone()
    for token, row in enumerate(normed):
        best, experts = (row @ block.router.T).topk(2)
        for weight, expert in zip(best.softmax(0), experts.tolist(), strict=True):
            given = row * weight if on_input else row
            want[token] += expert_output(block, given, expert) * (1 if on_input else weight)
        gate, up = (row @ shared.gate_up.weight.T).chunk(2)
        want[token] += (torch.nn.functional.silu(gate) * up) @ shared.down.weight.T
    TorchBackend(row_by_row=row_by_row).moe(block, x)
    torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-5)
