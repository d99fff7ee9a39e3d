"""A Hugging Face folder as a checkpoint: config.json, and safetensors in one file or in shards."""

import math
import mmap
import re
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from emberline.weights.encoder_checkpoint import ENCODERS, EncoderConfig, encoder_config, encoder_tensor
from emberline.weights.model_config import MAX_HEAD_DIM, MAX_LAYERS, BadCheckpoint, Fields, ModelConfig, rope_from_hf
from emberline.weights.task_config import read_json, task_of
from emberline.weights.tensors import FORMATS, Bytes, CheckpointFiles, FileLocation, Weight, check_tensors

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Defaults of transformers for Gemma 3, which the released config.json files omit.
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


def read_config(document: dict[str, object], generation: dict[str, object]) -> ModelConfig:
    """`document` is config.json; `generation` is generation_config.json, {} where there is none."""
    if document.get("model_type") in ENCODERS:
        return encoder_config(document)
    fields, arch = _text_fields(document)
    hidden, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", 128 if arch == "qwen3" else max(1, hidden // n_heads), most=MAX_HEAD_DIM)
    context_len = fields.whole("max_position_embeddings")
    full_rope, local_rope = _rope_fields(fields)
    theta = full_rope.positive("rope_theta", fields.get("rope_theta", 10_000.0))
    divisors, scale = rope_from_hf(full_rope, theta, head_dim, context_len)
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
        activation=_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=arch in ("qwen3", "gemma3"),
        eos_ids=_eos_ids(fields, Fields(generation, "generation_config.json"), fields.whole("vocab_size")),
        bos_id=fields.optional_id("bos_token_id"),
    )
    config = msgspec.structs.replace(config, windows=_windows(fields, config))
    return _gemma3(fields, local_rope, config) if arch == "gemma3" else config


def _text_fields(document: dict[str, object]) -> tuple[Fields, str]:
    """The text model's fields, with its family's defaults, and the architecture."""
    inner = document.get("text_config")
    merged = document | inner if isinstance(inner, dict) else document
    fields = Fields(merged, "config.json")
    arch = fields.text("model_type").removesuffix("_text")
    if arch not in ARCHITECTURES:
        raise BadCheckpoint(
            f"model type {arch!r} is not supported; supported are {', '.join((*ARCHITECTURES, *ENCODERS))}"
        )
    for key in (
        "quantization_config",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ):
        if fields.has(key) and fields.get(key) is not False:
            raise BadCheckpoint(f"config.json: {key!r} is not supported")
    if fields.positive("partial_rotary_factor", 1.0) != 1:
        raise BadCheckpoint("partial rotary embeddings are not supported")
    if arch != "gemma3":
        return fields, arch
    return Fields(_GEMMA3 | {k: v for k, v in merged.items() if v is not None}, "config.json"), arch


def _rope_fields(fields: Fields) -> tuple[Fields, Fields]:
    """RoPE parameters of the full-attention and of the sliding-window layers, in any of the three forms in use."""
    found = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(found, dict):
        raise fields.wrong("rope_scaling", "an object")
    full, local = found.get("full_attention", found), found.get("sliding_attention", {})
    if not isinstance(full, dict) or not isinstance(local, dict):
        raise fields.wrong("rope_parameters", "an object of objects")
    return Fields(full, "the rope parameters"), Fields(local, "the local rope parameters")


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
    if config.architecture in ("qwen2", "qwen3") and not fields.flag("use_sliding_window", False):
        return ()
    if isinstance(types, list):
        if len(types) != config.n_layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise fields.wrong("layer_types", "full_attention or sliding_attention for every layer")
        windowed = [kind == "sliding_attention" for kind in types]
    elif config.architecture == "gemma3":
        period = fields.whole("sliding_window_pattern", 6)
        windowed = [(layer + 1) % period != 0 for layer in layers]
    elif config.architecture == "mistral":
        windowed = [True] * config.n_layers
    elif config.architecture in ("qwen2", "qwen3"):
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
        post_norms=True,
    )


def _eos_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """EOS tokens of both files within the vocabulary: each file alone is wrong for some released model."""
    found: set[int] = set()
    for fields in config, generation:
        ids = fields.get("eos_token_id", [])
        for item in ids if isinstance(ids, list) else [ids]:
            found.add(Fields({"eos_token_id": item}, fields.where).whole("eos_token_id", least=0))
    return tuple(sorted(token_id for token_id in found if token_id < vocab_size))


KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafeTensor(msgspec.Struct, frozen=True):
    """An entry of the header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, name = path, path.name
        self._map = data
        self._start = 8 + int.from_bytes(data[:8], "little")
        if len(data) < 8 or self._start > min(len(data), MAX_HEADER_BYTES):
            raise BadCheckpoint(f"{name}: the header claims {self._start - 8} bytes of {len(data)}")
        try:
            header = msgspec.json.decode(data[8 : self._start], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            self.tensors = {key: msgspec.json.decode(raw, type=SafeTensor) for key, raw in header.items()}
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise BadCheckpoint(f"{name}: the header is not valid: {error}") from None
        for key, tensor in self.tensors.items():
            self._check(f"{name}: tensor {key!r}", tensor)

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        try:
            with path.open("rb") as file:
                return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise BadCheckpoint(f"{path.name} is missing") from None
        except ValueError as error:
            raise error if isinstance(error, BadCheckpoint) else BadCheckpoint(f"{path.name} is empty") from None

    def _check(self, what: str, tensor: SafeTensor) -> None:
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= len(self._map) - self._start:
            raise BadCheckpoint(f"{what} claims bytes {begin} to {end}: the file is truncated or its header is wrong")
        kind = KINDS.get(tensor.dtype)
        if kind is None:
            return  # rejected only when used, so that a folder may hold other tensors
        if min(tensor.shape, default=1) < 1 or math.prod(tensor.shape) * FORMATS[kind].block_bytes != end - begin:
            raise BadCheckpoint(f"{what} of shape {tensor.shape} does not take {end - begin} bytes")

    def offset_of(self, tensor: SafeTensor) -> int:
        """Where its bytes begin in the file."""
        return self._start + tensor.data_offsets[0]

    def bytes_of(self, tensor: SafeTensor) -> Bytes:
        begin, end = tensor.data_offsets
        return np.frombuffer(self._map, np.uint8, end - begin, self._start + begin)

    def close(self) -> None:
        """Unmap the file, unless views of it are still held: then it is unmapped with the last of them."""
        with suppress(BufferError):
            self._map.close()


_INDEX = "model.safetensors.index.json"
_TOP = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_PARTS = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER = re.compile(r"layers\.(\d{1,4})\.([a-z_.]+)\.(weight|bias)")
# Prefixes of the text model's tensors, longest first: multimodal Gemma 3 nests it in one of two ways.
_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
# Not part of the text model, or computed rather than stored.
_IGNORED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq$")


def folder_config(folder: Path) -> ModelConfig:
    """The configuration without the weights, which alone tell whether there are biases."""
    config = read_config(read_json(folder, "config.json"), read_json(folder, "generation_config.json", optional=True))
    embeds = task_of(folder).task != "generate" and not isinstance(config, EncoderConfig)
    return msgspec.structs.replace(config, tie_embeddings=True) if embeds else config  # it needs no output matrix


def read_folder(folder: Path) -> CheckpointFiles:
    """Map a folder's safetensors files and check that they hold exactly one model's tensors."""
    config = folder_config(folder)
    files = [SafetensorsFile.open(folder / name) for name in _shards(folder)]
    weights: dict[str, Weight] = {}
    for file in files:
        for weight in _weights(file, config):
            if weight.name in weights:
                raise BadCheckpoint(f"tensor {weight.name!r} is in two files")
            weights[weight.name] = weight
    config = msgspec.structs.replace(config, qkv_bias="blk.0.attn_q.bias" in weights)
    check_tensors(config, weights)

    def close() -> None:
        for file in files:
            file.close()

    return CheckpointFiles(config, weights, close)


def _shards(folder: Path) -> list[str]:
    """Names of the safetensors files, which must be in the folder itself."""
    if not (folder / _INDEX).is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(names) != 1:
            raise BadCheckpoint(f"{folder.name} has {len(names)} safetensors files and no {_INDEX}")
        return names
    weight_map = read_json(folder, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{_INDEX} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise BadCheckpoint(f"{_INDEX} names {str(name)[:80]!r}, not a safetensors file of this folder")
    return sorted(set(weight_map.values()))


def _weights(file: SafetensorsFile, config: ModelConfig) -> list[Weight]:
    weights = []
    for key, tensor in file.tensors.items():
        name = canonical(key, config)
        if name is None:
            continue
        kind = KINDS.get(tensor.dtype)
        if kind is None or not 1 <= len(tensor.shape) <= 2:
            raise BadCheckpoint(f"tensor {key!r} is {tensor.dtype} {tensor.shape}, not 1- or 2-D of {', '.join(KINDS)}")
        raw = file.bytes_of(tensor).reshape(tensor.shape[0], -1)
        shift = 1.0 if config.architecture == "gemma3" and name.endswith("norm.weight") else 0.0
        weights.append(
            Weight(name, tensor.shape, kind, raw, shift=shift, location=FileLocation(file.path, file.offset_of(tensor)))
        )
    return weights


def canonical(key: str, config: ModelConfig) -> str | None:
    """The canonical name of a Hugging Face tensor; None if it is not needed, BadCheckpoint if it is unknown."""
    if isinstance(config, EncoderConfig):
        return encoder_tensor(key, config)
    if _IGNORED.match(key):
        return None
    if key in ("lm_head.weight", "language_model.lm_head.weight"):
        return None if config.tie_embeddings else "output.weight"
    inner = next((key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)), key)
    layer = _LAYER.fullmatch(inner)
    if layer is None:
        name = _TOP.get(inner)
    else:
        part = (_GEMMA_PARTS if config.architecture == "gemma3" else _PARTS).get(layer[2])
        name = part and f"blk.{int(layer[1])}.{part}.{layer[3]}"
    if name is None:
        raise BadCheckpoint(f"tensor {key[:120]!r} has no place in a {config.architecture} model")
    return name
