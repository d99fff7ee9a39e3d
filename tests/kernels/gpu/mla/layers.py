"""A small MLA block, batches for it, and plain attention over the cache."""

import torch
from torch import Tensor

from emberline.kernels.backend import LatentAttention
from emberline.kernels.gpu.rope import rotary_table_reference
from emberline.kernels.reference import rms_norm, rotate
from emberline.protocol.block_hash import BLOCK_TOKENS
from tests.kernels.gpu.batches import Batch, attention, batch, noise, rope


def latent_layer(
    heads: int, kv_lora: int = 32, nope: int = 24, rope_dim: int = 16, v_dim: int = 24, index: int = 1
) -> LatentAttention:
    up = noise(heads, nope + v_dim, kv_lora, seed=21, scale=kv_lora**-0.5)
    return LatentAttention(
        norm=noise(8).float(), qkv_a=None, q_norm=None, q_b=None, kv_norm=noise(kv_lora, seed=22).float() * 0.1 + 1,
        k_up=up[:, :nope], v_up=up[:, nope:], output=None, heads=heads, q_lora=None, kv_lora=kv_lora, nope_dim=nope,
        rope_dim=rope_dim, v_dim=v_dim, scale=(nope + rope_dim) ** -0.5, eps=1e-6, kv_group=0, layer_index=index,
    )  # fmt: skip


def latent_batch(queries: list[int], contexts: list[int], attn: LatentAttention, seed: int = 0) -> Batch:
    b = batch(queries, contexts, attention(1, 1, attn.kv_lora + attn.rope_dim), seed)
    b.pool = b.pool[:, :, :1].contiguous()  # one plane
    return b


def new_tokens(b: Batch, attn: LatentAttention, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Queries [tokens, heads * (nope + rope)] and latents with their keys [tokens, latent + rope], both unprocessed."""
    q = noise(b.tokens, attn.heads * (attn.nope_dim + attn.rope_dim), seed=seed)
    return q, noise(b.tokens, attn.kv_lora + attn.rope_dim, seed=seed + 1)


def rotary(b: Batch, attn: LatentAttention) -> tuple[Tensor, Tensor]:
    return rotary_table_reference(b.positions, rope(attn.rope_dim))


def cache_reference(kv: Tensor, attn: LatentAttention, b: Batch) -> None:
    """Writes the new tokens of rows with a context."""
    latent = rms_norm(kv[:, : attn.kv_lora], attn.kv_norm, attn.eps)
    key = rotate(kv[:, None, attn.kv_lora :], *rotary(b, attn))[:, 0]
    rows = torch.cat([latent, key], 1).to(b.pool.dtype)
    starts = b.query_starts.tolist()
    for row, context in enumerate(b.context_lens.tolist()):
        if context:
            new = slice(starts[row], starts[row + 1])
            at = b.positions[new].long()
            b.pool[b.tables[row, at // BLOCK_TOKENS].long(), attn.layer_index, 0, 0, at % BLOCK_TOKENS] = rows[new]


def mla_reference(q: Tensor, kv: Tensor, attn: LatentAttention, b: Batch) -> Tensor:
    """Expanded attention in float32; writes the cache. Returns [tokens, heads * v_dim], zero for padding rows."""
    cache_reference(kv, attn, b)
    queries = q.view(b.tokens, attn.heads, -1)
    q_nope, q_rope = queries[..., : attn.nope_dim], rotate(queries[..., attn.nope_dim :], *rotary(b, attn))
    out = torch.zeros(b.tokens, attn.heads, attn.v_dim, device=q.device)
    starts = b.query_starts.tolist()
    for row, context in enumerate(b.context_lens.tolist()):
        n = starts[row + 1] - starts[row]
        if not n or not context:
            continue
        new = slice(starts[row], starts[row + 1])
        rows = cached_rows(b, row, context, attn).float()
        latents, keys = rows[:, : attn.kv_lora], rows[:, attn.kv_lora :]
        k = torch.einsum("tl,hdl->thd", latents, attn.k_up.float())
        v = torch.einsum("tl,hdl->thd", latents, attn.v_up.float())
        scores = torch.einsum("qhd,khd->hqk", q_nope[new].float(), k)
        scores = (scores + torch.einsum("qhd,kd->hqk", q_rope[new].float(), keys)) * attn.scale
        hidden = (
            torch.arange(context, device=q.device)[None] > torch.arange(context - n, context, device=q.device)[:, None]
        )
        out[new] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return out.flatten(1).to(q.dtype)


def cached_rows(b: Batch, row: int, context: int, attn: LatentAttention) -> Tensor:
    """[context, latent + rope]"""
    blocks = b.pool[b.tables[row, : -(-context // BLOCK_TOKENS)].long(), attn.layer_index, 0, 0]
    return blocks.flatten(0, 1)[:context]
