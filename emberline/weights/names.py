"""Canonical tensor names with their shapes."""

from collections.abc import Iterator

from emberline.weights.config import ModelConfig
from emberline.weights.errors import BadCheckpoint
from emberline.weights.tensor import Weight

Shape = tuple[int, ...]


def shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Every tensor a model of this description has, and its shape [out, in]."""
    hidden = config.hidden_size
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "output.weight", (config.vocab_size, hidden)
    for layer in range(config.n_layers):
        for part, shape in _layer(config):
            yield f"blk.{layer}.{part}", shape


def _layer(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, q, kv = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "attn_norm.weight", (hidden,)
    for part, rows in ("attn_q", q), ("attn_k", kv), ("attn_v", kv):
        yield f"{part}.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"{part}.bias", (rows,)
    yield "attn_output.weight", (hidden, q)
    if config.qk_norm:
        yield "attn_q_norm.weight", (config.head_dim,)
        yield "attn_k_norm.weight", (config.head_dim,)
    if config.post_norms:
        yield "post_attention_norm.weight", (hidden,)
        yield "post_ffw_norm.weight", (hidden,)
    yield "ffn_norm.weight", (hidden,)
    yield "ffn_gate.weight", (config.mlp_size, hidden)
    yield "ffn_up.weight", (config.mlp_size, hidden)
    yield "ffn_down.weight", (hidden, config.mlp_size)


def check(config: ModelConfig, found: dict[str, Weight]) -> None:
    """Refuses a checkpoint with tensors missing, left over or of another shape: any would give wrong numbers."""
    if 9 * config.n_layers > len(found):  # bounds the loop below before it starts
        raise BadCheckpoint(f"{len(found)} tensors cannot make {config.n_layers} layers")
    if config.n_heads % config.n_kv_heads:
        raise BadCheckpoint(f"{config.n_heads} query heads cannot share {config.n_kv_heads} KV heads")
    wanted = dict(shapes(config))
    for name, shape in wanted.items():
        if name not in found:
            raise BadCheckpoint(f"tensor {name!r} is missing")
        if found[name].shape != shape:
            raise BadCheckpoint(f"tensor {name!r} has shape {found[name].shape}, the model's description wants {shape}")
    extra = [name for name in found if name not in wanted]
    if extra:
        raise BadCheckpoint(f"tensor {extra[0]!r} has no place in a {config.architecture} model")
