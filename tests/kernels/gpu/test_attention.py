"""Attention over paged blocks against plain PyTorch, over shapes that hit every tail."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.backend import Attention
from emberline.kernels.gpu import cascade, plan
from emberline.kernels.gpu.decode_attention import decode
from emberline.kernels.gpu.prefill_attention import chunks
from emberline.kernels.gpu.rope import rope_write_reference
from emberline.kernels.reference import attend
from tests.kernels.gpu.made import DEVICE, LIMIT, Batch, attention, batch, error, noise, rope


def expected(qkv: Tensor, at: Attention, angles: tuple[Tensor, Tensor], b: Batch, pool: Tensor) -> Tensor:
    """What attention means, row by row. Writes k and v into `pool`, one layer's view."""
    q = rope_write_reference(qkv, at, angles, pool, b.tables, b.query_starts, b.positions)
    out = torch.zeros_like(q)
    starts = b.query_starts.tolist()
    for row, context in enumerate(b.context_lens.tolist()):
        if not context:
            continue
        mine = slice(starts[row], starts[row + 1])
        blocks = pool[b.tables[row, : -(-context // 16)].long()]
        keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context]
        out[mine] = attend(q[mine], keys, values, at.scale, context - (mine.stop - mine.start), at.window)
    return out.flatten(1)


def run_decode(b: Batch, at: Attention, qkv: Tensor, shared: list[int] | None = None, shares: list[int] | None = None):
    rows = len(b.context_lens)
    angles = plan.angles(b.positions, rope(at.head_dim), torch.empty(rows * at.head_dim, device=DEVICE))
    spare = torch.empty(plan.n_pieces(rows, at.kv_heads) * plan.PIECE_FIELDS, dtype=torch.int32, device=DEVICE)
    mine = None if shares is None else torch.tensor(shares, dtype=torch.int32, device=DEVICE)
    pieces = plan.cut(b.context_lens, rows, at.kv_heads, at.window, mine, spare)
    out = torch.full((rows, at.heads * at.head_dim), torch.nan, dtype=qkv.dtype, device=DEVICE)
    partial = torch.full((pieces.n * at.heads * at.head_dim,), torch.nan, device=DEVICE)
    peaks = torch.full((pieces.n * at.heads * 2,), torch.nan, device=DEVICE)
    counters = torch.zeros(rows * at.kv_heads, dtype=torch.int32, device=DEVICE)
    pool = b.pool[:, at.index]
    prefix = None
    if shared is not None:
        parts = cascade.n_parts(rows, at.heads, at.kv_heads)
        prefix_partial = torch.full((parts * rows * at.heads * at.head_dim,), torch.nan, device=DEVICE)
        prefix_peaks = torch.full((parts * rows * at.heads * 2,), torch.nan, device=DEVICE)
        pointer = torch.tensor(shared, dtype=torch.int32, device=DEVICE)
        n = cascade.attend_prefix(qkv, at, angles, pool, b.tables, pointer, prefix_partial, prefix_peaks, rows)
        prefix = (prefix_partial, prefix_peaks, mine, n)
    decode(qkv, out, at, angles, pool, b.tables, pieces, partial, peaks, counters, rows, prefix)
    assert not counters.any()
    return out


SHAPES = [(4, 2, 64), (3, 1, 64), (8, 2, 96), (4, 4, 128), (2, 1, 256)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("window", "norm"), [(None, False), (40, True)])
def test_decode(heads: int, kv_heads: int, dim: int, window: int | None, norm: bool) -> None:
    at = attention(heads, kv_heads, dim, window, norm)
    contexts = [1, 0, 17, 64, 300]
    b = batch([1] * len(contexts), contexts, at)
    qkv = noise(b.tokens, (heads + 2 * kv_heads) * dim, seed=3)
    pool = b.pool.clone()
    want = expected(qkv, at, plan.angles_reference(b.positions, rope(dim)), b, pool[:, 1])
    got = run_decode(b, at, qkv)
    real = b.context_lens > 0
    assert error(got[real], want[real]) < LIMIT
    assert got[~real].isnan().all()  # padding is left alone
    assert error(b.pool[1:], pool[1:]) < LIMIT


def test_decode_cuts_few_rows_into_pieces_and_many_not() -> None:
    at = attention(4, 2, 64)
    spare = torch.empty(10**5, dtype=torch.int32, device=DEVICE)
    one = plan.cut(torch.tensor([3000], dtype=torch.int32, device=DEVICE), 1, at.kv_heads, None, None, spare)
    rows, begins, ends = (one.table[:, i].tolist() for i in (0, 3, 4))
    n = sum(row == 0 for row in rows)
    assert 1 < n <= plan.n_pieces(1, at.kv_heads)
    assert begins[1:n] == ends[: n - 1]  # no gap
    assert (begins[0], ends[n - 1]) == (0, 2999)
    many = torch.full((700,), 640, dtype=torch.int32, device=DEVICE)
    table = plan.cut(many, 700, at.kv_heads, None, None, spare).table
    assert (table[:700, 0] == torch.arange(700, device=DEVICE)).all()
    assert (table[700:, 0] == -1).all()


def test_decode_with_a_shared_prefix() -> None:
    at = attention(4, 2, 64)
    contexts = [130, 200, 129, 90, 0]
    b = batch([1] * 5, contexts, at)
    b.tables[1, :8] = b.tables[0, :8]
    b.tables[2, :8] = b.tables[0, :8]
    qkv = noise(5, 8 * 64, seed=3)
    want = expected(qkv, at, plan.angles_reference(b.positions, rope(64)), b, b.pool.clone()[:, 1])
    got = run_decode(b, at, qkv, shared=[1, 128], shares=[128, 128, 128, 0, 0])
    assert error(got[:4], want[:4]) < LIMIT
    alone = run_decode(b, at, qkv, shared=[0, 0], shares=[0] * 5)
    assert error(alone[:4], want[:4]) < LIMIT


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 40])
def test_chunks(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    at = attention(heads, kv_heads, dim, window)
    b = batch([3, 0, 20, 1, 17], [3, 0, 90, 65, 64], at)
    q = noise(b.tokens, heads * dim, seed=4)
    want = torch.zeros_like(q).view(b.tokens, heads, dim)
    starts = b.query_starts.tolist()
    for row, context in enumerate(b.context_lens.tolist()):
        mine = slice(starts[row], starts[row + 1])
        blocks = b.pool[b.tables[row, : -(-context // 16)].long(), 1]
        keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context]
        if context:
            n = mine.stop - mine.start
            want[mine] = attend(q[mine].view(n, heads, dim), keys, values, at.scale, context - n, window)
    out = torch.full_like(q, torch.nan)
    chunks(q, out, at, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, b.tokens, queries=32, tile=32)
    assert error(out, want.flatten(1)) < LIMIT


def test_a_query_gets_the_same_in_any_chunk() -> None:
    at = attention(4, 2, 64)
    b = batch([50], [150], at)
    q = noise(50, 4 * 64, seed=4)
    whole, parts = torch.empty_like(q), torch.empty_like(q)
    chunks(q, whole, at, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, 50)
    for start, stop in ((0, 1), (1, 30), (30, 50)):
        starts = torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE)
        context = torch.tensor([100 + stop], dtype=torch.int32, device=DEVICE)
        out = torch.empty_like(q[start:stop])
        chunks(q[start:stop].clone(), out, at, b.pool[:, 1], b.tables, starts, context, stop - start)
        parts[start:stop] = out
    assert torch.equal(whole, parts)
