"""A Hugging Face config.json as a ModelConfig: what all architectures share, and the dense ones' particulars."""

import msgspec

from emberline.weights.encoder_checkpoint import ENCODERS, encoder_config
from emberline.weights.model_config import MAX_HEAD_DIM, MAX_LAYERS, BadCheckpoint, Fields, ModelConfig, rope_from_hf
from emberline.weights.moe_config import LATENT, MOE_READERS, Reader, check_experts, latent_config

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Architectures of language models that have another name inside a model with a vision tower.
_LANGUAGE_MODELS = {"kimi_k25": "kimi_k2", "qwen3_vl": "qwen3"}
# Defaults of transformers that released config.json files omit.
_GEMMA3: dict[str, object] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma3": _GEMMA3,
    "llama4": {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "head_dim": 128},
    "gpt_oss": {"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "head_dim": 64},
}


def read_config(document: dict[str, object], generation: dict[str, object]) -> ModelConfig:
    """`document` is config.json; `generation` is generation_config.json, {} where there is none."""
    if document.get("model_type") in ENCODERS:
        return encoder_config(document)
    fields, arch = _text_fields(document)
    hidden, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    latent = latent_config(fields) if arch in LATENT else None
    if latent is not None:
        head_dim = latent.nope + latent.rope
    else:
        head_dim = fields.whole("head_dim", 128 if arch == "qwen3" else max(1, hidden // n_heads), most=MAX_HEAD_DIM)
    context_len = fields.whole("max_position_embeddings")
    full_rope, local_rope = _rope_fields(fields)
    theta = full_rope.positive("rope_theta", fields.get("rope_theta", 10_000.0))
    divisors, scale = rope_from_hf(full_rope, theta, head_dim if latent is None else latent.rope, context_len)
    config = ModelConfig(
        architecture=arch,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        n_layers=fields.whole("num_hidden_layers", most=MAX_LAYERS),
        n_heads=n_heads,
        n_kv_heads=fields.whole("num_key_value_heads", n_heads),
        head_dim=head_dim,
        mlp_size=fields.whole("intermediate_size"),
        context_len=context_len,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_divisors=divisors,
        rope_scale=scale,
        mrope_sections=_mrope_sections(fields, full_rope, head_dim),
        activation=_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        latent=latent,
        eos_ids=_eos_ids(fields, Fields(generation, "generation_config.json"), fields.whole("vocab_size")),
        bos_id=fields.optional_id("bos_token_id"),
    )
    config = msgspec.structs.replace(config, windows=_windows(fields, config))
    config = _READERS[arch](fields, local_rope if arch == "gemma3" else full_rope, config)
    if config.n_heads % config.n_kv_heads:
        raise BadCheckpoint(f"config.json: {config.n_heads} query heads cannot share {config.n_kv_heads} KV heads")
    if config.moe is not None:
        check_experts(config.moe)
    return config


def _text_fields(document: dict[str, object]) -> tuple[Fields, str]:
    """The text model's fields, with its family's defaults, and the architecture."""
    inner = document.get("text_config")
    merged = document | inner if isinstance(inner, dict) else document
    if document.get("tie_word_embeddings") is not None:  # the output matrix is the outer model's
        merged = merged | {"tie_word_embeddings": document["tie_word_embeddings"]}
    fields = Fields(merged, "config.json")
    arch = fields.text("model_type").removesuffix("_text")
    arch = _LANGUAGE_MODELS.get(arch, arch)
    if arch not in _READERS:
        raise BadCheckpoint(f"model type {arch!r} is not supported; supported are {', '.join((*_READERS, *ENCODERS))}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.has(key) and fields.get(key) is not False:
            raise BadCheckpoint(f"config.json: {key!r} is not supported")
    if fields.positive("partial_rotary_factor", 1.0) != 1:
        raise BadCheckpoint("partial rotary embeddings are not supported")
    defaults = _DEFAULTS.get(arch, {})
    return Fields(defaults | {k: v for k, v in merged.items() if v is not None}, "config.json"), arch


def _rope_fields(fields: Fields) -> tuple[Fields, Fields]:
    """RoPE parameters of the full-attention and of the sliding-window layers, in any of the three forms in use."""
    found = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(found, dict):
        raise fields.wrong("rope_scaling", "an object")
    full, local = found.get("full_attention", found), found.get("sliding_attention", {})
    if not isinstance(full, dict) or not isinstance(local, dict):
        raise fields.wrong("rope_parameters", "an object of objects")
    return Fields(full, "the rope parameters"), Fields(local, "the local rope parameters")


def _mrope_sections(fields: Fields, rope: Fields, head_dim: int) -> tuple[int, ...]:
    """Frequencies of time, height and width, where each has every third (Qwen3-VL). Returns () if one position rotates
    them all."""
    if not fields.text("model_type").startswith("qwen3_vl"):
        return ()
    found = rope.get("mrope_section", [24, 20, 20])
    if not isinstance(found, list) or len(found) != 3 or not all(isinstance(n, int) and n > 0 for n in found):
        raise rope.wrong("mrope_section", "three numbers of frequencies")
    if sum(found) != head_dim // 2 or 3 * max(found[1:]) > head_dim // 2 + 1:
        raise rope.wrong("mrope_section", f"{head_dim // 2} frequencies in all, and every third at most")
    return tuple(found)


def _activation(fields: Fields) -> str:
    name = fields.text("hidden_activation", fields.get("hidden_act", "silu"))
    if name not in _ACTIVATIONS:
        raise BadCheckpoint(f"activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windows(fields: Fields, config: ModelConfig) -> tuple[int | None, ...]:
    """Each layer's sliding window: by `layer_types` where given, else by the family's own rule."""
    if not fields.has("sliding_window"):
        return ()
    window, layers = fields.whole("sliding_window"), range(config.n_layers)
    types = fields.get("layer_types", None)
    if config.architecture.startswith("qwen") and not fields.flag("use_sliding_window", False):
        return ()
    if isinstance(types, list):
        if len(types) != config.n_layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise fields.wrong("layer_types", "full_attention or sliding_attention for every layer")
        windowed = [kind == "sliding_attention" for kind in types]
    elif config.architecture == "gemma3":
        period = fields.whole("sliding_window_pattern", 6)
        windowed = [(layer + 1) % period != 0 for layer in layers]
    elif config.architecture == "gpt_oss":
        windowed = [layer % 2 == 0 for layer in layers]
    elif config.architecture in ("mistral", "mixtral"):
        windowed = [True] * config.n_layers
    elif config.architecture.startswith("qwen"):
        first = fields.whole("max_window_layers", 28, least=0)
        windowed = [layer >= first for layer in layers]
    else:
        return ()
    return tuple(window if inside else None for inside in windowed) if any(windowed) else ()


def _gemma3(fields: Fields, local_rope: Fields, config: ModelConfig) -> ModelConfig:
    return msgspec.structs.replace(
        config,
        local_rope_theta=local_rope.positive("rope_theta", fields.get("rope_local_base_freq", 10_000.0)),
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        qk_norm=True,
        post_norms=True,
    )


def _plain(fields: Fields, rope: Fields, config: ModelConfig) -> ModelConfig:
    return config


def _qwen3(fields: Fields, rope: Fields, config: ModelConfig) -> ModelConfig:
    return msgspec.structs.replace(config, qk_norm=True)


_READERS: dict[str, Reader] = {
    "llama": _plain,
    "mistral": _plain,
    "qwen2": _plain,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    **MOE_READERS,
}


def _eos_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """EOS tokens of both files within the vocabulary: each file alone is wrong for some released model."""
    found: set[int] = set()
    for fields in config, generation:
        ids = fields.get("eos_token_id", [])
        for item in ids if isinstance(ids, list) else [ids]:
            found.add(Fields({"eos_token_id": item}, fields.where).whole("eos_token_id", least=0))
    return tuple(sorted(token_id for token_id in found if token_id < vocab_size))
