"""Attention of long prefill chunks through FlashAttention-3, on gathered keys and values, where its wheel is installed.

The wheel is `fa3-fwd` (the extra `emberline[fa3]`): BF16 forward kernels for compute capability 9.0. It plans nothing,
writes where it is told to, and aligns the causal mask to the last key: a chunk and the context before it are one call
as long as they fit the memory for gathered keys.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.gpu.gathered_kv import apply_sinks, gather_kv, merge_by_lse
from emberline.kernels.gpu.launch import INTERPRETED, is_compiling
from emberline.protocol.block_hash import BLOCK_TOKENS

HEAD_DIMS = (64, 96, 128, 192, 256)

name, has_plans = "fa3", False


def is_available() -> bool:
    """True if the wheel is installed, fits this torch and has kernels for this device."""
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        importlib.import_module("fa3_fwd._C")  # registers torch.ops.fa3_fwd
    except (ImportError, OSError):
        return False
    return True


def supports(attn: GroupedQueryAttention) -> bool:
    return attn.head_dim in HEAD_DIMS


def supports_expanded(q_dim: int, v_dim: int) -> bool:
    return (q_dim, v_dim) == (192, 128) or (q_dim == v_dim and q_dim in HEAD_DIMS)


def new_kv(memory: Tensor, attn: GroupedQueryAttention, tokens: int, alone: bool) -> tuple[Tensor, Tensor] | None:
    """The ends of both halves of the memory, where the context before a lone chunk can be gathered in front of it.

    Several chunks are gathered from the cache, each with its context.
    """
    if not alone:
        return None
    k, v = _halves(memory, attn)
    return k[len(k) - tokens :], v[len(v) - tokens :]


def _halves(memory: Tensor, attn: GroupedQueryAttention) -> tuple[Tensor, Tensor]:
    """Return the memory of k and v: [tokens, kv_heads, dim] each, of whole blocks."""
    width = attn.kv_heads * attn.head_dim
    tokens = memory.numel() // (2 * width) // BLOCK_TOKENS * BLOCK_TOKENS
    k, v = memory[: 2 * tokens * width].view(2, tokens, attn.kv_heads, attn.head_dim)
    return k, v


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, out: Tensor | None = None) -> tuple[Any, Any]:
    """Implements `LongAttention.forward`. A causal mask is aligned to the last key."""
    if is_compiling():
        result = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
        return result, torch.empty(q.shape[1], len(q), device=q.device).T
    none = [None] * 16  # new keys, sequence lengths, pages, rotation and FP8 scales
    results = torch.ops.fa3_fwd.fwd(
        q[None], k[None], v[None], None, None, None, None if out is None else out[None], *none, scale, causal, -1, -1,
        0, 0.0, False, None, 1, None, 0,
    )  # fmt: skip
    return results[0][0], results[1][0].T


def warm_up(q: Tensor, attn: GroupedQueryAttention, pool: Tensor, memory: Tensor, out: Tensor) -> Iterator[bool]:
    """Load the library's kernels; arguments as of `cudnn_attention.warm_up`."""
    table = torch.zeros(1, dtype=torch.int32, device=q.device)
    attend(q[:1], None, attn, pool, table, 1, memory, out[:1])
    yield True


def attend(
    q: Tensor, new_kv: tuple[Tensor, Tensor] | None, attn: GroupedQueryAttention, pool: Tensor, table: Tensor,
    context: int, memory: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    """Implements `LongAttention.attend`."""
    n = len(q)
    queries, merged = q.view(n, attn.heads, attn.head_dim), out.view(n, attn.heads, attn.head_dim)
    k, v = _halves(memory, attn)
    capacity = len(k)
    first = -(-max(0, context - capacity) // BLOCK_TOKENS) * BLOCK_TOKENS
    assert first <= context - n, "the memory for gathered keys holds the longest chunk"
    near = slice(capacity - (context - first), capacity)  # the chunk, and as much before it as there is room for
    gathered = context - first - (n if new_kv is not None else 0)
    if gathered:
        gather_kv(pool, table, first, gathered, k[near][:gathered], v[near][:gathered])
    _, lse = forward(queries, k[near], v[near], attn.scale, True, merged)
    for begin in range(0, first, capacity):
        tokens = min(capacity, first - begin)
        gather_kv(pool, table, begin, tokens, k[:tokens], v[:tokens])
        other, other_lse = forward(queries, k[:tokens], v[:tokens], attn.scale, False)
        merge_by_lse(merged, lse, other, other_lse)
        del other
    if attn.sinks is not None:
        apply_sinks(merged, lse, attn.sinks)
    return out
