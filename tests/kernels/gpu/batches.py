"""Random batches for kernel tests: rows with scattered blocks, the KV cache they point into, and references."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention, Rope
from emberline.kernels.gpu.launch import INTERPRETED
from emberline.kernels.reference import attend
from emberline.protocol.block_hash import BLOCK_TOKENS

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 1e-2  # relative error in the norm


def everyday(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Parameters of a sweep: the cases to `keep` run every day, the others are marked slow."""
    cases = list(cases)
    assert all(case in cases for case in keep)
    return [
        case if case in keep else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def error(got: Tensor, want: Tensor) -> float:
    assert torch.isfinite(got).all()
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)).item()


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, DTYPE)


@dataclass
class Batch:
    query_starts: Tensor
    context_lens: Tensor
    positions: Tensor
    tables: Tensor
    pool: Tensor  # [blocks, layers, 2, kv_heads, BLOCK_TOKENS, head_dim]

    @property
    def tokens(self) -> int:
        return len(self.positions)


def batch(
    queries: list[int], contexts: list[int], attn: GroupedQueryAttention, seed: int = 0, layers: int = 2
) -> Batch:
    """Rows of `queries` new tokens at the ends of contexts of these lengths; context 0 is padding."""
    width = max(1, max(-(-c // BLOCK_TOKENS) for c in contexts)) + 1
    n_blocks = 1 + sum(-(-c // BLOCK_TOKENS) for c in contexts)
    order = (torch.randperm(n_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    tables = torch.zeros(len(contexts), width, dtype=torch.int32)
    for row, context in enumerate(contexts):
        n = -(-context // BLOCK_TOKENS)
        tables[row, :n] = torch.tensor(order[:n], dtype=torch.int32)
        order = order[n:]
    starts = torch.tensor([0, *queries]).cumsum(0)
    positions = torch.cat([torch.arange(max(c - q, 0), max(c, q)) for q, c in zip(queries, contexts, strict=True)])
    pool = noise(n_blocks, layers, 2, attn.kv_heads, BLOCK_TOKENS, attn.head_dim, seed=seed + 1)
    pool[0] = torch.nan  # the null block must never be read
    to = dict(dtype=torch.int32, device=DEVICE)
    return Batch(starts.to(**to), torch.tensor(contexts, **to), positions.to(**to), tables.to(DEVICE), pool)


def attention(
    heads: int, kv_heads: int, dim: int, window: int | None = None, norm: bool = False, index: int = 1, **more: Any
) -> GroupedQueryAttention:
    norms = [noise(dim, seed=9 + i).float() * 0.1 + 1 if norm else None for i in range(2)]
    return GroupedQueryAttention(
        norm=torch.ones(1), qkv=None, output=None, heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5,
        eps=1e-5, kv_group=0, layer_index=index, window=window, q_norm=norms[0], k_norm=norms[1], **more,
    )  # fmt: skip


def rope(dim: int, scale: float = 1.0) -> Rope:
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    return Rope((10_000.0**-exponents).float().to(DEVICE), scale)


def keys_values(b: Batch, row: int, context: int) -> tuple[Tensor, Tensor]:
    """K and V of a row's first `context` tokens in layer 1: [context, kv_heads, head_dim]."""
    blocks = b.pool[b.tables[row, : -(-context // BLOCK_TOKENS)].long(), 1]
    keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context]
    return keys, values


def attention_reference(q: Tensor, attn: GroupedQueryAttention, b: Batch, last_visible: Tensor | None = None) -> Tensor:
    """Attention of rotated queries [tokens, heads * dim] over the cache of layer 1; padding rows are zero.
    last_visible: how far each query sees, where that is not its own position."""
    out = torch.zeros_like(q).view(b.tokens, attn.heads, attn.head_dim)
    starts = b.query_starts.tolist()
    for row, context in enumerate(b.context_lens.tolist()):
        n = starts[row + 1] - starts[row]
        if n and context:
            new = slice(starts[row], starts[row + 1])
            queries = q[new].view(n, attn.heads, attn.head_dim)
            local = (attn.window, attn.chunk, attn.sinks)
            ahead = None if last_visible is None else last_visible[new]
            out[new] = attend(queries, *keys_values(b, row, context), attn.scale, context - n, *local, ahead)
    return out.flatten(1)
