"""A GGUF file as a checkpoint: metadata to ModelConfig, tensors to canonical content."""

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from emberline.weights import rope_scaling as rope
from emberline.weights.checkpoint import Checkpoint
from emberline.weights.gguf import GGUFFile, GGUFTensor
from emberline.weights.model_config import MAX_HEAD_DIM, MAX_LAYERS, BadCheckpoint, Fields, ModelConfig
from emberline.weights.quantization import FORMATS
from emberline.weights.tensors import Place, Weight

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # a GGUF of Mistral calls itself llama
# Control tokens that end a turn, for files that name only one of several as eos.
END_TOKENS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>"}
)
_CONTROL = 3  # in tokenizer.ggml.token_type
_ROPE_FREQS = "rope_freqs.weight"
# Gemma 3's, which most of its files do not state: every sixth layer is global, the others rotate at this base.
_GEMMA3_PERIOD, _GEMMA3_LOCAL_THETA = 6, 10_000.0
_GEMMA3_27B_LAYERS = 62  # the one size whose queries are scaled by hidden / heads


def open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile.open(path)
    try:
        config = read_config(file)
        weights = {name: _weight(file, t, config) for name, t in file.tensors.items() if name != _ROPE_FREQS}
        return Checkpoint(config, weights, file.close)
    except BadCheckpoint as error:
        file.close()
        raise BadCheckpoint(f"{path.name}: {error}") from None


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's description; tensors tell what metadata leaves out."""
    metadata = Fields(file.metadata, "the GGUF metadata")
    arch = metadata.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise BadCheckpoint(f"architecture {arch!r} is not built; built are {', '.join(ARCHITECTURES)}")
    if "token_embd.weight" not in file.tensors:
        raise BadCheckpoint("tensor 'token_embd.weight' is missing")
    fields = metadata.under(f"{arch}.")
    n_heads, hidden = fields.whole("attention.head_count"), fields.whole("embedding_length")
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    config = ModelConfig(
        architecture=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        n_layers=fields.whole("block_count", most=MAX_LAYERS),
        n_heads=n_heads,
        n_kv_heads=fields.whole("attention.head_count_kv", n_heads),
        head_dim=fields.whole("attention.key_length", max(1, hidden // n_heads), most=MAX_HEAD_DIM),
        mlp_size=fields.whole("feed_forward_length"),
        context_len=fields.whole("context_length"),
        norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.positive("rope.freq_base", 10_000.0),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        eos_ids=_eos_ids(metadata, vocab_size),
        bos_id=metadata.optional_id("tokenizer.ggml.bos_token_id"),
    )
    _refuse_variants(metadata, fields, config)
    divisors, scale = rope.from_gguf(fields, config.rope_theta, config.head_dim, config.context_len)
    divisors = _rope_freqs(file, config.head_dim) or divisors
    config = msgspec.structs.replace(config, rope_divisors=divisors, rope_scale=scale)
    return _gemma3(fields, config) if arch == "gemma3" else config


def _refuse_variants(metadata: Fields, fields: Fields, config: ModelConfig) -> None:
    if metadata.whole("split.count", 1, least=0) > 1:
        raise BadCheckpoint("this is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")
    if fields.whole("expert_count", 0, least=0):
        raise BadCheckpoint("mixture-of-experts models are not built")
    if fields.whole("attention.value_length", config.head_dim) != config.head_dim:
        raise BadCheckpoint("keys and values of different widths are not built")
    if config.head_dim % 2 or fields.whole("rope.dimension_count", config.head_dim) != config.head_dim:
        raise BadCheckpoint("rotating only part of a head is not built")


def _gemma3(fields: Fields, config: ModelConfig) -> ModelConfig:
    window = fields.whole("attention.sliding_window")
    period = fields.whole("attention.sliding_window_pattern", _GEMMA3_PERIOD)
    return msgspec.structs.replace(
        config,
        windows=tuple(window if (i + 1) % period else None for i in range(config.n_layers)),
        local_rope_theta=fields.positive("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
        attention_scale=(
            (config.hidden_size / config.n_heads) ** -0.5 if config.n_layers == _GEMMA3_27B_LAYERS else None
        ),
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        post_norms=True,
    )


def _eos_ids(metadata: Fields, vocab_size: int) -> tuple[int, ...]:
    """Every end token that the model can write."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = {metadata.whole(key, least=0) for key in keys if metadata.has(key)}
    tokens, types = metadata.get("tokenizer.ggml.tokens", None), metadata.get("tokenizer.ggml.token_type", None)
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(tokens) == len(types):
        found.update(i for i in np.flatnonzero(types == _CONTROL).tolist() if tokens[i] in END_TOKENS)
    return tuple(sorted(token_id for token_id in found if token_id < vocab_size))


def _rope_freqs(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    """Llama 3's scaling, which GGUF carries as a tensor of divisors."""
    tensor = file.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.kind != "f32" or tensor.shape != (head_dim // 2,):
        raise BadCheckpoint(f"tensor {_ROPE_FREQS!r} is {tensor.kind} {tensor.shape}, not f32 ({head_dim // 2},)")
    divisors = file.bytes_of(tensor).view("<f4")
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise BadCheckpoint(f"tensor {_ROPE_FREQS!r} holds divisors that are not above zero")
    return tuple(divisors.tolist())


def _weight(file: GGUFFile, tensor: GGUFTensor, config: ModelConfig) -> Weight:
    if len(tensor.shape) > 2 or (len(tensor.shape) == 1 and FORMATS[tensor.kind].bits):
        raise BadCheckpoint(f"tensor {tensor.name!r} is {tensor.kind} {tensor.shape}: neither a matrix nor a vector")
    raw = file.bytes_of(tensor).reshape(tensor.shape[0], -1)
    order = _unpermuted(tensor, config) if config.architecture == "llama" else None
    return Weight(tensor.name, tensor.shape, tensor.kind, raw, order, place=Place(file.path, tensor.offset))


def _unpermuted(tensor: GGUFTensor, config: ModelConfig) -> NDArray[np.intp] | None:
    """The row order that undoes llama.cpp's: its llama files interleave the two halves of each Q and K head."""
    part = tensor.name.split(".")[2:3]
    n_heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(part[0] if part else "")
    if n_heads is None or tensor.shape[0] != n_heads * config.head_dim:
        return None  # not rotated, or of a wrong shape, which is refused later
    pairs = np.arange(tensor.shape[0]).reshape(n_heads, config.head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
