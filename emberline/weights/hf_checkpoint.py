"""A Hugging Face folder as a checkpoint: config.json, and safetensors in one file or in shards."""

import math
import mmap
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from emberline.weights.encoder_checkpoint import EncoderConfig
from emberline.weights.expert_tensors import arrange
from emberline.weights.hf_config import read_config
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.quantization import join_quantized, read_quantization
from emberline.weights.task_config import read_json, task_of
from emberline.weights.tensor_names import canonical
from emberline.weights.tensor_shapes import check_tensors
from emberline.weights.tensors import FORMATS, Bytes, CheckpointFiles, FileLocation, Weight

KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Of the parts of quantized weights. Words of packed codes are bytes like others.
_QUANTIZED_KINDS = {"F8_E4M3": "fp8", "U8": "u8", "F8_E8M0": "u8", "I32": "u8", "I64": "i64"}
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
        kind = KINDS.get(tensor.dtype) or _QUANTIZED_KINDS.get(tensor.dtype)
        if kind is None:
            return  # rejected only when used, so that a folder may hold other tensors
        item_bytes = 4 if tensor.dtype == "I32" else FORMATS[kind].block_bytes
        if min(tensor.shape, default=1) < 1 or math.prod(tensor.shape) * item_bytes != end - begin:
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


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Tensors as dtype, shape and bytes, by name. The largest items come first, so that all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-len(item[1][2]) // max(1, math.prod(item[1][1])), item[0]))
    header, end = {}, 0
    for name, (dtype, shape, data) in ordered:
        header[name] = SafeTensor(dtype, shape, (end, end + len(data)))
        end += len(data)
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, (_, _, data) in ordered:
            file.write(data)


_INDEX = "model.safetensors.index.json"


def folder_config(folder: Path) -> ModelConfig:
    """The configuration without the weights, which alone tell whether there are biases."""
    document = read_json(folder, "config.json")
    config = read_config(document, read_json(folder, "generation_config.json", optional=True))
    read_quantization(document)  # rejects what is not supported before any file is read
    embeds = task_of(folder).task != "generate" and not isinstance(config, EncoderConfig)
    return msgspec.structs.replace(config, tie_embeddings=True) if embeds else config  # it needs no output matrix


def read_folder(folder: Path) -> CheckpointFiles:
    """Map a folder's safetensors files and check that they hold exactly one model's tensors."""
    config = folder_config(folder)
    quantization = read_quantization(read_json(folder, "config.json"))
    files = [SafetensorsFile.open(folder / name) for name in shard_names(folder)]
    found: dict[str, Weight] = {}
    for file in files:
        for weight in _weights(file, config):
            if weight.name in found:
                raise BadCheckpoint(f"tensor {weight.name!r} is in two files")
            found[weight.name] = weight
    weights = join_quantized(found, quantization)
    config = msgspec.structs.replace(config, qkv_bias="blk.0.attn_q.bias" in weights)
    check_tensors(config, weights)

    def close() -> None:
        for file in files:
            file.close()

    return CheckpointFiles(config, weights, close)


def shard_names(folder: Path) -> list[str]:
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
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise BadCheckpoint(
            f"{len(missing)} of the {len(names)} files that {_INDEX} names are not in {folder.name}: {shown};"
            " download them again"
        )
    return names


def _weights(file: SafetensorsFile, config: ModelConfig) -> list[Weight]:
    weights: list[Weight] = []
    for key, tensor in file.tensors.items():
        name = canonical(key, config)
        if name is None:
            continue
        kind = KINDS.get(tensor.dtype) or _QUANTIZED_KINDS.get(tensor.dtype)
        if kind is None or len(tensor.shape) > 4:
            known = ", ".join((*KINDS, *_QUANTIZED_KINDS))
            raise BadCheckpoint(f"tensor {key!r} is {tensor.dtype} {tensor.shape}, not up to 4-D of {known}")
        shape = tensor.shape or (1,)
        raw = file.bytes_of(tensor).reshape(shape[0], -1)
        if len(shape) == 4:  # GPT-OSS: the blocks of a row
            shape = (*shape[:2], shape[2] * shape[3])
        if tensor.dtype == "I32":
            shape = (*shape[:-1], 4 * shape[-1])
        shift = 1.0 if config.architecture == "gemma3" and name.endswith("norm.weight") else 0.0
        location = FileLocation(file.path, file.offset_of(tensor))
        weights += arrange(Weight(name, shape, kind, raw, shift=shift, location=location), config)
    return weights
