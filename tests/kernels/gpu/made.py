"""Batches made up for kernel tests: rows with scattered blocks, and the cache they point into."""

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels.backend import Attention, Rope
from emberline.kernels.gpu.launch import INTERPRETED
from emberline.protocol.block_hash import BLOCK_TOKENS

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 1e-2  # relative error in the norm


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


def batch(queries: list[int], contexts: list[int], at: Attention, seed: int = 0, layers: int = 2) -> Batch:
    """Rows of so many new tokens, at the ends of contexts of these lengths; context 0 is padding."""
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
    pool = noise(n_blocks, layers, 2, at.kv_heads, BLOCK_TOKENS, at.head_dim, seed=seed + 1)
    pool[0] = torch.nan  # the null block: nobody may look at it
    to = dict(dtype=torch.int32, device=DEVICE)
    return Batch(starts.to(**to), torch.tensor(contexts, **to), positions.to(**to), tables.to(DEVICE), pool)


def attention(
    heads: int, kv_heads: int, dim: int, window: int | None = None, norm: bool = False, index: int = 1
) -> Attention:
    norms = [noise(dim, seed=9 + i).float() * 0.1 + 1 if norm else None for i in range(2)]
    return Attention(heads, kv_heads, dim, dim**-0.5, 1e-5, 0, index, window, *norms)


def rope(dim: int, scale: float = 1.0) -> Rope:
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    return Rope((10_000.0**-exponents).float().to(DEVICE), scale)
