# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call"
"""Attention of long chunks through cuDNN, half again as fast as ours: on contiguous keys and values.

A chunk sees itself under a causal mask and its context without one, two calls merged by their log-sum-exp. The
context's blocks are gathered first, which costs a hundredth of what reading them by block would.
cuDNN plans each shape for some 50 ms; with `AVOID_RECOMPILE` torch asks it for powers of two only.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import Attention
from emberline.kernels.gpu.launch import INTERPRETED, power_of_two
from emberline.protocol.layout import BLOCK_TOKENS

MIN_TOKENS = 1024  # of a chunk: shorter ones are ours
SEGMENT = 16_384  # tokens of context gathered at once
DIMS = (64, 128)

os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")  # read at cuDNN's first attention


def serves(at: Attention, n: int) -> bool:
    return not INTERPRETED and at.window is None and at.head_dim in DIMS and n >= MIN_TOKENS


@triton.jit(do_not_specialize=["first"])
def _gather(pool, table, k_out, v_out, first, tokens, kv_heads, block_stride, DIM: tl.constexpr, PAD: tl.constexpr):
    """One block: tokens first + 16 * program .. of the table, [kv_heads, 16, DIM] to [16, kv_heads, DIM]."""
    t = tl.arange(0, 16)[:, None]
    d = tl.arange(0, PAD)[None, :]
    start = tl.program_id(0) * 16
    block = tl.load(table + first // 16 + tl.program_id(0)).to(tl.int64)
    ok = (start + t < tokens) & (d < DIM)
    head = tl.program_id(1)
    source = pool + block * block_stride + head * (16 * DIM) + t * DIM + d
    to = ((start + t).to(tl.int64) * kv_heads + head) * DIM + d
    tl.store(k_out + to, tl.load(source, mask=ok, other=0.0), mask=ok)
    tl.store(v_out + to, tl.load(source + kv_heads * (16 * DIM), mask=ok, other=0.0), mask=ok)


def gather(pool: Tensor, table: Tensor, first: int, tokens: int, k_out: Tensor, v_out: Tensor) -> None:
    """Tokens first .. first + tokens - 1 of one row, `first` at a block's start: to [tokens, kv_heads, dim] each."""
    _, _, kv_heads, _, dim = pool.shape
    grid = (-(-tokens // BLOCK_TOKENS), kv_heads)
    _gather[grid](
        pool, table, k_out, v_out, first, tokens, kv_heads, pool.stride(0), DIM=dim, PAD=power_of_two(dim), num_warps=4
    )


@triton.jit
def _join(
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


def join(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Two attentions of the same queries over different keys become one, in place.

    out, more: [tokens, heads, dim], contiguous; sums: natural log-sum-exp [tokens, heads], any strides.
    """
    tokens, heads, dim = out.shape
    _join[(tokens,)](
        out, more, sums, more_sums, heads, *sums.stride(), *more_sums.stride(),
        DIM=dim, PAD=power_of_two(dim), HEADS=power_of_two(heads), num_warps=4,
    )  # fmt: skip


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q: [n, heads, dim], k, v: [m, kv_heads, dim], contiguous. Returns out as q, and log-sum-exp [n, heads]."""
    batch = (t.unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    results: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *batch, None, True, 0.0, causal, False, scale=scale
    )
    return results[0].transpose(1, 2).squeeze(0), results[1].view(results[1].shape[1:3]).T


def attend(
    q: Tensor, own: tuple[Tensor, Tensor], at: Attention, pool: Tensor, table: Tensor, context: int,
    space: tuple[Tensor, Tensor], out: Tensor,
) -> None:  # fmt: skip
    """One chunk. q, out: [n, heads * dim]; own: its k and v, [n, kv_heads * dim]; context: its length, chunk included.

    table: int32 [blocks] of its row; space: room for SEGMENT tokens' k and v.
    """
    n, shape = len(q), (-1, at.kv_heads, at.head_dim)
    queries = q.view(n, at.heads, at.head_dim)
    result, sums = _cudnn(queries, own[0].view(shape), own[1].view(shape), at.scale, True)
    result = result.contiguous()
    before = context - n
    for first in range(0, before, SEGMENT):
        tokens = min(SEGMENT, before - first)
        k, v = (t[: tokens * at.kv_heads * at.head_dim].view(shape) for t in space)
        gather(pool, table, first, tokens, k, v)
        more, more_sums = _cudnn(queries, k, v, at.scale, False)
        join(result, sums, more.contiguous(), more_sums)
    out.copy_(result.view(n, -1))
