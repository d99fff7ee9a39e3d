"""Names of the tensors of vision towers and projectors → canonical names: those of llama.cpp's mmproj files.

Names of Hugging Face checkpoints differ by family, and by the version of transformers that wrote them.
"""

import re
from functools import lru_cache

from emberline.weights.model_config import BadCheckpoint

_SIGLIP_PARTS = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "encoder.layers.*.layer_norm1": "v.blk.*.ln1",
    "encoder.layers.*.layer_norm2": "v.blk.*.ln2",
    "encoder.layers.*.self_attn.q_proj": "v.blk.*.attn_q",
    "encoder.layers.*.self_attn.k_proj": "v.blk.*.attn_k",
    "encoder.layers.*.self_attn.v_proj": "v.blk.*.attn_v",
    "encoder.layers.*.self_attn.out_proj": "v.blk.*.attn_out",
    "encoder.layers.*.mlp.fc1": "v.blk.*.ffn_up",
    "encoder.layers.*.mlp.fc2": "v.blk.*.ffn_down",
}
_PIXTRAL_LAYER = {
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
_QWEN3_VL_LAYER = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_KIMI_LAYER = {
    "norm0": "ln1",
    "norm1": "ln2",
    "wqkv": "attn_qkv",
    "wo": "attn_out",
    "mlp.fc0": "ffn_up",
    "mlp.fc1": "ffn_down",
}


def _within(
    prefix: str, parts: dict[str, str], layers: str = "", layer_parts: dict[str, str] | None = None
) -> dict[str, str]:
    """Names with the family's prefixes: those outside the blocks, and those of a block."""
    blocks = {f"{prefix}.{layers}.*.{part}": f"v.blk.*.{name}" for part, name in (layer_parts or {}).items()}
    return {f"{prefix}.{part}": name for part, name in parts.items()} | blocks


# Modules by family, after the prefix `model.`, which some checkpoints have.
_MODULES: dict[str, dict[str, str]] = {
    "idefics3": _within("vision_model", _SIGLIP_PARTS) | {"connector.modality_projection.proj": "mm.model.fc"},
    "siglip": _within("vision_tower.vision_model", _SIGLIP_PARTS)
    | _within("vision_tower", _SIGLIP_PARTS)
    | {
        "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
        "multi_modal_projector.mm_input_projection": "mm.input_projection",
    },
    "pixtral": _within(
        "vision_tower", {"patch_conv": "v.patch_embd", "ln_pre": "v.pre_ln"}, "transformer.layers", _PIXTRAL_LAYER
    )
    | {
        "multi_modal_projector.norm": "mm.input_norm",
        "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
    },
    "qwen3_vl": _within(
        "visual",
        {
            "patch_embed.proj": "v.patch_embd",
            "pos_embed": "v.position_embd",
            "merger.norm": "v.post_ln",
            "merger.linear_fc1": "mm.0",
            "merger.linear_fc2": "mm.2",
            "deepstack_merger_list.*.norm": "v.deepstack.*.norm",
            "deepstack_merger_list.*.linear_fc1": "v.deepstack.*.fc1",
            "deepstack_merger_list.*.linear_fc2": "v.deepstack.*.fc2",
        },
        "blocks",
        _QWEN3_VL_LAYER,
    ),
    "kimi_k25": _within(
        "vision_tower",
        {
            "patch_embed.proj": "v.patch_embd",
            "patch_embed.pos_emb": "v.position_embd",
            "encoder.patch_embed.proj": "v.patch_embd",
            "encoder.patch_embed.pos_emb": "v.position_embd",
            "encoder.final_layernorm": "v.post_ln",
        },
        "encoder.blocks",
        _KIMI_LAYER,
    )
    | {"mm_projector.pre_norm": "mm.input_norm", "mm_projector.proj.0": "mm.1", "mm_projector.proj.2": "mm.2"},
}
# Beginnings of the names of the towers' tensors, of any family: the language model has none of them.
VISION_TENSOR = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|connector|mm_projector|multi_modal_projector)\."
)
_NUMBER = re.compile(r"\.(\d{1,4})(?=\.)")
_POOLING_HEAD = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?head\.")  # SigLIP's, which no projector reads


def vision_tensor(key: str, family: str) -> str | None:
    """Canonical name of a tower's tensor. Returns None if it is none; raises BadCheckpoint if it is unknown."""
    if not VISION_TENSOR.match(key) or _POOLING_HEAD.match(key):
        return None
    name = _form(key, family)
    if name is not None:
        return name
    name = _form(_NUMBER.sub(".*", key), family)
    if name is None:
        raise BadCheckpoint(f"tensor {key[:120]!r} has no place in a vision tower of the family {family}")
    return name.format(*(int(number) for number in _NUMBER.findall(key)))


@lru_cache(512)
def _form(key: str, family: str) -> str | None:
    """Canonical name of a key, with `{}` in place of `*`. Returns None if the family has no such tensor."""
    module, _, kind = key.removeprefix("model.").replace("projection_weight", "projection.weight").rpartition(".")
    name = _MODULES[family].get(module)
    return f"{name}.{kind}".replace("*", "{}") if name is not None and kind in ("weight", "bias") else None
