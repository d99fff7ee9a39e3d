"""Latent attention of a layer: its projections and kernels in the workspace's memory, and their plan for a step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import LatentAttention
from emberline.kernels.gpu.launch import cdiv
from emberline.kernels.gpu.matmul import Fusion, Matmul
from emberline.kernels.gpu.mla.attention import LatentTile, latent_attention, latent_tile, partial_floats, tile_tokens
from emberline.kernels.gpu.mla.projections import absorb_queries, project_values
from emberline.kernels.gpu.mla.splits import LatentSplits, plan_latent_splits
from emberline.kernels.gpu.workspace import LatentShape, Workspace


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """What the layers of a KV group share in a step."""

    splits: LatentSplits
    tile: LatentTile


def plan_latent(
    workspace: Workspace, group: int, shape: LatentShape, step: Any, decodes_only: bool, deterministic: bool
) -> LatentPlan:
    """deterministic: keys are not split, and every step has the same tiles."""
    n_tokens = 1 if decodes_only and not deterministic else tile_tokens(shape.heads)
    tile = latent_tile(n_tokens * shape.heads)
    head_tiles = cdiv(n_tokens * shape.heads, tile.queries)
    floats = partial_floats(head_tiles * tile.queries, shape.kv_lora)
    max_partials = 0 if deterministic else workspace.region("latent_partials").numel() // floats
    splits = plan_latent_splits(
        step.query_starts, step.context_lens, len(step.token_ids), head_tiles, n_tokens, tile.keys,
        tile.programs_per_sm, max_partials, workspace.region(f"latent_items{group}", torch.int32),
    )  # fmt: skip
    return LatentPlan(splits, tile)


def attend_latents(
    attn: LatentAttention, x: Tensor, workspace: Workspace, matmul: Matmul, plan: LatentPlan, step: Any,
    rotary: tuple[Tensor, Tensor], pool: Tensor, pdl: bool,
) -> Tensor:  # fmt: skip
    """The heads' outputs for the residual x: [tokens, heads * v_dim]. Writes the new tokens' rows of the cache."""
    tokens, latent = len(x), attn.kv_lora + attn.rope_dim
    projected = workspace.take("qkv", tokens, attn.qkv_a.shape[0])
    matmul(x, attn.qkv_a, projected, Fusion(attn.norm, attn.eps))
    q, kv = projected[:, :-latent], projected[:, -latent:]
    if attn.q_b is not None:
        queries = workspace.take("queries", tokens, attn.q_b.shape[0])
        matmul(q, attn.q_b, queries, Fusion(attn.q_norm, attn.eps))
        q = queries
    absorbed = workspace.take("absorbed", tokens, attn.heads, latent)
    rows = step.block_tables[attn.kv_group], step.query_starts, step.context_lens
    absorb_queries(q, kv, absorbed, attn, rotary, pool, *rows, step.positions, pdl=pdl)
    latents = workspace.take("latents", tokens, attn.heads, attn.kv_lora)
    scratch = workspace.region("latent_partials")
    latent_attention(absorbed, latents, attn.scale, pool, *rows, plan.splits, plan.tile, scratch, pdl=pdl)
    out = workspace.take("normed", tokens, attn.output_dim)
    project_values(latents, attn.v_up, out, pdl=pdl)
    return out
