"""Attention of long chunks on gathered keys, with a plain attention in cuDNN's place where there is no GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.gpu import cudnn_attention
from emberline.kernels.gpu.gathered_kv import SEGMENT_TOKENS, gather_kv, merge_by_lse
from emberline.kernels.gpu.long_attention import gathered_elements
from emberline.kernels.gpu.prefill_attention import prefill_attention
from tests.kernels.gpu.batches import DEVICE, LIMIT, attention, attention_reference, batch, error, keys_values, noise


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float() for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k), device=DEVICE).triu(1).bool(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out.contiguous(), scores.logsumexp(-1).T.contiguous()


def test_gathered_parts_merge_to_the_whole() -> None:
    attn = attention(4, 2, 64)
    b = batch([8], [88], attn)
    q = noise(8, 4, 64, seed=4)
    keys, values = keys_values(b, 0, 88)
    out, lse = plain_attention(q, keys[80:], values[80:], attn.scale, True)
    for first, tokens, exact in ((0, 48, True), (48, 32, False)):
        memory = [torch.full((48 * 2 * 64,), torch.nan, dtype=q.dtype, device=DEVICE) for _ in range(2)]
        k, v = (cudnn_attention.kv_view(t, tokens, attn, exact) for t in memory)
        gather_kv(b.pool[:, 1], b.tables[0], first, tokens, k, v)
        assert torch.equal(k, keys[first : first + tokens])
        assert torch.equal(v, values[first : first + tokens])
        merge_by_lse(out, lse, *plain_attention(q, k, v, attn.scale, False))
    assert error(out.flatten(1), attention_reference(q.flatten(1), attn, b)) < LIMIT


def test_segments_cover_a_context_once() -> None:
    for context in (0, 16, 4096, 5000, 32768, 70000):
        for exact_chunk in (False, True):
            end = 0
            for first, tokens, exact in cudnn_attention._segments(context, exact_chunk):
                assert (first, exact) == (end, exact and tokens % cudnn_attention.ROUND_CONTEXT == 0)
                assert 0 < tokens <= SEGMENT_TOKENS
                end = first + tokens
            assert end == context


@pytest.mark.parametrize(("context", "sinks"), [(24, False), (40, True), (88, False)])
def test_a_chunk_and_its_context_in_segments(context: int, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_attention, "forward", plain_attention)
    monkeypatch.setattr(cudnn_attention, "SEGMENT_TOKENS", 32)  # a few blocks
    attn, n = attention(4, 2, 64, sinks=noise(4, seed=6).float() if sinks else None), 24
    b = batch([n], [context], attn)
    q = noise(n, 4 * 64, seed=4)
    out = torch.full_like(q, torch.nan)
    keys, values = keys_values(b, 0, context)
    new_kv, memory = (keys[-n:], values[-n:]), noise(2 * (n + 32) * 2 * 64)
    got = cudnn_attention.attend(q, new_kv, attn, b.pool[:, 1], b.tables[0], context, memory, out)
    assert error(got, attention_reference(q, attn, b)) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "context"), [(2048, 2048), (2048, 10_000), (1500, 6516), (4096, 36_864)])
def test_cudnn_on_gathered_blocks(n: int, context: int) -> None:
    attn = attention(8, 2, 128)
    b = batch([n], [context], attn)
    q = noise(n, 8 * 128, seed=4)
    out, triton_out = torch.empty_like(q), torch.empty_like(q)
    memory = noise(gathered_elements(n, 2 * 128))
    new_kv = cudnn_attention.new_kv(memory, attn, n, True)
    for target, source in zip(new_kv, keys_values(b, 0, context), strict=True):
        target.copy_(source[-n:])
    got = cudnn_attention.attend(q, new_kv, attn, b.pool[:, 1], b.tables[0], context, memory, out)
    prefill_attention(q, triton_out, attn, b.pool[:, 1], b.tables, b.query_starts, b.context_lens, n)
    assert error(got, triton_out) < LIMIT
