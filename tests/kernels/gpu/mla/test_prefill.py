"""Expanded MLA of chunks against plain PyTorch, with a plain attention in the library's place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu import cudnn_attention, fa3_attention
from emberline.kernels.gpu.long_attention import long_attention
from emberline.kernels.gpu.mla.prefill import (
    attend_expanded,
    expand_latents,
    expanded_elements,
    expanded_tokens,
    warm_up_expanded,
)
from emberline.kernels.gpu.mla.projections import rotate_and_cache
from tests.kernels.gpu.batches import DEVICE, LIMIT, error, noise
from tests.kernels.gpu.mla.layers import cached_rows, latent_batch, latent_layer, mla_reference, new_tokens, rotary
from tests.kernels.gpu.test_fa3_attention import plain_attention


def expanded(n: int, context: int, capacity: int, library: Any, attn: Any) -> tuple[torch.Tensor, torch.Tensor]:
    b, reference = (latent_batch([n], [context], attn) for _ in range(2))
    q, kv = new_tokens(b, attn)
    want = mla_reference(q, kv, attn, reference)
    pool = b.pool[:, attn.layer_index]
    rotate_and_cache(q, kv, attn, rotary(b, attn), pool, b.tables[0], b.positions)
    assert error(b.pool[1:], reference.pool[1:]) < LIMIT
    out = torch.full((n, attn.heads, attn.v_dim), torch.nan, dtype=q.dtype, device=DEVICE)
    memory = noise(capacity * (attn.kv_lora + attn.heads * (attn.nope_dim + attn.rope_dim + attn.v_dim)))
    attend_expanded(q.view(n, attn.heads, -1), attn, library, pool, b.tables[0], context, memory, out)
    return out.flatten(1), want


@pytest.mark.parametrize(("n", "context", "capacity"), [(20, 20, 64), (20, 90, 64), (7, 100, 32), (40, 75, 16)])
def test_a_chunk_and_its_context(n: int, context: int, capacity: int) -> None:
    """Also a chunk longer than a segment, and segments that begin anywhere in a block."""
    got, want = expanded(n, context, capacity, SimpleNamespace(forward=plain_attention), latent_layer(3))
    assert error(got, want) < LIMIT


def test_expanded_keys_and_values() -> None:
    attn = latent_layer(5)
    b = latent_batch([1], [60], attn)
    memory = noise(expanded_elements(5, 40, 24, 32, 4) // expanded_tokens(5, 40, 24, 4) * 33)
    k, v = expand_latents(attn, b.pool[:, 1], b.tables[0], 21, 33, memory)
    rows = cached_rows(b, 0, 60, attn)[21:54].float()
    want = torch.einsum("tl,hdl->thd", rows[:, :32], attn.k_up.float())
    assert error(k[..., :24], want) < LIMIT
    assert torch.equal(k[..., 24:], rows[:, None, 32:].to(k.dtype).expand(-1, 5, -1))
    assert error(v, torch.einsum("tl,hdl->thd", rows[:, :32], attn.v_up.float())) < LIMIT


@pytest.mark.parametrize("has_plans", [True, False])
def test_a_library_that_plans_is_run_at_every_length_before_prompts_come(has_plans: bool) -> None:
    attn, seen = latent_layer(3), []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> None:
        assert (q.shape[1:], k.shape[1:], v.shape[1:]) == ((3, 40), (3, 40), (3, 24))
        assert len(k) == len(v)
        seen.append((len(q), len(k), causal))

    memory = noise(300 * (attn.kv_lora + attn.heads * (attn.nope_dim + attn.rope_dim + attn.v_dim)))
    library: Any = SimpleNamespace(forward=forward, has_plans=has_plans)
    assert all(warm_up_expanded(noise(128, 3, 40), attn, library, memory))
    causal = [(64, 64, True), (128, 128, True)]
    assert seen == ([*causal, *((n, m, False) for n in (64, 128) for m in (64, 128, 256))] if has_plans else causal[:1])


def test_heads_that_no_library_takes_attend_absorbed() -> None:
    for library in cudnn_attention, fa3_attention:
        assert not library.supports_expanded(40, 24)
    assert fa3_attention.supports_expanded(192, 128)
    assert fa3_attention.supports_expanded(256, 256)
    assert not fa3_attention.supports_expanded(256, 128)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "context", "capacity"), [(300, 300, 4096), (700, 5000, 2048)])
@pytest.mark.parametrize(("heads", "nope", "v_dim"), [(16, 128, 128), (20, 192, 256)])
def test_libraries(n: int, context: int, capacity: int, heads: int, nope: int, v_dim: int) -> None:
    got, want = expanded(n, context, capacity, long_attention(), latent_layer(heads, 512, nope, 64, v_dim))
    assert error(got, want) < LIMIT
    assert fa3_attention.is_available() == (long_attention() is fa3_attention)
