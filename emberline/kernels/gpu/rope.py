# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""RoPE: cos/sin tables, and QK norm, rotation and KV cache write of prefill tokens in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention, Rope
from emberline.kernels.gpu.launch import launch_options, next_power_of_two, pdl_launch_early, pdl_wait
from emberline.kernels.reference import rms_norm, rotate
from emberline.protocol.block_hash import BLOCK_TOKENS


@triton.jit
def _rotary_table(
    positions, frequencies, axes, cosine, sine, half, axis_stride, scale, BLOCK: tl.constexpr, AXES: tl.constexpr
):
    token = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < half
    if AXES:
        axis = tl.load(axes + i, mask=mask, other=0)
        position = tl.load(positions + axis * axis_stride + token, mask=mask, other=0).to(tl.float32)
    else:
        position = tl.load(positions + token).to(tl.float32)
    angle = position * tl.load(frequencies + i, mask=mask, other=0.0)
    tl.store(cosine + token * half + i, tl.cos(angle) * scale, mask=mask)
    tl.store(sine + token * half + i, tl.sin(angle) * scale, mask=mask)


def rotary_table(positions: Tensor, rope: Rope, out: Tensor) -> tuple[Tensor, Tensor]:
    """cosine, sine: float32 [tokens, head_dim / 2], in the memory `out`. positions: [tokens], or under M-RoPE
    [3, tokens]."""
    tokens, half, by_axis = positions.shape[-1], rope.inverse_frequencies.shape[0], positions.dim() == 2
    cosine = out[: tokens * half].view(tokens, half)
    sine = out[tokens * half : 2 * tokens * half].view(tokens, half)
    if tokens:
        _rotary_table[(tokens,)](
            positions, rope.inverse_frequencies, rope.axes if by_axis else positions, cosine, sine, half,
            positions.stride(0), rope.scale, BLOCK=next_power_of_two(half), AXES=int(by_axis),
        )  # fmt: skip
    return cosine, sine


def rotary_table_reference(positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    angles = rope.by_frequency(positions.float()) * rope.inverse_frequencies
    return angles.cos() * rope.scale, angles.sin() * rope.scale


# What is done to q and k, in this order: a weighted norm, RoPE, a norm without weights; to q, the temperature.
NORM, ROPE, L2_NORM, TEMPERATURE = 1, 2, 4, 8


def query_key_ops(attn: GroupedQueryAttention) -> int:
    """Return the query and key operations of an attention block, as a sum of flags."""
    temperature = TEMPERATURE if attn.temperature is not None else 0
    return (NORM if attn.q_norm is not None else 0) | ROPE * attn.rope | L2_NORM * attn.l2_norm | temperature


def temperature_args(attn: GroupedQueryAttention) -> tuple[float, int]:
    return (0.0, 1) if attn.temperature is None else (attn.temperature.scale, attn.temperature.interval)


@triton.jit
def scale_queries(q, position, temperature, interval, OPS: tl.constexpr):
    """Queries times the temperature of their positions, which broadcast to them."""
    if OPS & 8:
        factor = 1.0 + temperature * tl.log(1.0 + ((position + 1) // interval).to(tl.float32))
        q = (q.to(tl.float32) * factor).to(q.dtype)
    return q


@triton.jit
def norm_and_rotate(
    head_ptrs, weight, cosine, sine, head_mask, d, eps, DIM: tl.constexpr, OPS: tl.constexpr
):  # fmt: skip
    """The heads at `head_ptrs` [heads, 1], normed and rotated: [heads, padded dim] of the same dtype.

    Dimension i is paired with i ± DIM / 2; each is loaded twice instead of being exchanged between threads. cosine,
    sine: of the one position, or [heads, 1] pointers to those of each.
    """
    HALF: tl.constexpr = DIM // 2
    dtype = head_ptrs.dtype.element_ty
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    mask = head_mask & (d < DIM)[None, :]
    x = tl.load(head_ptrs + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if OPS & 1:
        inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = (x * inverse_rms * tl.load(weight + d, mask=d < DIM, other=0.0)[None, :]).to(dtype).to(tl.float32)
    if OPS & 2:
        y = tl.load(head_ptrs + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if OPS & 1:
            y = (y * inverse_rms * tl.load(weight + partner, mask=d < DIM, other=0.0)[None, :]).to(dtype).to(tl.float32)
        cos = tl.load(cosine + (d % HALF)[None, :], mask=(d < DIM)[None, :], other=0.0)
        sin = tl.load(sine + (d % HALF)[None, :], mask=(d < DIM)[None, :], other=0.0)
        x = x * cos + y * tl.where((d < HALF)[None, :], -sin, sin)
    if OPS & 4:
        x = x.to(dtype).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    return x.to(dtype)


@triton.jit(do_not_specialize=["first_token", "first_row", "n_rows"])
def _rope_and_cache(
    qkv, q_out, k_out, v_out, cosine, sine, q_weight, k_weight, pool, tables, query_starts, positions,
    first_token, first_row, n_rows, heads, kv_heads, eps, temperature, interval, block_stride, table_stride,
    copy_token_stride, copy_head_stride, DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr, OPS: tl.constexpr,
    COPY: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    token = first_token + tl.program_id(0)
    d = tl.arange(0, PAD)
    pdl_wait(PDL)
    row = first_row - 1  # the token's row, found by counting the row starts at or before it
    for start in range(0, n_rows, ROWS):
        r = start + tl.arange(0, ROWS)
        row_starts = tl.load(query_starts + first_row + r, mask=r < n_rows, other=2147483647)
        row += tl.sum((row_starts <= token).to(tl.int32))
    if row >= first_row:  # else a decode row
        position = tl.load(positions + token)
        block = tl.load(tables + row.to(tl.int64) * table_stride + position // 16).to(tl.int64)
        width = (heads + 2 * kv_heads) * DIM
        base = qkv + token.to(tl.int64) * width
        cos, sin = cosine + token * (DIM // 2), sine + token * (DIM // 2)
        for start in range(0, heads, HEADS):
            h = start + tl.arange(0, HEADS)[:, None]
            q = norm_and_rotate(base + h * DIM, q_weight, cos, sin, h < heads, d, eps, DIM, OPS)
            q = scale_queries(q, position, temperature, interval, OPS)
            q_ptrs = q_out + token.to(tl.int64) * heads * DIM + h * DIM
            tl.store(q_ptrs + d[None, :], q, mask=(h < heads) & (d < DIM)[None, :])
        slot = pool + block * block_stride + (position % 16) * DIM
        for start in range(0, kv_heads, HEADS):
            h = start + tl.arange(0, HEADS)[:, None]
            mask = (h < kv_heads) & (d < DIM)[None, :]
            k = norm_and_rotate(base + (heads + h) * DIM, k_weight, cos, sin, h < kv_heads, d, eps, DIM, OPS)
            v = tl.load(base + (heads + kv_heads + h) * DIM + d[None, :], mask=mask, other=0.0)
            tl.store(slot + h * (16 * DIM) + d[None, :], k.to(pool.dtype.element_ty), mask=mask)
            tl.store(slot + (kv_heads + h) * (16 * DIM) + d[None, :], v.to(pool.dtype.element_ty), mask=mask)
            if COPY:
                copy_offsets = (
                    (token - first_token).to(tl.int64) * copy_token_stride + h * copy_head_stride + d[None, :]
                )
                tl.store(k_out + copy_offsets, k, mask=mask)
                tl.store(v_out + copy_offsets, v, mask=mask)


def rope_and_cache(
    qkv: Tensor, q_out: Tensor, attn: GroupedQueryAttention, rotary: tuple[Tensor, Tensor], pool: Tensor,
    tables: Tensor, query_starts: Tensor, positions: Tensor, first_token: int = 0, first_row: int = 0,
    copy_to: tuple[Tensor, Tensor] | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Write the tokens from `first_token` on: q to q_out [tokens, heads * dim], k and v to their cache blocks.

    Tokens of rows before `first_row` are skipped. rotary: the `rotary_table`. pool: one layer's view of the KV pool,
    [blocks, 2, kv_heads, BLOCK_TOKENS, head_dim]. copy_to: tensors that receive k and v as well, [n, kv_heads, dim]
    with any token and head strides.
    """
    tokens = qkv.shape[0] - first_token
    if not tokens:
        return
    head = BLOCK_TOKENS * attn.head_dim
    assert pool.stride()[1:] == (attn.kv_heads * head, head, attn.head_dim, 1)
    norm = attn.q_norm is not None
    _rope_and_cache[(tokens,)](
        qkv, q_out, *(copy_to or (qkv, qkv)), *rotary, attn.q_norm if norm else qkv, attn.k_norm if norm else qkv, pool,
        tables, query_starts, positions, first_token, first_row, query_starts.shape[0] - 1 - first_row, attn.heads,
        attn.kv_heads, attn.eps, *temperature_args(attn), pool.stride(0), tables.stride(0),
        *(copy_to[0].stride()[:2] if copy_to else (0, 0)), DIM=attn.head_dim, PAD=next_power_of_two(attn.head_dim),
        HEADS=min(16, next_power_of_two(attn.heads)), OPS=query_key_ops(attn), COPY=copy_to is not None, ROWS=128,
        PDL=int(pdl), **launch_options(pdl, num_warps=4),
    )  # fmt: skip


def rope_and_cache_reference(
    qkv: Tensor, attn: GroupedQueryAttention, rotary: tuple[Tensor, Tensor], pool: Tensor, tables: Tensor,
    query_starts: Tensor, positions: Tensor,
) -> Tensor:  # fmt: skip
    """Writes k and v of all tokens; returns q: [tokens, heads, dim]."""
    q, k, v = qkv.view(len(qkv), -1, attn.head_dim).split([attn.heads, attn.kv_heads, attn.kv_heads], dim=1)
    if attn.q_norm is not None and attn.k_norm is not None:
        q, k = rms_norm(q, attn.q_norm, attn.eps), rms_norm(k, attn.k_norm, attn.eps)
    if attn.rope:
        q, k = (rotate(t, *rotary) for t in (q, k))
    if attn.l2_norm:
        q, k = (rms_norm(t, None, attn.eps) for t in (q, k))
    if attn.temperature is not None:
        steps = torch.floor((positions.float() + 1) / attn.temperature.interval)
        q = (q * (1 + attn.temperature.scale * torch.log1p(steps))[:, None, None]).to(q.dtype)
    assert isinstance(q, Tensor)
    starts = query_starts.tolist()
    for row in range(len(starts) - 1):
        new = slice(starts[row], starts[row + 1])
        at_positions = positions[new].long()
        blocks = tables[row][at_positions // BLOCK_TOKENS].long()
        pool[blocks, 0, :, at_positions % BLOCK_TOKENS] = k[new].to(pool.dtype)
        pool[blocks, 1, :, at_positions % BLOCK_TOKENS] = v[new].to(pool.dtype)
    return q
