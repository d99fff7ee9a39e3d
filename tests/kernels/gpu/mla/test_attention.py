"""Absorbed MLA, from the projections' outputs to the heads' outputs, against expanded attention in plain PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.backend import LatentAttention
from emberline.kernels.gpu.launch import cdiv
from emberline.kernels.gpu.mla import splits as latent_splits
from emberline.kernels.gpu.mla.attention import LatentTile, latent_attention, latent_tile, partial_floats, tile_tokens
from emberline.kernels.gpu.mla.projections import absorb_queries, project_values
from emberline.kernels.gpu.mla.splits import ITEM_FIELDS, LatentSplits, max_items, plan_latent_splits
from tests.examples import n_examples
from tests.kernels.gpu.batches import DEVICE, LIMIT, Batch, error, everyday, noise
from tests.kernels.gpu.mla.layers import latent_batch, latent_layer, mla_reference, new_tokens, rotary

TILE = LatentTile(16, 16, 2, 4)  # small: the interpreter is slow


def plan(b: Batch, attn: LatentAttention, tile: LatentTile, tokens: int, max_partials: int) -> LatentSplits:
    memory = torch.full(
        (max_items(b.tokens, len(b.tables), tokens) * ITEM_FIELDS,), 7, dtype=torch.int32, device=DEVICE
    )
    head_tiles = cdiv(tokens * attn.heads, tile.queries)
    return plan_latent_splits(
        b.query_starts, b.context_lens, b.tokens, head_tiles, tokens, tile.keys, 1, max_partials, memory
    )


def run(
    q: Tensor, kv: Tensor, attn: LatentAttention, b: Batch, tile: LatentTile = TILE, tile_tokens: int = 1,
    max_partials: int = 24,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The heads' outputs, and the scratch of partial results."""
    rows = (b.tables, b.query_starts, b.context_lens)
    pool = b.pool[:, attn.layer_index]
    queries = torch.full((b.tokens, attn.heads, attn.kv_lora + attn.rope_dim), torch.nan, device=DEVICE, dtype=q.dtype)
    absorb_queries(q, kv, queries, attn, rotary(b, attn), pool, *rows, b.positions)
    splits = plan(b, attn, tile, tile_tokens, max_partials)
    size = partial_floats(cdiv(tile_tokens * attn.heads, tile.queries) * tile.queries, attn.kv_lora)
    scratch = torch.full((max_partials * size,), torch.nan, device=DEVICE)
    latents = torch.zeros(b.tokens, attn.heads, attn.kv_lora, device=DEVICE, dtype=q.dtype)
    latent_attention(queries, latents, attn.scale, pool, *rows, splits, tile, scratch)
    out = torch.full((b.tokens, attn.heads * attn.v_dim), torch.nan, device=DEVICE, dtype=q.dtype)
    project_values(latents, attn.v_up, out)
    return out, scratch


@pytest.fixture
def many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_splits, "sm_count", lambda: 132)
    monkeypatch.setattr(latent_splits, "partial_room", lambda: 24)
    monkeypatch.setattr(latent_splits, "ITEM_COST", 0.5)


SHAPES = [(4, 32, 24, 16), (7, 32, 16, 16), (3, 48, 24, 8)]  # heads, latent, nope and rope dimensions


@pytest.mark.parametrize(("heads", "latent", "nope", "rope"), everyday(SHAPES, SHAPES[2:]))
def test_decode(heads: int, latent: int, nope: int, rope: int, many_sms: None) -> None:
    attn = latent_layer(heads, latent, nope, rope)
    contexts = [1, 0, 17, 64, 200]
    b, reference = (latent_batch([1] * 5, contexts, attn) for _ in range(2))
    q, kv = new_tokens(b, attn)
    want = mla_reference(q, kv, attn, reference)
    got, scratch = run(q, kv, attn, b)
    assert error(got, want) < LIMIT
    assert error(b.pool[1:], reference.pool[1:]) < LIMIT
    assert not scratch.isnan().all()  # the longest row was split


def test_more_heads_than_a_program_takes(many_sms: None) -> None:
    attn = latent_layer(20, nope=16, v_dim=16)
    b, reference = (latent_batch([1, 1], [70, 9], attn) for _ in range(2))
    q, kv = new_tokens(b, attn)
    assert error(run(q, kv, attn, b)[0], mla_reference(q, kv, attn, reference)) < LIMIT


@pytest.mark.parametrize("tile_tokens", everyday([1, 3], [3]))
def test_decode_rows_and_chunks_together(tile_tokens: int, many_sms: None) -> None:
    """Also what verifying drafts needs: rows of any number of new tokens."""
    attn = latent_layer(5)
    b, reference = (latent_batch([1, 1, 0, 7, 4, 2], [33, 90, 0, 7, 100, 2], attn) for _ in range(2))
    q, kv = new_tokens(b, attn)
    want = mla_reference(q, kv, attn, reference)
    got, _ = run(q, kv, attn, b, tile_tokens=tile_tokens)
    assert error(got, want) < LIMIT
    assert error(b.pool[1:], reference.pool[1:]) < LIMIT


def test_queries_and_latents_may_be_columns_of_a_projection() -> None:
    attn = latent_layer(4)
    b, reference = (latent_batch([1, 1], [20, 5], attn) for _ in range(2))
    q, kv = new_tokens(b, attn)
    both = torch.cat([q, kv], 1)
    got, _ = run(both[:, : q.shape[1]], both[:, q.shape[1] :], attn, b)
    assert error(got, mla_reference(q, kv, attn, reference)) < LIMIT


@settings(max_examples=n_examples(3), deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 120)), min_size=1, max_size=5).filter(
        lambda rows: any(n for n, _ in rows)
    ),
    tile_tokens=st.sampled_from([1, 2, 4]),
    max_partials=st.integers(0, 24),
    item_cost=st.sampled_from([0.0, 4.0]),
)
def test_any_rows_with_any_scratch(
    rows: list[tuple[int, int]], tile_tokens: int, max_partials: int, item_cost: float
) -> None:
    attn = latent_layer(4, nope=16, v_dim=16)
    b, reference = (latent_batch([n for n, _ in rows], [n + c if n else 0 for n, c in rows], attn) for _ in range(2))
    q, kv = new_tokens(b, attn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_splits, "sm_count", lambda: 132)
        patch.setattr(latent_splits, "partial_room", lambda: 24)
        patch.setattr(latent_splits, "ITEM_COST", item_cost)
        got, _ = run(q, kv, attn, b, tile_tokens=tile_tokens, max_partials=max_partials)
    assert error(got, mla_reference(q, kv, attn, reference)) < LIMIT


def test_a_plan_covers_every_key_once(many_sms: None) -> None:
    attn = latent_layer(4)
    contexts = [0, 700, 1, 90, 16]
    b = latent_batch([1] * 5, contexts, attn)
    table = plan(b, attn, TILE, 1, 24).table.tolist()
    covered: dict[int, list[int]] = {}
    for row, tile, split, n_splits, per_split, *_ in table:
        if row >= 0:
            assert tile == 0
            assert split < n_splits
            begin = split * per_split * TILE.keys
            covered.setdefault(row, []).extend(range(begin, min(begin + per_split * TILE.keys, contexts[row])))
    assert covered == {row: list(range(n)) for row, n in enumerate(contexts) if n}
    used = [first + split for row, _, split, n, _, first, *_ in table if row >= 0 and n > 1]
    assert used == list(range(len(used)))  # partial results lie one after another
    assert len(used) > 1
    split_tiles = [entry[6] for entry in table if entry[6] >= 0]
    assert [table[item][0] for item in split_tiles] == [
        row for row, _, split, n, *_ in table if n > 1 and not split and row >= 0
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize(("rows", "context", "new"), [(1, 4000, 1), (7, 576, 1), (64, 300, 1), (1, 1, 1), (3, 500, 7)])
def test_production_shapes(heads: int, rows: int, context: int, new: int, hopper: bool) -> None:
    attn = latent_layer(heads, 512, 128, 64, 128)
    contexts = [max(new, context - 37 * r) for r in range(rows)]
    b, reference = (latent_batch([new] * rows, contexts, attn) for _ in range(2))
    q, kv = new_tokens(b, attn)
    per_tile = 1 if new == 1 else tile_tokens(heads)
    tile = latent_tile(per_tile * heads, 512, 64)
    if tile.hopper != hopper:
        tile = LatentTile(64, 64, 2, 8) if tile.hopper else pytest.skip("needs a Hopper GPU")
    want = mla_reference(q, kv, attn, reference)
    got = [run(q, kv, attn, b, tile, per_tile, max_partials=264)[0] for _ in range(3)]
    assert error(got[0], want) < LIMIT
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


def test_project_values_of_many_tokens() -> None:
    x, v_up = noise(70, 3, 32, seed=1), noise(3, 40, 32, seed=2)
    out = torch.full((70, 120), torch.nan, device=DEVICE, dtype=x.dtype)
    project_values(x, v_up, out)
    assert error(out.view(70, 3, 40), torch.einsum("thl,hvl->thv", x.float(), v_up.float())) < LIMIT
