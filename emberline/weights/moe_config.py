"""Readers of config.json for the architectures with a mixture of experts: what each has beside the shared fields."""

from collections.abc import Callable

import msgspec

from emberline.weights.model_config import (
    MAX_HEAD_DIM,
    BadCheckpoint,
    Fields,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    QueryTemperature,
    yarn_scale,
)

MAX_EXPERTS = 4096
MAX_MTP_LAYERS = 16

Reader = Callable[[Fields, Fields, ModelConfig], ModelConfig]  # config.json, its RoPE parameters, the shared part


def latent_config(fields: Fields) -> LatentConfig:
    """The dimensions of multi-head latent attention."""
    rope = fields.whole("qk_rope_head_dim", most=MAX_HEAD_DIM)
    if rope % 2:
        raise fields.wrong("qk_rope_head_dim", "an even number")
    return LatentConfig(
        q_lora=fields.whole("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora=fields.whole("kv_lora_rank", most=MAX_HEAD_DIM),
        nope=fields.whole("qk_nope_head_dim", most=MAX_HEAD_DIM),
        rope=rope,
        v_dim=fields.whole("v_head_dim", most=MAX_HEAD_DIM),
    )


def deepseek(fields: Fields, rope: Fields, config: ModelConfig) -> ModelConfig:
    """DeepSeek-V3, Kimi K2 and K2.5, GLM-4.7-Flash: latent attention, shared and routed experts, sigmoid scores."""
    for key, supported in ("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"):
        if fields.text(key, supported) != supported:
            raise fields.wrong(key, repr(supported))
    if fields.flag("attention_bias", False):
        raise BadCheckpoint("config.json: 'attention_bias' is not supported with latent attention")
    width = fields.whole("moe_intermediate_size")
    moe = MoEConfig(
        layers=_sparse_layers(fields, config),
        experts=fields.whole("n_routed_experts", fields.get("num_local_experts", None), most=MAX_EXPERTS),
        top_k=fields.whole("num_experts_per_tok"),
        width=width,
        shared_width=fields.whole("n_shared_experts", 0, least=0, most=MAX_EXPERTS) * width,
        scoring="sigmoid",
        normalize=fields.flag("norm_topk_prob", True),
        scale=fields.positive("routed_scaling_factor", 1.0),
        n_groups=fields.whole("n_group", 1),
        top_groups=fields.whole("topk_group", 1),
        correction_bias=True,
        activation=config.activation,
    )
    all_dims = rope.positive("mscale_all_dim", 1.0)
    logits = yarn_scale(rope.positive("factor"), all_dims) ** 2 if rope.has("mscale_all_dim") else 1.0
    return msgspec.structs.replace(
        config,
        moe=moe,
        attention_scale=config.head_dim**-0.5 * logits,
        rope_interleaved=fields.flag("rope_interleave", True),
        n_mtp_layers=fields.whole("num_nextn_predict_layers", 0, least=0, most=MAX_MTP_LAYERS),
    )


def _sparse_layers(fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    types = fields.get("mlp_layer_types", None)
    if isinstance(types, list):
        if len(types) != config.n_layers or not set(types) <= {"dense", "sparse"}:
            raise fields.wrong("mlp_layer_types", "dense or sparse for every layer")
        return tuple(n for n, kind in enumerate(types) if kind == "sparse")
    first = fields.whole("first_k_dense_replace", 3 if config.architecture == "deepseek_v3" else 1, least=0)
    every = fields.whole("moe_layer_freq", 1)
    return tuple(n for n in range(first, config.n_layers) if n % every == 0)


def qwen3_moe(fields: Fields, rope: Fields, config: ModelConfig) -> ModelConfig:
    every, dense = fields.whole("decoder_sparse_step", 1), fields.whole_numbers("mlp_only_layers") or ()
    moe = MoEConfig(
        layers=tuple(n for n in range(config.n_layers) if n not in dense and (n + 1) % every == 0),
        experts=fields.whole("num_experts", fields.get("num_local_experts", None), most=MAX_EXPERTS),
        top_k=fields.whole("num_experts_per_tok"),
        width=fields.whole("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", False),
        activation=config.activation,
    )
    return msgspec.structs.replace(config, moe=moe, qk_norm=True)


def mixtral(fields: Fields, rope: Fields, config: ModelConfig) -> ModelConfig:
    moe = MoEConfig(
        layers=tuple(range(config.n_layers)),
        experts=fields.whole("num_local_experts", most=MAX_EXPERTS),
        top_k=fields.whole("num_experts_per_tok", 2),
        width=config.mlp_size,
        activation=config.activation,
    )
    return msgspec.structs.replace(config, moe=moe)


def llama4(fields: Fields, rope: Fields, config: ModelConfig) -> ModelConfig:
    """Three layers with RoPE and chunked attention for each layer without RoPE, whose attention is full."""
    layers = range(config.n_layers)
    rotated = fields.whole_numbers("no_rope_layers", most=1)
    if not rotated:
        interval = fields.whole("no_rope_layer_interval", 4)
        rotated = tuple(int((n + 1) % interval != 0) for n in layers)
    sparse = fields.whole_numbers("moe_layers")
    if sparse is None:
        step = fields.whole("interleave_moe_layer_step", 1)
        sparse = tuple(range(step - 1, config.n_layers, step))
    if len(rotated) < config.n_layers or any(n >= config.n_layers for n in sparse):
        raise BadCheckpoint(f"config.json: 'no_rope_layers' and 'moe_layers' do not fit {config.n_layers} layers")
    types = fields.get("layer_types", ["chunked_attention" if rotated[n] else "full_attention" for n in layers])
    if not isinstance(types, list) or len(types) != config.n_layers:
        raise fields.wrong("layer_types", "a list with an entry for every layer")
    chunk = fields.whole("attention_chunk_size", 8192)
    tuned = bool(fields.get("attn_temperature_tuning", True))  # 4 in released files
    temperature = QueryTemperature(fields.positive("attn_scale", 0.1), fields.whole("floor_scale", 8192))
    moe = MoEConfig(
        layers=tuple(sorted(set(sparse))),
        experts=fields.whole("num_local_experts", most=MAX_EXPERTS),
        top_k=fields.whole("num_experts_per_tok", 1),
        width=config.mlp_size,
        shared_width=config.mlp_size,
        scoring="sigmoid",
        normalize=False,
        weight_on_input=True,
        activation=config.activation,
    )
    return msgspec.structs.replace(
        config,
        moe=moe,
        mlp_size=fields.whole("intermediate_size_mlp", config.mlp_size),
        rope_interleaved=True,
        nope_layers=tuple(n for n in layers if not rotated[n]),
        chunks=tuple(chunk if kind == "chunked_attention" else None for kind in types),
        qk_l2_norm=fields.flag("use_qk_norm", True),
        query_temperature=temperature if tuned else None,
    )


def gpt_oss(fields: Fields, rope: Fields, config: ModelConfig) -> ModelConfig:
    for key, supported in ("swiglu_limit", 7.0), ("swiglu_alpha", 1.702):
        if fields.positive(key, supported) != supported:
            raise fields.wrong(key, str(supported))
    moe = MoEConfig(
        layers=tuple(range(config.n_layers)),
        experts=fields.whole("num_local_experts", most=MAX_EXPERTS),
        top_k=fields.whole("num_experts_per_tok", fields.get("experts_per_token", 4)),
        width=config.mlp_size,
        biases=True,
        activation="swiglu_clamped",
    )
    return msgspec.structs.replace(config, moe=moe, sinks=True, output_bias=fields.flag("attention_bias", True))


LATENT = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe_lite"})
MOE_READERS: dict[str, Reader] = {
    **dict.fromkeys(sorted(LATENT), deepseek),
    "llama4": llama4,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
}


def check_experts(moe: MoEConfig) -> None:
    """Reject numbers of experts that cannot be routed."""
    if moe.experts % moe.n_groups:
        raise BadCheckpoint(f"config.json: {moe.experts} experts do not divide into {moe.n_groups} groups")
    if moe.top_groups > moe.n_groups:
        raise BadCheckpoint(f"config.json: a token cannot take {moe.top_groups} of {moe.n_groups} groups of experts")
    eligible = moe.experts // moe.n_groups * moe.top_groups
    if moe.top_k > eligible:
        raise BadCheckpoint(f"config.json: a token cannot take {moe.top_k} of {eligible} experts")
    if moe.n_groups > 1 and moe.experts // moe.n_groups < 2:
        raise BadCheckpoint(f"config.json: {moe.n_groups} groups of {moe.experts} experts have fewer than two each")
