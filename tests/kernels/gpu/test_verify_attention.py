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
N_TOKENS = {"plain": 5, "odd group": 3, "window": 9, "small window": 16, "large heads": 2}


def run_verify(b, attn: GroupedQueryAttention, qkv, n_tokens: int):
    rows, dim = len(b.context_lens), attn.head_dim
    rotary = rotary_table(b.positions, rope(dim), torch.empty(rows * n_tokens * dim, device=DEVICE))
    memory = ints([0] * max_decode_splits(rows, attn.kv_heads) * DECODE_SPLIT_FIELDS)
    local, queries = locality(attn.window, attn.chunk), verify_queries(n_tokens, attn.heads // attn.kv_heads)
    splits = plan_decode_splits(b.context_lens, rows, attn.kv_heads, local, None, memory, n_tokens, queries)
    out, counters = nans(rows * n_tokens, attn.heads * dim).to(qkv.dtype), ints([0] * (rows * attn.kv_heads))
    partial = nans(verify_partial_floats(rows, n_tokens, attn.kv_heads, attn.heads // attn.kv_heads, dim))
    verify_attention(qkv, out, attn, rotary, b.pool[:, 1], b.tables, splits, partial, counters, n_tokens)
    assert not counters.any()
    return out


@pytest.mark.parametrize("case", everyday(CASES, ["plain", "odd group", "window", "chunks", "sinks and a window"]))
def test_rows_of_several_tokens(case: str) -> None:
    attn, n_tokens = CASES[case](), N_TOKENS.get(case, 4)
    contexts = [n_tokens, 0, n_tokens + 14, 64, 300]
    b, reference = (batch([n_tokens] * len(contexts), contexts, attn) for _ in range(2))
    qkv = noise(b.tokens, (attn.heads + 2 * attn.kv_heads) * attn.head_dim, seed=3)
    want = expected(qkv, attn, reference)
    got = run_verify(b, attn, qkv, n_tokens)
    real = (b.context_lens > 0).repeat_interleave(n_tokens)
    assert error(got[real], want[real]) < LIMIT
    assert got[~real].isnan().all()  # padding rows are not written
    assert error(b.pool[1:], reference.pool[1:]) < LIMIT


def test_wide_groups_are_left_to_the_prefill_kernel() -> None:
    assert verifies(16, 8)
    assert not verifies(16, 16)
    assert not verifies(1, 4)
    assert not verifies(17, 1)
