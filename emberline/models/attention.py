"""Attention blocks, built from a layer's weights and the model's configuration."""

from emberline.kernels.backend import GroupedQueryAttention, LatentAttention, QueryTemperature
from emberline.models.layer_weights import LayerWeights


def grouped_query_attention(
    layer: LayerWeights,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    post_norm: str | None = None,
    rope: bool = True,
    l2_norm: bool = False,
    temperature: QueryTemperature | None = None,
    sinks: bool = False,
) -> GroupedQueryAttention:
    """The configuration says which layers have a window or chunks, and which biases the checkpoint has."""
    config, n = layer.config, layer.number
    return GroupedQueryAttention(
        norm=layer.norm("attn_norm"),
        qkv=layer.matrix("attn_q", "attn_k", "attn_v", bias=qkv_bias or config.qkv_bias),
        output=layer.matrix("attn_output", bias=config.output_bias),
        post_norm=None if post_norm is None else layer.norm(post_norm),
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale or config.head_dim**-0.5,
        eps=config.norm_eps,
        window=config.windows[n] if config.windows else None,
        chunk=config.chunks[n] if config.chunks else None,
        rope=rope,
        q_norm=layer.norm("attn_q_norm") if qk_norm else None,
        k_norm=layer.norm("attn_k_norm") if qk_norm else None,
        l2_norm=l2_norm,
        temperature=temperature,
        sinks=layer.vector("attn_sinks") if sinks else None,
    )


def latent_attention(layer: LayerWeights) -> LatentAttention:
    """Multi-head latent attention. The checkpoint's rows that RoPE rotates pair i with i + rope_dim / 2."""
    config, mla = layer.config, layer.config.latent
    low_rank = mla.q_lora is not None
    up = layer.tensor("attn_kv_b").view(config.n_heads, mla.nope + mla.v_dim, mla.kv_lora)
    return LatentAttention(
        norm=layer.norm("attn_norm"),
        qkv_a=layer.matrix("attn_q_a" if low_rank else "attn_q", "attn_kv_a_mqa"),
        q_norm=layer.norm("attn_q_a_norm") if low_rank else None,
        q_b=layer.matrix("attn_q_b") if low_rank else None,
        kv_norm=layer.norm("attn_kv_a_norm"),
        k_up=up[:, : mla.nope],
        v_up=up[:, mla.nope :],
        output=layer.matrix("attn_output"),
        heads=config.n_heads,
        q_lora=mla.q_lora,
        kv_lora=mla.kv_lora,
        nope_dim=mla.nope,
        rope_dim=mla.rope,
        v_dim=mla.v_dim,
        scale=config.attention_scale or (mla.nope + mla.rope) ** -0.5,
        eps=config.norm_eps,
    )
