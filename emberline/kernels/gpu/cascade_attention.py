# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A prefix that many rows share, read once for all of them: their queries stand below each other in one tile.

Partial results only; `decode_attention` merges them with each row's own tail. Rows without a share are computed too
(their queries lie in the same tiles) and not merged.
"""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import Attention
from emberline.kernels.gpu.decode_attention import LOG2_E, attend_range
from emberline.kernels.gpu.launch import SM_COUNT, await_inputs, cdiv, options, power_of_two, release_next


def n_parts(rows: int, heads: int, kv_heads: int) -> int:
    """Into how many parts the prefix is cut: about two programs for each multiprocessor, at most 16."""
    tiles = cdiv(rows * (heads // kv_heads), _queries(rows * (heads // kv_heads)))
    return max(1, min(16, 2 * SM_COUNT // (tiles * kv_heads)))


def _queries(n: int) -> int:
    return 64 if n > 16 else 16


@triton.jit(do_not_specialize=["n_rows"])
def _prefix(
    qkv, partial, peaks, cosine, sine, q_weight, pool, tables, shared, n_rows, scale, eps, block_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    NORM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(2)
    kv_heads, n_parts = tl.num_programs(0), tl.num_programs(2)
    await_inputs(PDL)
    release_next(PDL)
    tokens = tl.load(shared + 1)
    if tokens > 0:
        each = tl.cdiv(tl.cdiv(tokens, n_parts), TILE) * TILE
        begin, end = part * each, tl.minimum(part * each + each, tokens)
        d = tl.arange(0, PAD)
        m = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        row = (m // GROUP).to(tl.int64)
        mine = (row < n_rows)[:, None]
        wide = ((GROUP + 2) * kv_heads * DIM).to(tl.int64)
        HALF: tl.constexpr = DIM // 2
        kind = qkv.dtype.element_ty
        source = qkv + (row * wide + (head * GROUP + m % GROUP) * DIM)[:, None]
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        ok = mine & (d < DIM)[None, :]
        x = tl.load(source + d[None, :], mask=ok, other=0.0).to(tl.float32)
        y = tl.load(source + partner[None, :], mask=ok, other=0.0).to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            x = (x * inverse * tl.load(q_weight + d, mask=d < DIM, other=0.0)[None, :]).to(kind).to(tl.float32)
            y = (y * inverse * tl.load(q_weight + partner, mask=d < DIM, other=0.0)[None, :]).to(kind).to(tl.float32)
        turn = (row * HALF)[:, None] + (d % HALF)[None, :]
        cos = tl.load(cosine + turn, mask=ok, other=0.0)
        sin = tl.load(sine + turn, mask=ok, other=0.0)
        q = (x * cos + y * tl.where((d < HALF)[None, :], -sin, sin)).to(kind)

        table = tables + tl.load(shared).to(tl.int64) * table_stride
        keys = pool + head * (16 * DIM)
        values = keys + kv_heads * (16 * DIM)
        peak, total, acc = attend_range(
            q, table, keys, values, begin, end, d, scale, block_stride, QUERIES, DIM, PAD, TILE, STAGES, True
        )
        to = ((part * n_rows + row) * kv_heads + head) * GROUP + m % GROUP
        tl.store(partial + to[:, None] * DIM + d[None, :], acc, mask=ok)
        tl.store(peaks + to * 2, peak, mask=row < n_rows)
        tl.store(peaks + to * 2 + 1, total, mask=row < n_rows)


def attend_prefix(
    qkv: Tensor,
    at: Attention,
    angles: tuple[Tensor, Tensor],
    pool: Tensor,
    tables: Tensor,
    shared: Tensor,
    partial: Tensor,
    peaks: Tensor,
    rows: int,
    pdl: bool = False,
) -> int:
    """shared: int32 [2], a row whose table starts with the prefix and the prefix's tokens, a multiple of the block.

    partial: float32 [parts, rows, heads, dim], peaks: [parts, rows, heads, 2]. Returns the number of parts.
    """
    group = at.heads // at.kv_heads
    queries, parts = _queries(rows * group), n_parts(rows, at.heads, at.kv_heads)
    stages, warps = (3, 4) if at.head_dim <= 128 else (2, 8)  # what shared memory and registers hold
    _prefix[(at.kv_heads, cdiv(rows * group, queries), parts)](
        qkv, partial, peaks, *angles, at.q_norm if at.q_norm is not None else qkv, pool, tables, shared, rows,
        at.scale * LOG2_E, at.eps, pool.stride(0), tables.stride(0),
        GROUP=group, DIM=at.head_dim, PAD=power_of_two(at.head_dim), QUERIES=queries, TILE=64,
        NORM=at.q_norm is not None, STAGES=stages, PDL=int(pdl), **options(pdl, num_warps=warps),
    )  # fmt: skip
    return parts
