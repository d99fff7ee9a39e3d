"""The tensors that a model of a given configuration has: canonical name and shape [out, in] of each."""

from collections.abc import Iterator, Mapping

from emberline.weights.encoder_checkpoint import EncoderConfig, encoder_shapes
from emberline.weights.model_config import BadCheckpoint, LatentConfig, ModelConfig, MoEConfig
from emberline.weights.tensors import Shape, Weight

NamedShape = tuple[str, Shape]


def expected_shapes(config: ModelConfig) -> Iterator[NamedShape]:
    if isinstance(config, EncoderConfig):
        yield from encoder_shapes(config)
        return
    hidden = config.hidden_size
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "output.weight", (config.vocab_size, hidden)
    moe_layers = config.moe_layers
    for layer in range(config.n_layers):
        for name, shape in _layer(config, config.moe if layer in moe_layers else None):
            yield f"blk.{layer}.{name}", shape


def _layer(config: ModelConfig, moe: MoEConfig | None) -> Iterator[NamedShape]:
    hidden = config.hidden_size
    yield "attn_norm.weight", (hidden,)
    yield from _grouped_query(config) if config.latent is None else _latent(config, config.latent)
    if config.post_norms:
        yield "post_attention_norm.weight", (hidden,)
        yield "post_ffw_norm.weight", (hidden,)
    yield "ffn_norm.weight", (hidden,)
    yield from _mlp(hidden, config.mlp_size) if moe is None else _experts(hidden, moe)


def _grouped_query(config: ModelConfig) -> Iterator[NamedShape]:
    hidden, q, kv = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    for part, rows in ("attn_q", q), ("attn_k", kv), ("attn_v", kv):
        yield f"{part}.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"{part}.bias", (rows,)
    yield "attn_output.weight", (hidden, q)
    if config.output_bias:
        yield "attn_output.bias", (hidden,)
    if config.qk_norm:
        yield "attn_q_norm.weight", (config.head_dim,)
        yield "attn_k_norm.weight", (config.head_dim,)
    if config.sinks:
        yield "attn_sinks.weight", (config.n_heads,)


def _latent(config: ModelConfig, latent: LatentConfig) -> Iterator[NamedShape]:
    hidden, q = config.hidden_size, config.n_heads * config.head_dim
    if latent.q_lora is None:
        yield "attn_q.weight", (q, hidden)
    else:
        yield "attn_q_a.weight", (latent.q_lora, hidden)
        yield "attn_q_a_norm.weight", (latent.q_lora,)
        yield "attn_q_b.weight", (q, latent.q_lora)
    yield "attn_kv_a_mqa.weight", (latent.kv_lora + latent.rope, hidden)
    yield "attn_kv_a_norm.weight", (latent.kv_lora,)
    yield "attn_kv_b.weight", (config.n_heads * (latent.nope + latent.v_dim), latent.kv_lora)
    yield "attn_output.weight", (hidden, config.n_heads * latent.v_dim)


def _mlp(hidden: int, width: int, suffix: str = "") -> Iterator[NamedShape]:
    yield f"ffn_gate{suffix}.weight", (width, hidden)
    yield f"ffn_up{suffix}.weight", (width, hidden)
    yield f"ffn_down{suffix}.weight", (hidden, width)


def _experts(hidden: int, moe: MoEConfig) -> Iterator[NamedShape]:
    yield "ffn_gate_inp.weight", (moe.experts, hidden)
    if moe.biases:
        yield "ffn_gate_inp.bias", (moe.experts,)
    if moe.correction_bias:
        yield "exp_probs_b.bias", (moe.experts,)
    if moe.shared_width:
        yield from _mlp(hidden, moe.shared_width, "_shexp")
    for expert in range(moe.experts):
        for part, rows, columns in ("gate", moe.width, hidden), ("up", moe.width, hidden), ("down", hidden, moe.width):
            yield f"ffn_{part}_exps.{expert}.weight", (rows, columns)
            if moe.biases:
                yield f"ffn_{part}_exps.{expert}.bias", (rows,)


def check_tensors(config: ModelConfig, found: Mapping[str, Weight]) -> None:
    """Reject a checkpoint whose tensors are missing, unexpected or misshapen: any would give wrong results."""
    n_experts = 0 if config.moe is None else 3 * config.moe.experts * len(config.moe.layers)
    if 9 * config.n_layers > len(found) or n_experts > len(found):  # bounds the loop below before it starts
        of_experts = f" with {config.moe.experts} experts each" if config.moe is not None else ""
        raise BadCheckpoint(f"{len(found)} tensors cannot make {config.n_layers} layers{of_experts}")
    if config.n_heads % config.n_kv_heads:
        raise BadCheckpoint(f"{config.n_heads} query heads cannot share {config.n_kv_heads} KV heads")
    expected = dict(expected_shapes(config))
    for name, shape in expected.items():
        if name not in found:
            raise BadCheckpoint(f"tensor {name!r} is missing")
        if found[name].shape != shape:
            raise BadCheckpoint(f"tensor {name!r} has shape {found[name].shape}, but the configuration implies {shape}")
    unexpected = next((name for name in found if name not in expected), None)
    if unexpected is not None:
        raise BadCheckpoint(f"tensor {unexpected!r} has no place in a {config.architecture} model")
