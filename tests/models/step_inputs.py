"""Step inputs as a runner would build them, for tests of kernels and models."""

import torch
from torch import Tensor

from emberline.models.decoder import Decoder, StepInputs
from emberline.protocol.block_hash import BLOCK_TOKENS


def pools(model: Decoder, n_blocks: int) -> list[Tensor]:
    return [torch.zeros(n_blocks, *g.block_shape, dtype=getattr(torch, g.dtype)) for g in model.kv_groups]


def step(
    rows: list[tuple[list[int], int]], tables: Tensor, n_groups: int, samples: list[int] | None = None
) -> StepInputs:
    """Rows of (new token ids, number of cached tokens); every KV group has the same block table."""
    lengths = [len(ids) for ids, _ in rows]
    starts = [sum(lengths[:i]) for i in range(len(rows) + 1)]
    positions = [past + i for ids, past in rows for i in range(len(ids))]
    return StepInputs(
        token_ids=torch.tensor([i for ids, _ in rows for i in ids], dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([past + len(ids) for ids, past in rows], dtype=torch.int32),
        block_tables=[tables.to(torch.int32).contiguous()] * n_groups,
        sample_tokens=torch.tensor(range(starts[-1]) if samples is None else samples, dtype=torch.int64),
    )


def all_logits(model: Decoder, ids: list[int]) -> Tensor:
    """Logits of every position of one sequence, computed in one step over shuffled blocks."""
    n = -(-len(ids) // BLOCK_TOKENS) + 2
    table = torch.randperm(n, generator=torch.Generator().manual_seed(len(ids)))[None]
    return model.forward(step([(ids, 0)], table, len(model.kv_groups)), pools(model, n))
