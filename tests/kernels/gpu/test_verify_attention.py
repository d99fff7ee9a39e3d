"""Attention of decode rows with several tokens against plain PyTorch."""

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.gpu.rope import rotary_table
from emberline.kernels.gpu.split_kv import DECODE_SPLIT_FIELDS, locality, max_decode_splits, plan_decode_splits
from emberline.kernels.gpu.verify_attention import verifies, verify_attention, verify_partial_floats, verify_queries
from tests.kernels.gpu.batches import DEVICE, LIMIT, attention, batch, error, everyday, noise, rope
from tests.kernels.gpu.test_decode_attention import VARIANTS, expected, ints, nans

CASES = {
    "plain": lambda: attention(8, 2, 64),
    "odd group": lambda: attention(3, 1, 96, None, True),
    "window": lambda: attention(4, 2, 64, 40, True),
    "small window": lambda: attention(4, 2, 64, 5),
    "large heads": lambda: attention(2, 1, 256),
    **VARIANTS,
}
LENGTHS = {"plain": (5, 2, 1, 16, 3), "window": (9,) * 5, "small window": (16, 4, 1, 9, 16)}


def run_verify(b, attn: GroupedQueryAttention, qkv):
    rows, dim, group = len(b.context_lens), attn.head_dim, attn.heads // attn.kv_heads
    rotary = rotary_table(b.positions, rope(dim), torch.empty(b.tokens * dim, device=DEVICE))
    memory = ints([0] * max_decode_splits(rows, attn.kv_heads) * DECODE_SPLIT_FIELDS)
    local, starts = locality(attn.window, attn.chunk), b.query_starts
    splits = plan_decode_splits(b.context_lens, rows, attn.kv_heads, local, None, memory, starts, verify_queries(group))
    out, counters = nans(b.tokens, attn.heads * dim).to(qkv.dtype), ints([0] * (rows * attn.kv_heads))
    partial = nans(verify_partial_floats(rows, attn.kv_heads, group, dim))
    verify_attention(qkv, out, attn, rotary, b.pool[:, 1], b.tables, starts, splits, partial, counters)
    assert not counters.any()
    return out


@pytest.mark.parametrize("case", everyday(CASES, ["plain", "odd group", "window", "chunks", "sinks and a window"]))
def test_rows_of_several_tokens(case: str) -> None:
    attn, lengths = CASES[case](), LENGTHS.get(case, (4, 1, 2, 7, 3))
    contexts = [lengths[0], 0, lengths[2] + 14, 64, 300]
    b, reference = (batch(list(lengths), contexts, attn) for _ in range(2))
    qkv = noise(b.tokens, (attn.heads + 2 * attn.kv_heads) * attn.head_dim, seed=3)
    want = expected(qkv, attn, reference)
    got = run_verify(b, attn, qkv)
    real = (b.context_lens > 0).repeat_interleave(torch.tensor(lengths, device=DEVICE))
    assert error(got[real], want[real]) < LIMIT
    assert got[~real].isnan().all()  # padding rows are not written
    assert error(b.pool[1:], reference.pool[1:]) < LIMIT


def test_wide_groups_are_left_to_the_prefill_kernel() -> None:
    assert verifies(8)
    assert not verifies(16)
