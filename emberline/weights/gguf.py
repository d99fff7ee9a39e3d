"""GGUF: the file format, and a GGUF file as a checkpoint.

Files are memory-mapped and not trusted: every count, length and offset is checked against the file before it is used.
"""

import math
import mmap
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from emberline.weights.model_config import MAX_HEAD_DIM, MAX_LAYERS, BadCheckpoint, Fields, ModelConfig, rope_from_gguf
from emberline.weights.tensor_shapes import check_tensors
from emberline.weights.tensors import FORMATS, Bytes, CheckpointFiles, FileLocation, Weight

# The value of a metadata key. Arrays of strings are lists, arrays of numbers and booleans numpy arrays.
Value = str | int | float | bool | list[str] | NDArray[np.generic]

MAGIC = b"GGUF"
MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_FLOAT_KINDS = {0: "f32", 1: "f16", 30: "bf16"}
_QUANTIZED_KINDS = {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 12: "q4_k", 13: "q5_k", 14: "q6_k"}
_KINDS = _FLOAT_KINDS | _QUANTIZED_KINDS
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # outermost first, as in numpy
    kind: str
    offset: int  # bytes from the start of the file
    nbytes: int


class _Cursor:
    """Reads the header sequentially; reading past the end raises BadCheckpoint."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0

    def take(self, n: int, what: str) -> int:
        """Advance by n bytes and return where they begin."""
        if n > self.size - self.at:
            raise BadCheckpoint(f"{what} at byte {self.at} needs {n} bytes, the file has {self.size - self.at} left")
        at, self.at = self.at, self.at + n
        return at

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def count(self, what: str, least_bytes: int) -> int:
        """A count of items of at least `least_bytes` each, rejected if the rest of the file cannot hold them."""
        n = self.u64(what)
        if n * least_bytes > self.size - self.at:
            raise BadCheckpoint(f"{what} is {n}, more than the rest of the file can hold")
        return n

    def string(self, what: str) -> str:
        n = self.u64(what)
        at = self.take(n, what)
        try:
            return self.data[at : at + n].decode()
        except UnicodeDecodeError:
            raise BadCheckpoint(f"{what} at byte {at} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.u32(f"the type of {key!r}")
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(kind, 1, key)[0].item()  # type: ignore[no-any-return]

    def _array(self, key: str) -> list[str] | NDArray[np.generic]:
        kind = self.u32(f"the item type of {key!r}")
        if kind == _STRING:
            return self._strings(self.count(f"the length of {key!r}", 8), key)
        if kind == _ARRAY:
            raise BadCheckpoint(f"metadata {key!r} is an array of arrays, which is not supported")
        return self._numbers(kind, self.count(f"the length of {key!r}", 1), key)

    def _strings(self, n: int, key: str) -> list[str]:
        """`string` n times, inlined: vocabularies have hundreds of thousands."""
        data, size, end = self.data, self.size, self.at
        strings: list[str] = []
        for _ in range(n):
            start = end + 8
            end = start + _U64.unpack_from(data, end)[0] if start <= size else start
            if end > size:
                raise BadCheckpoint(f"item {len(strings)} of {key!r} reaches past the end of the file")
            try:
                strings.append(data[start:end].decode())
            except UnicodeDecodeError:
                raise BadCheckpoint(f"item {len(strings)} of {key!r} is not UTF-8") from None
        self.at = end
        return strings

    def _numbers(self, kind: int, n: int, key: str) -> NDArray[np.generic]:
        if kind not in _SCALARS:
            raise BadCheckpoint(f"metadata {key!r} has unknown type {kind}")
        dtype = np.dtype("u1" if kind == _BOOL else _SCALARS[kind])
        at = self.take(n * dtype.itemsize, f"the value of {key!r}")
        numbers = np.frombuffer(self.data, dtype, n, at)
        return numbers != 0 if kind == _BOOL else numbers.copy()


class GGUFFile:
    """A memory-mapped GGUF file: its metadata, its tensor table, and views of the tensors' bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._map = data
        cursor = _Cursor(data)
        n_tensors, n_pairs = _preamble(cursor)
        self.metadata: dict[str, Value] = _metadata(cursor, n_pairs)
        self.tensors: dict[str, GGUFTensor] = _tensors(cursor, n_tensors, _alignment(self.metadata))

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # raised by mmap for an empty file
            raise BadCheckpoint(f"{path.name}: the file is empty") from None
        try:
            return cls(path, data)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{path.name}: {error}") from None

    def bytes_of(self, tensor: GGUFTensor) -> Bytes:
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)

    def close(self) -> None:
        """Unmap the file, unless views of it are still held: then it is unmapped with the last of them."""
        with suppress(BufferError):
            self._map.close()


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    at = cursor.take(4, "the magic number")
    if cursor.data[at : at + 4] != MAGIC:
        raise BadCheckpoint("not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.u32("the version")
    if version not in (2, 3):
        hint = " (a big-endian file)" if version and version % 0x1000000 == 0 else ""
        raise BadCheckpoint(f"GGUF version {version}{hint} is not supported, only 2 and 3, little-endian")
    # A tensor's entry takes at least 24 bytes, a metadata pair 13.
    return cursor.count("the tensor count", 24), cursor.count("the metadata count", 13)


def _metadata(cursor: _Cursor, n_pairs: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(n_pairs):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise BadCheckpoint(f"metadata {key!r} appears twice")
        metadata[key] = cursor.value(key)
    return metadata


def _alignment(metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise BadCheckpoint(f"general.alignment is {alignment!r}, not a power of two of at least 8")
    return alignment


def _tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    entries = [_entry(cursor) for _ in range(n_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in entries:
        offset = data_start + tensor.offset
        if tensor.name in tensors:
            raise BadCheckpoint(f"tensor {tensor.name!r} appears twice")
        if tensor.offset % alignment or offset + tensor.nbytes > cursor.size:
            raise BadCheckpoint(
                f"tensor {tensor.name!r} claims bytes {offset} to {offset + tensor.nbytes} of {cursor.size}:"
                " the file is truncated or its tensor table is wrong"
            )
        tensors[tensor.name] = tensor._replace(offset=offset)
    return tensors


def _entry(cursor: _Cursor) -> GGUFTensor:
    """One entry of the tensor table; its offset is still relative to the data section."""
    name = cursor.string("a tensor name")
    n_dims = cursor.u32(f"the dimensions of {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise BadCheckpoint(f"tensor {name!r} has {n_dims} dimensions")
    shape = tuple(cursor.u64(f"the shape of {name!r}") for _ in range(n_dims))[::-1]
    type_id = cursor.u32(f"the type of {name!r}")
    kind = _KINDS.get(type_id)
    if kind is None:
        raise BadCheckpoint(
            f"tensor {name!r} has unsupported type {type_id}; supported are {', '.join(_KINDS.values())}"
        )
    fmt = FORMATS[kind]
    if 0 in shape or shape[-1] % fmt.block:
        raise BadCheckpoint(f"tensor {name!r} of type {kind} has shape {shape}, not rows of whole blocks")
    nbytes = math.prod(shape) // fmt.block * fmt.block_bytes
    return GGUFTensor(name, shape, kind, cursor.u64(f"the offset of {name!r}"), nbytes)


# --- a GGUF file as a checkpoint: metadata to ModelConfig, tensors under canonical names ------------------------------

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3vl", "gemma3")  # GGUF files of Mistral say "llama"
_MOE_ARCHITECTURES = frozenset({"deepseek2", "kimi-k2", "glm4moe", "llama4", "qwen3moe", "gpt-oss"})
_NOT_FROM_GGUF = "is not read from GGUF; use the model's Hugging Face folder (safetensors)"
# Control tokens that end a turn, for files that declare only one of several as EOS.
END_TOKENS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>"}
)
_CONTROL = 3  # in tokenizer.ggml.token_type
_ROPE_FREQS = "rope_freqs.weight"
# Defaults of Gemma 3, which most of its files omit: every sixth layer has full attention, the others this rope theta.
_GEMMA3_PERIOD, _GEMMA3_LOCAL_THETA = 6, 10_000.0
_GEMMA3_27B_LAYERS = 62  # the only size whose attention scale is derived from hidden / heads


def read_gguf(path: Path) -> CheckpointFiles:
    """Map a GGUF file and check that it holds exactly one model's tensors."""
    file = GGUFFile.open(path)
    try:
        config = read_config(file)
        weights = {name: _weight(file, t, config) for name, t in file.tensors.items() if name != _ROPE_FREQS}
        check_tensors(config, weights)
    except BadCheckpoint as error:
        file.close()
        raise BadCheckpoint(f"{path.name}: {error}") from None
    return CheckpointFiles(config, weights, file.close)


def read_config(file: GGUFFile) -> ModelConfig:
    """The configuration from the metadata and, where that is silent, from the tensors present."""
    metadata = Fields(file.metadata, "the GGUF metadata")
    arch = metadata.text("general.architecture")
    if arch in _MOE_ARCHITECTURES:
        raise BadCheckpoint(f"architecture {arch!r} {_NOT_FROM_GGUF}")
    if arch not in ARCHITECTURES:
        raise BadCheckpoint(f"architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if "token_embd.weight" not in file.tensors:
        raise BadCheckpoint("tensor 'token_embd.weight' is missing")
    fields = metadata.under(f"{arch}.")
    n_heads, hidden = fields.whole("attention.head_count"), fields.whole("embedding_length")
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    config = ModelConfig(
        architecture="qwen3" if arch == "qwen3vl" else arch,
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
        mrope_sections=_mrope_sections(fields) if arch == "qwen3vl" else (),
    )
    _reject_unsupported(metadata, fields, config)
    divisors, scale = rope_from_gguf(fields, config.rope_theta, config.head_dim, config.context_len)
    divisors = _rope_freqs(file, config.head_dim) or divisors
    config = msgspec.structs.replace(config, rope_divisors=divisors, rope_scale=scale)
    return _gemma3(fields, config) if arch == "gemma3" else config


def _mrope_sections(fields: Fields) -> tuple[int, ...]:
    """Frequencies of time, height and width, of which the file has a fourth number that is 0."""
    found = fields.get("rope.dimension_sections")
    if not isinstance(found, np.ndarray) or len(found) < 3 or (found[:3] <= 0).any() or found[3:].any():
        raise fields.wrong("rope.dimension_sections", "three numbers of frequencies")
    return tuple(found[:3].tolist())


def _reject_unsupported(metadata: Fields, fields: Fields, config: ModelConfig) -> None:
    if metadata.whole("split.count", 1, least=0) > 1:
        raise BadCheckpoint("this is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")
    if fields.whole("expert_count", 0, least=0):
        raise BadCheckpoint(f"a mixture-of-experts model {_NOT_FROM_GGUF}")
    if fields.whole("attention.value_length", config.head_dim) != config.head_dim:
        raise BadCheckpoint("keys and values of different widths are not supported")
    if config.head_dim % 2 or fields.whole("rope.dimension_count", config.head_dim) != config.head_dim:
        raise BadCheckpoint("partial rotary embeddings are not supported")


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
    """All EOS tokens within the vocabulary."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = {metadata.whole(key, least=0) for key in keys if metadata.has(key)}
    tokens, types = metadata.get("tokenizer.ggml.tokens", None), metadata.get("tokenizer.ggml.token_type", None)
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(tokens) == len(types):
        found.update(i for i in np.flatnonzero(types == _CONTROL).tolist() if tokens[i] in END_TOKENS)
    return tuple(sorted(token_id for token_id in found if token_id < vocab_size))


def _rope_freqs(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    """The divisors of Llama 3's RoPE scaling, which GGUF stores as a tensor."""
    tensor = file.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.kind != "f32" or tensor.shape != (head_dim // 2,):
        raise BadCheckpoint(f"tensor {_ROPE_FREQS!r} is {tensor.kind} {tensor.shape}, not f32 ({head_dim // 2},)")
    divisors = file.bytes_of(tensor).view("<f4")
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise BadCheckpoint(f"tensor {_ROPE_FREQS!r} has divisors that are not above zero")
    return tuple(divisors.tolist())


def _weight(file: GGUFFile, tensor: GGUFTensor, config: ModelConfig) -> Weight:
    if len(tensor.shape) > 2 or (len(tensor.shape) == 1 and FORMATS[tensor.kind].bits):
        raise BadCheckpoint(f"tensor {tensor.name!r} is {tensor.kind} {tensor.shape}: neither a matrix nor a vector")
    raw = file.bytes_of(tensor).reshape(tensor.shape[0], -1)
    order = _unpermuted(tensor, config) if config.architecture == "llama" else None
    return Weight(tensor.name, tensor.shape, tensor.kind, raw, order, location=FileLocation(file.path, tensor.offset))


def _unpermuted(tensor: GGUFTensor, config: ModelConfig) -> NDArray[np.intp] | None:
    """The row order that undoes llama.cpp's permutation, which interleaves the two halves of each Q and K head."""
    part = tensor.name.split(".")[2:3]
    n_heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(part[0] if part else "")
    if n_heads is None or tensor.shape[0] != n_heads * config.head_dim:
        return None  # not rotated, or of a wrong shape, which `check_tensors` rejects
    return unpermuted_rows(tensor.shape[0], n_heads)


def unpermuted_rows(n_rows: int, n_heads: int) -> NDArray[np.intp]:
    """The row order that undoes llama.cpp's permutation of a matrix of so many heads."""
    return np.arange(n_rows).reshape(n_heads, -1, 2).swapaxes(1, 2).reshape(-1)
