# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
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
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.gpu.launch import INTERPRETED, is_compiling, launch_options, next_power_of_two
from emberline.protocol.block_hash import BLOCK_TOKENS

MIN_TOKENS = 2048  # of a chunk; shorter ones use Triton
SEGMENT_TOKENS = 8192  # of context, gathered at once
ROUND_CHUNK, ROUND_CONTEXT = 2048, 4096  # multiples of these get exact plans
HEAD_DIMS = (64, 128)

os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")  # read at the first cuDNN attention


def supports(attn: GroupedQueryAttention, n_tokens: int) -> bool:
    is_full = attn.window is None and attn.chunk is None
    return not INTERPRETED and is_full and attn.head_dim in HEAD_DIMS and n_tokens >= MIN_TOKENS


@triton.jit(do_not_specialize=["first", "tokens"])
def _gather_kv(
    pool, table, k_out, v_out, first, tokens, kv_heads, block_stride, token_stride, head_stride,
    DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Copies one block of one head: the tokens from first + 16 * program on."""
    t = tl.arange(0, 16)[:, None]
    d = tl.arange(0, PAD)[None, :]
    start = tl.program_id(0) * 16
    block = tl.load(table + first // 16 + tl.program_id(0)).to(tl.int64)
    mask = (start + t < tokens) & (d < DIM)
    head = tl.program_id(1)
    source = pool + block * block_stride + head * (16 * DIM) + t * DIM + d
    out_offsets = (start + t).to(tl.int64) * token_stride + head * head_stride + d
    tl.store(k_out + out_offsets, tl.load(source, mask=mask, other=0.0), mask=mask)
    tl.store(v_out + out_offsets, tl.load(source + kv_heads * (16 * DIM), mask=mask, other=0.0), mask=mask)


def gather_kv(pool: Tensor, table: Tensor, first: int, tokens: int, k_out: Tensor, v_out: Tensor) -> None:
    """Copy tokens first .. first + tokens - 1 of one row to [tokens, kv_heads, dim]; `first` is a block's start."""
    _, _, kv_heads, _, dim = pool.shape
    grid = (-(-tokens // BLOCK_TOKENS), kv_heads)
    _gather_kv[grid](
        pool, table, k_out, v_out, first, tokens, kv_heads, pool.stride(0), *k_out.stride()[:2],
        DIM=dim, PAD=next_power_of_two(dim), **launch_options(False, num_warps=4),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["lse_token_stride", "lse_head_stride", "other_token_stride", "other_head_stride"]
)  # some are the chunk's length
def _merge_by_lse(
    out, other, lse, other_lse, heads, lse_token_stride, lse_head_stride, other_token_stride, other_head_stride,
    DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, PAD)[None, :]
    head_mask = h < heads
    a = tl.load(lse + token * lse_token_stride + h * lse_head_stride, mask=head_mask, other=0.0)
    b = tl.load(other_lse + token * other_token_stride + h * other_head_stride, mask=head_mask, other=0.0)
    max_lse = tl.maximum(a, b)
    weight_a, weight_b = tl.exp(a - max_lse), tl.exp(b - max_lse)
    offsets = (token * heads + h)[:, None] * DIM + d
    mask = head_mask[:, None] & (d < DIM)
    x = tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(other + offsets, mask=mask, other=0.0).to(tl.float32)
    merged = (x * weight_a[:, None] + y * weight_b[:, None]) / (weight_a + weight_b)[:, None]
    tl.store(out + offsets, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(
        lse + token * lse_token_stride + h * lse_head_stride, max_lse + tl.log(weight_a + weight_b), mask=head_mask
    )


def merge_by_lse(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge `other` into `out`: attention of the same queries over different keys.

    out, other: [tokens, heads, dim], contiguous; lse: natural log-sum-exp [tokens, heads], any strides.
    """
    tokens, heads, dim = out.shape
    assert out.is_contiguous()
    assert other.is_contiguous()
    _merge_by_lse[(tokens,)](
        out, other, lse, other_lse, heads, *lse.stride(), *other_lse.stride(),
        DIM=dim, PAD=next_power_of_two(dim), HEADS=next_power_of_two(heads),
        **launch_options(False, num_warps=4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["lse_token_stride", "lse_head_stride"])
def _apply_sinks(
    out, lse, sinks, heads, lse_token_stride, lse_head_stride, DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS), tl.arange(0, PAD)[None, :]
    head_mask = h < heads
    x = tl.load(lse + token * lse_token_stride + h * lse_head_stride, mask=head_mask, other=0.0)
    share = 1.0 / (1.0 + tl.exp(tl.load(sinks + h, mask=head_mask, other=0.0) - x))
    ptrs, mask = out + (token * heads + h)[:, None] * DIM + d, head_mask[:, None] & (d < DIM)
    values = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptrs, (values * share[:, None]).to(out.dtype.element_ty), mask=mask)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add each head's sink, a logit, to the denominator of finished attention. Tensors as in `merge_by_lse`."""
    tokens, heads, dim = out.shape
    assert out.is_contiguous()
    _apply_sinks[(tokens,)](
        out, lse, sinks, heads, *lse.stride(), DIM=dim, PAD=next_power_of_two(dim), HEADS=next_power_of_two(heads),
        **launch_options(False, num_warps=4),
    )  # fmt: skip


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


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q: [n, heads, dim], k, v: [m, kv_heads, dim]. Returns out [n, heads, dim] and log-sum-exp [n, heads]."""
    if is_compiling():
        return torch.empty_like(q), torch.empty(q.shape[1], len(q), device=q.device).T
    batch = (t.unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    results: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *batch, None, True, 0.0, causal, False, scale=scale
    )
    return results[0].transpose(1, 2).squeeze(0), results[1].squeeze(0).squeeze(-1).T


def warm_up(
    q: Tensor,
    kv_memory: Tensor,
    attn: GroupedQueryAttention,
    pool: Tensor,
    gather_memory: tuple[Tensor, Tensor],
    out: Tensor,
) -> Iterator[bool]:
    """Run the shapes of most prompts on dummy data, one per iteration, so that plans and kernels are ready.

    q, out: [n, heads * dim] of the longest chunk; kv_memory: for its k and v.
    """
    table = torch.zeros(SEGMENT_TOKENS // BLOCK_TOKENS, dtype=torch.int32, device=q.device)
    sizes = [size for size in (2048, 4096, 8192) if size <= len(q)]
    cases = [(size - BLOCK_TOKENS, context) for size in sizes for context in (0, *sizes)]
    if has_exact_plan(len(q)):  # long prompts are divided into chunks of this length
        cases += [(len(q), context) for context in range(0, SEGMENT_TOKENS + 1, len(q))]
    for n, context in cases:
        keys, values = (kv_view(half, n, attn, has_exact_plan(n)) for half in kv_memory)
        attend(q[:n], (keys, values), attn, pool, table, n + context, gather_memory, out[:n])
        yield True


def attend_without_context(q: Tensor, new_kv: tuple[Tensor, Tensor], attn: GroupedQueryAttention) -> Tensor:
    """As `attend`, for a chunk at the start of its sequence; returns cuDNN's own output, which saves a copy."""
    result, lse = _cudnn(q.view(len(q), attn.heads, attn.head_dim), *new_kv, attn.scale, True)
    result = result.contiguous()
    if attn.sinks is not None:
        apply_sinks(result, lse, attn.sinks)
    return result.reshape(len(q), -1)


def attend(
    q: Tensor, new_kv: tuple[Tensor, Tensor], attn: GroupedQueryAttention, pool: Tensor, table: Tensor, context: int,
    gather_memory: tuple[Tensor, Tensor], out: Tensor,
) -> None:  # fmt: skip
    """Attention of one chunk. q, out: [n, heads * dim]; new_kv: its k and v, [n, kv_heads, dim].

    context: length with the chunk included; table: int32 [blocks] of its row; gather_memory: for SEGMENT_TOKENS tokens
    of k and v.
    """
    n = len(q)
    queries, merged = q.view(n, attn.heads, attn.head_dim), out.view(n, attn.heads, attn.head_dim)
    result, lse = _cudnn(queries, *new_kv, attn.scale, True)
    merged.copy_(result)
    del result  # as large as the queries: never hold two of them
    for first, tokens, exact in _segments(context - n, has_exact_plan(n)):
        k, v = (kv_view(t, tokens, attn, exact) for t in gather_memory)
        gather_kv(pool, table, first, tokens, k, v)
        other, other_lse = _cudnn(queries, k, v, attn.scale, False)
        merge_by_lse(merged, lse, other.contiguous(), other_lse)
        del other
    if attn.sinks is not None:
        apply_sinks(merged, lse, attn.sinks)


def _segments(context: int, exact_chunk: bool) -> Iterator[tuple[int, int, bool]]:
    """(first, tokens, whether to use an exact plan) of the segments that cover a context; round lengths first."""
    first = 0
    while first < context:
        tokens = min(SEGMENT_TOKENS, context - first)
        exact = exact_chunk and tokens >= ROUND_CONTEXT
        tokens = tokens // ROUND_CONTEXT * ROUND_CONTEXT if exact else tokens
        yield first, tokens, exact
        first += tokens
