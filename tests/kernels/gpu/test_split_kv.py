"""Split-KV prefill attention against plain PyTorch: every tail, any number of splits."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.gpu import split_kv
from emberline.kernels.gpu.prefill_attention import PrefillTile, plan_prefill_splits, prefill_attention
from emberline.kernels.gpu.split_kv import SplitScratch
from tests.examples import n_examples
from tests.kernels.gpu.batches import (
    DEVICE,
    DTYPE,
    LIMIT,
    Batch,
    attention,
    attention_reference,
    batch,
    error,
    everyday,
    noise,
)

TILE = PrefillTile(32, 16, 2, 4)  # small: the interpreter is slow


def scratch_for(attn: GroupedQueryAttention, n_partials: int, queries: int = TILE.queries) -> SplitScratch:
    queries = max(queries, attn.heads // attn.kv_heads)
    floats = n_partials * split_kv.split_floats(queries, 1 << (attn.head_dim - 1).bit_length())
    counters = torch.zeros(n_partials, dtype=torch.int32, device=DEVICE)
    return SplitScratch(torch.full((floats,), torch.nan, device=DEVICE), counters)


@pytest.fixture(autouse=True)
def room_for_many_work_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "work_item_room", lambda: 2000)


def run(q: Tensor, attn: GroupedQueryAttention, b: Batch, scratch: SplitScratch | None, splits: int = 0) -> Tensor:
    out = torch.full_like(q, torch.nan)
    rows, plan = (b.query_starts, b.context_lens, b.tokens), None
    if scratch is not None:
        table = torch.full((16_000,), 7, dtype=torch.int32, device=DEVICE)
        shape = (attn.heads, attn.kv_heads, attn.head_dim, split_kv.locality(attn.window, attn.chunk))
        plan = plan_prefill_splits(*shape, *rows, 0, table, scratch, TILE, splits)
        assert plan is not None
    prefill_attention(q, out, attn, b.pool[:, 1], b.tables, *rows, splits=plan, tile=TILE)
    assert scratch is None or not scratch.counters.any()
    return out


def is_used(scratch: SplitScratch) -> bool:
    return not scratch.partials.isnan().all()


SHAPES = [(4, 2, 64), (3, 1, 64), (4, 1, 96), (2, 2, 128), (2, 1, 256)]
SWEEP = [(*shape, *how) for how, shape in product(((None, 4), (150, 3)), SHAPES)]
# An even and an odd group of query heads, a padded and a large head dimension, with and without a window.
KEEP = [(4, 2, 64, None, 4), (4, 1, 96, None, 4), (3, 1, 64, 150, 3), (2, 1, 256, 150, 3)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "splits"), everyday(SWEEP, KEEP))
def test_splits_merge_to_the_whole(heads: int, kv_heads: int, dim: int, window: int | None, splits: int) -> None:
    attn = attention(heads, kv_heads, dim, window)
    b = batch([3, 0, 20, 1], [3, 0, 540, 300], attn)
    q, scratch = noise(b.tokens, heads * dim, seed=4), scratch_for(attn, 200)
    assert error(run(q, attn, b, scratch, splits), attention_reference(q, attn, b)) < LIMIT
    assert is_used(scratch)


@pytest.mark.parametrize("local", everyday([{}, {"window": 150}, {"chunk": 160}], [{"chunk": 160}]))
def test_splits_with_sinks(local: dict[str, int]) -> None:
    attn = attention(4, 2, 64, **local, sinks=noise(4, seed=6).float())
    b = batch([3, 0, 20, 1], [3, 0, 540, 300], attn)
    q, scratch = noise(b.tokens, 4 * 64, seed=4), scratch_for(attn, 200)
    assert error(run(q, attn, b, scratch, 3), attention_reference(q, attn, b)) < LIMIT
    assert is_used(scratch)


@pytest.mark.parametrize("splits", everyday(range(2, 9), [3, 8]))
def test_any_number_of_splits_in_reused_memory(splits: int) -> None:
    attn = attention(2, 1, 64)
    b = batch([40], [600], attn)
    q, scratch = noise(b.tokens, 2 * 64, seed=4), scratch_for(attn, 200)
    got = run(q, attn, b, scratch, splits)
    assert error(got, attention_reference(q, attn, b)) < LIMIT
    assert is_used(scratch)
    assert torch.equal(got, run(q, attn, b, scratch, splits))


def test_queries_without_visible_keys_in_a_split() -> None:
    attn = attention(2, 1, 64)
    b = batch([16], [20 * TILE.keys + 8], attn)  # the last split has one key tile, hidden from half the queries
    q, scratch = noise(16, 2 * 64, seed=4), scratch_for(attn, 20)
    assert error(run(q, attn, b, scratch, 5), attention_reference(q, attn, b)) < LIMIT
    denominators = scratch.partials.view(20, -1)[4, -TILE.queries :]
    assert (denominators == 0).tolist() == [True] * 16 + [False] * 16


@settings(max_examples=n_examples(25), deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 280)), min_size=1, max_size=4).filter(
        lambda rows: any(n for n, _ in rows)
    ),
    splits=st.integers(1, 8),
    window=st.none() | st.integers(1, 300),
    group=st.sampled_from([1, 2, 5]),
    n_partials=st.integers(0, 60),
)
def test_any_rows_with_any_scratch_size(
    rows: list[tuple[int, int]], splits: int, window: int | None, group: int, n_partials: int
) -> None:
    attn = attention(group, 1, 64, window)
    b = batch([n for n, _ in rows], [n + before if n else 0 for n, before in rows], attn)
    q = noise(b.tokens, group * 64, seed=4)
    got = run(q, attn, b, scratch_for(attn, n_partials), splits)
    assert error(got, attention_reference(q, attn, b)) < LIMIT


def test_no_split_without_need_or_scratch() -> None:
    attn = attention(4, 2, 64)
    b = batch([20], [600], attn)
    q = noise(20, 4 * 64, seed=4)
    unsplit = run(q, attn, b, None)
    for n_partials, splits in ((400, 1), (0, 8), (3, 8)):
        scratch = scratch_for(attn, n_partials)
        assert torch.equal(run(q, attn, b, scratch, splits), unsplit)
        assert not is_used(scratch)
    short, scratch = batch([20], [4 * TILE.keys - 1], attn), scratch_for(attn, 400)
    run(q, attn, short, scratch, 8)
    assert not is_used(scratch)  # a split would have too few key tiles


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter has two SMs")
def test_a_launch_that_leaves_sms_idle_is_split() -> None:
    attn = attention(2, 1, 64)
    for tokens, is_split in ((16, True), (32, False), (48, True), (64, False)):  # tiles of 16 tokens: 1 to 4 of them
        b = batch([tokens], [tokens + 600], attn)
        q, scratch = noise(tokens, 2 * 64, seed=4), scratch_for(attn, 400)
        assert error(run(q, attn, b, scratch), attention_reference(q, attn, b)) < LIMIT
        assert is_used(scratch) == is_split


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter has two SMs")
def test_short_tiles_hardly_count() -> None:
    """Two long tiles fill both SMs; a short third one, such as a step's padding tokens, changes nothing."""
    attn = attention(2, 1, 64)
    for third, is_split in ((16, False), (640, True)):
        b = batch([32, 16], [640, third], attn)
        q, scratch = noise(48, 2 * 64, seed=4), scratch_for(attn, 400)
        assert error(run(q, attn, b, scratch), attention_reference(q, attn, b)) < LIMIT
        assert is_used(scratch) == is_split


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "before"), [([128], 8000), ([608], 7584), ([640], 30_000), ([30, 100, 3], 3000)])
@pytest.mark.parametrize("splits", [0, 2, 5])
@pytest.mark.parametrize("window", [None, 2500])
def test_production_tiles(lengths: list[int], before: int, splits: int, window: int | None) -> None:
    attn = attention(32, 8, 128, window)
    b = batch(lengths, [n + before for n in lengths], attn)
    q, unsplit = noise(b.tokens, 32 * 128, seed=4), torch.empty(b.tokens, 32 * 128, dtype=DTYPE, device=DEVICE)
    rows = (b.query_starts, b.context_lens, b.tokens)
    prefill_attention(q, unsplit, attn, b.pool[:, 1], b.tables, *rows)
    scratch = scratch_for(attn, 2000, queries=128)
    table = torch.full((16_000,), 7, dtype=torch.int32, device=DEVICE)
    plan = plan_prefill_splits(32, 8, 128, split_kv.locality(window, None), *rows, 0, table, scratch, splits=splits)
    results = []
    for _ in range(3):
        results.append(torch.full_like(q, torch.nan))
        prefill_attention(q, results[-1], attn, b.pool[:, 1], b.tables, *rows, splits=plan)
        assert not scratch.counters.any()
    assert is_used(scratch)
    assert error(results[0], unsplit) < LIMIT
    assert all(torch.equal(result, results[0]) for result in results)
