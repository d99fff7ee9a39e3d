"""Small random models with a vision tower, as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.lazy_modules import transformers

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
IMAGE_TOKEN_ID = 90
_SIGLIP = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "idefics3": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": _SIGLIP | {"image_size": 32, "patch_size": 4},
        "scale_factor": 2,
        "image_token_id": IMAGE_TOKEN_ID,
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": _SIGLIP | {"image_size": 32, "patch_size": 4},
        "scale_factor": 4,
        "image_token_id": IMAGE_TOKEN_ID,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 8},
        "vision_config": _SIGLIP | {"image_size": 32, "patch_size": 4, "vision_use_head": False},
        "mm_tokens_per_image": 16,
        "image_token_index": IMAGE_TOKEN_ID,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "head_dim": 12,
            "image_size": 64,
            "patch_size": 4,
            "hidden_act": "silu",
        },
        "spatial_merge_size": 2,
        "image_token_index": IMAGE_TOKEN_ID,
    },
    "qwen3_vl": {
        "text_config": TEXT
        | {"num_hidden_layers": 4, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": {
            "depth": 4,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_heads": 4,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        "image_token_id": IMAGE_TOKEN_ID,
    },
    "kimi_k25": {
        "text_config": TEXT | _DEEPSEEK,
        "vision_config": {
            "patch_size": 4,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "intermediate_size": 64,
        },
        "projection_hidden_size": 48,
        "image_token_id": IMAGE_TOKEN_ID,
        "tie_word_embeddings": False,
    },
}
_PREPROCESSOR = {"idefics3": {"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}}}
_PREPROCESSOR["smolvlm"] = _PREPROCESSOR["idefics3"]


def save_vision_model(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, std: float = 0.15, **changes: Any
) -> Any:
    """Save a random model of the family, and return it. std: of its weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(MODELS[family] | changes))
    model = transformers.AutoModelForImageTextToText.from_config(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    if family == "kimi_k25":
        _restore_published_names(folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR.get(family, {})))
    return model


def _restore_published_names(path: Path) -> None:
    """Undo what transformers' renaming of the tower's layers does to the language model's when it saves."""
    tensors = {
        key.replace("language_model.model.blocks.", "language_model.model.layers."): tensor.clone()
        for key, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
