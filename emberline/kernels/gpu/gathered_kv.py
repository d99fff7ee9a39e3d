# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Support for attention libraries without a paged cache: gathers keys from the cache, and merges results.

Attention over a context in several parts is merged by their log-sum-exp (LSE); attention sinks are added the same way.
"""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import launch_options, next_power_of_two
from emberline.protocol.block_hash import BLOCK_TOKENS

SEGMENT_TOKENS = 8192  # of context that are gathered at once, beside the new tokens


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
