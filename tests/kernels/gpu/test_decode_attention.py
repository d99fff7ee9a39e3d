"""Paged decode attention and cascade attention against plain PyTorch, over shapes that hit every tail."""

from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.backend import GroupedQueryAttention, QueryTemperature, Rope
from emberline.kernels.gpu.decode_attention import decode_attention, n_prefix_splits, shared_prefix_attention
from emberline.kernels.gpu.rope import rope_and_cache_reference, rotary_table, rotary_table_reference
from emberline.kernels.gpu.split_kv import (
    DECODE_SPLIT_FIELDS,
    FULL,
    locality,
    max_decode_splits,
    plan_decode_splits,
)
from tests.kernels.gpu.batches import (
    DEVICE,
    LIMIT,
    Batch,
    attention,
    attention_reference,
    batch,
    error,
    everyday,
    noise,
    rope,
)


def expected(qkv: Tensor, attn: GroupedQueryAttention, b: Batch) -> Tensor:
    """The reference; writes k and v of the new tokens into the batch's pool."""
    rotary = rotary_table_reference(b.positions, rope(attn.head_dim))
    q = rope_and_cache_reference(qkv, attn, rotary, b.pool[:, 1], b.tables, b.query_starts, b.positions)
    return attention_reference(q.flatten(1), attn, b)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def nans(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, device=DEVICE)


def run_decode(
    b: Batch,
    attn: GroupedQueryAttention,
    qkv: Tensor,
    shared: list[int] | None = None,
    prefix_lens: list[int] | None = None,
) -> Tensor:
    rows, heads, dim = len(b.context_lens), attn.heads, attn.head_dim
    rotary = rotary_table(b.positions, rope(dim), torch.empty(rows * dim, device=DEVICE))
    memory = ints([0] * max_decode_splits(rows, attn.kv_heads) * DECODE_SPLIT_FIELDS)
    lens = None if prefix_lens is None else ints(prefix_lens)
    splits = plan_decode_splits(b.context_lens, rows, attn.kv_heads, locality(attn.window, attn.chunk), lens, memory)
    out = nans(rows, heads * dim).to(qkv.dtype)
    counters, pool, prefix = ints([0] * (rows * attn.kv_heads)), b.pool[:, attn.layer_index], None
    if shared is not None and lens is not None:
        n = n_prefix_splits(rows, heads, attn.kv_heads)
        partial, stats = nans(n * rows * heads * dim), nans(n * rows * heads * 2)
        assert n == shared_prefix_attention(
            qkv, attn, rotary, pool, b.tables, ints(shared), b.positions, partial, stats, rows
        )  # fmt: skip
        prefix = (partial, stats, lens, n)
    partial, stats = nans(splits.n * heads * dim), nans(splits.n * heads * 2)
    decode_attention(qkv, out, attn, rotary, pool, b.tables, splits, partial, stats, counters, rows, prefix)
    assert not counters.any()
    return out


SHAPES = [(4, 2, 64), (3, 1, 64), (8, 2, 96), (4, 4, 128), (2, 1, 256)]
PLAIN, WINDOW_AND_NORM = (None, False), (40, True)
SWEEP = [(*shape, *how) for how, shape in product((PLAIN, WINDOW_AND_NORM), SHAPES)]
# An even and an odd group of query heads, a padded and a large head dimension, with and without window and QK norm.
KEEP = [(4, 2, 64, *PLAIN), (8, 2, 96, *PLAIN), (3, 1, 64, *WINDOW_AND_NORM), (2, 1, 256, *WINDOW_AND_NORM)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "norm"), everyday(SWEEP, KEEP))
def test_decode(heads: int, kv_heads: int, dim: int, window: int | None, norm: bool) -> None:
    attn = attention(heads, kv_heads, dim, window, norm)
    contexts = [1, 0, 17, 64, 300]
    b, reference = (batch([1] * len(contexts), contexts, attn) for _ in range(2))
    qkv = noise(b.tokens, (heads + 2 * kv_heads) * dim, seed=3)
    want = expected(qkv, attn, reference)
    got = run_decode(b, attn, qkv)
    real = b.context_lens > 0
    assert error(got[real], want[real]) < LIMIT
    assert got[~real].isnan().all()  # padding rows are not written
    assert error(b.pool[1:], reference.pool[1:]) < LIMIT


VARIANTS = {
    "sinks": lambda: attention(8, 2, 64, sinks=noise(8, seed=6).float()),
    "sinks and a window": lambda: attention(8, 2, 64, 40, sinks=noise(8, seed=6).float()),
    "chunks": lambda: attention(4, 2, 64, chunk=48, l2_norm=True),
    "chunks that cut blocks": lambda: attention(4, 2, 64, chunk=41),
    "no RoPE": lambda: attention(4, 2, 64, rope=False, temperature=QueryTemperature(0.1, 30)),
    "norms and temperature": lambda: attention(4, 2, 64, None, True, temperature=QueryTemperature(0.4, 30)),
}


@pytest.mark.parametrize("variant", everyday(VARIANTS, ["sinks and a window", "chunks", "no RoPE"]))
def test_variants_of_attention(variant: str) -> None:
    """GPT-OSS has sinks; Llama 4 chunks with QK norms, and layers without RoPE whose queries have a temperature."""
    attn = VARIANTS[variant]()
    contexts = [1, 0, 49, 64, 200]
    b, reference = (batch([1] * len(contexts), contexts, attn) for _ in range(2))
    qkv = noise(b.tokens, (attn.heads + 2 * attn.kv_heads) * attn.head_dim, seed=3)
    want = expected(qkv, attn, reference)
    real = b.context_lens > 0
    assert error(run_decode(b, attn, qkv)[real], want[real]) < LIMIT
    assert error(b.pool[1:], reference.pool[1:]) < LIMIT


def test_few_rows_are_split_and_many_are_not() -> None:
    attn = attention(4, 2, 64)
    memory = torch.empty(10**5, dtype=torch.int32, device=DEVICE)
    one = plan_decode_splits(ints([3000]), 1, attn.kv_heads, (FULL, 0), None, memory)
    rows, begins, ends = (one.table[:, i].tolist() for i in (0, 3, 4))
    n = sum(row == 0 for row in rows)
    assert 1 < n <= max_decode_splits(1, attn.kv_heads)
    assert begins[1:n] == ends[: n - 1]  # no gap
    assert (begins[0], ends[n - 1]) == (0, 2999)
    table = plan_decode_splits(ints([640] * 700), 700, attn.kv_heads, (FULL, 0), None, memory).table
    assert (table[:700, 0] == torch.arange(700, device=DEVICE)).all()
    assert (table[700:, 0] == -1).all()


@pytest.mark.parametrize("variant", everyday(["plain", "sinks", "no RoPE"], ["sinks"]))
def test_cascade_attention(variant: str) -> None:
    attn = VARIANTS.get(variant, lambda: attention(8, 2, 64))()
    b, reference = (batch([1] * 5, [130, 200, 129, 90, 0], attn) for _ in range(2))
    for tables in (b.tables, reference.tables):
        tables[1:3, :8] = tables[0, :8]
    qkv = noise(5, (attn.heads + 4) * 64, seed=3)
    want = expected(qkv, attn, reference)
    got = run_decode(b, attn, qkv, shared=[1, 128], prefix_lens=[128, 128, 128, 0, 0])
    assert error(got[:4], want[:4]) < LIMIT
    without_prefix = run_decode(b, attn, qkv, shared=[0, 0], prefix_lens=[0] * 5)
    assert error(without_prefix[:4], want[:4]) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("context", [576, 5000, 40_000])
@pytest.mark.parametrize("rows", [1, 3, 17, 130])
def test_decode_of_many_and_long_rows(rows: int, context: int) -> None:
    if rows * context > 10**6:
        pytest.skip("more KV cache than a test should take")
    attn = attention(32, 8, 128)
    contexts = [max(1, context - 37 * r) for r in range(rows)]
    b, reference = (batch([1] * rows, contexts, attn) for _ in range(2))
    qkv = noise(rows, 48 * 128, seed=3)
    want = expected(qkv, attn, reference)
    for _ in range(3):  # the counters are reset, and the order of the merge is fixed
        got = run_decode(b, attn, qkv)
        assert error(got, want) < LIMIT
    assert torch.equal(got, run_decode(b, attn, qkv))


@pytest.mark.parametrize("tokens", [1, 7])
def test_rotary_tables_of_three_positions(tokens: int) -> None:
    """M-RoPE: each frequency is rotated by the position of time, height or width."""
    axes = torch.tensor([0, 1, 2] * 10 + [0, 0], device=DEVICE)
    by_axis = Rope(rope(64).inverse_frequencies, 1.5, axes)
    positions = torch.arange(3 * tokens, dtype=torch.int32, device=DEVICE).view(3, tokens) ** 2
    found = rotary_table(positions, by_axis, torch.empty(tokens * 64, device=DEVICE))
    for got, wanted in zip(found, rotary_table_reference(positions, by_axis)):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
