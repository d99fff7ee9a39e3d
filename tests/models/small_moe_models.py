"""Small random models of the architectures with a mixture of experts, saved by transformers."""

from pathlib import Path
from typing import Any

import torch

from tests.lazy_modules import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT
    | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN}
    | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": _LATENT | {"q_lora_rank": 24, "n_group": 1, "topk_group": 1},
    "qwen3_moe": {
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
        "floor_scale": 16,
        "attn_scale": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "gpt_oss": {
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_parameters": {**_YARN, "beta_fast": 32.0, "truncate": False, "mscale": None, "mscale_all_dim": None},
    },
}


def small_model(kind: str, std: float = 0.15, **changes: object) -> Any:
    """A model of transformers in float32, its norms and biases random too: by default they would hide mistakes."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **(_SIZES | MODELS[kind] | changes))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        with torch.no_grad():
            if tensor.dim() == 1:
                tensor.copy_(torch.randn_like(tensor) * 0.2 + (1 if "norm" in name else 0))
            else:
                tensor.copy_(torch.randn_like(tensor) * std)
    return model


def save_small_model(folder: Path, kind: str, std: float = 0.15, **changes: object) -> Any:
    model = small_model(kind, std, **changes)
    model.save_pretrained(folder)
    return model
