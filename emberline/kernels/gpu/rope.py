# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""From the projection's q | k | v: head norms, rotation, and k and v into their blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import Attention, Rope
from emberline.kernels.gpu.launch import launch_options, next_power_of_two, pdl_launch_early, pdl_wait
from emberline.kernels.reference import rms_norm, rotate
from emberline.protocol.block_hash import BLOCK_TOKENS


@triton.jit
def _rotary_table(positions, frequencies, cosine, sine, half, scale, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    ok = at < half
    position = tl.load(positions + token).to(tl.float32)
    angle = position * tl.load(frequencies + at, mask=ok, other=0.0)
    tl.store(cosine + token * half + at, tl.cos(angle) * scale, mask=ok)
    tl.store(sine + token * half + at, tl.sin(angle) * scale, mask=ok)


def rotary_table(positions: Tensor, rope: Rope, out: Tensor) -> tuple[Tensor, Tensor]:
    """cosine, sine: float32 [tokens, head_dim / 2], in `out`."""
    tokens, half = positions.shape[0], rope.inverse_frequencies.shape[0]
    cosine = out[: tokens * half].view(tokens, half)
    sine = out[tokens * half : 2 * tokens * half].view(tokens, half)
    if tokens:
        _rotary_table[(tokens,)](
            positions, rope.inverse_frequencies, cosine, sine, half, rope.scale, BLOCK=next_power_of_two(half)
        )
    return cosine, sine


def rotary_table_reference(positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    turned = torch.outer(positions.float(), rope.inverse_frequencies)
    return turned.cos() * rope.scale, turned.sin() * rope.scale


@triton.jit
def norm_and_rotate(
    source, weight, cosine, sine, heads_ok, d, eps, DIM: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Heads at `source` ([heads, 1] pointers), normed and rotated: [heads, padded dim] of the source's type.

    Dimension i turns with its partner i ± DIM / 2, so each is read twice instead of exchanged between threads.
    """
    HALF: tl.constexpr = DIM // 2
    kind = source.dtype.element_ty
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    ok = heads_ok & (d < DIM)[None, :]
    x = tl.load(source + d[None, :], mask=ok, other=0.0).to(tl.float32)
    y = tl.load(source + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = (x * inverse * tl.load(weight + d, mask=d < DIM, other=0.0)[None, :]).to(kind).to(tl.float32)
        y = (y * inverse * tl.load(weight + partner, mask=d < DIM, other=0.0)[None, :]).to(kind).to(tl.float32)
    cos = tl.load(cosine + d % HALF, mask=d < DIM, other=0.0)
    sin = tl.load(sine + d % HALF, mask=d < DIM, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    return (x * cos[None, :] + y * sin[None, :]).to(kind)


@triton.jit(do_not_specialize=["first_token", "first_row", "n_rows"])
def _rope_and_cache(
    qkv, q_out, k_out, v_out, cosine, sine, q_weight, k_weight, pool, tables, query_starts, positions,
    first_token, first_row, n_rows, heads, kv_heads, eps, block_stride, table_stride, copy_token, copy_head,
    DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, COPY: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    token = first_token + tl.program_id(0)
    d = tl.arange(0, PAD)
    pdl_wait(PDL)
    row = first_row - 1  # whose token this is: the starts at or before it tell
    for start in range(0, n_rows, ROWS):
        r = start + tl.arange(0, ROWS)
        starts = tl.load(query_starts + first_row + r, mask=r < n_rows, other=2147483647)
        row += tl.sum((starts <= token).to(tl.int32))
    if row >= first_row:  # else its row decodes
        position = tl.load(positions + token)
        block = tl.load(tables + row.to(tl.int64) * table_stride + position // 16).to(tl.int64)
        width = (heads + 2 * kv_heads) * DIM
        base = qkv + token.to(tl.int64) * width
        cos, sin = cosine + token * (DIM // 2), sine + token * (DIM // 2)
        for start in range(0, heads, HEADS):
            h = start + tl.arange(0, HEADS)[:, None]
            q = norm_and_rotate(base + h * DIM, q_weight, cos, sin, h < heads, d, eps, DIM, NORM)
            place = q_out + token.to(tl.int64) * heads * DIM + h * DIM
            tl.store(place + d[None, :], q, mask=(h < heads) & (d < DIM)[None, :])
        slot = pool + block * block_stride + (position % 16) * DIM
        for start in range(0, kv_heads, HEADS):
            h = start + tl.arange(0, HEADS)[:, None]
            ok = (h < kv_heads) & (d < DIM)[None, :]
            k = norm_and_rotate(base + (heads + h) * DIM, k_weight, cos, sin, h < kv_heads, d, eps, DIM, NORM)
            v = tl.load(base + (heads + kv_heads + h) * DIM + d[None, :], mask=ok, other=0.0)
            tl.store(slot + h * (16 * DIM) + d[None, :], k.to(pool.dtype.element_ty), mask=ok)
            tl.store(slot + (kv_heads + h) * (16 * DIM) + d[None, :], v.to(pool.dtype.element_ty), mask=ok)
            if COPY:
                to = (token - first_token).to(tl.int64) * copy_token + h * copy_head + d[None, :]
                tl.store(k_out + to, k, mask=ok)
                tl.store(v_out + to, v, mask=ok)


def rope_and_cache(
    qkv: Tensor,
    q_out: Tensor,
    at: Attention,
    angles: tuple[Tensor, Tensor],
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    positions: Tensor,
    first_token: int = 0,
    first_row: int = 0,
    copy: tuple[Tensor, Tensor] | None = None,
    pdl: bool = False,
) -> None:
    """Tokens from `first_token`, rows from `first_row`: q into q_out [tokens, heads * dim], k and v into their blocks.

    Tokens of rows before `first_row` are left out.

    copy: k and v of these tokens go there too, each [n, kv_heads, dim] of any strides between tokens and heads.

    pool: [blocks, 2, kv_heads, BLOCK_TOKENS, head_dim], one layer's view of the group's blocks.
    """
    tokens = qkv.shape[0] - first_token
    if not tokens:
        return
    assert pool.stride()[1:] == _strides(at)
    norm = at.q_norm is not None
    _rope_and_cache[(tokens,)](
        qkv, q_out, *(copy or (qkv, qkv)), *angles, at.q_norm if norm else qkv, at.k_norm if norm else qkv, pool,
        tables, query_starts, positions, first_token, first_row, query_starts.shape[0] - 1 - first_row, at.heads,
        at.kv_heads, at.eps, pool.stride(0), tables.stride(0),
        *(copy[0].stride()[:2] if copy else (0, 0)), DIM=at.head_dim, PAD=next_power_of_two(at.head_dim),
        HEADS=min(16, next_power_of_two(at.heads)), NORM=norm, COPY=copy is not None, ROWS=128, PDL=int(pdl),
        **launch_options(pdl, num_warps=4),
    )  # fmt: skip


def _strides(at: Attention) -> tuple[int, ...]:
    head = BLOCK_TOKENS * at.head_dim
    return at.kv_heads * head, head, at.head_dim, 1


def rope_and_cache_reference(
    qkv: Tensor,
    at: Attention,
    angles: tuple[Tensor, Tensor],
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    positions: Tensor,
) -> Tensor:
    """All tokens; returns q: [tokens, heads, dim]."""
    q, k, v = qkv.view(len(qkv), -1, at.head_dim).split([at.heads, at.kv_heads, at.kv_heads], dim=1)
    if at.q_norm is not None and at.k_norm is not None:
        q, k = rms_norm(q, at.q_norm, at.eps), rms_norm(k, at.k_norm, at.eps)
    q, k = (rotate(t, *angles) for t in (q, k))
    starts = query_starts.tolist()
    for row in range(len(starts) - 1):
        mine = slice(starts[row], starts[row + 1])
        where = positions[mine].long()
        blocks = tables[row][where // BLOCK_TOKENS].long()
        pool[blocks, 0, :, where % BLOCK_TOKENS] = k[mine].to(pool.dtype)
        pool[blocks, 1, :, where % BLOCK_TOKENS] = v[mine].to(pool.dtype)
    return q
