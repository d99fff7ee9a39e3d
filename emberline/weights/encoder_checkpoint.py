"""Encoders of the BERT family as checkpoints: their configuration, and the canonical names and shapes of their tensors.

Canonical names are those of GGUF (`token_embd`, `blk.N.attn_q` …); a classification head is `cls.dense` and `cls.out`.
"""

import re
from collections.abc import Iterator

from emberline.weights.model_config import MAX_HEAD_DIM, MAX_LAYERS, BadCheckpoint, Fields, ModelConfig
from emberline.weights.task_config import ENCODERS, MAX_LABELS

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_DISTILBERT = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}


class EncoderConfig(ModelConfig, frozen=True, kw_only=True):
    """An encoder: bidirectional attention, learned positions, LayerNorm behind each block."""

    position_offset: int = 0  # of the first token's position
    n_positions: int = 512  # rows of the position table
    n_token_types: int = 0
    n_labels: int = 0  # of the classification head; 0: there is none


def encoder_config(document: dict[str, object]) -> EncoderConfig:
    kind = str(document["model_type"])
    if kind == "distilbert":
        document = document | {name: document[key] for name, key in _DISTILBERT.items() if key in document}
    fields = Fields(document, "config.json")
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise BadCheckpoint("config.json: only absolute positions are supported")
    activation = fields.text("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise BadCheckpoint(f"activation {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    hidden, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if hidden % n_heads or hidden // n_heads > MAX_HEAD_DIM:
        raise fields.wrong("num_attention_heads", f"a divisor of {hidden}")
    offset = 0 if kind in ("bert", "distilbert") else fields.whole("pad_token_id", 1, least=0) + 1
    n_positions = fields.whole("max_position_embeddings", 512)
    if n_positions <= offset:
        raise fields.wrong("max_position_embeddings", f"above {offset}")
    return EncoderConfig(
        architecture=kind,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        n_layers=fields.whole("num_hidden_layers", most=MAX_LAYERS),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=hidden // n_heads,
        mlp_size=fields.whole("intermediate_size"),
        context_len=n_positions - offset,
        norm_eps=fields.positive("layer_norm_eps", 1e-12),
        rope_theta=1.0,
        activation=_ACTIVATIONS[activation],
        qkv_bias=True,
        position_offset=offset,
        n_positions=n_positions,
        n_token_types=0 if kind == "distilbert" else fields.whole("type_vocab_size", 2),
        n_labels=_n_labels(fields),
    )


def _n_labels(fields: Fields) -> int:
    names, architectures = fields.get("id2label", {}), fields.get("architectures", [])
    if not isinstance(architectures, list) or not any(
        str(name).endswith("ForSequenceClassification") for name in architectures
    ):
        return 0
    return len(names) if isinstance(names, dict) and names else fields.whole("num_labels", 2, most=MAX_LABELS)


_LAYER = re.compile(r"(?:encoder|transformer)\.layer\.(\d{1,4})\.([A-Za-z_0-9.]+)\.(weight|bias|gamma|beta)")
_PARTS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    # DistilBERT's
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
_TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_HEAD = {
    "pooler.dense": "cls.dense",  # BERT
    "pre_classifier": "cls.dense",  # DistilBERT
    "classifier.dense": "cls.dense",  # RoBERTa
    "classifier.out_proj": "cls.out",
    "classifier": "cls.out",
}
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
# The pooler where there is no classification head, heads for pretraining, and buffers.
_IGNORED = re.compile(r"cls\.|lm_head\.|vocab_(transform|layer_norm|projector)\.|.*\.(position|token_type)_ids$")


def encoder_tensor(key: str, config: EncoderConfig) -> str | None:
    """The canonical name of a Hugging Face tensor; None if it is not needed, BadCheckpoint if it is unknown."""
    inner = re.sub(r"^(bert|roberta|distilbert)\.", "", key)
    if _IGNORED.match(inner):
        return None
    if (layer := _LAYER.fullmatch(inner)) and layer[2] in _PARTS:
        return f"blk.{int(layer[1])}.{_PARTS[layer[2]]}.{_KINDS[layer[3]]}"
    part, _, kind = inner.rpartition(".")
    if part in _HEAD and kind in _KINDS:
        return f"{_HEAD[part]}.{kind}" if config.n_labels else None
    if part not in _TOP or kind not in _KINDS:
        raise BadCheckpoint(f"tensor {key[:120]!r} has no place in a {config.architecture} model")
    return f"{_TOP[part]}.{_KINDS[kind]}"


def encoder_shapes(config: EncoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape [out, in] of every tensor that an encoder of this configuration has."""
    hidden, mlp = config.hidden_size, config.mlp_size
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "position_embd.weight", (config.n_positions, hidden)
    if config.n_token_types:
        yield "token_types.weight", (config.n_token_types, hidden)
    norms = ["token_embd_norm"]
    for n in range(config.n_layers):
        for part, shape in (
            *((f"attn_{name}", (hidden, hidden)) for name in ("q", "k", "v", "output")),
            ("ffn_up", (mlp, hidden)),
            ("ffn_down", (hidden, mlp)),
        ):
            yield f"blk.{n}.{part}.weight", shape
            yield f"blk.{n}.{part}.bias", shape[:1]
        norms += [f"blk.{n}.attn_output_norm", f"blk.{n}.layer_output_norm"]
    for norm in norms:
        yield f"{norm}.weight", (hidden,)
        yield f"{norm}.bias", (hidden,)
    if config.n_labels:
        yield "cls.dense.weight", (hidden, hidden)
        yield "cls.dense.bias", (hidden,)
        yield "cls.out.weight", (config.n_labels, hidden)
        yield "cls.out.bias", (config.n_labels,)


__all__ = ["ENCODERS", "EncoderConfig", "encoder_config", "encoder_shapes", "encoder_tensor"]
