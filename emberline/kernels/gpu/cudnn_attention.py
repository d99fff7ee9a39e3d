# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Attention of long chunks through cuDNN, half again as fast as ours: on gathered keys and values.

A chunk sees itself under a causal mask and its context without one, calls merged by their log-sum-exp.

cuDNN plans each shape for some 50 ms, once. With `AVOID_RECOMPILE` torch rounds lengths up to powers of two, so that
there are few plans, but only where keys lie token by token; the plans for exact lengths are a fifth faster. So round
lengths are gathered head by head, which gets them exact plans, and all others token by token.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import Attention
from emberline.kernels.gpu.launch import INTERPRETED, launch_options, next_power_of_two
from emberline.protocol.block_hash import BLOCK_TOKENS

MIN_TOKENS = 2048  # of a chunk: shorter ones are ours
SEGMENT_TOKENS = 8192  # tokens of context gathered at once
ROUND_CHUNK, ROUND_CONTEXT = 2048, 4096  # multiples of these have plans of their own
HEAD_DIMS = (64, 128)

os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")  # read at cuDNN's first attention


def supports(at: Attention, n: int) -> bool:
    return not INTERPRETED and at.window is None and at.head_dim in HEAD_DIMS and n >= MIN_TOKENS


@triton.jit(do_not_specialize=["first"])
def _gather_kv(
    pool, table, k_out, v_out, first, tokens, kv_heads, block_stride, to_token, to_head,
    DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One block's tokens of one head, 16 * program tokens behind `first`."""
    t = tl.arange(0, 16)[:, None]
    d = tl.arange(0, PAD)[None, :]
    start = tl.program_id(0) * 16
    block = tl.load(table + first // 16 + tl.program_id(0)).to(tl.int64)
    ok = (start + t < tokens) & (d < DIM)
    head = tl.program_id(1)
    source = pool + block * block_stride + head * (16 * DIM) + t * DIM + d
    to = (start + t).to(tl.int64) * to_token + head * to_head + d
    tl.store(k_out + to, tl.load(source, mask=ok, other=0.0), mask=ok)
    tl.store(v_out + to, tl.load(source + kv_heads * (16 * DIM), mask=ok, other=0.0), mask=ok)


def gather_kv(pool: Tensor, table: Tensor, first: int, tokens: int, k_out: Tensor, v_out: Tensor) -> None:
    """Tokens first .. first + tokens - 1 of one row, `first` at a block's start: to [tokens, kv_heads, dim]."""
    _, _, kv_heads, _, dim = pool.shape
    grid = (-(-tokens // BLOCK_TOKENS), kv_heads)
    _gather_kv[grid](
        pool, table, k_out, v_out, first, tokens, kv_heads, pool.stride(0), *k_out.stride()[:2],
        DIM=dim, PAD=next_power_of_two(dim), **launch_options(False, num_warps=4),
    )  # fmt: skip


@triton.jit
def _merge_by_lse(
    out, more, sums, more_sums, heads, sum_token, sum_head, more_token, more_head,
    DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, PAD)[None, :]
    real = h < heads
    a = tl.load(sums + token * sum_token + h * sum_head, mask=real, other=0.0)
    b = tl.load(more_sums + token * more_token + h * more_head, mask=real, other=0.0)
    top = tl.maximum(a, b)
    wa, wb = tl.exp(a - top), tl.exp(b - top)
    at = (token * heads + h)[:, None] * DIM + d
    ok = real[:, None] & (d < DIM)
    x = tl.load(out + at, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(more + at, mask=ok, other=0.0).to(tl.float32)
    both = (x * wa[:, None] + y * wb[:, None]) / (wa + wb)[:, None]
    tl.store(out + at, both.to(out.dtype.element_ty), mask=ok)
    tl.store(sums + token * sum_token + h * sum_head, top + tl.log(wa + wb), mask=real)


def merge_by_lse(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Two attentions of the same queries over different keys become one, in place.

    out, more: [tokens, heads, dim], contiguous; sums: natural log-sum-exp [tokens, heads], any strides.
    """
    tokens, heads, dim = out.shape
    assert out.is_contiguous()
    assert more.is_contiguous()
    _merge_by_lse[(tokens,)](
        out, more, sums, more_sums, heads, *sums.stride(), *more_sums.stride(),
        DIM=dim, PAD=next_power_of_two(dim), HEADS=next_power_of_two(heads),
        **launch_options(False, num_warps=4),
    )  # fmt: skip


def kv_view(space: Tensor, tokens: int, at: Attention, exact: bool) -> Tensor:
    """The beginning of `space` as [tokens, kv_heads, dim]: head by head in memory for exact plans, else token by token.

    With a single KV head the two are the same, and there are no exact plans.
    """
    flat = space.view(-1)[: tokens * at.kv_heads * at.head_dim]
    if exact:
        return flat.view(at.kv_heads, tokens, at.head_dim).transpose(0, 1)
    return flat.view(tokens, at.kv_heads, at.head_dim)


def has_exact_plan(n: int) -> bool:
    return n % ROUND_CHUNK == 0


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q: [n, heads, dim], k, v: [m, kv_heads, dim]. Returns out as q, and log-sum-exp [n, heads]."""
    batch = (t.unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    results: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *batch, None, True, 0.0, causal, False, scale=scale
    )
    return results[0].transpose(1, 2).squeeze(0), results[1].squeeze(0).squeeze(-1).T


def warm_up(
    q: Tensor, own: Tensor, at: Attention, pool: Tensor, space: tuple[Tensor, Tensor], out: Tensor
) -> Iterator[bool]:
    """Attend what most prompts will, of nobody's: plans are made and kernels compiled, one at a time.

    q, out: [n, heads * dim] of the longest chunk; own: room for its k and v.
    """
    table = torch.zeros(SEGMENT_TOKENS // BLOCK_TOKENS, dtype=torch.int32, device=q.device)
    sizes = [size for size in (2048, 4096, 8192) if size <= len(q)]
    cases = [(size - BLOCK_TOKENS, context) for size in sizes for context in (0, *sizes)]
    if has_exact_plan(len(q)):  # a long prompt is cut into chunks of this length
        cases += [(len(q), context) for context in range(0, SEGMENT_TOKENS + 1, len(q))]
    for n, context in cases:
        keys, values = (kv_view(half, n, at, has_exact_plan(n)) for half in own)
        attend(q[:n], (keys, values), at, pool, table, n + context, space, out[:n])
        yield True


def attend_without_context(q: Tensor, own: tuple[Tensor, Tensor], at: Attention) -> Tensor:
    """A chunk that begins its sequence; as `attend`, where cuDNN leaves it."""
    result, _ = _cudnn(q.view(len(q), at.heads, at.head_dim), *own, at.scale, True)
    return result.reshape(len(q), -1)


def attend(
    q: Tensor, own: tuple[Tensor, Tensor], at: Attention, pool: Tensor, table: Tensor, context: int,
    space: tuple[Tensor, Tensor], out: Tensor,
) -> None:  # fmt: skip
    """One chunk. q, out: [n, heads * dim]; own: its k and v, [n, kv_heads, dim]; context: its length, chunk included.

    table: int32 [blocks] of its row; space: room for SEGMENT tokens' k and v.
    """
    n = len(q)
    queries, merged = q.view(n, at.heads, at.head_dim), out.view(n, at.heads, at.head_dim)
    result, sums = _cudnn(queries, *own, at.scale, True)
    merged.copy_(result)
    del result  # cuDNN's results are as large as the queries: never have two of them
    for first, tokens, exact in _segments(context - n, has_exact_plan(n)):
        k, v = (kv_view(t, tokens, at, exact) for t in space)
        gather_kv(pool, table, first, tokens, k, v)
        more, more_sums = _cudnn(queries, k, v, at.scale, False)
        merge_by_lse(merged, sums, more.contiguous(), more_sums)
        del more


def _segments(context: int, round_chunk: bool) -> Iterator[tuple[int, int, bool]]:
    """(first, tokens, whether a plan for this very length is worth its time): round lengths first."""
    first = 0
    while first < context:
        tokens = min(SEGMENT_TOKENS, context - first)
        exact = round_chunk and tokens >= ROUND_CONTEXT
        tokens = tokens // ROUND_CONTEXT * ROUND_CONTEXT if exact else tokens
        yield first, tokens, exact
        first += tokens
