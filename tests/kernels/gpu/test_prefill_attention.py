"""Paged attention of prefill chunks against plain PyTorch, over shapes that hit every tail."""

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu.prefill_attention import PrefillTile, prefill_attention
from tests.kernels.gpu.batches import DEVICE, LIMIT, attention, attention_reference, batch, error, everyday, noise

SHAPES = [(4, 2, 64), (3, 1, 64), (8, 2, 96), (4, 4, 128), (2, 1, 256)]
SWEEP = [(*shape, window) for window, shape in product((None, 40), SHAPES)]
# An even and an odd group of query heads, a padded and a large head dimension, with and without a window.
KEEP = [(4, 2, 64, None), (8, 2, 96, None), (3, 1, 64, 40), (2, 1, 256, 40)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), everyday(SWEEP, KEEP))
def test_chunks(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    attn = attention(heads, kv_heads, dim, window)
    b = batch([3, 0, 20, 1, 17], [3, 0, 90, 65, 64], attn)
    q = noise(b.tokens, heads * dim, seed=4)
    out, rows = torch.full_like(q, torch.nan), (b.query_starts, b.context_lens, b.tokens)
    prefill_attention(q, out, attn, b.pool[:, 1], b.tables, *rows, tile=PrefillTile(32, 32, 2, 4))
    assert error(out, attention_reference(q, attn, b)) < LIMIT


@pytest.mark.parametrize(
    "variant",
    [{"sinks": 1}, {"sinks": 1, "window": 40}, {"chunk": 64}, {"chunk": 24}, {"chunk": 41, "sinks": 1}],
    ids=lambda variant: " ".join(f"{k} {v}" for k, v in variant.items()),
)
def test_sinks_and_chunks(variant: dict[str, int]) -> None:
    more: dict[str, Any] = dict(variant)
    if "sinks" in more:
        more["sinks"] = noise(4, seed=6).float()
    attn = attention(4, 2, 64, **more)
    b = batch([3, 0, 20, 1, 17], [3, 0, 140, 65, 64], attn)  # whole chunks, and chunk boundaries within a tile
    q = noise(b.tokens, 4 * 64, seed=4)
    out, rows = torch.full_like(q, torch.nan), (b.query_starts, b.context_lens, b.tokens)
    prefill_attention(q, out, attn, b.pool[:, 1], b.tables, *rows, tile=PrefillTile(32, 32, 2, 4))
    assert error(out, attention_reference(q, attn, b)) < LIMIT


def test_a_query_does_not_depend_on_chunk_boundaries() -> None:
    attn = attention(4, 2, 64)
    b = batch([50], [150], attn)
    q = noise(50, 4 * 64, seed=4)
    whole, parts = torch.empty_like(q), torch.empty_like(q)
    prefill_attention(q, whole, attn, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, 50)
    for start, stop in ((0, 1), (1, 30), (30, 50)):
        starts = torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE)
        context = torch.tensor([100 + stop], dtype=torch.int32, device=DEVICE)
        out = torch.empty_like(q[start:stop])
        prefill_attention(q[start:stop].clone(), out, attn, b.pool[:, 1], b.tables, starts, context, stop - start)
        parts[start:stop] = out
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("window", [None, 40])
def test_image_tokens_see_their_whole_image(window: int | None) -> None:
    attn = attention(4, 2, 64, window)
    b = batch([3, 0, 60, 1, 17], [3, 0, 90, 65, 64], attn)
    seen = b.positions.clone()
    seen[3 + 4 : 3 + 36] = 30 + 35  # an image at positions 34 .. 65 of the third row
    seen[64:81] = 63  # the whole chunk of the last one
    q = noise(b.tokens, 4 * 64, seed=4)
    out, rows = torch.full_like(q, torch.nan), (b.query_starts, b.context_lens, b.tokens)
    prefill_attention(
        q, out, attn, b.pool[:, 1], b.tables, *rows, tile=PrefillTile(32, 32, 2, 4), last_visible=seen
    )  # fmt: skip
    assert error(out, attention_reference(q, attn, b, seen)) < LIMIT
    assert error(out, attention_reference(q, attn, b)) > 0.01
