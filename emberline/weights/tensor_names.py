"""Names of a Hugging Face checkpoint's tensors → canonical names, which are GGUF's.

An expert's matrices are tensors of their own, `blk.N.ffn_gate_exps.E.weight`, whether the file has one tensor for each
or one for all. The suffix of a name (`weight`, `bias`, a quantized format's `weight_scale` …) is kept.
"""

import re
from functools import lru_cache

from emberline.weights.encoder_checkpoint import EncoderConfig, encoder_tensor
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.vision_names import VISION_TENSOR

_TOP = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
}
_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}


def _mlp(
    prefix: str, suffix: str = "", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    names = (f"ffn_gate{suffix}", f"ffn_up{suffix}", f"ffn_down{suffix}")
    return {f"{prefix}.{part}": name for part, name in zip(parts, names, strict=True)}


_DENSE = _ATTENTION | _mlp("mlp")
_GEMMA = _DENSE | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# `experts.*` stands for every expert, and its number stands behind the canonical name.
_EXPERTS = _mlp("mlp.experts.*", "_exps")
# Tensors of all experts of a layer, whose names have no suffix of their own.
_FUSED = {"mlp.experts.gate_up_proj": "ffn_gate_up_exps", "mlp.experts.down_proj": "ffn_down_exps"}
_DEEPSEEK = (
    _DENSE
    | _LATENT
    | _EXPERTS
    | _mlp("mlp.shared_experts", "_shexp")
    | {"mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction": "exp_probs_b"}
)
_LLAMA4 = (
    _ATTENTION
    | _mlp("feed_forward")
    | _mlp("feed_forward.shared_expert", "_shexp")
    | _mlp("feed_forward.experts.*", "_exps")
    | {"feed_forward.router": "ffn_gate_inp"}
)
_PARTS: dict[str, dict[str, str]] = {
    "gemma3": _GEMMA,
    "qwen3_moe": _DENSE | _EXPERTS | {"mlp.gate": "ffn_gate_inp"},
    "mixtral": _ATTENTION
    | _mlp("block_sparse_moe.experts.*", "_exps", ("w1", "w3", "w2"))
    | {"block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp"},
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe_lite"), _DEEPSEEK),
    "llama4": _LLAMA4,
    "gpt_oss": _ATTENTION | {"mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks"},
}
_LEFT_OUT = "-"
_NUMBER = re.compile(r"\.(\d{1,4})(?=\.)")  # of a layer, of an expert
_SUFFIX = re.compile(r"(.*)[._]((?:weight|bias|blocks|scales|input_scale)\w*)")
# Prefixes of the text model's tensors, longest first: multimodal models nest it in one of several ways.
_PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.", "language_model.", "model.")
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq$")  # rather than stored


def canonical(key: str, config: ModelConfig) -> str | None:
    """The canonical name of a Hugging Face tensor; None if it is not needed, BadCheckpoint if it is unknown."""
    if isinstance(config, EncoderConfig):
        return encoder_tensor(key, config)
    numbers = [int(number) for number in _NUMBER.findall(key)]
    form = _form(_NUMBER.sub(".*", key), config.architecture, config.moe is not None)
    if form == _LEFT_OUT or (form.startswith("output.") and config.tie_embeddings):
        return None
    if form.startswith("blk.") and numbers and 0 <= numbers[0] - config.n_layers < config.n_mtp_layers:
        return None
    if not form or form.count("{}") != len(numbers):
        raise BadCheckpoint(f"tensor {key[:120]!r} has no place in a {config.architecture} model")
    return form.format(*numbers)


def module_name(name: str, config: ModelConfig) -> str:
    """The Hugging Face module of a canonical tensor `blk.N.….weight`, as patterns of quantized checkpoints name it."""
    if not name.startswith("blk."):
        return {"output": "lm_head", "output_norm": "model.norm"}.get(name.partition(".")[0], "model.embed_tokens")
    _, layer, part, *rest = name.split(".")
    parts = {canonical: module for module, canonical in _PARTS.get(config.architecture, _DENSE).items()}
    fused = {"ffn_gate_exps": "mlp.experts.*.gate_proj", "ffn_up_exps": "mlp.experts.*.up_proj"}
    module = parts.get(part) or fused.get(part, "mlp.experts.*.down_proj")
    return f"model.layers.{layer}.{module.replace('*', rest[0])}"


def hf_name(name: str, config: ModelConfig) -> str:
    """The tensor that `canonical` names so, in a checkpoint with a tensor for each expert."""
    separator = "_" if ".exp_probs_b." in name else "."  # `e_score_correction_bias` is a parameter of the router
    return module_name(name, config) + separator + name.rpartition(".")[2]


@lru_cache(4096)  # a model has few forms of names, and hundreds of thousands of names
def _form(key: str, architecture: str, moe: bool) -> str:
    """The canonical name of a key with `*` in place of numbers, with `{}` in theirs; "": it has none."""
    if VISION_TENSOR.match(key) or _COMPUTED.match(key):
        return _LEFT_OUT
    if key.startswith(("lm_head.", "language_model.lm_head.")):
        return "output." + key.partition("lm_head.")[2]
    inner = next((key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)), key)
    if not inner.startswith("layers.*."):
        return _TOP.get(inner, "")
    name = _layer_tensor(inner.removeprefix("layers.*."), architecture, moe)
    return f"blk.*.{name}".replace("*", "{}") if name else "blk."  # unknown, except in a prediction layer


def _layer_tensor(rest: str, architecture: str, moe: bool) -> str:
    parts = _PARTS.get(architecture, _DENSE)
    if rest in parts:  # GPT-OSS's sinks have no suffix
        return f"{parts[rest]}.weight"
    fused = _FUSED.get(rest.replace("feed_forward.", "mlp.")) if moe else None
    if fused is not None:
        return f"{fused}.weight"
    split = _SUFFIX.fullmatch(rest)
    if split is None:
        return ""
    part, suffix = split[1], split[2]
    name = _FUSED.get(part.replace("feed_forward.", "mlp.")) if moe else None
    name = name or parts.get(part)
    if name is None:
        return ""
    return f"{name}.*.{suffix}" if ".*." in part else f"{name}.{suffix}"
