"""Attention of long prefill chunks through cuDNN, 1.5 times as fast as the Triton kernel, on gathered keys and values.

A chunk attends to itself under a causal mask and to its context, in segments, without one; the results are merged by
their log-sum-exp.

cuDNN takes some 50 ms to plan a shape, once. With `AVOID_RECOMPILE` torch rounds lengths up to powers of two, which
bounds the number of plans, but only if keys are stored token-major; plans for exact lengths are a fifth faster. So
round lengths are gathered head-major, which gets them exact plans, and all others token-major.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.gpu.gathered_kv import SEGMENT_TOKENS, apply_sinks, gather_kv, merge_by_lse
from emberline.kernels.gpu.launch import INTERPRETED, is_compiling
from emberline.protocol.block_hash import BLOCK_TOKENS

ROUND_CHUNK, ROUND_CONTEXT = 2048, 4096  # multiples of these get exact plans
HEAD_DIMS = (64, 128)
EXPANDED_DIMS = ((192, 128), (256, 256))  # of keys and values of MLA's heads; others were not tried

os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")  # read at the first cuDNN attention

name, has_plans = "cudnn", True


def supports(attn: GroupedQueryAttention) -> bool:
    return not INTERPRETED and attn.head_dim in HEAD_DIMS


def supports_expanded(q_dim: int, v_dim: int) -> bool:
    return not INTERPRETED and (q_dim, v_dim) in EXPANDED_DIMS


def new_kv(memory: Tensor, attn: GroupedQueryAttention, tokens: int, alone: bool) -> tuple[Tensor, Tensor]:
    """Return the memory to which k and v of a step's new tokens are copied. `alone` tells that they are one chunk."""
    exact = alone and has_exact_plan(tokens)
    halves = memory[: 2 * tokens * attn.kv_heads * attn.head_dim].chunk(2)
    return kv_view(halves[0], tokens, attn, exact), kv_view(halves[1], tokens, attn, exact)


def kv_view(memory: Tensor, tokens: int, attn: GroupedQueryAttention, exact: bool) -> Tensor:
    """The start of `memory` as [tokens, kv_heads, dim]: stored head-major for exact plans, else token-major.

    With a single KV head the two are the same, and there are no exact plans.
    """
    flat = memory.view(-1)[: tokens * attn.kv_heads * attn.head_dim]
    if exact:
        return flat.view(attn.kv_heads, tokens, attn.head_dim).transpose(0, 1)
    return flat.view(tokens, attn.kv_heads, attn.head_dim)


def has_exact_plan(n: int) -> bool:
    return n % ROUND_CHUNK == 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Implements `LongAttention.forward`."""
    if is_compiling():
        return q.new_empty(*q.shape[:2], v.shape[-1]), torch.empty(q.shape[1], len(q), device=q.device).T
    batch = (t.unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    results: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *batch, None, True, 0.0, causal, False, scale=scale
    )
    result, lse = results[0].transpose(1, 2).squeeze(0), results[1].squeeze(0).squeeze(-1).T
    return (result if out is None else out.copy_(result)), lse


def warm_up(q: Tensor, attn: GroupedQueryAttention, pool: Tensor, memory: Tensor, out: Tensor) -> Iterator[bool]:
    """Run the shapes of most prompts on dummy data, one per iteration, so that plans and kernels are ready.

    q, out: [n, heads * dim] of the longest chunk.
    """
    table = torch.zeros(SEGMENT_TOKENS // BLOCK_TOKENS, dtype=torch.int32, device=q.device)
    sizes = [size for size in (2048, 4096, 8192) if size <= len(q)]
    cases = [(size - BLOCK_TOKENS, context) for size in sizes for context in (0, *sizes)]
    if has_exact_plan(len(q)):  # long prompts are divided into chunks of this length
        cases += [(len(q), context) for context in range(0, SEGMENT_TOKENS + 1, len(q))]
    for n, context in cases:
        attend(q[:n], new_kv(memory, attn, n, True), attn, pool, table, n + context, memory, out[:n])
        yield True


def attend(
    q: Tensor, new_kv: tuple[Tensor, Tensor], attn: GroupedQueryAttention, pool: Tensor, table: Tensor, context: int,
    memory: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    """Implements `LongAttention.attend`."""
    n = len(q)
    queries, merged = q.view(n, attn.heads, attn.head_dim), out.view(n, attn.heads, attn.head_dim)
    result, lse = forward(queries, *new_kv, attn.scale, True)
    if context == n:
        merged = result.contiguous()
    else:
        merged.copy_(result)
    del result  # as large as the queries: never hold two of them
    gathered = memory[-2 * SEGMENT_TOKENS * attn.kv_heads * attn.head_dim :].chunk(2)
    for first, tokens, exact in _segments(context - n, has_exact_plan(n)):
        k, v = (kv_view(t, tokens, attn, exact) for t in gathered)
        gather_kv(pool, table, first, tokens, k, v)
        other, other_lse = forward(queries, k, v, attn.scale, False)
        merge_by_lse(merged, lse, other.contiguous(), other_lse)
        del other
    if attn.sinks is not None:
        apply_sinks(merged, lse, attn.sinks)
    return merged.view(n, -1)


def _segments(context: int, exact_chunk: bool) -> Iterator[tuple[int, int, bool]]:
    """(first, tokens, whether to use an exact plan) of the segments that cover a context; round lengths first."""
    first = 0
    while first < context:
        tokens = min(SEGMENT_TOKENS, context - first)
        exact = exact_chunk and tokens >= ROUND_CONTEXT
        tokens = tokens // ROUND_CONTEXT * ROUND_CONTEXT if exact else tokens
        yield first, tokens, exact
        first += tokens
