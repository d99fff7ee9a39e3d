"""Attention over paged blocks against plain PyTorch, over shapes that hit every tail."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.backend import Attention
from emberline.kernels.gpu import cudnn_attention as dense_attention
from emberline.kernels.gpu import decode_attention as cascade
from emberline.kernels.gpu import split_kv as plan
from emberline.kernels.gpu.decode_attention import decode_attention
from emberline.kernels.gpu.prefill_attention import PrefillTile, prefill_attention
from emberline.kernels.gpu.rope import rope_and_cache_reference, rotary_table, rotary_table_reference
from emberline.kernels.reference import attend
from tests.kernels.gpu.made import DEVICE, LIMIT, Batch, attention, batch, error, noise, rope


def expected(qkv: Tensor, at: Attention, angles: tuple[Tensor, Tensor], b: Batch, pool: Tensor) -> Tensor:
    """What attention means, row by row. Writes k and v into `pool`, one layer's view."""
    q = rope_and_cache_reference(qkv, at, angles, pool, b.tables, b.query_starts, b.positions)
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
    angles = rotary_table(b.positions, rope(at.head_dim), torch.empty(rows * at.head_dim, device=DEVICE))
    spare = torch.empty(
        plan.max_decode_splits(rows, at.kv_heads) * plan.DECODE_SPLIT_FIELDS, dtype=torch.int32, device=DEVICE
    )
    mine = None if shares is None else torch.tensor(shares, dtype=torch.int32, device=DEVICE)
    pieces = plan.plan_decode_splits(b.context_lens, rows, at.kv_heads, at.window, mine, spare)
    out = torch.full((rows, at.heads * at.head_dim), torch.nan, dtype=qkv.dtype, device=DEVICE)
    partial = torch.full((pieces.n * at.heads * at.head_dim,), torch.nan, device=DEVICE)
    peaks = torch.full((pieces.n * at.heads * 2,), torch.nan, device=DEVICE)
    counters = torch.zeros(rows * at.kv_heads, dtype=torch.int32, device=DEVICE)
    pool = b.pool[:, at.layer_index]
    prefix = None
    if shared is not None:
        parts = cascade.n_prefix_splits(rows, at.heads, at.kv_heads)
        prefix_partial = torch.full((parts * rows * at.heads * at.head_dim,), torch.nan, device=DEVICE)
        prefix_peaks = torch.full((parts * rows * at.heads * 2,), torch.nan, device=DEVICE)
        pointer = torch.tensor(shared, dtype=torch.int32, device=DEVICE)
        n = cascade.shared_prefix_attention(
            qkv, at, angles, pool, b.tables, pointer, prefix_partial, prefix_peaks, rows
        )
        prefix = (prefix_partial, prefix_peaks, mine, n)
    decode_attention(qkv, out, at, angles, pool, b.tables, pieces, partial, peaks, counters, rows, prefix)
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
    want = expected(qkv, at, rotary_table_reference(b.positions, rope(dim)), b, pool[:, 1])
    got = run_decode(b, at, qkv)
    real = b.context_lens > 0
    assert error(got[real], want[real]) < LIMIT
    assert got[~real].isnan().all()  # padding is left alone
    assert error(b.pool[1:], pool[1:]) < LIMIT


def test_decode_cuts_few_rows_into_pieces_and_many_not() -> None:
    at = attention(4, 2, 64)
    spare = torch.empty(10**5, dtype=torch.int32, device=DEVICE)
    one = plan.plan_decode_splits(
        torch.tensor([3000], dtype=torch.int32, device=DEVICE), 1, at.kv_heads, None, None, spare
    )
    rows, begins, ends = (one.table[:, i].tolist() for i in (0, 3, 4))
    n = sum(row == 0 for row in rows)
    assert 1 < n <= plan.max_decode_splits(1, at.kv_heads)
    assert begins[1:n] == ends[: n - 1]  # no gap
    assert (begins[0], ends[n - 1]) == (0, 2999)
    many = torch.full((700,), 640, dtype=torch.int32, device=DEVICE)
    table = plan.plan_decode_splits(many, 700, at.kv_heads, None, None, spare).table
    assert (table[:700, 0] == torch.arange(700, device=DEVICE)).all()
    assert (table[700:, 0] == -1).all()


def test_decode_with_a_shared_prefix() -> None:
    at = attention(4, 2, 64)
    contexts = [130, 200, 129, 90, 0]
    b = batch([1] * 5, contexts, at)
    b.tables[1, :8] = b.tables[0, :8]
    b.tables[2, :8] = b.tables[0, :8]
    qkv = noise(5, 8 * 64, seed=3)
    want = expected(qkv, at, rotary_table_reference(b.positions, rope(64)), b, b.pool.clone()[:, 1])
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
    prefill_attention(
        q, out, at, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, b.tokens, tile=PrefillTile(32, 32, 2, 4)
    )
    assert error(out, want.flatten(1)) < LIMIT


def test_a_query_gets_the_same_in_any_chunk() -> None:
    at = attention(4, 2, 64)
    b = batch([50], [150], at)
    q = noise(50, 4 * 64, seed=4)
    whole, parts = torch.empty_like(q), torch.empty_like(q)
    prefill_attention(q, whole, at, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, 50)
    for start, stop in ((0, 1), (1, 30), (30, 50)):
        starts = torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE)
        context = torch.tensor([100 + stop], dtype=torch.int32, device=DEVICE)
        out = torch.empty_like(q[start:stop])
        prefill_attention(q[start:stop].clone(), out, at, b.pool[:, 1], b.tables, starts, context, stop - start)
        parts[start:stop] = out
    assert torch.equal(whole, parts)


def test_gathered_and_joined_parts_are_the_whole() -> None:
    at = attention(4, 2, 64)
    b = batch([8], [88], at)
    q = noise(8, 4, 64, seed=4)
    blocks = b.pool[b.tables[0, :6].long(), 1]
    keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :88]
    want = attend(q, keys, values, at.scale, 80, None)

    def part(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = (t.repeat_interleave(2, dim=1).float() for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * at.scale
        if causal:
            scores = scores.masked_fill(torch.ones(8, 8, device=DEVICE).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype).contiguous(), scores.logsumexp(-1).T

    out, sums = part(keys[80:], values[80:], True)
    for first, tokens, exact in ((0, 48, True), (48, 32, False)):
        space = [torch.full((48 * 2 * 64,), torch.nan, dtype=q.dtype, device=DEVICE) for _ in range(2)]
        k, v = (dense_attention.kv_view(t, tokens, at, exact) for t in space)
        dense_attention.gather_kv(b.pool[:, 1], b.tables[0], first, tokens, k, v)
        assert torch.equal(k, keys[first : first + tokens])
        assert torch.equal(v, values[first : first + tokens])
        dense_attention.merge_by_lse(out, sums, *part(k, v, False))
    assert error(out, want) < LIMIT


def test_segments_cover_a_context_once() -> None:
    for context in (0, 16, 4096, 5000, 32768, 70000):
        for round_chunk in (False, True):
            end = 0
            for first, tokens, exact in dense_attention._segments(context, round_chunk):
                assert (first, exact) == (end, exact and tokens % dense_attention.ROUND_CONTEXT == 0)
                assert 0 < tokens <= dense_attention.SEGMENT_TOKENS
                end = first + tokens
            assert end == context


@pytest.mark.parametrize("context", [24, 40, 88])
def test_a_chunk_and_its_context_in_segments(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plain attention in cuDNN's place, and segments of a few blocks."""

    def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float() for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(len(q), len(k), device=DEVICE).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype), scores.logsumexp(-1).T.contiguous()

    monkeypatch.setattr(dense_attention, "_cudnn", plain)
    monkeypatch.setattr(dense_attention, "SEGMENT_TOKENS", 32)
    at, n = attention(4, 2, 64), 24
    b = batch([n], [context], at)
    q = noise(n, 4 * 64, seed=4)
    mine, theirs = torch.full_like(q, torch.nan), torch.empty_like(q)
    blocks = b.pool[b.tables[0, : -(-context // 16)].long(), 1]
    keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, context - n : context]
    space = (noise(32 * 2 * 64), noise(32 * 2 * 64))
    dense_attention.attend(q, (keys, values), at, b.pool[:, 1], b.tables[0], context, space, mine)
    prefill_attention(q, theirs, at, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, n)
    assert error(mine, theirs) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "context"), [(2048, 2048), (2048, 10_000), (1500, 6516), (4096, 36_864)])
def test_cudnn_on_gathered_blocks(n: int, context: int) -> None:
    at = attention(8, 2, 128)
    b = batch([n], [context], at)
    q = noise(n, 8 * 128, seed=4)
    mine, theirs = torch.empty_like(q), torch.empty_like(q)
    exact = dense_attention.has_exact_plan(n)
    own = [dense_attention.kv_view(noise(n * 2 * 128), n, at, exact) for _ in range(2)]
    blocks = b.pool[b.tables[0, : -(-context // 16)].long(), 1]
    for place, source in zip(own, blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, context - n : context], strict=True):
        place.copy_(source)
    space = [noise(dense_attention.SEGMENT_TOKENS * 2 * 128) for _ in range(2)]
    dense_attention.attend(q, (own[0], own[1]), at, b.pool[:, 1], b.tables[0], context, (space[0], space[1]), mine)
    prefill_attention(q, theirs, at, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, n)
    assert error(mine, theirs) < LIMIT
    if context == n:
        assert error(dense_attention.attend_without_context(q, (own[0], own[1]), at), theirs) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("context", [576, 5000, 40_000])
@pytest.mark.parametrize("rows", [1, 3, 17, 130])
def test_decode_of_many_and_long_rows(rows: int, context: int) -> None:
    if rows * context > 10**6:
        pytest.skip("more cache than a test should take")
    at = attention(32, 8, 128)
    contexts = [max(1, context - 37 * r) for r in range(rows)]
    b = batch([1] * rows, contexts, at)
    qkv = noise(rows, 48 * 128, seed=3)
    want = expected(qkv, at, rotary_table_reference(b.positions, rope(128)), b, b.pool.clone()[:, 1])
    for _ in range(3):  # the counters are reset, and the order of the merge is fixed
        got = run_decode(b, at, qkv)
        assert error(got, want) < LIMIT
    assert torch.equal(got, run_decode(b, at, qkv))
