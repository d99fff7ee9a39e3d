"""Chunks whose keys are split over programs, against plain PyTorch: every tail, any number of pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.backend import Attention
from emberline.kernels.gpu import split_kv as split_keys
from emberline.kernels.gpu.prefill_attention import PrefillTile, plan_prefill_splits, prefill_attention
from emberline.kernels.gpu.split_kv import SplitScratch
from emberline.kernels.reference import attend
from tests.kernels.gpu.made import DEVICE, DTYPE, LIMIT, Batch, attention, batch, error, noise

TILE = PrefillTile(32, 16, 2, 4)  # small: interpreted steps are slow


def expected(q: Tensor, at: Attention, b: Batch) -> Tensor:
    want = torch.zeros_like(q).view(b.tokens, at.heads, at.head_dim)
    starts = b.query_starts.tolist()
    for row, context in enumerate(b.context_lens.tolist()):
        n = starts[row + 1] - starts[row]
        if n:
            blocks = b.pool[b.tables[row, : -(-context // 16)].long(), 1]
            keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context]
            mine = slice(starts[row], starts[row + 1])
            queries = q[mine].view(n, at.heads, at.head_dim)
            want[mine] = attend(queries, keys, values, at.scale, context - n, at.window)
    return want.flatten(1)


def scratch_for(at: Attention, pieces: int) -> SplitScratch:
    queries = max(TILE.queries, at.heads // at.kv_heads)
    floats = pieces * split_keys.split_floats(queries, 1 << (at.head_dim - 1).bit_length())
    counters = torch.zeros(pieces, dtype=torch.int32, device=DEVICE)
    return SplitScratch(torch.full((floats,), torch.nan, device=DEVICE), counters)


@pytest.fixture(autouse=True)
def many_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_keys, "MAX_WORK_ITEMS", 2000)


def run(q: Tensor, at: Attention, b: Batch, scratch: SplitScratch | None, splits: int = 0) -> Tensor:
    out = torch.full_like(q, torch.nan)
    pool, rows, items = b.pool[:, 1], (b.query_starts, b.context_lens, b.tokens), None
    if scratch is not None:
        table = torch.full((16_000,), 7, dtype=torch.int32, device=DEVICE)
        items = plan_prefill_splits(
            at.heads, at.kv_heads, at.head_dim, at.window, *rows, 0, table, scratch, TILE, splits
        )
        assert items is not None
    prefill_attention(q, out, at, pool, b.tables, *rows, items=items, tile=TILE)
    assert scratch is None or not scratch.counters.any()
    return out


def used(scratch: SplitScratch) -> bool:
    return not scratch.partials.isnan().all()


SHAPES = [(4, 2, 64), (3, 1, 64), (4, 1, 96), (2, 2, 128), (2, 1, 256)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("window", "splits"), [(None, 4), (150, 3)])
def test_pieces_are_the_whole(heads: int, kv_heads: int, dim: int, window: int | None, splits: int) -> None:
    at = attention(heads, kv_heads, dim, window)
    b = batch([3, 0, 20, 1], [3, 0, 540, 300], at)
    q, scratch = noise(b.tokens, heads * dim, seed=4), scratch_for(at, 200)
    assert error(run(q, at, b, scratch, splits), expected(q, at, b)) < LIMIT
    assert used(scratch)


@pytest.mark.parametrize("splits", range(2, 9))
def test_any_number_of_pieces_whatever_was_there(splits: int) -> None:
    at = attention(2, 1, 64)
    b = batch([40], [600], at)
    q, scratch = noise(b.tokens, 2 * 64, seed=4), scratch_for(at, 200)
    got = run(q, at, b, scratch, splits)
    assert error(got, expected(q, at, b)) < LIMIT
    assert used(scratch)
    assert torch.equal(got, run(q, at, b, scratch, splits))


def test_queries_that_see_nothing_of_a_piece() -> None:
    at = attention(2, 1, 64)
    b = batch([16], [20 * TILE.tokens + 8], at)  # pieces of five steps and one of a single one, behind half the queries
    q, scratch = noise(16, 2 * 64, seed=4), scratch_for(at, 20)
    assert error(run(q, at, b, scratch, 5), expected(q, at, b)) < LIMIT
    sums = scratch.partials.view(20, -1)[4, -TILE.queries :]
    assert (sums == 0).tolist() == [True] * 16 + [False] * 16


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 280)), min_size=1, max_size=4).filter(
        lambda rows: any(n for n, _ in rows)
    ),
    splits=st.integers(1, 8),
    window=st.none() | st.integers(1, 300),
    group=st.sampled_from([1, 2, 5]),
    pieces=st.integers(0, 60),
)
def test_any_rows_in_any_room(
    rows: list[tuple[int, int]], splits: int, window: int | None, group: int, pieces: int
) -> None:
    at = attention(group, 1, 64, window)
    b = batch([n for n, _ in rows], [n + before if n else 0 for n, before in rows], at)
    q = noise(b.tokens, group * 64, seed=4)
    assert error(run(q, at, b, scratch_for(at, pieces), splits), expected(q, at, b)) < LIMIT


def test_without_need_or_room_nothing_is_split() -> None:
    at = attention(4, 2, 64)
    b = batch([20], [600], at)
    q = noise(20, 4 * 64, seed=4)
    plain = run(q, at, b, None)
    for pieces, splits in ((400, 1), (0, 8), (3, 8)):
        scratch = scratch_for(at, pieces)
        assert torch.equal(run(q, at, b, scratch, splits), plain)
        assert not used(scratch)
    short, scratch = batch([20], [4 * TILE.tokens - 1], at), scratch_for(at, 400)
    run(q, at, short, scratch, 8)
    assert not used(scratch)  # a piece would have fewer steps than are worth it


@pytest.mark.skipif(DEVICE != "cpu", reason="two multiprocessors, as interpreted")
def test_a_launch_that_leaves_much_idle_is_split_by_itself() -> None:
    at = attention(2, 1, 64)
    for tokens, cut in ((16, True), (32, False), (48, True), (64, False)):  # tiles of 16 tokens: 1 to 4 of them
        b = batch([tokens], [tokens + 600], at)
        q, scratch = noise(tokens, 2 * 64, seed=4), scratch_for(at, 400)
        assert error(run(q, at, b, scratch), expected(q, at, b)) < LIMIT
        assert used(scratch) == cut


@pytest.mark.skipif(DEVICE != "cpu", reason="two multiprocessors, as interpreted")
def test_tiles_that_see_little_hardly_count() -> None:
    """Two long tiles fill both multiprocessors: a short third, such as tokens that fill a step up, changes nothing."""
    at = attention(2, 1, 64)
    for third, cut in ((16, False), (640, True)):
        b = batch([32, 16], [640, third], at)
        q, scratch = noise(48, 2 * 64, seed=4), scratch_for(at, 400)
        assert error(run(q, at, b, scratch), expected(q, at, b)) < LIMIT
        assert used(scratch) == cut


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "before"), [([128], 8000), ([608], 7584), ([640], 30_000), ([30, 100, 3], 3000)])
@pytest.mark.parametrize("splits", [0, 2, 5])
@pytest.mark.parametrize("window", [None, 2500])
def test_real_tiles(lengths: list[int], before: int, splits: int, window: int | None) -> None:
    at = attention(32, 8, 128, window)
    b = batch(lengths, [n + before for n in lengths], at)
    q, plain = noise(b.tokens, 32 * 128, seed=4), torch.empty(b.tokens, 32 * 128, dtype=DTYPE, device=DEVICE)
    rows = (b.query_starts, b.context_lens, b.tokens)
    prefill_attention(q, plain, at, b.pool[:, 1], b.tables, *rows)
    floats = 2000 * split_keys.split_floats(128, 128)
    counters = torch.zeros(2000, dtype=torch.int32, device=DEVICE)
    scratch = SplitScratch(torch.full((floats,), torch.nan, device=DEVICE), counters)
    table = torch.full((16_000,), 7, dtype=torch.int32, device=DEVICE)
    items = plan_prefill_splits(32, 8, 128, window, *rows, 0, table, scratch, splits=splits)
    results = []
    for _ in range(3):
        results.append(torch.full_like(q, torch.nan))
        prefill_attention(q, results[-1], at, b.pool[:, 1], b.tables, *rows, items=items)
        assert not counters.any()
    assert used(scratch)
    assert error(results[0], plain) < LIMIT
    assert all(torch.equal(result, results[0]) for result in results)
