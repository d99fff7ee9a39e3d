"""Attention of long chunks by FlashAttention-3, with a plain attention in its place where there is no GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.gpu import cudnn_attention, fa3_attention, long_attention
from emberline.kernels.gpu.prefill_attention import prefill_attention
from tests.kernels.gpu.batches import LIMIT, attention, attention_reference, batch, error, keys_values, noise


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float() for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), device=q.device).triu(1 + len(k) - len(q)).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    result = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype).contiguous()
    if out is not None:
        out.copy_(result)
    return result, scores.logsumexp(-1).T


@pytest.mark.parametrize(
    ("context", "sinks", "alone"), [(24, False, True), (40, True, True), (40, False, False), (111, False, True)]
)
def test_a_chunk_and_its_context(context: int, sinks: bool, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call where the context fits the memory, here 48 tokens, and segments before it where it does not."""
    calls: list[tuple[int, bool]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *out: Any) -> tuple[Tensor, Tensor]:
        calls.append((len(k), causal))
        return plain_attention(q, k, v, scale, causal, *out)

    monkeypatch.setattr(fa3_attention, "forward", forward)
    attn, n = attention(4, 2, 64, sinks=noise(4, seed=6).float() if sinks else None), 24
    b = batch([n], [context], attn)
    q = noise(n, 4 * 64, seed=4)
    out, memory = torch.full_like(q, torch.nan), noise(2 * 48 * 2 * 64)
    new_kv = fa3_attention.new_kv(memory, attn, n, alone)
    assert (new_kv is not None) == alone
    for target, source in zip(new_kv or (), keys_values(b, 0, context)):
        target.copy_(source[-n:])
    got = fa3_attention.attend(q, new_kv, attn, b.pool[:, 1], b.tables[0], context, memory, out)
    assert got is out
    assert error(out, attention_reference(q, attn, b)) < LIMIT
    assert calls[0] == (min(context, 47 if context == 111 else 48), True)  # it begins at a block
    assert sum(tokens for tokens, _ in calls) == context


def test_which_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3_attention, "is_available", lambda: False)
    assert long_attention.long_attention() is cudnn_attention
    monkeypatch.setattr(fa3_attention, "is_available", lambda: True)
    library = long_attention.long_attention()
    assert library is fa3_attention
    assert long_attention.is_long(library, attention(4, 2, 64), 2048)
    assert not long_attention.is_long(library, attention(4, 2, 64), 2047)
    assert not long_attention.is_long(library, attention(4, 2, 64, 100), 4096)
    assert not long_attention.is_long(library, attention(4, 2, 64, chunk=100), 4096)
    assert not long_attention.is_long(library, attention(4, 2, 80), 4096)


@pytest.mark.gpu
@pytest.mark.skipif(not fa3_attention.is_available(), reason="needs the fa3-fwd wheel and a Hopper GPU")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("n", "context"), [(2048, 2048), (2048, 10_000), (1500, 6516), (4096, 36_864)])
def test_fa3_on_gathered_blocks(n: int, context: int, dim: int) -> None:
    attn = attention(8, 2, dim, sinks=noise(8, seed=6).float())
    b = batch([n], [context], attn)
    q = noise(n, 8 * dim, seed=4)
    out, triton_out = torch.empty_like(q), torch.empty_like(q)
    memory = noise(long_attention.gathered_elements(n, 2 * dim))
    fa3_attention.attend(q, None, attn, b.pool[:, 1], b.tables[0], context, memory, out)
    prefill_attention(q, triton_out, attn, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, n)
    assert error(out, triton_out) < LIMIT
