"""Whole models against transformers, in prefill chunks and token by token."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.gpu.backend.workspace import WorkspaceSizes
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.registry import load_model
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.weights.checkpoint import open_checkpoint

LENGTH, SPLIT = 150, 96  # tokens of a sequence, and of its first chunk
TOLERANCE = 0.03  # relative, of bf16 through a few layers against float32


def small_models() -> dict[str, Any]:
    """Small transformers configurations."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

    common = dict(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    gemma = common | {"num_hidden_layers": 6, "sliding_window": 40, "query_pre_attn_scalar": 64}
    return {
        "llama": LlamaConfig(**common, head_dim=64, tie_word_embeddings=False),
        "qwen3": Qwen3Config(**common, head_dim=128, tie_word_embeddings=True),
        "gemma3": Gemma3TextConfig(**gemma, head_dim=64),
    }


def against_transformers(device: str = "cuda") -> dict[str, float]:
    """Relative error of a sequence's logits by architecture; raises beyond the tolerance."""
    from transformers import AutoModelForCausalLM

    errors = {}
    for name, config in small_models().items():
        torch.manual_seed(1)
        config.torch_dtype = torch.bfloat16
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours = load_model(open_checkpoint(Path(folder)), device=device)
        theirs = theirs.to(device, torch.float32).eval()
        ids = torch.randint(0, config.vocab_size, (LENGTH,))
        with torch.no_grad():
            expected = theirs(ids[None].to(device)).logits[0].float()
        found = logits(ours, ids, device)
        errors[name] = float((found - expected).norm() / expected.norm())
        if not errors[name] < TOLERANCE:
            raise AssertionError(f"{name}: logits have a relative error of {errors[name]:.3f}")
    return errors


def logits(model: Decoder, ids: Tensor, device: str) -> Tensor:
    """Logits of every position: a first chunk, a second one, then single tokens."""
    n_blocks = -(-len(ids) // BLOCK_TOKENS) + 1
    model.kernels.reserve(WorkspaceSizes.of(model, len(ids), 1, len(ids)))
    kv = [
        torch.zeros(
            n_blocks,
            *group.block_shape,
            dtype=getattr(torch, group.dtype),
            device=device,
        )
        for group in model.kv_groups
    ]
    table = 1 + torch.randperm(n_blocks - 1)
    parts = [(0, SPLIT), (SPLIT, len(ids) - 8), *((n, n + 1) for n in range(len(ids) - 8, len(ids)))]
    return torch.cat([model.forward(_step(ids, table, model, *part, device), kv).clone() for part in parts])


def _step(ids: Tensor, table: Tensor, model: Decoder, start: int, end: int, device: str) -> StepInputs:
    def ints(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    return StepInputs(
        token_ids=ints(ids[start:end]),
        positions=ints(range(start, end)),
        query_starts=ints([0, end - start]),
        context_lens=ints([end]),
        block_tables=[ints(table[None]).contiguous() for _ in model.kv_groups],
        sample_tokens=torch.arange(end - start, device=device),
    )
